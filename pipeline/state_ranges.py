"""Which chunks of a captured state belong together: weight, momentum and variance of the same elements.

This follows from the layout alone, for a writer and for a reader: momentum and variance are cut alike, and
so are weights (``stepwell.pipeline.plan``), except that some of those may have no moments. So does the order
in which chunks of a state are written and read: a variance right after its momentum, a weight after both,
as ``stepwell.pipeline.predictive`` needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from stepwell.errors import FormatError
from stepwell.pipeline.base import Bytes, Kind
from stepwell.pipeline.casts import CAST_DTYPES
from stepwell.pipeline.collected import section, state_prefix
from stepwell.pipeline.layout import ITEM_BYTES, Layout, LayoutChunk, Piece, TensorSpec
from stepwell.pipeline.predictive import AdamUpdate, MomentRun, UpdateHint
from stepwell.pipeline.tree import JsonValue, decode_tree

__all__ = ["StateRange", "hints_of", "ranges_of", "state_order"]

_NO_TENSOR = torch.empty(0, device="meta")


@dataclass(frozen=True, slots=True)
class StateRange:
    """A chunk of weights or variances, and the moments of its elements.

    Attributes
    ----------
    part : int
        Its own part of the layout; float32, as the moments are.
    optimizer : str
    group : int
        Number of the parameter group.
    runs : tuple of MomentRun
        In the order of the chunk; one run, all of it, for a chunk of variances.
    steps : ndarray, (n,), int64
        Where the float32 ``step`` of each tensor with moments lies, in such elements from the run's start.
    """

    part: int
    optimizer: str
    group: int
    runs: tuple[MomentRun, ...]
    steps: npt.NDArray[np.int64] = field(compare=False)

    @property
    def moments(self) -> list[int]:
        """Parts of the moments, each momentum before its variance."""
        return list(dict.fromkeys(part for run in self.runs for part in (run.momentum, run.variance)))


def ranges_of(layout: Layout) -> Mapping[int, StateRange]:
    """Return the ranges of a layout by their part; computed once per layout object.

    A chunk is in none where it is not float32 or nothing in it has ``exp_avg``, ``exp_avg_sq`` and ``step``.
    """
    found: Mapping[int, StateRange] | None = vars(layout).get("_ranges_of")
    if found is None:
        finder = _Finder(layout)
        found = finder.ranges
        vars(layout)["_ranges_of"] = found  # as functools.cached_property does on a frozen class
    return found


def state_order(layout: Layout) -> list[int]:
    """Return every part of the layout of a state once, in the order in which a state is written and read.

    Chunks that may be casts of others (``stepwell.pipeline.casts``) come after all that they may be casts of.
    """
    ranges = ranges_of(layout)
    variance_of = {run.momentum: run.variance for one in ranges.values() for run in one.runs}
    order: dict[int, None] = {}
    for part in range(len(layout.chunks)):
        if part in ranges:
            order.update(dict.fromkeys(ranges[part].moments))
        order.setdefault(part)
        if part in variance_of:
            order.setdefault(variance_of[part])
    return sorted(order, key=lambda part: layout.chunks[part].dtype in CAST_DTYPES)


def hints_of(layout: Layout, run: Bytes, tree: Mapping[str, JsonValue]) -> dict[int, UpdateHint]:
    """Say of the parts of a captured state what update led to them, where that is known.

    Parameters
    ----------
    layout : Layout
    run : ndarray, (n,), uint8
        The state's bytes.
    tree : mapping
        The state's tree.
    """
    groups: dict[tuple[str, int], tuple[object, Mapping[object, object]] | None] = {}
    hints: dict[int, UpdateHint] = {}
    floats = run[: run.nbytes // 4 * 4].view(np.float32)
    for part, one in ranges_of(layout).items():
        place = one.optimizer, one.group
        if place not in groups:
            groups[place] = _group(tree, *place)
        group, counts = groups[place], floats[one.steps]
        if group is None or (counts != counts[0]).any():
            continue
        update = AdamUpdate.of(group[0], group[1], float(counts[0]))
        if update is not None:
            hints[part] = UpdateHint(update, one.runs)
    return hints


class _Finder:
    """Finds the ranges of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._places: dict[tuple[int, int], tuple[int, Piece]] = {}
        for part, chunk in enumerate(layout.chunks):
            if chunk.kind in (Kind.MOMENT1, Kind.MOMENT2) and chunk.dtype == "float32":
                self._places.update({(piece.tensor, piece.start): (part, piece) for piece in chunk.pieces})
        self._variance_of: dict[int, int] = {}
        self.ranges: dict[int, StateRange] = {}
        for kind, find in ((Kind.MOMENT1, self._variances), (Kind.WEIGHT, self._weights)):
            for part, chunk in enumerate(layout.chunks):
                if chunk.kind is kind and chunk.dtype == "float32" and chunk.pieces:
                    one = find(part, chunk)
                    if one is not None:
                        self.ranges[one.part] = one

    def _variances(self, part: int, chunk: LayoutChunk) -> StateRange | None:
        """Find the variances that go with a chunk of momentum."""
        specs = [self._layout.tensors[piece.tensor] for piece in chunk.pieces]
        place = _group_of(specs[0])
        prefixes = [spec.name.removesuffix("/exp_avg") for spec in specs]
        tensors = [self._layout.index_of.get(f"{prefix}/exp_avg_sq", -1) for prefix in prefixes]
        steps = [self._step(prefix) for prefix in prefixes]
        found = self._places.get((tensors[0], chunk.pieces[0].start))
        if place is None or found is None or None in steps:
            return None
        other = self._layout.chunks[found[0]]
        alike = [(t, p.start, p.stop, p.offset_bytes) for t, p in zip(tensors, chunk.pieces, strict=True)]
        if (
            other.kind is not Kind.MOMENT2
            or other.size_bytes != chunk.size_bytes
            or [(p.tensor, p.start, p.stop, p.offset_bytes) for p in other.pieces] != alike
        ):
            return None
        self._variance_of[part] = found[0]
        runs = (MomentRun(part, found[0], 0, 0, chunk.size_bytes),)
        return StateRange(found[0], *place, runs, np.array(steps, np.int64))

    def _weights(self, part: int, chunk: LayoutChunk) -> StateRange | None:
        """Find the moments of a chunk of weights; pieces without are left out."""
        place = _group_of(self._layout.tensors[chunk.pieces[0].tensor])
        if place is None:
            return None
        runs: list[MomentRun] = []
        steps: list[int] = []
        for piece in chunk.pieces:
            prefix = state_prefix(place[0], self._layout.tensors[piece.tensor].name)
            tensor, step = self._layout.index_of.get(f"{prefix}/exp_avg", -1), self._step(prefix)
            found = self._places.get((tensor, piece.start))
            if step is None or found is None or found[0] not in self._variance_of:
                continue
            if (found[1].start, found[1].stop) != (piece.start, piece.stop):
                continue
            steps.append(step)
            size_bytes = (piece.stop - piece.start) * ITEM_BYTES[chunk.dtype]
            there, here = found[1].offset_bytes, piece.offset_bytes
            run = MomentRun(found[0], self._variance_of[found[0]], there, here, size_bytes)
            joined = _joined(runs[-1], run) if runs else None
            runs[-1 if joined else len(runs) :] = [joined or run]
        return StateRange(part, *place, tuple(runs), np.array(steps, np.int64)) if runs else None

    def _step(self, prefix: str) -> int | None:
        index = self._layout.index_of.get(f"{prefix}/step", -1)
        if index < 0 or self._layout.tensors[index].dtype != "float32":
            return None
        alone = self._layout.tensors[index].element_count == 1
        return self._layout.tensor_offsets[index] // 4 if alone else None


