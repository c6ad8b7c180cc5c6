"""When a save counts in a tier: only where everything that it builds on is committed."""

from __future__ import annotations

import pytest

from stepwell.errors import NotCommittedError
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.keys import Series, incarnation_name, pack_key
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import ObjectStore

LIFE = incarnation_name(1, 1)


class Nothing:
    """A store that nobody asks."""


def new_tier() -> Tier:
    store: ObjectStore = Nothing()  # type: ignore[assignment]
    return Tier("disk", store)


def begun() -> Tier:
    """A tier with a committed base at step 0."""
    tier = new_tier()
    tier.base_expected(0, alone=True)
    arrived(tier, 0)
    return tier


def written(tier: Tier, step: int) -> SaveHandle:
    handle = SaveHandle(step, ["disk"])
    if not tier.hopeless(handle) and tier.written(handle, manifest(step)):
        handle.resolve("disk")
    return handle


def manifest(step: int) -> Manifest:
    objects = (ObjectEntry(pack_key(Series.STEP, LIFE, step, 0), 1, "0" * 32),)
    return Manifest("run", LIFE, step, 0, 1, "gradient", None, False, objects, ())


def arrived(tier: Tier, step: int) -> None:
    """What the runner does when a base is committed."""
    while (parked := tier.next_parked(step)) is not None:
        parked[0].resolve("disk")
    tier.base_written(step)


def state(handle: SaveHandle) -> str:
    future = handle.future()
    if not future.done():
        return "waits"
    return "counts" if future.exception() is None else "lost"


def test_log_without_holes_counts_at_once() -> None:
    tier = begun()
    assert [state(written(tier, step)) for step in (1, 2, 3)] == ["counts"] * 3


def test_saves_wait_for_the_first_base() -> None:
    tier = new_tier()
    tier.base_expected(0, alone=True)
    waiting = [written(tier, step) for step in (1, 2)]
    assert [state(one) for one in waiting] == ["waits", "waits"]
    arrived(tier, 0)
    assert [state(one) for one in waiting] == ["counts", "counts"]


def test_nothing_counts_while_no_base_is_on_its_way() -> None:
    assert state(written(new_tier(), 1)) == "lost"


def test_captured_state_stands_for_itself() -> None:
    tier = new_tier()
    arrived(tier, 0)  # what the runner tells for one
    assert state(written(tier, 0)) == "counts"
    assert state(written(tier, 1)) == "counts"


def test_save_after_a_lost_one_is_lost_until_a_base() -> None:
    tier = begun()
    tier.broken_at(5)
    handle = written(tier, 6)
    assert state(handle) == "lost"
    with pytest.raises(NotCommittedError, match="step 6 is not committed in tier disk: an earlier save"):
        handle.until()
    assert not tier.reaches(5)
    assert tier.reaches(4)
    tier.base_expected(7, alone=False)
    waiting = [written(tier, step) for step in (7, 8)]
    assert [state(one) for one in waiting] == ["waits", "waits"]
    arrived(tier, 7)
    assert [state(one) for one in (*waiting, written(tier, 9))] == ["counts"] * 3


def test_base_from_before_a_save_that_was_given_up_does_not_close_the_hole() -> None:
    """Its differential failed, the next save was given up, then the base came: step 7 led nowhere."""
    tier = begun()
    tier.base_expected(5, alone=False)
    tier.broken_at(5)
    given_up = SaveHandle(6, ["disk"])
    assert tier.hopeless(given_up)
    arrived(tier, 5)
    assert state(written(tier, 7)) == "lost"
    tier.base_expected(8, alone=False)
    waiting = written(tier, 8)
    arrived(tier, 8)
    assert state(waiting) == "counts"


def test_later_fault_does_not_let_an_older_base_count() -> None:
    tier = begun()
    tier.newest = 9
    tier.begin_anew()
    tier.broken_at(7)
    arrived(tier, 8)
    assert state(written(tier, 10)) == "lost"


def test_save_from_before_the_hole_still_counts() -> None:
    """Writes of a tier are in order, but a base is announced as soon as it is captured."""
    tier = begun()
    tier.base_expected(5, alone=True)
    assert state(written(tier, 3)) == "counts"
    assert state(written(tier, 4)) == "counts"
    assert state(written(tier, 6)) == "waits"


def test_base_alone_is_what_later_saves_build_on() -> None:
    """No differential leads to it: without the base, step 6 would be acknowledged for nothing."""
    tier = begun()
    tier.base_expected(5, alone=True)
    later = written(tier, 6)
    tier.base_lost(5)
    assert state(later) == "lost"
    assert state(written(tier, 7)) == "lost"
    tier.base_expected(8, alone=False)
    assert state(written(tier, 7)) == "lost", "it lies in the hole for ever"
    kept = written(tier, 8)
    arrived(tier, 8)
    assert state(kept) == "counts"


def test_base_beside_a_whole_log_changes_nothing() -> None:
    tier = begun()
    tier.base_expected(5, alone=False)
    assert state(written(tier, 5)) == "counts"
    tier.base_lost(5)
    assert state(written(tier, 6)) == "counts"


