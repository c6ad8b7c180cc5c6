"""Servers for tests, on loopback, each with an arena of its own: in a thread, or in a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stepwell.stores.arena import Arena
from stepwell.stores.base import ObjectStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.secret import SECRET_VARIABLE, RunSecret
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.settings import Identity, Limits

SECRET = RunSecret(b"a secret that is long enough for a run")
SERVER = Identity(run="run", name="node-0", session=11, incarnation="000002-00000000000000ff", secret=SECRET)
CLIENT = replace(SERVER, name="node-1", session=22)
# Small sizes, so that small objects are cut as large ones are, and deadlines that a test can wait for.
LIMITS = Limits(part_bytes=64 << 10, inline_bytes=16 << 10, progress_s=5.0, backoff_s=0.001)


@contextmanager
def serving(
    store: ObjectStore,
    identity: Identity = SERVER,
    limits: Limits = LIMITS,
    **options: object,
) -> Iterator[PeerServer]:
    """Serve `store` from a thread of its own."""
    ready = threading.Event()
    box: list[PeerServer] = []
    stop: list[Callable[[], None]] = []
    failed: list[BaseException] = []

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with PeerServer(store, identity, limits=limits, **options) as server:  # type: ignore[arg-type]
            box.append(server)
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            ready.set()
            await ended.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server-of-test")
    thread.start()
    ready.wait()
    try:
        if failed:
            raise failed[0]
        yield box[0]
    finally:
        for end in stop:
            end()
        thread.join()
        if failed:
            raise failed[0]


@contextmanager
def memory_store(directory: Path, run: str = "run") -> Iterator[MemoryStore]:
    """Give a store in an arena of its own."""
    with Arena.open(directory / "served", run=run) as arena:
        store = MemoryStore(arena)
        yield store
        store.close()


def transport_to(server: PeerServer, identity: Identity = CLIENT, limits: Limits = LIMITS) -> TcpTransport:
    """Return a way to a server."""
    return TcpTransport(server.addresses, identity, peer_name="node-0", limits=limits)


# Deadlines that a test can wait out when a peer never answers.
PATIENT = replace(LIMITS, progress_s=3.0, part_bytes=1 << 20, inline_bytes=64 << 10)


class Node:
    """A server in a process of its own."""

    def __init__(self, directory: Path, name: str, **limits: float) -> None:
        worker = Path(__file__).with_name("transport_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(directory), name, json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, SECRET_VARIABLE: SECRET.value.decode()},
        )
        self.name = name
        self.pid = self._process.pid
        self.address = ("127.0.0.1", 0)

    def wait_until_ready(self) -> None:
        """Wait until it listens."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the node did not start"
        self.address = ("127.0.0.1", int(line))

    def transport(self, limits: Limits = LIMITS, identity: Identity = CLIENT) -> TcpTransport:
        """Return a way to this node."""
        return TcpTransport([self.address], identity, peer_name=self.name, limits=limits)

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it in the meantime."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> int:
        """Let it end by itself; return its exit status."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        return self._process.wait(timeout=60)


@contextmanager
def node(directory: Path, name: str = "node-0", **limits: float) -> Iterator[Node]:
    """Give a server in a process of its own."""
    running = Node(directory, name, **limits)
    try:
        running.wait_until_ready()
        yield running
    finally:
        assert running.close() in (0, -signal.SIGKILL)


__all__ = [
    "CLIENT",
    "LIMITS",
    "PATIENT",
    "SECRET",
    "SERVER",
    "Node",
    "memory_store",
    "node",
    "serving",
    "transport_to",
]
