"""``int4`` for zarr v3: lossy, after the ``bytes`` codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stepwell.codecs.int4 import Int4
from stepwell.codecs.zarr_blocks import BlockFace

__all__ = ["Int4Codec"]


@dataclass(frozen=True)
class Int4Codec(BlockFace):
    """4 bits and a scale per block; see ``stepwell.codecs.int4.Int4`` for the bound.

    Parameters
    ----------
    dtype : str, optional
        ``float32`` or ``bfloat16``; taken from the array if not given.
    block : int
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.int4"

    block: int = 256
    level: int = 1

    def plain(self) -> Int4:
        """Make the numcodecs codec."""
        return Int4(self.known_dtype(), self.block, self.level)
