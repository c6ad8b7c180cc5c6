"""Which saves lead to a step, over lives and around damage."""

from __future__ import annotations

import pytest

from stepwell.errors import IntegrityError, NotCommittedError
from stepwell.pipeline.chain import Chain, resolve_chain
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import Series
from stepwell.pipeline.records import IncarnationRecord, Link

A, B, C = (f"{count:06d}-{count:016x}" for count in (1, 2, 3))


class Written:
    """Stands for a SaveSource: what was committed, and the manifests' links."""

    def __init__(self) -> None:
        self.inventory = Inventory()
        self.manifests: dict[Link, tuple[Link | None, bool]] = {}
        self.damaged: set[Link] = set()
        self.read: list[Link] = []

    def step(self, link: Link, previous: Link | None, *, contained: bool = False) -> None:
        self.inventory.add(Series.STEP, link, "disk")
        self.manifests[link] = (previous, contained)

    def base(self, link: Link) -> None:
        self.inventory.add(Series.BASE, link, "disk")

    async def any_manifest(self, series: Series, link: Link) -> object:
        assert series is Series.STEP
        self.read.append(link)
        if link in self.damaged:
            raise IntegrityError(f"the manifest of step {link.step} is damaged")
        previous, contained = self.manifests[link]
        return type("Manifest", (), {"previous": previous, "self_contained": contained})


async def resolved(source: Written, target: Link, *avoid: tuple[Series, Link]) -> Chain:
    return await resolve_chain(source, target, avoid=avoid)  # type: ignore[arg-type]


@pytest.fixture
def source() -> Written:
    """Life A: base 0, steps 1 to 6, base 4; life B from A's step 5: steps 6 to 8."""
    written = Written()
    written.base(Link(A, 0))
    for step in range(1, 7):
        written.step(Link(A, step), Link(A, step - 1))
    written.base(Link(A, 4))
    written.step(Link(B, 6), Link(A, 5))
    for step in (7, 8):
        written.step(Link(B, step), Link(B, step - 1))
    written.inventory.incarnations = {
        A: IncarnationRecord("run", A),
        B: IncarnationRecord("run", B, Link(A, 5)),
    }
    return written


async def test_nearest_base_and_the_log_after_it(source: Written) -> None:
    assert await resolved(source, Link(A, 6)) == Chain(Link(A, 6), Link(A, 4), (Link(A, 5), Link(A, 6)))
    assert await resolved(source, Link(A, 4)) == Chain(Link(A, 4), Link(A, 4), ())
    assert source.read == [Link(A, 6), Link(A, 5)], "one small document a step, none of the base"


async def test_chain_crosses_lives_by_the_links_of_the_manifests(source: Written) -> None:
    chain = await resolved(source, Link(B, 8))
    assert chain.base == Link(A, 4)
    assert chain.steps == (Link(A, 5), Link(B, 6), Link(B, 7), Link(B, 8))


async def test_damaged_base_is_gone_around_by_the_log_below_it(source: Written) -> None:
    chain = await resolved(source, Link(A, 6), (Series.BASE, Link(A, 4)))
    assert chain.base == Link(A, 0)
    assert [link.step for link in chain.steps] == [1, 2, 3, 4, 5, 6]


async def test_captured_state_is_an_entry_of_its_own(source: Written) -> None:
    source.step(Link(B, 9), None, contained=True)
    source.step(Link(B, 10), Link(B, 9))
    assert await resolved(source, Link(B, 10)) == Chain(Link(B, 10), None, (Link(B, 9), Link(B, 10)))


async def test_hole_in_the_log_is_an_error_that_names_both_steps(source: Written) -> None:
    source.inventory.forget(Series.STEP, Link(A, 5), "disk")
    with pytest.raises(NotCommittedError, match=r"step 8 of 000002.* the save of step 5 of 000001"):
        await resolved(source, Link(B, 8))


async def test_damaged_differential_is_no_way(source: Written) -> None:
    with pytest.raises(NotCommittedError, match="step 6 of 000001"):
        await resolved(source, Link(A, 6), (Series.STEP, Link(A, 5)))
    source.damaged.add(Link(A, 5))
    with pytest.raises(IntegrityError, match="manifest of step 5 is damaged"):
        await resolved(source, Link(A, 6))


async def test_no_base_at_the_end_of_the_log(source: Written) -> None:
    source.step(Link(C, 0), None)
    with pytest.raises(NotCommittedError, match="no base is committed before it"):
        await resolved(source, Link(C, 0))


async def test_links_in_a_circle_end(source: Written) -> None:
    source.step(Link(C, 1), Link(C, 2))
    source.step(Link(C, 2), Link(C, 1))
    with pytest.raises(NotCommittedError, match="in a circle at step 2"):
        await resolved(source, Link(C, 2))


async def test_step_that_is_not_there(source: Written) -> None:
    with pytest.raises(NotCommittedError):
        await resolved(source, Link(C, 3))


def test_candidates_are_the_newest_line_newest_first(source: Written) -> None:
    found = list(source.inventory.candidates())
    assert [link.step for link in found] == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert Link(A, 6) not in found, "what came after the parent is another line"
    assert source.inventory.newest() == Link(B, 8)
    # A life that committed nothing bounds nobody.
    source.inventory.incarnations[C] = IncarnationRecord("run", C, Link(A, 2))
    assert list(source.inventory.candidates()) == found


def test_newest_known_counts_what_an_orderly_end_wrote_down(source: Written) -> None:
    assert source.inventory.newest_known() == Link(B, 8)
    source.inventory.incarnations[B] = IncarnationRecord("run", B, Link(A, 5), ended=Link(B, 9))
    assert source.inventory.newest_known() == Link(B, 9)
    assert source.inventory.newest() == Link(B, 8)
    assert Inventory().newest_known() is None
