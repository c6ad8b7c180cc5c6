"""Blocks to indices of 4 bits and back: the kernel under ``codebook``.

Works on cache-sized runs of blocks with reused scratch. Every element is divided by its block's
largest magnitude and rounded to a grid; a table then gives the nearest entry of every grid point,
so that no element is compared with 16 entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.codecs.buffers import Bytes
from stepwell.codecs.codebook_fit import ENTRIES, GRID_HALF, GRID_POINTS, Shapes, fit_shapes

__all__ = ["RAW_CLASS", "BlockCoder", "decode_blocks"]

Bits = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

RAW_CLASS = 255
_CHUNK_ELEMENTS = 1 << 16  # 256 KiB; the places of a chunk are another half a MiB
_SAMPLE_BLOCKS = 2048  # a quarter of a million elements, about what fits the histograms well
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY_BITS = 0x7F800000


class BlockCoder:
    """Encodes one buffer; holds what came out and the scratch.

    Parameters
    ----------
    bits : ndarray, (n,), uint32
        float32 bits; not changed.
    block : int
        Elements per block, even.

    Attributes
    ----------
    classes : ndarray, (blocks,), uint8
        Which shape a block's codebook has; ``RAW_CLASS`` if it is kept raw.
    scales : ndarray, (blocks,), float32
        Largest magnitudes; 0 if kept raw.
    codes : list of ndarray, uint8
        Packed; the parts follow each other.
    raw : list of ndarray, uint32
        Elements of blocks kept raw.
    shapes : Shapes
    """

    def __init__(self, bits: Bits, block: int) -> None:
        self.bits, self.block = bits, block
        block_count = -(-bits.size // block)
        self.classes = np.empty(block_count, np.uint8)
        self.scales = np.empty(block_count, "<f4")
        self.codes: list[Bytes] = [np.empty(0, np.uint8)]
        self.raw: list[Bits] = [np.empty(0, "<u4")]
        rows = min(block_count, _CHUNK_ELEMENTS // block)
        self.floats = np.empty((rows, block), np.float32)
        self.words = np.empty((rows, block), np.uint32)
        self.places = np.empty((rows, block), np.int64)
        self.shapes = self._fit()
        self.seen = np.zeros(self.shapes.codes.size, np.bool_)

    def _fit(self) -> Shapes:
        whole = self.bits.size // self.block
        rows = self.bits[: whole * self.block].reshape(-1, self.block)
        # An odd stride does not fall in step with the rows of a matrix.
        sample = rows[:: -(-whole // _SAMPLE_BLOCKS) | 1]
        magnitudes = (sample & _MAGNITUDE).max(axis=1, initial=0)
        usable = (magnitudes > 0) & (magnitudes < _INFINITY_BITS)
        scales = magnitudes[usable].view(np.float32)
        return fit_shapes(sample[usable].view(np.float32) / scales[:, None])

    def run(self) -> None:
        """Encode all blocks, some at a time."""
        for start in range(0, self.bits.size, _CHUNK_ELEMENTS):
            some = self.bits[start : start + _CHUNK_ELEMENTS]
            missing = -some.size % self.block
            # Zeros are always representable and change no largest magnitude.
            padded = np.concatenate([some, np.zeros(missing, "<u4")]) if missing else some
            rows = padded.reshape(-1, self.block)
            first = start // self.block
            magnitudes = np.bitwise_and(rows, _MAGNITUDE, out=self.words[: len(rows)]).max(axis=1)
            raw = magnitudes >= _INFINITY_BITS
            scales = np.where(raw, 0, magnitudes).astype("<u4").view("<f4")
            self.scales[first : first + len(rows)] = scales
            classes = self.classes[first : first + len(rows)]
            if not raw.any():
                classes[:], codes = self._code(rows, scales)
            else:
                classes[:] = RAW_CLASS
                classes[~raw], codes = self._code(rows[~raw], scales[~raw])
                ends = np.repeat(raw, self.block)[: some.size]
                self.raw.append(some[ends])
            padding = missing if len(raw) and not raw[-1] else 0
            self.codes.append(codes[: -(-(2 * codes.size - padding) // 2)])

    def _code(self, rows: Bits, scales: Floats) -> tuple[npt.NDArray[np.uint8], Bytes]:
        """Return the classes of finite rows and their packed codes."""
        values, places = self.floats[: len(rows)], self.places[: len(rows)]
        divisors = np.where(scales > 0, scales, np.float32(1))
        np.divide(rows.view(np.float32), divisors[:, None], out=values)
        classes = np.zeros(len(rows), np.uint8)
        if self.shapes.limits.size:
            magnitudes = np.abs(values, out=self.words[: len(rows)].view(np.float32))
            means = magnitudes.mean(axis=1)
            classes[:] = np.searchsorted(self.shapes.limits, means, side="right")
        values *= np.float32(GRID_HALF)
        np.rint(values, out=values)
        np.copyto(places, values, casting="unsafe")
        places += (GRID_POINTS * classes.astype(np.int64) + GRID_HALF)[:, None]
        self.seen[places] = True
        codes = self.shapes.codes[places].reshape(-1).view("<u2")
        return classes, (codes | codes >> 4).astype(np.uint8)

    def radii(self) -> Floats:
        """Return, per shape, the most an element of its blocks lies from its entry, rounded up."""
        seen = self.seen.reshape(-1, GRID_POINTS)
        radii: Floats = np.where(seen, self.shapes.distances, 0.0).max(axis=1).astype("<f4")
        return np.nextafter(radii, np.float32(2))


def decode_blocks(
    codes: Bytes,
    raw: Bits,
    classes: npt.NDArray[np.uint8],
    scales: Floats,
    entries: Floats,
    block: int,
    out: Bits,
) -> None:
    """Decode all blocks, some at a time.

    Parameters
    ----------
    codes : ndarray, (n,), uint8
        Packed.
    raw : ndarray, (m,), uint32
    classes : ndarray, (blocks,), uint8
        Each a shape there is, or ``RAW_CLASS``.
    scales : ndarray, (blocks,), float32
    entries : ndarray, (shapes * 16,), float32
    block : int
    out : ndarray, (count,), uint32
        Written whole.
    """
    code_at = raw_at = 0
    rows_max = min(len(classes), _CHUNK_ELEMENTS // block)
    places = np.empty((rows_max, block), np.int64)
    for start in range(0, out.size, _CHUNK_ELEMENTS):
        some = out[start : start + _CHUNK_ELEMENTS]
        first, last = start // block, -(-(start + some.size) // block)
        quantized = classes[first:last] != RAW_CLASS
        rows = int(np.count_nonzero(quantized))
        packed = codes[code_at : code_at + rows * block // 2]
        if packed.size < rows * block // 2:  # the last block is shorter
            packed = np.concatenate([packed, np.zeros(rows * block // 2 - packed.size, np.uint8)])
        code_at += packed.size
        pairs = packed.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        place = places[:rows]
        np.copyto(place, pairs.view(np.uint8).reshape(-1, block))
        place += (ENTRIES * classes[first:last][quantized].astype(np.int64))[:, None]
        values = entries[place]
        values *= scales[first:last][quantized][:, None]
        decoded = values.reshape(-1).view(np.uint32)
        if rows == last - first:
            some[:] = decoded[: some.size]
            continue
        ends = np.repeat(quantized, block)[: some.size]
        own = int(np.count_nonzero(ends))
        some[ends] = decoded[:own]
        some[~ends] = raw[raw_at : raw_at + some.size - own]
        raw_at += some.size - own
