"""``stepwell show``: the configuration of a run, or everything about one save without its payload."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Annotated

import typer

from stepwell.cli.output import JsonOption, bytes_text, print_json, table
from stepwell.cli.reading import MemoryOption, OpenRun, SourceArgument, open_run
from stepwell.config import load_config, show_config
from stepwell.errors import NotCommittedError
from stepwell.pipeline.casts import DERIVED, cast_names
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import Area, Series, parse_key
from stepwell.pipeline.layout import ITEM_BYTES, Layout
from stepwell.pipeline.manifest import Manifest
from stepwell.pipeline.pack_reader import PackReader
from stepwell.pipeline.records import Link
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.source import SaveSource
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.zarr_base import read_base
from stepwell.pipeline.zarr_group import GroupPlan

__all__ = ["show"]

StepArgument = Annotated[int | None, typer.Argument(help="Step to show; the newest if not given.", min=0)]


@dataclass
class TensorRow:
    """One tensor of a save.

    Attributes
    ----------
    size_bytes, stored_bytes : float
        Raw, and as stored; over all updates of the save. A chunk that holds several tensors
        is divided among them by their raw bytes.
    count : int
        How many updates hold it.
    derived_from : set of str
        The tensors that it is stored as a cast of, in at least one chunk.
    choices : set of str
        What a lossy pipeline keeps it as, and why; empty where there is no such pipeline.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    size_bytes: float = 0
    stored_bytes: float = 0
    count: int = 0
    encodings: set[str] = field(default_factory=set)
    derived_from: set[str] = field(default_factory=set)
    choices: set[str] = field(default_factory=set)

    @property
    def encodings_text(self) -> str:
        """The encodings for people, with what it is derived from."""
        names = sorted(self.encodings - {DERIVED} if self.derived_from else self.encodings)
        names += [f"{DERIVED} from {name}" for name in sorted(self.derived_from)]
        return ", ".join(names) or "none"

    def as_json(self) -> dict[str, object]:
        """Return the fields by name, bytes as whole numbers."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "kind": self.kind,
            "size_bytes": round(self.size_bytes),
            "stored_bytes": round(self.stored_bytes),
            "count": self.count,
            "encodings": sorted(self.encodings),
            "derived_from": sorted(self.derived_from),
            "choices": sorted(self.choices),
        }


@dataclass(frozen=True, slots=True)
class Shown:
    """What there is to say about one save."""

    tier: Tier
    tiers: tuple[str, ...]
    manifest: Manifest
    header: dict[str, object]
    tensors: list[TensorRow]


def show(
    source: SourceArgument,
    step: StepArgument = None,
    config: Annotated[bool, typer.Option("--config", help="Show the whole configuration instead.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Its base, not its differential.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show everything that is not a tensor, too.")] = False,
    incarnation: Annotated[
        str | None, typer.Option(help="Incarnation (its name or a beginning of it); the newest if not given.")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="Read from this tier only.")] = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show the tensors of one save: shape, dtype, bytes, encodings; or the configuration."""
    if config:
        loaded = load_config(source)
        if as_json:
            print_json(loaded.model_dump(mode="json"))
        else:
            typer.echo(show_config(loaded), nl=False)
        return 0
    with open_run(source, memory=memory) as opened:
        shown = asyncio.run(_read(opened, step, incarnation, tier, base))
        if as_json:
            print_json(_document(source, shown))
        else:
            _print(shown, tree)
    return 0


async def _read(
    opened: OpenRun, step: int | None, incarnation: str | None, tier_name: str | None, base: bool
) -> Shown:
    tiers = opened.tier(tier_name)
    inventory = await Inventory.read(tiers)
    series, link = _choose(inventory, step, incarnation, base)
    holders = (inventory.bases if series is Series.BASE else inventory.steps)[link]
    held_by = tuple(tier for tier in tiers if tier.name in holders)
    commit = Commit(Replicate())
    manifest = await commit.recover(held_by[0], series, link)
    source = SaveSource(held_by, inventory, commit)
    layouts = {name: await source.layout(name) for name in manifest.layouts}
    rows: dict[tuple[str, int], TensorRow] = {}
    header: dict[str, object] = {}
    packs = [entry for entry in manifest.objects if _is_pack(entry.key)]
    if packs:
        for entry in packs:
            header |= await _read_pack(held_by[0], entry.key, layouts, rows)
    else:
        header = await _read_group(held_by[0], manifest, layouts[manifest.layouts[0]], rows)
    return Shown(held_by[0], tuple(tier.name for tier in held_by), manifest, header, list(rows.values()))


def _choose(
    inventory: Inventory, step: int | None, incarnation: str | None, base: bool
) -> tuple[Series, Link]:
    """Return the newest committed save that fits what was asked for."""
    found = inventory.bases if base else {**inventory.bases, **inventory.steps}
    fitting = [
        link
        for link in found
        if (step is None or link.step == step) and link.incarnation.startswith(incarnation or "")
    ]
    if not fitting:
        wanted = f"{'base of ' if base else ''}step {'(any)' if step is None else step}"
        where = f" in incarnation {incarnation}" if incarnation else ""
        steps = sorted({link.step for link in found})
        there = f"there are steps {steps[0]} to {steps[-1]}" if steps else "nothing is committed"
        raise NotCommittedError(f"{wanted}{where} is not committed; {there}")
    link = max(fitting)
    return (Series.BASE if base or link not in inventory.steps else Series.STEP), link


