"""The contract every store keeps, as a class of tests to subclass. Imported by tests only.

Needs ``pytest`` and ``pytest-asyncio``, which come with the extra ``test``.
"""

# ruff: noqa: D102 - the names of the tests say what they show

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from stepwell.errors import (
    IntegrityError,
    MissingObjectError,
    ObjectExistsError,
    PermanentStoreError,
    UsageError,
)
from stepwell.stores.base import BytesLike, ObjectStore, StoreProperties
from stepwell.stores.keys import encode_name

__all__ = ["BAD_KEYS", "StoreContract", "fetched"]

BAD_KEYS = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../outside",
    "a/../../outside",
    "a/..",
    ".",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "a\\b",
    "..\\outside",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "a\x85b",
    "\ud800",
    ".stepwell-tmp-0",
    "a/.stepwell-lock-x",
    "s" * 256,
    "é" * 128,
    "/".join(["s" * 200] * 6),
)
"""Keys that no store may take."""


async def fetched(store: ObjectStore, key: str, start: int = 0, length: int | None = None) -> bytes:
    """Return a copy of what ``fetch`` gives."""
    return bytes(await store.fetch(key, start, length))


class StoreContract:
    """Subclass with a fixture ``store`` that gives a fresh, empty store, and the tests come along.

    ``stored`` reads an object back by another way than the store.
    """

    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        """Return what is stored under `key`, without the store's own reading; None if absent."""
        raise NotImplementedError

    def test_states_its_properties(self, store: ObjectStore) -> None:
        assert isinstance(store.properties, StoreProperties)
        assert store.properties.atomic_put
        assert store.url

    async def test_put_joins_the_parts(self, store: ObjectStore) -> None:
        array = np.arange(6, dtype=">u2").reshape(2, 3)
        parts: list[BytesLike] = [
            b"one",
            bytearray(b"two"),
            b"",
            memoryview(b"-three-")[1:-1],
            array.data,
            np.empty((0, 4)).data,
        ]
        await store.put("a/b", parts)
        expected = b"onetwothree" + array.tobytes()
        assert await self.stored(store, "a/b") == expected
        assert await fetched(store, "a/b") == expected
        assert await store.getsize("a/b") == len(expected)

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, 65536, 65537, 3_000_001])
    async def test_any_length_comes_back(self, store: ObjectStore, size_bytes: int) -> None:
        content = np.random.default_rng(size_bytes).bytes(size_bytes)
        await store.put("k", [content])
        assert await fetched(store, "k") == content
        assert await self.stored(store, "k") == content

    async def test_more_parts_than_one_system_call_takes(self, store: ObjectStore) -> None:
        parts = [bytes([index % 251]) * (index % 7) for index in range(5000)]
        await store.put("k", parts)
        assert await fetched(store, "k") == b"".join(parts)

    async def test_put_replaces(self, store: ObjectStore) -> None:
        await store.put("k", [b"a long old object"])
        await store.put("k", [b"new"])
        assert await self.stored(store, "k") == b"new"
        assert await fetched(store, "k") == b"new"
        assert [key async for key in store.list()] == ["k"]

    async def test_buffer_belongs_to_the_caller_again_afterwards(self, store: ObjectStore) -> None:
        buffer = bytearray(b"before")
        await store.put("k", [buffer])
        buffer[:] = b"after!"
        buffer += b"can be resized: nobody holds it"
        assert await fetched(store, "k") == b"before"

    async def test_fetch_of_a_range(self, store: ObjectStore) -> None:
        await store.put("k", [b"0123456789"])
        assert await fetched(store, "k", 3) == b"3456789"
        assert await fetched(store, "k", 3, 4) == b"3456"
        assert await fetched(store, "k", 0, 0) == b""
        assert await fetched(store, "k", 10) == b""
        assert (await store.fetch("k")).readonly

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (11, None), (10, 1), (5, 1 << 60), (1 << 62, 0)])
    async def test_shorter_than_asked_for_is_an_error_never_less(
        self, store: ObjectStore, start: int, length: int | None
    ) -> None:
        await store.put("k", [b"0123456789"])
        with pytest.raises(IntegrityError, match="10 bytes"):
            await store.fetch("k", start, length)

    @pytest.mark.parametrize(("start", "length"), [(-1, None), (0, -1)])
    async def test_negative_ranges_are_refused(
        self, store: ObjectStore, start: int, length: int | None
    ) -> None:
        await store.put("k", [b"0123456789"])
        with pytest.raises(UsageError):
            await store.fetch("k", start, length)

    async def test_missing_is_an_error_never_empty(self, store: ObjectStore) -> None:
        await store.put("a/b", [b"x"])
        for key in ("nothing", "a", "a/b/c", "a/c"):
            assert not await store.exists(key)
            with pytest.raises(MissingObjectError, match=key):
                await store.fetch(key)
            with pytest.raises(MissingObjectError, match=key):
                await store.getsize(key)

    async def test_bad_keys_are_refused_on_every_way_in(self, store: ObjectStore) -> None:
        for key in BAD_KEYS:
            for call in (
                store.put(key, [b"x"]),
                store.create(key, [b"x"]),
                store.put_batch([("good", [b"x"]), (key, [b"x"])]),
                store.fetch(key),
                store.exists(key),
                store.getsize(key),
                store.delete(key),
            ):
                with pytest.raises(PermanentStoreError):
                    await call
            for listing in (store.list_prefix(key + "/.."), store.list_dir(key + "/..")):
                with pytest.raises(PermanentStoreError):
                    _ = [each async for each in listing]
        assert [each async for each in store.list()] == []

    @pytest.mark.parametrize("parts", [b"bytes", "text", [1], ["text"], [np.eye(4)[:, 1].data]])
    async def test_what_is_no_list_of_bytes_is_refused(self, store: ObjectStore, parts: object) -> None:
        for write in (store.put, store.create):
            with pytest.raises(UsageError):
                await write("k", parts)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            await store.put_batch([("k", parts)])  # type: ignore[list-item]
        assert not await store.exists("k")

    async def test_create_wins_once(self, store: ObjectStore) -> None:
        await store.create("k", [b"first"])
        with pytest.raises(ObjectExistsError):
            await store.create("k", [b"second"])
        assert await self.stored(store, "k") == b"first"

    async def test_of_racing_creates_one_wins(self, store: ObjectStore) -> None:
        for turn in range(5):
            results = await asyncio.gather(
                *(store.create(f"k{turn}", [bytes([at]) * 5000]) for at in range(12)), return_exceptions=True
            )
            winners = [at for at, result in enumerate(results) if result is None]
            assert len(winners) == 1
            assert all(isinstance(each, ObjectExistsError) for each in results if each is not None)
            assert await fetched(store, f"k{turn}") == bytes([winners[0]]) * 5000

    async def test_readers_beside_a_replacing_writer_see_one_whole_object(self, store: ObjectStore) -> None:
        contents = [bytes([at]) * 40_000 for at in range(30)]
        await store.put("k", [contents[0]])
        writing = True

        async def write() -> None:
            nonlocal writing
            for content in contents:
                await store.put("k", [content])
            writing = False

        async def read() -> None:
            from zarr.core.buffer.core import default_buffer_prototype

            while writing:
                got = await store.get("k", default_buffer_prototype())
                assert got is not None
                assert got.to_bytes() in contents

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            for _ in range(3):
                group.create_task(read())

    async def test_batch_stores_everything(self, store: ObjectStore) -> None:
        items = [(f"d{at % 7}/e{at % 3}/k{at}", [bytes([at % 256]) * at, b"tail"]) for at in range(300)]
        await store.put("d0/e0/k0", [b"old"])
        await store.put_batch(iter(items))
        for key, parts in items:
            assert await self.stored(store, key) == b"".join(parts)
        assert sorted([key async for key in store.list()]) == sorted(key for key, _ in items)
        await store.put_batch([])

    async def test_delete(self, store: ObjectStore) -> None:
        await store.put_batch([(key, [b"x"]) for key in ("a/b/c", "a/b/d", "ab", "a-b/c")])
        await store.delete("a/b/c")
        await store.delete("a/b/c")
        await store.delete("never/there")
        assert sorted([key async for key in store.list()]) == ["a-b/c", "a/b/d", "ab"]
        await store.delete_dir("a")
        assert sorted([key async for key in store.list()]) == ["a-b/c", "ab"]
        await store.delete_dir("")
        assert [key async for key in store.list()] == []
        await store.put("a/b/c", [b"again"])
        assert await self.stored(store, "a/b/c") == b"again"

    async def test_listing(self, store: ObjectStore) -> None:
        keys = ["a", "b/zarr.json", "b/c/0", "b/c/1", "bb/x", "b/cc/0"]
        await store.put_batch([(key, [b""]) for key in keys])
        assert sorted([key async for key in store.list_prefix("b")]) == sorted(keys[1:])
        assert sorted([key async for key in store.list_prefix("b/")]) == sorted([*keys[1:4], keys[5]])
        assert sorted([key async for key in store.list_prefix("b/c/")]) == ["b/c/0", "b/c/1"]
        assert sorted([key async for key in store.list_prefix("b/c")]) == ["b/c/0", "b/c/1", "b/cc/0"]
        assert [key async for key in store.list_prefix("nothing/")] == []
        assert sorted([name async for name in store.list_dir("")]) == ["a", "b", "bb"]
        assert sorted([name async for name in store.list_dir("b")]) == ["c", "cc", "zarr.json"]
        assert [name async for name in store.list_dir("nothing")] == []

    async def test_names_that_other_stores_mix_up_stay_apart(self, store: ObjectStore) -> None:
        names = [
            "w",
            "W",
            "é",
            "e\u0301",
            "a//b",
            "a/b",
            "dir/.",
            "dir/..",
            "n" * 300,
            "zarr.json",
            "c/0",
            "C/0",
        ]
        keys = [f"state/{encode_name(name)}/zarr.json" for name in names]
        await store.put_batch([(key, [name.encode()]) for key, name in zip(keys, names, strict=True)])
        for key, name in zip(keys, names, strict=True):
            assert await self.stored(store, key) == name.encode()

    async def test_read_only_refuses_every_write(self, store: ObjectStore) -> None:
        await store.put("k", [b"x"])
        reader = store.with_read_only(True)
        assert isinstance(reader, ObjectStore)
        for call in (
            reader.put("k", [b"y"]),
            reader.create("l", [b"y"]),
            reader.put_batch([("k", [b"y"])]),
            reader.delete("k"),
            reader.delete_dir(""),
        ):
            with pytest.raises(PermanentStoreError, match="read-only"):
                await call
        assert await fetched(reader, "k") == b"x"
        reader.close()

    async def test_cancelled_put_has_let_go_of_its_buffer(self, store: ObjectStore) -> None:
        buffer = bytearray(2_000_000)
        for _ in range(10):
            task = asyncio.ensure_future(store.put("k", [buffer]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await store.exists("k") in {True, False}

    def test_works_from_any_event_loop(self, store: ObjectStore) -> None:
        asyncio.run(store.put("k", [b"from the first loop"]))
        assert asyncio.run(fetched(store, "k")) == b"from the first loop"
