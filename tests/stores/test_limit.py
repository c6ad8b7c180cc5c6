"""Uploads keep to a number of requests and a bandwidth, by any clock."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from stepwell.stores.limit import Limits
from stepwell.stores.remote import RemoteStore
from stepwell.stores.remote_options import RemoteOptions

if TYPE_CHECKING:
    from s3_rig import Bucket

_names = itertools.count(1)


class Clock:
    """Time that passes only while everybody sleeps."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        wake_s = self.now_s + pause_s
        await asyncio.sleep(0)
        self.now_s = max(self.now_s, wake_s)


async def test_bytes_are_admitted_at_the_rate_that_was_asked_for() -> None:
    clock = Clock()
    limits = Limits(4, 1000.0, clock=clock, sleep=clock.sleep)
    begun: list[float] = []
    for size_bytes in (5000, 1000, 0, 2000, 1):
        async with limits.admitted(size_bytes):
            begun.append(clock.now_s - 50.0)
    assert begun == [0.0, 5.0, 5.0, 6.0, 8.0]


async def test_time_without_requests_is_not_saved_up() -> None:
    clock = Clock()
    limits = Limits(4, 1000.0, clock=clock, sleep=clock.sleep)
    clock.now_s += 3600.0
    begun: list[float] = []
    for _ in range(3):
        async with limits.admitted(500):
            begun.append(clock.now_s - 3650.0)
    assert begun == [0.0, 0.5, 1.0]


async def test_so_many_requests_at_one_time_first_come_first_served() -> None:
    limits = Limits(2)
    running = 0
    order: list[int] = []
    doors = [asyncio.Event() for _ in range(6)]
    entered = [asyncio.Event() for _ in range(6)]

    async def request(at: int) -> None:
        nonlocal running
        async with limits.admitted():
            running += 1
            assert running <= 2
            order.append(at)
            entered[at].set()
            await doors[at].wait()
            running -= 1

    async with asyncio.TaskGroup() as group:
        for at in range(6):
            group.create_task(request(at))
            await asyncio.sleep(0)
        for at in range(6):
            await entered[at].wait()
            doors[at].set()
    assert order == list(range(6))
    assert running == 0


async def test_who_gives_up_waiting_takes_nobody_elses_turn() -> None:
    clock = Clock()
    paying = asyncio.Event()

    async def sleep(pause_s: float) -> None:
        assert pause_s == 10.0
        paying.set()
        await asyncio.Event().wait()

    limits = Limits(1, 10.0, clock=clock, sleep=sleep)
    async with limits.admitted():
        waiting = [asyncio.ensure_future(_enter(limits)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0)
    assert await waiting[1] is None
    async with limits.admitted(100):
        pass
    # Ten seconds are to be waited for now; whoever is cancelled in them gives turn and bandwidth back.
    late = asyncio.ensure_future(_enter(limits, 1000))
    await paying.wait()
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert limits._paid_until == clock.now_s + 10.0
    assert limits._free == 1


async def _enter(limits: Limits, size_bytes: int = 0) -> None:
    async with limits.admitted(size_bytes):
        return


def test_turns_pass_between_event_loops() -> None:
    """The runner's loop and a reader's share one store."""
    store = RemoteStore(RemoteOptions(f"memory://limit-{os.getpid()}-{next(_names)}", requests_max=1))

    async def write(name: str) -> None:
        for at in range(50):
            await store.put(f"{name}{at}", [b"x"])

    async def both() -> None:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, write(name)) for name in "abc"))

    asyncio.run(both())

    async def count() -> int:
        return len([key async for key in store.list()])

    assert asyncio.run(count()) == 150


@pytest.mark.parametrize("requests_max", [1, 3])
async def test_a_batch_over_http_keeps_to_its_requests(s3: Bucket, requests_max: int) -> None:
    store = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint, requests_max=requests_max))
    await store.put_batch([(f"k{at}", [bytes(50_000)]) for at in range(20)])
    assert s3.proxy.count("PUT") == 20
    assert s3.proxy.at_once_max <= requests_max
