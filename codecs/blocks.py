"""Blocks of floats as integer words: the frame and the loops under ``int8``, ``int4`` and ``log_quant``.

A bfloat16 is widened to the float32 of the same value, so that every codec sees one kind of word.
Chunks of 2**15 words keep scratch memory in cache; blocks never straddle chunks, and the last
block is padded with zeros. A block that a codec cannot keep is stored as it is.

The frame is composed (``stepwell.codecs.sections``), with magic "SWBQ" and the parameters
``dtype u8 (0 float32, 1 bfloat16) | bits u8 | block u16``. Its sections are

1. one u32 per block, what the codec needs to know of it;
2. the codes, one byte per element or two elements per byte, the earlier in the lower half;
3. the raw blocks, one after the other, the last padded to a whole block.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_apart, output_view
from stepwell.codecs.byteplane import check_level
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
from stepwell.errors import ConfigError, IntegrityError, UnsupportedValueError

__all__ = ["BLOCK_MAX", "BLOCK_MIN", "DTYPES", "BlockCodec", "Rows", "Words"]

Words = npt.NDArray[np.uint32]
"""(rows, block): bits of float32 values, one block per row."""

Rows = npt.NDArray[np.bool_]

MAGIC = b"SWBQ"
DTYPES = {"float32": 4, "bfloat16": 2}
BLOCK_MIN, BLOCK_MAX = 16, 4096
_PARAMETERS = struct.Struct("<BBH")
_CHUNK = 1 << 15  # words: 128 KiB, so the three or four scratch arrays of a call stay in cache


class BlockCodec(Codec):  # type: ignore[misc]
    """The shell of a codec that keeps each block of values as one u32 and a code per value.

    Subclasses bring the arithmetic: ``_measure``, ``_quantize``, ``_check``, ``_restore``,
    ``_bound``. Theirs are words of float32 values whatever the dtype.
    """

    kind: ClassVar[int]
    raw_mark: ClassVar[int]  # the u32 of a block stored as it is

    def __init__(self, dtype: str, bits: int, block: int, level: int) -> None:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if type(bits) is not int or bits not in (4, 8):
            raise ConfigError(f"bits must be 4 or 8, not {bits!r}")
        if type(block) is not int or not BLOCK_MIN <= block <= BLOCK_MAX or block & (block - 1):
            raise ConfigError(
                f"block must be a power of two from {BLOCK_MIN} to {BLOCK_MAX} elements, not {block!r}"
            )
        self.dtype = dtype
        self.block = block
        self.level = check_level(level)
        self._bits = bits

    @abstractmethod
    def _measure(self, words: Words) -> Words:
        """Return the u32 of each row; ``raw_mark`` where the row cannot be kept otherwise."""

    @abstractmethod
    def _quantize(self, words: Words, marks: Words, codes: Bytes) -> None:
        """Write the codes of each row, (rows, block); rows marked raw may hold anything."""

    @abstractmethod
    def _check(self, marks: Words) -> bool:
        """Return whether every u32 (none of them ``raw_mark``) is one that ``_measure`` may give."""

    @abstractmethod
    def _restore(self, codes: Bytes, marks: Words, words: Words) -> None:
        """Write the words of each row, (rows, block); rows marked raw are overwritten afterwards."""

    @abstractmethod
    def _bound(self, marks: Words) -> float:
        """Return the bound over blocks with these u32, none of them ``raw_mark``; at least one."""

    def bound(self, buf: BufferLike) -> float:
        """Return the largest error that encoding these raw bytes can make; the class has the formula."""
        raw = self._raw(buf)
        chunks = _Chunks(raw, self.dtype, self.block)
        marks = np.concatenate([np.zeros(0, np.uint32), *(self._measure(words) for _, words in chunks)])
        marks = marks[marks != self.raw_mark]
        return self._bound(marks) if marks.any() else 0.0

    def size_bytes_max(self, raw_bytes: int) -> int:
        """Return the most bytes ``encode`` makes of `raw_bytes` bytes."""
        itemsize = DTYPES[self.dtype]
        count = raw_bytes // itemsize
        blocks = -(-count // self.block)
        sections = encoded_bytes_max(4 * blocks, 4) + encoded_bytes_max(_code_bytes(count, self._bits), 1)
        sections += encoded_bytes_max(itemsize * self.block * blocks, itemsize)
        return composed_overhead(3, _PARAMETERS.size) + sections

    def encode(self, buf: BufferLike) -> Bytes:
        """Encode whole elements.

        Raises
        ------
        UnsupportedValueError
            Not whole elements, or no contiguous buffer.
        """
        raw = self._raw(buf)
        count = raw.size // DTYPES[self.dtype]
        marks = np.empty(-(-count // self.block), np.uint32)
        codes = np.empty(_code_bytes(count, self._bits), np.uint8)
        scratch = np.empty(min(_CHUNK, marks.size * self.block), np.uint8)
        raw_rows: list[Words] = []
        for start, words in _Chunks(raw, self.dtype, self.block):
            rows = slice(start // self.block, start // self.block + words.shape[0])
            marks[rows] = self._measure(words)
            raws = marks[rows] == self.raw_mark
            chunk_codes = scratch[: words.size].reshape(words.shape)
            if not raws.all():
                self._quantize(words, marks[rows], chunk_codes)
            if raws.any():
                raw_rows.append(words[raws])
                chunk_codes[raws] = 0
            size = min(words.size, count - start)
            if self._bits == 8:
                np.copyto(codes[start : start + size], scratch[:size])
            else:
                first, packed = start // 2, -(-size // 2)
                _pack(scratch[: 2 * packed], codes[first : first + packed])
        sections = [encode_section(part, self.level) for part in (marks, codes, self._narrow(raw_rows))]
        return compose(MAGIC, self.kind, raw.size, self._parameters(), sections)

    def decode(
        self, buf: BufferLike, out: BufferLike | None = None, *, max_bytes: int | None = None
    ) -> Bytes:
        """Decode one frame; see ``stepwell.codecs.base.PlainCodec``. Equal on every machine."""
        data = byte_view(buf)
        frame = read_composed(data, MAGIC, {self.kind: (3, _PARAMETERS.size)}, max_bytes)
        itemsize = DTYPES[self.dtype]
        if frame.parameters != self._parameters() or frame.length % itemsize:
            raise IntegrityError(
                f"frame of {frame.length} bytes with parameters {_PARAMETERS.unpack(frame.parameters)} "
                f"does not belong to {self!r}"
            )
        marks, codes, raw_rows = self._sections(frame, frame.length // itemsize)
        raw = np.empty(frame.length, np.uint8) if out is None else output_view(out, frame.length, "frame")
        check_apart(raw, data)
        self._restore_chunks(marks, codes, raw_rows, raw)
        return raw

    def _raw(self, buf: BufferLike) -> Bytes:
        raw = byte_view(buf)
        if raw.size % DTYPES[self.dtype]:
            raise UnsupportedValueError(f"{raw.size} bytes are not whole elements of {self.dtype}")
        return raw

    def _parameters(self) -> bytes:
        return _PARAMETERS.pack(list(DTYPES).index(self.dtype), self._bits, self.block)

    def _narrow(self, rows: list[Words]) -> npt.NDArray[np.unsignedinteger]:
        words = np.concatenate([np.zeros(0, np.uint32), *(part.reshape(-1) for part in rows)])
        return words if self.dtype == "float32" else (words >> 16).astype(np.uint16)

    def _sections(self, frame: Composed, count: int) -> tuple[Words, Bytes, npt.NDArray[np.unsignedinteger]]:
        blocks = -(-count // self.block)
        itemsize = DTYPES[self.dtype]
        # The codes are what is largest: their claim is checked before anything is allocated.
        opened = open_section(frame.sections[1], 1, _code_bytes(count, self._bits), "codes")
        if (0 if opened is None else opened.length) != _code_bytes(count, self._bits):
            raise IntegrityError(f"codes of a frame of {count} elements are damaged: not one for each")
        marks = read_section(frame.sections[0], 4, 4 * blocks, "blocks").view("<u4")
        raw_blocks = int(np.count_nonzero(marks == self.raw_mark))
        if not self._check(marks[marks != self.raw_mark]):
            raise IntegrityError("frame is damaged: what it says of a block is impossible")
        raw_bytes = raw_blocks * self.block * itemsize
        raw_rows = read_section(frame.sections[2], itemsize, raw_bytes, "raw blocks").view(f"<u{itemsize}")
        codes = read_section(frame.sections[1], 1, _code_bytes(count, self._bits), "codes")
        return marks, codes, raw_rows.reshape(raw_blocks, self.block)

    def _restore_chunks(
        self, marks: Words, codes: Bytes, raw_rows: npt.NDArray[np.unsignedinteger], raw: Bytes
    ) -> None:
        target = raw.view(f"<u{DTYPES[self.dtype]}")
        size_max = min(_CHUNK, marks.size * self.block)
        scratch, words = np.zeros(size_max, np.uint8), np.empty(size_max, np.uint32)
        raw_start = 0
        for start in range(0, target.size, _CHUNK):
            size = min(_CHUNK, target.size - start)
            rows = slice(start // self.block, -(-(start + size) // self.block))
            shape = (rows.stop - rows.start, self.block)
            padded = shape[0] * self.block
            if self._bits == 8:
                np.copyto(scratch[:size], codes[start : start + size])
            else:
                packed = -(-size // 2)
                _unpack(codes[start // 2 : start // 2 + packed], scratch[: 2 * packed])
            block_words = words[:padded].reshape(shape)
            self._restore(scratch[:padded].reshape(shape), marks[rows], block_words)
            if self.dtype == "bfloat16":
                _round_to_upper_half(block_words)
            raws = marks[rows] == self.raw_mark
            raw_count = int(np.count_nonzero(raws))
            if raw_count:
                block_words[raws] = raw_rows[raw_start : raw_start + raw_count]
                raw_start += raw_count
            np.copyto(target[start : start + size], words[:size], casting="unsafe")


class _Chunks:
    """The words of a buffer, chunk by chunk, each valid until the next; holds the scratch of one call."""

    def __init__(self, raw: Bytes, dtype: str, block: int) -> None:
        self._raw = raw.view(f"<u{DTYPES[dtype]}")
        self._block = block
        self._scratch = np.empty(0, np.uint32)

    def __iter__(self) -> Iterator[tuple[int, Words]]:
        for start in range(0, self._raw.size, _CHUNK):
            part = self._raw[start : start + _CHUNK]
            yield start, self._words(part)

    def _words(self, part: npt.NDArray[np.unsignedinteger]) -> Words:
        if part.dtype.itemsize == 4 and part.size % self._block == 0:
            return part.reshape(-1, self._block)
        padded = -(-part.size // self._block) * self._block
        if self._scratch.size < padded:
            self._scratch = np.empty(padded, np.uint32)
        words = self._scratch[:padded]
        np.copyto(words[: part.size], part)
        words[part.size :] = 0
        if part.dtype.itemsize == 2:
            np.left_shift(words, 16, out=words)
        return words.reshape(-1, self._block)


def _code_bytes(count: int, bits: int) -> int:
    return count if bits == 8 else -(-count // 2)


def _pack(codes: Bytes, out: Bytes) -> None:
    """Pack pairs of codes; changes `codes`. Only the lower four bits of each count."""
    np.bitwise_and(codes, 15, out=codes)
    pairs = codes.view("<u2")
    np.bitwise_or(pairs, pairs >> 4, out=pairs)
    np.copyto(out, pairs, casting="unsafe")


def _unpack(packed: Bytes, out: Bytes) -> None:
    pairs = out.view("<u2")
    np.copyto(pairs, packed)
    np.bitwise_or(pairs, pairs << 4, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)


def _round_to_upper_half(words: Words) -> None:
    """Round float32 words to the nearest bfloat16, ties to even, and leave it in the lower half."""
    odd = np.right_shift(words, 16)
    np.bitwise_and(odd, 1, out=odd)
    np.add(odd, 0x7FFF, out=odd)
    np.add(words, odd, out=words)
    np.right_shift(words, 16, out=words)
