"""SIGTERM: bring the newest step to safety within the deadline, then let the signal do its work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["TermHandler"]


class TermHandler:
    """Handles SIGTERM while a run is open.

    The handler runs on the main thread between two bytecodes, wherever training is; what is on its
    way is finished by the background threads meanwhile. Afterwards the handler that was there
    before takes over; without one the process ends by the signal, as it would have.

    Parameters
    ----------
    drain : callable
        Waits, up to its own deadline, until what was saved is safe. Must not take locks that the
        main thread may hold.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._pid = os.getpid()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = False

    def install(self) -> bool:
        """Install the handler; False outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._before = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        return True

    def remove(self) -> None:
        """Put the handler back that was there before, unless somebody has replaced ours since."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        # Bound methods are made anew on each access: compare by equality.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child inherits the handler but none of the threads that could finish anything.
        if os.getpid() == self._pid:
            self._drain()
        before = self._before
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
