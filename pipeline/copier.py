"""One background thread that moves held tensors into capture slots, in order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from stepwell.errors import DeadlineError, UsageError
from stepwell.pipeline.workers import become_background

__all__ = ["Copier"]


class Copier:
    """Runs copies one after another in a thread of its own with one torch thread.

    The thread starts with the first copy. What is submitted is bounded by the capture slots the
    copies go into. ``submit`` and ``close`` belong to the trainer's thread.
    """

    def __init__(self, name: str = "stepwell-copier") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` after all earlier ones; the future has its outcome and cannot be cancelled.

        Raises
        ------
        UsageError
            Closed, or this is a forked child, where the thread does not exist.
        """
        if self._closed:
            raise UsageError("the capture is closed; open the run again")
        if self._pid != os.getpid():
            raise UsageError("this process was forked from the one that opened the run; open it here anew")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        # A running future refuses to be cancelled: nobody may free a buffer under the copy.
        future.set_running_or_notify_cancel()
        self._queue.put((work, future))
        return future

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted and end the thread.

        Raises
        ------
        DeadlineError
            The thread still copies after `timeout_s`; its buffers must not be freed.
        """
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._queue.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            raise DeadlineError(f"the background copy of gradients did not end within {timeout_s} s")

    def _run(self) -> None:
        become_background()
        while self._step():
            pass

    def _step(self) -> bool:
        """Run one copy. A function of its own, so that no reference outlives it while the queue is empty."""
        item = self._queue.get()
        if item is None:
            return False
        work, future = item
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return True
