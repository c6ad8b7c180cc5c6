"""What a session remembers about its saves: errors to raise, bytes, times, when a base is due.

Written by the runner's thread (`RunnerEvents`) and the trainer's; one lock guards everything, and
nothing is done under it but bookkeeping.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from stepwell.errors import IntegrityError
from stepwell.pipeline.keys import Series
from stepwell.pipeline.outcome import Metrics, Restored, SaveRecord
from stepwell.pipeline.records import Link
from stepwell.pipeline.tier import OnError, Tier

__all__ = ["BaseSchedule", "Ledger", "log_limit_bytes"]

SAVES_KEPT = 10_000
BASE_RETRY_SAVES = 10  # a base that failed is tried again after so many saves


class BaseSchedule(Protocol):
    """When bases are taken."""

    @property
    def base_every(self) -> int:
        """At the latest after so many saves."""
        ...

    @property
    def log_budget(self) -> float:
        """When the log is so many times as large as its base."""
        ...


def log_limit_bytes(schedule: BaseSchedule, base_bytes: int) -> float:
    """Return how large the log may be before it asks for a base."""
    return schedule.log_budget * max(1, base_bytes)


class Ledger:
    """Bookkeeping of one session."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._saves: deque[SaveRecord] = deque(maxlen=SAVES_KEPT)
        self._by_link: dict[Link, tuple[SaveRecord, float]] = {}
        self._errors: deque[BaseException] = deque()
        self._warnings: deque[str] = deque()
        self._last_committed: dict[str, int] = {}
        self._tiers = frozenset(tiers)
        self._lost: set[str] = set()
        self._bytes_total = dict.fromkeys(tiers, 0)
        self._errors_total = dict.fromkeys(tiers, 0)
        self._unprotected = 0
        self._must_base: str | None = None
        self._base_link: Link | None = None
        self._base_bytes = 0
        self._log_bytes = 0
        self._saves_since_base = 0
        self._base_failed_at: int | None = None
        self._distrust: str | None = None
        self._distrusted = False

    # Told by the runner.

    def committed(self, series: Series, link: Link, tier: Tier, size_bytes: int) -> None:
        """A save or base is committed in a tier."""
        now = time.monotonic()
        with self._lock:
            self._bytes_total[tier.name] += size_bytes
            self._last_committed[tier.name] = max(self._last_committed.get(tier.name, -1), link.step)
            known = self._by_link.get(link)
            if known is None:
                return
            record, began = known
            if series is Series.BASE:
                record.base_bytes = size_bytes
            if series is Series.STEP or record.kind == "base only":
                record.durable_s.setdefault(tier.name, now - began)

    def failed(self, series: Series, link: Link, tier: Tier | None, error: BaseException) -> None:
        """A save or base did not arrive in a tier, or was not taken at all (tier None)."""
        with self._lock:
            if tier is not None:
                self._errors_total[tier.name] += 1
            known = self._by_link.get(link)
            alone = known is not None and known[0].kind == "base only"
            if series is Series.STEP or alone:
                self._must_base = f"step {link.step} did not arrive: {error}"
            elif tier is None and isinstance(error, IntegrityError):
                self._must_base = str(error)  # no store is at fault that needs time
            else:
                self._base_failed_at = self._saves_since_base
            if tier is None and isinstance(error, IntegrityError):
                # A torn gradient is no fault of the run: the step is not saved, and the next is a base.
                self._warnings.append(str(error))
            elif tier is None or not self._give_up(tier, error):
                self._errors.append(error)

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        """Mark a tier lost whose policy allows it, with a warning; the last one is never given up."""
        with self._lock:
            return self._give_up(tier, error)

    def _give_up(self, tier: Tier, error: BaseException) -> bool:
        if tier.name in self._lost:
            return True  # two of its saves were on their way
        if tier.on_error is not OnError.DEGRADE or not self._tiers - self._lost - {tier.name}:
            return False
        self._lost.add(tier.name)
        tier.lost = str(error)
        self._warnings.append(f"tier {tier.name} is given up, the others go on: {error}")
        return True

    def refused(self, tier: Tier, error: BaseException) -> None:
        """A tier that was given up answers and refuses this run; told once for each reason."""
        with self._lock:
            if tier.lost != str(error):
                tier.lost = str(error)
                self._warnings.append(f"tier {tier.name} stays given up: {error}")

    def not_removed(self, tier: Tier, error: BaseException) -> None:
        """A tier cannot delete: nothing is lost by it, so it goes on, and fills up."""
        with self._lock:
            self._errors_total[tier.name] += 1
            if tier.on_error is OnError.DEGRADE:
                self._warnings.append(f"tier {tier.name} keeps what it should let go: {error}")
            else:
                self._errors.append(error)

    def back(self, tier: Tier, reason: str) -> None:
        """A tier takes part again, from the next base on, which is asked for."""
        with self._lock:
            self._lost.discard(tier.name)
            self._warnings.append(f"tier {tier.name} {reason}; it takes part again from the next base on")
            self._must_base = self._must_base or f"tier {tier.name} {reason}"

    def unprotected(self, step: int) -> None:
        """A save is committed in no tier and will not be."""
        with self._lock:
            self._unprotected += 1

    def encoded(self, link: Link, size_bytes: int) -> None:
        """A differential is encoded."""
        with self._lock:
            if self._base_link is None or link > self._base_link:
                self._log_bytes += size_bytes
            known = self._by_link.get(link)
            if known is not None:
                known[0].differential_bytes = size_bytes

    # Told by the session.

    def saved(self, record: SaveRecord, link: Link, base_bytes: int) -> None:
        """A save was captured."""
        with self._lock:
            self._saves.append(record)
            self._by_link[link] = (record, time.monotonic())
            while len(self._by_link) > 2 * SAVES_KEPT:
                self._by_link.pop(next(iter(self._by_link)))
            self._saves_since_base += 1
            if record.base:
                self._must_base = self._base_failed_at = None
                self._base_link, self._base_bytes = link, base_bytes
                self._log_bytes = self._saves_since_base = 0

    def skipped(self, record: SaveRecord) -> None:
        """A save was given up for want of room."""
        with self._lock:
            self._saves.append(record)
            self._unprotected += 1

    def went_on_from(self, base_link: Link, base_bytes: int, log_bytes: int, saves: int) -> None:
        """The run goes on from a restored chain."""
        with self._lock:
            self._base_link, self._base_bytes = base_link, base_bytes
            self._log_bytes, self._saves_since_base = log_bytes, saves

    def want_base(self, reason: str) -> None:
        """The next save must have a base beside it."""
        with self._lock:
            self._must_base = self._must_base or reason

    @property
    def base_bytes(self) -> int:
        """Bytes of the last base."""
        with self._lock:
            return self._base_bytes

    def distrust(self, reason: str) -> None:
        """Gradients were found not to lead to the live state; the first reason stays."""
        with self._lock:
            self._distrust = self._distrust or reason

    def take_distrust(self) -> str | None:
        """Why gradients must not be relied on from now on; told once."""
        with self._lock:
            reason, self._distrust = self._distrust, None
            if self._distrusted:
                return None
            self._distrusted = reason is not None
            return reason

    def must_base(self) -> str | None:
        """Why the next save must have a base beside it, or None."""
        with self._lock:
            return self._must_base

    def base_is_due(self, schedule: BaseSchedule) -> bool:
        """Whether bytes or saves since the last base ask for one."""
        with self._lock:
            failed = self._base_failed_at
            if failed is not None:
                # What asked for a base still does; give the store time first.
                return self._saves_since_base >= failed + BASE_RETRY_SAVES
            return self._saves_since_base + 1 >= schedule.base_every or self._log_bytes >= log_limit_bytes(
                schedule, self._base_bytes
            )

    def base_is_overdue(self, schedule: BaseSchedule) -> bool:
        """Whether the log has grown to twice what asks for a base: more would be beyond the forecast."""
        with self._lock:
            if self._base_failed_at is not None or not self._base_bytes:
                return False
            return (
                self._saves_since_base >= 2 * schedule.base_every
                or self._log_bytes >= 2 * log_limit_bytes(schedule, self._base_bytes)
            )

    def take_error(self) -> BaseException | None:
        """Take the oldest failure that was not raised yet; later ones go along as its notes."""
        with self._lock:
            if not self._errors:
                return None
            first, *others = self._errors
            self._errors.clear()
        for other in others:
            if other is not first:
                first.add_note(f"stepwell: and after it: {other}")
        return first

    def warn(self, text: str) -> None:
        """Keep what the trainer should be warned of; from any thread."""
        with self._lock:
            self._warnings.append(text)

    def take_warnings(self) -> list[str]:
        """Take what the trainer should be warned of."""
        with self._lock:
            taken, self._warnings = list(self._warnings), deque()
            return taken

    def metrics(self, restored: Restored | None, lost: dict[str, str], forecast: dict[str, int]) -> Metrics:
        """Copy everything out."""
        with self._lock:
            return Metrics(
                saves=tuple(self._saves),
                last_committed_step=dict(self._last_committed),
                bytes_total=dict(self._bytes_total),
                errors_total=dict(self._errors_total),
                unprotected_steps=self._unprotected,
                lost_tiers=lost,
                restored=restored,
                forecast_bytes=forecast,
            )
