"""One budget of bytes: the only thing that holds chunks back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["ByteBudget"]


class ByteBudget:
    """Admit work by its size, first come first served.

    An item larger than the whole budget is admitted when nothing else is in flight, so it runs
    alone rather than never.

    Parameters
    ----------
    limit_bytes : int
        Bytes that may be in flight at once; at least 1.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes must be at least 1, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def admit(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold `size_bytes` of the budget while the block runs.

        Parameters
        ----------
        size_bytes : int
            Bytes the block will keep alive; at least 0.
        """
        await self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    async def acquire(self, size_bytes: int) -> None:
        """Wait until `size_bytes` fit, then take them. Whoever acquires releases."""
        if not self._waiting and self._fits(size_bytes):
            self._take(size_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size_bytes)
            else:
                self._waiting.remove((size_bytes, turn))
                self._wake()
            raise

    def release(self, size_bytes: int) -> None:
        """Give `size_bytes` back and admit who waits."""
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, "more bytes were released than acquired"
        self._wake()

    def _fits(self, size_bytes: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + size_bytes <= self.limit_bytes

    def _take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._take(size_bytes)
                turn.set_result(None)
