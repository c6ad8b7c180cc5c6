"""Which tiers take part: some are given up and answer again, some come back without what they held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from stepwell.errors import DeadlineError, StepwellError, TransientStoreError
from stepwell.pipeline.tier import Hold, Tier

if TYPE_CHECKING:
    from stepwell.pipeline.runner import Runner

__all__ = ["Presence", "PresenceEvents"]

LIVES_MAX = 3  # one that dies faster than it can be listed is away
PAUSE_BASES_MAX = 64


class PresenceEvents(Protocol):
    """What the owner of a runner is asked and told of tiers that come and go."""

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        """Whether the run goes on without a tier that failed; if so it is marked lost."""
        ...

    def back(self, tier: Tier, reason: str) -> None:
        """A tier takes part again and needs a base first."""
        ...

    def refused(self, tier: Tier, error: BaseException) -> None:
        """A tier that was given up answers, and will not take this run."""
        ...

    def not_removed(self, tier: Tier, error: BaseException) -> None:
        """What retention lets go cannot be removed from a tier; it is tried again after the next base."""
        ...


@dataclass(slots=True)
class _Pause:
    """Bases a tier is let off, and will be after its next fault."""

    left: int = 0
    next: int = 1


class Presence:
    """Watches over the tiers of a runner; all on its loop.

    Attributes
    ----------
    enter : coroutine function or None
        Writes the records of this life of the run into a tier; None before it has begun.
    """

    def __init__(self, runner: Runner, events: PresenceEvents) -> None:
        self.enter: Callable[[Tier], Awaitable[None]] | None = None
        self._runner = runner
        self._events = events
        self._looking: dict[str, asyncio.Lock] = {}
        self._pauses: dict[str, _Pause] = {}
        self._gone: set[str] = set()  # tiers that lack something and have not begun anew yet
        self._trying: dict[str, asyncio.Task[None]] = {}

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        """Whether the run goes on without a tier that failed."""
        return self._events.give_up(tier, error)

    def keeps(self, tier: Tier, error: BaseException) -> None:
        """What a tier should let go stays there, which harms nothing."""
        self._events.not_removed(tier, error)

    async def same_life(self, tier: Tier, hold: Hold) -> bool:
        """Whether all that was committed in a tier is still there, also if its store began a new life.

        If not, the tier counts from the next base on, and that is asked for.

        Parameters
        ----------
        tier : Tier
        hold : Hold
            From before the first byte was written of what is to count: two that meet a new life at one
            time get the same answer.

        Raises
        ------
        StoreError, IntegrityError
            The tier could not be looked at; the next one who asks looks again.
        """
        async with self._looking.setdefault(tier.name, asyncio.Lock()):
            if tier.store.life != tier.life and (not await self._look(tier) or tier.waiting):
                self._begin_anew(tier, "began anew, without what it held")
            return tier.beginnings == hold.beginnings

    def begin_to_try(self, tier: Tier, group: asyncio.TaskGroup) -> None:
        """Begin `try_again` unless it runs: one that does not answer holds up nobody else."""
        if tier.name not in self._trying:
            task = self._trying[tier.name] = group.create_task(self.try_again(tier))
            task.add_done_callback(lambda _: self._trying.pop(tier.name))

    def stop(self) -> None:
        """Try no longer."""
        for task in self._trying.values():
            task.cancel()

    async def try_again(self, tier: Tier) -> None:
        """Let a tier that was given up take part again if it takes the records of this life now.

        Called once after each base. One that is given up again before it has held a save, a full disk,
        say, is let off for twice as many bases each time: each return costs the trainer a base.
        """
        pause = self._pauses.setdefault(tier.name, _Pause())
        pause.left -= 1
        if self.enter is None or pause.left >= 0:
            return
        async with self._looking.setdefault(tier.name, asyncio.Lock()):
            try:
                await self._look(tier)
            except (TransientStoreError, DeadlineError):
                return
            except StepwellError as error:
                self._events.refused(tier, error)
                return
            tier.lost = None
            pause.left = pause.next
            pause.next = min(PAUSE_BASES_MAX, 2 * pause.next)
            self._begin_anew(tier, "answers again")

    def holds(self, tier: Tier) -> None:
        """A save is committed in a tier: whatever befalls that next is a new fault."""
        self._pauses.pop(tier.name, None)

    async def _look(self, tier: Tier) -> bool:
        """Write the records of this life where they are missing, and compare what is held with what was."""
        for _ in range(LIVES_MAX):
            if self.enter is not None:
                await self.enter(tier)
            life = tier.store.life
            if not await self._runner.replicate.attempt(
                tier, partial(self._runner.inventory.read_again, tier)
            ):
                self._gone.add(tier.name)  # what is missing is forgotten now, and missed only once
            if tier.store.life == life:
                tier.life = life
                return tier.name not in self._gone
        raise TransientStoreError(f"tier {tier.name} began {LIVES_MAX} lives while it was looked at")

    def _begin_anew(self, tier: Tier, reason: str) -> None:
        tier.begin_anew()
        self._gone.discard(tier.name)
        self._runner.commit.forget_layouts(tier)
        if tier.lost is None:
            self._events.back(tier, reason)
