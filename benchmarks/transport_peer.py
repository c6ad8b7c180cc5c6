"""The other process of ``benchmarks.transport``: a node that serves, a gloo rank, or a node that sends.

Not for people: ``benchmarks.transport`` starts it, with one JSON object as its argument.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stepwell.stores.arena import Arena
from stepwell.stores.memory import MemoryStore
from stepwell.stores.parallel import fetch_from
from stepwell.stores.peer import PeerStore
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.settings import Identity
from stepwell.stores.transport.tls import MutualTls

RUN = "benchmark"


def identity(name: str, session: int, job: dict[str, object]) -> Identity:
    """Return who a node is: with the secret of the environment, and TLS where the job says so."""
    tls = None
    if job.get("tls"):
        directory = Path(str(job["tls"]))
        tls = MutualTls(
            certificate=directory / f"{name}.pem",
            key=directory / f"{name}.key",
            authority=directory / "authority.pem",
        )
    return Identity(RUN, name, session, secret=RunSecret.from_environment(), tls=tls)


@contextmanager
def opened(directory: str) -> Iterator[MemoryStore]:
    """Give a store in an arena of its own."""
    with Arena.open(directory, run=RUN) as arena:
        store = MemoryStore(arena)
        yield store
        store.close()


async def serve(job: dict[str, object]) -> None:
    """Serve until standard input ends; say the port first."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    hosts = job.get("hosts", ["127.0.0.1"])
    assert isinstance(hosts, list)
    port = int(str(job.get("port", 0)))
    with opened(str(job["directory"])) as store:
        if "object_bytes" in job:
            await store.put("object", [content(int(str(job["object_bytes"])))])
        async with PeerServer(store, identity("node-0", 1, job), hosts=hosts, port=port) as server:
            print(server.addresses[0][1], flush=True)
            await ended.wait()


def content(size_bytes: int) -> memoryview:
    """Return bytes that no two nodes have by chance, the same on all."""
    return np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8).data


async def send(job: dict[str, object]) -> dict[str, float]:
    """Time one put over the addresses of a job, or one fetch from its peers; bytes per second."""
    peers, size_bytes = job["peers"], int(str(job["object_bytes"]))
    assert isinstance(peers, list)
    stores = [
        PeerStore(TcpTransport([tuple(each) for each in addresses], identity("node-1", 2, job)))
        for addresses in peers
    ]
    seconds: list[float] = []
    with opened(str(job["directory"])) as own:
        landing = await own.begin_put(size_bytes)
        landing.buffer[:] = content(size_bytes)
        for _ in range(int(str(job["repeats"]))):
            began = time.perf_counter()
            if job["what"] == "put":
                await stores[0].put("sent", [landing.buffer])
            else:
                await fetch_from(stores, "object", place=lambda _: landing.buffer)
            seconds.append(time.perf_counter() - began)
            if job["what"] == "put":
                await stores[0].delete("sent")
        landing.discard()
    for store in stores:
        store.close()
    return {"bytes_per_s": size_bytes / sorted(seconds)[len(seconds) // 2]}


def gloo(rank: int, job: dict[str, object], memory: memoryview) -> Iterator[float]:
    """Yield the seconds of each transfer, from rank 0 to rank 1, until the other has it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=2)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    done = torch.zeros(1)
    try:
        for _ in range(int(str(job["repeats"]))):
            began = time.perf_counter()
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(done, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(done, 0)
            yield time.perf_counter() - began
    finally:
        dist.destroy_process_group()


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["role"] == "serve":
        asyncio.run(serve(job))
    elif job["role"] == "send":
        print(json.dumps(asyncio.run(send(job))), flush=True)
    else:
        with opened(job["directory"]) as store:
            landing = asyncio.run(store.begin_put(job["object_bytes"]))
            landing.buffer[:: os.sysconf("SC_PAGE_SIZE")] = landing.buffer[:: os.sysconf("SC_PAGE_SIZE")]
            for _ in gloo(1, job, landing.buffer):
                pass
            landing.discard()


if __name__ == "__main__":
    main()
