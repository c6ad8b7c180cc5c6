"""``byteplane`` for zarr v3: after the ``bytes`` codec, in place of a compressor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.frame import ITEMSIZE_MAX
from stepwell.codecs.zarr_face import ZarrFace, configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.common import JSON

__all__ = ["BytePlaneCodec"]


@dataclass(frozen=True)
class BytePlaneCodec(ZarrFace):
    """Byte planes of a chunk; see ``stepwell.codecs.byteplane.BytePlane``.

    Parameters
    ----------
    itemsize : int, optional
        Bytes per element; taken from the array's dtype if not given.
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.byteplane"

    itemsize: int | None = None
    level: int = 1

    def __post_init__(self) -> None:
        BytePlane(1 if self.itemsize is None else self.itemsize, self.level)  # refuses what is wrong

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from its entry in zarr.json; ConfigError if that is wrong."""
        try:
            return cls(**configuration_of(data, cls.codec_name))  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(f"{cls.codec_name}: {error}") from error

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry for zarr.json."""
        configuration: dict[str, JSON] = {"itemsize": self.itemsize, "level": self.level}
        return {"name": self.codec_name, "configuration": configuration}

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Take the itemsize from the array's dtype where none was given."""
        if self.itemsize is not None:
            return self
        itemsize = array_spec.dtype.to_native_dtype().itemsize
        # Wide elements (strings, records) have no byte significance of their own.
        return replace(self, itemsize=itemsize if 1 <= itemsize <= ITEMSIZE_MAX else 1)

    def plain(self) -> BytePlane:
        """Make the numcodecs codec."""
        return BytePlane(1 if self.itemsize is None else self.itemsize, self.level)
