"""Which chunks of a captured state belong together: weight, momentum and variance of the same elements.

The plan cuts all three alike (``stepwell.pipeline.plan``), so this follows from the layout alone, for a
writer and for a reader. So does the order in which chunks of a state are written and read: momentum,
variance and weight of one range after each other, as ``stepwell.pipeline.predictive`` needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stepwell.errors import FormatError
from stepwell.pipeline.base import Bytes, Kind
from stepwell.pipeline.collected import section, state_prefix
from stepwell.pipeline.layout import Layout, LayoutChunk
from stepwell.pipeline.pack import base_chunk_key
from stepwell.pipeline.predictive import AdamUpdate, UpdateHint
from stepwell.pipeline.tree import JsonValue, decode_tree

__all__ = ["StateRange", "hints_of", "ranges_of", "state_order"]

_NO_TENSOR = torch.empty(0, device="meta")


@dataclass(frozen=True, slots=True)
class StateRange:
    """The chunks of one range of elements.

    Attributes
    ----------
    momentum, variance, weight : int
        Parts of the layout, float32 all three.
    optimizer : str
    group : int
        Number of the parameter group.
    steps : tuple of int
        Where the float32 ``step`` of each tensor lies, in bytes from the start of the run.
    """

    momentum: int
    variance: int
    weight: int
    optimizer: str
    group: int
    steps: tuple[int, ...]

    @property
    def parts(self) -> tuple[int, int, int]:
        """Momentum, variance, weight: the order in which they are written and read."""
        return self.momentum, self.variance, self.weight


def ranges_of(layout: Layout) -> Mapping[int, StateRange]:
    """Return the ranges of a layout, each under all three of its parts; computed once per layout object.

    A weight chunk is in none where its tensors are not float32, or one of them has no ``exp_avg``,
    ``exp_avg_sq`` and ``step`` of its own, or these are cut otherwise (because others have none).
    """
    found: Mapping[int, StateRange] | None = vars(layout).get("_ranges_of")
    if found is None:
        firsts = {(chunk.pieces[0].tensor, chunk.pieces[0].start): i for i, chunk in _chunks(layout)}
        ranges: dict[int, StateRange] = {}
        for part, chunk in _chunks(layout):
            if chunk.kind is Kind.WEIGHT and (one := _range_of(layout, part, firsts)) is not None:
                ranges.update(dict.fromkeys(one.parts, one))
        found = ranges
        vars(layout)["_ranges_of"] = found  # as functools.cached_property does on a frozen class
    return found


def state_order(layout: Layout) -> list[int]:
    """Return every part of the layout of a state once, in the order in which a state is written and read."""
    ranges = ranges_of(layout)
    order: dict[int, None] = {}
    for part in range(len(layout.chunks)):
        one = ranges.get(part)
        order.update(dict.fromkeys((part,) if one is None else one.parts))
    return list(order)


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
    for one in {one.weight: one for one in ranges_of(layout).values()}.values():
        place = one.optimizer, one.group
        if place not in groups:
            groups[place] = _group(tree, *place)
        group, counts = groups[place], {_count(run, offset) for offset in one.steps}
        if group is None or len(counts) != 1:
            continue
        update = AdamUpdate.of(group[0], group[1], counts.pop())
        if update is not None:
            hint = UpdateHint(update, base_chunk_key(one.momentum), base_chunk_key(one.variance))
            hints.update(dict.fromkeys(one.parts, hint))
    return hints


def _chunks(layout: Layout) -> list[tuple[int, LayoutChunk]]:
    return [(part, chunk) for part, chunk in enumerate(layout.chunks) if chunk.pieces]


def _range_of(layout: Layout, part: int, firsts: Mapping[tuple[int, int], int]) -> StateRange | None:
    weight = layout.chunks[part]
    specs = [layout.tensors[piece.tensor] for piece in weight.pieces]
    optimizer, colon, number = specs[0].group.rpartition(":")
    number = number.partition("+")[0]  # what follows is the label of a lossy choice
    if not colon or not number.isdecimal():
        return None
    parts: dict[str, int] = {}
    steps: list[int] = []
    prefixes = [state_prefix(optimizer, spec.name) for spec in specs]
    for key, kind in (("exp_avg", Kind.MOMENT1), ("exp_avg_sq", Kind.MOMENT2)):
        tensors = [layout.index_of.get(f"{prefix}/{key}", -1) for prefix in prefixes]
        found = firsts.get((tensors[0], weight.pieces[0].start))
        if found is None or not _alike(weight, layout.chunks[found], kind, tensors):
            return None
        parts[key] = found
    for prefix in prefixes:
        index = layout.index_of.get(f"{prefix}/step", -1)
        if index < 0 or layout.tensors[index].dtype != "float32" or layout.tensors[index].element_count != 1:
            return None
        steps.append(layout.tensor_offsets[index])
    return StateRange(parts["exp_avg"], parts["exp_avg_sq"], part, optimizer, int(number), tuple(steps))


def _alike(weight: LayoutChunk, state: LayoutChunk, kind: Kind, tensors: list[int]) -> bool:
    """Whether `state` holds the same elements of these tensors as `weight` does of its own."""
    return (
        state.kind is kind
        and state.dtype == weight.dtype == "float32"
        and state.size_bytes == weight.size_bytes
        and [(p.tensor, p.start, p.stop, p.offset_bytes) for p in state.pieces]
        == [(t, p.start, p.stop, p.offset_bytes) for t, p in zip(tensors, weight.pieces, strict=True)]
    )


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


def _count(run: Bytes, offset: int) -> float:
    return float(run[offset : offset + 4].view(np.float32)[0])
