"""``int8`` for zarr v3: lossy, after the ``bytes`` codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stepwell.codecs.int8 import Int8
from stepwell.codecs.zarr_blocks import BlockFace

__all__ = ["Int8Codec"]


@dataclass(frozen=True)
class Int8Codec(BlockFace):
    """8 bits and a scale per block; see ``stepwell.codecs.int8.Int8`` for the bound.

    Parameters
    ----------
    dtype : str, optional
        ``float32`` or ``bfloat16``; taken from the array if not given.
    block : int
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.int8"

    block: int = 256
    level: int = 1

    def plain(self) -> Int8:
        """Make the numcodecs codec."""
        return Int8(self.known_dtype(), self.block, self.level)
