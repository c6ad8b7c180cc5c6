"""Objects of any size over storage that takes only so much in one piece; see ``stepwell.stores.split``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial

import numpy as np

from stepwell.errors import IntegrityError, MissingObjectError
from stepwell.stores.blobs import Blob, Blobs
from stepwell.stores.keys import OWN_PREFIX
from stepwell.stores.split import INDEX_BYTES, MAGIC, SplitIndex, part_of
from stepwell.stores.threads import Workers

__all__ = ["PART_BYTES", "PartedBlobs"]

PART_BYTES = 64 << 20
"""Largest part of an object that is cut: one request stays short, and four at a time fill a network."""

_PARTS_AT_ONCE = 4
_READS_AGAIN_MAX = 4  # how often an object in parts may be replaced while it is read
_INLINE_BYTES_MAX = 1 << 16  # copied on the event loop, in some 10 us


class PartedBlobs:
    """Reads and writes whole objects, in one piece or in parts.

    Parameters
    ----------
    blobs : Blobs
    put_bytes_max : int
        Larger objects are cut.
    at_once : int
        Requests that one call makes at one time.
    workers : Workers
        Threads that copy what is about to be sent.
    """

    def __init__(self, blobs: Blobs, put_bytes_max: int, at_once: int, workers: Workers) -> None:
        self._blobs = blobs
        self._put_bytes_max = put_bytes_max
        self._at_once = at_once
        self._workers = workers

    # -- writing ------------------------------------------------------------------------------

    async def write(self, key: str, views: Sequence[memoryview], size_bytes: int) -> None:
        """Store what the views hold together, replacing what is there."""
        await self._blobs.write(key, await self._one_piece(key, views, size_bytes))

    async def create(self, key: str, views: Sequence[memoryview], size_bytes: int) -> bool:
        """Store it if there is nothing; False if there is something."""
        return await self._blobs.create(key, await self._one_piece(key, views, size_bytes))

    async def _one_piece(self, key: str, views: Sequence[memoryview], size_bytes: int) -> Blob:
        """Return what belongs under the key: the object, or the index of parts that are stored by then."""
        head = b"".join(bytes(view[: len(MAGIC)]) for view in views[: len(MAGIC)])
        if size_bytes <= self._put_bytes_max and not head.startswith(MAGIC):
            return await self._joined(views, 0, size_bytes)
        part_bytes = min(PART_BYTES, self._put_bytes_max)
        index = SplitIndex(size_bytes, part_bytes, secrets.token_bytes(16))
        parts = (partial(self._write_part, key, index, part, views) for part in range(index.part_count))
        await self.several(parts, min(self._at_once, _PARTS_AT_ONCE))
        return np.frombuffer(index.encode(), np.uint8)

    async def _write_part(self, key: str, index: SplitIndex, part: int, views: Sequence[memoryview]) -> None:
        start = part * index.part_bytes
        data = await self._joined(views, start, min(start + index.part_bytes, index.size_bytes))
        await self._blobs.write(index.part_key(key, part), data)

    async def _joined(self, views: Sequence[memoryview], start: int, stop: int) -> Blob:
        """Copy the bytes from `start` up to `stop` of what the views hold together."""
        if stop - start <= _INLINE_BYTES_MAX:
            return _join(views, start, stop)
        return await self._workers.run(partial(_join, views, start, stop))

    async def several(
        self, calls: Iterable[Callable[[], Coroutine[object, object, None]]], at_once: int = 0
    ) -> None:
        """Make calls, several at a time; all have ended when this returns or raises the first error."""
        left = iter(calls)

        async def work() -> None:
            for call in left:
                await call()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once or self._at_once):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    # -- removing -----------------------------------------------------------------------------

    async def delete(self, key: str) -> None:
        """Remove an object, its parts after it; a missing one is no error."""
        try:
            index = await self._index_under(key)
        except IntegrityError:
            index = None  # nobody knows its parts; they are strays from now on
        await self._blobs.delete(key)
        if index is not None:
            below = f"{key.rpartition('/')[0]}/".removeprefix("/")
            parts = await self._blobs.list(f"{below}{OWN_PREFIX}parts/{index.nonce.hex()}-")
            await self.delete_all(part for part in parts if part_of(part) == (key, index.nonce))

    async def delete_all(self, keys: Iterable[str]) -> None:
        """Remove what lies under these very keys."""
        await self.several(partial(self._blobs.delete, key) for key in keys)

    async def strays(self) -> list[str]:
        """Return the keys of parts that no index names; beside a damaged index none is one."""
        strays: list[str] = []
        nonces: dict[str, bytes | None] = {}
        damaged: set[str] = set()
        for part in await self._blobs.list(""):
            found = part_of(part)
            if found is None:
                continue
            key, nonce = found
            if key not in nonces:
                try:
                    index = await self._index_under(key)
                except IntegrityError:
                    index = None
                    damaged.add(key)
                nonces[key] = None if index is None else index.nonce
            if nonces[key] != nonce and key not in damaged:
                strays.append(part)
        return strays

    # -- reading ------------------------------------------------------------------------------

    async def read(self, key: str, start: int, stop: int | None) -> memoryview:
        """Return the bytes from `start` up to `stop`, or to the end; read-only.

        Raises
        ------
        MissingObjectError
        IntegrityError
            The object is shorter, or its index or parts are damaged.
        """
        for _ in range(_READS_AGAIN_MAX):
            # An index is seen by its first bytes, so what lies within its length is read from there.
            low = 0 if start < INDEX_BYTES else start
            data = await self._blobs.read(key, low, stop)
            if data is None:
                raise self.missing(key)
            index = await self._index(key, data, low, stop)
            if index is None:
                return await self._cut(key, data, low, start, stop)
            whole = await self._from_parts(key, index, start, stop)
            if whole is not None:
                return whole
        raise IntegrityError(f"{key!r} in {self._blobs.url}: parts of it are missing")

    async def size(self, key: str) -> int | None:
        """Return the length of an object in bytes; None if absent."""
        size_bytes = await self._blobs.size(key)
        if size_bytes == INDEX_BYTES:
            index = await self._index_under(key)
            if index is not None:
                return index.size_bytes
        return size_bytes

    def missing(self, key: str) -> MissingObjectError:
        """Return the error that says that there is no such object."""
        return MissingObjectError(f"there is no object {key!r} in {self._blobs.url}")

    async def _index(self, key: str, data: bytes, low: int, high: int | None) -> SplitIndex | None:
        """Return the index that an object is, judged by what was read of it; None for a plain object."""
        if low:
            if data:
                return None  # no index reaches as far
            return await self._index_under(key)
        head = data[: len(MAGIC)]
        if not head or head != MAGIC[: len(head)]:
            return None
        if high is not None and high <= INDEX_BYTES:
            return await self._index_under(key)
        return SplitIndex.decode(data, f"{key!r} in {self._blobs.url}") if head == MAGIC else None

    async def _index_under(self, key: str) -> SplitIndex | None:
        data = await self._blobs.read(key, 0, INDEX_BYTES + 1)
        if data is None or not data.startswith(MAGIC):
            return None
        return SplitIndex.decode(data, f"{key!r} in {self._blobs.url}")

    async def _cut(self, key: str, data: bytes, low: int, start: int, stop: int | None) -> memoryview:
        """Take the asked part out of what was read; what is not there is an error, never less."""
        reached = low + len(data)
        end = reached if stop is None else stop
        begins = start <= reached if low == 0 else start < reached
        if begins and end <= reached:
            return memoryview(data)[start - low : end - low]
        size_bytes = await self.size(key)
        if size_bytes is None:
            raise self.missing(key)
        if max(start, stop or 0) <= size_bytes:
            if start in (size_bytes, stop):
                return memoryview(b"")
            raise IntegrityError(f"{key!r} in {self._blobs.url} was replaced while it was read")
        raise self._short(key, size_bytes, max(start, stop or 0))

    async def _from_parts(
        self, key: str, index: SplitIndex, start: int, stop: int | None
    ) -> memoryview | None:
        """Put a range together; None if a part is not there."""
        end = index.size_bytes if stop is None else stop
        if max(start, end) > index.size_bytes:
            raise self._short(key, index.size_bytes, max(start, end))
        out = np.empty(end - start, np.uint8)
        gone = False

        async def read(part: int, first: int, last: int) -> None:
            nonlocal gone
            data = await self._blobs.read(index.part_key(key, part), first, last)
            if data is None:
                gone = True
                return
            if len(data) != last - first:
                raise IntegrityError(f"{key!r} in {self._blobs.url}: part {part} has not all of its bytes")
            at = part * index.part_bytes + first - start
            out[at : at + len(data)] = np.frombuffer(data, np.uint8)

        await self.several(partial(read, *cut) for cut in index.cuts(start, end))
        return None if gone else out.data.toreadonly()

    def _short(self, key: str, size_bytes: int, needed_bytes: int) -> IntegrityError:
        return IntegrityError(
            f"{key!r} in {self._blobs.url} has {size_bytes} bytes, {needed_bytes} were expected; it was cut "
            "short or is not the object that was described"
        )


def _join(views: Sequence[memoryview], start: int, stop: int) -> Blob:
    """Copy bytes out of several views; numpy copies without holding the interpreter."""
    out = np.empty(stop - start, np.uint8)
    at = 0  # where the view begins
    for view in views:
        low, high = max(start, at), min(stop, at + view.nbytes)
        if low < high:
            out[low - start : high - start] = np.frombuffer(view[low - at : high - at], np.uint8)
        at += view.nbytes
    return out
