"""What the zarr v3 faces of our codecs share: bytes to bytes, in a thread, with bounded claims."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from math import prod
from typing import TYPE_CHECKING, ClassVar

from zarr.abc.codec import BytesBytesCodec

from stepwell.codecs.base import PlainCodec
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer
    from zarr.core.common import JSON

__all__ = ["ZarrFace", "configuration_of"]

# Codecs between the array and ours (a checksum, a compressor that could not help) may make a chunk
# somewhat larger than its elements; nothing sane makes it larger than this.
_SLACK_BYTES = 1 << 16
_SLACK_FRACTION = 8


class ZarrFace(BytesBytesCodec):
    """A numcodecs codec of ours as a zarr v3 bytes-to-bytes codec.

    Subclasses are frozen dataclasses whose fields are the codec's configuration.
    """

    is_fixed_size = False
    codec_name: ClassVar[str]

    @abstractmethod
    def plain(self) -> PlainCodec:
        """Make the codec; ConfigError if its configuration is wrong."""

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        limit = _decoded_bytes_max(chunk_spec)
        # zarr calls us on its event loop; the codec releases the GIL, so a thread is worth it.
        raw = await asyncio.to_thread(self.plain().decode, chunk_data.as_numpy_array(), max_bytes=limit)
        return chunk_spec.prototype.buffer.from_array_like(raw)

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        framed = await asyncio.to_thread(self.plain().encode, chunk_data.as_numpy_array())
        return chunk_spec.prototype.buffer.from_array_like(framed)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Not known before encoding."""
        raise NotImplementedError(f"{self.codec_name} makes chunks of variable size")


def _decoded_bytes_max(chunk_spec: ArraySpec) -> int | None:
    dtype = chunk_spec.dtype.to_native_dtype()
    if dtype.hasobject or dtype.kind == "T":  # elements of variable length: no bound is known
        return None
    chunk_bytes = prod(chunk_spec.shape) * dtype.itemsize
    return chunk_bytes + chunk_bytes // _SLACK_FRACTION + _SLACK_BYTES


def configuration_of(data: dict[str, JSON], name: str) -> dict[str, JSON]:
    """Return the configuration in a codec's entry of zarr.json.

    Raises
    ------
    ConfigError
        The entry is of another codec, or its configuration is no object.
    """
    configuration = data.get("configuration", {})
    if data.get("name") != name or not isinstance(configuration, dict):
        raise ConfigError(f"not a description of the codec {name!r}: {data!r}")
    return configuration
