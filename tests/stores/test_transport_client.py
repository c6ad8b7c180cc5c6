from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transport_faults import (
    HANDSHAKE_BYTES,
    TO_CLIENT,
    TO_SERVER,
    Fault,
    Proxy,
    answer_to,
    proxy,
    raw_channel,
    request_of,
    rude_server,
)
from transport_rig import CLIENT, LIMITS, SERVER, Node, memory_store, node, serving, transport_to

from stepwell.errors import (
    IntegrityError,
    MissingObjectError,
    ObjectExistsError,
    PermanentStoreError,
    StoreError,
    TransientStoreError,
)
from stepwell.stores.arena import Arena
from stepwell.stores.file import FileStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.transport.base import Stat
from stepwell.stores.transport.channel import Channel
from stepwell.stores.transport.client import TcpTransport, _pieces
from stepwell.stores.transport.frames import HEAD_BYTES, SEAL_BYTES, Flag, Frame, Kind, Status
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.settings import Limits

PART = LIMITS.part_bytes
ONCE = replace(LIMITS, attempts_max=1)
LARGE = np.random.default_rng(0).bytes(5 * PART + 11)


@pytest.fixture
def far(memory_directory: Path) -> Iterator[MemoryStore]:
    with memory_store(memory_directory) as store:
        yield store


@pytest.fixture
def server(far: MemoryStore) -> Iterator[PeerServer]:
    with serving(far) as running:
        yield running


@pytest.fixture
def between(server: PeerServer) -> Iterator[Proxy]:
    with proxy(server.addresses[0]) as running:
        yield running


async def put_length(between: Proxy, direction: str, content: bytes) -> int:
    """Return how many bytes a put takes in one direction over one fresh connection."""
    transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
    await transport.put("k", [content])
    length = between.passed[direction]
    await transport.delete("k")
    await transport.close()
    return length


# -- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
async def test_cut_anywhere_nothing_is_half_there(between: Proxy, far: MemoryStore, direction: str) -> None:
    content = b"content" * 20
    length = await put_length(between, direction, content)
    for at in [*range(0, length, 11), *range(length - 50, length)]:
        between.fault = Fault(direction, at, "cut", times=2)
        transport = TcpTransport([between.address], CLIENT, limits=ONCE)
        with pytest.raises(TransientStoreError):
            await transport.put("k", [content])
        await transport.close()
        # Only where the answer alone was lost is it there, and then it is whole.
        if await far.exists("k"):
            assert bytes(await far.fetch("k")) == content
            await far.delete("k")
        # Tried again, it works.
        between.fault = Fault(direction, at, "cut")
        transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
        await transport.put("k", [content])
        await transport.close()
        assert bytes(await far.fetch("k")) == content
        await far.delete("k")


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
async def test_a_flipped_byte_is_never_stored_nor_returned(
    between: Proxy, far: MemoryStore, direction: str
) -> None:
    content = bytes(range(200))
    length = await put_length(between, direction, content)
    await far.put("there", [content])
    for at in range(HANDSHAKE_BYTES, max(length, HANDSHAKE_BYTES + 330), 3):
        between.fault = Fault(direction, at, "flip", times=1)
        transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
        await transport.put("k", [content])
        assert bytes(await transport.get("there")) == content
        await transport.close()
        assert bytes(await far.fetch("k")) == content
        await far.delete("k")


