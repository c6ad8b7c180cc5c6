"""What a caller holds of one save: its way through the tiers."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable

from stepwell.errors import DeadlineError, UsageError

__all__ = ["SaveHandle"]


class SaveHandle:
    """One save on its way; thread-safe.

    Attributes
    ----------
    step : int
        Label of the save.
    skipped : str or None
        Why nothing was saved (backpressure ``skip``), else None.
    """

    def __init__(self, step: int, tiers: Iterable[str], *, skipped: str | None = None) -> None:
        self.step = step
        self.skipped = skipped
        self._pid = os.getpid()
        self._tiers: dict[str, concurrent.futures.Future[None]] = {
            name: concurrent.futures.Future() for name in tiers
        }

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers this save goes to, nearest first."""
        return tuple(self._tiers)

    def future(self, tier: str | None = None) -> concurrent.futures.Future[None]:
        """Return the future of one tier (None: the farthest); never cancel it.

        ``remote`` names the farthest tier whatever its own name is.

        Raises
        ------
        UsageError
            There is no such tier, or the process was forked: no news of the save reaches the child.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"step {self.step} is saved by process {self._pid} and nothing of it is known in its forked "
                f"child {os.getpid()}; wait for it in the parent"
            )
        names = self.tiers
        name = names[-1] if tier in (None, "remote") else str(tier)
        if name not in self._tiers:
            raise UsageError(f"there is no tier {tier!r} here; the tiers are {', '.join(names)}")
        return self._tiers[name]

    def done(self, tier: str | None = None) -> bool:
        """Whether the save is committed in `tier` (None: the farthest). False while it failed or travels."""
        future = self.future(tier)
        return future.done() and future.exception() is None

    def until(self, tier: str | None = None, timeout_s: float | None = None) -> None:
        """Block until the save is committed in `tier` (None: the farthest).

        Raises
        ------
        DeadlineError
            `timeout_s` passed first.
        StepwellError
            Whatever made the save fail there.
        """
        try:
            self.future(tier).result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise DeadlineError(
                f"step {self.step} was not committed in tier {tier or self.tiers[-1]} within {timeout_s} s"
            ) from None

    def resolve(self, tier: str, error: BaseException | None = None) -> None:
        """Set the outcome in one tier; later outcomes are ignored. Called by the runner only."""
        future = self._tiers.get(tier)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Set `error` in every tier that has no outcome yet."""
        for tier in self.tiers:
            self.resolve(tier, error)
