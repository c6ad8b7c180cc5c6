"""Tier 1: bytes by key in the arena of this rank. Survives the death of the process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from weakref import WeakValueDictionary

import numpy as np

from stepwell.errors import IntegrityError, MissingObjectError, UsageError
from stepwell.stores.arena import Arena
from stepwell.stores.base import BytesLike, Failure, StoreProperties, WriteItem
from stepwell.stores.keys import check_directory, check_key, check_prefix
from stepwell.stores.landing import Landing, Sight
from stepwell.stores.parts import flat_views
from stepwell.stores.region import Region, RegionState
from stepwell.stores.threads import Workers
from stepwell.stores.zarr_face import ZarrFace

__all__ = ["MemoryStore"]

_THREAD_COUNT = 2  # a second thread adds 5-15 % to the speed of copying (measured), a third nothing

# What is read is checked against the header afterwards; an owner that replaces the object in each
# of so many attempts is not waited for.
_READ_ATTEMPTS_MAX = 8

_ARENAS: WeakValueDictionary[str, Arena] = WeakValueDictionary()
"""Arenas in use here by directory: a copied or unpickled store finds its arena again."""


class MemoryStore(ZarrFace):
    """Objects in an arena.

    Parameters
    ----------
    arena : Arena
        Stays open when the store is closed: several stores may share it, and its owner closes it.
        An inspecting arena gives a read-only store.
    read_only : bool

    Notes
    -----
    ``fetch`` returns a view of the mapping, without a copy. The memory of a dropped or replaced
    object is used again, so such a view is valid only until then; zarr's ``get`` copies.
    """

    def __init__(self, arena: Arena, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only or arena.read_only)
        self._arena = arena
        self._workers = Workers("stepwell-memory", _THREAD_COUNT)
        _ARENAS[str(arena.directory)] = arena

    @property
    def arena(self) -> Arena:
        """Where the objects are."""
        return self._arena

    @property
    def properties(self) -> StoreProperties:
        """Survives a process; only the owner of the arena writes, so ``create`` is atomic."""
        return StoreProperties(
            survives=Failure.PROCESS, atomic_put=True, conditional_create=True, needs_commit_record=False
        )

    @property
    def url(self) -> str:
        """``memory:`` and the directory of the arena."""
        return f"memory:{self._arena.directory}"

    def __repr__(self) -> str:
        return f"MemoryStore({str(self._arena.directory)!r}, read_only={self.read_only})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MemoryStore)
            and self._arena is other._arena
            and self.read_only == other.read_only
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return _find_again, (str(self._arena.directory), os.getpid(), self.read_only)

    def with_read_only(self, read_only: bool = False) -> MemoryStore:
        """Return another store on the same arena."""
        return MemoryStore(self._arena, read_only=read_only)

    def fall_behind(self) -> None:
        """Run the threads behind the training from now on; see ``ObjectStore.fall_behind``."""
        self._workers.fall_behind()

    def close(self) -> None:
        """Let the threads end; the arena stays open."""
        self._workers.close()
        super().close()

    # -- writing ------------------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Copy `parts` into a region and publish it; see ``ObjectStore.put``."""
        await self._ready_to_write(key)
        await self._workers.run(lambda: self._store(key, parts, replace=True))

    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Store many objects, one after the other; see ``ObjectStore.put_batch``."""
        taken = list(items)
        for key, _ in taken:
            await self._ready_to_write(key)

        def store_all() -> None:
            for key, parts in taken:
                self._store(key, parts, replace=True)

        await self._workers.run(store_all)

    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object whose key is absent; see ``ObjectStore.create``."""
        await self._ready_to_write(key)
        await self._workers.run(lambda: self._store(key, parts, replace=False))

    async def publish(self, region: Region, key: str, length: int) -> None:
        """Publish what was written into a reserved region, without a copy.

        The region belongs to the arena from here on; after an error it is still the caller's.
        """
        await self._ready_to_write(key)
        await self._workers.run(lambda: self._arena.publish(region, key, length))

    async def begin_put(self, size_bytes: int) -> Landing:
        """Reserve a region, for an object that comes from elsewhere to land in without a copy."""
        self._check_writable()
        await self._ensure_open()
        reserved: list[Region] = []
        try:
            await self._workers.run(lambda: reserved.append(self._arena.reserve(size_bytes)))
        except BaseException:
            for region in reserved:  # cancelled, but the thread had done it
                self._arena.recycle(region)
            raise
        return _RegionLanding(self._arena, self._workers, reserved[0], size_bytes)

    def _store(self, key: str, parts: Sequence[BytesLike], *, replace: bool) -> None:
        views, size_bytes = flat_views(key, parts)
        region = self._arena.reserve(size_bytes)
        try:
            # numpy copies without holding the interpreter lock; assigning to a memoryview holds it.
            payload = np.frombuffer(region.payload, np.uint8)
            start = 0
            for view in views:
                np.copyto(payload[start : start + view.nbytes], np.frombuffer(view, np.uint8))
                start += view.nbytes
            del payload  # the arena can unmap only what nobody looks at
            self._arena.publish(region, key, size_bytes, replace=replace)
        except BaseException:
            self._arena.recycle(region)
            raise

    async def delete(self, key: str) -> None:
        """Drop the object; a missing key is no error. Views of it become invalid."""
        await self._ready_to_write(key)
        await self._workers.run(lambda: self._arena.drop(key))

    async def delete_dir(self, prefix: str) -> None:
        """Drop every object below `prefix`, or all for an empty one."""
        self._check_writable()
        await self._ensure_open()
        below = check_directory(prefix)

        def drop_all() -> None:
            keys = self._arena.keys()
            for key in keys:
                if key.startswith(below):
                    self._arena.drop(key)

        await self._workers.run(drop_all)

    # -- reading ------------------------------------------------------------------------------

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Return a view of the mapping, or a checked copy where another process owns the arena."""
        await self._ensure_open()
        if self._arena.read_only:
            return await self._read(key, start, length)
        region = self._found(key)
        if not region.mapped:
            await self._workers.run(region.map)
        try:
            contents = region.contents
        except UsageError as error:
            raise self._missing(key) from error  # dropped while it was being mapped
        return _cut(contents, key, start, length)

    async def look(self, key: str, start: int = 0, length: int | None = None) -> Sight:
        """Return a view of the mapping, and with it what tells whether it is still the same object."""
        header = self._found(key).header
        if header is None:
            raise self._missing(key)
        if length == 0 and start <= header.length:
            view = memoryview(b"")  # nothing to map
        else:
            view = await self.fetch(key, start, length)
        # In this order: a view of the object that replaced it is not taken for one of it.
        if self._arena.read_only or not self._arena.unchanged(header):
            size_bytes = start + view.nbytes if length is None else header.length
            return Sight(view, size_bytes, 0, lambda: self._arena.read_only)
        return Sight(view, header.length, header.serial or 1, lambda: self._arena.unchanged(header))

    async def _read(self, key: str, start: int, length: int | None) -> memoryview:
        return await self._workers.run(lambda: self._copy_out(key, start, length))

    def _copy_out(self, key: str, start: int, length: int | None) -> memoryview:
        for _ in range(_READ_ATTEMPTS_MAX):
            region = self._found(key)
            header = region.header
            try:
                contents = region.contents
            except (UsageError, FileNotFoundError):
                continue  # dropped since it was found
            source = _cut(contents, key, start, length)
            copy = np.empty(source.nbytes, np.uint8)
            if source.nbytes:
                np.copyto(copy, np.frombuffer(source, np.uint8))
            if header is not None and self._arena.unchanged(header):
                return copy.data.toreadonly()
        raise MissingObjectError(f"{key!r} in {self.url} is replaced again and again while it is read")

    def _found(self, key: str) -> Region:
        region = self._arena.find(key)
        if region is None:
            raise self._missing(key)
        return region

    def _missing(self, key: str) -> MissingObjectError:
        return MissingObjectError(f"there is no object {key!r} in {self.url}")

    async def exists(self, key: str) -> bool:
        """Say whether the key is there."""
        return self._arena.find(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the length of an object in bytes."""
        header = self._found(key).header
        if header is None:
            raise self._missing(key)
        return header.length

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with `prefix`."""
        check_prefix(prefix)
        for key in await self._workers.run(self._arena.keys):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`."""
        below = check_directory(prefix)
        keys = await self._workers.run(self._arena.keys)
        for name in sorted({key[len(below) :].split("/", 1)[0] for key in keys if key.startswith(below)}):
            yield name