@pytest.mark.parametrize("what", ["flip", "cut"])
@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
async def test_large_objects_survive_faults_in_their_middle(
    between: Proxy, far: MemoryStore, direction: str, what: str
) -> None:
    for at in (700, 1000, PART // 2, PART + 1000, 2 * PART):
        between.fault = Fault(direction, at, what)
        transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
        await transport.put("k", [LARGE[:100], LARGE[100:]])
        assert bytes(await far.fetch("k")) == LARGE
        assert bytes(await transport.get("k")) == LARGE
        await transport.close()


@pytest.mark.parametrize("what", ["flip", "cut"])
async def test_so_do_objects_of_the_sizes_that_are_usual(far: MemoryStore, what: str) -> None:
    limits = Limits(backoff_s=0.001)
    content = np.random.default_rng(1).bytes(33 << 20)
    with serving(far, limits=limits) as usual, proxy(usual.addresses[0]) as way:
        for direction in (TO_SERVER, TO_CLIENT):
            way.fault = Fault(direction, (2 << 20) + 3, what)
            transport = TcpTransport([way.address], CLIENT, limits=limits)
            await transport.put("k", [content])
            assert bytes(await far.fetch("k")) == content
            assert bytes(await transport.get("k")) == content
            assert bytes(await transport.get("k", 3, 9 << 20)) == content[3 : 3 + (9 << 20)]
            assert not way.fault.times
            await transport.close()


async def test_every_connection_damaged_is_an_error_and_nothing_is_there(
    between: Proxy, far: MemoryStore, server: PeerServer
) -> None:
    for what, at in (("cut", 1200), ("flip", HANDSHAKE_BYTES + 50)):
        between.fault = Fault(TO_SERVER, at, what, times=1000)
        transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
        with pytest.raises(TransientStoreError):
            await transport.put("k", [LARGE])
        await transport.close()
    assert [key async for key in far.list()] == []
    straight = transport_to(server)
    await straight.put("k", [b"x"])
    await straight.close()


async def test_a_link_that_holds_everything_back_is_given_up(between: Proxy, far: MemoryStore) -> None:
    limits = replace(LIMITS, progress_s=0.3, attempts_max=2)
    for direction, at in ((TO_SERVER, 700), (TO_SERVER, 5000), (TO_CLIENT, 650)):
        between.fault = Fault(direction, at, "hold", times=2 * limits.attempts_max)
        transport = TcpTransport([between.address], CLIENT, limits=limits)
        began = time.monotonic()
        with pytest.raises(TransientStoreError, match="moved for"):
            await transport.put("k", [bytes(10_000)])
        assert time.monotonic() - began < 10
        await transport.close()
    between.fault = None
    transport = TcpTransport([between.address], CLIENT, limits=limits)
    await transport.put("k", [b"x"])
    await transport.close()


async def test_a_call_has_a_deadline_though_bytes_trickle(server: PeerServer) -> None:
    async def trickle(channel: Channel, request: Frame) -> None:
        while True:
            await channel.send(answer_to(channel, request, status=Status.WORKING))
            await asyncio.sleep(0.01)

    limits = replace(LIMITS, call_s=0.5)
    async with rude_server(trickle) as address:
        transport = TcpTransport([address], CLIENT, limits=limits)
        for call in (transport.put("k", [b"x"]), transport.get("k"), transport.list("")):
            with pytest.raises(TransientStoreError, match="did not end within"):
                await call
        await transport.close()


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture
def process(memory_directory: Path) -> Iterator[Node]:
    with node(memory_directory / "far") as running:
        yield running


async def test_a_stopped_peer_is_given_up_within_the_deadline(process: Node) -> None:
    limits = replace(LIMITS, progress_s=0.5, attempts_max=2, handshake_s=0.5)
    transport = process.transport(limits)
    content = bytes(64 << 20)  # more than all socket buffers take
    await transport.put("there", [content])
    with process.stopped():
        for call in (transport.put("k", [content]), transport.get("there"), transport.put("k", [b"x"])):
            began = time.monotonic()
            with pytest.raises(TransientStoreError):
                await call
            assert time.monotonic() - began < 10
    await transport.put("k", [b"x"])  # goes on where it left off
    assert bytes(await transport.get("k")) == b"x"
    assert (await transport.get("there")).nbytes == len(content)
    await transport.close()


async def test_a_reader_that_stops_is_given_up_by_the_server(far: MemoryStore) -> None:
    limits = replace(LIMITS, progress_s=0.3)
    await far.put("k", [bytes(64 << 20)])
    with serving(far, limits=limits) as server:
        async with raw_channel(server.addresses[0]) as channel:
            channel.wire._transport.pause_reading()  # type: ignore[union-attr]
            await channel.send(request_of(channel, Kind.GET, length=64 << 20))
            other = transport_to(server)
            while server.client_count > 1 or not server.refused:  # until the deadline of the test
                await other.put("l", [b"served meanwhile"])
            assert server.refused["TransientStoreError"] == 1
            await other.close()


async def test_a_killed_peer_is_an_error_at_once_and_a_new_one_another_session(
    process: Node, memory_directory: Path
) -> None:
    transport = process.transport()
    await transport.put("k", [LARGE])
    assert transport.session == 11
    process.kill()
    with pytest.raises(TransientStoreError):
        await transport.put("k", [b"x"])
    await transport.close()
    # Its arena outlives it.
    with Arena.open(memory_directory / "far", run="run") as arena:
        store = MemoryStore(arena)
        with serving(store, replace(SERVER, session=12)) as again:
            transport = transport_to(again)
            assert bytes(await transport.get("k")) == LARGE
            assert transport.session == 12
            await transport.close()
        store.close()


async def test_idle_connections_that_died_are_replaced(far: MemoryStore) -> None:
    with serving(far) as server:
        port = server.addresses[0][1]
        transport = transport_to(server)
        await transport.put("k", [b"x"])
    with serving(far, replace(SERVER, session=12), port=port):
        assert bytes(await transport.get("k")) == b"x"
        assert transport.session == 12
    await transport.close()


# -- peers with the secret and bad manners ---------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": 77},
        {"session": 99},
        {"kind": Kind.PUT},
        {"status": Status.PERMANENT, "length": 1 << 20},
        {"length": 3},
    ],
    ids=repr,
)
async def test_wrong_answers_are_errors(fields: dict[str, object]) -> None:
    async def answer(channel: Channel, request: Frame) -> None:
        frame = answer_to(channel, request, **{key: value for key, value in fields.items() if key != "kind"})
        if "kind" in fields:
            frame = replace(frame, kind=fields["kind"])
        await channel.send(frame, bytes(frame.length))

    async with rude_server(answer) as address:
        transport = TcpTransport([address], CLIENT, limits=LIMITS)
        with pytest.raises(TransientStoreError):
            await transport.put("k", [b"x"])
        await transport.close()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"length": 11, "total": 10, "flags": Flag.LAST}], "not what was asked"),
        ([{"length": 1 << 40, "total": 1 << 40}], "more than"),
        ([{"length": 5, "total": 10}, {"length": 6, "offset": 5, "total": 10}], "not what was asked"),
        ([{"length": 5, "total": 10}, {"length": 5, "offset": 4, "total": 10}], "not what was asked"),
        ([{"length": 5, "total": 10, "flags": Flag.LAST}], "5 of 10 bytes"),
        ([{"length": 0, "total": 10}], "not what was asked"),
    ],
    ids=repr,
)
async def test_data_that_was_not_asked_for_is_an_error(
    answers: list[dict[str, object]], message: str
) -> None:
    async def answer(channel: Channel, request: Frame) -> None:
        for fields in answers:
            frame = answer_to(channel, request, **fields)
            if frame.length > 100:
                covered = frame.encode()
                await channel.wire.write(covered + channel.peer.outgoing.seal(covered))
            else:
                await channel.send(frame, bytes(frame.length))

    async with rude_server(answer) as address:
        transport = TcpTransport([address], CLIENT, limits=ONCE)
        memory = bytearray(b"untouched!")
        with pytest.raises(TransientStoreError, match=message):
            await transport.get("k", place=lambda size_bytes: memoryview(memory)[:size_bytes])
        await transport.close()


