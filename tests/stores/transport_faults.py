"""Networks and peers that misbehave, for tests: a proxy, a server with the right secret and bad manners,
and a client that sends what it likes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from transport_rig import CLIENT, SERVER

from stepwell.errors import StepwellError
from stepwell.stores.transport import handshake
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.frames import Frame, Kind
from stepwell.stores.transport.handshake import answer_client, greet_server
from stepwell.stores.transport.settings import Identity
from stepwell.stores.transport.wire import Wire

TO_SERVER, TO_CLIENT = "to server", "to client"
HANDSHAKE_BYTES = 2 * handshake._MESSAGE.size  # in each direction


@dataclass
class Fault:
    """What a proxy does to the stream of one direction, at the byte `at` of it.

    Attributes
    ----------
    direction : str
    at : int
    what : str
        ``flip`` the byte's lowest bit, ``cut`` both directions before it, or ``hold`` it and all that
        follow.
    times : int
        On how many connections.
    """

    direction: str
    at: int
    what: str
    times: int = 1


class Proxy:
    """Forwards bytes between clients and one address, in a thread, with at most one fault.

    Attributes
    ----------
    address : (str, int)
    fault : Fault or None
        May be changed at any time.
    recorded : list of bytearray
        What each client sent, in order of their connections.
    passed : dict of str to int
        Bytes of the last connection in each direction.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.fault: Fault | None = None
        self.recorded: list[bytearray] = []
        self.passed = {TO_SERVER: 0, TO_CLIENT: 0}
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="proxy-of-test")
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            recorded = bytearray()
            self.recorded.append(recorded)
            self._start(self._forward, client, server, TO_SERVER, recorded)
            self._start(self._forward, server, client, TO_CLIENT, bytearray())

    def _forward(
        self, source: socket.socket, sink: socket.socket, direction: str, recorded: bytearray
    ) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                recorded += data
                fault = self.fault
                if fault is not None and fault.direction == direction and fault.times:
                    index = fault.at - passed
                    if 0 <= index < len(data):
                        fault.times -= 1
                        if fault.what == "flip":
                            data[index] ^= 1
                        else:
                            sink.sendall(data[:index])
                            if fault.what == "cut":
                                break
                            while source.recv(1 << 16):  # held: taken, and never passed on
                                pass
                            break
                passed += len(data)
                self.passed[direction] = passed
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@contextmanager
def proxy(target: tuple[str, int]) -> Iterator[Proxy]:
    """Give a proxy before `target`."""
    running = Proxy(target)
    try:
        yield running
    finally:
        running.close()


Manners = Callable[[Channel, Frame], Awaitable[None]]


@asynccontextmanager
async def rude_server(manners: Manners, identity: Identity = SERVER) -> AsyncIterator[tuple[str, int]]:
    """Give the address of a server that proves who it is, and then does `manners` for each request.

    It runs in the loop of the test, and takes any number of connections, one after the other.
    """
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    wires: list[Wire] = []

    async def serve() -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            _, wire = await loop.connect_accepted_socket(lambda: Wire("", 5.0), sock)
            wires.append(wire)
            with suppress(StepwellError):
                channel = Channel(wire, await answer_client(wire, identity, lambda: False), 1 << 30)
                while True:
                    request = await channel.receive(patient=True)
                    await channel.discard(request.payload_bytes)
                    await manners(channel, request)

    task = asyncio.ensure_future(serve())
    try:
        yield listener.getsockname()
    finally:
        task.cancel()
        await asyncio.wait({task})
        for wire in wires:
            wire.abort()
        listener.close()


def answer_to(channel: Channel, request: Frame, **fields: object) -> Frame:
    """Return a frame that answers `request` as a server does, but for `fields`."""
    right: dict[str, object] = {"operation": request.operation, "session": channel.peer.session}
    return Frame(Kind.ANSWER, **{**right, **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def raw_channel(address: tuple[str, int], identity: Identity = CLIENT) -> AsyncIterator[Channel]:
    """Give an authenticated connection on which a test sends what it likes."""
    loop = asyncio.get_running_loop()
    _, wire = await loop.create_connection(lambda: Wire("the server", 10.0), *address)
    try:
        yield Channel(wire, await greet_server(wire, identity, None), 1 << 30)
    finally:
        wire.abort()
        await wire.lost()


def request_of(channel: Channel, kind: Kind, key: str = "k", **fields: object) -> Frame:
    """Return a request with everything right, but for `fields`."""
    right: dict[str, object] = {"session": channel.peer.session, "operation": 1, "incarnation": (2, 255)}
    return Frame(kind, key, **{**right, **fields})  # type: ignore[arg-type]
