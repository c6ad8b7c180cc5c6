"""Tiers that come and go, piece by piece: what is believed of a store that began a new life, and for how long
one that fails again is let off.

Over 400 lines: every case stands on the one peer and the one rig that begin the file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Callable, Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest
from runner_rig import LAYOUT, LIFE, PATIENCE_S, Rig

from stepwell.errors import (
    NoSpaceError,
    NotCommittedError,
    PermanentStoreError,
    StepwellError,
    TransientStoreError,
)
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.inventory import Lineage
from stepwell.pipeline.jobs import BaseJob
from stepwell.pipeline.keys import Series, layout_key, manifest_key, pack_key
from stepwell.pipeline.ledger import Ledger
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack import HEADER_BYTES, PackKind
from stepwell.pipeline.presence import PAUSE_BASES_MAX
from stepwell.pipeline.records import Link
from stepwell.pipeline.tier import OnError, Tier
from stepwell.stores.fault import Fault, FaultKind, FaultStore
from stepwell.stores.file import FileStore

EVERYTHING = "*"
PACKS = "*.pack"
LAYOUTS = "layouts/*"
NOTHING = ""


class Mortal(FaultStore):
    """A peer in the small: it dies by plan, and comes back with or without what it held."""

    def __init__(self, root: Path, *plan: Fault) -> None:
        super().__init__(FileStore(root), 1, plan)
        self.root = root
        self.lives = 1
        self.list_faults: list[StepwellError] = []
        self.at_list: Callable[[], None] = lambda: None
        self._deaths: list[tuple[str, str, str]] = []

    @property
    def life(self) -> object:
        return self.lives

    def die(self, without: str) -> None:
        """Begin a new life without the objects whose keys match; directories stay, stores remember them."""
        self.lives += 1
        for path in self.files():
            if fnmatchcase(path, without):
                (self.root / path).unlink()

    def die_before(self, operation: str, key: str, without: str) -> None:
        """Die once, just before an operation reaches the store."""
        self._deaths.append((operation, key, without))

    def files(self) -> list[str]:
        return [str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()]

    async def _before(self, operation: str, key: str, size_bytes: int = 0) -> set[FaultKind]:
        left = await super()._before(operation, key, size_bytes)
        for death in self._deaths[:1]:
            if death[0] == operation and fnmatchcase(key, death[1]):
                self._deaths.remove(death)
                self.die(death[2])
        return left

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        if self.list_faults:
            raise self.list_faults.pop(0)
        async for name in super().list_dir(prefix):
            yield name
        self.at_list()


class PresenceRig(Rig):
    """The rig's runner; its far tier is a mortal peer."""

    def __init__(self, root: Path, *plan: Fault) -> None:
        super().__init__(root)
        self.store.close()
        self.far = self.tiers[1]
        self.peer = Mortal(root / "far", *plan)
        self.store = self.far.store = self.peer
        self.far.life = self.peer.life

    def __enter__(self) -> PresenceRig:
        super().__enter__()
        return self

    def gradient(self, step: int) -> SaveHandle:
        """Submit a differential that builds on the save before it."""
        job = self.job(step)
        job.kind = PackKind.GRADIENT
        self.runner.submit(job)
        return job.handle

    def base(self, step: int, ready: concurrent.futures.Future[None] | None = None) -> SaveHandle:
        """Submit a base that stands alone."""
        if ready is None:
            ready = concurrent.futures.Future()
            ready.set_result(None)
        digest: concurrent.futures.Future[object] = concurrent.futures.Future()
        digest.set_result(None)
        job = BaseJob(
            link=Link(LIFE, step),
            handle=self.handle(step),
            alone=True,
            layout=LAYOUT,
            header=lambda: {"tree": {}, "layout": LAYOUT.hash},
            ready=ready,
            payload=memoryview(bytearray(HEADER_BYTES + LAYOUT.size_bytes + 65_536)),
            publish=None,
            release=lambda published: None,
            digest=digest,
        )
        self.runner.submit(job)
        return job.handle

    def same_life(self) -> bool:
        return self.runner.call(self.runner.presence.same_life(self.far, self.far.hold)).result(PATIENCE_S)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds on the runner's loop, turn by turn."""

        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline
            self.quiet()

    def tried_again(self) -> bool:
        """Give the far tier up for a full disk, try it after a base; whether it takes part again."""
        self.far.lost = "no space"
        self.runner.call(self.runner.presence.try_again(self.far)).result(PATIENCE_S)
        return self.far.lost is None

    def backs(self) -> list[object]:
        return [event[3] for event in self.told.events if event[0] == "back"]


@pytest.fixture
def rig(memory_directory: Path) -> Iterator[PresenceRig]:
    with PresenceRig(memory_directory) as made:
        yield made


