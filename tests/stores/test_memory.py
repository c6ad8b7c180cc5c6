from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests

from stepwell.errors import MissingObjectError, ObjectExistsError, PermanentStoreError, UsageError
from stepwell.stores.arena import Arena
from stepwell.stores.base import Failure, ObjectStore
from stepwell.stores.header import PAGE_BYTES
from stepwell.stores.memory import MemoryStore
from stepwell.stores.space import capacity_for
from stepwell.stores.testing import StoreContract, fetched


@pytest.fixture
def arena(memory_directory: Path) -> Iterator[Arena]:
    opened = Arena.open(memory_directory / "arena", run="run")
    yield opened
    opened.close()


@pytest.fixture
def store(arena: Arena) -> Iterator[MemoryStore]:
    opened = MemoryStore(arena)
    yield opened
    opened.close()


class TestContract(StoreContract):
    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        # As another process sees it: from the files alone.
        assert isinstance(store, MemoryStore)
        region = Arena.inspect(store.arena.directory).find(key)
        return None if region is None else bytes(region.contents)


class TestZarr(StoreTests[MemoryStore, cpu.Buffer]):
    store_cls = MemoryStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, arena: Arena) -> dict[str, object]:
        return {"arena": arena}

    @pytest.fixture
    async def store(self, open_kwargs: dict[str, object]) -> MemoryStore:
        return await MemoryStore.open(**open_kwargs)

    async def set(self, store: MemoryStore, key: str, value: Buffer) -> None:
        content = value.to_bytes()
        region = store.arena.reserve(len(content))
        region.payload[: len(content)] = content
        store.arena.publish(region, key, len(content))

    async def get(self, store: MemoryStore, key: str) -> Buffer:
        region = store.arena.find(key)
        assert region is not None
        return cpu.Buffer.from_bytes(bytes(region.contents))

    def test_store_repr(self, store: MemoryStore) -> None:
        assert repr(store) == f"MemoryStore({str(store.arena.directory)!r}, read_only=False)"

    def test_store_supports_writes(self, store: MemoryStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: MemoryStore) -> None:
        assert store.supports_listing


def test_promises(store: MemoryStore) -> None:
    assert store.properties.survives is Failure.PROCESS
    assert not store.properties.needs_commit_record
    assert store.properties.conditional_create


async def test_publish_and_fetch_copy_nothing(store: MemoryStore, arena: Arena) -> None:
    region = arena.reserve(100_000)
    written = np.frombuffer(region.payload, np.uint8)
    written[:] = 7
    await store.publish(region, "base", 100_000)
    seen = np.frombuffer(await store.fetch("base", 10, 100), np.uint8)
    assert seen.ctypes.data == written.ctypes.data + 10
    assert not seen.flags.writeable
    assert written.ctypes.data % 4096 == 0


async def test_region_stays_the_callers_when_publish_is_refused(store: MemoryStore, arena: Arena) -> None:
    region = arena.reserve(10)
    with pytest.raises(PermanentStoreError):
        await store.publish(region, "../x", 10)
    with pytest.raises(UsageError):
        await store.publish(region, "x", 10**9)
    region.payload[:2] = b"ok"
    await store.publish(region, "x", 2)
    assert await fetched(store, "x") == b"ok"


async def test_failed_put_gives_its_region_back(store: MemoryStore, arena: Arena) -> None:
    await store.create("k", [b"x"])
    used = arena.used_bytes
    for _ in range(3):
        with pytest.raises(ObjectExistsError):
            await store.create("k", [bytes(100_000)])
    assert arena.used_bytes == used


async def test_300_steps_of_changing_size_stay_bounded(store: MemoryStore, arena: Arena) -> None:
    sizes = np.random.default_rng(0).integers(150_000, 200_000, 300)
    high: list[int] = []
    for step, size_bytes in enumerate(sizes):
        await store.put(f"step/{step}.pack", [bytes(int(size_bytes))])
        await store.put(f"step/{step}.json", [b"manifest"])
        if step >= 10:
            await store.delete(f"step/{step - 10}.pack")
            await store.delete(f"step/{step - 10}.json")
        high.append(arena.used_bytes + arena.free_bytes)
    on_disk = sum(entry.stat().st_size for entry in arena.directory.iterdir() if entry.name[0] in "os")
    assert on_disk == high[-1]
    # Eleven steps live at one time; one more of each size may be between free and used.
    assert max(high) <= 12 * (capacity_for(200_000) + PAGE_BYTES) + 12 * 2 * PAGE_BYTES


async def test_zarr_get_owns_its_bytes(store: MemoryStore) -> None:
    from zarr.core.buffer.core import default_buffer_prototype

    await store.put("k", [b"a" * 5000])
    got = await store.get("k", default_buffer_prototype())
    await store.delete("k")
    await store.put("l", [b"b" * 5000])
    assert got is not None
    assert got.to_bytes() == b"a" * 5000


async def test_inspecting_store_reads_beside_the_owner(store: MemoryStore, arena: Arena) -> None:
    reader = MemoryStore(Arena.inspect(arena.directory))
    assert reader.read_only
    await store.put("k", [b"one"])
    assert await fetched(reader, "k") == b"one"
    await store.put("k", [b"two!"])
    assert await fetched(reader, "k") == b"two!"
    assert [key async for key in reader.list()] == ["k"]
    await store.delete("k")
    with pytest.raises(MissingObjectError):
        await reader.fetch("k")
    with pytest.raises(PermanentStoreError, match="read-only"):
        await reader.put("k", [b"x"])


async def test_inspecting_reader_never_sees_a_mix(store: MemoryStore, arena: Arena) -> None:
    reader = MemoryStore(Arena.inspect(arena.directory))
    writing = True
    await store.put("k", [bytes(30_000)])

    async def write() -> None:
        nonlocal writing
        for at in range(60):
            # The same file is used over and over: what a reader must not be fooled by.
            await store.delete("k")
            await store.put("k", [bytes([at]) * 30_000])
        writing = False

    async def read() -> None:
        while writing:
            try:
                content = await fetched(reader, "k")
            except MissingObjectError:
                continue
            assert len(set(content)) == 1

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(read())


async def test_copies_share_the_arena(store: MemoryStore) -> None:
    await store.put("k", [b"x"])
    for other in (copy.copy(store), pickle.loads(pickle.dumps(store)), store.with_read_only(True)):
        assert await fetched(other, "k") == b"x"
        assert (other == store) == (not other.read_only)


def test_memory_does_not_travel_to_another_process(store: MemoryStore) -> None:
    script = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    child = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(store),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == 1
    assert b"UsageError" in child.stderr
    assert b"Arena.inspect" in child.stderr


def test_use_in_a_forked_child_raises_at_once(store: MemoryStore) -> None:
    # Symptom: hangs under forked process pools.
    asyncio.run(store.put("k", [b"x"]))
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
        child = os.fork()
    if child == 0:
        try:
            asyncio.run(store.put("k", [b"y"]))
            os.write(writing, b"no error")
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    assert b"forked" in os.read(reading, 4096)
    os.close(reading)
    assert asyncio.run(fetched(store, "k")) == b"x"
