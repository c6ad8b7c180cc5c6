"""What the zarr v3 faces of ``int8``, ``int4`` and ``log_quant`` share: the dtype of the array."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from stepwell.codecs.zarr_face import ZarrFace, configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.common import JSON

__all__ = ["BlockFace"]


@dataclass(frozen=True)
class BlockFace(ZarrFace):
    """A codec of blocks of values, after the ``bytes`` codec with ``endian: little``.

    Parameters
    ----------
    dtype : str, optional
        ``float32`` or ``bfloat16``; taken from the array if not given. bfloat16 stored as uint16
        bits must be named here.
    """

    dtype: str | None = None

    def __post_init__(self) -> None:
        # Refuses what is wrong.
        (self if self.dtype is not None else replace(self, dtype="float32")).plain()

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from its entry in zarr.json; ConfigError if that is wrong."""
        try:
            return cls(**configuration_of(data, cls.codec_name))  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(f"{cls.codec_name}: {error}") from error

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry for zarr.json."""
        configuration: dict[str, JSON] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.codec_name, "configuration": configuration}

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Take the dtype from the array where none was given; ConfigError if it is not quantized."""
        if self.dtype is not None:
            return self
        return replace(self, dtype=array_spec.dtype.to_native_dtype().name)

    def known_dtype(self) -> str:
        """Return the dtype; ConfigError if none is known yet."""
        if self.dtype is None:
            raise ConfigError(f"{self.codec_name}: no dtype is given and none was taken from an array")
        return self.dtype
