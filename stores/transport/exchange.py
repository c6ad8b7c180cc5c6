"""Requests to a peer and their answers: one at a time on a connection, tried again, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace as replaced
from typing import TypeVar

from stepwell.errors import TransientStoreError
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.frames import Frame, FrameError, Kind, Status, parse_incarnation
from stepwell.stores.transport.lanes import Lanes
from stepwell.stores.transport.outcome import ERROR_TEXT_BYTES_MAX, GoneError, error_of
from stepwell.stores.transport.settings import Identity, Limits
from stepwell.stores.transport.sharing import Bring, Share, Worker, cut, part_for, share_out

__all__ = ["Exchange"]

T = TypeVar("T")


class Exchange:
    """What every call to one peer is made of.

    Parameters
    ----------
    lanes : Lanes
    identity : Identity
        Ours.
    limits : Limits
    """

    def __init__(self, lanes: Lanes, identity: Identity, limits: Limits) -> None:
        self.lanes = lanes
        self.limits = limits
        self._own_session = identity.session
        self._incarnation = parse_incarnation(identity.incarnation)

    def begin_life(self, incarnation: str) -> None:
        """Let the frames that follow name this incarnation."""
        self._incarnation = parse_incarnation(incarnation)

    @property
    def where(self) -> str:
        """The peer, for messages."""
        return self.lanes.where

    @asynccontextmanager
    async def asked(
        self, request: Frame, parts: Sequence[memoryview] = ()
    ) -> AsyncIterator[tuple[Channel, Frame]]:
        """Send a request and give its first answer; whoever takes the last one says ``settled``."""
        async with self.lanes.borrow() as channel:
            request = replaced(request, incarnation=self._incarnation, session=channel.peer.session)
            await channel.send_parts(request, parts)
            yield channel, await self.answer(channel, request)

    async def answer(self, channel: Channel, request: Frame) -> Frame:
        """Return the next answer that is no ``WORKING``, or raise what it says."""
        while True:
            answer = await channel.receive()
            if answer.kind is not Kind.ANSWER or answer.operation != request.operation:
                raise FrameError(f"the peer {self.where} answers something that was not asked")
            if answer.session != self._own_session:
                raise FrameError(f"the peer {self.where} answers another client")
            if answer.status is Status.OK:
                return answer
            if answer.status is not Status.WORKING:
                if answer.length > ERROR_TEXT_BYTES_MAX:
                    raise FrameError(f"the peer {self.where} sends an error of {answer.length} bytes")
                text = await channel.text(answer.length)
                channel.settled = True
                raise error_of(answer.status, text, self.where)

    async def told(self, request: Frame, parts: Sequence[memoryview] = ()) -> None:
        """Make a request that is answered by a status alone."""
        async with self.asked(request, parts) as (channel, answer):
            if answer.length:
                raise FrameError(f"the peer {self.where} sends {answer.length} bytes that nobody asked for")
            channel.settled = True

    async def retried(self, what: Callable[[], Awaitable[T]], *, also_gone: bool = False) -> T:
        """Try until it works, at most as often as allowed, while the error may pass."""
        for attempt in range(self.limits.attempts_max):
            try:
                return await what()
            except TransientStoreError as error:
                last = attempt == self.limits.attempts_max - 1
                if last or (isinstance(error, GoneError) and not also_gone):
                    raise
            await asyncio.sleep(self.limits.backoff_s * 2**attempt)
        raise AssertionError("unreachable")

    async def within(self, size_bytes: int, what: str, work: Awaitable[T]) -> T:
        """Await `work`, at most as long as a call that moves so many bytes may take."""
        deadline_s = self.limits.call_deadline_s(size_bytes)
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except TimeoutError as error:
            raise TransientStoreError(
                f"{what} at the peer {self.where} did not end within {deadline_s:.3g} s"
            ) from error

    async def call(self, size_bytes: int, what: str, request: Callable[[], Awaitable[T]]) -> T:
        """Do `request` until it works, within the deadline of `size_bytes`."""
        return await self.within(size_bytes, what, self.retried(request))

    def cut(self, start: int, end: int) -> list[Share]:
        """Cut a range into parts for all connections."""
        size_bytes = end - start
        return cut(start, end, part_for(size_bytes, self.lanes.count_max, self.limits.part_bytes))

    async def share_out(self, shares: Sequence[Share], bring: Bring) -> None:
        """Let all connections bring `shares`; see ``sharing``."""
        await share_out(
            shares,
            [Worker(bring)] * min(self.lanes.count_max, len(shares)),
            attempts_max=self.limits.attempts_max,
            backoff_s=self.limits.backoff_s,
            slow_s=self.limits.slow_s,
        )
