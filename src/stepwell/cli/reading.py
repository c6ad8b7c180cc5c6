"""Opening a run for looking at it: read-only, no lock, nothing written anywhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stepwell.config import Config, DirectoryTier, MemoryTier, PeerTier, RemoteTier, load_config
from stepwell.errors import (
    ConfigError,
    IntegrityError,
    MissingObjectError,
    NotCommittedError,
    TransientStoreError,
    UsageError,
)
from stepwell.pipeline.keys import RUN_RECORD
from stepwell.pipeline.records import RunRecord
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import ObjectStore

__all__ = ["MemoryOption", "OpenRun", "SourceArgument", "arena_of", "config_of", "open_run"]

SourceArgument = Annotated[
    str, typer.Argument(help="Directory or URL of a run, or a configuration file.", metavar="SOURCE")
]
MemoryOption = Annotated[
    bool | None,
    typer.Option(
        "--memory/--no-memory", help="Read the memory tier of this machine, too.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run as it lies in the tiers that can be read from here.

    Attributes
    ----------
    config : Config
    record : RunRecord or None
        None where every tier's record of the run is missing or damaged.
    tiers : tuple of Tier
        As the pipeline knows them, over read-only stores; in the order of the configuration.
    """

    config: Config
    record: RunRecord | None
    tiers: tuple[Tier, ...]

    @property
    def title(self) -> str:
        """What to call the run."""
        return (
            "run (its record is damaged)"
            if self.record is None
            else f"run {self.record.name or self.record.run}"
        )

    def tier(self, name: str | None) -> tuple[Tier, ...]:
        """Return the tier of that name alone, or all for None."""
        if name is None:
            return self.tiers
        found = tuple(tier for tier in self.tiers if tier.name == name)
        if not found:
            names = ", ".join(tier.name for tier in self.tiers)
            raise UsageError(f"there is no tier {name!r} to read here; there is {names}")
        return found


@contextmanager
def open_run(source: str, *, memory: bool | None) -> Iterator[OpenRun]:
    """Open every tier of a run that is there.

    Parameters
    ----------
    memory : bool or None
        True: the memory tier must be there. None: it is read if it is. False: it is left alone.

    Raises
    ------
    NotCommittedError
        There is no run here.
    """
    config = load_config(source)
    stores: list[tuple[str, ObjectStore]] = []
    try:
        for tier in config.tiers:
            if isinstance(tier, DirectoryTier) and _holds_run(Path(tier.path)):
                stores.append((tier.label, _directory_store(Path(tier.path))))
            elif isinstance(tier, RemoteTier):
                remote = _remote_store(tier)
                if remote is not None:
                    stores.append((tier.label, remote))
            elif isinstance(tier, PeerTier):
                peer = _peer_store(tier, config.run)
                if peer is not None:
                    stores.append((tier.label, peer))
        config = _named_as_recorded(config, stores)
        if memory is not False:
            stores = [*_memory_stores(config, required=bool(memory)), *stores]
        if not stores:
            raise NotCommittedError(f"{source}: there is no run of stepwell here")
        yield OpenRun(config, _record(stores), tuple(Tier(name, store) for name, store in stores))
    finally:
        for _, store in stores:
            store.close()


def config_of(source: str) -> Config:
    """Load the configuration of a run, with the name that its directory, if it has one, says it has."""
    config = load_config(source)
    places = (Path(tier.path) for tier in config.tiers if isinstance(tier, DirectoryTier))
    stores = [(str(path), _directory_store(path)) for path in places if _holds_run(path)]
    try:
        return _named_as_recorded(config, stores)
    finally:
        for _, store in stores:
            store.close()


def arena_of(config: Config) -> Path:
    """Return where the memory tier of a run lies on this machine.

    Raises
    ------
    ConfigError
        It has none.
    """
    if config.memory is None:
        raise ConfigError("this run has no memory tier")
    return config.arena_directory(config.memory)


def _holds_run(path: Path) -> bool:
    """Whether a run was written here; its record alone may be what is missing."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    return any(name in (RUN_RECORD, "incarnations", "layouts") for name in names)


def _directory_store(path: Path) -> ObjectStore:
    from stepwell.stores.file import FileStore

    return FileStore(path, read_only=True)


def _remote_store(tier: RemoteTier) -> ObjectStore | None:
    """Open a place on object storage if a run was written there; its record alone may be missing."""
    from stepwell.stores.remote import RemoteStore

    store = RemoteStore(tier.options, read_only=True)

    async def holds_run() -> bool:
        if await store.exists(RUN_RECORD):
            return True
        return bool({name async for name in store.list_dir("")} & {"incarnations", "layouts"})

    with ExitStack() as opened:
        opened.callback(store.close)
        if asyncio.run(holds_run()):
            opened.pop_all()
            return store
    return None


def _peer_store(tier: PeerTier, run: str) -> ObjectStore | None:
    """Open what a keeper holds of the run, if anything."""
    from stepwell.peers import open_peer

    store = open_peer(tier, run, read_only=True)
    with ExitStack() as opened:
        opened.callback(store.close)
        try:
            if asyncio.run(store.exists(RUN_RECORD)):
                opened.pop_all()
                return store
        except TransientStoreError as error:
            typer.echo(f"stepwell: tier {tier.label} is left out: {error}", err=True)
    return None


def _memory_stores(config: Config, *, required: bool) -> list[tuple[str, ObjectStore]]:
    """Open the arenas of this machine that belong to the run."""
    found: list[tuple[str, ObjectStore]] = []
    for tier in config.tiers:
        if not isinstance(tier, MemoryTier):
            continue
        directory = config.arena_directory(tier)
        if directory.is_dir():
            from stepwell.stores.arena import Arena
            from stepwell.stores.memory import MemoryStore

            found.append((tier.label, MemoryStore(Arena.inspect(directory))))
        elif required:
            raise NotCommittedError(f"tier {tier.label}: there is no arena at {directory}")
    return found


def _named_as_recorded(config: Config, stores: list[tuple[str, ObjectStore]]) -> Config:
    """Take the run's configured name from the run itself; the place of its arena depends on it.

    Someone who looks at a directory gives only the directory, whatever name the run had.
    """
    record = _record(stores)
    if record is None or record.name in ("", config.run):
        return config
    return load_config(config, {"run": record.name})


def _record(stores: list[tuple[str, ObjectStore]]) -> RunRecord | None:
    """Read the record of the run from the first tier that has it whole."""
    for name, store in stores:
        with suppress(MissingObjectError, IntegrityError):
            return RunRecord.decode(asyncio.run(_fetch(store, RUN_RECORD)), f"{name}: {RUN_RECORD}")
    return None


async def _fetch(store: ObjectStore, key: str) -> bytes:
    return bytes(await store.fetch(key))
