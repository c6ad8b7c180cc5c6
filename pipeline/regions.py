"""Memory for captures: regions of the arena, or anonymous memory where there is no memory tier."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

from stepwell.errors import DeadlineError
from stepwell.pipeline.slots import Region
from stepwell.stores.arena import Arena
from stepwell.stores.region import Region as ArenaRegion

__all__ = ["AnonymousRegion", "BaseRegions", "Regions"]


class AnonymousRegion:
    """Memory of this process alone; gone with it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._mapping = mmap.mmap(-1, size_bytes)
        self.payload = memoryview(self._mapping)


class Regions:
    """Reserves and recycles regions, from an arena if there is one.

    Parameters
    ----------
    arena : Arena or None
    """

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self._free: list[AnonymousRegion] = []
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> Region:
        """Return a region of at least `size_bytes`; used memory first: fresh pages are slow.

        Raises
        ------
        NoSpaceError
            The arena is full.
        """
        if self.arena is not None:
            return self.arena.reserve(size_bytes)
        with self._lock:
            for region in self._free:
                if size_bytes <= region.size_bytes <= 2 * max(size_bytes, mmap.PAGESIZE):
                    self._free.remove(region)
                    return region
        return AnonymousRegion(max(size_bytes, mmap.PAGESIZE))

    def recycle(self, region: Region) -> None:
        """Take a region back."""
        if isinstance(region, ArenaRegion):
            assert self.arena is not None
            self.arena.recycle(region)
        elif isinstance(region, AnonymousRegion):
            with self._lock:
                self._free.append(region)


class BaseRegions:
    """Base regions, one of them made ready in advance, so that the trainer never waits for fresh pages.

    One base is in flight at a time: `take` waits until the one before was handed back by `done`.

    Parameters
    ----------
    regions : Regions
    stall_limit_s : float
        How long `take` may wait for a base in flight.
    background : callable
        Runs a function in a thread of its own.
    """

    def __init__(
        self, regions: Regions, stall_limit_s: float, background: Callable[[Callable[[], None]], object]
    ) -> None:
        self._regions = regions
        self._stall_limit_s = stall_limit_s
        self._background = background
        self._condition = threading.Condition()
        self._busy = False
        self._refilling = False
        self._spare: Region | None = None
        self._current: Region | None = None
        self._closed = False
        self.waited_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a base is in flight."""
        return self._busy

    def outwait(self) -> bool:
        """Wait until no base is in flight, as long as the stall limit allows; say whether that is so."""
        began = time.monotonic()
        with self._condition:
            free = self._condition.wait_for(lambda: not self._busy, self._stall_limit_s)
            self.waited_s += time.monotonic() - began
        return free

    def take(self, size_bytes: int) -> Region:
        """Return the region for the next base.

        Raises
        ------
        DeadlineError
            The base before is still in flight after the stall limit.
        NoSpaceError
            There is no room for a region.
        """
        began = time.monotonic()
        with self._condition:
            free = self._condition.wait_for(
                lambda: not self._busy and not self._refilling, self._stall_limit_s
            )
            self.waited_s += time.monotonic() - began
            if not free:
                raise DeadlineError(
                    f"the base before is still on its way after {self._stall_limit_s} s: no second one begins"
                )
            self._busy = True
            spare, self._spare = self._spare, None
        try:
            if spare is not None and spare.size_bytes < size_bytes:
                self._regions.recycle(spare)
                spare = None
            self._current = spare or self._regions.reserve(size_bytes)
            return self._current
        except BaseException:
            with self._condition:
                self._busy = False
            raise

    def recycle(self, region: Region) -> None:
        """Take back any region, also one that no base came of."""
        with self._condition:
            if region is self._current:
                self._current, self._busy = None, False
                self._condition.notify_all()
        self._regions.recycle(region)

    def done(self, size_bytes: int) -> None:
        """Tell that no base is in flight any more, and make a region ready for the next."""
        with self._condition:
            self._current, self._busy = None, False
            refill = self._spare is None and not self._closed
            self._refilling = refill
            self._condition.notify_all()
        if refill:
            self._background(lambda: self._refill(size_bytes))

    def close(self) -> None:
        """Give the spare region back."""
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: not self._refilling, self._stall_limit_s)
            spare, self._spare = self._spare, None
        if spare is not None:
            self._regions.recycle(spare)

    def _refill(self, size_bytes: int) -> None:
        region: Region | None = None
        try:
            region = self._regions.reserve(size_bytes)
        except Exception:
            # No room now is no fault yet: `take` tries again and then says so.
            region = None
        finally:
            with self._condition:
                self._refilling = False
                unwanted = region if self._closed else None
                if not self._closed:
                    self._spare = region
                self._condition.notify_all()
        if unwanted is not None:
            self._regions.recycle(unwanted)
