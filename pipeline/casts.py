"""Chunks that are a cast of others in the same pack: the rounding, and how an encoding says it.

A bfloat16 or float16 copy of float32 values (weights beside their masters) holds nothing of its own: it is
each value rounded to the nearest, ties to even. The rounding here is one of integers, or one that IEEE 754
leaves no choice in, so that every machine makes the same bits. NaN, whose bits IEEE leaves open, keeps its
sign and the upper bits of its payload and is quiet; infinities, -0.0 and denormals are what they round to.

An encoding names runs ``[part, there, here, count]``: `count` elements that begin `there` bytes into the
chunk ``state/{part}`` of the same pack and, cast, `here` bytes into the chunk that is told. What is stored of
it is what lies in no run, or nothing at all where that is only zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Bytes, Encoding

if TYPE_CHECKING:
    from stepwell.pipeline.layout import Layout
    from stepwell.pipeline.pack_format import PackRow

__all__ = [
    "CAST_DTYPES",
    "DERIVED",
    "CastRun",
    "cast_into",
    "cast_names",
    "cast_runs",
    "cast_sources",
    "check_casts",
    "is_cast",
    "is_derived",
    "rest_of",
]

DERIVED = "stepwell.derived"
"""Encoding of a chunk that is a cast of others; always the innermost."""

CAST_DTYPES = frozenset({"bfloat16", "float16"})
"""What a float32 tensor may have been rounded to."""

_BLOCK = 1 << 16  # elements worked on at once: a run of 256 KiB stays in a second-level cache
_INT_MAX = 1 << 53

Halves = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class CastRun:
    """A run of elements of a chunk, and where the float32 elements lie that it is a cast of.

    Attributes
    ----------
    part : int
        Part of the layout.
    there, here : int
        Where the run begins in that chunk and in the one that is told; bytes.
    count : int
        Elements.
    """

    part: int
    there: int
    here: int
    count: int

    @property
    def numbers(self) -> list[int]:
        """JSON form."""
        return [self.part, self.there, self.here, self.count]

    @property
    def stop(self) -> int:
        """Where it ends in the chunk that is told; bytes."""
        return self.here + 2 * self.count


def cast_into(source: Bytes, out: Bytes, dtype: str) -> None:
    """Cast float32 values.

    Parameters
    ----------
    source : ndarray, (4 n,), uint8
    out : ndarray, (2 n,), uint8
        Written.
    dtype : str
        One of ``CAST_DTYPES``.
    """
    values, halves = source.view(np.float32), out.view(np.uint16)
    scratch = np.empty(min(_BLOCK, values.size), np.uint32)
    for start in range(0, values.size, _BLOCK):
        _cast_block(values[start : start + _BLOCK], halves[start : start + _BLOCK], scratch, dtype)


def is_cast(source: Bytes, wanted: Bytes, dtype: str) -> bool:
    """Say whether float32 values, cast, are exactly these bits; ends at the first block that is not.

    Parameters
    ----------
    source : ndarray, (4 n,), uint8
    wanted : ndarray, (2 n,), uint8
        Not changed.
    dtype : str
    """
    values, halves = source.view(np.float32), wanted.view(np.uint16)
    scratch = np.empty(min(_BLOCK, values.size), np.uint32)
    out = np.empty(scratch.size, np.uint16)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        _cast_block(block, out[: block.size], scratch, dtype)
        if not np.array_equal(out[: block.size], halves[start : start + _BLOCK]):
            return False
    return True


def _cast_block(
    values: npt.NDArray[np.float32], out: Halves, scratch: npt.NDArray[np.uint32], dtype: str
) -> None:
    bits, work = values.view(np.uint32), scratch[: values.size]
    if dtype == "bfloat16":
        # Half a unit of the last place less one, and one more where that place is odd: ties to even.
        np.right_shift(bits, 16, out=work)
        np.bitwise_and(work, 1, out=work)
        np.add(work, 0x7FFF, out=work)
        np.add(work, bits, out=work)
        np.right_shift(work, 16, out=work)
        np.copyto(out, work, casting="unsafe")
        kept, quiet = 16, 0x0040
    else:
        with np.errstate(all="ignore"):
            np.copyto(out.view(np.float16), values, casting="same_kind")
        kept, quiet = 13, 0x7E00
    nan = np.isnan(values)
    if nan.any():
        lost = bits[nan]
        payload = lost >> kept if dtype == "bfloat16" else (lost >> 16 & 0x8000) | (lost >> kept & 0x1FF)
        out[nan] = payload | quiet


def cast_runs(encoding: Encoding) -> list[CastRun] | None:
    """Read the runs that an encoding carries, in order and apart; None if they are none."""
    runs: list[CastRun] = []
    listed, end = encoding.get("casts"), 0
    for numbers in listed if isinstance(listed, list | tuple) else ():
        if not isinstance(numbers, list | tuple) or len(numbers) != 4:
            return None
        if not all(type(number) is int and 0 <= number <= _INT_MAX for number in numbers):
            return None
        run = CastRun(*numbers)
        if run.there % 4 or run.here % 2 or run.here < end or not run.count:
            return None
        runs.append(run)
        end = run.stop
    return runs or None


def rest_of(runs: Sequence[CastRun], raw_bytes: int) -> list[slice]:
    """Return the byte ranges of a chunk that lie in no run."""
    found: list[slice] = []
    end = 0
    for run in runs:
        if run.here > end:
            found.append(slice(end, run.here))
        end = run.stop
    if end < raw_bytes:
        found.append(slice(end, raw_bytes))
    return found


def is_derived(encodings: Sequence[Mapping[str, object]]) -> bool:
    """Say whether a chunk with these encodings is a cast of others."""
    return bool(encodings) and encodings[0].get("id") == DERIVED


def cast_sources(encodings: Sequence[Mapping[str, object]]) -> set[int]:
    """Return the parts that a chunk with these encodings is a cast of."""
    runs = cast_runs(encodings[0]) if is_derived(encodings) else None
    return {run.part for run in runs or ()}


def cast_names(layout: Layout, part: int, encodings: Sequence[Mapping[str, object]]) -> dict[int, str]:
    """Return what the tensors of a chunk are casts of, names by the index of the tensor; for people."""
    runs = (cast_runs(encodings[0]) if is_derived(encodings) else None) or []
    names: dict[int, str] = {}
    for piece in layout.chunks[part].pieces if runs else ():
        place = bisect_right(runs, piece.offset_bytes, key=lambda run: run.here) - 1
        run = runs[place]
        if place < 0 or piece.offset_bytes >= run.stop or run.part >= len(layout.chunks):
            continue
        there = run.there + 2 * (piece.offset_bytes - run.here)
        sources = layout.chunks[run.part].pieces
        at = bisect_right(sources, there, key=lambda source: source.offset_bytes) - 1
        if at >= 0:
            names[piece.tensor] = layout.tensors[sources[at].tensor].name
    return names


def check_casts(rows: Sequence[PackRow], what: str) -> None:
    """Check what the rows of a pack, in their order, say they are casts of.

    A cast is of float32 chunks of a state that come before it, so none leads in a circle and none waits
    for another one. No more than half of it may be something else, so that what it claims to be long is
    borne out.

    Raises
    ------
    FormatError
        It is a cast of itself, of a later chunk, of one that is no float32, or reaches beyond.
    IntegrityError
        What it is a cast of is not there.
    """
    if not any(encoding.get("id") == DERIVED for row in rows for encoding in row.encodings):
        return
    keys = {row.key for row in rows}
    before: dict[str, PackRow] = {}
    for row in rows:
        if any(encoding.get("id") == DERIVED for encoding in row.encodings):
            _check_cast(row, before, keys, f"{what}: chunk {row.key!r}")
        before[row.key] = row


def _check_cast(row: PackRow, before: Mapping[str, PackRow], keys: set[str], about: str) -> None:
    runs = cast_runs(row.encodings[0]) if is_derived(row.encodings) else None
    if any(encoding.get("id") == DERIVED for encoding in row.encodings[1:]) or runs is None:
        raise FormatError(f"{about} is a cast, but it does not say of what")
    if row.dtype not in CAST_DTYPES or row.key != f"state/{row.part}" or runs[-1].stop > row.raw_bytes:
        raise FormatError(f"{about} cannot be a cast")
    if 4 * sum(run.count for run in runs) < row.raw_bytes:
        raise FormatError(f"{about} is a cast for less than a half of its bytes")
    for run in runs:
        key = f"state/{run.part}"
        source = before.get(key)
        if source is None and key not in keys:
            raise IntegrityError(f"{about} is a cast of {key!r}, which is not there")
        if source is None:
            raise FormatError(f"{about} is a cast of {key!r}, which does not come before it")
        end = run.there + 4 * run.count
        if (source.dtype, source.layout) != ("float32", row.layout) or end > source.raw_bytes:
            raise FormatError(f"{about} is a cast of {key!r}, which has not what it would need")
