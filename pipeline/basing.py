"""Finishing a captured base: published in place in memory, written as a zarr group elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepwell.errors import StepwellError, StoreError
from stepwell.pipeline.jobs import BaseJob
from stepwell.pipeline.keys import Series, pack_key
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack import HEADER_BYTES, PackIdentity, PackKind, finish_region
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.workers import Workers
from stepwell.pipeline.zarr_base import GroupPlan, export_base
from stepwell.stores.base import WriteItem

if TYPE_CHECKING:
    from stepwell.pipeline.runner import Runner

__all__ = ["BaseWriter"]


class BaseWriter:
    """Brings one base at a time into every tier, nearest first."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        self._runner = runner
        self._workers = workers
        self._plan: GroupPlan | None = None

    async def write(self, job: BaseJob, tiers: Sequence[Tier]) -> None:
        """Commit `job` in `tiers`, those that take it; its region is released whatever happens."""
        published = False
        try:
            await asyncio.wrap_future(job.ready)
            header = await self._workers.run(job.header)
            digest = await asyncio.wrap_future(job.digest)
            await self._workers.run(lambda: job.check(digest))
            header["digest"] = digest
            for tier in tiers:
                if tier.lost is not None:
                    job.handle.resolve(tier.name, StoreError(f"tier {tier.name} was given up: {tier.lost}"))
                    continue
                try:
                    in_place = tier.memory is not None and job.publish is not None
                    if in_place:
                        objects = await self._publish(job, header)
                        published = True
                    else:
                        objects = await self._export(job, header, tier)
                    await self._commit(job, tier, objects, digest)
                except StepwellError as error:
                    self._failed(job, tier, error)
        except StepwellError as error:
            self._failed(job, None, error)
        finally:
            # In a worker: it may wait for a copy, and regions are unmapped here.
            await self._workers.run(lambda: job.release(published))

    def _failed(self, job: BaseJob, tier: Tier | None, error: StepwellError) -> None:
        self._runner.failed(Series.BASE, job.link, tier, error, job.handle, beside=not job.alone)

    def _identity(self, job: BaseJob) -> PackIdentity:
        runner = self._runner
        return PackIdentity(
            PackKind.BASE, runner.run_name, job.link.incarnation, job.link.step, runner.rank, runner.world
        )

    async def _publish(self, job: BaseJob, header: dict[str, object]) -> tuple[ObjectEntry, ...]:
        key = pack_key(Series.BASE, job.link.incarnation, job.link.step, self._runner.rank)
        publish = job.publish
        assert publish is not None

        def finish() -> ObjectEntry:
            packed = finish_region(job.payload, self._identity(job), header, job.layout)
            publish(key, packed.size_bytes)
            return ObjectEntry(key, packed.size_bytes, packed.xxh3)

        return (await self._workers.run(finish),)

    async def _export(self, job: BaseJob, header: dict[str, object], tier: Tier) -> tuple[ObjectEntry, ...]:
        run = job.payload[HEADER_BYTES : HEADER_BYTES + job.layout.size_bytes]

        def export() -> tuple[list[WriteItem], tuple[ObjectEntry, ...]]:
            if self._plan is None or self._plan.layout.hash != job.layout.hash:
                self._plan = GroupPlan(job.layout)
            written = list(export_base(self._plan, self._identity(job), header, run))
            return [item for item, _ in written], tuple(entry for _, entry in written)

        items, objects = await self._workers.run(export)
        await self._runner.replicate.save_batch(tier, lambda: items)
        return objects

    async def _commit(
        self, job: BaseJob, tier: Tier, objects: tuple[ObjectEntry, ...], digest: object
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
        runner.committed(Series.BASE, job.link, tier, manifest.size_bytes)
        if job.alone:
            job.handle.resolve(tier.name)
        await runner.base_arrived(tier, job.link.step)
        await runner.reclaim(tier)
