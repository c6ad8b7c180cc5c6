"""Replay update by update over whole tensors: for optimizers that mix the elements of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch.optim import Optimizer

from stepwell.errors import IntegrityError, UsageError
from stepwell.pipeline.bits import torch_dtype
from stepwell.pipeline.blocks import DecodedUpdate
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.parts import Gradient, checked_weight, part_gradients
from stepwell.pipeline.private import private_optimizer
from stepwell.pipeline.update import UpdateRecord

__all__ = ["State", "StepwiseReplay"]

State = MutableMapping[str, dict[str, object]]
"""Optimizer state by parameter name."""


class StepwiseReplay:
    """Applies updates one after the other to whole tensors, in place.

    Parameters are as for `BlockedReplay`, and weights and state keep their memory order, which
    the rounding of reductions (Adafactor) depends on.

    Parameters
    ----------
    like : Optimizer, optional
        The live optimizer; needed for classes that are not torch's and keep attributes.
    """

    def __init__(
        self,
        optimizer: type[Optimizer],
        weights: Mapping[str, torch.Tensor],
        state: State,
        layout: Layout,
        records: Sequence[UpdateRecord],
        *,
        like: Optimizer | None = None,
    ) -> None:
        self._layout = layout
        self._state = state
        self._updates = [DecodedUpdate.decode(record, optimizer) for record in records]
        self._next = 0
        self._weights: dict[int, torch.Tensor] = {}
        kept: dict[torch.Tensor, dict[str, object]] = {}
        for index, spec in enumerate(layout.tensors):
            if spec.name in weights:
                weight = checked_weight(layout, index, weights[spec.name])
                self._weights[index] = weight
                if state.get(spec.name):
                    kept[weight] = state[spec.name]
        self._private = private_optimizer(optimizer, [], kept, like)

    def run_update(self, k: int, gradients: Mapping[int, Gradient]) -> None:
        """Apply update `k`; updates are applied in order, each once.

        Parameters
        ----------
        k : int
            Index in the records.
        gradients : mapping
            Chunk index to its bytes; may leave out chunks of tensors that are not replayed or
            had no gradient. Not written into.

        Raises
        ------
        IntegrityError
            A gradient that was recorded is missing, or has another length.
        UsageError
            Not the next update.
        """
        if k != self._next:
            raise UsageError(f"update {k} cannot be replayed now: the next one is {self._next}")
        self._next += 1
        update = self._updates[k]
        wanted = {
            tensor for tensor in self._weights if tensor in update.group_of and tensor not in update.missing
        }
        flat = self._gathered(k, wanted, gradients, update.copies_gradients)
        members = []
        # In the groups' own order: an optimizer that mixes tensors may depend on it.
        for tensor in update.group_of:
            if tensor not in self._weights:
                continue
            weight = self._weights[tensor]
            weight.grad = _strided_like(weight, flat[tensor]) if tensor in wanted else None
            members.append((tensor, weight))
        try:
            update.apply(self._private, members)
        finally:
            for _, weight in members:
                weight.grad = None

    def _gathered(
        self, k: int, wanted: set[int], gradients: Mapping[int, Gradient], copies: bool
    ) -> dict[int, torch.Tensor]:
        """Return the flat gradient of each wanted tensor: views where one chunk holds it all."""
        flat: dict[int, torch.Tensor] = {}
        left = {tensor: self._layout.tensors[tensor].element_count for tensor in wanted}
        for part, chunk in enumerate(self._layout.chunks):
            if chunk.size_bytes == 0 or not any(piece.tensor in wanted for piece in chunk.pieces):
                continue
            buffer = gradients.get(part)
            if buffer is None:
                raise IntegrityError(
                    f"update {k}: the gradient of chunk {part} was recorded but is not there"
                )
            views = part_gradients(self._layout, part, buffer)
            for place, piece in enumerate(chunk.pieces):
                if piece.tensor not in wanted:
                    continue
                count = self._layout.tensors[piece.tensor].element_count
                left[piece.tensor] -= piece.stop - piece.start
                if piece.stop - piece.start == count:
                    view = views[place]
                    flat[piece.tensor] = view.clone() if copies else view
                    continue
                if piece.tensor not in flat:
                    flat[piece.tensor] = torch.empty(
                        count, dtype=views[place].dtype, device=views[place].device
                    )
                flat[piece.tensor][piece.start : piece.stop] = views[place]
        for tensor, count in left.items():
            assert count == 0, f"the layout does not cover {self._layout.tensors[tensor].name}"
            if tensor not in flat:
                flat[tensor] = torch.empty(0, dtype=torch_dtype(self._layout.tensors[tensor].dtype))
        return flat

    def finish(self) -> None:
        """Hand state that the updates made over to the state mapping.

        Raises
        ------
        UsageError
            Not all updates were run.
        """
        if self._next != len(self._updates):
            raise UsageError(f"{self._next} of {len(self._updates)} updates were replayed")
        for index, weight in self._weights.items():
            made = self._private.state.get(weight)
            if made:
                self._state[self._layout.tensors[index].name] = made


def _strided_like(weight: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Give a gradient the memory order of its weight, as autograd gave the live one."""
    gradient = flat.to(weight.device).view(weight.shape)
    if weight.is_contiguous():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