async def test_a_peer_that_ends_the_connection_after_each_request(server: PeerServer) -> None:
    async def leave(channel: Channel, request: Frame) -> None:
        channel.wire.abort()

    async with rude_server(leave) as address:
        transport = TcpTransport([address], CLIENT, limits=LIMITS)
        with pytest.raises(TransientStoreError, match="ended"):
            await transport.put("k", [b"x"])
        await transport.close()


# -- once, whole, the same -------------------------------------------------------------------------


async def test_a_create_whose_answer_was_lost_happened_once(between: Proxy, far: MemoryStore) -> None:
    for at in range(HANDSHAKE_BYTES, HANDSHAKE_BYTES + HEAD_BYTES + SEAL_BYTES, 5):
        between.fault = Fault(TO_CLIENT, at, "cut")
        transport = TcpTransport([between.address], CLIENT, limits=LIMITS)
        await transport.put("k", [b"first"], replace=False)
        assert not between.fault.times, "no answer was lost"
        with pytest.raises(ObjectExistsError):
            await transport.put("k", [b"second"], replace=False)
        await transport.close()
        assert bytes(await far.fetch("k")) == b"first"
        await far.delete("k")


async def test_large_objects_beside_a_replacing_writer_are_one_whole_object(
    server: PeerServer, far: MemoryStore
) -> None:
    contents = [bytes([at]) * (4 * PART) for at in range(25)]
    writer, reader = transport_to(server), transport_to(server)
    await writer.put("k", [contents[0]])
    writing = True

    async def write() -> None:
        nonlocal writing
        for content in contents:
            await far.delete("k")  # the same file is used again: what a reader must not be fooled by
            await writer.put("k", [content])
        writing = False

    async def read() -> None:
        while writing:
            try:
                got = await reader.get("k")
            except (MissingObjectError, TransientStoreError):
                continue
            assert bytes(got) in contents

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(read())
    for transport in (writer, reader):
        await transport.close()


