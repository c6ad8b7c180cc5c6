"""Lives of a run: beginning an incarnation in every tier, going on from a restored chain, ending."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from stepwell.errors import (
    NoSpaceError,
    StepwellError,
    StoreError,
    TransientStoreError,
)
from stepwell.pipeline.chain import Chain, resolve_chain
from stepwell.pipeline.keys import Series, incarnation_counter, incarnation_name
from stepwell.pipeline.reclaim import sweep
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.runner import Runner
from stepwell.pipeline.source import DAMAGE, NO_ANSWER, SaveSource
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import Failure

__all__ = ["Lives"]


class Lives:
    """The incarnations of one run; every coroutine runs on the runner's loop.

    Attributes
    ----------
    current : IncarnationRecord or None
        The life this process leads, once begun.
    """

    def __init__(self, runner: Runner, record: RunRecord, environment: Mapping[str, object]) -> None:
        self.current: IncarnationRecord | None = None
        self._runner = runner
        self._record = record
        self._environment = dict(environment)

    async def check(self) -> None:
        """Refuse a tier of another run before anything of it is believed.

        Raises
        ------
        ObjectExistsError
            It belongs to another run.
        StoreError
            It cannot be read, and the run does not go on without it.
        """
        for tier in self._runner.tiers:
            if tier.lost is not None:
                continue
            try:
                await self._runner.commit.check_run(tier, self._record)
            except TransientStoreError as error:
                if not self._runner.presence.give_up(tier, error):
                    raise

    async def begin(self, parent: Link | None) -> IncarnationRecord:
        """Begin a new life in every tier; what never got its evidence there is swept first.

        Raises
        ------
        StoreError
            A tier cannot be written that the run does not go on without; no life has begun.
        """
        runner, inventory = self._runner, self._runner.inventory
        counter = 1 + max(map(incarnation_counter, inventory.named_incarnations()), default=0)
        record = IncarnationRecord(
            run=self._record.run,
            incarnation=incarnation_name(counter, secrets.randbits(64)),
            parent=parent,
            created_unix_s=time.time(),
            environment=self._environment,
        )
        for tier in runner.tiers:
            tier.store.begin_life(record.incarnation)
            if tier.lost is not None:
                continue
            try:
                await sweep(tier, inventory)
                await self._enter(tier, record)
                tier.life = tier.store.life
            except (TransientStoreError, NoSpaceError) as error:
                if not runner.presence.give_up(tier, error):
                    raise
        inventory.incarnations[record.incarnation] = record
        runner.begin_life(inventory.lineage_of(record.incarnation), partial(self._enter, record=record))
        self.current = record
        return record

    async def _enter(self, tier: Tier, record: IncarnationRecord) -> None:
        """Write down in a tier that this life is led there, too."""
        await self._runner.commit.save_run(tier, self._record)
        await self._runner.commit.save_incarnation(tier, record)

    async def end(self) -> dict[str, StepwellError]:
        """Write down, where records commit, what the newest save is: its loss can then be noticed.

        Returns
        -------
        dict
            Tiers where that failed.
        """
        failed: dict[str, StepwellError] = {}
        if self.current is None:
            return failed
        for tier in self._runner.tiers:
            held = self._runner.inventory.held_by(tier.name)
            newest = max((*held[Series.STEP], *held[Series.BASE]), default=None)
            if not tier.has_commit_records or tier.lost is not None or newest is None:
                continue
            if newest.incarnation != self.current.incarnation:
                continue
            try:
                await self._runner.commit.end_incarnation(tier, replace(self.current, ended=newest))
            except StepwellError as error:
                failed[tier.name] = error
        return failed

    async def free(self) -> None:
        """Let go of what other nodes hold in their memory: a tier that survives everything has it all.

        The records stay: they keep older lives from writing there.
        """
        runner = self._runner
        for tier in runner.tiers:
            if tier.survives is not Failure.NODE or tier.has_commit_records or tier.lost is not None:
                continue
            try:
                for incarnation in sorted(runner.inventory.named_incarnations()):
                    for series in Series:
                        await tier.store.delete_dir(f"{incarnation}/{series}")
            except StoreError as error:
                runner.presence.keeps(tier, error)

    async def adopt(self, chain: Chain, source: SaveSource) -> tuple[int, int]:
        """Judge from which tiers the restored save can be reached, each alone or with what outlives it.

        Not every tier has every base, so theirs may be longer chains. A tier that lacks a part takes
        part again from the next base on.

        Parameters
        ----------
        chain : Chain
        source : SaveSource
            The one it was restored with: it remembers who does not answer.

        Returns
        -------
        tuple of int
            Bytes of the chain's base and of its log.
        """
        runner = self._runner
        order = list(Failure)
        for tier in runner.tiers:
            reach = order.index(tier.survives)
            enough = [one for one in runner.tiers if one is tier or order.index(one.survives) > reach]
            if await self._reached(chain.target, enough, source):
                tier.begin_whole()
            else:
                tier.begin_later(chain.target.step + 1)
        log = [(await source.any_manifest(Series.STEP, link)).size_bytes for link in chain.steps]
        base = 0 if chain.base is None else (await source.any_manifest(Series.BASE, chain.base)).size_bytes
        return base, sum(log)

    async def committed_steps(self, tier: str | None) -> list[int]:
        """Committed steps of the live lineage, oldest first, in any tier or in one."""
        inventory = self._runner.inventory
        newest = inventory.newest()
        name = self.current.incarnation if self.current else newest.incarnation if newest else ""
        lineage = inventory.lineage_of(name)
        links = (link for link in inventory.links() if lineage.contains(link))
        return sorted(
            {
                link.step
                for link in links
                if tier is None
                or tier in inventory.steps.get(link, ())
                or tier in inventory.bases.get(link, ())
            }
        )

    async def newest_is_whole_in(self, tier: Tier) -> bool:
        """Whether the newest save of any tier can be reached with what `tier` alone holds."""
        inventory = self._runner.inventory
        newest = inventory.newest()
        if newest is None:
            return True
        return await self._reached(newest, [tier], SaveSource([tier], inventory, self._runner.commit))

    async def _reached(self, target: Link, tiers: Sequence[Tier], source: SaveSource) -> bool:
        """Whether a save can be restored from what these tiers hold and let us read now."""
        try:
            await resolve_chain(source.narrowed(tiers, self._runner.inventory.only(tiers)), target)
        except (*DAMAGE, *NO_ANSWER):
            return False
        return True
