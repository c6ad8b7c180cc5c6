"""Which tiers take part: some are given up and answer again, some come back without what they held."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from stepwell.errors import StepwellError
from stepwell.pipeline.tier import Tier

if TYPE_CHECKING:
    from stepwell.pipeline.runner import Runner

__all__ = ["Presence", "PresenceEvents"]


class PresenceEvents(Protocol):
    """What the owner of a runner is asked and told of tiers that come and go."""

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        """Whether the run goes on without a tier that failed; if so it is marked lost."""
        ...

    def back(self, tier: Tier, reason: str) -> None:
        """A tier takes part again and needs a base first."""
        ...


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

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        """Whether the run goes on without a tier that failed."""
        return self._events.give_up(tier, error)

    async def same_life(self, tier: Tier) -> bool:
        """Whether all that was committed in a tier is still there, also if its store began a new life.

        If not, the tier counts from the next base on, and that is asked for.
        """
        if tier.store.life == tier.life:
            return True
        tier.life = tier.store.life
        if await self._runner.inventory.read_again(tier):
            return True
        self._begin_anew(tier, "began anew, without what it held")
        return False

    async def try_again(self, tier: Tier) -> None:
        """Let a tier that was given up take part again if it takes the records of this life now."""
        if self.enter is None:
            return
        try:
            await self.enter(tier)
            await self._runner.inventory.read_again(tier)
        except StepwellError:
            return
        tier.life, tier.lost = tier.store.life, None
        self._begin_anew(tier, "answers again")

    def _begin_anew(self, tier: Tier, reason: str) -> None:
        tier.begin_anew()
        self._runner.commit.forget_layouts(tier)
        self._events.back(tier, reason)
