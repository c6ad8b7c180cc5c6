"""``threshold_sparse`` for zarr v3: the serializer of a float32 array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.zarr_array_face import ArrayFace

if TYPE_CHECKING:
    from zarr.core.common import JSON

__all__ = ["ThresholdSparseCodec"]


@dataclass(frozen=True)
class ThresholdSparseCodec(ArrayFace):
    """The elements of a chunk above its threshold; see ``stepwell.codecs.threshold_sparse.ThresholdSparse``.

    Parameters
    ----------
    rate : float
    values : str
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.threshold_sparse"

    rate: float = 0.01
    values: str = "float32"
    level: int = 1

    def __post_init__(self) -> None:
        self.plain()  # refuses what is wrong

    def configuration(self) -> dict[str, JSON]:
        """Return the fields."""
        return {"rate": self.rate, "values": self.values, "level": self.level}

    def plain(self) -> ThresholdSparse:
        """Make the numcodecs codec."""
        return ThresholdSparse(self.rate, self.values, self.level)
