"""Which saves of a tier may go: pure planning, no I/O.

The rule (design: watermark and reclamation): the newest `keep` committed bases on the live lineage
and every save after the oldest of them stay. Anything older, and anything on a dead branch, goes
only when that many newer bases are committed in the same tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.pipeline.inventory import Lineage
from stepwell.pipeline.keys import Series
from stepwell.pipeline.records import Link

__all__ = ["Removal", "plan_retention"]


@dataclass(frozen=True, slots=True)
class Removal:
    """One save or base that nothing needs any more."""

    series: Series
    link: Link


def plan_retention(
    lineage: Lineage,
    steps: Iterable[Link],
    bases: Iterable[Link],
    *,
    keep: int,
) -> list[Removal]:
    """List what may be removed from one tier, oldest first.

    Parameters
    ----------
    lineage : Lineage
        Of the running incarnation.
    steps, bases : iterable of Link
        Everything committed in the tier.
    keep : int
        Chains that stay; at least 1.

    Returns
    -------
    list of Removal
        Empty while fewer than ``keep`` bases are committed on the live lineage.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    all_bases = set(bases)
    live = sorted(base for base in all_bases if lineage.contains(base))
    if len(live) < keep:
        return []
    oldest = live[-keep]
    stay = set(live[-keep:])
    removals = [
        Removal(Series.STEP, link)
        for link in set(steps)
        # The base at `oldest` holds what the differential of the same step leads to.
        if not lineage.contains(link) or link <= oldest
    ]
    removals += [Removal(Series.BASE, base) for base in all_bases - stay]
    return sorted(removals, key=lambda removal: (removal.link, removal.series))
