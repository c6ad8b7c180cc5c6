"""The default transport: TCP, our own frames, several connections at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from functools import partial

import xxhash

from stepwell.errors import PermanentStoreError, StepwellError
from stepwell.stores.base import BytesLike
from stepwell.stores.keys import check_key
from stepwell.stores.parts import flat_views
from stepwell.stores.transport.base import Place, Stat, Transport
from stepwell.stores.transport.exchange import Exchange
from stepwell.stores.transport.fetching import Fetching, fresh_memory
from stepwell.stores.transport.frames import Flag, Frame, FrameError, Kind, fresh_operation
from stepwell.stores.transport.lanes import Address, Lanes
from stepwell.stores.transport.outcome import ERROR_TEXT_BYTES_MAX
from stepwell.stores.transport.settings import Identity, Limits
from stepwell.stores.transport.sharing import Share

__all__ = ["TcpTransport"]

_SEPARATE_COUNT_MAX = 16  # so many small pieces are sent one by one; more are joined first
_ABORT_S = 1.0  # for telling a peer that an object will not come; it finds out by itself later


class TcpTransport(Transport):
    """Objects to and from one peer over TCP.

    Parameters
    ----------
    addresses : sequence of (host, port)
        Of the peer; more than one where several links lead to it.
    identity : Identity
        Ours.
    peer_name : str, optional
        Who must answer; anybody of the run if not given.
    limits : Limits, optional

    Raises
    ------
    ConfigError
        An address beyond this machine with nothing that proves who answers there.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        identity: Identity,
        *,
        peer_name: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._lanes = Lanes(addresses, identity, peer_name, self._limits)
        self._exchange = Exchange(self._lanes, identity, self._limits)

    @property
    def where(self) -> str:
        """Name and addresses of the peer."""
        return self._lanes.where

    @property
    def session(self) -> int | None:
        """Which life of the peer answered last."""
        return self._lanes.session

    def begin_life(self, incarnation: str) -> None:
        """Send what follows as this incarnation of the run."""
        self._exchange.begin_life(incarnation)

    async def close(self) -> None:
        """End all idle connections."""
        await self._lanes.close()

    # -- writing ------------------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike], *, replace: bool = True) -> None:
        """Store an object: in one frame where it is small, else cut over all connections."""
        check_key(key)
        views, size_bytes = flat_views(key, parts)
        flags = Flag.NONE if replace else Flag.CREATE
        if size_bytes <= self._limits.inline_bytes:
            request = Frame(
                Kind.PUT, key, fresh_operation(), length=size_bytes, total=size_bytes, flags=flags
            )
            await self._exchange.call(size_bytes, f"put {key!r}", lambda: self._exchange.told(request, views))
            return
        work = self._exchange.retried(lambda: self._put_large(key, views, size_bytes, flags), also_gone=True)
        await self._exchange.within(size_bytes, f"put {key!r}", work)

    async def _put_large(self, key: str, views: Sequence[memoryview], size_bytes: int, flags: Flag) -> None:
        upload = Frame(Kind.BEGIN, key, fresh_operation(), total=size_bytes, flags=flags)
        await self._exchange.retried(lambda: self._exchange.told(upload))
        try:
            await self._send_shares(upload, views, self._exchange.cut(0, size_bytes))
            await self._exchange.retried(lambda: self._exchange.told(replaced(upload, kind=Kind.COMMIT)))
        except StepwellError:
            with suppress(StepwellError, TimeoutError):
                async with asyncio.timeout(_ABORT_S):
                    await self._exchange.told(replaced(upload, kind=Kind.ABORT))
            raise

    async def _send_shares(self, upload: Frame, views: Sequence[memoryview], shares: list[Share]) -> None:
        base = shares[0].start if shares else 0

        async def send(share: Share, _: bool) -> None:
            request = replaced(
                upload, kind=Kind.PART, offset=share.start, length=share.length, flags=Flag.NONE
            )
            await self._exchange.told(request, _pieces(views, share.start - base, share.length))

        await self._exchange.share_out(shares, send)

    async def put_share(self, key: str, size_bytes: int, share: str, start: int, part: BytesLike) -> None:
        """Bring a part of an object that several senders bring together."""
        check_key(key)
        views, part_bytes = flat_views(key, [part])
        if start < 0 or start + part_bytes > size_bytes:
            raise PermanentStoreError(
                f"bytes {start} to {start + part_bytes} do not belong to the {size_bytes} of {key!r}"
            )
        upload = Frame(Kind.BEGIN, key, _operation_of(key, share), total=size_bytes)

        async def bring() -> None:
            await self._exchange.retried(lambda: self._exchange.told(upload))
            await self._send_shares(upload, views, self._exchange.cut(start, start + part_bytes))

        await self._exchange.within(part_bytes, f"put a share of {key!r}", bring())

    async def finish_shares(self, key: str, size_bytes: int, share: str, *, replace: bool = True) -> None:
        """Publish what several senders brought."""
        check_key(key)
        flags = Flag.NONE if replace else Flag.CREATE
        request = Frame(Kind.COMMIT, key, _operation_of(key, share), total=size_bytes, flags=flags)
        await self._exchange.call(0, f"publish {key!r}", partial(self._exchange.told, request))

    async def delete(self, key: str) -> None:
        """Remove an object."""
        request = Frame(Kind.DELETE, check_key(key), fresh_operation())
        await self._exchange.call(0, f"delete {key!r}", partial(self._exchange.told, request))

    async def delete_below(self, prefix: str) -> None:
        """Remove every object below a directory."""
        request = Frame(Kind.DELETE_BELOW, prefix, fresh_operation())
        await self._exchange.call(
            0, f"delete everything below {prefix!r}", lambda: self._exchange.told(request)
        )

    # -- reading ------------------------------------------------------------------------------

    async def get(
        self,
        key: str,
        start: int = 0,
        length: int | None = None,
        *,
        place: Place | None = None,
        expected: Stat | None = None,
    ) -> memoryview:
        """Fetch a range: the first part tells how much there is, the rest comes over all connections."""
        check_key(key)
        fetching = Fetching(self._exchange, key, start, length, place or fresh_memory, expected)
        return await fetching.run()

    async def stat(self, key: str, *, digest: bool = False) -> Stat:
        """Ask for length and generation, and for a digest of the contents."""
        flags = Flag.DIGEST if digest else Flag.NONE
        request = Frame(Kind.STAT, check_key(key), fresh_operation(), flags=flags)

        async def ask() -> Stat:
            async with self._exchange.asked(request) as (channel, answer):
                if answer.length > ERROR_TEXT_BYTES_MAX:
                    raise FrameError(f"the peer {self.where} sends a digest of {answer.length} bytes")
                found = bytearray(answer.length)
                await channel.land(memoryview(found))
                channel.settled = True
                return Stat(answer.total, answer.generation, bytes(found))

        return await self._exchange.call(0, f"stat {key!r}", ask)

    async def list(self, prefix: str, *, direct: bool = False) -> Sequence[str]:
        """Return keys or names, page by page."""
        names: list[str] = []

        async def ask() -> bool:
            after = names[-1].encode() if names else b""
            flags = Flag.DIRECT if direct else Flag.NONE
            request = Frame(Kind.LIST, prefix, fresh_operation(), length=len(after), flags=flags)
            async with self._exchange.asked(request, [memoryview(after)] if after else []) as (
                channel,
                answer,
            ):
                page = await channel.text(answer.length)
                channel.settled = True
                names.extend(page.split("\n") if page else [])
                return bool(answer.flags & Flag.LAST) or not page

        while not await self._exchange.call(0, f"list {prefix!r}", ask):
            pass
        return names


def _operation_of(key: str, share: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{key}\0{share}".encode()) >> 1 | 1


def _pieces(views: Sequence[memoryview], start: int, length: int) -> list[memoryview]:
    """Return the parts of `views`, taken together, that make up a range."""
    pieces: list[memoryview] = []
    for view in views:
        piece = view[start : start + length] if start < view.nbytes else view[:0]
        if piece.nbytes:
            pieces.append(piece)
            length -= piece.nbytes
        start = max(0, start - view.nbytes)
        if not length:
            break
    return pieces
