"""One object, or a range of it, from a peer into memory of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from stepwell.errors import PermanentStoreError, TransientStoreError
from stepwell.stores.transport.base import Place, Stat
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.exchange import Exchange
from stepwell.stores.transport.frames import WHOLE, Flag, Frame, FrameError, Kind, fresh_operation
from stepwell.stores.transport.outcome import GoneError
from stepwell.stores.transport.sharing import Share

__all__ = ["Fetching", "fresh_memory"]


def fresh_memory(size_bytes: int) -> memoryview:
    """Return memory of its own."""
    return np.empty(size_bytes, np.uint8).data


class Fetching:
    """One ``Transport.get``.

    The first part tells how large the object is and which generation; the rest then comes over all
    connections at once, of that generation and no other. A slow connection is overtaken from there on;
    the first part waits for its own as long as bytes move, or the deadline for progress.
    """

    def __init__(
        self,
        exchange: Exchange,
        key: str,
        start: int,
        length: int | None,
        place: Place,
        expected: Stat | None,
    ) -> None:
        self._exchange = exchange
        self._key = key
        self._start = start
        self._length = length
        self._place = place
        self._expected = expected
        self._first_bytes = exchange.limits.inline_bytes
        self._memory: memoryview | None = None
        self._extend: Callable[[int], None] = lambda size_bytes: None

    async def run(self) -> memoryview:
        """Fetch everything, within the deadline that its size allows."""
        loop = asyncio.get_running_loop()
        deadline_s = self._exchange.limits.call_deadline_s
        began_at = loop.time()
        try:
            async with asyncio.timeout(deadline_s(self._length or 0)) as timeout:
                # How much it is only the peer knows.
                self._extend = lambda size_bytes: timeout.reschedule(began_at + deadline_s(size_bytes))
                return await self._exchange.retried(self._once, also_gone=self._expected is None)
        except TimeoutError as error:
            raise TransientStoreError(
                f"get {self._key!r} from the peer {self._exchange.where} did not end within "
                f"{loop.time() - began_at:.3g} s"
            ) from error

    async def _once(self) -> memoryview:
        length = WHOLE if self._length is None else self._length
        generation = self._expected.generation if self._expected is not None else 0
        request = Frame(
            Kind.GET,
            self._key,
            fresh_operation(),
            offset=self._start,
            length=length,
            total=self._first_bytes,
            generation=generation,
            flags=Flag.FIRST_PART,
        )
        # Next time, if there is one, in as few pieces as can be: somebody may be replacing the object.
        self._first_bytes = self._exchange.limits.part_bytes
        async with self._exchange.asked(request) as (channel, answer):
            memory, generation = self._room_for(answer), answer.generation
            landed = await self._land_all(channel, request, answer, memory)
        if landed < memory.nbytes:
            if not generation:
                raise self._unasked(f"{landed} of {memory.nbytes} bytes")
            await self._fetch_rest(memory, landed, generation)
        return memory.toreadonly()

    def _room_for(self, answer: Frame) -> memoryview:
        """Return memory for what was asked for, now that the size of the object is known."""
        if self._expected is not None and answer.total != self._expected.size_bytes:
            raise GoneError(f"{self._key!r} at the peer {self._exchange.where} is another object by now")
        end = answer.total if self._length is None else self._start + self._length
        size_bytes = end - self._start
        if size_bytes < 0 or end > answer.total:
            raise self._unasked(f"a part of an object of {answer.total} bytes")
        self._extend(size_bytes)
        if self._memory is None or self._memory.nbytes != size_bytes:
            self._memory = self._place(size_bytes)
            if self._memory.nbytes != size_bytes:
                raise PermanentStoreError(f"the place for {size_bytes} bytes has {self._memory.nbytes}")
        return self._memory

    async def _land_all(self, channel: Channel, request: Frame, answer: Frame, memory: memoryview) -> int:
        """Let the answers to one request land one behind the other; return how many bytes they had."""
        at = 0
        while True:
            fits = answer.offset == request.offset + at and at + answer.length <= memory.nbytes
            if not fits or not (answer.length or answer.flags & Flag.LAST):
                raise self._unasked(f"{answer.length} bytes for {answer.offset}")
            await channel.land(memory[at : at + answer.length])
            at += answer.length
            if answer.flags & Flag.LAST:
                channel.settled = True
                return at
            answer = await self._exchange.answer(channel, request)

    async def _fetch_rest(self, memory: memoryview, landed: int, generation: int) -> None:
        async def fetch(share: Share, again: bool) -> Callable[[], None] | None:
            target = memory[share.start - self._start :][: share.length]
            # Two at the same share do not share the memory: one of them may bring damaged bytes.
            landing = fresh_memory(share.length) if again else target
            request = Frame(
                Kind.GET,
                self._key,
                fresh_operation(),
                offset=share.start,
                length=share.length,
                generation=generation,
            )
            async with self._exchange.asked(request) as (channel, answer):
                got = await self._land_all(channel, request, answer, landing)
            if got != share.length:
                raise self._unasked(f"{got} of {share.length} bytes")
            return (lambda: np.copyto(np.asarray(target), np.asarray(landing))) if again else None

        end = self._start + memory.nbytes
        await self._exchange.share_out(self._exchange.cut(self._start + landed, end), fetch)

    def _unasked(self, what: str) -> FrameError:
        return FrameError(
            f"the peer {self._exchange.where} sends {what}, which is not what was asked of {self._key!r}"
        )
