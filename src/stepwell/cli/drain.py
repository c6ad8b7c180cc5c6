"""``stepwell drain``: bring what a dead run left in this machine's memory to tiers that survive more."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Annotated

import typer

from stepwell.cli.output import JsonOption, Meter, bytes_text, print_json, table
from stepwell.cli.reading import SourceArgument, arena_of, config_of
from stepwell.config import Config, PeerTier
from stepwell.errors import ConfigError, NotCommittedError
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.drain import Drained, drain
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.replicate import Replicate

__all__ = ["drain_run"]


def drain_run(
    source: SourceArgument,
    remove: Annotated[
        bool, typer.Option("--remove", help="Let go of the memory once everything has arrived.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Bring the newest save in this machine's memory to the directory and to object storage.

    For a machine that goes, at the end of a job's time, where the run was killed and cannot be started once
    more. A run that lives is left alone (exit code 2): it does this itself at SIGTERM and at its end.
    Exit code 3 where nothing is in memory.
    """
    config = config_of(source)
    drained = _drain(config, remove=remove, quiet=as_json)
    if as_json:
        rows = [
            {
                "tier": one.tier,
                "step": one.step,
                "saves": one.saves,
                "bases": one.bases,
                "bytes": one.size_bytes,
            }
            for one in drained
        ]
        print_json({"source": source, "tiers": rows, "removed": remove})
    else:
        table(
            f"step {drained[0].step} of {source} can be restored from",
            ("tier", "saves brought ", "bases ", "bytes "),
            ((one.tier, one.saves, one.bases, bytes_text(one.size_bytes)) for one in drained),
        )
    return 0


def _drain(config: Config, *, remove: bool, quiet: bool) -> list[Drained]:
    from stepwell.assembly import is_lossy, open_tiers

    directory = arena_of(config)
    # Peers' memory is on other machines, and what they hold stays there.
    kept = [tier for tier in config.tiers if not isinstance(tier, PeerTier)]
    if len(kept) < 2:
        raise ConfigError("this run has no directory and no object storage to drain to")
    if not directory.is_dir():
        raise NotCommittedError(f"there is no memory of this run at {directory}")
    with ExitStack() as opened:
        record, tiers, arena = open_tiers(config.model_copy(update={"tiers": tuple(kept)}), opened)
        assert arena is not None
        replicate = Replicate(config.stall_limit_s)

        async def work(meter: Meter) -> list[Drained]:
            commit = Commit(replicate)
            for tier in tiers:
                await commit.check_run(tier, record)
            inventory = await Inventory.read(tiers, replicate)
            return await drain(tiers, inventory, commit, record, lossy=is_lossy(config), progress=meter)

        with Meter("draining", quiet=quiet) as meter:
            drained = asyncio.run(work(meter))
        if remove:
            arena.remove()
    return drained
