from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from transport_faults import raw_channel, request_of
from transport_rig import CLIENT, LIMITS, SERVER, memory_store, serving, transport_to

from stepwell.errors import (
    NoSpaceError,
    ObjectExistsError,
    PermanentStoreError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from stepwell.stores.arena import Arena
from stepwell.stores.fault import Fault, FaultKind, FaultStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.testing import BAD_KEYS
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.frames import Flag, Frame, Kind, Status
from stepwell.stores.transport.server import PeerServer

PART = LIMITS.part_bytes


@pytest.fixture
def far(memory_directory: Path) -> Iterator[MemoryStore]:
    with memory_store(memory_directory) as store:
        yield store


@pytest.fixture
def server(far: MemoryStore) -> Iterator[PeerServer]:
    with serving(far) as running:
        yield running


async def answered(channel: Channel, request: Frame, payload: bytes = b"") -> tuple[Status, str]:
    """Send a request and return status and text of its answer."""
    await channel.send(request, payload)
    answer = await channel.receive()
    assert answer.operation == request.operation
    return answer.status, await channel.text(answer.length)


async def ends(channel: Channel) -> bool:
    """Say whether the server ended the connection."""
    with pytest.raises(TransientStoreError, match="ended"):
        await channel.receive()
    return True


async def is_unharmed(server: PeerServer, far: MemoryStore) -> None:
    """Show that nothing was written, no memory is held, and others are served."""
    assert [key async for key in far.list()] == []
    assert far.arena.used_bytes == 0
    transport = transport_to(server)
    await transport.put("k", [b"x" * 3 * PART])
    assert bytes(await transport.get("k")) == b"x" * 3 * PART
    await transport.delete("k")
    await transport.close()


async def test_bad_keys_are_refused_by_the_server_itself(server: PeerServer, far: MemoryStore) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        for number, key in enumerate(BAD_KEYS, start=1):
            if key == "\ud800" or len(key.encode()) > 1024:
                continue  # no frame can hold it
            for kind, payload in ((Kind.PUT, b"x"), (Kind.GET, b""), (Kind.BEGIN, b""), (Kind.DELETE, b"")):
                request = request_of(channel, kind, key, operation=number, length=len(payload), total=1)
                status, text = await answered(channel, request, payload)
                assert status is Status.PERMANENT
                assert "refused" in text
        for prefix in ("..", "../", "a/../..", "/"):
            for kind in (Kind.LIST, Kind.DELETE_BELOW):
                status, _ = await answered(channel, request_of(channel, kind, prefix, operation=99))
                assert status is Status.PERMANENT
    await is_unharmed(server, far)


async def test_a_key_that_is_no_text_ends_the_connection(server: PeerServer, far: MemoryStore) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        covered = request_of(channel, Kind.PUT, "kk", length=1).encode()[:-2] + b"\xff\xfe"
        await channel.wire.write(covered + channel.peer.outgoing.seal(covered))
        assert await ends(channel)
    await is_unharmed(server, far)


async def test_a_frame_that_is_too_large_is_refused_before_its_bytes(
    server: PeerServer, far: MemoryStore
) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        covered = request_of(channel, Kind.PUT, length=LIMITS.frame_bytes_max + 1).encode()
        await channel.wire.write(covered + channel.peer.outgoing.seal(covered))
        assert await ends(channel)
    async with raw_channel(server.addresses[0]) as channel:
        # Within the limit of a frame, but more than one may put without asking.
        request = request_of(channel, Kind.PUT, length=PART + 1)
        status, text = await answered(channel, request, bytes(PART + 1))
        assert (status, "too many" in text) == (Status.PERMANENT, True)
    await is_unharmed(server, far)


async def test_more_bytes_than_announced_end_the_connection(server: PeerServer, far: MemoryStore) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        covered = request_of(channel, Kind.PUT, length=10).encode()
        await channel.wire.write(covered + channel.peer.outgoing.seal(covered) + bytes(5000))
        assert await ends(channel)
    await is_unharmed(server, far)


async def test_parts_beyond_the_object_or_of_nothing_are_refused(
    server: PeerServer, far: MemoryStore
) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        status, text = await answered(channel, request_of(channel, Kind.PART, length=4), b"part")
        assert (status, "no upload" in text) == (Status.UNKNOWN_UPLOAD, True)
        assert (await answered(channel, request_of(channel, Kind.BEGIN, total=100)))[0] is Status.OK
        for fields in ({"offset": 98}, {"offset": 1 << 63}, {"key": "other"}):
            request = request_of(channel, Kind.PART, **{"length": 4, **fields})
            status, text = await answered(channel, request, b"part")
            assert (status, "do not belong" in text) == (Status.PERMANENT, True)
        status, text = await answered(channel, request_of(channel, Kind.COMMIT))
        assert (status, "never came" in text) == (Status.INTEGRITY, True)
        status, text = await answered(channel, request_of(channel, Kind.BEGIN, total=101))
        assert (status, "cannot go on" in text) == (Status.PERMANENT, True)
        assert (await answered(channel, request_of(channel, Kind.ABORT)))[0] is Status.OK
    await is_unharmed(server, far)


async def test_a_damaged_part_is_not_taken_and_can_be_sent_again(
    server: PeerServer, far: MemoryStore
) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        assert (await answered(channel, request_of(channel, Kind.BEGIN, total=4)))[0] is Status.OK
        request = request_of(channel, Kind.PART, length=4)
        # As a memory fault at the sender would: seals are right, and the checksum is not.
        await channel.send_parts(request, [memoryview(b"part")], lambda: False)
        answer = await channel.receive()
        assert answer.status is Status.DAMAGED
        assert "checksum" in await channel.text(answer.length)
        assert (await answered(channel, request_of(channel, Kind.COMMIT)))[0] is Status.INTEGRITY
        assert (await answered(channel, request, b"part"))[0] is Status.OK
        assert (await answered(channel, request_of(channel, Kind.COMMIT)))[0] is Status.OK
        # The same for a small object in one frame.
        await channel.send_parts(
            request_of(channel, Kind.PUT, "l", length=1, operation=2), [memoryview(b"x")], lambda: False
        )
        answer = await channel.receive()
        assert answer.status is Status.DAMAGED
        await channel.text(answer.length)
    assert bytes(await far.fetch("k")) == b"part"
    assert not await far.exists("l")


async def test_frames_of_somebody_else_end_the_connection(server: PeerServer, far: MemoryStore) -> None:
    async with raw_channel(server.addresses[0]) as channel, raw_channel(server.addresses[0]) as other:
        covered = request_of(channel, Kind.DELETE, "k").encode()
        await channel.wire.write(covered + other.peer.outgoing.seal(covered))
        assert await ends(channel)
    async with raw_channel(server.addresses[0]) as channel:
        covered = request_of(channel, Kind.DELETE, "k").encode()
        sealed = covered + channel.peer.outgoing.seal(covered)
        await channel.wire.write(sealed)
        assert (await channel.receive()).status is Status.OK
        await channel.wire.write(sealed)  # the same once more: its number has passed
        assert await ends(channel)
    await is_unharmed(server, far)


async def test_requests_for_an_earlier_session_and_answers_are_refused(
    server: PeerServer, far: MemoryStore
) -> None:
    async with raw_channel(server.addresses[0]) as channel:
        request = request_of(channel, Kind.PUT, session=SERVER.session + 1, length=1)
        assert (await answered(channel, request, b"x"))[0] is Status.STALE_SESSION
        assert (await answered(channel, request_of(channel, Kind.ANSWER)))[0] is Status.PERMANENT
        request = request_of(channel, Kind.STAT, length=1)
        assert (await answered(channel, request, b"x"))[0] is Status.PERMANENT
    await is_unharmed(server, far)


async def test_what_a_sealed_incarnation_sends_is_refused(server: PeerServer, far: MemoryStore) -> None:
    old = transport_to(server)
    new = transport_to(server, replace(CLIENT, incarnation="000003-00000000000000aa"))
    await old.put("k", [b"old"])
    server.seal_below(3)
    for call in (
        old.put("k", [b"x"]),
        old.put("l", [bytes(3 * PART)]),
        old.delete("k"),
        old.delete_below(""),
    ):
        with pytest.raises(PermanentStoreError, match="incarnation 2 of the run is over"):
            await call
    assert bytes(await old.get("k")) == b"old"  # recovery still reads
    await new.put("k", [b"new"])
    server.seal_below(2)  # never goes back
    with pytest.raises(PermanentStoreError, match="is over"):
        await old.put("k", [b"x"])
    assert bytes(await far.fetch("k")) == b"new"
    for transport in (old, new):
        await transport.close()


async def test_what_is_not_admitted_is_refused_before_a_byte_is_reserved(far: MemoryStore) -> None:
    asked: list[tuple[str, int]] = []

    def admit(key: str, size_bytes: int) -> None:
        asked.append((key, size_bytes))
        if size_bytes > 100:
            raise NoSpaceError(f"{size_bytes} bytes are more than the 100 promised")

    with serving(far, admit=admit) as server:
        transport = transport_to(server)
        await transport.put("small", [b"x"])
        for size_bytes in (101, 5 * PART):
            with pytest.raises(NoSpaceError, match="more than the 100 promised"):
                await transport.put("large", [bytes(size_bytes)])
        assert asked == [("small", 1), ("large", 101), ("large", 5 * PART)]
        assert far.arena.used_bytes == 4096 + 4096
        await transport.close()


async def test_an_arena_that_is_full_says_so(server: PeerServer, far: MemoryStore) -> None:
    transport = transport_to(server)
    async with raw_channel(server.addresses[0]) as channel:
        status, text = await answered(channel, request_of(channel, Kind.BEGIN, total=1 << 50))
        assert (status, "needs" in text) == (Status.NO_SPACE, True)
    await transport.close()
    await is_unharmed(server, far)


async def test_idle_strangers_give_way(far: MemoryStore) -> None:
    with serving(far, limits=replace(LIMITS, unauthenticated_count_max=4, handshake_s=60.0)) as server:
        strangers = [await asyncio.open_connection(*server.addresses[0]) for _ in range(20)]
        transport = transport_to(server)
        await transport.put("k", [b"x"])
        # The oldest were ended, without anybody's deadline.
        for reader, _ in strangers[:16]:
            assert await reader.read() == b""
        assert server.refused["too many unknown"] == 16 + 1  # and one for the client that came last
        await transport.close()
        for _, writer in strangers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def test_too_many_clients_are_told(far: MemoryStore) -> None:
    with serving(far, limits=replace(LIMITS, connection_count_max=2)) as server:
        async with raw_channel(server.addresses[0]), raw_channel(server.addresses[0]):
            transport = transport_to(server)
            with pytest.raises(TransientStoreError, match="too many connections"):
                await transport.put("k", [b"x"])
        await transport.put("k", [b"x"])
        await transport.close()


async def test_too_many_uploads_are_told_and_idle_ones_are_dropped(far: MemoryStore) -> None:
    limits = replace(LIMITS, upload_count_max=2, upload_idle_s=0.2)
    with serving(far, limits=limits) as server:
        async with raw_channel(server.addresses[0]) as channel:
            for operation in (1, 2):
                request = request_of(channel, Kind.BEGIN, f"k{operation}", operation=operation, total=1000)
                assert (await answered(channel, request))[0] is Status.OK
            request = request_of(channel, Kind.BEGIN, "k3", operation=3, total=1000)
            status, text = await answered(channel, request)
            assert (status, "at most 2" in text) == (Status.TRANSIENT, True)
            assert server.upload_count == 2
            while server.upload_count:  # ends by the deadline of the test, or when they are dropped
                await answered(channel, request_of(channel, Kind.LIST, "", operation=4))
        await is_unharmed(server, far)


async def test_an_upload_whose_sender_comes_back_goes_on(server: PeerServer, far: MemoryStore) -> None:
    half = b"h" * 1000
    async with raw_channel(server.addresses[0]) as channel:
        await answered(channel, request_of(channel, Kind.BEGIN, total=2000))
        await answered(channel, request_of(channel, Kind.PART, length=1000), half)
    async with raw_channel(server.addresses[0]) as channel:
        await answered(channel, request_of(channel, Kind.BEGIN, total=2000))
        await answered(channel, request_of(channel, Kind.PART, offset=1000, length=1000), half)
        assert (await answered(channel, request_of(channel, Kind.COMMIT)))[0] is Status.OK
        # Told again, because the answer may have been lost: done already, and nothing is done twice.
        await far.delete("k")
        assert (await answered(channel, request_of(channel, Kind.COMMIT)))[0] is Status.OK
        assert not await far.exists("k")


async def test_of_two_connections_at_the_same_bytes_the_later_one_wins(
    server: PeerServer, far: MemoryStore
) -> None:
    # A sender gave its first connection up in the middle of a part; what comes late must not land.
    async with raw_channel(server.addresses[0]) as late, raw_channel(server.addresses[0]) as channel:
        await answered(channel, request_of(channel, Kind.BEGIN, total=4))
        covered = request_of(late, Kind.PART, length=4).encode()
        await late.wire.write(covered + late.peer.outgoing.seal(covered) + b"L")
        assert (await answered(channel, request_of(channel, Kind.PART, length=4), b"part"))[0] is Status.OK
        assert await ends(late)
        assert (await answered(channel, request_of(channel, Kind.COMMIT)))[0] is Status.OK
    assert bytes(await far.fetch("k")) == b"part"


async def test_of_racing_large_creates_one_wins(server: PeerServer, far: MemoryStore) -> None:
    transports = [transport_to(server) for _ in range(4)]
    contents = [bytes([at]) * (3 * PART) for at in range(4)]
    results = await asyncio.gather(
        *(
            each.put("k", [content], replace=False)
            for each, content in zip(transports, contents, strict=True)
        ),
        return_exceptions=True,
    )
    winners = [at for at, result in enumerate(results) if result is None]
    assert len(winners) == 1
    assert all(isinstance(each, ObjectExistsError) for each in results if each is not None)
    assert bytes(await far.fetch("k")) == contents[winners[0]]
    assert server.upload_count == 0
    for transport in transports:
        await transport.close()


async def test_long_lists_come_page_by_page(
    far: MemoryStore, server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.stores.transport.serving._PAGE_BYTES", 50)
    keys = sorted(f"d/{at:03}" for at in range(40))
    await far.put_batch([(key, [b""]) for key in keys])
    transport = transport_to(server)
    assert await transport.list("d/") == keys
    assert await transport.list("d", direct=True) == [key[2:] for key in keys]
    assert await transport.list("nothing/") == []
    await transport.close()


async def test_a_slow_store_is_waited_for_while_it_says_that_it_works(far: MemoryStore) -> None:
    # No byte of the object moves for longer than the deadline, but the peer is alive and says so.
    slow = FaultStore(far, plan=[Fault(FaultKind.SLOW, "put", delay_s=1.5)])
    limits = replace(LIMITS, progress_s=1.0, working_s=0.2)
    with serving(slow, limits=limits) as server:
        transport = transport_to(server, limits=limits)
        await transport.put("k", [b"x"])
        assert [event.kind for event in slow.events] == [FaultKind.SLOW]
        await transport.close()
    assert bytes(await far.fetch("k")) == b"x"


@pytest.mark.parametrize("size_bytes", [10, 3 * PART])
@pytest.mark.parametrize("kind", [FaultKind.UNAVAILABLE, FaultKind.DENIED, FaultKind.FULL])
async def test_errors_of_the_far_store_keep_their_class(
    far: MemoryStore, kind: FaultKind, size_bytes: int
) -> None:
    failing = FaultStore(far, plan=[Fault(kind, "put", times=None)])
    classes = {
        FaultKind.UNAVAILABLE: TransientStoreError,
        FaultKind.DENIED: PermanentStoreError,
        FaultKind.FULL: NoSpaceError,
    }
    with serving(failing) as server:
        transport = transport_to(server)
        with pytest.raises(classes[kind]) as caught:
            await transport.put("k", [bytes(size_bytes)])
        assert type(caught.value) is classes[kind]
        assert "said the peer node-0" in str(caught.value)
        attempts = LIMITS.attempts_max if kind is FaultKind.UNAVAILABLE else 1
        assert len(failing.events) >= attempts
        assert server.upload_count == 0
        await transport.close()


async def test_one_failing_attempt_is_made_up_for(far: MemoryStore) -> None:
    failing = FaultStore(far, plan=[Fault(FaultKind.UNAVAILABLE), Fault(FaultKind.UNANSWERED, after=1)])
    with serving(failing) as server:
        transport = transport_to(server)
        await transport.put("k", [b"x"])
        assert bytes(await transport.get("k")) == b"x"
        assert len(failing.events) == 2
        await transport.close()


def test_a_store_without_conditional_create_is_not_served(far: MemoryStore) -> None:
    class Loose(FaultStore):
        @property
        def properties(self):  # type: ignore[no-untyped-def]
            return replace(super().properties, conditional_create=False)

    with pytest.raises(UsageError, match="cannot be served"), serving(Loose(far)):
        pass


async def test_the_end_of_a_server_drops_what_is_half_there(far: MemoryStore) -> None:
    with serving(far) as server:
        async with raw_channel(server.addresses[0]) as channel:
            await answered(channel, request_of(channel, Kind.BEGIN, total=100_000))
            assert far.arena.used_bytes
            held = server
    assert held.upload_count == 0
    assert far.arena.used_bytes == 0
    assert Arena.inspect(far.arena.directory).keys() == ()


async def test_an_address_in_use_is_an_error(server: PeerServer, far: MemoryStore) -> None:
    with pytest.raises(StoreError, match="listen"), serving(far, port=server.addresses[0][1]):
        pass


async def test_several_addresses_are_one_server(far: MemoryStore) -> None:
    with serving(far, hosts=["127.0.0.1", "127.0.0.2"]) as server:
        assert [host for host, _ in server.addresses] == ["127.0.0.1", "127.0.0.2"]
        transport = TcpTransport(server.addresses, CLIENT, limits=LIMITS)
        content = bytes(range(256)) * 4096
        await transport.put("k", [content])
        assert server.client_count == 2 * LIMITS.connection_count
        assert bytes(await transport.get("k")) == content
        await transport.close()


def test_flags_are_distinct() -> None:
    assert len({each.value for each in Flag}) == len(list(Flag))
