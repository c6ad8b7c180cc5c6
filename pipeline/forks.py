"""What a forked child must not touch: the runs that its parent has open."""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Protocol

__all__ = ["Forkable", "at_fork"]


class Forkable(Protocol):
    """Something that a forked child has to leave alone."""

    def leave_to_parent(self) -> None:
        """In the child: let go. Takes no lock, since any may have been held at the fork."""
        ...


_OPEN: weakref.WeakSet[Forkable] = weakref.WeakSet()


def at_fork(owner: Forkable) -> None:
    """Call ``owner.leave_to_parent`` in every child that is forked while `owner` lives."""
    _register()
    _OPEN.add(owner)


@cache
def _register() -> None:
    # Only when there is something to protect: nothing happens at import.
    os.register_at_fork(after_in_child=_leave)


def _leave() -> None:
    for owner in list(_OPEN):
        owner.leave_to_parent()
