"""The connections of one client, over one or several addresses of the same peer."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stepwell.errors import PermanentStoreError, TransientStoreError, UsageError
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.handshake import greet_server
from stepwell.stores.transport.server import check_exposure
from stepwell.stores.transport.settings import Identity, Limits
from stepwell.stores.transport.tls import is_lasting_fault
from stepwell.stores.transport.wire import Wire

__all__ = ["Address", "Lanes"]

Address = tuple[str, int]

_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT})
_REST_S = 2.0  # an address that failed is used again after this, or when all have failed


@dataclass(eq=False, slots=True)
class _Way:
    """One address."""

    address: Address
    idle: list[Channel] = field(default_factory=list)
    used_count: int = 0
    rests_until: float = 0.0


class Lanes:
    """A bounded number of connections to one peer, each used by one call at a time.

    Parameters
    ----------
    addresses : sequence of (host, port)
        Of one and the same peer, over different links; connections are spread over them evenly.
    identity : Identity
        Ours.
    peer_name : str or None
        Who must answer there.
    limits : Limits

    Raises
    ------
    ConfigError
        An address beyond this machine with nothing that proves who answers there.
    """

    def __init__(
        self, addresses: Sequence[Address], identity: Identity, peer_name: str | None, limits: Limits
    ) -> None:
        if not addresses:
            raise UsageError("a peer needs an address")
        for host, _ in addresses:
            check_exposure(host, identity)
        self._ways = [_Way(address) for address in addresses]
        self._identity = identity
        self._peer_name = peer_name
        self._limits = limits
        self._free: asyncio.Semaphore | None = None
        self.session: int | None = None

    @property
    def count_max(self) -> int:
        """Connections at most."""
        return self._limits.connection_count * len(self._ways)

    @property
    def where(self) -> str:
        """The addresses, for messages."""
        shown = ",".join(f"{host}:{port}" for host, port in (way.address for way in self._ways))
        return f"{self._peer_name} at {shown}" if self._peer_name else shown

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Channel]:
        """Give a connection for one exchange; after an exchange that was not finished it is ended.

        Raises
        ------
        TransientStoreError, PermanentStoreError
            None can be made.
        """
        if self._free is None:
            self._free = asyncio.Semaphore(self.count_max)
        async with self._free:
            way = self._choose()
            way.used_count += 1
            channel: Channel | None = None
            try:
                channel = self._idle_of(way) or await self._connect(way)
                channel.settled = False
                yield channel
            except TransientStoreError:
                if channel is None or not channel.settled:
                    way.rests_until = asyncio.get_running_loop().time() + _REST_S
                raise
            finally:
                way.used_count -= 1
                if channel is not None:
                    if channel.settled and channel.wire.usable:
                        way.idle.append(channel)
                    else:
                        channel.wire.abort()

    def _choose(self) -> _Way:
        """Return the way with the fewest connections in use, of those that did not just fail."""
        now = asyncio.get_running_loop().time()
        rested = [way for way in self._ways if way.rests_until <= now]
        return min(rested or self._ways, key=lambda way: (way.used_count, way.rests_until))

    def _idle_of(self, way: _Way) -> Channel | None:
        while way.idle:
            channel = way.idle.pop()
            if channel.wire.usable:
                return channel
            channel.wire.abort()
        return None

    async def _connect(self, way: _Way) -> Channel:
        where = f"{way.address[0]}:{way.address[1]}"
        try:
            async with asyncio.timeout(self._limits.connect_s):
                wire = await self._open(way.address, where)
        except TimeoutError as error:
            raise TransientStoreError(
                f"no connection to the peer {where} within {self._limits.connect_s:g} s"
            ) from error
        try:
            async with asyncio.timeout(self._limits.handshake_s):
                peer = await greet_server(wire, self._identity, self._peer_name)
        except BaseException as error:
            wire.abort()
            await wire.lost()
            if isinstance(error, TimeoutError):
                raise TransientStoreError(
                    f"{where} did not say who it is within {self._limits.handshake_s:g} s: it is stopped, or "
                    f"no stepwell peer"
                ) from error
            if isinstance(error, TransientStoreError):
                # A server that refuses a certificate says no more than this.
                certificate = "" if self._identity.tls is None else ", or it does not take our certificate"
                raise TransientStoreError(
                    f"{error}, before it said who it is: it has too much to do{certificate}"
                ) from error
            raise
        self.session = peer.session
        return Channel(wire, peer, self._limits.frame_bytes_max)

    async def _open(self, address: Address, where: str) -> Wire:
        host, port = address
        tls = None if self._identity.tls is None else self._identity.tls.client
        try:
            _, wire = await asyncio.get_running_loop().create_connection(
                lambda: Wire(where, self._limits.progress_s),
                host,
                port,
                ssl=tls,
                server_hostname=None if tls is None else self._peer_name or host,
                ssl_handshake_timeout=None if tls is None else self._limits.handshake_s,
            )
        except TimeoutError:
            raise
        except OSError as error:
            kind = PermanentStoreError if _is_lasting(error) else TransientStoreError
            raise kind(f"cannot connect to the peer {where}: {error.strerror or error}") from error
        return wire

    async def close(self) -> None:
        """End all idle connections; those in use end with their calls."""
        for way in self._ways:
            ended, way.idle = way.idle, []
            for channel in ended:
                channel.wire.abort()
            for channel in ended:
                await channel.wire.lost()


def _is_lasting(error: OSError) -> bool:
    """Say whether another try to connect would fail likewise."""
    if isinstance(error, socket.gaierror):
        return error.errno != socket.EAI_AGAIN
    return is_lasting_fault(error) or error.errno in _LASTING
