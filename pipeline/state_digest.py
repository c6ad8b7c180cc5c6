"""One hash over the states of all optimizers: what a replay made of them is compared with.

Weights alone do not tell a wrong moment: RMSprop's first update, say, hardly depends on the size of a
gradient, so a torn one leaves the weights as they were and the moment wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash

from stepwell.errors import StepwellError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import dtype_name
from stepwell.pipeline.collected import state_prefix
from stepwell.pipeline.digester import Digester
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.tree import escape_segment

__all__ = ["StateDigester"]


class StateDigester:
    """Hashes names, shapes and bits of the optimizers' states; plans once while its tensors stay.

    Parameters
    ----------
    live : LiveState
    chunk_bytes : int
    """

    def __init__(self, live: LiveState, chunk_bytes: int) -> None:
        self._live = live
        self._chunk_bytes = chunk_bytes
        self._tensors: list[torch.Tensor] = []
        self._digester: Digester | None = None

    def digest(self) -> str | None:
        """Return the hash of the states of now, hexadecimal; None where they cannot all be read here.

        That is so for states on an accelerator, and for what is not kept in ``optimizer.state``.
        """
        if any(ref.custom for ref in self._live.optimizers):
            return None
        whole = xxhash.xxh3_64()
        tensors: list[torch.Tensor] = []
        for _, _, value in self._entries():
            if isinstance(value, torch.Tensor):
                if not value.is_cpu:
                    return None
                tensors.append(value)
            elif isinstance(value, bool | int | float):
                whole.update(f"{len(tensors)}:{value!r};".encode())
        try:
            digester = self._planned(tensors)
        except StepwellError:
            return None  # of a kind that cannot be saved; the next base will name it
        whole.update(digester.layout.hash.encode())
        for part in range(len(digester.layout.chunks)):
            whole.update(digester.digest(part).encode())
        return whole.hexdigest()

    def _planned(self, tensors: list[torch.Tensor]) -> Digester:
        known = self._digester
        same = len(tensors) == len(self._tensors) and all(map(_same, tensors, self._tensors))
        if known is not None and same:
            return known
        named = {
            f"{prefix}/{escape_segment(key)}": value
            for prefix, key, value in self._entries()
            if isinstance(value, torch.Tensor)
        }
        specs = [
            TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), Kind.AUX)
            for name, tensor in named.items()
        ]
        digester = Digester(plan_layout(specs, chunk_bytes=self._chunk_bytes), named)
        # Detached, so that they go on showing the old memory when `tensor.data = x` gives it another.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._digester = digester
        return digester

    def _entries(self) -> Iterator[tuple[str, object, object]]:
        """Every value of every state, in an order that does not depend on how it came about."""
        for ref in self._live.optimizers:
            state = ref.optimizer.state
            for group, names in zip(ref.optimizer.param_groups, ref.parameters, strict=True):
                for parameter, name in zip(group["params"], names, strict=True):
                    if parameter in state:
                        prefix = state_prefix(ref.name, name)
                        for key in sorted(state[parameter], key=str):
                            yield prefix, key, state[parameter][key]


def _same(new: torch.Tensor, old: torch.Tensor) -> bool:
    return (
        new.data_ptr() == old.data_ptr()
        and new.shape == old.shape
        and new.dtype is old.dtype
        and new.stride() == old.stride()
    )
