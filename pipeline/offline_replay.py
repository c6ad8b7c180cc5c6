"""The updates of one elementwise optimizer, replayed for one chunk at a time on copies of an entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim import Optimizer

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.bits import bytes_to_tensor, tensor_bytes, torch_dtype
from stepwell.pipeline.blocks import DecodedUpdate, Slice, replay_slices
from stepwell.pipeline.collected import optimizer_states
from stepwell.pipeline.layout import ITEM_BYTES, Layout, Piece
from stepwell.pipeline.offline_entry import Entry, Here, Recent, Tally
from stepwell.pipeline.parts import part_gradients
from stepwell.pipeline.plan import pieces_by_tensor
from stepwell.pipeline.private import ELEMENTWISE_STATE, SCALAR_STATE, is_elementwise, optimizer_class
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.replaying import RecordedUpdate, decoded_gradient
from stepwell.pipeline.tree import JsonValue

__all__ = ["Named", "OptimizerLog", "named_states", "optimizer_name", "why_whole"]

# Gradients of so many updates are held at once; more updates of a chunk are replayed in turns.
BATCH_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Named:
    """Stands for a tensor of the entry within decoded optimizer state."""

    name: str


States = Mapping[str, Mapping[str, object]]
"""Parameter name to state: ``Named`` for tensors, plain values as they are."""


def optimizer_name(layout: Layout) -> str:
    """Name of the optimizer whose gradients a layout holds: groups are called ``<name>:<number>``."""
    return layout.tensors[0].group.rpartition(":")[0]


def named_states(tree: Mapping[str, JsonValue], optimizer: str, layout: Layout) -> States:
    """Decode the state an optimizer had at an entry, with names in place of tensors."""
    names: dict[int, str] = {}
    stand_ins: list[torch.Tensor] = []

    def lookup(name: str) -> torch.Tensor:
        if name not in layout.index_of:
            raise IntegrityError(f"the saved state refers to the tensor {name!r}, which is not part of it")
        spec = layout.tensors[layout.index_of[name]]
        stand_in = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        stand_ins.append(stand_in)
        names[id(stand_in)] = name
        return stand_in

    def named(value: object) -> object:
        return Named(names[id(value)]) if id(value) in names else value

    return {
        parameter: {key: named(value) for key, value in state.items()}
        for parameter, state in optimizer_states(tree, optimizer, lookup).items()
    }


def why_whole(updates: Sequence[RecordedUpdate], layout: Layout, entry: Entry, states: States) -> str | None:
    """Say why a log cannot be replayed chunk by chunk, or return None.

    Raises
    ------
    StateMismatchError
        The optimizer's class is none of torch's: it cannot be replayed without the program.
    """
    first = updates[0]
    if any(update.layout != first.layout for update in updates):
        return "parameters or groups change within the log"
    if any(update.record.class_name != first.record.class_name for update in updates):
        return "the optimizer's class changes within the log"
    cls = optimizer_class(first.record.class_name)
    if not is_elementwise(cls):
        return f"{cls.__name__} mixes the elements of a tensor"
    seen: set[str] = set()
    for index in touched(updates, layout):
        spec = layout.tensors[index]
        known = entry.layout.index_of.get(spec.name)
        if known is None or entry.layout.tensors[known].shape != spec.shape:
            return f"{spec.name} is not part of the entry"
        reason = _why_whole_state(states.get(spec.name, {}), spec.shape, entry, seen)
        if reason is None and not states.get(spec.name) and not _keeps_nothing(cls, updates):
            reason = "has no state yet"
        if reason is not None:
            return f"{spec.name} {reason}"
        if not pieces_by_tensor(layout)[index]:
            return f"{spec.name} lies in no chunk"
    return None


def _why_whole_state(
    state: Mapping[str, object], shape: tuple[int, ...], entry: Entry, seen: set[str]
) -> str | None:
    for key, value in state.items():
        if not isinstance(value, Named):
            if value is not None:
                return f"keeps {key!r} as a plain value"
            return f"has no {key!r} yet"
        if value.name in seen:
            return f"shares {key!r} with another parameter"
        seen.add(value.name)
        spec = entry.layout.tensors[entry.layout.index_of[value.name]]
        if key in ELEMENTWISE_STATE:
            if spec.shape != shape:
                return f"keeps {key!r} in another shape"
        elif key not in SCALAR_STATE:
            return f"keeps {key!r}, which is not known"
    return None


def _keeps_nothing(cls: type[Optimizer], updates: Sequence[RecordedUpdate]) -> bool:
    """SGD without momentum is the one class that never has any state."""
    return cls is torch.optim.SGD and all(
        not group.get("momentum") for update in updates for group in update.record.decoded_groups()
    )


def touched(updates: Sequence[RecordedUpdate], layout: Layout) -> list[int]:
    """Tensors of the layout that had a gradient in at least one update."""
    found: set[int] = set()
    for update in updates:
        record = update.record
        members = {index for group in range(len(record.groups)) for index in record.group_params(group)}
        found |= members - set(record.missing)
    return sorted(index for index in found if index < len(layout.tensors))


class OptimizerLog:
    """The log of one optimizer after an entry; see ``why_whole`` for when it may be used.

    Parameters
    ----------
    entry : Entry
    layout : Layout
        Gradient layout of all `updates`.
    updates : sequence of RecordedUpdate
    states : States
        At the entry.
    tally : Tally
    checked : callable
        ``checked(pieces)`` with weights by ``(name, start)``; told of each replayed chunk.

    Attributes
    ----------
    names : frozenset of str
        Tensors of the state that this log changes.
    """

    def __init__(
        self,
        entry: Entry,
        layout: Layout,
        updates: Sequence[RecordedUpdate],
        states: States,
        tally: Tally,
        checked: Callable[[Mapping[tuple[str, int], Bytes]], None],
    ) -> None:
        self._entry = entry
        self._layout = layout
        self._updates = updates
        self._states = states
        self._stages = reading_stages([tally])
        self._checked = checked
        self._class = optimizer_class(updates[0].record.class_name)
        self._decoded = [DecodedUpdate.decode(update.record, self._class) for update in updates]
        self._touched = frozenset(touched(updates, layout))
        self._recent: Recent[dict[tuple[str, int], Bytes]] = Recent()
        self._owner: dict[str, tuple[int, bool]] = {}
        for index in self._touched:
            name = layout.tensors[index].name
            self._owner[name] = (index, True)
            for key, value in states.get(name, {}).items():
                if isinstance(value, Named):
                    self._owner[value.name] = (index, key in ELEMENTWISE_STATE)
        self.names = frozenset(self._owner)

    async def piece(self, name: str, start: int, stop: int) -> Bytes:
        """Return elements [start, stop) of a tensor this log changes, as they are after it."""
        index, elementwise = self._owner[name]
        dtype = self._entry.layout.tensors[self._entry.layout.index_of[name]].dtype
        item_bytes = ITEM_BYTES[dtype]
        places = pieces_by_tensor(self._layout)[index]
        if not elementwise:
            # One value for all of the parameter: any of its chunks leads to it.
            whole = (await self._part(places[0].part))[name, 0]
            return whole[start * item_bytes : stop * item_bytes]
        found = []
        for place in places:
            low, high = max(start, place.piece.start), min(stop, place.piece.stop)
            if low < high:
                data = (await self._part(place.part))[name, place.piece.start]
                first = (low - place.piece.start) * item_bytes
                found.append(data[first : first + (high - low) * item_bytes])
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.uint8)

    async def _part(self, part: int) -> dict[tuple[str, int], Bytes]:
        """Replay one chunk; results by tensor name and first element."""
        known = self._recent.find(part)
        if known is not None:
            return known
        pieces = [
            (place, piece)
            for place, piece in enumerate(self._layout.chunks[part].pieces)
            if piece.tensor in self._touched
        ]
        slices = [await self._slice(piece) for _, piece in pieces]
        for first, gradients in self._batches(part):
            views = []
            for update in gradients:
                buffer = await decoded_gradient(update, part, self._stages, Here())
                views.append(None if buffer is None else part_gradients(self._layout, part, buffer))

            def gradient_of(
                k: int, index: int, views: Sequence[dict[int, torch.Tensor] | None] = tuple(views)
            ) -> torch.Tensor | None:
                found = views[k]
                return None if found is None else found[pieces[index][0]]

            decoded = self._decoded[first : first + len(gradients)]
            replay_slices(self._class, decoded, slices, gradient_of)
        results: dict[tuple[str, int], Bytes] = {}
        for cut in slices:
            results.update(self._results(cut))
        self._checked(results)
        return self._recent.keep(part, results, sum(data.nbytes for data in results.values()))

    def _batches(self, part: int) -> Iterator[tuple[int, Sequence[RecordedUpdate]]]:
        count = max(1, BATCH_BYTES // max(1, self._layout.chunks[part].size_bytes))
        for first in range(0, len(self._updates), count):
            yield first, self._updates[first : first + count]

    async def _slice(self, piece: Piece) -> Slice:
        """Copy one piece of a parameter and of its state out of the entry."""
        spec = self._layout.tensors[piece.tensor]
        whole = piece.stop - piece.start == spec.element_count
        shape = spec.shape if whole else (piece.stop - piece.start,)
        state: dict[str, object] = {}
        for key, value in self._states.get(spec.name, {}).items():
            if not isinstance(value, Named):
                state[key] = value
            elif key in ELEMENTWISE_STATE:
                state[key] = await self._tensor(value.name, piece.start, piece.stop, shape)
            else:
                own = self._entry.layout.tensors[self._entry.layout.index_of[value.name]]
                state[key] = await self._tensor(value.name, 0, own.element_count, own.shape)
        weight = await self._tensor(spec.name, piece.start, piece.stop, shape)
        return Slice(piece.tensor, piece.start, piece.stop, weight, state)

    async def _tensor(self, name: str, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
        index = self._entry.layout.index_of[name]
        data = await self._entry.piece(index, start, stop)
        return bytes_to_tensor(data, self._entry.layout.tensors[index].dtype, shape)

    def _results(self, cut: Slice) -> Iterator[tuple[tuple[str, int], Bytes]]:
        name = self._layout.tensors[cut.tensor].name
        yield (name, cut.start), tensor_bytes(cut.weight)
        before = self._states.get(name, {})
        for key, value in cut.state.items():
            owner = before.get(key)
            if isinstance(owner, Named) and isinstance(value, torch.Tensor):
                start = cut.start if key in ELEMENTWISE_STATE else 0
                yield (owner.name, start), tensor_bytes(value)
            elif value is not None:
                raise IntegrityError(f"{name}: the updates made state {key!r} that the entry does not have")
