"""Proof of the chain: recorded updates, replayed from one state, must give the next one, bit for bit.

Everything is compared unit by unit, so that a proof needs the memory of a chunk and not of a model. A
unit is one chunk of the gradient layout where the optimizer is elementwise, the tensors of a chunk where
each depends on itself alone, and everything for a class that is not torch's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
import xxhash
from torch.optim import Optimizer

from stepwell.errors import StepwellError
from stepwell.pipeline.bits import own_copy, tensor_bytes
from stepwell.pipeline.blocks import DecodedUpdate, Slice, replay_slices, same_value
from stepwell.pipeline.layout import Layout, Piece
from stepwell.pipeline.parts import Gradient, part_gradients
from stepwell.pipeline.plan import pieces_by_tensor
from stepwell.pipeline.private import ELEMENTWISE_STATE, SCALAR_STATE, is_elementwise, is_per_tensor
from stepwell.pipeline.stepwise import StepwiseReplay
from stepwell.pipeline.strided import flat_range
from stepwell.pipeline.update import UpdateRecord

__all__ = [
    "Outcome",
    "ProofUpdate",
    "StateSource",
    "Subject",
    "Turn",
    "Unit",
    "Verdict",
    "cut_unit",
    "difference",
    "live_subject",
    "prove_chain",
    "replay_unit",
    "units_of",
]

UPDATES_AT_ONCE = 4
"""Updates whose gradients of one unit are held at a time while a chain is proven."""


class Outcome(StrEnum):
    """What a proof came to."""

    PROVEN = "proven"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one proof.

    Attributes
    ----------
    outcome : Outcome
    what : str
        What was to be proven, for people.
    reason : str
        Why not, naming the first tensor that differs; empty if proven.
    """

    outcome: Outcome
    what: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state to read units from: live, a base, or anything else with tensors.

    Attributes
    ----------
    weights : mapping of parameter name to Tensor
    state : callable
        ``parameter name -> state dictionary``; empty where the optimizer has none.
    """

    weights: Mapping[str, torch.Tensor]
    state: Callable[[str], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Subject:
    """One optimizer whose updates are proven.

    Attributes
    ----------
    index : int
        As in ``UpdateRecord.optimizer``.
    optimizer : type
    layout : Layout
        Gradient layout.
    source : StateSource
        The live state.
    like : Optimizer or None
        The live optimizer.
    """

    index: int
    optimizer: type[Optimizer]
    layout: Layout
    source: StateSource
    like: Optimizer | None = None

    @property
    def sliced(self) -> bool:
        """Whether units are slices of tensors (see ``blocks_exactly``) and not whole tensors."""
        if not is_elementwise(self.optimizer):
            return False
        groups = [] if self.like is None else self.like.param_groups
        fused = self.like is None or any(group.get("fused") for group in groups)
        return not fused or all(weight.is_contiguous() for weight in self.source.weights.values())


@dataclass(frozen=True, slots=True)
class ProofUpdate:
    """One update: its record, and ``gradients(part)``, the bytes of a chunk or None if it had none."""

    record: UpdateRecord
    gradients: Callable[[int], Gradient]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is proven at once: pieces of tensors, and the chunks that hold their gradients."""

    pieces: tuple[Piece, ...]
    parts: tuple[int, ...]
    sliced: bool


@dataclass(slots=True)
class Turn:
    """Which units are proven this time, where all of them would take too long.

    Attributes
    ----------
    next : int
        Unit to begin with; moved on by each one that is proven.
    budget_s : float
        Processor time of the calling thread. One unit is proven in any case.
    """

    next: int = 0
    budget_s: float = float("inf")


def live_subject(
    index: int, optimizer: Optimizer, layout: Layout, parameters: Mapping[str, torch.Tensor]
) -> Subject:
    """Make the subject of a live optimizer.

    Parameters
    ----------
    index : int
    optimizer : Optimizer
    layout : Layout
        Its gradient layout.
    parameters : mapping of name to Parameter
        Exactly the live objects, by which the optimizer keeps its state.
    """
    own = {spec.name: parameters[spec.name] for spec in layout.tensors}

    def state(name: str) -> Mapping[str, object]:
        found: Mapping[str, object] = optimizer.state.get(own[name], {})
        return found

    return Subject(index, type(optimizer), layout, StateSource(own, state), optimizer)


