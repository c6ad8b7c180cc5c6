"""Replay: from a base and the gradients of every update since, the state after them, bit for bit.

`BlockedReplay` works chunk by chunk (elementwise optimizers), `StepwiseReplay` update by update over
whole tensors (all others). Both run torch's own ``step`` of the recorded class with the recorded
groups; neither runs anyone's hooks. One replay serves the updates of one optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from stepwell.errors import IntegrityError, StateMismatchError, UsageError
from stepwell.pipeline.bits import copy_exact, dense
from stepwell.pipeline.blocks import (
    BLOCK_ELEMENTS,
    DecodedUpdate,
    GradientOf,
    Slice,
    replay_slices,
    same_value,
)
from stepwell.pipeline.layout import Layout, LayoutChunk
from stepwell.pipeline.parts import Gradient, checked_weight, part_gradients
from stepwell.pipeline.plan import pieces_by_tensor
from stepwell.pipeline.private import ELEMENTWISE_STATE, SCALAR_STATE, is_elementwise
from stepwell.pipeline.stepwise import State, StepwiseReplay
from stepwell.pipeline.update import UpdateRecord

__all__ = ["BlockedReplay", "Gradient", "State", "StepwiseReplay", "blocks_exactly"]


def blocks_exactly(
    optimizer: type[Optimizer], records: Sequence[UpdateRecord], weights: Mapping[str, torch.Tensor]
) -> bool:
    """Say whether `BlockedReplay` gives the bits of the recorded updates; if not, use `StepwiseReplay`.

    Not for optimizers that mix elements, and not for fused kernels over weights that are not
    contiguous: those run in memory order, where our cuts, in logical order, lie elsewhere.
    """
    if not is_elementwise(optimizer):
        return False
    fused = any(group.get("fused") is True for record in records for group in record.groups)
    return not fused or all(weight.is_contiguous() for weight in weights.values())


class BlockedReplay:
    """Applies updates chunk by chunk, in place, in any order of chunks.

    Parameters
    ----------
    optimizer : type
        An elementwise class.
    weights : mapping
        Parameter name to tensor, changed in place. Names of `layout` that are absent are left
        out; their chunks need not be run.
    state : mutable mapping
        Parameter name to state dictionary, changed in place. A parameter without state yet is
        absent or has an empty dictionary.
    layout : Layout
        Gradient layout of every record; its tensors are named like the weights.
    records : sequence of UpdateRecord
        Of one optimizer, oldest first.
    block_elements : int
        A multiple of 64.

    Raises
    ------
    UsageError
        The class is not elementwise, or its kernels depend on places this replay would change.
    StateMismatchError
        A record is of another class, or a tensor of another shape or dtype than in the layout.
    """

    def __init__(
        self,
        optimizer: type[Optimizer],
        weights: Mapping[str, torch.Tensor],
        state: State,
        layout: Layout,
        records: Sequence[UpdateRecord],
        *,
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        if not blocks_exactly(optimizer, records, weights):
            raise UsageError(f"{optimizer.__name__} cannot be replayed by blocks here: use StepwiseReplay")
        self._optimizer = optimizer
        self._layout = layout
        self._state = state
        self._block_elements = block_elements
        self._updates = [DecodedUpdate.decode(record, optimizer) for record in records]
        self._tensors: dict[int, _Whole] = {}
        pieces = [len(found) for found in pieces_by_tensor(layout)]
        for index, spec in enumerate(layout.tensors):
            if spec.name in weights:
                weight = checked_weight(layout, index, weights[spec.name])
                self._tensors[index] = _Whole(spec.name, weight, state.get(spec.name, {}), pieces[index])

    def run_chunk(self, part: int, gradients: Sequence[Gradient]) -> None:
        """Apply all updates to one chunk.

        Parameters
        ----------
        part : int
            Index in ``layout.chunks``; each is run once.
        gradients : sequence
            One per record: the chunk's bytes, uint8, or None where no tensor of the chunk had a
            gradient. Not written into; need to live only during the call.

        Raises
        ------
        IntegrityError
            A gradient that was recorded is missing, or has another length.
        """
        assert len(gradients) == len(self._updates), (len(gradients), len(self._updates))
        chunk = self._layout.chunks[part]
        cuts = [self._tensors.get(piece.tensor) for piece in chunk.pieces]
        slices, places = self._slices(chunk, cuts)
        views: list[dict[int, torch.Tensor] | None] = [
            None if buffer is None else part_gradients(self._layout, part, buffer) for buffer in gradients
        ]

        def gradient_of(k: int, index: int) -> torch.Tensor | None:
            found = views[k]
            return None if found is None else found[places[index]]

        replay_slices(
            self._optimizer, self._updates, slices, gradient_of, block_elements=self._block_elements
        )
        for cut in slices:
            self._tensors[cut.tensor].take(cut)

    def _slices(self, chunk: LayoutChunk, owners: Sequence[_Whole | None]) -> tuple[list[Slice], list[int]]:
        slices, places = [], []
        for place, (piece, owner) in enumerate(zip(chunk.pieces, owners, strict=True)):
            if owner is not None:
                slices.append(owner.slice(piece.tensor, piece.start, piece.stop))
                places.append(place)
        return slices, places

    def finish(self, *, partial: bool = False) -> None:
        """Write what is one per parameter (``step``) and state that the updates made.

        Parameters
        ----------
        partial : bool
            Allow tensors of which only some chunks were run (an offline view of one chunk). Their
            other elements keep the old state; where the updates made an entry, those are zeros.

        Raises
        ------
        UsageError
            Some, but not all, chunks of a tensor were run, and not `partial`.
        """
        for index, whole in self._tensors.items():
            if whole.pieces == 0:
                # An empty tensor lies in no chunk, yet its ``step`` counts.
                empty = whole.slice(index, 0, 0)
                replay_slices(self._optimizer, self._updates, [empty], _no_elements(empty.weight))
                whole.take(empty)
            whole.finish(self._state, partial)


def _no_elements(weight: torch.Tensor) -> GradientOf:
    return lambda _k, _index: weight.new_empty(0)


class _Whole:
    """One parameter being replayed piece by piece."""

    def __init__(self, name: str, weight: torch.Tensor, state: dict[str, object], pieces: int) -> None:
        self.name = name
        self.pieces = pieces
        self._run = 0
        self._weight = weight
        self._flat = dense(weight)
        self._state = state
        # Elementwise entries, contiguous; the live tensor itself where it already is.
        self._entries: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            if key in ELEMENTWISE_STATE and isinstance(value, torch.Tensor):
                if value.shape != weight.shape:
                    shapes = f"{list(value.shape)}, the weight {list(weight.shape)}"
                    raise StateMismatchError(f"{name}: state {key!r} has shape {shapes}")
                self._entries[key] = dense(value)
        self._order: list[str] = []
        self._scalars: dict[str, object] = {}

    def slice(self, tensor: int, start: int, stop: int) -> Slice:
        """Cut elements [start, stop) out of the weight and the state."""
        state: dict[str, object] = {}
        for key, value in self._state.items():
            if key in self._entries:
                state[key] = self._part(self._entries[key], start, stop)
            elif key in SCALAR_STATE or value is None:
                state[key] = value
        return Slice(tensor, start, stop, self._part(self._flat, start, stop), state)

    def take(self, cut: Slice) -> None:
        """Keep what the updates left in a slice beside what they changed in place."""
        self._run += 1
        self._order = list(cut.state)
        for key, value in cut.state.items():
            if key in SCALAR_STATE or not isinstance(value, torch.Tensor):
                if key in self._scalars and not same_value(value, self._scalars[key]):
                    raise IntegrityError(f"{self.name}: chunks disagree about {key!r} after replay")
                self._scalars[key] = value
                continue
            if key not in self._entries:
                shape = self._weight.shape
                self._entries[key] = torch.zeros(shape, dtype=value.dtype, device=value.device)
            target = self._part(self._entries[key], cut.start, cut.stop)
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)

    def finish(self, state: State, partial: bool) -> None:
        if self._run == 0:
            return
        if self._run < self.pieces and not partial:
            raise UsageError(f"{self.name}: {self._run} of {self.pieces} chunks were replayed")
        if self._flat.data_ptr() != self._weight.data_ptr():
            copy_exact(self._weight, self._flat)
        if not self._order:
            return
        written = state.setdefault(self.name, self._state)
        for key in self._order:
            made = self._entries.get(key, self._scalars.get(key))
            current = written.get(key)
            if not isinstance(made, torch.Tensor):
                written[key] = made
            elif not isinstance(current, torch.Tensor) or current.dtype != made.dtype:
                written[key] = self._ordered(made) if key in self._entries else made
            elif current.data_ptr() != made.data_ptr():
                # In place: a captured CUDA graph knows the address of ``step``.
                copy_exact(current, made)

    def _ordered(self, made: torch.Tensor) -> torch.Tensor:
        """Give a new entry the memory order of its weight, as ``zeros_like`` gives it."""
        if self._weight.is_contiguous():
            return made
        ordered = torch.empty_like(self._weight, dtype=made.dtype)
        copy_exact(ordered, made)
        return ordered

    def _part(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if stop - start == tensor.numel():
            return tensor
        return tensor.view(-1)[start:stop]
