"""An event loop in a thread of its own, for what belongs to one loop and is used from any.

A cancelled await here does as ``stepwell.stores.threads`` does: it waits until the work has let go of
the caller's buffers, and only then raises.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from stepwell.errors import UsageError
from stepwell.stores.threads import lower_priority

__all__ = ["LoopThread"]

T = TypeVar("T")

_END_S = 10.0  # for the thread to end; what it waits for has deadlines of its own


class LoopThread:
    """A thread with an event loop, started by the first call and ended by `close`, or when collected.

    Parameters
    ----------
    name : str
        Of the thread.
    last : callable, optional
        Gives a coroutine that runs in the loop before it ends. Must not refer to this object.
    """

    def __init__(self, name: str, last: Callable[[], Coroutine[object, object, None]] | None = None) -> None:
        self._name = name
        self._last = last
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._engine: _Engine | None = None
        self._finalizer: weakref.finalize[[], LoopThread] | None = None
        self._behind = False

    def fall_behind(self) -> None:
        """Lower the priority of the thread, when it next works."""
        self._behind = True

    async def run(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run the coroutine that `work` gives in the thread, and return what it returns.

        Raises
        ------
        UsageError
            In a forked child: the thread does not exist there.
        """
        call = _Call(work)
        del work  # the call alone holds it, and lets go before anyone hears that it ended
        self._started().submit(call)
        waiting = asyncio.wrap_future(call.ended)
        cancelled: asyncio.CancelledError | None = None
        while not waiting.done():
            try:
                await asyncio.wait({waiting})
            except asyncio.CancelledError as error:
                cancelled = error
                call.cancel()
        if cancelled is not None:
            waiting.exception()  # seen
            raise cancelled
        return waiting.result()

    def _started(self) -> _Engine:
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self._name} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}; open it again there, or start processes with 'spawn'"
            )
        with self._mutex:
            if self._engine is None:
                self._engine = _Engine(self._name, self._last)
                self._finalizer = weakref.finalize(self, self._engine.stop)
            if self._behind:
                self._engine.fall_behind()
            return self._engine

    def close(self) -> None:
        """Cancel what runs, and end the thread; a later call starts a new one."""
        with self._mutex:
            engine, self._engine = self._engine, None
            if self._finalizer is not None:
                self._finalizer.detach()
        if engine is None or os.getpid() != self._pid:
            return
        engine.stop()
        if threading.current_thread() is not engine.thread:
            engine.thread.join(_END_S)


class _Engine:
    """The thread. Holds no reference to its `LoopThread`, which can so be collected."""

    def __init__(self, name: str, last: Callable[[], Coroutine[object, object, None]] | None) -> None:
        self._last = last
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._behind = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()
        self._ready.wait()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as self._group:
                self._ready.set()
                await self._stop.wait()
                for task in asyncio.all_tasks():
                    if task is not asyncio.current_task():
                        task.cancel()
        finally:
            if self._last is not None:
                await self._last()

    def submit(self, call: _Call[T]) -> None:
        """Run a call; from any thread."""
        try:
            self._loop.call_soon_threadsafe(call.start, self._group)
        except RuntimeError as error:  # the loop is closed
            raise UsageError(f"{self.thread.name} was closed while it was used") from error

    def fall_behind(self) -> None:
        """Lower the priority of the thread, once."""
        if not self._behind:
            self._behind = True
            self._loop.call_soon_threadsafe(lower_priority)

    def stop(self) -> None:
        """Let the thread end; from any thread."""
        with suppress(RuntimeError):  # it ended already
            self._loop.call_soon_threadsafe(self._stop.set)


class _Call(Generic[T]):
    """One call from another loop."""

    def __init__(self, work: Callable[[], Coroutine[object, object, T]]) -> None:
        self._work: Callable[[], Coroutine[object, object, T]] | None = work
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancelled = False
        self.ended: Future[T] = Future()
        self.ended.set_running_or_notify_cancel()  # cannot be cancelled by who waits: it ends by itself

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begin, in the loop of the thread."""
        self._loop = asyncio.get_running_loop()
        self._task = group.create_task(self._run())
        self._task.add_done_callback(self._settle)
        if self._cancelled:  # before there was a task; from here on `cancel` finds it
            self._task.cancel()

    def _settle(self, task: asyncio.Task[None]) -> None:
        """Let the caller know also where the task was cancelled before its first step."""
        self._work = None
        if not self.ended.done():
            self.ended.set_exception(asyncio.CancelledError())

    def cancel(self) -> None:
        """Ask the call to end; from any thread."""
        self._cancelled = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

    async def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            result = await work()
        except asyncio.CancelledError as error:
            del work
            # Not by who waits for it: then the thread is being closed.
            self.ended.set_exception(error if self._cancelled else UsageError("closed while it was used"))
        except Exception as error:  # somebody waits for it, and the group goes on
            del work
            self.ended.set_exception(error)
        else:
            del work
            self.ended.set_result(result)
