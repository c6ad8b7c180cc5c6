"""A cheap guard over an optimizer's state: whether anything but an update changed it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import cast

import torch
from torch.optim import Optimizer

__all__ = ["StateWatch"]

ENTRIES_MAX = 1024
"""Parameters whose state is looked at each time. Of more, as many after each update, in turn: memory
that was not touched for a while makes each look cost 0.4 us, three times a step, and what changes
state outside of updates (loading, resetting moments) rarely means one parameter in ten thousand."""

_version = attrgetter("_version")


class StateWatch:
    """Tells whether an optimizer's state was replaced or written to since it was last remembered.

    Two flat passes in C over the values, by ``id`` and by ``_version``. Writes that bump no version
    (fused CPU kernels, ``.data``) are for the proof to find.

    Parameters
    ----------
    optimizer : Optimizer
    parameters : sequence of Parameter
        All that the optimizer steps.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._parts = [parameters[k : k + ENTRIES_MAX] for k in range(0, len(parameters), ENTRIES_MAX)]
        self._part: Sequence[torch.Tensor] = ()
        self._turn = 0
        self.remember()

    def remember(self) -> None:
        """Take the state of now as unchanged."""
        self._state: object = self._optimizer.state
        self._count = len(self._optimizer.state)
        if self._parts:
            self._part = self._parts[self._turn % len(self._parts)]
            self._turn += 1
        # Not the values themselves: an optimizer that replaces them must be able to free the old.
        self._marks = self._marks_now()

    def changed(self) -> str | None:
        """Say how the state changed, or return None."""
        state = self._optimizer.state
        if state is not self._state or len(state) < self._count:
            return "its state was replaced without an update, as load_state_dict does"
        if self._marks_now() != self._marks:
            return "its state was written to without an update"
        return None

    def _marks_now(self) -> tuple[list[int], list[object]]:
        # Unlike reading an entry, ``get`` makes none. An empty one adds nothing here.
        found = map(self._optimizer.state.get, self._part)
        entries = cast("list[dict[str, object]]", list(filter(None, found)))
        try:
            values = list(chain.from_iterable(map(dict.values, entries)))
        except TypeError:
            # An entry that is no dictionary; only the entries themselves are then compared.
            return list(map(id, entries)), []
        try:
            versions = list(map(_version, values))
        except (AttributeError, RuntimeError):
            # Numbers and None have no version, nor have tensors made in inference mode.
            versions = [_version_or_none(value) for value in values]
        return list(map(id, values)), versions


def _version_or_none(value: object) -> object:
    try:
        return _version(value)
    except (AttributeError, RuntimeError):
        return None
