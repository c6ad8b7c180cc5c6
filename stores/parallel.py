"""One object to several peers, and from several peers at once (FastCheck's parallel transmission).

A peer that fails or is slow costs no more than its share: another one does the work. Where FastCheck
fixes who sends which shard beforehand, here whoever is free takes the next range, so that links of
different speed all stay busy to the end.

Several senders can also bring one object to one peer, each a share: ``PeerStore.put_share``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

import numpy as np
import xxhash

from stepwell.errors import IntegrityError, StepwellError, StoreError, TransientStoreError, UsageError
from stepwell.stores.base import BytesLike
from stepwell.stores.parts import flat_views
from stepwell.stores.peer import PeerStore
from stepwell.stores.threads import Workers
from stepwell.stores.transport.base import Place, Stat
from stepwell.stores.transport.fetching import fresh_memory
from stepwell.stores.transport.outcome import GoneError
from stepwell.stores.transport.sharing import Settle, Share, Worker, cut, part_for, share_out

__all__ = ["copy_to", "fetch_from"]

_PART_BYTES_MAX = 8 << 20
_ROUNDS = 16  # ranges for each way of each peer: the last one costs a sixteenth at most
_PER_PEER = 2  # ranges asked of one peer at a time: one travels while the next is asked for
_ATTEMPTS_MAX = 2  # on top of the transport's own: here another peer is the better answer
_BACKOFF_S = 0.05
_DIGEST_SLICE_BYTES = 64 << 20


async def copy_to(
    peers: Sequence[PeerStore],
    key: str,
    parts: Sequence[BytesLike],
    *,
    copies: int,
    slow_s: float = 2.0,
) -> tuple[PeerStore, ...]:
    """Store an object with so many of `peers`, and return those that have it, in the same order.

    Parameters
    ----------
    peers : sequence of PeerStore
        In order of preference: the first `copies` are asked first, each further one in place of one
        that failed, or beside those at work when none has answered for `slow_s`.
    key : str
    parts : sequence of bytes-like
        Unchanged until this returns.
    copies : int
    slow_s : float

    Raises
    ------
    StoreError
        Fewer peers took it; says how many and why. What was stored stays.
    """
    if not 1 <= copies <= len(peers):
        raise UsageError(f"{copies} copies cannot be kept by {len(peers)} peers")
    flat_views(key, parts)
    holders: list[PeerStore] = []
    failed: list[StoreError] = []
    spare = list(peers)
    running: dict[asyncio.Task[StoreError | None], PeerStore] = {}
    async with asyncio.TaskGroup() as group:

        def start() -> None:
            peer = spare.pop(0)
            running[group.create_task(_fault(peer.put(key, parts)))] = peer

        while len(holders) < copies:
            while len(holders) + len(running) < copies and spare:
                start()
            if not running:
                break
            done, _ = await asyncio.wait(
                running, timeout=slow_s if spare else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                start()
            for task in done:
                peer, fault = running.pop(task), task.result()
                if fault is None:
                    holders.append(peer)
                else:
                    failed.append(fault)
        for task in running:
            task.cancel()
    if len(holders) < copies:
        raise _all_failed(f"{key!r} has {len(holders)} copies of {copies}", failed) from failed[-1]
    return tuple(peer for peer in peers if any(peer is holder for holder in holders))


async def _fault(work: Awaitable[object]) -> StoreError | None:
    """Await `work`, and return what it failed with: one of several must not end the others."""
    try:
        await work
    except StoreError as error:
        return error
    return None


def _all_failed(what: str, errors: Sequence[StoreError]) -> StoreError:
    """Return an error of the kind of the last, which is worth another try if one of them is."""
    kind = next((type(each) for each in errors if isinstance(each, TransientStoreError)), type(errors[-1]))
    return kind(f"{what}: " + "; ".join(str(each) for each in errors))


async def fetch_from(
    peers: Sequence[PeerStore],
    key: str,
    *,
    place: Place | None = None,
    digest: bytes | None = None,
    slow_s: float = 2.0,
    deadline_s: float = 600.0,
) -> memoryview:
    """Fetch an object from all of `peers` that have it, at once.

    Parameters
    ----------
    peers : sequence of PeerStore
    key : str
    place : callable, optional
        Gives the memory; it is the caller's again when this ends.
    digest : bytes, optional
        xxh3-128 of what is wanted; peers with anything else under this key are left alone. If not
        given, those count that have the same as the peer that answers first.
    slow_s : float
        A range that takes longer is also asked of another peer.
    deadline_s : float

    Raises
    ------
    MissingObjectError
        No peer has it.
    TransientStoreError
        It was not there within the deadline, or the peers that have it went away.
    IntegrityError
        What came is not what the peers said they have.
    """
    if not peers:
        raise UsageError(f"{key!r} cannot be fetched from no peer")
    try:
        async with asyncio.timeout(deadline_s):
            return await _Fetch(peers, key, digest).run(place or fresh_memory, slow_s)
    except TimeoutError as error:
        raise TransientStoreError(
            f"{key!r} did not come from {len(peers)} peers in {deadline_s:g} s"
        ) from error


class _Fetch:
    """One ``fetch_from``."""

    def __init__(self, peers: Sequence[PeerStore], key: str, digest: bytes | None) -> None:
        self._peers = peers
        self._key = key
        self._digest = digest

    async def run(self, place: Place, slow_s: float) -> memoryview:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(peer)) for peer in self._peers]
            try:
                memory, wanted = await self._gather(asked, place, slow_s)
                fault: Exception | None = None
            except Exception as error:  # raised below: a group would wrap it
                fault = error
            for task in asked:
                task.cancel()
        if fault is not None:
            raise fault
        await self._check(memory, wanted)
        return memory.toreadonly()

    async def _gather(
        self,
        asked: Sequence[asyncio.Task[Stat | StepwellError]],
        place: Place,
        slow_s: float,
    ) -> tuple[memoryview, Stat]:
        """Begin with the peer that answers first; the others join as they answer."""
        wanted = await self._first(asked)
        size_bytes = wanted.size_bytes
        memory = place(size_bytes)
        workers = [
            Worker(partial(self._bring, peer, memory, answer), partial(self._same, peer, answer, wanted))
            for peer, answer in zip(self._peers, asked, strict=True)
            for _ in range(_PER_PEER)
        ]
        await share_out(
            cut(0, size_bytes, part_for(size_bytes, len(workers), _PART_BYTES_MAX, rounds=_ROUNDS)),
            workers,
            attempts_max=_ATTEMPTS_MAX,
            backoff_s=_BACKOFF_S,
            slow_s=slow_s,
        )
        return memory, wanted

    async def _ask(self, peer: PeerStore) -> Stat | StepwellError:
        try:
            return await peer.stat(self._key, digest=True)
        except StepwellError as error:
            return error

    async def _first(self, asked: Sequence[asyncio.Task[Stat | StepwellError]]) -> Stat:
        """Return the first answer that says the object is there."""
        errors: list[StoreError] = []
        for answer in asyncio.as_completed(asked):
            found = await answer
            if isinstance(found, Stat):
                if self._digest in (None, found.digest):
                    return found
                found = GoneError(f"a peer has another object under {self._key!r}")
            errors.append(found if isinstance(found, StoreError) else TransientStoreError(str(found)))
        raise _all_failed(f"no peer has {self._key!r}", errors) from errors[-1]

    async def _same(self, peer: PeerStore, answer: asyncio.Task[Stat | StepwellError], wanted: Stat) -> None:
        """Let a peer take part only if it has the very same object."""
        await asyncio.wait({answer})
        found = answer.result()
        if isinstance(found, StepwellError):
            raise found
        if (found.size_bytes, found.digest) != (wanted.size_bytes, wanted.digest):
            raise GoneError(f"{peer.url} has another object under {self._key!r}")

    async def _bring(
        self,
        peer: PeerStore,
        memory: memoryview,
        answer: asyncio.Task[Stat | StepwellError],
        share: Share,
        again: bool,
    ) -> Settle | None:
        stat = answer.result()
        assert isinstance(stat, Stat)
        target = memory[share.start : share.start + share.length]
        # Two at the same share do not share the memory: one of them may bring damaged bytes.
        landing = fresh_memory(share.length) if again else target
        await peer.fetch_into(self._key, share.start, share.length, place=lambda _: landing, expected=stat)
        return (lambda: np.copyto(np.asarray(target), np.asarray(landing))) if again else None

    async def _check(self, memory: memoryview, wanted: Stat) -> None:
        """Compare the whole with what the peers said: ranges of different peers make one object."""
        workers = Workers("stepwell-parallel", 1)
        try:
            found = await workers.run(lambda: _digest(memory))
        finally:
            workers.close()
        if found != wanted.digest:
            raise IntegrityError(f"{self._key!r} came from peers that said it is another object than it is")


def _digest(memory: memoryview) -> bytes:
    hasher = xxhash.xxh3_128()
    for start in range(0, memory.nbytes, _DIGEST_SLICE_BYTES):
        hasher.update(memory[start : start + _DIGEST_SLICE_BYTES])
    return hasher.digest()