def outcome(handle: SaveHandle, tier: str = "far") -> BaseException | None:
    return handle.future(tier).exception(PATIENCE_S)


async def nothing(tier: Tier) -> None:
    """Enter a tier without a word."""


def committed(rig: PresenceRig, steps: range) -> None:
    for step in steps:
        assert outcome(rig.submit(step)) is None


# Pauses.


def test_full_disk_that_answered_was_let_back_in_after_every_base(rig: PresenceRig) -> None:
    rig.runner.presence.enter = nothing
    tries = [rig.tried_again() for _ in range(268)]
    returns = [number for number, back in enumerate(tries) if back]
    pauses = [later - earlier - 1 for earlier, later in pairwise(returns)]
    assert returns[0] == 0, "the first fault may pass at once"
    assert PAUSE_BASES_MAX == 64
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_pauses_of_old_faults_were_held_against_a_tier_that_has_held_a_save_since(rig: PresenceRig) -> None:
    rig.runner.presence.enter = nothing
    assert [rig.tried_again() for _ in range(7)] == [True, False, True, False, False, True, False]
    rig.far.lost = None
    committed(rig, range(1, 2))
    assert [rig.tried_again() for _ in range(3)] == [True, False, True]


def test_base_that_fits_beside_steps_that_do_not_ended_the_pauses(rig: PresenceRig) -> None:
    """Room for a base and none for packs: nothing counts there, so it is no sign of health."""
    rig.runner.presence.enter = nothing
    assert [rig.tried_again() for _ in range(3)] == [True, False, True]
    rig.peer.plan = (Fault(FaultKind.FULL, "put", PACKS, times=None),)
    rig.peer._matches, rig.peer._hits = [0], [0]
    rig.far.base_expected(5, alone=False)
    assert isinstance(outcome(rig.submit(5)), NoSpaceError)
    assert [rig.tried_again() for _ in range(5)] == [False, False, True, False, False]


def test_tier_that_does_not_answer_was_let_off_although_it_cost_nobody_a_base(rig: PresenceRig) -> None:
    rig.runner.presence.enter = nothing
    rig.far.retries = 0
    rig.peer.list_faults = [TransientStoreError("503") for _ in range(5)]
    assert [rig.tried_again() for _ in range(6)] == [False] * 5 + [True]


def test_tier_that_answers_and_refuses_is_told_of(rig: PresenceRig) -> None:
    rig.runner.presence.enter = nothing
    rig.peer.list_faults = [PermanentStoreError("403")]
    assert not rig.tried_again()
    assert ("refused", -1, "far", "403") in rig.told.events
    assert rig.tried_again()


# A new life of the store.


def test_peer_that_came_back_with_all_it_held_goes_on(rig: PresenceRig) -> None:
    committed(rig, range(1, 4))
    rig.peer.die(without=NOTHING)
    assert rig.same_life()
    assert rig.far.life == rig.peer.life
    assert outcome(rig.gradient(4)) is None
    assert rig.backs() == []


@pytest.mark.parametrize("error", [PermanentStoreError("403"), TransientStoreError("503")])
def test_peer_whose_list_failed_once_after_its_death_was_believed_whole(
    rig: PresenceRig, error: StepwellError
) -> None:
    committed(rig, range(1, 4))
    rig.far.retries = 0
    rig.peer.die(without=EVERYTHING)
    rig.peer.list_faults = [error]
    with pytest.raises(type(error)):
        rig.same_life()
    assert not rig.same_life()
    assert rig.backs() == ["began anew, without what it held"]
    assert not rig.far.reaches(4)


def test_steps_after_a_list_that_failed_were_acknowledged_by_an_emptied_peer(rig: PresenceRig) -> None:
    committed(rig, range(1, 4))
    rig.peer.die_before("put", "*/000000000004/*.pack", without=EVERYTHING)
    rig.peer.list_faults = [PermanentStoreError("403")]
    assert isinstance(outcome(rig.gradient(4)), PermanentStoreError)
    assert isinstance(outcome(rig.gradient(5)), NotCommittedError)
    assert isinstance(outcome(rig.gradient(6)), NotCommittedError)
    assert isinstance(outcome(rig.base(7)), NotCommittedError), "the first who finds it emptied"
    assert outcome(rig.base(8)) is None
    assert outcome(rig.gradient(9)) is None


def test_two_that_met_a_new_life_at_one_time_got_different_answers(rig: PresenceRig) -> None:
    committed(rig, range(1, 4))
    rig.peer.die(without=EVERYTHING)
    same_life, far = rig.runner.presence.same_life, rig.far

    async def both() -> tuple[bool, bool]:
        first, second = await asyncio.gather(same_life(far, far.hold), same_life(far, far.hold))
        return first, second

    assert rig.runner.call(both()).result(PATIENCE_S) == (False, False)
    assert rig.backs() == ["began anew, without what it held"], "told once"