async def test_an_expected_object_or_an_error(server: PeerServer) -> None:
    transport = transport_to(server)
    await transport.put("k", [LARGE])
    stat = await transport.stat("k", digest=True)
    assert stat == replace(await transport.stat("k"), digest=stat.digest)
    assert bytes(await transport.get("k", 5, 100, expected=stat)) == LARGE[5:105]
    await transport.put("k", [LARGE])
    with pytest.raises(TransientStoreError, match="was replaced"):
        await transport.get("k", expected=stat)
    with pytest.raises(StoreError):
        await transport.get("k", expected=Stat(stat.size_bytes + 1, 0))
    await transport.close()


async def test_bytes_land_in_memory_that_the_caller_gives(server: PeerServer) -> None:
    transport = transport_to(server)
    await transport.put("k", [LARGE])
    memory = np.zeros(len(LARGE), np.uint8)
    asked: list[int] = []

    def place(size_bytes: int) -> memoryview:
        asked.append(size_bytes)
        return memory.data[:size_bytes]

    got = await transport.get("k", place=place)
    assert np.frombuffer(got, np.uint8).ctypes.data == memory.ctypes.data
    assert memory.tobytes() == LARGE
    got = await transport.get("k", 100, 3 * PART, place=place)
    assert bytes(got) == LARGE[100 : 100 + 3 * PART]
    assert asked == [len(LARGE), 3 * PART]
    with pytest.raises(PermanentStoreError, match="the place for"):
        await transport.get("k", place=lambda size_bytes: memory.data[:5])
    await transport.close()


async def test_any_store_can_be_served(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files")
    with serving(store) as server:
        transport = transport_to(server)
        await transport.put("a/k", [LARGE])
        await transport.put("a/s", [b"small"], replace=False)
        assert bytes(await store.fetch("a/k")) == LARGE
        assert bytes(await transport.get("a/k")) == LARGE
        assert bytes(await transport.get("a/k", 7, 2 * PART)) == LARGE[7 : 7 + 2 * PART]
        assert bytes(await transport.get("a/s", 2)) == b"all"
        assert (await transport.stat("a/k")).size_bytes == len(LARGE)
        with pytest.raises(IntegrityError):
            await transport.get("a/s", 0, 6)
        with pytest.raises(ObjectExistsError):
            await transport.put("a/k", [LARGE], replace=False)
        await transport.delete_below("a")
        assert await transport.list("") == []
        await transport.close()
    store.close()


async def test_addresses_that_fail_leave_the_work_to_the_others(server: PeerServer, far: MemoryStore) -> None:
    with proxy(server.addresses[0]) as between:
        between.fault = Fault(TO_SERVER, 0, "cut", times=1000)
        transport = TcpTransport([between.address, server.addresses[0]], CLIENT, limits=LIMITS)
        for _ in range(3):
            await transport.put("k", [LARGE])
            assert bytes(await transport.get("k")) == LARGE
        await transport.close()


async def test_a_slow_connection_is_overtaken(server: PeerServer, far: MemoryStore) -> None:
    limits = replace(LIMITS, slow_s=0.2, progress_s=60.0)
    content = np.random.default_rng(2).bytes(60 * PART)
    await far.put("l", [content])
    with proxy(server.addresses[0]) as between:
        # Held in the middle of a part, and far from its own deadline.
        addresses = [between.address, server.addresses[0]]
        between.fault = Fault(TO_SERVER, HANDSHAKE_BYTES + 10_000, "hold")
        transport = TcpTransport(addresses, CLIENT, limits=limits)
        began = time.monotonic()
        await transport.put("k", [content])
        assert not between.fault.times
        await transport.close()
        # Behind the first part, which tells how many there are and comes over one connection.
        between.fault = Fault(TO_CLIENT, HANDSHAKE_BYTES + PART + 10_000, "hold")
        transport = TcpTransport(addresses, CLIENT, limits=limits)
        assert bytes(await transport.get("l")) == content
        assert not between.fault.times
        assert time.monotonic() - began < 50
        await transport.close()
    assert bytes(await far.fetch("k")) == content


def test_pieces_of_parts_taken_together() -> None:
    views = [memoryview(b"abc"), memoryview(b"d"), memoryview(b"efgh")]
    for start in range(8):
        for length in range(8 - start + 1):
            joined = b"".join(_pieces(views, start, length))
            assert joined == b"abcdefgh"[start : start + length]
            assert all(piece.nbytes for piece in _pieces(views, start, length))
