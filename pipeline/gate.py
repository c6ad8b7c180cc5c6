"""Where saves pass one at a time, and are held back once the process is to end."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

__all__ = ["Gate"]


class Gate:
    """A context manager around each save.

    ``hold`` and ``go_on`` are for signal handlers, which may interrupt the thread inside: neither
    waits for a lock that it could hold.

    Parameters
    ----------
    held_s : float
        Longest time a save is held back; the process ends before, unless somebody catches that.
    """

    def __init__(self, held_s: float) -> None:
        self._held_s = held_s
        self._idle = threading.Event()
        self._idle.set()
        self._held: threading.Event | None = None

    def hold(self) -> None:
        """Let no further save begin until `go_on`."""
        self._held = threading.Event()

    def go_on(self) -> None:
        """Take `hold` back."""
        held, self._held = self._held, None
        if held is not None:
            held.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no save is inside; after `hold` none comes any more."""
        return self._idle.wait(timeout_s)

    def __enter__(self) -> Self:
        """Pass, or wait while held."""
        # Busy first, then the look: whoever holds and then finds the gate idle has stopped us.
        self._idle.clear()
        held = self._held
        if held is not None:
            self._idle.set()
            held.wait(self._held_s)
            self._idle.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave."""
        self._idle.set()
