"""Which saves lead to a step: an entry that stands for itself, and the differentials after it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stepwell.errors import NotCommittedError
from stepwell.pipeline.keys import Series
from stepwell.pipeline.records import Link
from stepwell.pipeline.source import SaveSource

__all__ = ["Chain", "resolve_chain"]


@dataclass(frozen=True, slots=True)
class Chain:
    """How to get to `target`.

    Attributes
    ----------
    target : Link
    base : Link or None
        The base to begin with; None where the first of `steps` stands for itself.
    steps : tuple of Link
        Differentials in the order they are applied; empty where the base is the target.
    """

    target: Link
    base: Link | None
    steps: tuple[Link, ...]


async def resolve_chain(
    source: SaveSource, target: Link, *, avoid: Collection[tuple[Series, Link]] = ()
) -> Chain:
    """Walk back from `target` by the links in the manifests to the nearest entry.

    Parameters
    ----------
    source : SaveSource
    target : Link
    avoid : collection of (Series, Link)
        Saves and bases known to be damaged in every tier.

    Raises
    ------
    NotCommittedError
        No unbroken row of committed saves leads to `target`.
    IntegrityError
        A manifest on the way is damaged in every tier.
    """
    steps: list[Link] = []
    seen: set[Link] = set()
    place: Link | None = target
    while place is not None:
        if place in seen:
            raise NotCommittedError(
                f"step {target.step}: the saves before it lead in a circle at step {place.step}"
            )
        seen.add(place)
        if place in source.inventory.bases and (Series.BASE, place) not in avoid:
            return Chain(target, place, tuple(reversed(steps)))
        if place not in source.inventory.steps or (Series.STEP, place) in avoid:
            raise NotCommittedError(
                f"step {target.step} of {target.incarnation} cannot be reached: the save of step "
                f"{place.step} of {place.incarnation} that it builds on is whole in no tier"
            )
        manifest = await source.any_manifest(Series.STEP, place)
        steps.append(place)
        if manifest.self_contained:
            return Chain(target, None, tuple(reversed(steps)))
        place = manifest.previous
    raise NotCommittedError(
        f"step {target.step} of {target.incarnation} cannot be reached: no base is committed before it"
    )
