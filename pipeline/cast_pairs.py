"""Which tensors of a captured state are casts of which: found by a sample of their values, then remembered.

Only shapes and dtypes limit who may be a cast of whom; names do not matter, since masters are kept by
optimizers, in their states or beside them, under any name. A pair is proven by nobody here for good: each
chunk of each save compares all of its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.pipeline.base import Bytes
from stepwell.pipeline.casts import CAST_DTYPES, CastRun, cast_into, is_cast
from stepwell.pipeline.layout import ITEM_BYTES, Layout, Piece
from stepwell.pipeline.plan import pieces_by_tensor

__all__ = ["CapturedRun", "CastPairs", "joined"]

_SAMPLES, _SAMPLE = 4, 64  # runs and elements of each; who has them alike is compared as a whole
_WAIT_SAVES_MAX = 64  # a search in vain costs some 20 us for each tensor that could be the source


@dataclass(frozen=True, slots=True)
class CapturedRun:
    """The state that a chunk was captured with.

    Attributes
    ----------
    layout : Layout
    run : ndarray, (n,), uint8
        All of its bytes, raw; capture's own, and there until the last chunk has left the stages.
    """

    layout: Layout
    run: Bytes


class CastPairs:
    """The pairs of one layout. Used by one thread at a time.

    Parameters
    ----------
    layout : Layout
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sources: dict[tuple[int, ...], list[int]] = {}
        self._targets: dict[tuple[int, ...], list[int]] = {}
        for index, spec in enumerate(layout.tensors):
            if spec.dtype == "float32" and spec.element_count:
                self._sources.setdefault(spec.shape, []).append(index)
        for index, spec in enumerate(layout.tensors):
            if spec.dtype in CAST_DTYPES and spec.shape in self._sources:
                self._targets.setdefault(spec.shape, []).append(index)
        self._pairs: dict[int, int] = {}
        self._waits: dict[int, tuple[int, int]] = {}
        self._step = -1
        self._saves = 0
        self._found: dict[tuple[tuple[int, ...], str], dict[bytes, list[int]]] = {}

    def begin(self, step: int) -> None:
        """Go on to the save called `step`, if it is another one."""
        if step != self._step:
            self._step = step
            self._saves += 1
            self._found.clear()

    def runs_of(self, run: Bytes, piece: Piece) -> list[CastRun]:
        """Say where the elements lie that a piece is a cast of, by all of its bits; nowhere: no runs."""
        target = piece.tensor
        spec = self._layout.tensors[target]
        if spec.shape not in self._targets or spec.dtype not in CAST_DTYPES:
            return []
        source = self._pairs.get(target)
        if source is None or not self._is_cast(run, piece, source):
            source = self._search(run, piece, source)
        return [] if source is None else self._places(piece, source)

    def _is_cast(self, run: Bytes, piece: Piece, source: int) -> bool:
        start, stop, dtype = piece.start, piece.stop, self._layout.tensors[piece.tensor].dtype
        return is_cast(
            self._bytes(run, source, start, stop), self._bytes(run, piece.tensor, start, stop), dtype
        )

    def _search(self, run: Bytes, piece: Piece, known: int | None) -> int | None:
        """Look for another source of a tensor, at ever fewer saves as long as there is none."""
        target = piece.tensor
        due, wait = self._waits.get(target, (0, 1))
        if self._saves < due:
            return None
        found = self._alike(run, target)
        if found is None or found == known or not self._is_cast(run, piece, found):
            self._waits[target] = self._saves + wait, min(2 * wait, _WAIT_SAVES_MAX)
            return None
        self._waits.pop(target, None)
        self._pairs[target] = found
        return found

    def _alike(self, run: Bytes, target: int) -> int | None:
        """Return a source whose sample is that of a tensor.

        Where several are alike, as zeros are, the first of them goes with the first of the tensors that
        look so, and so on: copies and masters tend to come in one order.
        """
        spec = self._layout.tensors[target]
        table = self._found.get((spec.shape, spec.dtype))
        if table is None:
            table = self._found[spec.shape, spec.dtype] = {}
            for source in self._sources[spec.shape]:
                table.setdefault(self._cast_sample(run, source, spec.dtype), []).append(source)
        sample = self._sample(run, target).tobytes()
        sources = table.get(sample)
        if sources is None:
            return None
        twins = [
            other
            for other in self._targets[spec.shape]
            if self._layout.tensors[other].dtype == spec.dtype
            and (other == target or self._sample(run, other).tobytes() == sample)
        ]
        return sources[min(twins.index(target), len(sources) - 1)]

    def _cast_sample(self, run: Bytes, source: int, dtype: str) -> bytes:
        values = self._sample(run, source)
        out = np.empty(values.nbytes // 2, np.uint8)
        cast_into(values, out, dtype)
        return out.tobytes()

    def _sample(self, run: Bytes, tensor: int) -> Bytes:
        """Return evenly spread runs of elements, all of them where there are few."""
        count = self._layout.tensors[tensor].element_count
        if count <= _SAMPLES * _SAMPLE:
            return self._bytes(run, tensor, 0, count)
        starts = [place * (count - _SAMPLE) // (_SAMPLES - 1) for place in range(_SAMPLES)]
        return np.concatenate([self._bytes(run, tensor, start, start + _SAMPLE) for start in starts])

    def _bytes(self, run: Bytes, tensor: int, start: int, stop: int) -> Bytes:
        item_bytes, offset = (
            ITEM_BYTES[self._layout.tensors[tensor].dtype],
            self._layout.tensor_offsets[tensor],
        )
        return run[offset + start * item_bytes : offset + stop * item_bytes]

    def _places(self, piece: Piece, source: int) -> list[CastRun]:
        """Where the elements of a piece lie in the chunks of their source."""
        runs: list[CastRun] = []
        for place in pieces_by_tensor(self._layout)[source]:
            low, high = max(piece.start, place.piece.start), min(piece.stop, place.piece.stop)
            if low < high:
                there = place.piece.offset_bytes + 4 * (low - place.piece.start)
                here = piece.offset_bytes + 2 * (low - piece.start)
                runs.append(CastRun(place.part, there, here, high - low))
        return runs


def joined(runs: Sequence[CastRun]) -> list[CastRun]:
    """Join runs that go on from one another in both chunks."""
    found: list[CastRun] = []
    for run in runs:
        last = found[-1] if found else None
        ahead = None if last is None else (last.part, last.there + 4 * last.count, last.stop)
        if last is not None and ahead == (run.part, run.there, run.here):
            found[-1] = CastRun(last.part, last.there, last.here, last.count + run.count)
        else:
            found.append(run)
    return found