def _joined(one: MomentRun, other: MomentRun) -> MomentRun | None:
    """Return both runs as one, where they lie alike in the same chunks; gaps between are zeros in all."""
    gap = other.here - one.here
    if (one.momentum, one.variance, one.there + gap) != (other.momentum, other.variance, other.there):
        return None
    if not 0 <= gap - one.size_bytes < 64:
        return None
    return MomentRun(one.momentum, one.variance, one.there, one.here, gap + other.size_bytes)


def _group_of(spec: TensorSpec) -> tuple[str, int] | None:
    """Return optimizer and number of the group that a tensor is in."""
    optimizer, colon, number = spec.group.rpartition(":")
    number = number.partition("+")[0]  # what follows is the label of a lossy choice
    return (optimizer, int(number)) if colon and number.isdecimal() else None


def _group(
    tree: Mapping[str, JsonValue], optimizer: str, number: int
) -> tuple[object, Mapping[object, object]] | None:
    """Return the class of an optimizer and the values of one of its groups; None if they are not there."""
    try:
        about = section(tree, "optimizers", optimizer)
    except FormatError:
        return None
    groups = about.get("groups")
    group = groups[number] if isinstance(groups, list) and number < len(groups) else None
    if not isinstance(group, dict):
        return None
    values = decode_tree(group.get("values"), lambda name: _NO_TENSOR)
    return (about.get("class"), values) if isinstance(values, dict) else None
