from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport_rig import memory_store, serving, transport_to
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests

from stepwell.stores.arena import Arena
from stepwell.stores.base import Failure, ObjectStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.peer import PeerStore
from stepwell.stores.testing import StoreContract, fetched
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.server import PeerServer


@pytest.fixture
def far(memory_directory: Path) -> Iterator[MemoryStore]:
    with memory_store(memory_directory) as store:
        yield store


@pytest.fixture
def server(far: MemoryStore) -> Iterator[PeerServer]:
    with serving(far) as running:
        yield running


@pytest.fixture
def transport(server: PeerServer) -> TcpTransport:
    return transport_to(server)


@pytest.fixture
def store(transport: TcpTransport) -> Iterator[PeerStore]:
    opened = PeerStore(transport)
    yield opened
    opened.close()


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _far(self, far: MemoryStore) -> None:
        self.far = far

    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        # From the files of the far arena alone.
        region = Arena.inspect(self.far.arena.directory).find(key)
        return None if region is None else bytes(region.contents)


class TestZarr(StoreTests[PeerStore, cpu.Buffer]):
    store_cls = PeerStore
    buffer_cls = cpu.Buffer

    @pytest.fixture(autouse=True)
    def _far(self, far: MemoryStore) -> None:
        self.far = far

    @pytest.fixture
    def store_kwargs(self, transport: TcpTransport) -> dict[str, object]:
        return {"transport": transport}

    @pytest.fixture
    async def store(self, open_kwargs: dict[str, object]) -> PeerStore:
        return await PeerStore.open(**open_kwargs)

    async def set(self, store: PeerStore, key: str, value: Buffer) -> None:
        await self.far.put(key, [value.to_bytes()])

    async def get(self, store: PeerStore, key: str) -> Buffer:
        return cpu.Buffer.from_bytes(bytes(await self.far.fetch(key)))

    def test_store_repr(self, store: PeerStore) -> None:
        assert repr(store) == f"PeerStore({store.transport.where!r}, read_only=False)"

    def test_store_supports_writes(self, store: PeerStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: PeerStore) -> None:
        assert store.supports_listing


def test_promises(store: PeerStore) -> None:
    assert store.properties.survives is Failure.NODE
    assert not store.properties.needs_commit_record
    assert store.url.startswith("peer:node-0 at 127.0.0.1:")


async def test_copies_share_the_connections(store: PeerStore, server: PeerServer) -> None:
    await store.put("k", [b"x"])
    for other in (copy.copy(store), pickle.loads(pickle.dumps(store)), store.with_read_only(True)):
        assert await fetched(other, "k") == b"x"
        assert (other == store) == (not other.read_only)
        other.close()
    assert await fetched(store, "k") == b"x"
    assert server.client_count == 1


def test_connections_and_secrets_do_not_travel(store: PeerStore) -> None:
    dumped = pickle.dumps(store)
    assert b"a secret" not in dumped
    child = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"],
        input=dumped,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == 1
    assert b"UsageError" in child.stderr
    assert b"connect again" in child.stderr
