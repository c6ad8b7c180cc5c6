"""``xor_delta`` for zarr v3: bitwise differences along each chunk, after the ``bytes`` codec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from stepwell.codecs.xor_delta import XorDelta
from stepwell.codecs.zarr_face import ZarrFace, configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.common import JSON

__all__ = ["XorDeltaCodec"]


@dataclass(frozen=True)
class XorDeltaCodec(ZarrFace):
    """Each element combined bitwise with its predecessor in the chunk; that of the first is 0.

    Parameters
    ----------
    dtype : str, optional
        torch name without the prefix; taken from the array if not given.
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.xor_delta"

    dtype: str | None = None
    level: int = 1

    def __post_init__(self) -> None:
        XorDelta("uint8" if self.dtype is None else self.dtype, self.level)  # refuses what is wrong

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from its entry in zarr.json; ConfigError if that is wrong."""
        try:
            return cls(**configuration_of(data, cls.codec_name))  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(f"{cls.codec_name}: {error}") from error

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry for zarr.json."""
        configuration: dict[str, JSON] = {"dtype": self.dtype, "level": self.level}
        return {"name": self.codec_name, "configuration": configuration}

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Take the dtype from the array where none was given; ConfigError if it has no words."""
        if self.dtype is not None:
            return self
        return replace(self, dtype=array_spec.dtype.to_native_dtype().name)

    def plain(self) -> XorDelta:
        """Make the numcodecs codec."""
        if self.dtype is None:
            raise ConfigError(f"{self.codec_name}: no dtype is given and none was taken from an array")
        return XorDelta(self.dtype, self.level)
