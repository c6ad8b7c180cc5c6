"""What the zarr v3 faces of codecs of float32 arrays share: a chunk to bytes, in a thread."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from math import prod
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
from zarr.abc.codec import ArrayBytesCodec

from stepwell.codecs.base import PlainCodec
from stepwell.codecs.zarr_face import configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDArrayLike, NDBuffer
    from zarr.core.common import JSON

__all__ = ["ArrayFace"]

_FLOAT32 = np.dtype(np.float32)


class ArrayFace(ArrayBytesCodec):
    """A codec of float32 elements as a zarr v3 array-to-bytes codec: the `serializer` of an array.

    Subclasses are frozen dataclasses whose fields are the codec's configuration.
    """

    is_fixed_size = False
    codec_name: ClassVar[str]

    @abstractmethod
    def plain(self) -> PlainCodec:
        """Make the codec; ConfigError if its configuration is wrong."""

    @abstractmethod
    def configuration(self) -> dict[str, JSON]:
        """Return the fields."""

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from its entry in zarr.json; ConfigError if that is wrong."""
        try:
            return cls(**configuration_of(data, cls.codec_name))
        except TypeError as error:
            raise ConfigError(f"{cls.codec_name}: {error}") from error

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry for zarr.json."""
        return {"name": self.codec_name, "configuration": self.configuration()}

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Refuse arrays of anything but float32 with a ConfigError."""
        dtype = array_spec.dtype.to_native_dtype()
        if dtype != _FLOAT32:
            raise ConfigError(f"{self.codec_name} serializes float32, not {dtype}")
        return self

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Not known before encoding."""
        raise NotImplementedError(f"{self.codec_name} makes chunks of variable size")

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        values = np.empty(prod(chunk_spec.shape), "<f4")
        # zarr calls us on its event loop; the codec releases the GIL, so a thread is worth it.
        await asyncio.to_thread(self.plain().decode, chunk_data.as_numpy_array(), values)
        chunk = cast("NDArrayLike", values.reshape(chunk_spec.shape))
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(chunk)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        values = np.ascontiguousarray(chunk_data.as_numpy_array(), "<f4")
        framed = await asyncio.to_thread(self.plain().encode, values)
        return chunk_spec.prototype.buffer.from_array_like(framed)
