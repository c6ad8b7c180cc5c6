"""Where the kept elements of a sparse array are: gaps as two planes, or a bitmap.

*Gaps.* The number of elements skipped before each kept one, as a word of 16 bits: its lower byte
holds the gap's lowest `shift` bits, its upper byte the rest. For kept elements in random places
the low bits are noise and the upper byte has a short geometric distribution; both then cost what
they must under zstd's Huffman coder, which cannot spend less than one bit on a byte: with a
plain split at 8 bits the upper bytes of 1 % density hold 0.4 bits and cost one. A word of all
ones (of 8 + `shift`) says that so many elements are skipped and none is kept there.

*Bitmap.* A bit for each element, lowest first; cheaper to make and as small above about 8 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

import numpy as np
import numpy.typing as npt

from stepwell.codecs.buffers import Bytes
from stepwell.codecs.frame import Frame
from stepwell.codecs.planes import merge_block
from stepwell.errors import IntegrityError

__all__ = [
    "BITMAP_DENSITY",
    "GAP_SHIFT_MAX",
    "Positions",
    "bitmap_of",
    "gap_shift_of",
    "gap_words",
    "gap_words_max",
    "positions_from_bitmap",
    "positions_from_gaps",
]

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]

BITMAP_DENSITY = 0.08  # measured: the two cost the same at 10 to 20 %, 1 % apart at 8 %
GAP_SHIFT_MAX = 8
_ENTRIES = 1 << 16  # gaps or bits handled at a time; their int64 positions are half a MiB


def gap_shift_of(count: int, kept: int) -> int:
    """Return how many low bits of the gaps go to the lower plane.

    Three bits fewer than the mean gap has leaves the upper plane about 4 bits per byte. Gaps that
    mostly fit a byte stay whole: zstd finds no use for planes of one or two bits.
    """
    mean = count // max(kept, 1)
    if mean < 40:  # measured on random places: 1.4 % above the entropy here, whole or split
        return GAP_SHIFT_MAX
    return min(round(log2(mean)) - 3, GAP_SHIFT_MAX)


def gap_words_max(count: int, kept: int, shift: int) -> int:
    """Return the most words that `kept` of `count` elements can take."""
    return kept + count // ((256 << shift) - 1)


def gap_words(positions: Positions, shift: int) -> Words:
    """Return the gaps of ascending positions as words.

    Parameters
    ----------
    positions : ndarray, (kept,), int64
    shift : int
        From ``gap_shift_of``.

    Returns
    -------
    ndarray, (n,), uint16
    """
    skip = (256 << shift) - 1
    parts: list[Words] = []
    previous = -1
    for start in range(0, positions.size, _ENTRIES):
        some = positions[start : start + _ENTRIES]
        gaps = np.empty_like(some)
        gaps[0] = some[0] - previous - 1
        np.subtract(some[1:], some[:-1], out=gaps[1:])
        gaps[1:] -= 1
        previous = int(some[-1])
        if int(gaps.max()) >= skip:
            skips, rest = np.divmod(gaps, skip)
            gaps = np.full(some.size + int(skips.sum()), skip, np.int64)
            gaps[np.arange(some.size) + np.cumsum(skips)] = rest
        parts.append(_as_words(gaps, shift))
    return np.concatenate(parts) if parts else np.empty(0, "<u2")


def _as_words(gaps: Positions, shift: int) -> Words:
    words = gaps.astype("<u2")
    if shift == GAP_SHIFT_MAX:
        return words
    upper = words >> shift
    words &= (1 << shift) - 1
    upper <<= 8
    words |= upper
    return words


def positions_from_gaps(frame: Frame, shift: int, count: int) -> Iterator[Positions]:
    """Yield the kept positions, some at a time.

    Parameters
    ----------
    frame : Frame
        Of words.
    shift : int
    count : int
        Elements of the array.

    Raises
    ------
    IntegrityError
        A position beyond `count`, or an impossible word.
    """
    words_of_block = np.empty(min(frame.count, 1 << frame.block_log2), "<u2")
    previous = -1
    for index, start, stop in frame.blocks():
        words = words_of_block[: stop - start]
        merge_block(frame, index, words.view(np.uint8))
        for first in range(0, words.size, _ENTRIES):
            gaps, skipped = _from_words(words[first : first + _ENTRIES], shift)
            gaps += 1
            gaps -= skipped
            np.cumsum(gaps, out=gaps)
            gaps += previous
            previous = int(gaps[-1])
            if previous >= count:
                raise IntegrityError(f"frame is damaged: it keeps element {previous} of {count}")
            yield gaps[~skipped] if skipped.any() else gaps


def _from_words(words: Words, shift: int) -> tuple[Positions, npt.NDArray[np.bool_]]:
    if shift == GAP_SHIFT_MAX:
        return words.astype(np.int64), words == (256 << shift) - 1
    low = words & 0xFF
    if int(low.max()) >> shift:
        raise IntegrityError("frame is damaged: a gap has more low bits than it declares")
    gaps = words >> 8
    gaps <<= shift
    gaps |= low
    return gaps.astype(np.int64), gaps == (256 << shift) - 1


def bitmap_of(positions: Positions, count: int) -> Bytes:
    """Return one bit per element, set at ascending `positions`, lowest bit first."""
    bitmap = np.empty(-(-count // 8), np.uint8)
    flags = np.empty(min(count, _ENTRIES), np.bool_)
    starts = np.arange(0, count, _ENTRIES)
    bounds = np.searchsorted(positions, np.append(starts, count))
    for block, start in enumerate(starts.tolist()):
        size = min(_ENTRIES, count - start)
        flags[:size] = False
        flags[positions[bounds[block] : bounds[block + 1]] - start] = True
        bitmap[start // 8 : start // 8 + -(-size // 8)] = np.packbits(flags[:size], bitorder="little")
    return bitmap


def positions_from_bitmap(frame: Frame, count: int) -> Iterator[Positions]:
    """Yield the kept positions, some at a time.

    Parameters
    ----------
    frame : Frame
        Of the bytes of a bitmap.
    count : int
        Elements of the array.

    Raises
    ------
    IntegrityError
        The bitmap is of another size, or a bit behind its end is set.
    """
    if frame.count != -(-count // 8):
        raise IntegrityError(f"frame is damaged: a bitmap of {frame.count} bytes for {count} elements")
    bytes_of_block = np.empty(min(frame.count, 1 << frame.block_log2), np.uint8)
    for index, start, stop in frame.blocks():
        block = bytes_of_block[: stop - start]
        merge_block(frame, index, block)
        for first in range(0, block.size, _ENTRIES // 8):
            bits = np.unpackbits(block[first : first + _ENTRIES // 8], bitorder="little")
            positions = np.flatnonzero(bits.view(np.bool_))  # of booleans it is much faster
            positions += 8 * (start + first)
            if positions.size:
                if int(positions[-1]) >= count:
                    raise IntegrityError(f"frame is damaged: it keeps element {positions[-1]} of {count}")
                yield positions
