"""``stepwell verify``: read every byte of a run and name what is damaged or missing."""

from __future__ import annotations

import asyncio

import typer

from stepwell.cli.output import JsonOption, Meter, print_json, table
from stepwell.cli.reading import MemoryOption, OpenRun, SourceArgument, open_run
from stepwell.pipeline.verify import Fault, verify_tier

__all__ = ["verify"]


def verify(source: SourceArgument, memory: MemoryOption = False, as_json: JsonOption = False) -> int:
    """Check every object of a run: records, manifests, packs, bases, layouts.

    Exit code 1 when anything is damaged, cut short or missing, with the name of each such object.
    The memory tier is checked only with --memory: while its run lives, it changes under the reader.
    """
    with open_run(source, memory=memory) as opened:
        faults = asyncio.run(_verify(opened, quiet=as_json))
        if as_json:
            rows = [{"tier": tier, "key": fault.key, "what": fault.what} for tier, fault in faults]
            tiers = [{"name": tier.name, "url": tier.store.url} for tier in opened.tiers]
            print_json({"source": source, "tiers": tiers, "ok": not faults, "faults": rows})
        elif faults:
            table(
                f"{len(faults)} damaged in {source}",
                ("tier", "object", "what"),
                ((tier, fault.key, fault.what) for tier, fault in faults),
            )
        else:
            typer.echo(f"ok: every object in {', '.join(tier.name for tier in opened.tiers)} is whole")
    return 1 if faults else 0


async def _verify(opened: OpenRun, *, quiet: bool) -> list[tuple[str, Fault]]:
    faults = []
    for tier in opened.tiers:
        with Meter(f"verifying {tier.name}", quiet=quiet) as meter:
            faults += [(tier.name, fault) for fault in await verify_tier(tier.store, progress=meter)]
    return faults
