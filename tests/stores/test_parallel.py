from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from transport_rig import PATIENT, Node, memory_store, serving, transport_to

from stepwell.errors import (
    IntegrityError,
    MissingObjectError,
    NoSpaceError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from stepwell.stores.parallel import copy_to, fetch_from
from stepwell.stores.peer import PeerStore
from stepwell.stores.transport.client import TcpTransport

PART_BYTES = 1 << 20
CONTENT = np.random.default_rng(0).bytes(24 * PART_BYTES + 17)


@pytest.fixture
def nodes(memory_directory: Path) -> Iterator[list[Node]]:
    # Started side by side: most of a start is imports.
    with ExitStack() as stack:
        started = [Node(memory_directory / name, "node-0") for name in "abc"]
        for each in started:
            stack.callback(each.close)
        for each in started:
            each.wait_until_ready()
        yield started


@contextmanager
def stores_at(transports: Iterable[TcpTransport]) -> Iterator[list[PeerStore]]:
    stores = [PeerStore(each) for each in transports]
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def far_peers(nodes: list[Node]) -> Iterator[list[PeerStore]]:
    """Peers in processes that can be stopped and killed."""
    with stores_at(each.transport(PATIENT) for each in nodes) as stores:
        yield stores


@pytest.fixture
def peers(memory_directory: Path) -> Iterator[list[PeerStore]]:
    with ExitStack() as stack:
        servers = []
        for name in "abc":
            store = stack.enter_context(memory_store(memory_directory / name))
            servers.append(stack.enter_context(serving(store)))
        yield stack.enter_context(stores_at(transport_to(each, limits=PATIENT) for each in servers))


async def test_copies_go_to_the_first_peers(peers: list[PeerStore]) -> None:
    assert await copy_to(peers, "k", [CONTENT[:100], CONTENT[100:]], copies=2) == tuple(peers[:2])
    for peer, held in zip(peers, (True, True, False), strict=True):
        assert await peer.exists("k") == held
    assert bytes(await peers[1].fetch("k")) == CONTENT


async def test_a_dead_peer_is_replaced_by_a_spare(nodes: list[Node], far_peers: list[PeerStore]) -> None:
    nodes[0].kill()
    assert set(map(id, await copy_to(far_peers, "k", [CONTENT], copies=2))) == {
        id(far_peers[1]),
        id(far_peers[2]),
    }


async def test_too_few_copies_are_an_error_that_says_how_many(
    nodes: list[Node], far_peers: list[PeerStore]
) -> None:
    nodes[0].kill()
    nodes[2].kill()
    with pytest.raises(TransientStoreError, match="1 copies of 2"):
        await copy_to(far_peers, "k", [CONTENT], copies=2)
    assert await far_peers[1].exists("k")
    with pytest.raises(UsageError):
        await copy_to(far_peers, "k", [CONTENT], copies=4)


async def test_a_stopped_peer_does_not_hold_up_the_copies(
    nodes: list[Node], far_peers: list[PeerStore]
) -> None:
    with nodes[0].stopped():
        holders = await copy_to(far_peers, "k", [CONTENT], copies=2, slow_s=0.2)
    assert set(map(id, holders)) == {id(far_peers[1]), id(far_peers[2])}


async def test_ranges_come_from_all_peers(peers: list[PeerStore]) -> None:
    await copy_to(peers, "k", [CONTENT], copies=3)
    memory = bytearray(len(CONTENT))
    got = await fetch_from(peers, "k", place=lambda size: memoryview(memory))
    assert got.readonly
    assert memory == CONTENT


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_lost_in_the_middle_is_made_up_for(
    nodes: list[Node], far_peers: list[PeerStore], how: signal.Signals
) -> None:
    await copy_to(far_peers, "k", [CONTENT], copies=3)
    memory = bytearray(len(CONTENT))
    struck = asyncio.Event()

    class Striking(PeerStore):
        """Ends its peer when so many ranges were asked of it."""

        asked_count = 0

        async def fetch_into(self, *args: object, **options: object) -> memoryview:
            Striking.asked_count += 1
            if Striking.asked_count == 2:
                os.kill(nodes[0].pid, how)
                struck.set()
            return await super().fetch_into(*args, **options)  # type: ignore[arg-type]

    striking = Striking(far_peers[0].transport)
    try:
        got = await fetch_from(
            [striking, *far_peers[1:]],
            "k",
            place=lambda size: memoryview(memory),
            slow_s=0.2,
        )
    finally:
        if how is signal.SIGSTOP:
            os.kill(nodes[0].pid, signal.SIGCONT)
        striking.close()
    assert struck.is_set()
    assert bytes(got) == CONTENT


async def test_a_peer_stopped_before_is_not_waited_for(nodes: list[Node], far_peers: list[PeerStore]) -> None:
    await copy_to(far_peers, "k", [CONTENT], copies=3)
    with nodes[1].stopped():
        assert bytes(await fetch_from(far_peers, "k", slow_s=0.2)) == CONTENT


async def test_peers_without_it_or_with_another_take_no_part(peers: list[PeerStore]) -> None:
    await peers[0].put("k", [CONTENT])
    await peers[1].put("k", [bytes(len(CONTENT))])
    digest = xxhash.xxh3_128_digest(CONTENT)
    for order in (peers, peers[::-1]):
        assert bytes(await fetch_from(order, "k", digest=digest)) == CONTENT
    with pytest.raises(StoreError, match="another object"):
        await fetch_from(peers, "k", digest=bytes(16))


async def test_missing_everywhere_is_missing(peers: list[PeerStore]) -> None:
    with pytest.raises(MissingObjectError, match="nothing"):
        await fetch_from(peers, "nothing")
    with pytest.raises(UsageError):
        await fetch_from([], "k")


async def test_an_empty_object_and_a_place_without_room(peers: list[PeerStore]) -> None:
    await copy_to(peers, "k", [], copies=3)
    assert bytes(await fetch_from(peers, "k")) == b""

    def full(size_bytes: int) -> memoryview:
        raise NoSpaceError("full")

    with pytest.raises(NoSpaceError):
        await fetch_from(peers, "k", place=full)


async def test_replicas_each_bring_a_share_of_one_object(peers: list[PeerStore]) -> None:
    # Two senders with the same content, each over connections of its own, to one peer.
    peer = peers[0]
    half = len(CONTENT) // 2
    await peer.put_share("k", len(CONTENT), "step-7", 0, CONTENT[:half])
    with pytest.raises(IntegrityError, match=f"bytes {half} to {len(CONTENT)}"):
        await peer.finish_shares("k", len(CONTENT), "step-7")
    assert not await peer.exists("k")
    await peer.put_share("k", len(CONTENT), "step-7", half - 100, CONTENT[half - 100 :])
    await peer.finish_shares("k", len(CONTENT), "step-7")
    assert bytes(await peer.fetch("k")) == CONTENT
    # Late ones, and a repeated end, change nothing.
    await peer.put_share("k", len(CONTENT), "step-7", 0, CONTENT[:half])
    await peer.finish_shares("k", len(CONTENT), "step-7")
    assert bytes(await peer.fetch("k")) == CONTENT
    with pytest.raises(TransientStoreError, match="no upload"):
        await peer.finish_shares("other", 5, "step-7")
