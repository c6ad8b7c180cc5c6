"""bfloat16 values times one factor: clipped gradients at half their bytes and less, exact.

A trainer that computes gradients in bfloat16 and clips them hands its optimizer float32 values
x = fl(q * c), with q in bfloat16 and one c for all. Their 24 significant bits look random, but
hold 8.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_apart, output_view
from stepwell.codecs.byteplane import check_level
from stepwell.codecs.factor import find_factor
from stepwell.codecs.planes import encoded_bytes_max
from stepwell.codecs.sections import (
    Composed,
    compose,
    composed_overhead,
    encode_section,
    open_section,
    read_composed,
    read_section,
)
from stepwell.errors import IntegrityError, UnsupportedValueError

__all__ = ["ScaledBf16", "factor_of"]

MAGIC = b"SWBF"
_PLAIN, _SCALED = 0, 1
_FACTOR = struct.Struct("<f")
_KINDS = {_PLAIN: (1, 0), _SCALED: (3, _FACTOR.size)}
_BLOCK = 1024  # elements that are stored as they are if one of them does not fit
_FLAGGED_MAX = 0.75  # of the blocks; with more, what the others save is hardly worth it
_CHUNK = 1 << 15  # elements: 128 KiB, so scratch stays in cache

_Words = npt.NDArray[np.uint32]
_Halves = npt.NDArray[np.uint16]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Split:
    """Elements as bfloat16 values, zero in the blocks that are flagged; those as they are."""

    halves: _Halves
    flags: _Flags
    raw: _Words


class ScaledBf16(Codec):  # type: ignore[misc]
    """Store float32 elements as bfloat16 values and one factor, where that gives every bit back.

    The factor is found from samples; with factor 1 these are plain bfloat16 values in float32.
    Every element is checked: a block of 1024 in which one does not come back bit for bit is stored
    as it is, and if that is more than three in four, or there is no factor, everything is (as
    ``byteplane`` would). Lossless for any elements of four bytes.

    Parameters
    ----------
    level : int
        zstd level of planes that repeat.

    Notes
    -----
    The frame is composed (``stepwell.codecs.sections``), with magic "SWBF". Kind 0 has no
    parameters and one section, the elements. Kind 1 has the factor, f32, as its parameter and the
    sections: the bfloat16 values; one bit per block, lowest first, set where it is stored as it
    is; these blocks, one after the other. All sections are byte planes.

    Examples
    --------
    >>> import numpy as np
    >>> values = (np.random.default_rng(0).standard_normal(4096, "f4").view("u4") & 0xFFFF0000).view("f4")
    >>> clipped = values * np.float32(0.3711)
    >>> frame = ScaledBf16().encode(clipped)
    >>> frame.nbytes < 0.5 * clipped.nbytes, np.array_equal(ScaledBf16().decode(frame).view("f4"), clipped)
    (True, True)
    """

    codec_id: ClassVar[str] = "stepwell.scaled_bf16"

    def __init__(self, level: int = 1) -> None:
        self.level = check_level(level)

    def size_bytes_max(self, raw_bytes: int) -> int:
        """Return the most bytes ``encode`` makes of `raw_bytes` bytes."""
        count = raw_bytes // 4
        flag_bytes = -(-count // (8 * _BLOCK))
        # Blocks stored as they are have zeros among the halves.
        sections = encoded_bytes_max(raw_bytes, 4) + encoded_bytes_max(2 * count, 2)
        return composed_overhead(3, _FACTOR.size) + sections + encoded_bytes_max(flag_bytes, 1)

    def encode(self, buf: BufferLike, *, hint: float | None = None) -> Bytes:
        """Encode whole elements.

        Parameters
        ----------
        buf : bytes-like or ndarray
            Not changed, not kept.
        hint : float, optional
            ``factor_of`` the frame encoded before: chunks of one update share their factor, and then
            it is not searched for.

        Returns
        -------
        ndarray, (n,), uint8
            The caller's own.

        Raises
        ------
        UnsupportedValueError
            Not whole elements, or no contiguous buffer.
        """
        raw = byte_view(buf)
        if raw.size % 4:
            raise UnsupportedValueError(f"{raw.size} bytes are not whole elements of float32")
        words: _Words = raw.view("<u4")
        factor = find_factor(words.view("<f4"), hint)
        split = None if factor is None else _split(words, factor)
        if factor is None or split is None:
            return compose(MAGIC, _PLAIN, raw.size, b"", [encode_section(words, self.level)])
        flags = np.packbits(split.flags, bitorder="little")
        sections = [encode_section(part, self.level) for part in (split.halves, flags, split.raw)]
        return compose(MAGIC, _SCALED, raw.size, _FACTOR.pack(factor), sections)

    def decode(
        self, buf: BufferLike, out: BufferLike | None = None, *, max_bytes: int | None = None
    ) -> Bytes:
        """Decode one frame; see ``stepwell.codecs.base.PlainCodec``."""
        data = byte_view(buf)
        frame = read_composed(data, MAGIC, _KINDS, max_bytes)
        if frame.length % 4:
            raise IntegrityError(f"frame of {frame.length} bytes is damaged: not whole elements of float32")
        factor = _factor(frame)
        itemsize = 4 if factor is None else 2
        opened = open_section(frame.sections[0], itemsize, frame.length, "values")
        if (0 if opened is None else opened.length) != frame.length // 4 * itemsize:
            raise IntegrityError(f"frame of {frame.length} bytes is damaged: not as many values")
        raw = np.empty(frame.length, np.uint8) if out is None else output_view(out, frame.length, "frame")
        check_apart(raw, data)
        if factor is None:
            return read_section(frame.sections[0], 4, frame.length, "values", raw)
        _join(_read_split(frame), factor, raw.view("<u4"))
        return raw


def factor_of(frame: BufferLike) -> float | None:
    """Return the factor of an encoded frame, None if it has none; the `hint` for the next.

    Raises
    ------
    IntegrityError
        Not a whole frame of this codec.
    """
    factor = _factor(read_composed(byte_view(frame), MAGIC, _KINDS))
    return None if factor is None else float(factor)


def _factor(frame: Composed) -> np.float32 | None:
    if frame.kind == _PLAIN:
        return None
    (factor,) = _FACTOR.unpack(frame.parameters)
    if not (math.isfinite(factor) and factor >= 2.0**-126):
        raise IntegrityError(f"frame of bfloat16 values is damaged: its factor is {factor}")
    return np.float32(factor)


def _split(words: _Words, factor: np.float32) -> _Split | None:
    """Divide by the factor and multiply again; None if too few blocks come back."""
    block_count = -(-words.size // _BLOCK)
    halves, flags = np.empty(words.size, np.uint16), np.empty(block_count, np.bool_)
    quotients = np.empty(min(_CHUNK, words.size), np.float32)
    wrong = np.zeros(min(_CHUNK, block_count * _BLOCK), np.bool_)
    flagged = 0
    # NaN, infinities and what overflows need no warning: bits are compared afterwards.
    with np.errstate(all="ignore"):
        for start in range(0, words.size, _CHUNK):
            chunk = words[start : start + _CHUNK]
            into, bad = halves[start : start + chunk.size], wrong[: chunk.size]
            _split_chunk(chunk, factor, quotients[: chunk.size], into, bad)
            wrong[chunk.size :] = False
            first = start // _BLOCK
            rows = -(-chunk.size // _BLOCK)
            flags[first : first + rows] = wrong[: rows * _BLOCK].reshape(rows, _BLOCK).any(axis=1)
            flagged += int(np.count_nonzero(flags[first : first + rows]))
            if flagged > _FLAGGED_MAX * block_count:
                return None
    raw = [np.zeros(0, np.uint32)]
    for index in np.flatnonzero(flags):
        block = slice(int(index) * _BLOCK, (int(index) + 1) * _BLOCK)
        raw.append(words[block])
        halves[block] = 0
    return _Split(halves, flags, np.concatenate(raw))


def _split_chunk(
    words: _Words, factor: np.float32, quotients: npt.NDArray[np.float32], halves: _Halves, wrong: _Flags
) -> None:
    bits = quotients.view(np.uint32)
    if factor == 1:  # bits only, so that NaN payloads stay as well
        np.right_shift(words, 16, out=bits)
    else:
        # The product with 1 / c is off by a few 2**-24: far from where rounding to 8 bits turns.
        np.multiply(words.view("<f4"), np.float32(1) / factor, out=quotients)
        np.add(bits, np.uint32(0x8000), out=bits)
        np.right_shift(bits, 16, out=bits)
    np.copyto(halves, bits, casting="unsafe")
    np.left_shift(bits, 16, out=bits)
    if factor != 1:
        np.multiply(quotients, factor, out=quotients)
    np.not_equal(bits, words, out=wrong)


def _read_split(frame: Composed) -> _Split:
    count = frame.length // 4
    block_count = -(-count // _BLOCK)
    packed = read_section(frame.sections[1], 1, -(-block_count // 8), "flags of blocks")
    bits = np.unpackbits(packed, bitorder="little").view(np.bool_)
    flags = bits[:block_count]
    if bits[block_count:].any():
        raise IntegrityError("frame is damaged: it flags blocks it does not have")
    raw_count = int(np.count_nonzero(flags)) * _BLOCK
    if block_count and flags[-1]:
        raw_count -= block_count * _BLOCK - count
    raw = read_section(frame.sections[2], 4, 4 * raw_count, "raw blocks").view("<u4")
    halves = read_section(frame.sections[0], 2, 2 * count, "values").view("<u2")
    return _Split(halves, flags, raw)


def _join(split: _Split, factor: np.float32, words: _Words) -> None:
    values = words.view("<f4")
    with np.errstate(all="ignore"):
        for start in range(0, words.size, _CHUNK):
            chunk = words[start : start + _CHUNK]
            np.copyto(chunk, split.halves[start : start + _CHUNK])
            np.left_shift(chunk, 16, out=chunk)
            if factor != 1:
                part = values[start : start + _CHUNK]
                np.multiply(part, factor, out=part)
    position = 0
    for index in np.flatnonzero(split.flags):
        block = words[int(index) * _BLOCK : (int(index) + 1) * _BLOCK]
        np.copyto(block, split.raw[position : position + block.size])
        position += block.size