def test_step_whose_evidence_was_on_its_way_while_another_found_the_tier_empty_was_acknowledged(
    memory_directory: Path,
) -> None:
    """A base meets the new life first; the step was written in it, but what it builds on is gone."""
    stalled = Fault(FaultKind.STALL, "put", "*/step/000000000004/*.manifest.json")
    with PresenceRig(memory_directory, stalled) as rig:
        committed(rig, range(1, 4))
        rig.peer.die(without="*/step/*")  # the layouts are still there
        handle = rig.gradient(4)
        rig.until(lambda: bool(rig.peer.events))
        assert not rig.same_life()
        rig.peer.release()
        assert isinstance(outcome(handle), NotCommittedError)
        assert rig.peer.files() != []


def test_peer_that_died_again_while_it_was_looked_at_was_believed_whole(rig: PresenceRig) -> None:
    """The second look compares with what the first one left of the inventory."""
    committed(rig, range(1, 4))
    rig.peer.die(without=EVERYTHING)

    def die_once() -> None:
        rig.peer.at_list = lambda: None
        rig.peer.lives += 1

    rig.peer.at_list = die_once
    assert not rig.same_life()
    assert not rig.far.reaches(4)


def test_look_that_ended_in_a_fault_after_another_death_left_the_tier_believed_whole(
    rig: PresenceRig,
) -> None:
    committed(rig, range(1, 4))
    rig.peer.die(without=EVERYTHING)

    def die_once() -> None:
        rig.peer.at_list = lambda: None
        rig.peer.lives += 1

    rig.peer.at_list = die_once
    original = rig.runner.inventory.read_again
    answers: list[bool] = []

    async def read_again(tier: Tier) -> bool:
        if answers:
            rig.runner.inventory.read_again = original  # type: ignore[method-assign]
            raise PermanentStoreError("403")
        answers.append(await original(tier))
        return answers[0]

    rig.runner.inventory.read_again = read_again  # type: ignore[method-assign]
    with pytest.raises(PermanentStoreError):
        rig.same_life()
    assert answers == [False]
    assert not rig.same_life()


def test_last_tier_could_be_given_up_after_one_that_was_given_up_began_anew(rig: PresenceRig) -> None:
    """A step on its way finds the lost tier empty: that does not bring the tier back."""
    committed(rig, range(1, 4))
    for tier in rig.tiers:
        tier.on_error = OnError.DEGRADE
    ledger = Ledger([tier.name for tier in rig.tiers])
    rig.runner.presence._events = ledger
    assert ledger.give_up(rig.far, NoSpaceError("full"))
    rig.peer.die(without=EVERYTHING)
    assert not rig.same_life()
    assert not ledger.give_up(rig.tiers[0], NoSpaceError("full")), "no tier would be left"


# Between the bytes of a save and their evidence.


@pytest.mark.parametrize("without", [EVERYTHING, PACKS, LAYOUTS])
@pytest.mark.parametrize("operation", ["put", "create"])
def test_step_whose_bytes_died_before_their_evidence_was_acknowledged(
    rig: PresenceRig, operation: str, without: str
) -> None:
    """Nothing was held there before, so a look at what is committed finds nothing amiss."""
    what = "manifest.json" if operation == "put" else "commit.json"
    rig.peer.die_before(operation, f"*/000000000001/*{what}", without=without)
    handle = rig.submit(1)
    with pytest.raises(NotCommittedError, match="began anew"):
        handle.until("far", PATIENCE_S)
    handle.until("near", PATIENCE_S)
    assert ("committed", 1, "far") not in rig.told.events
    assert rig.far.stranded, "its evidence is removed with the rest"


def test_step_whose_bytes_outlived_the_death_before_their_evidence_counts(rig: PresenceRig) -> None:
    rig.peer.die_before("put", "*/000000000001/*manifest.json", without=NOTHING)
    assert outcome(rig.submit(1)) is None
    assert {pack_key(Series.STEP, LIFE, 1, 0), layout_key(LAYOUT.hash)} <= set(rig.peer.files())


def test_layout_that_died_with_the_peer_was_thought_to_be_there(rig: PresenceRig) -> None:
    """It is written once for a tier; in a new life it has to be written again."""
    committed(rig, range(1, 3))
    rig.peer.die(without=EVERYTHING)
    assert isinstance(outcome(rig.submit(3)), NotCommittedError)
    assert outcome(rig.submit(4)) is None
    assert layout_key(LAYOUT.hash) in rig.peer.files()