def units_of(subject: Subject) -> list[Unit]:
    """Divide a subject into units; together they cover every tensor once."""
    layout = subject.layout
    if subject.sliced:
        return [Unit(chunk.pieces, (part,), True) for part, chunk in enumerate(layout.chunks)]
    together: dict[int, list[int]] = {}
    for tensor, found in enumerate(pieces_by_tensor(layout)):
        first = found[0].part if found and is_per_tensor(subject.optimizer) else 0
        together.setdefault(first, []).append(tensor)
    units = []
    for tensors in together.values():
        parts = {place.part for tensor in tensors for place in pieces_by_tensor(layout)[tensor]}
        whole = [Piece(tensor, 0, layout.tensors[tensor].element_count, 0) for tensor in tensors]
        units.append(Unit(tuple(whole), tuple(sorted(parts)), False))
    return units


def cut_unit(subject: Subject, unit: Unit, source: StateSource) -> list[Slice]:
    """Copy a unit out of a state; the slices own their memory."""
    slices = []
    for piece in unit.pieces:
        name = subject.layout.tensors[piece.tensor].name
        weight, state = source.weights[name].detach(), source.state(name)
        if unit.sliced:
            count = weight.numel()
            kept = {
                key: _cut(value, piece, count, key in ELEMENTWISE_STATE)
                for key, value in list(state.items())
                if key in ELEMENTWISE_STATE or key in SCALAR_STATE
            }
            cut = _cut(weight, piece, count, True)
            assert isinstance(cut, torch.Tensor)
            slices.append(Slice(piece.tensor, piece.start, piece.stop, cut, kept))
        else:
            whole = {key: copy.deepcopy(_detached(value)) for key, value in list(state.items())}
            slices.append(Slice(piece.tensor, piece.start, piece.stop, copy.deepcopy(weight), whole))
    return slices


def _cut(value: object, piece: Piece, count: int, elementwise: bool) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if not elementwise or piece.stop - piece.start == count:
        # In its own shape: 0-dim tensors take other paths through type promotion.
        return own_copy(value)
    return own_copy(flat_range(value, piece.start, piece.stop))


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def replay_unit(subject: Subject, unit: Unit, slices: list[Slice], updates: Sequence[ProofUpdate]) -> None:
    """Apply `updates` to a unit that `cut_unit` returned, in place.

    Raises
    ------
    StepwellError
        The updates do not fit the unit, or a gradient is missing.
    """
    layout = subject.layout
    for first in range(0, len(updates), UPDATES_AT_ONCE):
        batch = updates[first : first + UPDATES_AT_ONCE]
        gradients = [{part: update.gradients(part) for part in unit.parts} for update in batch]
        records = [update.record for update in batch]
        if unit.sliced:
            (part,) = unit.parts
            views = [_views(layout, part, found[part]) for found in gradients]
            decoded = [DecodedUpdate.decode(record, subject.optimizer) for record in records]

            def gradient_of(
                k: int, index: int, views: Sequence[Mapping[int, torch.Tensor]] = views
            ) -> torch.Tensor | None:
                return views[k].get(index)

            replay_slices(subject.optimizer, decoded, slices, gradient_of)
            continue
        names = [layout.tensors[cut.tensor].name for cut in slices]
        weights = dict(zip(names, [cut.weight for cut in slices], strict=True))
        state = {name: cut.state for name, cut in zip(names, slices, strict=True)}
        whole = StepwiseReplay(subject.optimizer, weights, state, layout, records, like=subject.like)
        for k, found in enumerate(gradients):
            whole.run_update(k, found)
        whole.finish()
        for name, cut in zip(names, slices, strict=True):
            cut.state = state[name]


