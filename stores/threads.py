"""Blocking work of a store, off the event loop.

A cancelled await does not stop a thread, and the caller frees its buffers as soon as the call
ends. So a cancelled call here first waits for its threads, and only then raises.

Threads that work beside the training run behind it: see `lower_priority`. Those of a restore do not,
since the training waits for them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Generic, TypeVar

from stepwell.errors import UsageError

__all__ = ["Workers", "lower_priority", "wait_apart"]

T = TypeVar("T")

BACKGROUND_NICE = 10
"""A tenth of a processor where others want all of them, and all of one they leave idle. With equal
priority the threads of a base took turns with the training step, which waited 150 to 350 ms of 1,700
for a processor (two cores, one of them training)."""


def lower_priority(nice: int = BACKGROUND_NICE) -> None:
    """Lower the priority of the calling thread where the system schedules threads one by one (Linux)."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except (OSError, AttributeError):
        # A container may forbid it; the thread then competes like any other, which is only slower.
        return


def wait_apart(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine in a loop and a thread of its own and wait: the caller may be inside a running loop."""
    with ThreadPoolExecutor(1, "stepwell-apart") as pool:
        return pool.submit(asyncio.run, work).result()


class Workers:
    """A bounded pool of threads that any event loop of this process may use.

    Threads start with the first call, and end with `close` or when the object is collected.

    Parameters
    ----------
    name : str
        Prefix of the names of the threads.
    count : int
        Number of threads at most.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._behind = False
        self._local = threading.local()

    def fall_behind(self) -> None:
        """Lower the priority of all threads, each when it next works."""
        self._behind = True

    def check_process(self) -> None:
        """Raise UsageError in a forked child: threads and locks of the parent do not exist there."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self._name} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}; open it again there, or start processes with 'spawn'"
            )

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in a thread and return what it returns."""
        return (await self.run_all([function]))[0]

    async def run_all(self, functions: Iterable[Callable[[], T]]) -> list[T]:
        """Run all functions, `count` at a time, and return their results in order.

        All have ended when this returns or raises; of several errors the first in order is raised.
        """
        self.check_process()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        batch = _Batch([_Call(function) for function in functions])
        # One future a thread, not one a function: a base has thousands of small files.
        threads = min(self._count, len(batch.calls))
        await _until_settled([self._pool.submit(self._work, batch) for _ in range(threads)], batch.stop)
        return batch.results()

    def _work(self, batch: _Batch[T]) -> None:
        if self._behind and not getattr(self._local, "behind", False):
            self._local.behind = True
            lower_priority()
        batch.work()

    def close(self) -> None:
        """Let the threads end once they are idle. A later call starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and os.getpid() == self._pid:
            pool.shutdown(wait=False)


class _Call(Generic[T]):
    """Lets go of a function, and of the buffers it was given, before anyone hears that it ended.

    The executor itself keeps what it ran for a moment longer.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function

    def __call__(self) -> T:
        function, self._function = self._function, None
        assert function is not None
        return function()


class _Batch(Generic[T]):
    """Functions that several threads work off, each taking the next one."""

    def __init__(self, calls: Sequence[_Call[T]]) -> None:
        self.calls = calls
        self._next = count()
        self._stopped = False
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}

    def work(self) -> None:
        """Take and run functions until none is left. Taking is atomic: ``next`` of a C iterator."""
        while not self._stopped and (index := next(self._next)) < len(self.calls):
            try:
                self._results[index] = self.calls[index]()
            except BaseException as error:  # raised by ``results``, in order
                self._errors[index] = error

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True

    def results(self) -> list[T]:
        """Return all results in order, or raise the first error in order."""
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[index] for index in range(len(self.calls))]


async def _until_settled(futures: Sequence[Future[None]], stop: Callable[[], None]) -> None:
    """Wait until every future is done; when cancelled, begin nothing more, wait, raise."""
    waiting = [asyncio.wrap_future(future) for future in futures]
    pending = set(waiting)
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
            for future in futures:
                future.cancel()
            pending = {each for each in waiting if not each.done()}
    for each in waiting:
        if not each.cancelled():
            each.exception()  # marks it as seen; the caller takes errors from the batch
    if cancelled is not None:
        raise cancelled
