from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stepwell.errors import (
    MissingObjectError,
    NoSpaceError,
    ObjectExistsError,
    PermanentStoreError,
    TransientStoreError,
)
from stepwell.stores.base import ObjectStore
from stepwell.stores.fault import Fault, FaultEvent, FaultKind, FaultStore
from stepwell.stores.file import FileStore
from stepwell.stores.testing import StoreContract, fetched


@pytest.fixture
def inner(memory_directory: Path) -> FileStore:
    return FileStore(memory_directory / "root")


@pytest.fixture
def store(inner: FileStore) -> FaultStore:
    return FaultStore(inner)


class TestContractWithoutFaults(StoreContract):
    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        assert isinstance(store, FaultStore)
        return await fetched(store.inner, key) if await store.inner.exists(key) else None


@pytest.mark.parametrize(
    ("kind", "error", "done"),
    [
        (FaultKind.UNAVAILABLE, TransientStoreError, False),
        (FaultKind.UNANSWERED, TransientStoreError, True),
        (FaultKind.DENIED, PermanentStoreError, False),
        (FaultKind.FULL, NoSpaceError, False),
    ],
)
async def test_errors(inner: FileStore, kind: FaultKind, error: type[Exception], done: bool) -> None:
    store = FaultStore(inner, 7, [Fault(kind, "put")])
    with pytest.raises(error, match="seed 7") as caught:
        await store.put("k", [b"12345"])
    assert type(caught.value) is error
    assert await inner.exists("k") is done
    await store.put("k", [b"12345"])
    assert await fetched(inner, "k") == b"12345"
    assert store.events == [FaultEvent(kind, "put", "k")]


async def test_lost_and_torn_writes_are_acknowledged(inner: FileStore) -> None:
    store = FaultStore(inner, 1, [Fault(FaultKind.LOST, key="lost"), Fault(FaultKind.TORN, key="torn")])
    await store.put_batch([("lost", [b"x"]), ("torn", [b"0123", b"456789"]), ("whole", [b"x"])])
    assert not await inner.exists("lost")
    left = await fetched(inner, "torn")
    assert len(left) < 10
    assert b"0123456789".startswith(left)
    assert await fetched(inner, "whole") == b"x"


async def test_torn_read_has_one_flipped_bit(inner: FileStore) -> None:
    store = FaultStore(
        inner, 1, [Fault(FaultKind.TORN, "fetch", times=2), Fault(FaultKind.LOST, "fetch", after=2)]
    )
    await store.put("k", [bytes(100)])
    for _ in range(2):
        assert sum(byte.bit_count() for byte in await fetched(store, "k")) == 1
    with pytest.raises(MissingObjectError):
        await store.fetch("k")
    assert await fetched(store, "k") == bytes(100)


async def test_duplicated_create_answers_that_it_exists(inner: FileStore) -> None:
    store = FaultStore(inner, 0, [Fault(FaultKind.DUPLICATED, times=None)])
    await store.put("p", [b"x"])
    with pytest.raises(ObjectExistsError):
        await store.create("k", [b"mine"])
    assert await fetched(inner, "k") == b"mine"


async def test_stalled_calls_wait_until_released(inner: FileStore) -> None:
    store = FaultStore(inner, 0, [Fault(FaultKind.STALL, "put", "slow*", times=None)])
    calls = [asyncio.ensure_future(store.put(f"slow{at}", [b"x"])) for at in range(3)]
    await store.put("quick", [b"x"])
    assert not any(call.done() for call in calls)
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    assert not calls[1].done()
    store.release()
    await asyncio.gather(*calls[1:])
    assert sorted([key async for key in inner.list()]) == ["quick", "slow1", "slow2"]


async def test_slow_waits_by_the_given_clock(inner: FileStore) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    store = FaultStore(inner, 0, [Fault(FaultKind.SLOW, "delete", delay_s=3600.0)], sleep=sleep)
    await store.put("k", [b"x"])
    await store.delete("k")
    assert waited == [3600.0]
    assert not await inner.exists("k")


async def hits(inner: FileStore, seed: int) -> list[FaultEvent]:
    store = FaultStore(inner, seed, [Fault(FaultKind.UNAVAILABLE, "put", times=None, chance=0.3)])
    for at in range(40):
        try:
            await store.put(f"k{at}", [b"x"])
        except TransientStoreError:
            continue
    return store.events


async def test_same_seed_same_faults(inner: FileStore) -> None:
    first = await hits(inner, 3)
    assert 0 < len(first) < 40
    assert await hits(inner, 3) == first
    assert await hits(inner, 4) != first


async def test_counts_of_the_plan(inner: FileStore) -> None:
    store = FaultStore(inner, 0, [Fault(FaultKind.DENIED, "put", "a/*", after=2, times=1)])
    await store.put("b", [b""])
    await store.put("a/1", [b""])
    await store.put("a/2", [b""])
    with pytest.raises(PermanentStoreError):
        await store.put("a/3", [b""])
    await store.put("a/4", [b""])
    assert "seed=0" in repr(store)
    assert store.boundary_count == 8
