"""Threads of the pipeline's own: CPU and blocking work never runs on the loop or on the trainer's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from stepwell.stores.threads import lower_priority

__all__ = ["Workers", "become_background", "use_one_torch_thread"]

Result = TypeVar("Result")


class Workers:
    """A pool of background threads that use one torch thread each.

    Parameters
    ----------
    count : int
        Threads.
    name : str
        Prefix of the threads' names.
    background : bool
        Whether they run behind the training; not those the trainer waits for.
    """

    def __init__(self, count: int, name: str, *, background: bool = True) -> None:
        prepare = become_background if background else use_one_torch_thread
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=prepare)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` in a thread and wait for it.

        A cancelled wait does not stop the thread: the wait goes on until the function has
        returned, and only then passes the cancellation on, so no buffer is freed under it.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                # Shielded because the buffers of a running thread must outlive it.
                try:
                    await asyncio.shield(asyncio.wait([future]))
                except asyncio.CancelledError:
                    continue
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what the caller hears of
            raise

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Run `function` in a thread; for callers that are in no event loop."""
        return self._pool.submit(function)

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def use_one_torch_thread() -> None:
    """Make torch use one thread in the calling thread, and only there.

    ``torch.set_num_threads`` also sets the number that threads started later begin with (measured),
    so a short-lived thread sets that back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if before != 1:
        restorer = threading.Thread(target=torch.set_num_threads, args=(before,), name="stepwell-threads")
        restorer.start()
        restorer.join()


def become_background() -> None:
    """Make the calling thread one that works behind the training, with one torch thread."""
    use_one_torch_thread()
    lower_priority()
