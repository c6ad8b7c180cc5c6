from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import partial

import pytest

from stepwell.stores.threads import BACKGROUND_NICE, Workers


async def test_results_come_in_order_and_the_first_error_counts() -> None:
    workers = Workers("test", 4)
    assert await workers.run_all([lambda at=at: at * at for at in range(20)]) == [at * at for at in range(20)]
    ended: list[int] = []

    def work(at: int) -> None:
        ended.append(at)
        if at in {3, 5}:
            raise ValueError(at)

    with pytest.raises(ValueError, match="3"):
        await workers.run_all([lambda at=at: work(at) for at in range(10)])
    assert sorted(ended) == list(range(10))
    workers.close()
    assert await workers.run(lambda: "again after close") == "again after close"
    workers.close()


async def test_never_more_threads_than_told() -> None:
    workers, mutex, counts = Workers("test", 3), threading.Lock(), [0, 0]
    together = threading.Barrier(3)

    def work() -> None:
        with mutex:
            counts[0] += 1
            counts[1] = max(counts)
        together.wait(20)
        with mutex:
            counts[0] -= 1

    await workers.run_all([work] * 9)
    assert counts == [0, 3]
    workers.close()


async def test_cancelled_call_first_waits_for_its_thread() -> None:
    workers = Workers("test", 1)
    go_on, ended, never = threading.Event(), threading.Event(), threading.Event()
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(20)
        ended.set()

    task = asyncio.ensure_future(workers.run_all([work, never.set]))
    await begun.wait()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()  # impatience does not help
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert not never.is_set()
    workers.close()


async def test_deadline_of_the_caller_works() -> None:
    workers, go_on = Workers("test", 1), threading.Event()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await workers.run(lambda: go_on.wait(20))
    workers.close()


async def test_buffers_are_free_when_the_call_ends() -> None:
    # Symptom: BufferError when the caller resized its buffer just after a put.
    workers = Workers("test", 2)
    for _ in range(200):
        buffer = bytearray(100)
        assert await workers.run(partial(len, memoryview(buffer))) == 100
        buffer += b"can be resized: nobody holds it"
    workers.close()


@pytest.mark.skipif(
    not hasattr(os, "getpriority") or sys.platform != "linux", reason="threads have no priority here"
)
async def test_threads_fall_behind_when_told_and_not_before() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = os.getpriority(os.PRIO_PROCESS, 0)
    workers = Workers("test", 1)
    assert await workers.run(priority) == own
    workers.fall_behind()
    assert await workers.run(priority) == min(19, own + BACKGROUND_NICE)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "the caller keeps its own"
    workers.close()
