"""The inline runner: takes captured saves off the trainer's thread and brings them into the tiers.

One background thread with its own event loop. On the loop, one task encodes differentials in order,
one finishes bases, and each tier has one task that writes differentials; bounded queues lie between
them. A fault of one save or tier is told to that save's handle and to ``RunnerEvents``. A fault of
the runner itself ends it, and every waiting handle hears of it.

Over 400 lines: a quarter is what it tells its owner; what is left is one order of events for all tiers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from stepwell.errors import NotCommittedError, StepwellError, StoreError, UsageError
from stepwell.pipeline.base import Chunk, ChunkStage
from stepwell.pipeline.basing import BaseWriter
from stepwell.pipeline.budget import ByteBudget
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.flow import flow
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.inventory import Inventory, Lineage
from stepwell.pipeline.jobs import BaseJob, Job, StepJob
from stepwell.pipeline.keys import Series, layout_key, pack_key
from stepwell.pipeline.loop import loop_of
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.marks import CaptureMark
from stepwell.pipeline.pack import Packed, PackIdentity, PackKind
from stepwell.pipeline.presence import Presence, PresenceEvents
from stepwell.pipeline.reclaim import reclaim, remove_save
from stepwell.pipeline.records import Link
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.retention import Removal
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.tier import Hold, Tier
from stepwell.pipeline.workers import Workers
from stepwell.stores.threads import lower_priority

__all__ = ["Runner", "RunnerEvents"]

Result = TypeVar("Result")

PACKS_WAITING = 2  # encoded saves that may wait for a slow tier; each is about a capture slot of bytes


class RunnerEvents(PresenceEvents, Protocol):
    """What the runner tells its owner. Called on the runner's thread; must return at once."""

    def committed(self, series: Series, link: Link, tier: Tier, size_bytes: int) -> None:
        """A save or base is committed in a tier."""
        ...

    def failed(self, series: Series, link: Link, tier: Tier | None, error: BaseException) -> None:
        """A save or base did not arrive in a tier, or in none (tier None)."""
        ...

    def encoded(self, link: Link, size_bytes: int) -> None:
        """A differential is encoded and its capture slots are free."""
        ...

    def unprotected(self, step: int) -> None:
        """A save is committed in no tier and will not be."""
        ...


@dataclass(frozen=True, slots=True)
class _Encoded:
    job: StepJob
    packed: Packed
    manifest: Manifest


