"""The kept elements of a sparse array as one byte each: a sign and 7 bits between the block's extremes.

Kept elements lie above a threshold, so a block of 256 of them spans only what is between its
smallest magnitude lo and its largest hi:

    scale = (hi - lo) / 127,  q = round((abs(x) - lo) / scale),  x^ = sign(x) * (lo + q * scale)

    abs(x - x^) <= (hi - lo) / 254   (and float32 rounding: an ulp of hi)

which beats ``hi / 254`` of a plain int8, and never turns a nonzero into zero or loses its sign.
A block with an infinity or a NaN is kept as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.codecs.buffers import Bytes
from stepwell.codecs.sparse_select import INFINITY_BITS, MAGNITUDE
from stepwell.errors import IntegrityError

__all__ = ["VALUE_BLOCK", "Quantized", "dequantize", "quantize", "quantized_count"]

Bits = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

VALUE_BLOCK = 256  # lo and scale then cost a quarter of a bit per element
_CHUNK = 1 << 16
_LEVELS = 127
_SMALLEST = np.float32(2.0**-149)
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Quantized:
    """Kept elements, quantized.

    Attributes
    ----------
    codes : ndarray, (n,), uint8
        Of all blocks that are finite, one after the other; the sign is the highest bit.
    scales : ndarray, (blocks, 2), float32
        lo and scale of every block; lo is NaN where the block is kept as it is.
    raw : ndarray, (m,), uint32
        The elements of the other blocks.
    error : float
        Largest abs(x - x^), measured and rounded up to a float32.
    """

    codes: Bytes
    scales: Floats
    raw: Bits
    error: float


def _rows(values: Bits) -> Bits:
    """Give whole blocks: the last element repeated changes no extreme."""
    missing = -values.size % VALUE_BLOCK
    if missing:
        values = np.concatenate([values, np.full(missing, values[-1], "<u4")])
    return values.reshape(-1, VALUE_BLOCK)


def quantize(bits: Bits) -> Quantized:
    """Quantize float32 bits of kept elements.

    Parameters
    ----------
    bits : ndarray, (n,), uint32
    """
    codes: list[Bytes] = [np.empty(0, np.uint8)]
    scales: list[Floats] = [np.empty((0, 2), "<f4")]
    raws: list[Bits] = [np.empty(0, "<u4")]
    error = 0.0
    with np.errstate(all="ignore"):  # 127 steps up from lo may pass the largest float by an ulp
        for start in range(0, bits.size, _CHUNK):
            some = bits[start : start + _CHUNK]
            rows = _rows(some)
            finite = (rows & np.uint32(MAGNITUDE)).max(axis=1) < INFINITY_BITS
            ends = np.repeat(finite, VALUE_BLOCK)[: some.size]
            code, pairs, worst = _quantize_rows(rows if finite.all() else rows[finite])
            table = np.full((rows.shape[0], 2), np.nan, "<f4")
            table[finite] = pairs
            codes.append(code[: int(np.count_nonzero(ends))])
            scales.append(table)
            raws.append(some[~ends])
            error = max(error, worst)
    # One step up: the float64 error need not be a float32.
    above = float(np.nextafter(np.float32(error), np.float32(np.inf))) if error else 0.0
    return Quantized(np.concatenate(codes), np.concatenate(scales), np.concatenate(raws), above)


def _quantize_rows(rows: Bits) -> tuple[Bytes, Floats, float]:
    if not rows.size:
        return np.empty(0, np.uint8), np.empty((0, 2), "<f4"), 0.0
    magnitudes = (rows & np.uint32(MAGNITUDE)).view(np.float32)
    low, high = magnitudes.min(axis=1, keepdims=True), magnitudes.max(axis=1, keepdims=True)
    # At least the smallest number: then equal elements divide by something, and give 0.
    scale = np.maximum((high - low) / np.float32(_LEVELS), _SMALLEST)
    steps = magnitudes - low
    steps /= scale
    np.rint(steps, out=steps)
    np.minimum(steps, np.float32(_LEVELS), out=steps)
    codes = steps.astype(np.uint8)
    codes |= (rows >> 24).astype(np.uint8) & np.uint8(0x80)
    pairs = np.concatenate([low, scale], axis=1)
    decoded = _magnitudes(codes, pairs)
    worst = np.abs(decoded.astype(np.float64) - magnitudes).max()
    return codes.reshape(-1), pairs, float(worst)


def _magnitudes(codes: Bytes, pairs: Floats) -> Floats:
    decoded = (codes & np.uint8(0x7F)).astype(np.float32)
    decoded *= pairs[:, 1:]
    decoded += pairs[:, :1]
    np.minimum(decoded, _LARGEST, out=decoded)
    return decoded


def quantized_count(scales: Floats, count: int) -> int:
    """Return how many of `count` elements are in quantized blocks.

    Parameters
    ----------
    scales : ndarray, (blocks, 2), float32
        As read; checked.

    Raises
    ------
    IntegrityError
        A scale that quantization does not make.
    """
    kept_as_is = np.isnan(scales[:, 0])
    pairs = scales[~kept_as_is]
    if not (np.isfinite(pairs) & (pairs >= 0)).all():
        raise IntegrityError("frame is damaged: a block has an impossible scale")
    missing = -count % VALUE_BLOCK if count and not kept_as_is[-1] else 0  # from the last block
    return VALUE_BLOCK * int(pairs.shape[0]) - missing


def dequantize(codes: Bytes, scales: Floats, raw: Bits, count: int) -> Bits:
    """Undo ``quantize``, within its error.

    Parameters
    ----------
    codes : ndarray, (n,), uint8
    scales : ndarray, (blocks, 2), float32
    raw : ndarray, (m,), uint32
    count : int
        ``n + m``.

    Returns
    -------
    ndarray, (count,), uint32
    """
    bits = np.empty(count, "<u4")
    code_at = raw_at = 0
    with np.errstate(all="ignore"):
        for start in range(0, count, _CHUNK):
            some = bits[start : start + _CHUNK]
            pairs = scales[start // VALUE_BLOCK : (start + some.size + VALUE_BLOCK - 1) // VALUE_BLOCK]
            finite = ~np.isnan(pairs[:, 0])
            ends = np.repeat(finite, VALUE_BLOCK)[: some.size]
            quantized = int(np.count_nonzero(ends))
            rows = codes[code_at : code_at + quantized]
            rows = np.concatenate([rows, np.zeros(-quantized % VALUE_BLOCK, np.uint8)])
            rows = rows.reshape(-1, VALUE_BLOCK)
            decoded = _magnitudes(rows, pairs[finite]).view(np.uint32)
            decoded |= (rows & np.uint8(0x80)).astype(np.uint32) << np.uint32(24)
            some[ends] = decoded.reshape(-1)[:quantized]
            some[~ends] = raw[raw_at : raw_at + some.size - quantized]
            code_at += quantized
            raw_at += some.size - quantized
    return bits
