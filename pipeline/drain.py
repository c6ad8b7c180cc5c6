"""Draining: what a dead run left in the memory of this machine is brought to tiers that survive more.

For a machine that is about to go, at the end of a job's time, say, when the run itself cannot be started once
more. Everything is verified as it is read and committed as the run would have committed it, so a restore
afterwards cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stepwell.errors import IntegrityError, NotCommittedError, UsageError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.chain import resolve_chain
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import Series
from stepwell.pipeline.manifest import Manifest
from stepwell.pipeline.pack import PackIdentity, PackKind, PackReader
from stepwell.pipeline.pack_reader import off_loop
from stepwell.pipeline.records import Link, RunRecord
from stepwell.pipeline.source import DAMAGE, READ_AHEAD, SaveSource
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.zarr_base import GroupPlan, export_base
from stepwell.pipeline.zarr_pack import PackedPlan, export_packed

__all__ = ["Drained", "drain"]


@dataclass(frozen=True, slots=True)
class Drained:
    """What one tier was brought.

    Attributes
    ----------
    tier : str
    step : int
        The newest step that can be restored from it alone now.
    saves, bases : int
        How many were copied.
    size_bytes : int
        As they lie there.
    """

    tier: str
    step: int
    saves: int
    bases: int
    size_bytes: int


async def drain(
    tiers: Sequence[Tier],
    inventory: Inventory,
    commit: Commit,
    record: RunRecord,
    *,
    lossy: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Drained]:
    """Bring the newest save that is whole anywhere to every tier that has commit records.

    Parameters
    ----------
    tiers : sequence of Tier
        Nearest first; written only where they have commit records. Nobody else may have them open.
    inventory : Inventory
        What they hold; kept up to date.
    commit : Commit
    record : RunRecord
    lossy : bool
        The log does not lead to the bits of a base, so it never stands in for one.
    progress : callable
        Told how many saves of how many are copied, for each tier from the beginning.

    Returns
    -------
    list of Drained
        For each of those tiers.

    Raises
    ------
    NotCommittedError
        Nothing is committed anywhere.
    IntegrityError
        Saves are committed, and none is whole; or what a tier held before is damaged, so that the save
        cannot be restored from there alone.
    ObjectExistsError
        A tier belongs to another run; nothing was written.
    UsageError
        No tier has commit records.
    StoreError
        A tier cannot be read or written; what was committed there until then stays.
    """
    written = [tier for tier in tiers if tier.has_commit_records]
    if not written:
        raise UsageError("no tier of this run keeps what it is brought: there is nothing to drain to")
    source = SaveSource(tiers, inventory, commit)
    target = await _newest_whole(source)
    drained = []
    for tier in written:
        drained.append(await _Drain(source, commit, record, tier, lossy).run(target, progress))
        await _check_alone(SaveSource([tier], inventory.only([tier]), commit), target, tier)
    return drained


async def _check_alone(source: SaveSource, target: Link, tier: Tier) -> None:
    """Read all that leads to `target` from one tier: what was there before may be damaged."""
    try:
        chain = await resolve_chain(source, target)
        if chain.base is not None:
            base = await source.base(chain.base)
            for part in range(len(base.layout.chunks)):
                await base.chunk(part)
        for link in chain.steps:
            step = await source.step(link)
            for key in step.keys:
                await step.chunk(key)
    except DAMAGE as error:
        raise IntegrityError(
            f"step {target.step} cannot be restored from tier {tier.name} alone: {error}; what is in memory "
            "is kept, and a restore with it works"
        ) from error


async def _newest_whole(source: SaveSource) -> Link:
    """Return the newest save whose chain is there; its bytes are checked when they are copied."""
    candidates = list(source.inventory.candidates())
    if not candidates:
        raise NotCommittedError("nothing is committed in any tier")
    for link in candidates:
        try:
            await resolve_chain(source, link)
        except DAMAGE as error:
            source.note(str(error))
        else:
            return link
    raise IntegrityError(f"{len(candidates)} saves are committed, none is whole: {source.faults[-1]}")


class _Drain:
    """Brings saves to one tier."""

    def __init__(
        self, source: SaveSource, commit: Commit, record: RunRecord, tier: Tier, lossy: bool
    ) -> None:
        self._source = source
        self._commit = commit
        self._record = record
        self._tier = tier
        self._lossy = lossy
        self._size_bytes = 0

    async def run(self, target: Link, progress: Callable[[int, int], None]) -> Drained:
        base, steps = await self._missing(target)
        if base is not None or steps:
            await self._enter(target)
        total = len(steps) + (base is not None)
        if base is not None:
            await self._copy_base(base)
            progress(1, total)
        for done, link in enumerate(steps, 1 + (base is not None)):
            await self._copy_step(link)
            progress(done, total)
        return Drained(self._tier.name, target.step, len(steps), int(base is not None), self._size_bytes)

    async def _missing(self, target: Link) -> tuple[Link | None, list[Link]]:
        """Return what the tier lacks to restore `target` alone: a base, or none, and steps, oldest first.

        The log since what it holds, or the newest base and the log since then, whichever is smaller.
        """
        source, name = self._source, self._tier.name
        own = source.narrowed([self._tier], source.inventory.only([self._tier]))
        steps: list[Link] = []
        log_bytes = 0
        by_base: tuple[int, Link, int] | None = None  # bytes, the base, steps after it
        place: Link | None = target
        while place is not None:
            try:
                await resolve_chain(own, place)
            except DAMAGE:
                pass
            else:
                if by_base is None or log_bytes <= by_base[0]:
                    return None, list(reversed(steps))
                break
            if place in source.inventory.bases and by_base is None:
                size_bytes = (await source.any_manifest(Series.BASE, place)).size_bytes
                by_base = log_bytes + size_bytes, place, len(steps)
                if self._lossy:
                    break
            if place not in source.inventory.steps or (by_base is not None and log_bytes > by_base[0]):
                break
            manifest = await source.any_manifest(Series.STEP, place)
            if name not in source.inventory.steps[place]:
                steps.append(place)
                log_bytes += manifest.size_bytes
            if manifest.self_contained:
                return None, list(reversed(steps))
            place = manifest.previous
        if by_base is None:
            raise NotCommittedError(f"step {target.step} cannot be reached: no base leads to it")
        return by_base[1], list(reversed(steps[: by_base[2]]))

    async def _enter(self, target: Link) -> None:
        """Write down what run it is, and the lives that lead to `target`."""
        inventory, commit = self._source.inventory, self._commit
        await commit.save_run(self._tier, self._record)
        for incarnation, _ in inventory.lineage_of(target.incarnation).limits:
            life = inventory.incarnations.get(incarnation)
            if life is not None and not await self._tier.store.exists(life.key):
                await commit.save_incarnation(self._tier, life)

    async def _copy_step(self, link: Link) -> None:
        source, tier = self._source, self._tier

        async def read(holder: Tier) -> tuple[Manifest, memoryview]:
            manifest = await source.manifest(Series.STEP, link, holder)
            (entry,) = manifest.objects
            view = await holder.store.fetch(entry.key, 0, entry.size_bytes)
            pack = await PackReader.over(view, f"{holder.name}: {entry.key}").open()
            if pack.xxh3 != entry.xxh3:
                raise IntegrityError(f"{holder.name}: {entry.key}: is not the pack its manifest names")
            for key in pack.rows:
                await pack.chunk(key)
            return manifest, view

        await source.layouts_of(Series.STEP, link)
        _, (manifest, view) = await source.first(
            source.holders(Series.STEP, link), read, f"step {link.step} of {link.incarnation}"
        )
        for layout_hash in manifest.layouts:
            await self._commit.save_layout(tier, await source.layout(layout_hash))
        await self._commit.replicate.save(tier, manifest.objects[0].key, (view,))
        await self._finish(Series.STEP, manifest)

    async def _copy_base(self, link: Link) -> None:
        tier = self._tier
        base = await self._source.base(link, ahead=READ_AHEAD)
        layout, manifest = base.layout, base.manifest
        run: Bytes = np.zeros(layout.size_bytes, np.uint8)
        try:
            for part, chunk in enumerate(layout.chunks):
                run[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes] = await base.chunk(part)
        finally:
            await base.stop()
        identity = PackIdentity(
            PackKind.BASE, manifest.run, link.incarnation, link.step, manifest.rank, manifest.world
        )
        plan = GroupPlan(layout)
        export = (
            partial(export_packed, PackedPlan(plan, manifest.rank, tier.data_bytes_max))
            if tier.packed
            else partial(export_base, plan)
        )
        written = await off_loop(run.nbytes, lambda: list(export(identity, base.header, run.data)))
        await self._commit.replicate.save_batch(tier, lambda: [item for item, _ in written])
        await self._commit.save_layout(tier, layout)
        await self._finish(Series.BASE, replace(manifest, objects=tuple(entry for _, entry in written)))

    async def _finish(self, series: Series, manifest: Manifest) -> None:
        await self._commit.save(self._tier, manifest)
        link = Link(manifest.incarnation, manifest.step)
        self._source.inventory.add(series, link, self._tier.name)
        self._size_bytes += manifest.size_bytes
