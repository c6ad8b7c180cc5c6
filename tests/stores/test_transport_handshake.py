from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from transport_faults import TO_SERVER, Fault, proxy
from transport_rig import CLIENT, LIMITS, SECRET, SERVER, memory_store, serving, transport_to

from stepwell.errors import ConfigError, PermanentStoreError, StoreError, TransientStoreError
from stepwell.stores.memory import MemoryStore
from stepwell.stores.transport import handshake
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.settings import Identity

OTHER = RunSecret(b"another secret, as long as the first one")
MESSAGE_BYTES = handshake._MESSAGE.size


@pytest.fixture
def far(memory_directory: Path) -> Iterator[MemoryStore]:
    with memory_store(memory_directory) as store:
        yield store


@pytest.fixture
def server(far: MemoryStore) -> Iterator[PeerServer]:
    with serving(far) as running:
        yield running


async def serves_others(server: PeerServer, far: MemoryStore) -> None:
    """Show that nothing was written, and that who belongs here is served."""
    assert [key async for key in far.list()] == []
    transport = transport_to(server)
    await transport.put("k", [b"x"])
    assert bytes(await transport.get("k")) == b"x"
    await transport.delete("k")
    await transport.close()


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (replace(CLIENT, secret=OTHER), "does not know the secret"),
        (replace(CLIENT, secret=None), "asks for the secret"),
        (replace(CLIENT, run="another"), "another run"),
    ],
)
async def test_who_does_not_belong_is_refused_and_writes_nothing(
    server: PeerServer, far: MemoryStore, identity: Identity, message: str
) -> None:
    transport = transport_to(server, identity)
    for call in (transport.put("k", [b"x"]), transport.delete("k"), transport.get("k")):
        with pytest.raises(PermanentStoreError, match=message):
            await call
    await transport.close()
    await serves_others(server, far)


async def test_a_client_that_cannot_prove_itself_is_not_let_in(server: PeerServer, far: MemoryStore) -> None:
    # Here the client does not mind that the server's proof is no proof for its secret.
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    liar = replace(CLIENT, secret=OTHER)
    hello = handshake._own(liar)
    writer.write(hello.encode())
    challenge = handshake._Message.decode(await reader.readexactly(MESSAGE_BYTES))
    writer.write(handshake._with_proof(hello, handshake._hmac(liar, b"client", hello, challenge)).encode())
    answer = handshake._Message.decode(await reader.readexactly(MESSAGE_BYTES))
    assert answer.answer is handshake.Answer.PROOF
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    await serves_others(server, far)


async def test_a_server_that_does_not_know_the_secret_is_sent_nothing(far: MemoryStore) -> None:
    for identity, message in (
        (replace(SERVER, secret=OTHER), "does not know the secret"),
        (replace(SERVER, secret=None), "no secret configured"),
    ):
        with serving(far, identity) as impostor:
            transport = transport_to(impostor)
            with pytest.raises(PermanentStoreError, match=message):
                await transport.put("k", [b"x"])
            await transport.close()
    assert [key async for key in far.list()] == []


async def test_a_server_with_another_name_is_refused(server: PeerServer) -> None:
    transport = TcpTransport(server.addresses, CLIENT, peer_name="node-7", limits=LIMITS)
    with pytest.raises(PermanentStoreError, match="is 'node-0', not 'node-7'"):
        await transport.put("k", [b"x"])
    await transport.close()


async def test_a_proof_cannot_be_reflected(server: PeerServer, far: MemoryStore) -> None:
    # The server's own messages, sent back to it as if a client had made them.
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    writer.write(handshake._own(CLIENT).encode())
    challenge = await reader.readexactly(MESSAGE_BYTES)
    writer.write(challenge)
    answer = handshake._Message.decode(await reader.readexactly(MESSAGE_BYTES))
    assert answer.answer is handshake.Answer.PROOF
    writer.close()
    await writer.wait_closed()
    await serves_others(server, far)


