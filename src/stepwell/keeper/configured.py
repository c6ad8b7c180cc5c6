"""What the `keeper` part of a configuration means for a keeper."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from stepwell.config import Config, KeeperConfig, PeerTier
from stepwell.keeper.keeper import KeeperOptions, default_directory
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.tls import MutualTls

__all__ = ["completed", "finished_by", "keeper_directory", "options_of"]


def completed(keeper: KeeperConfig, config: Config) -> KeeperConfig:
    """Fill in from the peer tiers what proves to peers who this is."""
    peers = [tier for tier in config.tiers if isinstance(tier, PeerTier)]
    found = {
        name: next((value for peer in peers if (value := getattr(peer, name)) is not None), None)
        for name in ("secret_file", "tls")
        if getattr(keeper, name) is None
    }
    return keeper.model_copy(update=found)


def finished_by(config: Config) -> list[Path]:
    """Return the arenas in which the keeper of a trainer's node commits what was captured."""
    return [] if config.memory is None else [config.arena_directory(config.memory)]


def options_of(keeper: KeeperConfig, run: str, finish: Sequence[Path]) -> KeeperOptions:
    """Return what the keeper is started with; see `completed`.

    Raises
    ------
    ConfigError, StoreError
        A secret or certificate cannot be read.
    """
    files = keeper.tls
    if keeper.secret_file is None:
        secret = RunSecret.from_environment()
    else:
        secret = RunSecret.from_file(keeper.secret_file)
    return KeeperOptions(
        run=run,
        name=_name(keeper),
        hosts=[host for host, _ in keeper.addresses],
        port=keeper.addresses[0][1],
        directory=keeper_directory(keeper, run),
        secret=secret,
        tls=None if files is None else MutualTls(**files.model_dump()),
        budget_bytes=keeper.budget_bytes,
        finish=finish,
    )


def keeper_directory(keeper: KeeperConfig, run: str) -> Path:
    """Return where a configured keeper's record and arena lie; see `default_directory`."""
    if keeper.directory is not None:
        return Path(keeper.directory)
    return default_directory(run, _name(keeper))


def _name(keeper: KeeperConfig) -> str:
    return keeper.name or socket.gethostname()
