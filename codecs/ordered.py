"""Floats as ordered integers: the map, its inverse and zigzag coding, exact for every bit pattern.

The bits of a float, read as a sign and a magnitude and mapped to a two's complement integer,
keep the order of the floats, so neighbouring values are near each other whatever their exponent.
Arithmetic on them is modulo 2**bits, so -0.0, NaN payloads and infinities come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from stepwell.errors import ConfigError

__all__ = ["WORDS", "Signed", "Word", "swap_order", "undo_zigzag", "word_of", "zigzag"]

Signed = npt.NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True)
class Word:
    """How the elements of a dtype are differenced: as words of `itemsize` bytes, ordered if floats.

    A complex element is two words. Dtypes of one byte are plain integers: their floats have too
    few values for order to matter.
    """

    itemsize: int
    ordered: bool

    @property
    def signed(self) -> np.dtype[np.signedinteger]:
        """The integers the arithmetic is done in."""
        return np.dtype(f"<i{self.itemsize}")


_BYTE = Word(1, False)
WORDS: Mapping[str, Word] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "uint8", "int8", "float4_e2m1fn_x2"), _BYTE),
        **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), _BYTE),
        "float8_e8m0fnu": _BYTE,
        **dict.fromkeys(("uint16", "int16"), Word(2, False)),
        **dict.fromkeys(("uint32", "int32"), Word(4, False)),
        **dict.fromkeys(("uint64", "int64"), Word(8, False)),
        **dict.fromkeys(("float16", "bfloat16", "complex32"), Word(2, True)),
        **dict.fromkeys(("float32", "complex64"), Word(4, True)),
        **dict.fromkeys(("float64", "complex128"), Word(8, True)),
    }
)
"""By torch name without the prefix."""


def word_of(dtype: str) -> Word:
    """Return how elements of `dtype` are differenced; ConfigError if there is no way."""
    word = WORDS.get(dtype) if isinstance(dtype, str) else None
    if word is None:
        raise ConfigError(f"no difference is defined for dtype {dtype!r}; known are {', '.join(WORDS)}")
    return word


def swap_order(values: Signed, out: Signed) -> None:
    """Map float bits to ordered integers, or back: the map is its own inverse.

    A negative float has its magnitude bits inverted; the sign bit stays.
    """
    bits = 8 * values.dtype.itemsize
    np.right_shift(values, bits - 1, out=out)
    np.bitwise_and(out, (1 << (bits - 1)) - 1, out=out)
    np.bitwise_xor(out, values, out=out)


def zigzag(values: Signed, scratch: Signed) -> None:
    """Map small integers of either sign to small unsigned ones (0, -1, 1, -2, ...), in place."""
    np.right_shift(values, 8 * values.dtype.itemsize - 1, out=scratch)
    np.left_shift(values, 1, out=values)
    np.bitwise_xor(values, scratch, out=values)


def undo_zigzag(values: Signed, scratch: Signed) -> None:
    """Undo ``zigzag`` in place."""
    np.bitwise_and(values, 1, out=scratch)
    np.negative(scratch, out=scratch)
    unsigned = values.view(f"<u{values.dtype.itemsize}")
    np.right_shift(unsigned, 1, out=unsigned)
    np.bitwise_xor(values, scratch, out=values)
