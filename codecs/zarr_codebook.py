"""``codebook`` for zarr v3: the serializer of a float32 array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stepwell.codecs.codebook import Codebook
from stepwell.codecs.zarr_array_face import ArrayFace

if TYPE_CHECKING:
    from zarr.core.common import JSON

__all__ = ["CodebookCodec"]


@dataclass(frozen=True)
class CodebookCodec(ArrayFace):
    """Indices into the codebooks of a chunk's blocks; see ``stepwell.codecs.codebook.Codebook``.

    Parameters
    ----------
    block : int
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.codebook"

    block: int = 128
    level: int = 1

    def __post_init__(self) -> None:
        self.plain()  # refuses what is wrong

    def configuration(self) -> dict[str, JSON]:
        """Return the fields."""
        return {"block": self.block, "level": self.level}

    def plain(self) -> Codebook:
        """Make the numcodecs codec."""
        return Codebook(self.block, self.level)
