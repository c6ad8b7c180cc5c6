"""Serving an arena to the other nodes of a run, until told to stop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepwell.errors import ConfigError, NoSpaceError, StepwellError
from stepwell.keeper.finishing import LOOK_EVERY_S, finish_for
from stepwell.keeper.record import KeeperRecord, forget_keeper
from stepwell.pipeline.keys import INCARNATION_PREFIX, parse_key
from stepwell.pipeline.records import Link
from stepwell.stores.arena import Arena
from stepwell.stores.arena_files import LOCK_NAME, has_captures
from stepwell.stores.lock import owner_of
from stepwell.stores.memory import MemoryStore
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.settings import Identity, Limits
from stepwell.stores.transport.tls import MutualTls

__all__ = ["ARENA_NAME", "KeeperOptions", "default_directory", "keep"]

ARENA_NAME = "held"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """What a keeper is started with.

    Attributes
    ----------
    run : str
        Name of the run, as its configuration has it.
    name : str
        Of this node.
    hosts : sequence of str
        Addresses to listen on.
    port : int
        0 for any free one.
    directory : Path
        In a memory file system; the arena lies in it, and outlives the keeper.
    secret : RunSecret or None
    tls : MutualTls or None
    budget_bytes : int or None
        Most bytes that are held; None: as the file system has room.
    finish : sequence of Path
        Arenas of trainers of this node: what each had captured when it died is committed there.
    linger_s : float or None
        It ends once nobody needed it for so long; None: at SIGTERM alone.
    trainer : int or None
        The process that started it needs it while it lives; so does who owns an arena of `finish`.
    """

    run: str
    name: str
    hosts: Sequence[str]
    port: int
    directory: Path
    secret: RunSecret | None = None
    tls: MutualTls | None = None
    budget_bytes: int | None = None
    finish: Sequence[Path] = ()
    linger_s: float | None = None
    trainer: int | None = None


def default_directory(run: str, name: str) -> Path:
    """Return where a keeper's arena lies if nothing is said.

    Raises
    ------
    ConfigError
        This machine has no ``/dev/shm``.
    """
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(f"this machine has no {SHARED_MEMORY}; name a directory in a memory file system")
    identity = hashlib.sha256(f"{run}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return SHARED_MEMORY / f"stepwell-{os.getuid()}" / f"keeper-{identity}"


async def keep(
    options: KeeperOptions,
    ready: Callable[[KeeperRecord], None],
    finished: Callable[[Path, list[Link]], None] = lambda directory, links: None,
    failed: Callable[[Path, StepwellError], None] = lambda directory, error: None,
) -> None:
    """Serve until SIGTERM or SIGINT; what is held stays for the next life. Or until nobody needs it.

    Parameters
    ----------
    options : KeeperOptions
    ready : callable
        Told once peers can connect.
    finished, failed : callable
        Told what came of what a trainer had captured.

    Raises
    ------
    LockedError
        Another living keeper has the arena.
    UsageError
        The arena is of another run.
    ConfigError
        It would listen beyond this machine with nothing that proves who connects.
    StoreError
        It cannot listen, or not write its directory.
    """
    session = secrets.randbits(64)
    identity = Identity(options.run, options.name, session, secret=options.secret, tls=options.tls)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    unneeded = False
    with Arena.open(options.directory / ARENA_NAME, run=options.run) as arena:
        store = MemoryStore(arena)
        server = PeerServer(
            store,
            identity,
            hosts=options.hosts,
            port=options.port,
            limits=Limits(),
            admit=_Budget(arena, options.budget_bytes),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        try:
            async with server:
                record = KeeperRecord(
                    run=options.run,
                    name=options.name,
                    session=f"{session:016x}",
                    pid=os.getpid(),
                    addresses=tuple(_text(host, port) for host, port in server.addresses),
                    budget_bytes=options.budget_bytes,
                )
                newest = _newest_incarnation(arena)
                if newest is not None:
                    server.continue_from(newest)
                record.write(options.directory)
                ready(record)
                finishing = [
                    asyncio.create_task(
                        finish_for(directory, partial(finished, directory), partial(failed, directory))
                    )
                    for directory in options.finish
                ]
                waiting = asyncio.create_task(_needed(options, stopped, server, arena))
                try:
                    # A task that fails ends the keeper: nobody would notice otherwise.
                    done, _ = await asyncio.wait({waiting, *finishing}, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                finally:
                    for task in (waiting, *finishing):
                        task.cancel()
                unneeded = not stopped.is_set()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            store.close()
        # Once more, now that nobody can bring anything: what came meanwhile was acknowledged.
        unneeded = unneeded and not _holds_saves(arena)
        if unneeded:
            forget_keeper(options.directory)
            arena.remove()
    if unneeded:
        with suppress(OSError):
            options.directory.rmdir()


async def _needed(options: KeeperOptions, stopped: asyncio.Event, server: PeerServer, arena: Arena) -> None:
    """Wait for the signal, or until there was no trainer of this node, nothing held and nobody connected."""
    if options.linger_s is None:
        await stopped.wait()
        return
    loop = asyncio.get_running_loop()
    needed = loop.time()
    while loop.time() - needed < options.linger_s:
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), min(LOOK_EVERY_S, options.linger_s))
            return
        if (
            server.client_count
            or os.getppid() == options.trainer
            or any(owner_of(directory / LOCK_NAME) is not None for directory in options.finish)
            or any(has_captures(directory) for directory in options.finish)
            or _holds_saves(arena)
        ):
            needed = loop.time()


def _holds_saves(arena: Arena) -> bool:
    """Whether more than records lies there; an object whose key is none of ours counts, too."""
    return any(key is None or key.series is not None for key in map(parse_key, arena.keys()))


@dataclass(frozen=True, slots=True)
class _Budget:
    """Refuses what would be more than is to be held, before a byte of it is sent."""

    arena: Arena
    budget_bytes: int | None

    def __call__(self, key: str, size_bytes: int) -> None:
        if self.budget_bytes is None:
            return
        used_bytes = self.arena.used_bytes
        if used_bytes + size_bytes > self.budget_bytes:
            raise NoSpaceError(
                f"{key!r} needs {size_bytes} bytes; of the {self.budget_bytes} that this keeper may hold "
                f"{used_bytes} are used: raise its budget, or lower `keep` of the peer tier"
            )
        if used_bytes + self.arena.free_bytes + size_bytes > self.budget_bytes:
            # Files that wait to be used again may be too small, and then a new one comes beside them.
            self.arena.trim(self.budget_bytes - used_bytes - size_bytes)


def _newest_incarnation(arena: Arena) -> str | None:
    """Return the newest life of the run that was begun in this memory: an older one must not write on."""
    records = filter(lambda key: key.startswith(INCARNATION_PREFIX), arena.keys())
    parsed = map(parse_key, records)
    return max((key.incarnation for key in parsed if key is not None and key.incarnation), default=None)


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
