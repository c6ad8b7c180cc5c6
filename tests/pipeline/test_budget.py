"""The byte budget: what is admitted, in which order, and that cancelling loses nothing."""

from __future__ import annotations

import asyncio

import pytest

from stepwell.pipeline.budget import ByteBudget


async def waiting(budget: ByteBudget, size_bytes: int) -> asyncio.Task[None]:
    """Start an acquire and let it get as far as it can."""
    task = asyncio.ensure_future(budget.acquire(size_bytes))
    await asyncio.sleep(0)
    return task


async def test_work_is_admitted_up_to_the_limit() -> None:
    budget = ByteBudget(10)
    await budget.acquire(6)
    await budget.acquire(4)
    third = await waiting(budget, 1)
    assert not third.done()
    budget.release(4)
    await third
    assert (budget.used_bytes, budget.peak_bytes) == (7, 10)


async def test_an_item_larger_than_everything_runs_alone_instead_of_never() -> None:
    budget = ByteBudget(10)
    await budget.acquire(1)
    large = await waiting(budget, 100)
    assert not large.done()
    budget.release(1)
    await large
    small = await waiting(budget, 1)
    assert not small.done()
    budget.release(100)
    await small
    assert budget.peak_bytes == 100


async def test_first_come_first_served_so_that_a_large_item_is_not_starved() -> None:
    budget = ByteBudget(10)
    await budget.acquire(8)
    large = await waiting(budget, 9)
    small = await waiting(budget, 1)
    assert not small.done(), "it would fit, but it came later"
    budget.release(8)
    await large
    await small
    assert budget.used_bytes == 10


async def test_cancelled_before_its_turn() -> None:
    budget = ByteBudget(10)
    await budget.acquire(10)
    first, second = await waiting(budget, 10), await waiting(budget, 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    budget.release(10)
    await second
    assert budget.used_bytes == 2


async def test_cancelled_ahead_of_who_would_have_fitted_lets_it_in() -> None:
    budget = ByteBudget(10)
    await budget.acquire(5)
    first, second = await waiting(budget, 9), await waiting(budget, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(second, 5)
    assert budget.used_bytes == 7


async def test_cancelled_in_the_very_moment_of_its_turn_gives_it_back() -> None:
    budget = ByteBudget(10)
    await budget.acquire(10)
    task = await waiting(budget, 10)
    budget.release(10)  # its turn is set, it has not run yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert budget.used_bytes == 0
    await asyncio.wait_for(budget.acquire(10), 5)


async def test_admit_releases_whatever_happens() -> None:
    budget = ByteBudget(10)

    async def work() -> None:
        async with budget.admit(7):
            assert budget.used_bytes == 7
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert budget.used_bytes == 0


async def test_nothing_needs_no_room() -> None:
    budget = ByteBudget(1)
    await budget.acquire(1)
    await asyncio.wait_for(budget.acquire(0), 5)
    budget.release(0)
    assert budget.used_bytes == 1


def test_no_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        ByteBudget(0)
