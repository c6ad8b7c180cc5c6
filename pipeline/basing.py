"""Finishing a captured base: published in place in memory, written as a zarr group elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepwell.errors import DeadlineError, NotCommittedError, StepwellError, StoreError
from stepwell.pipeline.jobs import BaseJob
from stepwell.pipeline.keys import Series, pack_key
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack import HEADER_BYTES, PackIdentity, PackKind, finish_region
from stepwell.pipeline.tier import Hold, Tier
from stepwell.pipeline.workers import Workers
from stepwell.pipeline.zarr_base import GroupPlan, export_base
from stepwell.pipeline.zarr_pack import PackedPlan, export_packed
from stepwell.stores.base import WriteItem

if TYPE_CHECKING:
    from stepwell.pipeline.runner import Runner

__all__ = ["BaseWriter"]

READY_TIMEOUT_S = 600.0  # digests of earlier saves and proofs may be before it in their queue


class BaseWriter:
    """Brings one base at a time into every tier, nearest first."""

    def __init__(self, runner: Runner, workers: Workers, group: asyncio.TaskGroup) -> None:
        self._runner = runner
        self._group = group
        self._workers = workers
        self._plan: GroupPlan | None = None
        self._packed_plans: dict[int | None, PackedPlan] = {}  # of the layout of `_plan`, by data_bytes_max
        self._packed: ObjectEntry | None = None  # the base at hand, once its region is a whole pack

    async def write(self, job: BaseJob, tiers: Sequence[Tier]) -> None:
        """Commit `job` in `tiers`, those that take it; its region is released whatever happens.

        What fails is told to the runner, not raised.
        """
        published = False
        self._packed = None
        away = [tier for tier in self._runner.tiers if tier.lost is not None]
        try:
            header, digest = await self._captured(job)
            await self._workers.run(lambda: job.check(digest))
            header["digest"] = digest
            for tier in tiers:
                hold = tier.hold
                if tier.lost is not None:
                    job.handle.resolve(tier.name, StoreError(f"tier {tier.name} was given up: {tier.lost}"))
                    continue
                try:
                    objects: tuple[ObjectEntry, ...]
                    in_place = tier.memory is not None and job.publish is not None
                    if in_place:
                        objects = (await self._pack(job, header),)
                        await self._publish(job, objects[0])
                        published = True
                    elif tier.has_commit_records:
                        objects = await self._export(job, header, tier)
                    else:
                        objects = (await self._pack(job, header),)
                        await self._send(job, objects[0], tier)
                    await self._commit(job, tier, objects, digest, hold)
                except StepwellError as error:
                    self._failed(job, tier, error)
        except StepwellError as error:
            self._failed(job, None, error)
        finally:
            # In a worker: it may wait for a copy, and regions are unmapped here.
            await self._workers.run(lambda: job.release(published))
        for tier in away:
            self._runner.presence.begin_to_try(tier, self._group)

    async def _captured(self, job: BaseJob) -> tuple[dict[str, object], object]:
        """Wait for what is still copied and read in the background; return the header and the digest.

        Raises
        ------
        DeadlineError
            It does not end.
        IntegrityError
            Somebody wrote into what was copied.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.wrap_future(job.ready)
                header = await self._workers.run(job.header)
                return header, await asyncio.wrap_future(job.digest)
        except TimeoutError as error:
            if isinstance(error, StepwellError):
                raise
            raise DeadlineError(
                f"base {job.link.step}: copy or digest did not end within {READY_TIMEOUT_S:g} s"
            ) from None

    def _failed(self, job: BaseJob, tier: Tier | None, error: StepwellError) -> None:
        self._runner.failed(Series.BASE, job.link, tier, error, job.handle, beside=not job.alone)

    def _identity(self, job: BaseJob) -> PackIdentity:
        runner = self._runner
        return PackIdentity(
            PackKind.BASE, runner.run_name, job.link.incarnation, job.link.step, runner.rank, runner.world
        )

    async def _pack(self, job: BaseJob, header: dict[str, object]) -> ObjectEntry:
        """Make one object of the region, in place and once."""
        if self._packed is None:
            key = pack_key(Series.BASE, job.link.incarnation, job.link.step, self._runner.rank)

            def finish() -> ObjectEntry:
                packed = finish_region(job.payload, self._identity(job), header, job.layout)
                return ObjectEntry(key, packed.size_bytes, packed.xxh3)

            self._packed = await self._workers.run(finish)
        return self._packed

    async def _publish(self, job: BaseJob, entry: ObjectEntry) -> None:
        publish = job.publish
        assert publish is not None
        await self._workers.run(lambda: publish(entry.key, entry.size_bytes))

    async def _send(self, job: BaseJob, entry: ObjectEntry, tier: Tier) -> None:
        """Put the pack into a tier; the region stays as it is until the job is released."""
        await self._runner.replicate.save(tier, entry.key, (job.payload[: entry.size_bytes],))

    async def _export(self, job: BaseJob, header: dict[str, object], tier: Tier) -> tuple[ObjectEntry, ...]:
        run = job.payload[HEADER_BYTES : HEADER_BYTES + job.layout.size_bytes]

        def export() -> tuple[list[WriteItem], tuple[ObjectEntry, ...]]:
            plan, identity = self._plan_of(job.layout), self._identity(job)
            if tier.packed:
                packed = self._packed_plan(plan, tier.data_bytes_max)
                written = list(export_packed(packed, identity, header, run))
            else:
                written = list(export_base(plan, identity, header, run))
            return [item for item, _ in written], tuple(entry for _, entry in written)

        items, objects = await self._workers.run(export)
        await self._runner.replicate.save_batch(tier, lambda: items)
        return objects

    def _plan_of(self, layout: Layout) -> GroupPlan:
        if self._plan is None or self._plan.layout.hash != layout.hash:
            self._plan = GroupPlan(layout)
            self._packed_plans.clear()
        return self._plan

    def _packed_plan(self, plan: GroupPlan, data_bytes_max: int | None) -> PackedPlan:
        if data_bytes_max not in self._packed_plans:
            self._packed_plans[data_bytes_max] = PackedPlan(plan, self._runner.rank, data_bytes_max)
        return self._packed_plans[data_bytes_max]

    async def _commit(
        self, job: BaseJob, tier: Tier, objects: tuple[ObjectEntry, ...], digest: object, hold: Hold
    ) -> None:
        runner = self._runner
        await runner.commit.save_layout(tier, job.layout)
        manifest = Manifest(
            run=runner.run_name,
            incarnation=job.link.incarnation,
            step=job.link.step,
            rank=runner.rank,
            world=runner.world,
            kind="base",
            previous=None,
            self_contained=True,
            objects=objects,
            layouts=(job.layout.hash,),
            digest=digest,
            environment=job.environment,
        )
        await runner.commit.save(tier, manifest)
        whole = await runner.presence.same_life(tier, hold)
        if tier.store.life != hold.life or not whole:
            raise NotCommittedError(
                f"base {job.link.step}: tier {tier.name} began anew and lacks what was written to it before"
            )
        runner.committed(Series.BASE, job.link, tier, manifest.size_bytes)
        if job.alone:
            runner.presence.holds(tier)
            job.handle.resolve(tier.name)
        await runner.base_arrived(tier, job.link.step)
        await runner.reclaim(tier)
