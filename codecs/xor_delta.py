"""Bitwise differences: exact for every dtype, blind to what the bits mean.

The fallback of ``ordered_delta``, and better than it only where values change sign or where bits
are flags. Equal bits become zeros; byte planes store the rest.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stepwell.codecs.buffers import BufferLike, Bytes
from stepwell.codecs.byteplane import check_level
from stepwell.codecs.difference import Difference, Opened, encode_against, open_difference
from stepwell.codecs.frame import BLOCK_LOG2, Transform
from stepwell.codecs.ordered import word_of
from stepwell.codecs.planes import merge_block

__all__ = ["XorDelta", "decode_xor", "encode_xor"]

_Words = npt.NDArray[np.unsignedinteger]


class _Xors:
    """Bitwise differences of a buffer, block by block; holds the scratch of one call."""

    def __init__(self, current: Bytes, reference: Bytes | None, words: np.dtype[np.unsignedinteger]) -> None:
        self._current = current.view(words)
        self._reference = None if reference is None else reference.view(words)
        self._scratch = np.empty(min(self._current.size, 1 << BLOCK_LOG2), words)

    def __call__(self, start: int, stop: int) -> Bytes:
        difference, current = self._scratch[: stop - start], self._current
        if self._reference is not None:
            np.bitwise_xor(current[start:stop], self._reference[start:stop], out=difference)
        elif start:
            np.bitwise_xor(current[start:stop], current[start - 1 : stop - 1], out=difference)
        else:
            difference[:1] = current[:1]
            np.bitwise_xor(current[1:stop], current[: max(stop - 1, 0)], out=difference[1:])
        return difference.view(np.uint8)


def _words_of(dtype: str) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{word_of(dtype).itemsize}")


def _transform(with_reference: bool) -> Transform:
    return Transform.XOR_REFERENCE if with_reference else Transform.XOR_PREDECESSOR


def _encode(
    current: BufferLike, reference: BufferLike | None, dtype: str, level: int, out: BufferLike | None
) -> Bytes:
    words = _words_of(dtype)
    return encode_against(
        current,
        reference,
        dtype,
        lambda raw, against: _Xors(raw, against, words),
        transform=_transform(reference is not None),
        level=level,
        out=out,
    )


def _decode(
    buf: BufferLike, reference: BufferLike | None, dtype: str, out: BufferLike | None, max_bytes: int | None
) -> Bytes:
    words = _words_of(dtype)
    opened = open_difference(buf, reference, dtype, _transform(reference is not None), out, max_bytes)
    _undo_blocks(opened, words)
    return opened.out


def _undo_blocks(opened: Opened, words: np.dtype[np.unsignedinteger]) -> None:
    frame, raw = opened.frame, opened.out.view(words)
    reference = None if opened.reference is None else opened.reference.view(words)
    scratch: _Words = np.empty(min(frame.count, 1 << frame.block_log2), words)
    last: _Words = np.zeros(1, words)
    for index, start, stop in frame.blocks():
        difference = scratch[: stop - start]
        merge_block(frame, index, difference.view(np.uint8))
        if reference is not None:
            np.bitwise_xor(difference, reference[start:stop], out=raw[start:stop])
            continue
        np.bitwise_xor(difference[:1], last, out=difference[:1])
        np.bitwise_xor.accumulate(difference, out=raw[start:stop])
        last[:] = raw[stop - 1 : stop]


def encode_xor(
    current: BufferLike,
    reference: BufferLike,
    dtype: str,
    *,
    level: int = 1,
    out: BufferLike | None = None,
) -> Bytes:
    """Encode `current` as its bitwise difference from `reference`.

    Parameters
    ----------
    current, reference : ndarray, (n,), uint8
        Contiguous bytes of whole elements; not changed, not kept.
    dtype : str
        torch name without the prefix, a key of ``ordered.WORDS``; decides the planes only.
    level : int
        zstd level of planes that repeat.
    out : writable bytes-like, optional
        At least ``XorDelta(dtype).size_bytes_max(n)`` bytes, apart from the inputs.

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


def decode_xor(
    buf: BufferLike,
    reference: BufferLike,
    dtype: str,
    out: BufferLike | None = None,
    *,
    max_bytes: int | None = None,
) -> Bytes:
    """Give back what ``encode_xor`` was given, bit for bit.

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


class XorDelta(Difference):
    """Bitwise differences, stored as byte planes.

    With a reference (a buffer passed to each call) every element is combined with the same
    element of the reference. Without one, the form plain zarr can read, it is combined with its
    predecessor in memory order; the predecessor of the first is 0.

    Parameters
    ----------
    dtype : str
        torch name without the prefix, e.g. ``"bfloat16"``; a key of ``ordered.WORDS``.
    level : int
        zstd level of planes that repeat.
    reference : str, optional
        Names what the differences were taken from. The codec only keeps it, and then refuses to
        work without the buffer itself.

    Examples
    --------
    >>> import numpy as np
    >>> codec = XorDelta("float32")
    >>> one, two = np.linspace(1, 2, 100, dtype="f4"), np.linspace(1, 2.001, 100, dtype="f4")
    >>> np.array_equal(codec.decode(codec.encode(two, one), reference=one).view("f4"), two)
    True
    """

    codec_id: ClassVar[str] = "stepwell.xor_delta"

    def _encode(self, buf: BufferLike, reference: BufferLike | None, out: BufferLike | None) -> Bytes:
        return _encode(buf, reference, self.dtype, self.level, out)

    def _decode(
        self, buf: BufferLike, reference: BufferLike | None, out: BufferLike | None, max_bytes: int | None
    ) -> Bytes:
        return _decode(buf, reference, self.dtype, out, max_bytes)