class _RegionLanding:
    """A reserved region that becomes an object."""

    def __init__(self, arena: Arena, workers: Workers, region: Region, size_bytes: int) -> None:
        self._arena = arena
        self._workers = workers
        self._region: Region | None = region
        self._size_bytes = size_bytes
        self.buffer = region.payload[:size_bytes]

    async def publish(self, key: str, *, replace: bool) -> None:
        region = self._region
        assert region is not None, "a landing is published once"
        try:
            await self._workers.run(lambda: self._publish(region, key, replace))
        finally:
            if region.state is not RegionState.RESERVED:
                self._region, self.buffer = None, memoryview(b"")

    def _publish(self, region: Region, key: str, replace: bool) -> None:
        self._arena.publish(region, key, self._size_bytes, replace=replace)

    def discard(self) -> None:
        region, self._region = self._region, None
        self.buffer = memoryview(b"")
        if region is not None:
            self._arena.recycle(region)


def _cut(contents: memoryview, key: str, start: int, length: int | None) -> memoryview:
    """Return a part of an object; a part that is not there is an error, never less."""
    check_key(key)
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"cannot fetch {length} bytes from {start} of {key!r}")
    end = contents.nbytes if length is None else start + length
    if start > contents.nbytes or end > contents.nbytes:
        raise IntegrityError(
            f"{key!r} has {contents.nbytes} bytes, {end} were expected; it was cut short or is not the "
            f"object that was described"
        )
    return contents[start:end]


def _find_again(directory: str, pid: int, read_only: bool) -> MemoryStore:
    """Undo ``__reduce__``: memory does not travel, so this works only where the arena is open."""
    arena = _ARENAS.get(directory)
    if arena is None or pid != os.getpid():
        raise UsageError(
            f"a MemoryStore on {directory} can be copied only within its own process; "
            f"elsewhere read it with MemoryStore(Arena.inspect({directory!r}))"
        )
    return MemoryStore(arena, read_only=read_only)
