"""Removing what retention lets go: first the evidence, then the bytes.

A crash in between leaves objects without evidence; they are not committed, are never read, and are
swept by the next ``sweep``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stepwell.pipeline.inventory import Inventory, Lineage, evidence_key
from stepwell.pipeline.keys import Series, commit_key, manifest_key, parse_key, save_prefix
from stepwell.pipeline.records import Link
from stepwell.pipeline.retention import Removal, plan_retention
from stepwell.pipeline.tier import Tier

__all__ = ["reclaim", "remove_save", "sweep"]


async def reclaim(
    tier: Tier,
    inventory: Inventory,
    lineage: Lineage,
    *,
    held: Collection[Link],
    removed: Callable[[Removal], None],
) -> int:
    """Remove from one tier what its retention rule lets go.

    Parameters
    ----------
    held : collection of Link
        Saves that something still reads: neither they nor anything newer goes.
    removed : callable
        Told of each removal once its evidence is gone.

    Returns
    -------
    int
        Number of saves and bases removed.
    """
    holdings = inventory.held_by(tier.name)
    removals = plan_retention(lineage, holdings[Series.STEP], holdings[Series.BASE], keep=tier.keep)
    count = 0
    for removal in removals:
        if any(removal.link >= link for link in held):
            continue
        await remove_save(tier, removal)
        inventory.forget(removal.series, removal.link, tier.name)
        removed(removal)
        count += 1
    return count


async def remove_save(tier: Tier, removal: Removal) -> None:
    """Remove one save or base: commit record, manifest, then everything else below its prefix."""
    link = removal.link
    prefix = save_prefix(removal.series, link.incarnation, link.step)
    if tier.has_commit_records:
        await tier.store.delete(commit_key(removal.series, link.incarnation, link.step))
    await tier.store.delete(manifest_key(removal.series, link.incarnation, link.step, 0))
    await tier.store.delete_dir(prefix.rstrip("/"))


async def sweep(tier: Tier, inventory: Inventory) -> int:
    """Remove what dead writers left: temporary files, and saves that never got their evidence.

    Only for whoever holds the lock of the run.

    Returns
    -------
    int
        Number of prefixes removed.
    """
    await tier.store.sweep_temps()
    committed = inventory.held_by(tier.name)
    known = {(series, link) for series, links in committed.items() for link in links}
    stray: set[tuple[Series, Link]] = set()
    async for incarnation in tier.store.list_dir(""):
        for series in Series:
            if parse_key(f"incarnations/{incarnation}.json") is None:
                continue
            async for name in tier.store.list_dir(f"{incarnation}/{series}"):
                if name.isascii() and name.isdigit() and len(name) == 12:
                    stray.add((series, Link(incarnation, int(name))))
    count = 0
    for series, link in stray - known:
        # Asked again: `inventory` is from when the run was opened, and where a file system lies about
        # locks another process may have committed since.
        if not await tier.store.exists(evidence_key(tier, series, link)):
            await remove_save(tier, Removal(series, link))
            count += 1
    return count
