"""What a server holds, and what it may do with it: shared by the connections of all clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from stepwell.errors import ObjectExistsError, UsageError
from stepwell.stores.base import ObjectStore
from stepwell.stores.threads import Workers
from stepwell.stores.transport.frames import Flag, Frame, Incarnation, Status
from stepwell.stores.transport.outcome import Outcome, settle
from stepwell.stores.transport.settings import Limits
from stepwell.stores.transport.uploads import Uploads

__all__ = ["Admit", "Shelf"]

Admit = Callable[[str, int], None]
"""Raises NoSpaceError, or another store error, if an object of so many bytes is not taken."""

# A repeated request is recognised as long as it comes before so many others.
_DONE_COUNT_MAX = 4096


class Shelf:
    """One store, and what is under way in it.

    Parameters
    ----------
    store : ObjectStore
        With atomic puts and conditional create, or what a peer is told would not be true.
    limits : Limits
    admit : callable, optional
        Asked before anything is reserved for an object.

    Attributes
    ----------
    uploads : Uploads
    workers : Workers
        For what takes the processor longer than the loop may.
    """

    def __init__(self, store: ObjectStore, limits: Limits, admit: Admit | None = None) -> None:
        if not (store.properties.atomic_put and store.properties.conditional_create):
            raise UsageError(f"{store.url} cannot be served to peers: it lacks atomic or conditional puts")
        self.store = store
        self.limits = limits
        self.uploads = Uploads(
            store, limits.upload_count_max, limits.upload_idle_s, asyncio.get_running_loop().time
        )
        self.workers = Workers("stepwell-transport", 1)
        self._admit = admit
        self._admitting = asyncio.Lock()
        self._sealed_below = 0
        self._newest: Incarnation = (0, 0)
        # Futures, not results: a request repeated over a new connection meets its first self at work.
        self._done: OrderedDict[int, asyncio.Future[Outcome]] = OrderedDict()

    @property
    def where(self) -> str:
        """The store, for messages."""
        return self.store.url

    def admit(self, key: str, size_bytes: int) -> None:
        """Raise unless an object may come."""
        if self._admit is not None:
            self._admit(key, size_bytes)

    def seal_below(self, counter: int) -> None:
        """Take nothing any more of incarnations with a lower counter; never goes back."""
        self._sealed_below = max(self._sealed_below, counter)

    def takes_from(self, incarnation: Incarnation) -> bool:
        """Say whether an incarnation may write; one that may ends all that came before it.

        Of two with one counter the first to write is the run's.
        """
        counter = incarnation[0]
        if counter < self._sealed_below:
            return False
        if counter > self._newest[0]:
            self._newest = incarnation
            self.seal_below(counter)
        return incarnation == self._newest

    # -- once ---------------------------------------------------------------------------------

    def was_done(self, operation: int) -> bool:
        """Say whether this very request was done before."""
        done = self._done.get(operation)
        return done is not None and done.done() and done.result().status is Status.OK

    async def once(self, operation: int, work: Callable[[], Awaitable[object]]) -> Outcome:
        """Do `work` unless the same operation was done, or is being done; return how it ended.

        One that failed may be tried again. It is not stopped when its connection ends: half of it
        may be done.
        """
        known = self._done.get(operation)
        if known is not None and not (known.done() and known.result().status is not Status.OK):
            return await asyncio.shield(known)
        task = asyncio.ensure_future(settle(work(), self.where))
        self._done[operation] = task
        while len(self._done) > _DONE_COUNT_MAX:
            # The oldest that has ended; those at work are few, one a connection.
            oldest = next(each for each, ended in self._done.items() if ended.done())
            del self._done[oldest]
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what is being done, and drop what is half there."""
        at_work = [each for each in self._done.values() if not each.done()]
        if at_work:
            await asyncio.wait(at_work)
        self.uploads.drop_all()
        self.workers.close()

    # -- requests without a payload -------------------------------------------------------------

    async def begin(self, request: Frame) -> Outcome:
        """Reserve memory for an upload; whatever stands against it is said now."""
        if self.was_done(request.operation):
            return Outcome()
        return await settle(self._begin(request), self.where)

    async def _begin(self, request: Frame) -> None:
        if request.flags & Flag.CREATE and await self.store.exists(request.key):
            raise ObjectExistsError(f"{request.key!r} is there already in {self.where}")
        # One at a time: what was admitted counts as held only once it is reserved.
        async with self._admitting:
            if self.uploads.find(request.operation) is None:
                self.admit(request.key, request.total)
            await self.uploads.begin(request.operation, request.key, request.total)

    async def commit(self, request: Frame) -> Outcome:
        """Publish an upload, once."""
        if self.uploads.find(request.operation) is None and request.operation not in self._done:
            return Outcome(Status.UNKNOWN_UPLOAD, f"no upload of {request.key!r} is on its way")
        replace = not request.flags & Flag.CREATE
        return await self.once(
            request.operation, lambda: self.uploads.commit(request.operation, replace=replace)
        )

    async def delete(self, request: Frame) -> Outcome:
        """Remove an object, once: what was put there since a first attempt stays."""
        return await self.once(request.operation, lambda: self.store.delete(request.key))

    async def delete_below(self, request: Frame) -> Outcome:
        """Remove every object below a directory, once."""
        prefix = request.key.removesuffix("/")
        return await self.once(request.operation, lambda: self.store.delete_dir(prefix))
