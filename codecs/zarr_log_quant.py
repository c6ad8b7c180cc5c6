"""``log_quant`` for zarr v3: lossy, for values that are not negative, after the ``bytes`` codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.zarr_blocks import BlockFace

__all__ = ["LogQuantCodec"]


@dataclass(frozen=True)
class LogQuantCodec(BlockFace):
    """Steps on each block's logarithmic range; see ``stepwell.codecs.log_quant.LogQuant``.

    Parameters
    ----------
    dtype : str, optional
        ``float32`` or ``bfloat16``; taken from the array if not given.
    bits : int
    block : int, optional
    level : int
    """

    codec_name: ClassVar[str] = "stepwell.log_quant"

    bits: int = 8
    block: int | None = None
    level: int = 1

    def plain(self) -> LogQuant:
        """Make the numcodecs codec."""
        return LogQuant(self.known_dtype(), self.bits, self.block, self.level)
