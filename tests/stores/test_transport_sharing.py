from __future__ import annotations

import asyncio

import pytest

from stepwell.errors import NoSpaceError, PermanentStoreError, TransientStoreError
from stepwell.stores.transport.outcome import GoneError
from stepwell.stores.transport.sharing import Bring, Settle, Share, Worker, cut, part_for, share_out

SHARES = cut(0, 100, 10)


async def out(*workers: Worker, attempts_max: int = 2, slow_s: float = 60.0) -> None:
    await share_out(SHARES, workers, attempts_max=attempts_max, backoff_s=0.0, slow_s=slow_s)


def bringing(into: list[Share]) -> Bring:
    async def bring(share: Share, again: bool) -> None:
        await asyncio.sleep(0)
        into.append(share)

    return bring


def failing(error: Exception, count: list[int]) -> Bring:
    async def bring(share: Share, again: bool) -> None:
        count.append(1)
        raise error

    return bring


def test_cut() -> None:
    assert cut(3, 25, 10) == [Share(3, 10), Share(13, 10), Share(23, 2)]
    assert cut(5, 5, 10) == []


def test_parts_are_neither_tiny_nor_too_few() -> None:
    mib = 1 << 20
    assert part_for(10 * mib, 2, 32 * mib) == -(-10 * mib // 8)
    assert part_for(3 * mib, 2, 32 * mib) == mib
    assert part_for(1 << 40, 2, 32 * mib) == 32 * mib
    assert part_for(0, 0, 5) == 5


async def test_every_share_is_brought_once() -> None:
    first: list[Share] = []
    second: list[Share] = []
    await out(Worker(bringing(first)), Worker(bringing(second)))
    assert sorted(first + second, key=lambda share: share.start) == SHARES
    assert first
    assert second


async def test_nothing_to_do_asks_nobody() -> None:
    await share_out([], [Worker(failing(PermanentStoreError(""), []))], attempts_max=1, backoff_s=0, slow_s=1)
    await share_out([], [], attempts_max=1, backoff_s=0, slow_s=1)


@pytest.mark.parametrize(
    ("error", "tries"), [(TransientStoreError("t"), 2), (PermanentStoreError("p"), 1), (GoneError("g"), 1)]
)
async def test_what_one_fails_at_another_does(error: Exception, tries: int) -> None:
    count: list[int] = []
    brought: list[Share] = []
    await out(Worker(failing(error, count)), Worker(bringing(brought)))
    assert sorted(brought, key=lambda share: share.start) == SHARES
    assert len(count) <= tries


async def test_when_all_fail_the_last_error_is_raised() -> None:
    count: list[int] = []
    workers = [Worker(failing(NoSpaceError("full"), count)) for _ in range(3)]
    with pytest.raises(NoSpaceError, match="full"):
        await out(*workers)
    assert len(count) == 3


async def test_one_failure_between_successes_is_forgiven() -> None:
    turns = iter(range(1000))
    brought: list[Share] = []

    async def every_other(share: Share, again: bool) -> None:
        if next(turns) % 2:
            raise TransientStoreError("now and then")
        brought.append(share)

    await out(Worker(every_other))
    assert sorted(brought, key=lambda share: share.start) == SHARES


async def test_who_is_slow_is_overtaken_and_settled_after() -> None:
    stuck = asyncio.Event()
    ended: list[str] = []

    async def slow(share: Share, again: bool) -> None:
        assert not again
        try:
            await stuck.wait()
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def quick(share: Share, again: bool) -> Settle | None:
        await asyncio.sleep(0)
        return (lambda: ended.append("settled")) if again else None

    await out(Worker(slow), Worker(quick), slow_s=0.01)
    # What the slow one was at was brought by the other, and settled only when it had let go.
    assert ended[:2] == ["slow", "settled"]
    assert set(ended) == {"slow", "settled"}


async def test_who_does_not_get_ready_is_not_waited_for() -> None:
    never = asyncio.Event()
    brought: list[Share] = []

    async def wait() -> None:
        await never.wait()

    async def refuse() -> None:
        raise PermanentStoreError("not here")

    await out(
        Worker(failing(AssertionError(), []), wait),
        Worker(failing(AssertionError(), []), refuse),
        Worker(bringing(brought)),
    )
    assert len(brought) == len(SHARES)
    with pytest.raises(PermanentStoreError, match="not here"):
        await out(Worker(bringing(brought), refuse))


async def test_who_gets_ready_late_saves_the_day() -> None:
    ready = asyncio.Event()
    brought: list[Share] = []

    async def fail(share: Share, again: bool) -> None:
        ready.set()
        raise PermanentStoreError("gone")

    async def wait() -> None:
        await ready.wait()

    await out(Worker(fail), Worker(bringing(brought), wait))
    assert sorted(brought, key=lambda share: share.start) == SHARES


async def test_cancelled_it_leaves_nobody_at_work() -> None:
    at_work = 0

    async def bring(share: Share, again: bool) -> None:
        nonlocal at_work
        at_work += 1
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            at_work -= 1

    started = asyncio.Event()
    task = asyncio.ensure_future(out(Worker(bring), Worker(bring)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert at_work == 0
