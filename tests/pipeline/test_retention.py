"""Which saves may go: the rule, and that no order of commits and deaths loses the last whole chain."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.pipeline.inventory import Inventory, Lineage
from stepwell.pipeline.keys import Series
from stepwell.pipeline.records import IncarnationRecord, Link
from stepwell.pipeline.retention import Removal, plan_retention

A, B, C = (f"{count:06d}-{count:016x}" for count in (1, 2, 3))
ALONE = Lineage(((A, None),))


def links(incarnation: str, *steps: int) -> list[Link]:
    return [Link(incarnation, step) for step in steps]


def steps_of(removals: list[Removal], series: Series) -> list[int]:
    return [removal.link.step for removal in removals if removal.series is series]


def test_nothing_goes_while_there_are_too_few_bases() -> None:
    assert plan_retention(ALONE, links(A, *range(50)), [], keep=1) == []
    assert plan_retention(ALONE, links(A, *range(50)), links(A, 0), keep=2) == []


def test_newest_chains_stay_and_what_leads_to_the_oldest_kept_base_goes() -> None:
    removals = plan_retention(ALONE, links(A, *range(31)), links(A, 0, 10, 20), keep=2)
    assert steps_of(removals, Series.BASE) == [0]
    # That of step 10 leads to what the base holds.
    assert steps_of(removals, Series.STEP) == list(range(11))


def test_keep_1() -> None:
    removals = plan_retention(ALONE, links(A, *range(31)), links(A, 0, 10, 20), keep=1)
    assert steps_of(removals, Series.BASE) == [0, 10]
    assert steps_of(removals, Series.STEP) == list(range(21))


def test_oldest_first_so_that_an_interruption_leaves_the_newest() -> None:
    removals = plan_retention(ALONE, links(A, 3, 1, 2), links(A, 9, 0, 4), keep=1)
    assert removals == sorted(removals, key=lambda removal: removal.link)


def test_dead_branch_goes_only_when_the_living_one_has_its_bases() -> None:
    """B began from step 4 of A: what A did after it leads nowhere."""
    line = Lineage(((B, None), (A, 4)))
    steps = [*links(A, *range(10)), *links(B, 5, 6, 7)]
    assert plan_retention(line, steps, links(A, 0, 8), keep=2) == []
    removals = plan_retention(line, steps, [*links(A, 0, 8), *links(B, 6)], keep=2)
    assert Removal(Series.BASE, Link(A, 8)) in removals
    assert {r.link for r in removals if r.link.incarnation == A} == {*links(A, 0, 5, 6, 7, 8, 9)}
    assert not [r for r in removals if r.link.incarnation == B]
    assert Removal(Series.BASE, Link(A, 0)) not in removals


def test_dead_base_does_not_count_as_one_that_is_kept() -> None:
    line = Lineage(((B, None), (A, 4)))
    bases = [*links(A, 2, 8, 9), *links(B, 6)]
    removals = plan_retention(line, links(A, 3, 4), bases, keep=2)
    assert Removal(Series.BASE, Link(A, 2)) not in removals


def test_keep_0_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        plan_retention(ALONE, [], [], keep=0)


def test_lineage_follows_parents_and_ends_at_a_gap_or_a_circle() -> None:
    inventory = Inventory()
    for name, parent in ((A, None), (B, Link(A, 4)), (C, Link(B, 7))):
        inventory.incarnations[name] = IncarnationRecord("run", name, parent)
    line = inventory.lineage_of(C)
    assert [line.contains(Link(A, step)) for step in (4, 5)] == [True, False]
    assert [line.contains(Link(B, step)) for step in (7, 8)] == [True, False]
    assert line.contains(Link(C, 10**6))
    del inventory.incarnations[B]
    assert not inventory.lineage_of(C).contains(Link(A, 1))
    inventory.incarnations[B] = IncarnationRecord("run", B, Link(C, 1))
    assert inventory.lineage_of(C).contains(Link(B, 7))


@given(seed=st.integers(0, 2**32), keep=st.integers(1, 3))
def test_whatever_is_committed_and_whoever_dies_a_whole_chain_is_left(seed: int, keep: int) -> None:
    """Commits, restores to older steps and interrupted removals, at random: the newest stays reachable."""
    draw = random.Random(seed)
    inventory, steps, bases = Inventory(), set[Link](), set[Link]()
    at: Link | None = None
    for life in range(1, 5):
        name = f"{life:06d}-{life:016x}"
        inventory.incarnations[name] = IncarnationRecord("run", name, at)
        line = inventory.lineage_of(name)
        first = 0 if at is None else at.step + 1
        for step in range(first, first + draw.randrange(1, 12)):
            link = Link(name, step)
            alone = at is None or draw.random() < 0.1
            if alone or draw.random() < 0.3:
                bases.add(link)
            if not alone:
                steps.add(link)
            at = link
            removals = plan_retention(line, steps, bases, keep=keep)
            for removal in removals[: draw.randrange(len(removals) + 1)]:
                (steps if removal.series is Series.STEP else bases).discard(removal.link)
            assert reachable(at, line, steps, bases)
        living = sorted(link for link in steps | bases if line.contains(link))
        at = draw.choice([link for link in living if reachable(link, line, steps, bases)])


def reachable(target: Link, line: Lineage, steps: set[Link], bases: set[Link]) -> bool:
    """Whether a base and every differential after it up to `target` is there."""
    living = sorted(link for link in bases if line.contains(link) and link <= target)
    if not living:
        return False
    between = {step for step in range(living[-1].step + 1, target.step + 1)}
    return between <= {link.step for link in steps if line.contains(link) and link > living[-1]}
