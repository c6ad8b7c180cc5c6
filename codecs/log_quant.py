"""Quantization of second moments in a logarithmic domain: no nonzero becomes zero, or zero nonzero.

Linear quantization of second moments wrecks resumed training: the update divides by their root,
and small ones become zero. What counts is the error of log2(v).
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from stepwell.codecs.blocks import BlockCodec, Words
from stepwell.codecs.buffers import Bytes

__all__ = ["LogQuant"]

_DENORMALS = np.uint32(0x007FFFFF)
_NOT_FINITE = np.uint32(0x7F800000)  # and above it, with the sign bit, everything negative
_LARGEST = {"float32": np.int32(0x7F7FFFFF), "bfloat16": np.int32(0x7F7F0000)}
_BLOCKS = {8: 256, 4: 64}  # field.md 5.3: at 4 bits, 64 values to a range are worth their cost

# Two roundings of the distance times 1 / step and two of the distance restored, at most 2**-24 of
# 254 steps each.
_ARITHMETIC = 1 + 2.0**-12
_SLOPE_MAX = 1 / math.log(2)  # of log2(1 + f) over f in [0, 1), at f = 0


class LogQuant(BlockCodec):
    """Keep every value >= 0 as one of 255 or 15 steps on its block's logarithmic range. Lossy.

    The logarithm is the value's own bits, read as an integer b: b / 2**23 is log2(x) with straight
    lines between the powers of two (Mitchell 1962). Zero has a code of its own. Per block, with
    bits from lo to hi, both rounded outwards to multiples of 2**16::

        step = (hi - lo) / (n - 1)                n = 255 (8 bits) or 15 (4 bits)
        q = round((b - lo) / step)                b' = lo + round(q * step)

    and, since log2 is nowhere steeper than 1 / ln 2 of those lines::

        abs(log2(x') - log2(x)) <= (step / 2 * (1 + 2**-12) + r) / 2**23 / ln 2

    with r = 1 for float32 and r = 1 + 2**15 for bfloat16, which rounds once more. ``bound`` gives
    the largest of all blocks, in log2 units: 0.1 is 7 % of a value. Unlike a true logarithm it is
    the same on every machine, and it is fast.

    A block that holds anything negative (-0.0 too), a NaN, an infinity or a denormal is stored as
    it is. Zeros stay zeros, and what is not zero stays normal, finite and positive.

    Parameters
    ----------
    dtype : str
        ``float32`` or ``bfloat16``.
    bits : int
        8 or 4.
    block : int, optional
        Elements that share a range, a power of two from 16 to 4096. Default 256 for 8 bits, 64
        for 4 bits.
    level : int
        zstd level of codes that repeat.

    Notes
    -----
    The frame is described in ``stepwell.codecs.blocks``. The u32 of a block is lo / 2**16 in its
    lower half and (hi - lo) / 2**16 in its upper half; 0 for a block of zeros.

    Examples
    --------
    >>> import numpy as np
    >>> moments = np.geomspace(1e-12, 1e-6, 1000, dtype=np.float32)
    >>> codec = LogQuant(bits=8)
    >>> found = codec.decode(codec.encode(moments)).view(np.float32)
    >>> bool(np.abs(np.log2(found / moments)).max() <= codec.bound(moments))
    True
    """

    codec_id: ClassVar[str] = "stepwell.log_quant"
    kind: ClassVar[int] = 2
    raw_mark: ClassVar[int] = 0xFFFFFFFF
    bound_unit: ClassVar[str] = "log2"

    def __init__(
        self, dtype: str = "float32", bits: int = 8, block: int | None = None, level: int = 1
    ) -> None:
        if block is None:  # bits that are neither are refused below
            block = _BLOCKS[4] if bits == 4 else _BLOCKS[8]
        super().__init__(dtype, bits, block, level)
        self.bits = bits
        self._steps = np.float32((1 << bits) - 2)

    def get_config(self) -> dict[str, object]:
        """Return the JSON-able configuration."""
        return {
            "id": self.codec_id,
            "dtype": self.dtype,
            "bits": self.bits,
            "block": self.block,
            "level": self.level,
        }

    def _measure(self, words: Words) -> Words:
        # A zero wraps around to the top, so the smallest that remains is not zero.
        lowest = np.subtract(words, np.uint32(1)).min(axis=1)
        highest = words.max(axis=1)
        raw = (lowest < _DENORMALS) | (highest >= _NOT_FINITE)
        low = (lowest + np.uint32(1)) >> 16
        high = np.where(raw, np.uint32(0), highest + np.uint32(0xFFFF)) >> 16
        marks: Words = low | (high - low) << 16
        marks[raw] = self.raw_mark
        return marks

    def _quantize(self, words: Words, marks: Words, codes: Bytes) -> None:
        spans = self._spans(marks)
        inverse = np.zeros(spans.size, np.float32)
        np.divide(self._steps, spans, out=inverse, where=spans > 0)
        distances = np.subtract(words.view(np.int32), self._lows(marks)[:, None])
        steps = np.multiply(distances, inverse[:, None], dtype=np.float32)
        np.rint(steps, out=steps)
        # Distances of zeros, which are negative, and of raw rows, which may be anything.
        np.clip(steps, 0, self._steps, out=steps)
        np.copyto(codes, steps, casting="unsafe")
        np.add(codes, 1, out=codes)
        np.multiply(codes, np.not_equal(words, 0).view(np.uint8), out=codes)

    def _check(self, marks: Words) -> bool:
        low, span = marks & 0xFFFF, marks >> 16
        return bool(((marks == 0) | ((low >= 0x80) & (low + span <= 0x7F80))).all())

    def _restore(self, codes: Bytes, marks: Words, words: Words) -> None:
        steps = np.subtract(codes, np.float32(1), dtype=np.float32)
        np.multiply(steps, (self._spans(marks) / self._steps)[:, None], out=steps)
        np.rint(steps, out=steps)
        bits = words.view(np.int32)
        np.copyto(bits, steps, casting="unsafe")
        np.add(bits, self._lows(marks)[:, None], out=bits)
        np.minimum(bits, _LARGEST[self.dtype], out=bits)
        np.multiply(bits, np.not_equal(codes, 0).view(np.int8), out=bits)

    def _bound(self, marks: Words) -> float:
        step = float(self._spans(marks).max()) / float(self._steps)
        rounding = 1 + (1 << 15 if self.dtype == "bfloat16" else 0)
        return (step / 2 * _ARITHMETIC + rounding) / (1 << 23) * _SLOPE_MAX

    def _lows(self, marks: Words) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return ((marks & np.uint32(0x7FFF)) << 16).view(np.int32).reshape(-1)

    def _spans(self, marks: Words) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Return hi - lo of each block, exact in float32; nothing for a raw one."""
        spans = (marks & np.uint32(0xFFFF0000)).astype(np.float32)
        spans[marks == self.raw_mark] = 0
        return spans.reshape(-1)
