"""Deadlines and further tries for requests to object storage.

What may pass (503, a reset, no answer in time) is tried again with a doubled pause, until a stated time
has gone by; what will not (403, 404) never is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stepwell.errors import TransientStoreError
from stepwell.stores.base import Failure
from stepwell.stores.blobs import Blob, Blobs

__all__ = ["BYTES_PER_S_MIN", "RetriedBlobs"]

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.05
PAUSE_S_MAX = 5.0

BYTES_PER_S_MIN = 1 << 20
"""A request whose bytes travel more slowly than this has failed. A tenth of what one stream of a loaded
data center network still moves; with 5 GiB it comes to 85 minutes."""


class RetriedBlobs(Blobs):
    """Requests that end: each try has a deadline, all tries of a request together have one more.

    Parameters
    ----------
    inner : Blobs
    timeout_s : float
        Deadline of one try, and one second more for each MiB that it moves.
    retry_for_s : float
        How long after the first try another one may begin.
    clock, sleep, uniform : callable
        A monotonic clock, how pauses are waited for, and their jitter.
    """

    def __init__(
        self,
        inner: Blobs,
        timeout_s: float,
        retry_for_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform

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
        """Read; where nobody said how much it is, the size is asked for once a try took too long."""
        moved_bytes = 0 if stop is None else max(0, stop - start)

        async def read() -> bytes | None:
            nonlocal moved_bytes
            try:
                return await self._inner.read(key, start, stop)
            except asyncio.CancelledError:
                # Most likely the deadline; the next try is given the time that the object needs.
                moved_bytes = moved_bytes or -1
                raise

        async def sized_read() -> bytes | None:
            nonlocal moved_bytes
            if moved_bytes == -1:
                size_bytes = await self._inner.size(key)
                moved_bytes = max(1, (size_bytes or 0) - start)
            return await read()

        return await self._tried(f"read {key!r}", sized_read, lambda: max(0, moved_bytes))

    async def size(self, key: str) -> int | None:
        """Ask for a size, until there is an answer."""
        return await self._tried(f"ask for the size of {key!r}", lambda: self._inner.size(key))

    async def write(self, key: str, data: Blob) -> None:
        """Write, until that is acknowledged."""
        await self._tried(f"put {key!r}", lambda: self._inner.write(key, data), lambda: data.nbytes)

    async def create(self, key: str, data: Blob) -> bool:
        """Create, until there is an answer.

        After a try without an answer the object may be there already: if it has these very bytes, it
        is taken as ours. So what must tell two writers apart has to differ between them.
        """
        tries = 0

        async def create() -> bool:
            nonlocal tries
            tries += 1
            if await self._inner.create(key, data):
                return True
            return tries > 1 and await self._inner.read(key) == data.tobytes()

        return await self._tried(f"create {key!r}", create, lambda: data.nbytes)

    async def keeps_conditions(self, key: str) -> bool:
        """Ask, until there is an answer."""
        return await self._tried(f"create {key!r}", lambda: self._inner.keeps_conditions(key))

    async def delete(self, key: str) -> None:
        """Delete, until that is acknowledged."""
        await self._tried(f"delete {key!r}", lambda: self._inner.delete(key))

    async def list(self, prefix: str) -> list[str]:
        """List, until there is an answer."""
        return await self._tried(f"list {prefix!r}", lambda: self._inner.list(prefix))

    def close(self) -> None:
        """Close the storage."""
        self._inner.close()

    async def _tried(
        self,
        what: str,
        request: Callable[[], Awaitable[Result]],
        moved_bytes: Callable[[], int] = lambda: 0,
    ) -> Result:
        until = self._clock() + self._retry_for_s
        tries = 0
        while True:
            limit_s = self._timeout_s + moved_bytes() / BYTES_PER_S_MIN
            failure: TransientStoreError
            try:
                async with asyncio.timeout(limit_s):
                    return await request()
            except TimeoutError:
                failure = TransientStoreError(
                    f"cannot {what} in {self.url}: no answer within {limit_s:.0f} s"
                )
            except TransientStoreError as error:
                failure = error
            tries += 1
            pause_s = min(PAUSE_S_MAX, FIRST_PAUSE_S * 2 ** (tries - 1))
            # Jitter, so that many ranks do not come back to a recovering service at one moment.
            pause_s *= self._uniform(0.5, 1.0)
            if self._clock() + pause_s > until:
                raise TransientStoreError(f"{failure} (tried {tries} times)") from failure
            await self._sleep(pause_s)