def _is_pack(key: str) -> bool:
    parsed = parse_key(key)
    return parsed is not None and parsed.area is Area.PACK


async def _read_pack(
    tier: Tier, key: str, layouts: dict[str, Layout], rows: dict[tuple[str, int], TensorRow]
) -> dict[str, object]:
    """Read the index of a pack and share the bytes of its chunks among their tensors."""

    async def fetch(start: int, length: int) -> memoryview:
        return await tier.store.fetch(key, start, length)

    pack = await PackReader(fetch, await tier.store.getsize(key), f"{tier.name}: {key}").open()
    chosen = _choices(pack.header)
    for chunk in pack.rows.values():
        layout = layouts.get(chunk.layout)
        if layout is None:
            continue  # small values travel without a layout of their own
        ratio = chunk.size_bytes / chunk.raw_bytes if chunk.raw_bytes else 0.0
        sources = cast_names(layout, chunk.part, chunk.encodings)
        for piece in layout.chunks[chunk.part].pieces:
            row = _row(rows, layout, piece.tensor)
            size_bytes = (piece.stop - piece.start) * ITEM_BYTES[row.dtype]
            row.kind = str(chunk.kind)
            row.size_bytes += size_bytes
            row.stored_bytes += size_bytes * ratio
            row.count += piece.start == 0
            row.encodings |= {str(encoding["id"]) for encoding in chunk.encodings}
            row.derived_from |= {sources[piece.tensor]} if piece.tensor in sources else set()
            row.choices |= chosen.get(chunk.key, set())
    return pack.header


def _choices(header: dict[str, object]) -> dict[str, set[str]]:
    """Return what was chosen for each chunk, by key; see ``stepwell.pipeline.loop.Loop.header``."""
    found: dict[str, set[str]] = {}
    choices = header.get("choices")
    for choice, keys in choices.items() if isinstance(choices, dict) else ():
        for key in keys if isinstance(keys, list) else ():
            found.setdefault(str(key), set()).add(str(choice))
    return found


async def _read_group(
    tier: Tier, manifest: Manifest, layout: Layout, rows: dict[tuple[str, int], TensorRow]
) -> dict[str, object]:
    """Read the root of a zarr base; its arrays follow from the layout."""
    plan = GroupPlan(layout)
    reader = await read_base(tier.store, manifest, plan)
    for index, spec in enumerate(layout.tensors):
        row = _row(rows, layout, index)
        row.size_bytes, row.count, row.encodings = spec.size_bytes, 1, {"bytes", "crc32c"}
    for objects in plan.objects:
        for item in objects:
            _row(rows, layout, item.piece.tensor).stored_bytes += item.stored_bytes
    return reader.header


def _row(rows: dict[tuple[str, int], TensorRow], layout: Layout, index: int) -> TensorRow:
    spec = layout.tensors[index]
    return rows.setdefault((layout.hash, index), TensorRow(spec.name, spec.shape, spec.dtype, str(spec.kind)))


def _document(source: str, shown: Shown) -> dict[str, object]:
    manifest = shown.manifest
    return {
        "source": source,
        "incarnation": manifest.incarnation,
        "step": manifest.step,
        "kind": manifest.kind,
        "tier": shown.tier.name,
        "tiers": list(shown.tiers),
        "previous": manifest.previous and manifest.previous.as_json(),
        "self_contained": manifest.self_contained,
        "rank": manifest.rank,
        "world": manifest.world,
        "size_bytes": manifest.size_bytes,
        "objects": [{"key": entry.key, "size_bytes": entry.size_bytes} for entry in manifest.objects],
        "digest": manifest.digest,
        "environment": dict(manifest.environment),
        "tensors": [row.as_json() for row in shown.tensors],
        "header": shown.header,
    }


def _print(shown: Shown, tree: bool) -> None:
    manifest = shown.manifest
    what = "base" if manifest.kind == "base" else f"{manifest.kind} differential"
    leads_on = "stands alone" if manifest.previous is None else f"after step {manifest.previous.step}"
    title = (
        f"step {manifest.step} of {manifest.incarnation}: {what}, {leads_on}, in {', '.join(shown.tiers)}, "
        f"{bytes_text(manifest.size_bytes)}"
    )
    lossy = any(row.choices for row in shown.tensors)
    if lossy:
        bound = shown.header.get("bound")
        title += ", " + ("no bound known" if bound is None else f"within {bound:.3g} of what was saved")
    headings = ("tensor", "kind", "dtype", "shape", "bytes ", "stored ", "encodings", "kept as")
    table(
        title,
        headings if lossy else headings[:-1],
        (
            (
                row.name,
                row.kind + (f" x{row.count}" if row.count > 1 else ""),
                row.dtype,
                "x".join(map(str, row.shape)) or "scalar",
                bytes_text(row.size_bytes),
                bytes_text(row.stored_bytes),
                row.encodings_text,
                *(["; ".join(sorted(row.choices))] if lossy else []),
            )
            for row in shown.tensors
        ),
    )
    if tree:
        typer.echo(json.dumps(shown.header, indent=2, ensure_ascii=False))
