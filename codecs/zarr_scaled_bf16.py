"""``scaled_bf16`` for zarr v3: in place of a compressor, after the ``bytes`` codec of a float32 array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from stepwell.codecs.scaled_bf16 import ScaledBf16
from stepwell.codecs.zarr_face import ZarrFace, configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.common import JSON

__all__ = ["ScaledBf16Codec"]


@dataclass(frozen=True)
class ScaledBf16Codec(ZarrFace):
    """Exact for any elements of four bytes; see ``stepwell.codecs.scaled_bf16.ScaledBf16``.

    Parameters
    ----------
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.scaled_bf16"

    level: int = 1

    def __post_init__(self) -> None:
        self.plain()  # refuses what is wrong

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from its entry in zarr.json; ConfigError if that is wrong."""
        try:
            return cls(**configuration_of(data, cls.codec_name))  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(f"{cls.codec_name}: {error}") from error

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry for zarr.json."""
        return {"name": self.codec_name, "configuration": {"level": self.level}}

    def plain(self) -> ScaledBf16:
        """Make the numcodecs codec."""
        return ScaledBf16(self.level)
