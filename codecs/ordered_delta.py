"""Differences of floats as ordered integers: exact for every bit pattern, small where values are near.

Elements are mapped to ordered integers (``stepwell.codecs.ordered``) and differenced modulo
2**bits; zigzag coding moves the sign to the lowest bit, and byte planes store the rest.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from stepwell.codecs.buffers import BufferLike, Bytes
from stepwell.codecs.byteplane import check_level
from stepwell.codecs.difference import Difference, encode_against, open_difference
from stepwell.codecs.frame import BLOCK_LOG2, Frame, Transform
from stepwell.codecs.ordered import WORDS, Signed, Word, swap_order, undo_zigzag, word_of, zigzag
from stepwell.codecs.planes import merge_block

__all__ = ["WORDS", "OrderedDelta", "decode_difference", "encode_difference"]


class _Differences:
    """Differences of a buffer, block by block; holds the scratch of one call."""

    def __init__(self, current: Bytes, reference: Bytes | None, word: Word) -> None:
        self._word = word
        self._current = current.view(word.signed)
        self._reference = None if reference is None else reference.view(word.signed)
        # One element more: the predecessor of the first of a block.
        size = min(self._current.size, 1 << BLOCK_LOG2) + 1
        self._one = np.empty(size, word.signed)
        self._two = np.empty(size, word.signed)

    def __call__(self, start: int, stop: int) -> Bytes:
        size = stop - start
        if self._reference is None:
            difference, scratch = self._from_predecessor(start, stop), self._one[:size]
        else:
            difference, scratch = self._one[:size], self._two[:size]
            if self._word.ordered:
                swap_order(self._current[start:stop], difference)
                swap_order(self._reference[start:stop], scratch)
                np.subtract(difference, scratch, out=difference)
            else:
                np.subtract(self._current[start:stop], self._reference[start:stop], out=difference)
        zigzag(difference, scratch)
        return difference.view(np.uint8)

    def _from_predecessor(self, start: int, stop: int) -> Signed:
        size, first = stop - start, max(start - 1, 0)
        values = self._one[: size + 1]
        values[0] = 0
        into = values[1 - (start - first) :]
        if self._word.ordered:
            swap_order(self._current[first:stop], into)
        else:
            np.copyto(into, self._current[first:stop])
        difference = self._two[:size]
        np.subtract(values[1:], values[:-1], out=difference)
        return difference


def _transform(word: Word, with_reference: bool) -> Transform:
    if with_reference:
        return Transform.ORDERED_REFERENCE if word.ordered else Transform.INTEGER_REFERENCE
    return Transform.ORDERED_PREDECESSOR if word.ordered else Transform.INTEGER_PREDECESSOR


def _encode(
    current: BufferLike, reference: BufferLike | None, dtype: str, level: int, out: BufferLike | None
) -> Bytes:
    word = word_of(dtype)
    return encode_against(
        current,
        reference,
        dtype,
        lambda raw, against: _Differences(raw, against, word),
        transform=_transform(word, reference is not None),
        level=level,
        out=out,
    )


def _decode(
    buf: BufferLike, reference: BufferLike | None, dtype: str, out: BufferLike | None, max_bytes: int | None
) -> Bytes:
    word = word_of(dtype)
    opened = open_difference(buf, reference, dtype, _transform(word, reference is not None), out, max_bytes)
    frame, against, raw = opened.frame, opened.reference, opened.out
    if against is None:
        _sum_blocks(frame, word, raw.view(word.signed))
    else:
        _add_blocks(frame, word, against.view(word.signed), raw.view(word.signed))
    return raw


def _scratch(frame: Frame, word: Word) -> tuple[Signed, Signed]:
    size = min(frame.count, 1 << frame.block_log2)
    return np.empty(size, word.signed), np.empty(size, word.signed)


def _add_blocks(frame: Frame, word: Word, reference: Signed, raw: Signed) -> None:
    one, two = _scratch(frame, word)
    for index, start, stop in frame.blocks():
        difference, scratch = one[: stop - start], two[: stop - start]
        merge_block(frame, index, difference.view(np.uint8))
        undo_zigzag(difference, scratch)
        if word.ordered:
            swap_order(reference[start:stop], scratch)
            np.add(difference, scratch, out=difference)
            swap_order(difference, raw[start:stop])
        else:
            np.add(difference, reference[start:stop], out=raw[start:stop])


def _sum_blocks(frame: Frame, word: Word, raw: Signed) -> None:
    one, two = _scratch(frame, word)
    last = np.zeros(1, word.signed)
    for index, start, stop in frame.blocks():
        difference, scratch = one[: stop - start], two[: stop - start]
        merge_block(frame, index, difference.view(np.uint8))
        undo_zigzag(difference, scratch)
        np.add(difference[:1], last, out=difference[:1])
        np.add.accumulate(difference, out=scratch)
        last[:] = scratch[-1:]
        if word.ordered:
            swap_order(scratch, raw[start:stop])
        else:
            np.copyto(raw[start:stop], scratch)


def encode_difference(
    current: BufferLike,
    reference: BufferLike,
    dtype: str,
    *,
    level: int = 1,
    out: BufferLike | None = None,
) -> Bytes:
    """Encode `current` as its difference from `reference`.

    Parameters
    ----------
    current, reference : ndarray, (n,), uint8
        Contiguous bytes of whole elements; not changed, not kept.
    dtype : str
        torch name without the prefix, a key of ``WORDS``.
    level : int
        zstd level of planes that repeat.
    out : writable bytes-like, optional
        At least ``OrderedDelta(dtype).size_bytes_max(n)`` bytes, apart from the inputs.

    Returns
    -------
    ndarray, (m,), uint8
        A view of `out` if given, else the caller's own.

    Raises
    ------
    ConfigError
        Unknown dtype or level.
    UnsupportedValueError
        Not whole elements, or no contiguous buffer.
    UsageError
        The two are of different lengths.
    """
    return _encode(current, reference, dtype, check_level(level), out)


def decode_difference(
    buf: BufferLike,
    reference: BufferLike,
    dtype: str,
    out: BufferLike | None = None,
    *,
    max_bytes: int | None = None,
) -> Bytes:
    """Give back what ``encode_difference`` was given, bit for bit.

    Parameters
    ----------
    buf : bytes-like
        One frame and nothing else.
    reference : ndarray, (n,), uint8
        The same bytes as at encoding. That they are is not checked here; a digest must.
    dtype : str
    out : writable bytes-like, optional
        Of exactly the decoded size. May be `reference` itself, which is then moved forward in
        place and is neither the old nor the new if an error is raised.
    max_bytes : int, optional
        Most bytes the caller is ready for; checked before anything is allocated.

    Returns
    -------
    ndarray, (n,), uint8
        A view of `out` if given, else the caller's own.

    Raises
    ------
    IntegrityError
        Damaged, or not a difference of this dtype and length (FormatError: not our frame at all).
    """
    return _decode(buf, reference, dtype, out, max_bytes)


class OrderedDelta(Difference):
    """Differences in ordered-integer space, zigzag coded, stored as byte planes.

    With a reference (a buffer passed to each call) every element is differenced from the same
    element of the reference. Without one, the form plain zarr can read, every element is
    differenced from its predecessor in memory order; the predecessor of the first is 0.

    Parameters
    ----------
    dtype : str
        torch name without the prefix, e.g. ``"bfloat16"``; a key of ``WORDS``.
    level : int
        zstd level of planes that repeat.
    reference : str, optional
        Names what the differences were taken from. The codec only keeps it, and then refuses to
        work without the buffer itself.
    """

    codec_id: ClassVar[str] = "stepwell.ordered_delta"

    def _encode(self, buf: BufferLike, reference: BufferLike | None, out: BufferLike | None) -> Bytes:
        return _encode(buf, reference, self.dtype, self.level, out)

    def _decode(
        self, buf: BufferLike, reference: BufferLike | None, out: BufferLike | None, max_bytes: int | None
    ) -> Bytes:
        return _decode(buf, reference, self.dtype, out, max_bytes)
