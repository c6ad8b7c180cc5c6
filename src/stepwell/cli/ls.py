"""``stepwell ls``: lives of the run, what each tier holds of them, and how much room it takes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime

from stepwell.cli.output import JsonOption, Meter, bytes_text, print_json, ranges_text, table
from stepwell.cli.reading import MemoryOption, OpenRun, SourceArgument, open_run
from stepwell.errors import MissingObjectError
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import Series, parse_key
from stepwell.pipeline.records import IncarnationRecord, Link
from stepwell.pipeline.tier import Tier

__all__ = ["ls"]


@dataclass
class Holding:
    """What one tier holds of one incarnation."""

    steps: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    step_bytes: int = 0
    base_bytes: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return {
            "steps": self.steps,
            "bases": self.bases,
            "step_bytes": self.step_bytes,
            "base_bytes": self.base_bytes,
        }


Holdings = dict[str, dict[str, Holding]]
"""By incarnation, then by tier."""


def ls(source: SourceArgument, memory: MemoryOption = None, as_json: JsonOption = False) -> int:
    """List the incarnations of a run, their committed steps and bases by tier, and their bytes.

    Only committed steps count. A step may be listed that recovery would refuse because an object
    of its chain is damaged; `verify` finds that out.
    """
    with open_run(source, memory=memory) as opened, Meter("listing", quiet=as_json) as meter:
        inventory, holdings = asyncio.run(_read(opened, meter))
        names = sorted(set(inventory.incarnations) | set(holdings))
        if as_json:
            print_json(_document(source, opened, inventory, holdings, names))
        else:
            _show(source, opened, inventory, holdings, names)
    if inventory.damaged:
        return 1
    return 3 if inventory.is_empty else 0


async def _read(opened: OpenRun, meter: Meter) -> tuple[Inventory, Holdings]:
    inventory = await Inventory.read(opened.tiers)
    holdings: Holdings = {}
    for tier in opened.tiers:
        for series, links in inventory.held_by(tier.name).items():
            for link in sorted(links):
                held = holdings.setdefault(link.incarnation, {}).setdefault(tier.name, Holding())
                (held.steps if series is Series.STEP else held.bases).append(link.step)
        await _weigh(tier, holdings, meter)
    return inventory, holdings


async def _weigh(tier: Tier, holdings: Holdings, meter: Meter) -> None:
    """Add up the bytes of every object of one tier, committed or not."""
    count = 0
    async for key in tier.store.list():
        parsed = parse_key(key)
        if parsed is None or parsed.series is None:
            continue
        held = holdings.setdefault(parsed.incarnation, {}).setdefault(tier.name, Holding())
        try:
            size_bytes = await tier.store.getsize(key)
        except MissingObjectError:
            continue  # reclaimed by the run itself since it was listed
        if parsed.series is Series.STEP:
            held.step_bytes += size_bytes
        else:
            held.base_bytes += size_bytes
        count += 1
        meter(count, None)


def _link_json(link: Link | None) -> dict[str, object] | None:
    return None if link is None else {"incarnation": link.incarnation, "step": link.step}


def _document(
    source: str, opened: OpenRun, inventory: Inventory, holdings: Holdings, names: list[str]
) -> dict[str, object]:
    newest = inventory.newest()
    rows = []
    for name in names:
        record = inventory.incarnations.get(name)
        rows.append(
            {
                "incarnation": name,
                "parent": _link_json(record.parent) if record else None,
                "world": record.world if record else None,
                "created_unix_s": record.created_unix_s if record else None,
                "ended": _link_json(record.ended) if record else None,
                "tiers": {tier: held.as_json() for tier, held in holdings.get(name, {}).items()},
            }
        )
    shown_newest = _link_json(newest)
    if newest is not None and shown_newest is not None:
        shown_newest["tiers"] = sorted(
            inventory.steps.get(newest, set()) | inventory.bases.get(newest, set())
        )
    return {
        "source": source,
        "run": opened.record and opened.record.run,
        "name": opened.record and opened.record.name,
        "tiers": [{"name": tier.name, "url": tier.store.url} for tier in opened.tiers],
        "newest": shown_newest,
        "incarnations": rows,
        "damaged": inventory.damaged,
    }


def _show(source: str, opened: OpenRun, inventory: Inventory, holdings: Holdings, names: list[str]) -> None:
    rows = []
    for name in names:
        record = inventory.incarnations.get(name)
        first = (name, _when(record), _parent_text(record))
        for tier in opened.tiers:
            held = holdings.get(name, {}).get(tier.name)
            if held is None:
                continue
            rows.append(
                (
                    *first,
                    tier.name,
                    ranges_text(held.steps),
                    ranges_text(held.bases),
                    bytes_text(held.step_bytes),
                    bytes_text(held.base_bytes),
                )
            )
            first = ("", "", "")
        if first[0]:
            rows.append((*first, "", "none", "none", "", ""))
    headings = ("incarnation", "begun", "from", "tier", "steps", "bases", "steps' bytes ", "bases' bytes ")
    table(f"{opened.title} in {source}", headings, rows)
    newest = inventory.newest()
    print(f"newest: step {newest.step} of {newest.incarnation}" if newest else "nothing is committed")
    for key, reason in inventory.damaged.items():
        print(f"damaged: {key}: {reason}")


def _when(record: IncarnationRecord | None) -> str:
    if record is None or not record.created_unix_s:
        return ""
    return datetime.fromtimestamp(record.created_unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _parent_text(record: IncarnationRecord | None) -> str:
    if record is None:
        return "(no record)"
    if record.parent is None:
        return "the beginning"
    return f"step {record.parent.step} of {record.parent.incarnation.split('-')[0]}"
