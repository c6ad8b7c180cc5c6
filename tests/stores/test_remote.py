"""Object storage keeps the contract: S3 over HTTP, memory, and S3 through fsspec."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests

from stepwell.errors import (
    ConfigError,
    IntegrityError,
    MissingObjectError,
    ObjectExistsError,
    PermanentStoreError,
    UsageError,
)
from stepwell.stores.base import Failure, ObjectStore
from stepwell.stores.remote import RemoteStore
from stepwell.stores.remote_options import RemoteOptions
from stepwell.stores.split import MAGIC, SplitIndex
from stepwell.stores.testing import StoreContract, fetched

if TYPE_CHECKING:
    from s3_rig import Bucket

_names = itertools.count(1)


def memory_url() -> str:
    return f"memory://test-{os.getpid()}-{next(_names)}/run"


class TestS3(StoreContract):
    """Through tensorstore, over HTTP."""

    @pytest.fixture
    def store(self, s3: Bucket) -> RemoteStore:
        self.bucket = s3
        return RemoteStore(RemoteOptions(s3.url, endpoint=s3.server))

    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        return await asyncio.to_thread(self.bucket.get, f"run/{key}")


class TestFsspec(StoreContract):
    """Through fsspec and s3fs, over HTTP."""

    @pytest.fixture
    def store(self, s3: Bucket) -> RemoteStore:
        pytest.importorskip("s3fs")
        self.bucket = s3
        return RemoteStore(RemoteOptions(f"s3a://{s3.name}/run", endpoint=s3.server))

    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        return await asyncio.to_thread(self.bucket.get, f"run/{key}")


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> RemoteStore:
        return RemoteStore(memory_url())

    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        import tensorstore as ts

        from stepwell.stores.blobs_kv import memory_context

        kv = await ts.KvStore.open(f"{store.url}/", context=memory_context())
        result = await kv.read(key)
        return None if result.state == "missing" else result.value


class TestMemoryInParts(TestMemory):
    """The same where every object above 1,000 bytes is cut, within limits."""

    @pytest.fixture
    def store(self) -> RemoteStore:
        return RemoteStore(
            RemoteOptions(memory_url(), put_bytes_max=1000, requests_max=3, bytes_per_s_max=1e9)
        )

    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        head = await super().stored(store, key)
        if head is None or not head.startswith(MAGIC):
            return head
        index = SplitIndex.decode(head, key)
        whole = super()
        parts = [await whole.stored(store, index.part_key(key, part)) for part in range(index.part_count)]
        return b"".join(part or b"" for part in parts)


class _Zarr(StoreTests[RemoteStore, cpu.Buffer]):
    store_cls = RemoteStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    async def store(self, open_kwargs: dict[str, Any]) -> RemoteStore:
        return await RemoteStore.open(**open_kwargs)

    async def set(self, store: RemoteStore, key: str, value: Buffer) -> None:
        writer = RemoteStore(store._options)
        await writer.put(key, [value.to_bytes()])

    async def get(self, store: RemoteStore, key: str) -> Buffer:
        return cpu.Buffer.from_bytes(await fetched(RemoteStore(store._options), key))

    def test_store_repr(self, store: RemoteStore) -> None:
        assert repr(store) == f"RemoteStore({store.url!r}, read_only=False)"

    def test_store_supports_writes(self, store: RemoteStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: RemoteStore) -> None:
        assert store.supports_listing


class TestZarrMemory(_Zarr):
    @pytest.fixture
    def store_kwargs(self) -> dict[str, object]:
        return {"options": memory_url()}


class TestZarrS3(_Zarr):
    @pytest.fixture
    def store_kwargs(self, s3: Bucket) -> dict[str, object]:
        return {"options": RemoteOptions(s3.url, endpoint=s3.server)}


def keys_of(s3: Bucket) -> list[str]:
    return [key.removeprefix("run/") for key in s3.listed("run/")]


async def test_large_objects_are_cut_and_come_back_whole(s3: Bucket) -> None:
    options = RemoteOptions(s3.url, endpoint=s3.endpoint, put_bytes_max=100_000)
    store = RemoteStore(options)
    content = np.random.default_rng(1).bytes(450_001)
    await store.put("a/large.pack", [content[:99], content[99:300_000], content[300_000:]])
    await store.put("a/small", [content[:100_000]])
    raw = keys_of(s3)
    assert len([key for key in raw if "/.stepwell-parts/" in f"/{key}"]) == 5
    assert s3.proxy.count("PUT") == 7
    assert sorted([key async for key in store.list()]) == ["a/large.pack", "a/small"]
    assert [name async for name in store.list_dir("a")] == ["large.pack", "small"]
    assert await store.getsize("a/large.pack") == len(content)
    for start, stop in [
        (0, 10),
        (0, 4093),
        (10, 4093),
        (99_990, 100_010),
        (5000, 350_000),
        (450_001, 450_001),
    ]:
        assert await fetched(store, "a/large.pack", start, stop - start) == content[start:stop]
    assert await fetched(RemoteStore(options, read_only=True), "a/large.pack") == content
    with pytest.raises(IntegrityError, match="450001 bytes"):
        await store.fetch("a/large.pack", 450_000, 2)
    await store.delete("a/large.pack")
    assert keys_of(s3) == ["a/small"]


async def test_parts_that_no_object_names_are_swept_and_no_others(s3: Bucket) -> None:
    store = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint, put_bytes_max=1000))
    await store.put("d/kept", [bytes(2500)])
    await store.put("d/replaced", [bytes(1500)])
    await store.put("d/replaced", [b"short"])
    stray = SplitIndex(2000, 1000, bytes(16)).part_key("d/never-finished", 0)
    s3.put(f"run/{stray}", b"x")
    removed = await store.sweep_temps()
    assert len(removed) == 3
    assert stray in removed
    assert await fetched(store, "d/kept") == bytes(2500)
    assert await store.sweep_temps() == ()
    await store.delete_dir("")
    assert keys_of(s3) == []


async def test_a_part_that_is_gone_or_short_is_an_error_never_zeros(s3: Bucket) -> None:
    store = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint, put_bytes_max=1000))
    await store.put("k", [bytes(2500)])
    part = next(key for key in s3.listed() if "-00001/" in key)
    s3.put(part, bytes(999))
    with pytest.raises(IntegrityError, match="part 1"):
        await store.fetch("k")
    s3.remove(part)
    with pytest.raises(IntegrityError, match="parts of it are missing"):
        await store.fetch("k")
    assert await fetched(store, "k", 0, 1000) == bytes(1000)


async def test_a_damaged_index_is_told_and_can_be_removed(s3: Bucket) -> None:
    store = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint, put_bytes_max=1000))
    await store.put("d/k", [bytes(2500)])
    index = bytearray(s3.get("run/d/k") or b"")
    index[40] ^= 1
    s3.put("run/d/k", bytes(index))
    for read in (store.fetch("d/k"), store.fetch("d/k", 5000, 1), store.getsize("d/k")):
        with pytest.raises(IntegrityError, match="index of an object in parts is damaged"):
            await read
    assert await store.sweep_temps() == (), "what may still be of use stays"
    await store.delete("d/k")
    assert len(await store.sweep_temps()) == 3
    assert keys_of(s3) == []


async def test_a_small_object_is_read_in_one_request(s3: Bucket) -> None:
    store = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint))
    await store.put("k", [b"01234567"])
    s3.proxy.seen.clear()
    assert await fetched(store, "k", 0, 8) == b"01234567"
    assert s3.proxy.count() == 1


async def test_what_looks_like_an_index_comes_back_as_it_was() -> None:
    store = RemoteStore(memory_url())
    for content in (MAGIC, MAGIC + b"x", SplitIndex(10, 5, bytes(16)).encode(), MAGIC[:-1]):
        await store.put("k", [content[:5], content[5:]])
        assert await fetched(store, "k") == content
        assert await store.getsize("k") == len(content)
        assert await fetched(store, "k", 1, 3) == content[1:4]


async def test_sizes_are_found_where_the_service_does_not_tell_them(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.stores.blobs_kv._size_in", lambda error: None)
    over_http = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint))
    in_memory = RemoteStore(memory_url())
    for store, sizes in ((over_http, (0, 1, 5001)), (in_memory, (0, 1, 2, 3, 4, 5, 1023, 1024, 1025))):
        for size_bytes in sizes:
            await store.put("k", [bytes(size_bytes)])
            assert await store.getsize("k") == size_bytes
            assert await fetched(store, "k") == bytes(size_bytes)
            with pytest.raises(IntegrityError, match=f"has {size_bytes} bytes"):
                await store.fetch("k", size_bytes, 1)
        with pytest.raises(MissingObjectError):
            await store.getsize("never")


async def test_marks_of_directories_and_foreign_names_are_no_objects(s3: Bucket) -> None:
    for key in ("run/", "run/a/", "run/a/b"):
        s3.put(key, b"")
    store = RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint))
    assert [key async for key in store.list()] == ["a/b"]
    assert [name async for name in store.list_dir("")] == ["a"]


def test_promises() -> None:
    s3 = RemoteStore("s3://bucket/run")
    assert s3.properties.survives is Failure.EVERYTHING
    assert s3.properties.needs_commit_record
    assert s3.properties.conditional_create
    assert RemoteStore(memory_url()).properties.survives is Failure.PROCESS
    assert pickle.loads(pickle.dumps(s3)) == s3
    assert s3.with_read_only(True) != s3


async def test_a_service_without_conditional_create_is_read_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"0123")
    (tmp_path / "d").mkdir()
    store = RemoteStore(f"local://{tmp_path}")
    assert not store.properties.conditional_create
    assert await fetched(store, "k", 1, 2) == b"12"
    assert [key async for key in store.list()] == ["k"]
    assert not await store.exists("d")
    for write in (store.put, store.create):
        with pytest.raises(PermanentStoreError, match="no atomic create-if-absent"):
            await write("x", [b"1"])
    with pytest.raises(PermanentStoreError, match="no atomic create-if-absent"):
        store.lock("run")


def test_a_scheme_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no store for nosuch"):
        RemoteStore("nosuch://place/run")


def test_a_forked_child_is_told_not_to_use_it() -> None:
    store = RemoteStore(memory_url())
    asyncio.run(store.put("k", [b"x"]))
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is the subject
        pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(store.fetch("k"))
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert "forked child" in os.read(reading, 10_000).decode()
    os.close(reading)


async def test_of_racing_writers_over_http_one_creates(s3: Bucket) -> None:
    """Two stores with connections of their own, as two processes have them."""
    writers = [RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint)) for _ in range(2)]
    for turn in range(10):
        key = f"step/{turn}/commit.json"
        done = await asyncio.gather(
            *(writer.create(key, [bytes([at]) * 300]) for at, writer in enumerate(writers)),
            return_exceptions=True,
        )
        (winner,) = (at for at, result in enumerate(done) if result is None)
        assert isinstance(done[1 - winner], ObjectExistsError)
        assert s3.get(f"run/{key}") == bytes([winner]) * 300
