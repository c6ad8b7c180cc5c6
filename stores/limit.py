"""A bandwidth and a number of requests that object storage may take from the training."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

from stepwell.stores.base import Failure
from stepwell.stores.blobs import Blob, Blobs

__all__ = ["LimitedBlobs", "Limits"]


class Limits:
    """Admits requests: so many at one time, first come first served, and so many bytes a second.

    Parameters
    ----------
    requests_max : int
        Requests at one time.
    bytes_per_s_max : float or None
        Bytes a second on average. One request is never slowed down once it is admitted; the next
        waits until its bytes have had their time. None: no limit.
    clock : callable
        Monotonic, in seconds.
    sleep : coroutine function
    """

    def __init__(
        self,
        requests_max: int,
        bytes_per_s_max: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.requests_max = requests_max
        self.bytes_per_s_max = bytes_per_s_max
        self._clock = clock
        self._sleep = sleep
        self._mutex = threading.Lock()  # requests may come from several loops
        self._free = requests_max
        self._waiting: deque[Future[None]] = deque()
        self._paid_until = clock()

    @asynccontextmanager
    async def admitted(self, size_bytes: int = 0) -> AsyncIterator[None]:
        """Wait for a turn and for the bandwidth of `size_bytes`, then hold the turn."""
        await self._take_turn()
        try:
            await self._pay(size_bytes)
            yield
        finally:
            self._pass_turn()

    async def _take_turn(self) -> None:
        with self._mutex:
            if self._free:
                self._free -= 1
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            with self._mutex:
                given = turn not in self._waiting
                if not given:
                    self._waiting.remove(turn)
            if given:
                self._pass_turn()
            raise

    def _pass_turn(self) -> None:
        with self._mutex:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1

    async def _pay(self, size_bytes: int) -> None:
        if self.bytes_per_s_max is None or not size_bytes:
            return
        price_s = size_bytes / self.bytes_per_s_max
        with self._mutex:
            now = self._clock()
            start = max(now, self._paid_until)
            self._paid_until = start + price_s
        try:
            if start > now:
                await self._sleep(start - now)
        except asyncio.CancelledError:
            with self._mutex:
                self._paid_until -= price_s  # nothing was sent
            raise


class LimitedBlobs(Blobs):
    """Requests to object storage, within limits. What is read counts as requests, not as bandwidth."""

    def __init__(self, inner: Blobs, limits: Limits) -> None:
        self._inner = inner
        self._limits = limits

    @property
    def url(self) -> str:
        """That of the storage."""
        return self._inner.url

    @property
    def survives(self) -> Failure:
        """As the storage."""
        return self._inner.survives

    @property
    def unconditional(self) -> str | None:
        """As the storage."""
        return self._inner.unconditional

    async def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read in turn."""
        async with self._limits.admitted():
            return await self._inner.read(key, start, stop)

    async def size(self, key: str) -> int | None:
        """Ask in turn."""
        async with self._limits.admitted():
            return await self._inner.size(key)

    async def write(self, key: str, data: Blob) -> None:
        """Write in turn, when the bandwidth is there."""
        async with self._limits.admitted(data.nbytes):
            await self._inner.write(key, data)

    async def create(self, key: str, data: Blob) -> bool:
        """Create in turn, when the bandwidth is there."""
        async with self._limits.admitted(data.nbytes):
            return await self._inner.create(key, data)

    async def keeps_conditions(self, key: str) -> bool:
        """Ask in turn."""
        async with self._limits.admitted():
            return await self._inner.keeps_conditions(key)

    async def delete(self, key: str) -> None:
        """Delete in turn."""
        async with self._limits.admitted():
            await self._inner.delete(key)

    async def list(self, prefix: str) -> list[str]:
        """List in turn."""
        async with self._limits.admitted():
            return await self._inner.list(prefix)

    def close(self) -> None:
        """Close the storage."""
        self._inner.close()