class Runner:
    """Drives the stages in a background thread.

    Parameters
    ----------
    run, rank, world
        Identity that packs and manifests carry.
    tiers : sequence of Tier
        Nearest first.
    chunk_stages : sequence of ChunkStage
        delta, quantize, sparsify, in that order.
    shard : Shard
    inventory : Inventory
        Taken over: only the runner's thread touches it from ``start`` on.
    events : RunnerEvents
    budget_bytes : int
        Raw bytes of chunks that may be in work at once.
    threads : int
        Encoder threads.
    retry_for_s : float
        See ``Replicate``.
    """

    def __init__(
        self,
        *,
        run: str,
        tiers: Sequence[Tier],
        chunk_stages: Sequence[ChunkStage],
        shard: Shard,
        inventory: Inventory,
        events: RunnerEvents,
        budget_bytes: int,
        threads: int = 1,
        retry_for_s: float = 60.0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.run_name, self.rank, self.world = run, rank, world
        self.tiers = list(tiers)
        self.chunk_stages = [*chunk_stages, shard]
        self.shard = shard
        self._closed_loop = loop_of(chunk_stages)
        self.inventory = inventory
        self.replicate = Replicate(retry_for_s)
        self.commit = Commit(self.replicate)
        self.held: list[Link] = []
        self.dead: BaseException | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._lineage: Lineage | None = None
        self._events = events
        self.presence = Presence(self, events)
        self._budget_bytes = budget_bytes
        self._workers = Workers(threads, "stepwell-encode")
        self._base_workers = Workers(1, "stepwell-base")
        self._mark_worker = Workers(1, "stepwell-mark")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._behind = False  # from the first save on: what comes before, a restore, is waited for
        self._thread = threading.Thread(target=self._run, name="stepwell-runner", daemon=True)
        self._handles: set[SaveHandle] = set()
        self._steps: asyncio.Queue[StepJob | None]
        self._bases: asyncio.Queue[tuple[BaseJob, list[Tier]] | None]
        self._queues: dict[str, asyncio.Queue[_Encoded | None]]

    def start(self) -> None:
        """Start the thread and wait until its loop runs."""
        self._thread.start()
        self._ready.wait()

    def submit(self, job: Job) -> None:
        """Hand a job over; returns at once. Callable from any thread.

        Raises
        ------
        UsageError
            The runner has ended.
        """
        if self._loop is None or self.dead is not None or not self._thread.is_alive():
            raise UsageError(f"the background runner has ended ({self.dead!r}); nothing more can be saved")
        self._handles.add(job.handle)
        self._loop.call_soon_threadsafe(self._accept, job)

    def call(self, work: Coroutine[object, object, Result]) -> concurrent.futures.Future[Result]:
        """Run a coroutine on the runner's loop; callable from any other thread."""
        if self._loop is None or not self._thread.is_alive():
            work.close()
            raise UsageError("the background runner is not running")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin_life(self, lineage: Lineage, enter: Callable[[Tier], Awaitable[None]]) -> None:
        """Tell which line of incarnations lives; nothing is reclaimed before.

        Parameters
        ----------
        lineage : Lineage
        enter : coroutine function
            Writes the records of this life into a tier that was given up and answers again.
        """
        self._lineage, self.presence.enter = lineage, enter

    def stop(self, timeout_s: float) -> bool:
        """Finish what was handed over, then end the thread.

        Returns
        -------
        bool
            False if that took longer than `timeout_s`; the thread is then abandoned (it is a
            daemon) and what it had not finished is not committed.
        """
        if self._loop is not None and self._thread.is_alive():
            for queue in (self._steps, self._bases):
                self._loop.call_soon_threadsafe(queue.put_nowait, None)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._workers.close()
        self._base_workers.close()
        self._mark_worker.close()
        return True

    def _accept(self, job: Job) -> None:
        if not self._behind:
            self._behind = True
            lower_priority()
            for tier in self.tiers:
                tier.store.fall_behind()
        step = job.link.step
        if isinstance(job, BaseJob):
            takers = []
            for tier in self.tiers:
                needed = job.alone or job.asked or tier.needs_base is not None
                if tier.bases.takes(step, job.layout.size_bytes, needed=needed):
                    tier.base_expected(step, alone=job.alone)
                    takers.append(tier)
            self._bases.put_nowait((job, takers))
        else:
            for tier in self.tiers:
                tier.newest = max(tier.newest, step)
                tier.bases.saved(step)
            if job.mark is not None:
                self._group.create_task(self._mark(job, job.mark))
            self._steps.put_nowait(job)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # told to everyone who waits; the thread has nobody above it
            self.dead = error
        finally:
            self._ready.set()
            ended = StepwellError(
                f"the background runner ended before the save was committed ({self.dead!r})"
            )
            for handle in tuple(self._handles):
                handle.fail(ended)
            self.ended.set_result(None)

    async def _main(self) -> None:
        self._steps, self._bases = asyncio.Queue(), asyncio.Queue()
        self._queues = {tier.name: asyncio.Queue(PACKS_WAITING) for tier in self.tiers}
        self._budget = ByteBudget(self._budget_bytes)
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._ready.set()
            bases = BaseWriter(self, self._base_workers, group)
            group.create_task(self._encode_all())
            for tier in self.tiers:
                group.create_task(self._write_all(tier))
            while (taken := await self._bases.get()) is not None:
                await bases.write(*taken)
                self._settle()
            self.presence.stop()

    async def _encode_all(self) -> None:
        while (job := await self._steps.get()) is not None:
            try:
                encoded = await self._encode(job)
            except StepwellError as error:
                if self._closed_loop is not None:
                    self._closed_loop.abort()
                if job.mark is not None:
                    await self._mark_worker.run(job.release)
                self.failed(Series.STEP, job.link, None, error, job.handle)
                self._settle()
                continue
            for tier in self.tiers:
                await self._queues[tier.name].put(encoded)
        for tier in self.tiers:
            await self._queues[tier.name].put(None)

    async def _mark(self, job: StepJob, mark: CaptureMark) -> None:
        """Leave word of a captured save until it is committed in memory."""
        (tier,) = (tier for tier in self.tiers if tier.memory is not None)
        try:
            if copies := mark.pending():
                await asyncio.wait([asyncio.wrap_future(copy) for copy in copies])
            digest = await asyncio.wrap_future(job.digest)
            for layout in job.layouts:
                await self.commit.save_layout(tier, layout)
            await self._mark_worker.run(lambda: mark.set(digest))
        except StepwellError:
            return  # the save itself goes on, and its own stages tell what is wrong

    async def _unmark(self, tier: Tier, job: StepJob) -> None:
        if tier.memory is not None and job.mark is not None:
            await self._mark_worker.run(job.release)

    async def _encode(self, job: StepJob) -> _Encoded:
        chunks: list[Chunk] = []

        async def collect(chunk: Chunk) -> None:
            if not chunk.encodings:
                # Still the capture slot's own memory, which is about to be given back.
                chunk = replace(chunk, buffer=await self._workers.run(chunk.buffer.copy))
            chunks.append(replace(chunk, state=None))  # that is the slot's memory, too

        loop = self._closed_loop
        if loop is not None:
            loop.begin(job.layouts, after_base=job.after_base, with_base=job.with_base)
        try:
            await flow(job.chunks(), self.chunk_stages, collect, self._workers, self._budget)
        finally:
            # The digest's thread reads the slots too.
            await asyncio.wait([asyncio.wrap_future(job.digest)])
            if job.mark is None:
                await self._workers.run(job.release)
        digest = await asyncio.wrap_future(job.digest)
        identity = PackIdentity(
            job.kind, self.run_name, job.link.incarnation, job.link.step, self.rank, self.world
        )

        def pack() -> Packed:
            about = {} if loop is None else loop.header()
            return self.shard.pack(identity, {**job.header(), "digest": digest, **about}, chunks)

        packed = await self._workers.run(pack)
        contained = job.kind is PackKind.STATE and not any(
            encoding.get("reference") == "previous" for chunk in chunks for encoding in chunk.encodings
        )
        key = pack_key(Series.STEP, job.link.incarnation, job.link.step, self.rank)
        manifest = Manifest(
            run=self.run_name,
            incarnation=job.link.incarnation,
            step=job.link.step,
            rank=self.rank,
            world=self.world,
            kind=str(job.kind),
            previous=job.previous,
            self_contained=contained,
            objects=(ObjectEntry(key, packed.size_bytes, packed.xxh3),),
            layouts=tuple(layout.hash for layout in job.layouts),
            digest=digest,
            environment=job.environment,
        )
        for tier in self.tiers:
            tier.bases.encoded(job.link.step, packed.size_bytes)
        self._events.encoded(job.link, packed.size_bytes)
        return _Encoded(job, packed, manifest)

    async def _write_all(self, tier: Tier) -> None:
        while (encoded := await self._queues[tier.name].get()) is not None:
            await self._write(tier, encoded)
            await self._unmark(tier, encoded.job)
            self._settle()

    async def _write(self, tier: Tier, encoded: _Encoded) -> None:
        job, manifest = encoded.job, encoded.manifest
        if tier.lost is not None:
            job.handle.resolve(tier.name, StoreError(f"tier {tier.name} was given up: {tier.lost}"))
            return
        if not manifest.self_contained and tier.hopeless(job.handle):
            return  # nothing leads to it here: its bytes would be of no use
        hold = tier.hold
        try:
            for layout in job.layouts:
                await self.commit.save_layout(tier, layout)
            await self.replicate.save(tier, manifest.objects[0].key, encoded.packed.parts)
        except StepwellError as error:
            self.failed(Series.STEP, job.link, tier, error, job.handle)
            return
        # Evidence only where every link of the chain has its own: a crash must not leave a step that
        # looks committed and cannot be reached.
        if manifest.self_contained:
            if await self._commit_step(tier, job.handle, manifest, hold, job):
                await self.base_arrived(tier, job.link.step)
        elif tier.written(job.handle, manifest):
            await self._commit_step(tier, job.handle, manifest, hold, job)

    async def _whole_in(self, tier: Tier, manifest: Manifest, hold: Hold) -> bool:
        """Whether a save that has its evidence now is there with everything it needs."""
        if not await self.presence.same_life(tier, hold):
            return False
        if tier.store.life == hold.life:
            return True
        # It began anew between the save's bytes and their evidence.
        for entry in manifest.objects:
            if (
                not await tier.store.exists(entry.key)
                or await tier.store.getsize(entry.key) != entry.size_bytes
            ):
                return False
        return all([await tier.store.exists(layout_key(layout)) for layout in manifest.layouts])

    async def _commit_step(
        self, tier: Tier, handle: SaveHandle, manifest: Manifest, hold: Hold, job: StepJob | None = None
    ) -> bool:
        """Give a written differential its evidence, and tell; `job` where it is just written."""
        link = Link(manifest.incarnation, manifest.step)
        try:
            await self.commit.save(tier, manifest)
            if not await self._whole_in(tier, manifest, hold):
                self.inventory.forget(Series.STEP, link, tier.name)
                tier.stranded.append(manifest)
                raise NotCommittedError(
                    f"step {link.step}: tier {tier.name} began anew and lacks the saves before it"
                )
        except StepwellError as error:
            self.failed(Series.STEP, link, tier, error, handle)
            return False
        self.inventory.add(Series.STEP, link, tier.name)
        self.presence.holds(tier)
        if job is not None:
            await self._unmark(tier, job)
        # Before the handle, so that whoever waits for that finds everything told.
        self._events.committed(Series.STEP, link, tier, manifest.size_bytes)
        handle.resolve(tier.name)
        return True

    async def base_arrived(self, tier: Tier, step: int) -> None:
        """A base, or a save that stands for itself, is committed: commit what waited for it, in order."""
        while (parked := tier.next_parked(step)) is not None:
            # It was written in the tier's life and beginning: with any other it would have been stranded.
            await self._commit_step(tier, *parked, Hold(tier.life, tier.beginnings))
        tier.base_written(step)

    def failed(
        self,
        series: Series,
        link: Link,
        tier: Tier | None,
        error: BaseException,
        handle: SaveHandle,
        *,
        beside: bool = False,
    ) -> None:
        """A save or base did not arrive: tell the owner and its handle, and mark the hole.

        Parameters
        ----------
        beside : bool
            It is a base, and a differential of the same step goes along.
        """
        # Before the handle, so that whoever waits for that finds everything told.
        self._events.failed(series, link, tier, error)
        for one in self.tiers if tier is None else (tier,):
            # Where the old base and the log still hold, a base beside them changes nothing.
            if not beside or one.needs_base == link.step:
                handle.resolve(one.name, error)
            if series is Series.STEP:
                one.broken_at(link.step)
            else:
                one.base_lost(link.step)

    def committed(self, series: Series, link: Link, tier: Tier, size_bytes: int) -> None:
        """A base is committed: remember it and tell the owner."""
        self.inventory.add(series, link, tier.name)
        self._events.committed(series, link, tier, size_bytes)

    async def reclaim(self, tier: Tier) -> None:
        """Let go what the tier's retention lets go; a store that cannot delete is told of."""
        if self._lineage is None:
            return

        def removed(removal: Removal) -> None:
            return None

        # What proofs read lies in memory; no other tier is held back by them.
        held = () if tier.memory is None else tuple(self.held)
        lineage = self._lineage

        async def remove() -> None:
            while tier.stranded:
                manifest = tier.stranded[-1]
                stranded = Removal(Series.STEP, Link(manifest.incarnation, manifest.step))
                await remove_save(tier, stranded)
                self.inventory.forget(Series.STEP, stranded.link, tier.name)
                tier.stranded.remove(manifest)
            await reclaim(tier, self.inventory, lineage, held=held, removed=removed)

        try:
            await self.replicate.attempt(tier, remove)
        except StoreError as error:
            self._events.not_removed(tier, error)

    def _settle(self) -> None:
        """Let go of the saves that have their outcome everywhere; few are on their way at a time."""
        for handle in tuple(self._handles):
            futures = [handle.future(name) for name in handle.tiers]
            if all(future.done() for future in futures):
                self._handles.discard(handle)
                if all(future.exception() is not None for future in futures):
                    self._events.unprotected(handle.step)
