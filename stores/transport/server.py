"""The listening side: takes connections, lets nobody in who is not of the run, and serves a store."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from stepwell.errors import ConfigError, StepwellError
from stepwell.stores.base import ObjectStore
from stepwell.stores.oserrors import store_error
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.frames import parse_incarnation
from stepwell.stores.transport.handshake import answer_client
from stepwell.stores.transport.serving import Serving
from stepwell.stores.transport.settings import Identity, Limits
from stepwell.stores.transport.shelf import Admit, Shelf
from stepwell.stores.transport.wire import Wire

__all__ = ["PeerServer", "check_exposure"]

_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1  # where the process has no descriptor left: try again when others have ended


def check_exposure(host: str, identity: Identity) -> None:
    """Refuse to speak beyond this machine with nothing that proves who is there.

    Raises
    ------
    ConfigError
        `host` is no loopback address, and there is neither a secret nor mutual TLS.
    """
    if identity.secret is not None or identity.tls is not None:
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"{host} is not this machine alone: peers there need the secret of the run (a file of mode 0600, "
            f"or STEPWELL_RUN_SECRET) or mutual TLS"
        )


@dataclass(eq=False, slots=True)
class _Guest:
    """One connection."""

    task: asyncio.Task[None]
    sock: socket.socket
    known: bool = False
    sent_away: bool = False


class PeerServer:
    """Serves one store to the peers of its run, from ``__aenter__`` to ``__aexit__``.

    Parameters
    ----------
    store : ObjectStore
        Belongs to the caller, who closes it afterwards.
    identity : Identity
    hosts : sequence of str
        Addresses to listen on; loopback unless told otherwise.
    port : int
        0 for any free one; see `addresses`.
    limits : Limits
    admit : callable, optional
        Asked before anything is reserved for an object: raises NoSpaceError if it is not taken.

    Attributes
    ----------
    refused : Counter of str
        Connections that were not served, or ended for a fault of theirs, by reason; for people.

    Raises
    ------
    ConfigError
        An address beyond this machine without anything that proves who connects.

    Notes
    -----
    Belongs to one event loop and one task. A fault of one client ends its connection alone.
    """

    def __init__(
        self,
        store: ObjectStore,
        identity: Identity,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
        limits: Limits | None = None,
        admit: Admit | None = None,
    ) -> None:
        for host in hosts:
            check_exposure(host, identity)
        self._identity = identity
        self._incarnation = parse_incarnation(identity.incarnation)
        self._hosts = tuple(hosts)
        self._port = port
        self._limits = limits or Limits()
        self._store = store
        self._admit = admit
        self._shelf: Shelf | None = None
        self._listeners: list[socket.socket] = []
        self._guests: list[_Guest] = []  # oldest first
        self._group: asyncio.TaskGroup | None = None
        self._own_tasks: list[asyncio.Task[None]] = []
        self.refused: Counter[str] = Counter()

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Where clients connect to: host and port for each of `hosts`."""
        return tuple(listener.getsockname()[:2] for listener in self._listeners)

    @property
    def client_count(self) -> int:
        """Clients that proved who they are."""
        return sum(guest.known for guest in self._guests)

    @property
    def upload_count(self) -> int:
        """Large objects on their way."""
        return 0 if self._shelf is None else len(self._shelf.uploads)

    def continue_from(self, incarnation: str) -> None:
        """Take writes from this incarnation and later ones, as if it had written last."""
        assert self._shelf is not None, "not serving"
        self._shelf.takes_from(parse_incarnation(incarnation))

    def seal_below(self, counter: int) -> None:
        """Take no writes any more from incarnations of the run with a lower counter."""
        assert self._shelf is not None, "not serving"
        self._shelf.seal_below(counter)

    # -- from start to end --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Listen, and serve from here on.

        Raises
        ------
        PermanentStoreError, TransientStoreError
            An address cannot be listened on.
        """
        self._shelf = Shelf(self._store, self._limits, self._admit)
        try:
            for host in self._hosts:
                self._listeners.append(self._listen(host))
        except BaseException:
            self._close_listeners()
            raise
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._own_tasks = [self._group.create_task(self._accept(each)) for each in self._listeners]
        self._own_tasks.append(self._group.create_task(self._tidy()))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every connection; what was published stays, what was half there is dropped."""
        assert self._group is not None
        assert self._shelf is not None
        for task in (*self._own_tasks, *(guest.task for guest in self._guests)):
            task.cancel()
        try:
            # Without the error of the caller, which the group would wrap in another one.
            await self._group.__aexit__(None, None, None)
        finally:
            self._close_listeners()
            await self._shelf.close()

    def _listen(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, self._port))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise store_error(error, "listen", where=f"{host}:{self._port}") from error
        return listener

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    async def _tidy(self) -> None:
        """Drop uploads that nobody goes on with."""
        assert self._shelf is not None
        while True:
            await asyncio.sleep(self._limits.upload_idle_s / 4)
            self._shelf.uploads.drop_idle()

    # -- connections --------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        assert self._group is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._make_way()
            guest = _Guest(self._group.create_task(self._host(sock)), sock)
            self._guests.append(guest)
            guest.task.add_done_callback(partial(self._forget, guest))

    def _forget(self, guest: _Guest, _: asyncio.Task[None]) -> None:
        self._guests.remove(guest)
        guest.sock.close()  # a task that was cancelled before its first step closed nothing

    def _make_way(self) -> None:
        """End the oldest connection that has not proved anything, where there are too many.

        Not the newest: who belongs here needs a millisecond, so whoever lingers does not.
        """
        unknown = [guest for guest in self._guests if not (guest.known or guest.sent_away)]
        for guest in unknown[: max(0, len(unknown) + 1 - self._limits.unauthenticated_count_max)]:
            self.refused["too many unknown"] += 1
            guest.sent_away = True
            guest.task.cancel()

    async def _host(self, sock: socket.socket) -> None:
        """Serve one connection to its end; nothing that its client does gets out of here."""
        wire: Wire | None = None
        try:
            async with asyncio.timeout(self._limits.handshake_s):
                wire = await self._wired(sock)
                peer = await answer_client(wire, self._identity, self._is_full)
            self._mark_known()
            assert self._shelf is not None
            channel = Channel(wire, peer, self._limits.frame_bytes_max)
            await Serving(channel, self._shelf, self._incarnation, self._identity.session).serve()
        except TimeoutError:
            self.refused["handshake too slow"] += 1
        except StepwellError as error:
            # An orderly end is one of these too: the client closed between two requests.
            self.refused[type(error).__name__] += 1
        except OSError:
            self.refused["broken"] += 1
        except Exception as error:  # a fault of ours: shown, and the other clients are served on
            self.refused["fault of ours"] += 1
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a connection of a peer ended by a fault in stepwell", "exception": error}
            )
        finally:
            if wire is not None:
                wire.abort()
                await wire.lost()

    async def _wired(self, sock: socket.socket) -> Wire:
        loop = asyncio.get_running_loop()
        tls = self._identity.tls
        _, wire = await loop.connect_accepted_socket(
            lambda: Wire("", self._limits.progress_s),
            sock,
            ssl=None if tls is None else tls.server,
            ssl_handshake_timeout=None if tls is None else self._limits.handshake_s,
        )
        return wire

    def _is_full(self) -> bool:
        return self.client_count >= self._limits.connection_count_max

    def _mark_known(self) -> None:
        task = asyncio.current_task()
        for guest in self._guests:
            if guest.task is task:
                guest.known = True