def _views(layout: Layout, part: int, buffer: Gradient) -> Mapping[int, torch.Tensor]:
    return {} if buffer is None else part_gradients(layout, part, buffer)


def difference(subject: Subject, have: Sequence[Slice], want: Sequence[Slice]) -> str | None:
    """Name the first place in which two copies of a unit differ, or return None."""
    for left, right in zip(have, want, strict=True):
        name = subject.layout.tensors[left.tensor].name
        where = f"{name}[{left.start}:{left.stop}]"
        if not same_value(left.weight, right.weight):
            return f"the weights {where} differ"
        if left.state.keys() != right.state.keys():
            return f"{name} has the state {sorted(right.state)}, replay gives {sorted(left.state)}"
        for key, value in left.state.items():
            if not same_value(value, right.state[key]):
                return f"{key!r} of {where} differs"
    return None


def prove_chain(
    subject: Subject,
    what: str,
    start: StateSource,
    updates: Sequence[ProofUpdate],
    target: StateSource | Callable[[int], str | None],
    stop: Callable[[], bool] = lambda: False,
    turn: Turn | None = None,
) -> Verdict:
    """Replay all of `updates` from `start`, unit by unit, and compare with `target`.

    Used for a new base against the chain before it, and for the first updates of a run.

    Parameters
    ----------
    subject : Subject
    what : str
        What is proven, for the verdict.
    start : StateSource
    updates : sequence of ProofUpdate
        In order; those of other optimizers are passed over.
    target : StateSource, or callable
        The state to arrive at; or ``part -> xxh3-64 of the weights of that chunk of the gradient
        layout``, None where it is not known (a digest with holes).
    stop : callable
        Asked before each unit; ends the proof as inconclusive.
    turn : Turn, optional
        Prove only as many units as it allows, and let it move on. Default: all.
    """
    own = [update for update in updates if update.record.optimizer == subject.index]
    unknown = 0
    turn = Turn() if turn is None else turn
    began = time.thread_time()
    units = units_of(subject)
    try:
        for count in range(len(units)):
            if count and time.thread_time() - began > turn.budget_s:
                break
            turn.next %= len(units)
            unit = units[turn.next]
            if stop():
                return Verdict(Outcome.INCONCLUSIVE, what, "stopped before its end")
            slices = cut_unit(subject, unit, start)
            replay_unit(subject, unit, slices, own)
            if isinstance(target, StateSource):
                found = difference(subject, slices, cut_unit(subject, unit, target))
            else:
                found, holes = _digests_differ(subject.layout, unit, slices, target)
                unknown += holes
            if found is not None:
                return Verdict(Outcome.MISMATCH, what, found)
            turn.next += 1
    except StepwellError as error:
        # What cannot be replayed now cannot be recovered from later.
        return Verdict(Outcome.MISMATCH, what, f"replay failed: {error}")
    if unknown:
        return Verdict(Outcome.INCONCLUSIVE, what, f"{unknown} chunks have no digest to compare with")
    return Verdict(Outcome.PROVEN, what)


def _digests_differ(
    layout: Layout, unit: Unit, slices: Sequence[Slice], expected: Callable[[int], str | None]
) -> tuple[str | None, int]:
    """Compare the weights of a unit with digests: what differs, and how many chunks have none."""
    by_tensor = {cut.tensor: cut for cut in slices}
    holes = 0
    for part in unit.parts:
        value = expected(part)
        if value is None:
            holes += 1
            continue
        chunk = layout.chunks[part]
        packed = np.zeros(chunk.size_bytes, np.uint8)
        for piece in chunk.pieces:
            cut = by_tensor[piece.tensor]
            raw = tensor_bytes(flat_range(cut.weight, piece.start - cut.start, piece.stop - cut.start))
            packed[piece.offset_bytes : piece.offset_bytes + raw.size] = raw
        if xxhash.xxh3_64_hexdigest(packed.data) != value:
            return f"the digest of the weights in chunk {part} differs", holes
    return None, holes
