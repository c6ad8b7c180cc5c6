"""SIGTERM: bring the newest step to safety within the deadline, then let the signal do its work."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

__all__ = ["Drainable", "TermHandler"]

POKE_S = 0.1


class Drainable(Protocol):
    """What is brought to safety."""

    def hold(self) -> None:
        """Begin no further save. Called in the handler: waits for nothing."""
        ...

    def drain(self) -> None:
        """Wait, up to a deadline of its own, until what was saved is safe. Called in a thread."""
        ...

    def go_on(self) -> None:
        """Take `hold` back. Called in the handler."""
        ...


class TermHandler:
    """Handles SIGTERM while a run is open.

    Handlers run on the main thread between two bytecodes, wherever training is, maybe inside a
    save that holds a lock which the background threads need to finish. So the handler itself waits
    for nothing: it starts a thread that waits, and training goes on meanwhile, at most to its next
    save. When all is safe, or the deadline is over, the thread sends the signal once more, and this
    time it is passed on: to the handler that was there before, or without one the process ends by
    the signal, as it would have.

    Parameters
    ----------
    run : Drainable
    """

    def __init__(self, run: Drainable) -> None:
        self._run = run
        self._pid = os.getpid()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = False
        self._draining = False
        self._drained = False
        self._poked = False

    def install(self) -> bool:
        """Install the handler; False outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._before = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        return True

    def remove(self) -> None:
        """Put the handler back that was there before, unless somebody has replaced ours since.

        A signal that came and was not passed on yet is sent once more.
        """
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        # Bound methods are made anew on each access: compare by equality.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            if self._draining:
                self._draining = False
                signal.raise_signal(signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child inherits the handler but none of the threads that could finish anything.
        if os.getpid() != self._pid:
            self._pass_on(number, frame)
        elif not self._draining:
            if self._poked:
                self._poked = False  # the echo of one that was passed on
                return
            self._draining, self._drained = True, False
            self._run.hold()
            # Not threading.Thread: its start takes a lock that the interrupted thread may hold.
            _thread.start_new_thread(self._drain, ())
        elif self._drained:
            self._draining = False
            try:
                self._pass_on(number, frame)
            finally:
                self._run.go_on()

    def _drain(self) -> None:
        try:
            self._run.drain()
        finally:
            self._drained = True
            main = threading.main_thread().ident or 0
            while self._draining:
                signal.pthread_kill(main, signal.SIGTERM)
                # A main thread that was just about to wait for a lock sleeps over a signal; the next
                # one wakes it.
                time.sleep(POKE_S)
                self._poked = self._draining
            self._poked = False

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
