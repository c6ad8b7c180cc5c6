"""Large objects on their way into a store, part by part and over several connections."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepwell.errors import IntegrityError, PermanentStoreError, TransientStoreError
from stepwell.stores.base import ObjectStore
from stepwell.stores.landing import Landing, begin_put
from stepwell.stores.transport.wire import Wire

__all__ = ["Upload", "Uploads"]


class Upload:
    """One object on its way.

    Attributes
    ----------
    key : str
    size_bytes : int
    """

    def __init__(self, key: str, size_bytes: int, landing: Landing) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.landing = landing
        self.touched_at = 0.0
        self.publishing = False
        self._verified: list[tuple[int, int]] = []  # sorted, disjoint, not even touching
        self._writers: dict[Wire, tuple[int, int]] = {}

    @property
    def busy(self) -> bool:
        """Whether bytes are landing now, or the object is being published."""
        return bool(self._writers) or self.publishing

    def has(self, start: int, end: int) -> bool:
        """Say whether every byte of a range is there and verified."""
        return start == end or any(first <= start and end <= last for first, last in self._verified)

    def add(self, start: int, end: int) -> None:
        """Take note that a range is there and verified."""
        apart = [each for each in self._verified if each[1] < start or each[0] > end]
        joined = [each for each in self._verified if not (each[1] < start or each[0] > end)]
        start = min([start, *(each[0] for each in joined)])
        end = max([end, *(each[1] for each in joined)])
        insort(apart, (start, end))
        self._verified = apart

    def missing(self) -> tuple[int, int] | None:
        """Return the first range that is not there, None where all is."""
        if self.has(0, self.size_bytes):
            return None
        if not self._verified or self._verified[0][0] > 0:
            return 0, self._verified[0][0] if self._verified else self.size_bytes
        end = self._verified[1][0] if len(self._verified) > 1 else self.size_bytes
        return self._verified[0][1], end

    @contextmanager
    def writing(self, wire: Wire, start: int, end: int) -> Iterator[memoryview]:
        """Give the memory of a range to one connection.

        Another connection that is writing into the same bytes is ended first: what came later
        comes from a sender that gave the earlier one up, and only one may touch them.
        """
        for other, (first, last) in list(self._writers.items()):
            if first < end and start < last:
                self._evict(other)
        self._writers[wire] = start, end
        try:
            yield self.landing.buffer[start:end]
        finally:
            self._writers.pop(wire, None)

    def evict_all(self) -> None:
        """End every connection that still writes: from here on the bytes stay as they are."""
        for wire in list(self._writers):
            self._evict(wire)

    def _evict(self, wire: Wire) -> None:
        del self._writers[wire]
        wire.abort(TransientStoreError(f"another connection brings the same bytes of {self.key!r}"))


class Uploads:
    """All of one server.

    Parameters
    ----------
    store : ObjectStore
    count_max : int
    idle_s : float
        One that nothing came for in so long is dropped.
    clock : callable
    """

    def __init__(self, store: ObjectStore, count_max: int, idle_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._count_max = count_max
        self._idle_s = idle_s
        self._clock = clock
        self._uploads: dict[int, Upload] = {}
        self._beginning: dict[int, asyncio.Lock] = {}
        self._begun_by: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._uploads)

    def find(self, operation: int) -> Upload | None:
        """Return an upload that was begun, and note that somebody asked."""
        upload = self._uploads.get(operation)
        if upload is not None:
            upload.touched_at = self._clock()
        return upload

    async def begin(self, operation: int, key: str, size_bytes: int) -> None:
        """Reserve memory; several senders may begin the same one.

        Raises
        ------
        NoSpaceError
            The store has no room.
        TransientStoreError
            Too many are on their way.
        PermanentStoreError
            The same operation was begun for another object.
        """
        lock = self._beginning.setdefault(operation, asyncio.Lock())
        self._begun_by[operation] += 1
        try:
            async with lock:
                known = self.find(operation)
                if known is None:
                    await self._reserve(operation, key, size_bytes)
                elif (known.key, known.size_bytes) != (key, size_bytes):
                    raise PermanentStoreError(
                        f"an upload of {known.size_bytes} bytes to {known.key!r} cannot go on as one of "
                        f"{size_bytes} to {key!r}"
                    )
        finally:
            self._begun_by[operation] -= 1
            if not self._begun_by[operation]:
                del self._begun_by[operation], self._beginning[operation]

    async def _reserve(self, operation: int, key: str, size_bytes: int) -> None:
        if len(self._uploads) + len(self._beginning) > self._count_max:
            raise TransientStoreError(
                f"{self._store.url} takes at most {self._count_max} large objects at once; try again later"
            )
        upload = Upload(key, size_bytes, await begin_put(self._store, size_bytes))
        upload.touched_at = self._clock()
        self._uploads[operation] = upload

    async def commit(self, operation: int, *, replace: bool) -> None:
        """Publish an upload, whole.

        Raises
        ------
        IntegrityError
            A byte is missing; the upload stays.
        """
        upload = self.find(operation)
        assert upload is not None
        gap = upload.missing()
        if gap is not None:
            raise IntegrityError(
                f"{upload.key!r} cannot be published: bytes {gap[0]} to {gap[1]} of {upload.size_bytes} "
                f"never came"
            )
        upload.evict_all()
        upload.publishing = True
        try:
            await upload.landing.publish(upload.key, replace=replace)
        except BaseException as error:
            upload.publishing = False
            if not isinstance(error, TransientStoreError):  # else to be asked again: the bytes stay
                self.drop(operation)
            raise
        del self._uploads[operation]

    def drop(self, operation: int) -> None:
        """Give the memory back, unless it is being published."""
        upload = self._uploads.get(operation)
        if upload is not None and not upload.publishing:
            del self._uploads[operation]
            upload.evict_all()
            upload.landing.discard()

    def drop_idle(self) -> None:
        """Drop what nobody goes on with."""
        oldest = self._clock() - self._idle_s
        for operation, upload in list(self._uploads.items()):
            if not upload.busy and upload.touched_at < oldest:
                self.drop(operation)

    def drop_all(self) -> None:
        """Drop everything."""
        for operation in list(self._uploads):
            self.drop(operation)
