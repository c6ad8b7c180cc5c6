from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transport_rig import memory_store

from stepwell.errors import IntegrityError, MissingObjectError, NoSpaceError, ObjectExistsError
from stepwell.stores.base import ObjectStore
from stepwell.stores.file import FileStore
from stepwell.stores.landing import LandingStore, begin_put, look
from stepwell.stores.memory import MemoryStore


@pytest.fixture
def memory(memory_directory: Path) -> Iterator[MemoryStore]:
    with memory_store(memory_directory) as store:
        yield store


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, memory: MemoryStore, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield memory
    else:
        files = FileStore(tmp_path / "files")
        yield files
        files.close()


async def test_what_landed_is_published(store: ObjectStore) -> None:
    landing = await begin_put(store, 5)
    landing.buffer[:] = b"bytes"
    assert not await store.exists("k")
    await landing.publish("k", replace=False)
    landing.discard()
    assert bytes(await store.fetch("k")) == b"bytes"


async def test_a_key_that_is_there_leaves_the_landing_to_the_caller(store: ObjectStore) -> None:
    await store.put("k", [b"old"])
    landing = await begin_put(store, 3)
    landing.buffer[:] = b"new"
    with pytest.raises(ObjectExistsError):
        await landing.publish("k", replace=False)
    assert bytes(await store.fetch("k")) == b"old"
    await landing.publish("k", replace=True)
    assert bytes(await store.fetch("k")) == b"new"
    landing.discard()


async def test_looking_at_a_part(store: ObjectStore) -> None:
    await store.put("k", [b"0123456789"])
    sight = await look(store, "k", 3, 4)
    assert (bytes(sight.view), sight.size_bytes, sight.view.readonly) == (b"3456", 10, True)
    assert sight.valid()
    assert bytes((await look(store, "k", 8)).view) == b"89"
    assert (await look(store, "k", 0, 0)).size_bytes == 10
    for start, length in ((0, 11), (11, None), (11, 0)):
        with pytest.raises(IntegrityError):
            await look(store, "k", start, length)
    with pytest.raises(MissingObjectError):
        await look(store, "nothing")


async def test_nothing_is_copied_where_the_store_is_memory(memory: MemoryStore) -> None:
    assert isinstance(memory, LandingStore)
    landing = await begin_put(memory, 100_000)
    address = np.frombuffer(landing.buffer, np.uint8).ctypes.data
    await landing.publish("k", replace=True)
    sight = await look(memory, "k")
    assert np.frombuffer(sight.view, np.uint8).ctypes.data == address
    assert np.frombuffer(await memory.fetch("k"), np.uint8).ctypes.data == address


async def test_a_view_knows_when_its_object_is_gone(memory: MemoryStore) -> None:
    await memory.put("k", [b"first"])
    first = await look(memory, "k")
    assert first.generation
    await memory.put("k", [b"other"])
    second = await look(memory, "k")
    assert second.generation not in (0, first.generation)
    assert (first.valid(), second.valid()) == (False, True)
    await memory.delete("k")
    await memory.put("l", [b"the file again"])
    assert not second.valid()


async def test_a_discarded_landing_is_free_again(memory: MemoryStore) -> None:
    landing = await begin_put(memory, 50_000)
    assert memory.arena.used_bytes
    landing.discard()
    landing.discard()
    assert memory.arena.used_bytes == 0
    with pytest.raises(NoSpaceError):
        await begin_put(memory, 1 << 50)
    assert memory.arena.used_bytes == 0


async def test_a_cancelled_reservation_is_given_back(memory: MemoryStore) -> None:
    for _ in range(20):
        task = asyncio.ensure_future(memory.begin_put(3_000_000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert memory.arena.used_bytes == 0
