"""``ordered_delta`` for zarr v3: differences along each chunk, after the ``bytes`` codec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.zarr_face import ZarrFace, configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.common import JSON

__all__ = ["OrderedDeltaCodec"]


@dataclass(frozen=True)
class OrderedDeltaCodec(ZarrFace):
    """Each element minus its predecessor in the chunk, in ordered-integer space.

    The first element's predecessor is 0. Follows the ``bytes`` codec with ``endian: little``:
    with big-endian bytes it stays exact but does not compress.

    Parameters
    ----------
    dtype : str, optional
        torch name without the prefix; taken from the array if not given. bfloat16 stored as
        uint16 bits must be named here.
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.ordered_delta"

    dtype: str | None = None
    level: int = 1

    def __post_init__(self) -> None:
        OrderedDelta("uint8" if self.dtype is None else self.dtype, self.level)  # refuses what is wrong

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
        """Take the dtype from the array where none was given; ConfigError if it has no differences."""
        if self.dtype is not None:
            return self
        return replace(self, dtype=array_spec.dtype.to_native_dtype().name)

    def plain(self) -> OrderedDelta:
        """Make the numcodecs codec."""
        if self.dtype is None:
            raise ConfigError(f"{self.codec_name}: no dtype is given and none was taken from an array")
        return OrderedDelta(self.dtype, self.level)
