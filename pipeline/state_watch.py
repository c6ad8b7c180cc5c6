"""A cheap guard over an optimizer's state: whether anything but an update changed it."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import cast

from torch.optim import Optimizer

__all__ = ["StateWatch"]

_version = attrgetter("_version")


class StateWatch:
    """Tells whether an optimizer's state was replaced or written to since it was last remembered.

    Two flat passes in C over the values, by ``id`` and by ``_version``: tens of nanoseconds each.
    Writes that bump no version (fused CPU kernels, ``.data``) are for the proof to find.

    Parameters
    ----------
    optimizer : Optimizer
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.remember()

    def remember(self) -> None:
        """Take the state of now as unchanged."""
        self._state: object = self._optimizer.state
        self._count = len(self._optimizer.state)
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
        # Reading a parameter's state makes an empty entry, which adds nothing here.
        entries = cast("list[dict[str, object]]", list(self._optimizer.state.values()))
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
