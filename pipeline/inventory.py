"""What is committed where, and which of it lies on the live lineage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from stepwell.errors import FormatError, IntegrityError, MissingObjectError, TransientStoreError
from stepwell.pipeline.keys import (
    INCARNATION_PREFIX,
    Area,
    Series,
    commit_key,
    incarnation_key,
    manifest_key,
    parse_key,
)
from stepwell.pipeline.records import IncarnationRecord, Link
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import ObjectStore

__all__ = ["Inventory", "Lineage", "committed_in", "evidence_key"]

ASKED_AT_ONCE = 16  # questions to one store on their way at a time


@dataclass(frozen=True, slots=True)
class Lineage:
    """The line of incarnations that leads to one of them.

    Attributes
    ----------
    limits : tuple of (incarnation, last step or None)
        Newest first. Saves of an older incarnation count up to the step the next one began from.
    """

    limits: tuple[tuple[str, int | None], ...]

    def contains(self, link: Link) -> bool:
        """Whether a save lies on this line."""
        for incarnation, last in self.limits:
            if incarnation == link.incarnation:
                return last is None or link.step <= last
        return False


@dataclass
class Inventory:
    """Committed saves and bases by tier.

    Attributes
    ----------
    steps, bases : dict of Link to set of tier names
    incarnations : dict of name to IncarnationRecord
    damaged : dict of key to str
        Records that could not be read, with the reason.
    """

    steps: dict[Link, set[str]] = field(default_factory=dict)
    bases: dict[Link, set[str]] = field(default_factory=dict)
    incarnations: dict[str, IncarnationRecord] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def read(
        cls,
        tiers: Sequence[Tier],
        replicate: Replicate | None = None,
        give_up: Callable[[Tier, TransientStoreError], bool] = lambda tier, error: False,
    ) -> Inventory:
        """List every tier; names only, no payload is read.

        Parameters
        ----------
        tiers : sequence of Tier
        replicate : Replicate, optional
            Asks again after faults that pass; its retries of the tiers if not given.
        give_up : callable
            Whether the run goes on without a tier that does not answer.
        """
        inventory = cls()
        replicate = replicate or Replicate()
        for tier in tiers:
            try:
                await replicate.attempt(tier, partial(inventory.read_again, tier))
            except TransientStoreError as error:
                if not give_up(tier, error):
                    raise
        return inventory

    async def read_again(self, tier: Tier) -> bool:
        """List one tier, and forget what it was thought to hold; whether all of that is still there.

        Raises
        ------
        StoreError
            It cannot be listed; nothing is forgotten.
        FormatError
            A newer version of stepwell has written there.
        """
        await self._read_incarnations(tier)
        held: dict[Series, set[Link]] = {series: set() for series in Series}
        for incarnation in await _incarnations_in(tier.store):
            for series, links in held.items():
                links.update(await committed_in(tier, incarnation, series))
        before = self.held_by(tier.name)
        gone = {(series, link) for series in Series for link in set(before[series]) - held[series]}
        for series, link in gone:
            self.forget(series, link, tier.name)
        for series, links in held.items():
            for link in links:
                self.add(series, link, tier.name)
        return not gone

    @property
    def is_empty(self) -> bool:
        """Whether nothing is committed anywhere."""
        return not self.steps and not self.bases

    def links(self) -> set[Link]:
        """Every committed save, as differential or base."""
        return set(self.steps) | set(self.bases)

    def named_incarnations(self) -> set[str]:
        """Names of all lives that left anything, also of those whose records are gone or damaged."""
        places = (parse_key(key) for key in self.damaged)
        damaged = {place.incarnation for place in places if place is not None}
        return {*self.incarnations, *damaged, *(link.incarnation for link in self.links())}

    def newest(self) -> Link | None:
        """The newest committed save of the newest incarnation that has one."""
        return max(self.links(), default=None)

    def newest_known(self) -> Link | None:
        """The newest save that is committed, or that was when its life ended orderly."""
        ended = [record.ended for record in self.incarnations.values() if record.ended is not None]
        return max((*self.links(), *ended), default=None)

    def lineage_of(self, incarnation: str) -> Lineage:
        """Return the line that leads to `incarnation`, by parent links alone."""
        limits: list[tuple[str, int | None]] = [(incarnation, None)]
        seen = {incarnation}
        record = self.incarnations.get(incarnation)
        while record is not None and record.parent is not None and record.parent.incarnation not in seen:
            limits.append((record.parent.incarnation, record.parent.step))
            seen.add(record.parent.incarnation)
            record = self.incarnations.get(record.parent.incarnation)
        return Lineage(tuple(limits))

    def candidates(self) -> Iterator[Link]:
        """Saves a recovery may go back to, newest first, on the lineage of the newest save.

        An incarnation that committed nothing does not bound its parents.
        """
        newest = self.newest()
        if newest is None:
            return
        lineage = self.lineage_of(newest.incarnation)
        yield from sorted((link for link in self.links() if lineage.contains(link)), reverse=True)

    def forget(self, series: Series, link: Link, tier: str) -> None:
        """A tier no longer holds a save."""
        found = self.steps if series is Series.STEP else self.bases
        holders = found.get(link)
        if holders is not None:
            holders.discard(tier)
            if not holders:
                del found[link]

    def add(self, series: Series, link: Link, tier: str) -> None:
        """A tier has committed a save."""
        found = self.steps if series is Series.STEP else self.bases
        found.setdefault(link, set()).add(tier)

    def only(self, tiers: Collection[Tier]) -> Inventory:
        """Return what some of the tiers hold."""
        names = {tier.name for tier in tiers}
        return Inventory(
            steps={link: at & names for link, at in self.steps.items() if at & names},
            bases={link: at & names for link, at in self.bases.items() if at & names},
            incarnations=self.incarnations,
        )

    def held_by(self, tier: str) -> Mapping[Series, list[Link]]:
        """What one tier holds."""
        return {
            Series.STEP: [link for link, tiers in self.steps.items() if tier in tiers],
            Series.BASE: [link for link, tiers in self.bases.items() if tier in tiers],
        }

    async def _read_incarnations(self, tier: Tier) -> None:
        async for name in tier.store.list_dir(INCARNATION_PREFIX.rstrip("/")):
            parsed = parse_key(INCARNATION_PREFIX + name)
            if (
                parsed is None
                or parsed.area is not Area.INCARNATION
                or parsed.incarnation in self.incarnations
            ):
                continue
            key = incarnation_key(parsed.incarnation)
            try:
                record = IncarnationRecord.decode(bytes(await tier.store.fetch(key)), f"{tier.name}: {key}")
            except (IntegrityError, MissingObjectError) as error:
                if isinstance(error, FormatError) and error.newer:
                    raise
                self.damaged[key] = str(error)
                continue
            self.incarnations[parsed.incarnation] = record
            self.damaged.pop(key, None)


async def committed_in(tier: Tier, incarnation: str, series: Series) -> list[Link]:
    """List the saves of one incarnation that `tier` holds whole, by its own kind of evidence."""
    links: list[Link] = []
    async for name in tier.store.list_dir(f"{incarnation}/{series}"):
        if name.isascii() and name.isdigit() and len(name) == 12:
            links.append(Link(incarnation, int(name)))
    found: list[Link] = []
    for first in range(0, len(links), ASKED_AT_ONCE):
        some = links[first : first + ASKED_AT_ONCE]
        # Each answer is a round trip where the store is far away.
        whole = await asyncio.gather(*(tier.store.exists(evidence_key(tier, series, link)) for link in some))
        found += [link for link, there in zip(some, whole, strict=True) if there]
    return found


def evidence_key(tier: Tier, series: Series, link: Link) -> str:
    """Return the key of what says, in this tier, that a save is whole."""
    if tier.has_commit_records:
        return commit_key(series, link.incarnation, link.step)
    return manifest_key(series, link.incarnation, link.step, 0)


async def _incarnations_in(store: ObjectStore) -> Iterable[str]:
    names = []
    async for name in store.list_dir(""):
        if parse_key(f"{INCARNATION_PREFIX}{name}.json") is not None:
            names.append(name)
    return names