def test_differential_that_fails_beside_the_base_that_is_on_its_way() -> None:
    """The base of the same step or a later one stands for it."""
    tier = begun()
    tier.base_expected(5, alone=True)
    tier.broken_at(4)
    later = written(tier, 6)
    assert state(later) == "waits"
    arrived(tier, 5)
    assert state(later) == "counts"
    tier = begun()
    tier.broken_at(3)
    tier.base_expected(5, alone=False)
    tier.broken_at(5)
    later = written(tier, 6)
    arrived(tier, 5)
    assert state(later) == "counts"


def test_base_older_than_the_hole_does_not_close_it() -> None:
    tier = begun()
    tier.base_expected(3, alone=False)
    tier.broken_at(5)
    arrived(tier, 3)
    assert state(written(tier, 6)) == "lost"


def test_second_hole_while_waiting_for_the_base_of_the_first() -> None:
    tier = begun()
    tier.broken_at(2)
    tier.base_expected(4, alone=False)
    waiting = written(tier, 4)
    tier.broken_at(6)
    assert state(waiting) == "lost", "not known to be whole while its base travels behind a new hole"
    arrived(tier, 4)
    assert state(written(tier, 7)) == "lost"
    tier.base_expected(8, alone=False)
    arrived(tier, 8)
    assert state(written(tier, 9)) == "counts"


def test_step_written_while_the_next_base_is_announced_was_lost_after_a_restore() -> None:
    """The base of step 6 is told of as soon as it is captured, when step 5 is still to be written."""
    tier = new_tier()
    tier.begin_whole()
    tier.base_expected(6, alone=False)
    assert state(written(tier, 5)) == "counts"
    assert state(written(tier, 6)) == "counts"


def test_restored_tier_that_lacks_a_part_begins_with_the_next_base() -> None:
    tier = new_tier()
    tier.begin_later(11)
    assert tier.reaches(10)
    assert state(written(tier, 11)) == "lost"
    tier.base_expected(12, alone=False)
    kept = written(tier, 12)
    arrived(tier, 12)
    assert state(kept) == "counts"


def test_stranded_packs_are_remembered_for_removal() -> None:
    tier = begun()
    tier.base_expected(5, alone=True)
    written(tier, 6)
    tier.base_lost(5)
    assert [one.step for one in tier.stranded] == [6]


def test_hole_that_opens_while_waiting_saves_are_committed_stays_open() -> None:
    """Committing takes time; what fails meanwhile is not closed by the base before it."""
    tier = begun()
    tier.base_expected(5, alone=True)
    waiting = [written(tier, step) for step in (6, 7)]
    parked = tier.next_parked(5)
    assert parked is not None
    tier.broken_at(8)
    parked[0].resolve("disk")
    assert tier.next_parked(5) is None
    tier.base_written(5)
    assert [state(one) for one in waiting] == ["counts", "lost"]
    assert state(written(tier, 9)) == "lost"


def test_save_that_comes_late_to_a_hole_that_a_newer_base_closed_was_acknowledged() -> None:
    """It still waited in the queue when the base behind it was committed; what it builds on is missing."""
    tier = begun()
    tier.newest = 56
    tier.begin_anew()
    tier.base_expected(57, alone=False)
    arrived(tier, 57)
    assert state(written(tier, 56)) == "lost"
    assert state(written(tier, 57)) == "counts", "the late one opens no new hole"
    assert tier.needs_base is None
    tier.broken_at(56)
    assert state(written(tier, 58)) == "counts"


def test_saves_before_a_base_without_a_differential_count_although_they_come_after_it() -> None:
    tier = begun()
    tier.base_expected(57, alone=True)
    arrived(tier, 57)
    assert state(written(tier, 55)) == "counts"
    tier.broken_at(56)
    assert state(written(tier, 56)) == "lost"
    assert state(written(tier, 58)) == "counts"


def test_save_that_comes_late_to_a_hole_before_the_last_one_was_acknowledged() -> None:
    tier = begun()
    for first, base in ((5, 10), (20, 30)):
        tier.broken_at(first)
        tier.base_expected(base, alone=False)
        arrived(tier, base)
    tier.base_expected(40, alone=True)
    arrived(tier, 40)
    late = {step: state(written(tier, step)) for step in (4, 7, 15, 25, 35)}
    assert late == {4: "counts", 7: "lost", 15: "counts", 25: "lost", 35: "counts"}
    assert state(written(tier, 41)) == "counts"


def test_late_fault_makes_the_hole_longer_that_the_next_base_closed_and_no_other() -> None:
    tier = begun()
    for first, base in ((5, 10), (20, 30)):
        tier.broken_at(first)
        tier.base_expected(base, alone=False)
        arrived(tier, base)
    tier.broken_at(3)
    tier.broken_at(17)
    late = {step: state(written(tier, step)) for step in (2, 4, 15, 18, 31)}
    assert late == {2: "counts", 4: "lost", 15: "counts", 18: "lost", 31: "counts"}


def test_holes_remembered_stay_few_and_no_save_in_them_counts() -> None:
    tier = begun()
    for number in range(1, 101):
        tier.broken_at(10 * number)
        tier.base_expected(10 * number + 5, alone=False)
        arrived(tier, 10 * number + 5)
    assert len(tier.closed) < 20
    assert {state(written(tier, 10 * number + 2)) for number in range(1, 101)} == {"lost"}
    assert state(written(tier, 1008)) == "counts"