async def test_a_replayed_connection_is_refused(server: PeerServer, far: MemoryStore) -> None:
    with proxy(server.addresses[0]) as between:
        transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
        await transport.put("replayed", [b"x"])
        await transport.close()
        recorded = bytes(between.recorded[0])
    await far.delete("replayed")
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    writer.write(recorded)
    heard = await reader.read()
    last = handshake._Message.decode(heard[MESSAGE_BYTES : 2 * MESSAGE_BYTES])
    assert last.answer is handshake.Answer.PROOF
    assert len(heard) == 2 * MESSAGE_BYTES
    writer.close()
    await writer.wait_closed()
    await serves_others(server, far)


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n" * 40, bytes(1000), b"\xff" * 5000, b"SSH-2.0-x\r\n"],
    ids=["http", "zeros", "ones", "short"],
)
async def test_foreign_bytes_on_the_port_end_that_connection_alone(far: MemoryStore, noise: bytes) -> None:
    with serving(far, limits=replace(LIMITS, handshake_s=0.5)) as server:
        reader, writer = await asyncio.open_connection(*server.addresses[0])
        writer.write(noise)
        with suppress(ConnectionError):
            assert await reader.read() == b""  # also where it waits for more: within its deadline
        writer.close()
        await serves_others(server, far)


@pytest.mark.parametrize(
    "noise",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 40, bytes(1000)],
    ids=["http", "zeros"],
)
async def test_a_peer_that_answers_garbage_is_no_peer(noise: bytes) -> None:
    with answering(noise) as address:
        transport = TcpTransport([address], CLIENT, limits=LIMITS)
        with pytest.raises(PermanentStoreError, match="no stepwell peer"):
            await transport.put("k", [b"x"])
        await transport.close()


@contextmanager
def answering(noise: bytes) -> Iterator[tuple[str, int]]:
    """Give the address of something that is no peer, for one connection."""

    def answer() -> None:
        sock, _ = listener.accept()
        with sock, suppress(ConnectionError):
            sock.sendall(noise)
            while sock.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()
        thread.join()


async def test_a_peer_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        limits = replace(LIMITS, handshake_s=0.2, attempts_max=2)
        transport = TcpTransport([silent.getsockname()], CLIENT, limits=limits)
        with pytest.raises(TransientStoreError, match=r"did not say who it is within 0\.2 s"):
            await transport.put("k", [b"x"])
        await transport.close()


async def test_nobody_there_is_worth_another_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    transport = TcpTransport([address], CLIENT, limits=LIMITS)
    with pytest.raises(TransientStoreError, match="cannot connect"):
        await transport.put("k", [b"x"])
    await transport.close()


async def test_each_flipped_byte_of_the_handshake_is_an_error_or_made_up_for(
    server: PeerServer, far: MemoryStore
) -> None:
    with proxy(server.addresses[0]) as between:
        for at in range(0, 2 * MESSAGE_BYTES, 13):
            between.fault = Fault(TO_SERVER, at, "flip")
            transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
            try:
                await transport.put("k", [b"x"])
            except StoreError:
                assert not await far.exists("k")
            else:
                assert bytes(await far.fetch("k")) == b"x"
                await far.delete("k")
            await transport.close()
    await serves_others(server, far)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "peer.example"])
def test_beyond_this_machine_there_is_no_way_without_a_secret(far: MemoryStore, host: str) -> None:
    with pytest.raises(ConfigError, match="secret"):
        PeerServer(far, replace(SERVER, secret=None), hosts=[host])
    with pytest.raises(ConfigError, match="secret"):
        TcpTransport([(host, 1)], replace(CLIENT, secret=None))
    PeerServer(far, SERVER, hosts=[host])


async def test_on_loopback_it_works_without_a_secret(far: MemoryStore) -> None:
    with serving(far, replace(SERVER, secret=None)) as server:
        assert server.addresses[0][0] == "127.0.0.1"
        transport = transport_to(server, replace(CLIENT, secret=None))
        await transport.put("k", [b"x"])
        assert transport.session == SERVER.session
        await transport.close()


def test_a_name_has_a_length() -> None:
    for name in ("", "n" * 201):
        with pytest.raises(ConfigError, match="name of a peer"):
            Identity(run="run", name=name, session=1, secret=SECRET)
