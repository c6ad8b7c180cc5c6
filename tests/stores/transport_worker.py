"""A node of its own for tests: serves an arena until its standard input ends. Run, never imported.

``transport_worker.py DIRECTORY NAME JSON`` prints its port; JSON has fields of ``Limits``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from stepwell.stores.arena import Arena
from stepwell.stores.memory import MemoryStore
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.settings import Identity, Limits


async def serve(directory: Path, name: str, limits: Limits) -> None:
    secret = RunSecret.from_environment()
    identity = Identity(
        run="run", name=name, session=11, incarnation="000002-00000000000000ff", secret=secret
    )
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    with Arena.open(directory, run="run") as arena:
        store = MemoryStore(arena)
        async with PeerServer(store, identity, limits=limits) as server:
            print(server.addresses[0][1], flush=True)
            await ended.wait()
        store.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], Limits(**json.loads(sys.argv[3]))))
