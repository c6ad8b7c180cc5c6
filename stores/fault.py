"""A store that fails on purpose, the same way each time for the same seed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from stepwell.errors import MissingObjectError, NoSpaceError, PermanentStoreError, TransientStoreError
from stepwell.stores.base import BytesLike, ObjectStore, StoreProperties, WriteItem
from stepwell.stores.parts import flat_views
from stepwell.stores.zarr_face import ZarrFace

__all__ = ["Fault", "FaultEvent", "FaultKind", "FaultStore"]


class FaultKind(StrEnum):
    """What goes wrong."""

    SLOW = "slow"
    """It takes ``delay_s`` longer."""
    LOST = "lost"
    """A write is acknowledged and not done; a read finds nothing."""
    TORN = "torn"
    """A write stores the first part only and is acknowledged; a read has one bit flipped."""
    DUPLICATED = "duplicated"
    """A write reaches the store twice; a ``create`` then answers that the object is there."""
    UNAVAILABLE = "unavailable"
    """A 503 before anything was done (TransientStoreError)."""
    UNANSWERED = "unanswered"
    """Done, but the answer is lost (TransientStoreError)."""
    DENIED = "denied"
    """A 403 (PermanentStoreError)."""
    FULL = "full"
    """No space (NoSpaceError)."""
    STALL = "stall"
    """Waits until ``FaultStore.release``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the plan.

    Attributes
    ----------
    kind : FaultKind
    operation : str
        ``put``, ``create``, ``delete``, ``fetch``, or ``*`` for any. A batch is its puts.
    key : str
        Pattern as in a shell.
    after : int
        How many matching calls are spared first.
    times : int or None
        How many calls are hit then; None for all.
    chance : float
        Of each of those, how likely it is to be hit.
    delay_s : float
        For ``SLOW``.
    """

    kind: FaultKind
    operation: str = "*"
    key: str = "*"
    after: int = 0
    times: int | None = 1
    chance: float = 1.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """What was done to one call."""

    kind: FaultKind
    operation: str
    key: str


class FaultStore(ZarrFace):
    """Wraps a store and lets it fail by plan.

    Parameters
    ----------
    inner : ObjectStore
    seed : int
        Decides about chances, cuts and bits; shown by ``repr``, so that a failing test prints it.
    plan : sequence of Fault
        For each call every line is asked in order, and all that match act; of the errors the
        first is raised. Lines that let a write be lost, torn or doubled act on writes that reach
        the store.
    kill_at : int, optional
        SIGKILL of this process at the n-th write boundary (from 0): there is one before and one
        after each write and deletion, also of each object of a batch.
    sleep : coroutine function
        How ``SLOW`` waits; a test passes a virtual clock's.

    Attributes
    ----------
    events : list of FaultEvent
        What was done so far.
    boundary_count : int
        Write boundaries passed so far.
    """

    def __init__(
        self,
        inner: ObjectStore,
        seed: int = 0,
        plan: Sequence[Fault] = (),
        *,
        kill_at: int | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(read_only=inner.read_only)
        self.inner = inner
        self.seed = seed
        self.plan = tuple(plan)
        self.events: list[FaultEvent] = []
        self.boundary_count = 0
        self._kill_at = kill_at
        self._sleep = sleep
        self._random = random.Random(seed)
        self._matches = [0] * len(self.plan)
        self._hits = [0] * len(self.plan)
        self._mutex = threading.Lock()  # calls may come from several loops
        self._released: Future[None] = Future()

    @property
    def properties(self) -> StoreProperties:
        """The inner store's promises, which are not kept here."""
        return self.inner.properties

    @property
    def url(self) -> str:
        """``fault+`` and the inner store's."""
        return f"fault+{self.inner.url}"

    def __repr__(self) -> str:
        return f"FaultStore({self.inner!r}, seed={self.seed})"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def with_read_only(self, read_only: bool = False) -> FaultStore:
        """Return another store with the plan from its beginning."""
        inner = self.inner.with_read_only(read_only)
        assert isinstance(inner, ObjectStore)
        return FaultStore(inner, self.seed, self.plan, kill_at=self._kill_at, sleep=self._sleep)

    @property
    def life(self) -> object:
        """That of the store behind it."""
        return self.inner.life

    def begin_life(self, incarnation: str) -> None:
        """Tell the store behind it."""
        self.inner.begin_life(incarnation)

    def fall_behind(self) -> None:
        """Run the threads of the store behind it behind the training."""
        self.inner.fall_behind()

    def release(self) -> None:
        """Let every stalled call go on, and stall none any more; from any thread."""
        with self._mutex:
            if not self._released.done():
                self._released.set_result(None)

    # -- what is hit --------------------------------------------------------------------------

    def _drawn(self, operation: str, key: str) -> list[Fault]:
        """Return the lines of the plan that hit this call."""
        hit: list[Fault] = []
        with self._mutex:
            for index, fault in enumerate(self.plan):
                if fault.operation not in {operation, "*"} or not fnmatchcase(key, fault.key):
                    continue
                self._matches[index] += 1
                spent = fault.times is not None and self._hits[index] >= fault.times
                if self._matches[index] <= fault.after or spent or self._random.random() >= fault.chance:
                    continue
                self._hits[index] += 1
                self.events.append(FaultEvent(fault.kind, operation, key))
                hit.append(fault)
        return hit

    async def _before(self, operation: str, key: str, size_bytes: int = 0) -> set[FaultKind]:
        """Do what happens before the store is reached; return what is left to happen."""
        faults = self._drawn(operation, key)
        for fault in faults:
            if fault.kind is FaultKind.SLOW:
                await self._sleep(fault.delay_s)
            elif fault.kind is FaultKind.STALL:
                # Shielded: one cancelled call must not release the others.
                await asyncio.shield(asyncio.wrap_future(self._released))
        what = f"{operation} {key!r} in {self.url} (planned fault, seed {self.seed})"
        for fault in faults:
            if fault.kind is FaultKind.UNAVAILABLE:
                raise TransientStoreError(f"503 on {what}")
            if fault.kind is FaultKind.DENIED:
                raise PermanentStoreError(f"403 on {what}")
            if fault.kind is FaultKind.FULL:
                raise NoSpaceError(f"no space for {size_bytes} bytes on {what}")
        return {fault.kind for fault in faults}

    def _after(self, operation: str, key: str, kinds: set[FaultKind]) -> None:
        if FaultKind.UNANSWERED in kinds:
            raise TransientStoreError(f"no answer to {operation} {key!r} in {self.url}, seed {self.seed}")

    def _boundary(self) -> None:
        with self._mutex:
            if self.boundary_count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.boundary_count += 1

    # -- the store ----------------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Put, as far as the plan lets it."""
        await self._write("put", key, parts, self.inner.put)

    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Create, as far as the plan lets it."""
        await self._write("create", key, parts, self.inner.create)

    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Put one object after the other, each by the plan."""
        taken = list(items)
        for key, parts in taken:  # what is refused is refused before anything is written
            await self._ready_to_write(key)
            flat_views(key, parts)
        for key, parts in taken:
            await self.put(key, parts)

    async def _write(
        self,
        operation: str,
        key: str,
        parts: Sequence[BytesLike],
        write: Callable[[str, Sequence[BytesLike]], Awaitable[None]],
    ) -> None:
        await self._ready_to_write(key)
        views, size_bytes = flat_views(key, parts)
        kinds = await self._before(operation, key, size_bytes)
        if FaultKind.LOST in kinds:
            return
        self._boundary()
        await write(key, self._first_part(views, size_bytes) if FaultKind.TORN in kinds else views)
        if FaultKind.DUPLICATED in kinds:
            await write(key, views)
        self._boundary()
        self._after(operation, key, kinds)

    def _first_part(self, views: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
        with self._mutex:
            left = self._random.randrange(size_bytes) if size_bytes else 0
        first: list[memoryview] = []
        for view in views:
            first.append(view[:left])
            left -= min(left, view.nbytes)
        return first

    async def delete(self, key: str) -> None:
        """Delete, as far as the plan lets it."""
        await self._ready_to_write(key)
        kinds = await self._before("delete", key)
        if FaultKind.LOST in kinds:
            return
        self._boundary()
        await self.inner.delete(key)
        self._boundary()
        self._after("delete", key, kinds)

    async def sweep_temps(self) -> tuple[str, ...]:
        """Let the inner store sweep."""
        return await self.inner.sweep_temps()

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Fetch, as far as the plan lets it."""
        await self._ensure_open()
        kinds = await self._before("fetch", key)
        if FaultKind.LOST in kinds:
            raise MissingObjectError(f"there is no object {key!r} in {self.url} (seed {self.seed})")
        view = await self.inner.fetch(key, start, length)
        if FaultKind.TORN in kinds and view.nbytes:
            damaged = bytearray(view)
            with self._mutex:
                bit = self._random.randrange(8 * len(damaged))
            damaged[bit // 8] ^= 1 << bit % 8
            view = memoryview(damaged).toreadonly()
        self._after("fetch", key, kinds)
        return view

    async def exists(self, key: str) -> bool:
        """Ask the inner store."""
        return await self.inner.exists(key)

    async def getsize(self, key: str) -> int:
        """Ask the inner store."""
        return await self.inner.getsize(key)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Ask the inner store."""
        async for key in self.inner.list_prefix(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Ask the inner store."""
        async for name in self.inner.list_dir(prefix):
            yield name
