from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Iterator

import pytest

from stepwell.errors import UsageError
from stepwell.stores.loop_thread import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    running = LoopThread("loop-of-test")
    yield running
    running.close()


async def name() -> str:
    return threading.current_thread().name


def test_runs_in_its_own_thread_from_any_loop(thread: LoopThread) -> None:
    assert asyncio.run(thread.run(name)) == "loop-of-test"
    assert asyncio.run(thread.run(name)) == "loop-of-test"
    thread.close()
    assert asyncio.run(thread.run(name)) == "loop-of-test"  # a new one


async def test_errors_reach_the_caller_and_the_thread_goes_on(thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        await thread.run(fail)
    assert await thread.run(name) == "loop-of-test"


async def test_a_cancelled_call_ends_before_its_caller_does(thread: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    task = asyncio.ensure_future(thread.run(work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    # Also one that was cancelled before it began.
    task = asyncio.ensure_future(thread.run(work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_ends_what_runs_with_an_error(thread: LoopThread) -> None:
    started = threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(thread.run(work))
    await asyncio.to_thread(started.wait)
    await asyncio.to_thread(thread.close)
    with pytest.raises(UsageError, match="closed while it was used"):
        await task


def test_the_last_thing_runs_when_closed_and_when_collected() -> None:
    ran: list[str] = []

    async def last() -> None:
        ran.append(threading.current_thread().name)

    thread = LoopThread("closed", last)
    asyncio.run(thread.run(name))
    thread.close()
    thread.close()
    assert ran == ["closed"]
    thread = LoopThread("collected", last)
    asyncio.run(thread.run(name))
    (worker,) = [each for each in threading.enumerate() if each.name == "collected"]
    del thread
    gc.collect()
    worker.join(30)
    assert ran == ["closed", "collected"]


def test_use_in_a_forked_child_raises_at_once(thread: LoopThread) -> None:
    asyncio.run(thread.run(name))
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
        child = os.fork()
    if child == 0:
        try:
            asyncio.run(thread.run(name))
            os.write(writing, b"no error")
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    assert b"forked" in os.read(reading, 4096)
    os.close(reading)