def test_layout_of_a_save_that_failed_before_the_peer_died_was_thought_to_be_there(
    memory_directory: Path,
) -> None:
    """Nothing was committed there, so the new life is found whole; but the layout died with the old one."""
    with PresenceRig(memory_directory, Fault(FaultKind.DENIED, "put", "*/000000000001/*.pack")) as rig:
        assert isinstance(outcome(rig.submit(1)), PermanentStoreError)
        assert layout_key(LAYOUT.hash) in rig.peer.files()
        rig.peer.die(without=EVERYTHING)
        if outcome(rig.submit(2)) is None:
            assert layout_key(LAYOUT.hash) in rig.peer.files(), "acknowledged, and cannot be read"


def test_base_that_was_written_while_another_found_the_tier_empty_was_acknowledged_without_its_layout(
    memory_directory: Path,
) -> None:
    stalled = Fault(FaultKind.STALL, "put", "*/base/000000000004/*.manifest.json")
    with PresenceRig(memory_directory, stalled) as rig:
        committed(rig, range(1, 4))
        rig.peer.die(without=EVERYTHING)
        handle = rig.base(4)
        rig.until(lambda: bool(rig.peer.events))
        assert not rig.same_life()
        rig.peer.release()
        if outcome(handle) is None:
            assert layout_key(LAYOUT.hash) in rig.peer.files(), "acknowledged, and cannot be read"


# Saves that wait for a base.


def waiting(rig: PresenceRig, ready: concurrent.futures.Future[None], steps: range) -> list[SaveHandle]:
    """A base that is not captured yet, and saves that wait for it in the far tier."""
    rig.far.begin_later(0)
    rig.base(steps.start - 1, ready)
    handles = [rig.gradient(step) for step in steps]
    rig.until(lambda: len(rig.far._parked) == len(handles))
    return handles


@pytest.mark.parametrize("without", [EVERYTHING, PACKS, LAYOUTS])
@pytest.mark.parametrize("count", [1, 3])
def test_saves_that_waited_for_a_base_died_before_it_and_were_acknowledged(
    rig: PresenceRig, without: str, count: int
) -> None:
    ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    handles = waiting(rig, ready, range(1, 1 + count))
    rig.peer.die(without=without)
    ready.set_result(None)
    for handle in handles:
        assert isinstance(outcome(handle), NotCommittedError)
    assert outcome(rig.base(10)) is None
    assert outcome(rig.gradient(11)) is None


@pytest.mark.parametrize("without", [EVERYTHING, PACKS, LAYOUTS, "*/base/*"])
@pytest.mark.parametrize("count", [1, 3])
def test_saves_that_waited_for_a_base_died_after_it_and_were_acknowledged(
    rig: PresenceRig, without: str, count: int
) -> None:
    ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    handles = waiting(rig, ready, range(1, 1 + count))
    rig.peer.die_before("create", "*/step/000000000001/commit.json", without=without)
    ready.set_result(None)
    for handle in handles:
        assert isinstance(outcome(handle), NotCommittedError)
    assert outcome(rig.base(10)) is None
    assert outcome(rig.gradient(11)) is None


def test_acknowledged_saves_have_everything_they_need(rig: PresenceRig) -> None:
    """The peer comes back whole while a save gets its evidence: whatever counts then is all there."""
    ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    handles = waiting(rig, ready, range(1, 4))
    rig.peer.die_before("create", "*/step/000000000002/commit.json", without=NOTHING)
    ready.set_result(None)
    counted = [handle.step for handle in handles if outcome(handle) is None]
    assert counted == list(range(1, 1 + len(counted))), "none counts after one that does not"
    there = set(rig.peer.files())
    for step in counted:
        keys = {pack_key(Series.STEP, LIFE, step, 0), manifest_key(Series.STEP, LIFE, step, 0)}
        assert {*keys, layout_key(LAYOUT.hash)} <= there
        assert manifest_key(Series.BASE, LIFE, 0, 0) in there


# What is left behind.


def test_stranded_bytes_were_forgotten_when_they_could_not_be_removed(memory_directory: Path) -> None:
    denied = Fault(FaultKind.DENIED, "delete", "*/000000000001/*", times=2)
    with PresenceRig(memory_directory, denied) as rig:
        rig.runner.begin_life(Lineage(((LIFE, None),)), nothing)
        committed(rig, range(1, 2))
        objects = (ObjectEntry(pack_key(Series.STEP, LIFE, 1, 0), 1, "0" * 32),)
        manifest = Manifest("run", LIFE, 1, 0, 1, "gradient", None, False, objects, ())
        rig.far.stranded.append(manifest)
        for _ in range(2):
            rig.runner.call(rig.runner.reclaim(rig.far)).result(PATIENCE_S)
            assert rig.far.stranded == [manifest]
        assert [event[0] for event in rig.told.events].count("not removed") == 2
        rig.runner.call(rig.runner.reclaim(rig.far)).result(PATIENCE_S)
        assert rig.far.stranded == []
        assert not [path for path in rig.peer.files() if "/step/" in path]
        assert [event[0] for event in rig.told.events].count("not removed") == 2
