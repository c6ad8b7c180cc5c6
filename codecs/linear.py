"""Linear quantization per block: the arithmetic of ``int8`` and ``int4``.

Per block of float32 values x with a = max(abs(x)) and n levels to each side (127 or 7)::

    s = a / n         q = round(x / s)         x' = q * s

Everything is rounded to float32 as IEEE 754 says, so x' is the same on every machine. Source:
TierCheck's INT8; where we differ: a value that rounds to zero keeps its sign, for which the code
-n - 1, otherwise unused, stands.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from stepwell.codecs.blocks import BlockCodec, Words
from stepwell.codecs.buffers import Bytes

__all__ = ["LinearCodec"]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_DENORMALS = np.uint32(0x007FFFFF)
_MINUS_ZERO = np.uint32(0x80000000)
_RAW = 0x7FC00000  # the scale of a raw block: a NaN

# Blocks whose largest value is outside are stored raw: scales stay normal, n * s stays finite.
_LARGEST_MIN = np.float32(2.0**-118).view(np.uint32)
_LARGEST_MAX = np.float32(2.0**127).view(np.uint32)
_SCALE_MIN = np.float32(2.0**-126).view(np.uint32)

# Three roundings of x * (1 / s), at most 2**-24 of 127 steps each, and one of q * s.
_ARITHMETIC = 1 + 2.0**-13
_BFLOAT16_ROUNDING = 2.0**-8  # half a unit in the last of 8 bits


class LinearCodec(BlockCodec):
    """See the module; subclasses set `bits`."""

    kind: ClassVar[int] = 1
    raw_mark: ClassVar[int] = _RAW
    bits: ClassVar[int]
    bound_unit: ClassVar[str] = "absolute"

    def __init__(self, dtype: str = "float32", block: int = 256, level: int = 1) -> None:
        super().__init__(dtype, self.bits, block, level)
        self._levels = (1 << self.bits - 1) - 1

    def get_config(self) -> dict[str, object]:
        """Return the JSON-able configuration."""
        return {"id": self.codec_id, "dtype": self.dtype, "block": self.block, "level": self.level}

    def _measure(self, words: Words) -> Words:
        magnitudes = np.bitwise_and(words, _MAGNITUDE)
        largest = magnitudes.max(axis=1)
        # A zero wraps around to the top, so the smallest that remains is not zero.
        np.subtract(magnitudes, np.uint32(1), out=magnitudes)
        raw = magnitudes.min(axis=1) < _DENORMALS
        raw |= (largest > _LARGEST_MAX) | ((largest < _LARGEST_MIN) & (largest > 0))
        with np.errstate(invalid="ignore"):  # the largest is a signalling NaN
            scales = np.divide(largest.view(np.float32), np.float32(self._levels))
        marks: Words = scales.view(np.uint32)
        marks[raw] = _RAW
        return marks

    def _quantize(self, words: Words, marks: Words, codes: Bytes) -> None:
        scales = marks.view(np.float32)
        used = (marks != _RAW) & (marks != 0)
        inverse = np.zeros(scales.size, np.float32)
        np.divide(np.float32(1), scales, out=inverse, where=used)
        with np.errstate(invalid="ignore"):  # NaN and infinity times zero, in raw rows
            quotients = np.multiply(words.view(np.float32), inverse[:, None])
            if not used.all():
                quotients[marks == _RAW] = 0
        np.rint(quotients, out=quotients)
        np.copyto(codes.view(np.int8), quotients, casting="unsafe")
        minus_zero = np.equal(quotients.view(np.uint32), _MINUS_ZERO)
        np.copyto(codes.view(np.int8), np.int8(-self._levels - 1), where=minus_zero)

    def _check(self, marks: Words) -> bool:
        scale_max = (np.float32(2.0**127) / np.float32(self._levels)).view(np.uint32)
        return bool(((marks == 0) | ((marks >= _SCALE_MIN) & (marks <= scale_max))).all())

    def _restore(self, codes: Bytes, marks: Words, words: Words) -> None:
        if self.bits == 4:  # sign extension of the lower half
            np.bitwise_xor(codes, 8, out=codes)
            np.subtract(codes, 8, out=codes)
        signed, values = codes.view(np.int8), words.view(np.float32)
        np.copyto(values, signed)
        np.multiply(values, marks.view(np.float32)[:, None], out=values)
        np.copyto(values, np.float32(-0.0), where=np.equal(signed, np.int8(-self._levels - 1)))

    def _bound(self, marks: Words) -> float:
        scale = float(marks.max().view(np.float32))
        bound = scale / 2 * _ARITHMETIC
        if self.dtype == "bfloat16":
            bound += self._levels * scale * _ARITHMETIC * _BFLOAT16_ROUNDING
        return bound
