"""Tiers that are emptied, full, or refuse: what is believed of them, and what the trainer hears.

Over 400 lines: a case is a whole run, trained, broken and restored.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted

import stepwell
from stepwell import assembly
from stepwell.errors import NotCommittedError, PermanentStoreError
from stepwell.pipeline.keys import incarnation_counter
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import ObjectStore
from stepwell.stores.fault import Fault, FaultKind, FaultStore

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DENIED_LATER = Fault(FaultKind.DENIED, "put", "*step/*.pack", after=1, times=None)
AWAY_LATER = Fault(FaultKind.UNAVAILABLE, "create", "stepwell.json", after=1, times=None)  # it stays given up
BASE_EVERY = 2


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


def saved(well: stepwell.SyncWell, job: Job, step: int) -> stepwell.Handle:
    job.step()
    return well.save(step)


def with_outcome(handle: stepwell.Handle, tier: str) -> BaseException | None:
    return handle.future(tier).exception(PATIENCE_S)


@contextmanager
def hearing() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings instead of raising them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told


def heard(told: list[warnings.WarningMessage], what: str) -> int:
    return sum(what in str(one.message) for one in told)


# Tiers of equal reach.


def two_directories(run: Run, log_budget: float | None) -> tuple[Path, Path]:
    """Two equal directories beside the memory."""
    places = run.root / "first", run.root / "second"
    keys = {} if log_budget is None else {"log_budget": log_budget}
    memory = {"kind": "memory", "directory": str(run.memory)}
    far = [{"kind": "directory", "name": path.name, "path": str(path), **keys} for path in places]
    run.keys = {"tiers": [memory, *far]}
    return places


@pytest.mark.parametrize("log_budget", [0.0, None], ids=["every base", "default"])
@pytest.mark.parametrize("emptied", ["first", "second"])
def test_emptied_directory_was_vouched_for_by_another_of_equal_reach(
    run: Run, log_budget: float | None, emptied: str
) -> None:
    """It got no base, so what was acknowledged in it was worth nothing once the other was lost, too."""
    places = {path.name: path for path in two_directories(run, log_budget)}
    other = next(name for name in places if name != emptied)
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            saved(well, job, step)
    shutil.rmtree(places[emptied])
    places[emptied].mkdir()

    job = Job(seed=99)
    with run.open(job) as well:
        back = well.restore()
        assert back is not None
        assert (back.step, back.tier, back.exact) == (2, other, True)
        for step in (3, 4, 5):
            saved(well, job, step).until(emptied, PATIENCE_S)
        well.wait_until_finished(PATIENCE_S)
        assert well.metrics().saves[0].base, "the emptied tier needs one"
        assert well.all_steps(emptied) == [3, 4, 5]
        assert well.all_steps(other) == [0, 1, 2, 3, 4, 5]

    shutil.rmtree(places[other])
    shutil.rmtree(run.memory, ignore_errors=True)
    again, bits = run.restored()
    assert again is not None
    assert (again.step, again.tier, again.exact, again.lost_steps) == (5, emptied, True, 0)
    assert bits == uninterrupted(6)[5]


# Names of lives.


def lives_in(run: Run) -> list[str]:
    return sorted(path.stem for path in run.directory.glob("incarnations/*.json"))


@pytest.mark.parametrize("damage", ["gone", "damaged", "empty"])
@pytest.mark.parametrize("newest_only", [True, False], ids=["newest", "all"])
@pytest.mark.parametrize("saves", [2, 0], ids=["with saves", "without saves"])
def test_two_lives_had_one_number_after_a_record_was_lost(
    run: Run, damage: str, newest_only: bool, saves: int
) -> None:
    """Of two lives with one number, chance would say which is the newer."""
    run.train(range(2))
    job = Job(seed=99)
    with run.crashing(job) as well:
        assert well.restore() is not None
        for step in range(2, 2 + saves):
            saved(well, job, step)
        well.wait_until_finished(PATIENCE_S)
    copy = run.copied("copy", memory=False)
    before = lives_in(copy)
    assert [incarnation_counter(name) for name in before] == [1, 2]
    for name in before[-1:] if newest_only else before:
        path = copy.directory / "incarnations" / f"{name}.json"
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(b"" if damage == "empty" else path.read_bytes()[::-1])
    seen = {*before, *(path.name for path in copy.directory.glob("*-*") if path.is_dir())}
    if damage == "gone" and not saves:
        seen = set(before[:1])  # no trace of the second is left
    if damage == "gone" and not newest_only:
        seen = {path.name for path in copy.directory.glob("*-*") if path.is_dir()}

    newest = 1 + saves
    job = Job(seed=99)
    with copy.crashing(job) as well, hearing():
        back = well.restore()
        assert back is not None
        assert back.step == newest
        assert job.bits() == uninterrupted(4)[newest]
        saved(well, job, newest + 1).until("directory", PATIENCE_S)
    (new,) = set(lives_in(copy)) - set(before)
    assert all(incarnation_counter(new) > incarnation_counter(name) for name in seen)
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.incarnation) == (newest + 1, new)
    assert bits == uninterrupted(5)[newest + 1]


# Who hears of a tier that was given up.


@pytest.mark.parametrize("call", ["wait_until_finished", "check_for_errors", "close"])
def test_tier_given_up_after_the_last_save_was_told_to_nobody(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    run.directory_keys = {"on_error": "degrade"}
    break_tier(monkeypatch, "directory", DENIED_LATER, AWAY_LATER)
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            handle = saved(well, job, step)
        assert isinstance(with_outcome(handle, "directory"), PermanentStoreError)
        handle.until("memory", PATIENCE_S)
        with pytest.warns(UserWarning, match="tier directory is given up, the others go on: 403"):
            getattr(well, call)()
        if call != "close":
            well.check_for_errors()  # told once: a second warning would be an error here


# A full disk.


FULL_STEPS = "*/step/*.pack"
FULL_BASES = "*/base/*"


def full(times: int | None, *keys: str) -> list[Fault]:
    return [Fault(FaultKind.FULL, "put", key, times=times) for key in keys]


@pytest.mark.parametrize(
    "keys", [(FULL_STEPS, FULL_BASES), (FULL_STEPS,), (FULL_BASES,)], ids=["all", "steps", "bases"]
)
def test_full_disk_made_every_save_a_base(
    run: Run, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """Each time it answered again, a base was taken for it, and that did not fit either."""
    run.keys = {"base_every": BASE_EVERY}
    run.directory_keys = {"on_error": "degrade", "log_budget": 0.0}
    break_tier(monkeypatch, "directory", *full(None, *keys))
    job = Job()
    count = 40 * BASE_EVERY
    with hearing() as told, run.open(job) as well:
        for step in range(count):
            handle = saved(well, job, step)
            handle.until("memory", PATIENCE_S)
            with_outcome(handle, "directory")
        idle(well)
        metrics = well.metrics()
    returns = heard(told, "tier directory answers again")
    # Its base and its differentials may fail side by side, each for itself.
    assert heard(told, "tier directory is given up") <= 2 * (1 + returns)
    assert 2 <= returns <= 6, "let off for 1, 2, 4, 8, 16 bases"
    bases = sum(record.base for record in metrics.saves)
    assert bases <= count // BASE_EVERY + returns + 1
    assert metrics.unprotected_steps == 0
    if keys == (FULL_STEPS, FULL_BASES):
        assert "directory" not in metrics.last_committed_step


def test_disk_that_has_room_again_takes_part_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keys = {"base_every": BASE_EVERY}
    run.directory_keys = {"on_error": "degrade", "log_budget": 0.0}
    store = break_tier(monkeypatch, "directory", *full(3, FULL_STEPS, FULL_BASES))
    job = Job()
    steps_max = 80 * BASE_EVERY
    with hearing() as told, run.open(job) as well:
        for step in range(steps_max):
            handle = saved(well, job, step)
            handle.until("memory", PATIENCE_S)
            if with_outcome(handle, "directory") is None:
                break
        assert with_outcome(handle, "directory") is None
        for later in (step + 1, step + 2, step + 3):
            saved(well, job, later).until("directory", PATIENCE_S)
        assert well.metrics().lost_tiers == {}
        assert store().events
        idle(well)
        copy = run.copied("copy", memory=False)
    assert heard(told, "tier directory answers again")
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact) == (later, "directory", True)
    assert bits == uninterrupted(later + 1)[later]


# Deletions.


def kept(well: stepwell.SyncWell, job: Job, steps: range) -> None:
    for step in steps:
        saved(well, job, step).until("directory", PATIENCE_S)
    idle(well)


@pytest.mark.parametrize("kind", [FaultKind.DENIED, FaultKind.UNAVAILABLE, FaultKind.UNANSWERED])
def test_deletion_that_failed_a_few_times_ended_a_run_that_retries(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: FaultKind
) -> None:
    run.keys = {"base_every": BASE_EVERY}
    run.directory_keys = {"on_error": "retry", "keep": 1, "log_budget": 0.0}
    store = break_tier(monkeypatch, "directory", Fault(kind, "delete", times=3))
    job = Job()
    with run.open(job) as well:
        kept(well, job, range(6))
        well.wait_until_finished(PATIENCE_S)
        assert len(store().events) == 3
        assert well.metrics().errors_total["directory"] == 0
        assert well.metrics().lost_tiers == {}
    assert not list(run.directory.glob("*/*/000000000000/*")), "it was removed in the end"


def test_tier_that_cannot_delete_was_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keys = {"base_every": BASE_EVERY}
    run.directory_keys = {"on_error": "degrade", "keep": 1, "log_budget": 0.0}
    break_tier(monkeypatch, "directory", Fault(FaultKind.DENIED, "delete", times=None))
    job = Job()
    with hearing() as told, run.open(job) as well:
        kept(well, job, range(6))
        assert well.metrics().lost_tiers == {}
        assert well.all_steps("directory") == list(range(6))
        copy = run.copied("copy", memory=False)
    assert heard(told, "tier directory keeps what it should let go: 403")
    assert not heard(told, "given up")
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (5, True)
    assert bits == uninterrupted(6)[5]


def test_what_could_not_be_deleted_once_stayed_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keys = {"base_every": BASE_EVERY}
    run.directory_keys = {"on_error": "degrade", "keep": 1, "log_budget": 0.0}
    break_tier(monkeypatch, "directory", Fault(FaultKind.DENIED, "delete", times=2))
    job = Job()
    with hearing() as told, run.open(job) as well:
        for step in range(8):
            kept(well, job, range(step, step + 1))  # a base that still travels puts the next one off
    assert heard(told, "keeps what it should let go") == 2
    assert not list(run.directory.glob("*/*/000000000000/*"))


def test_deletion_that_fails_is_raised_in_the_trainer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keys = {"base_every": BASE_EVERY}
    run.directory_keys = {"on_error": "raise", "keep": 1, "log_budget": 0.0}
    break_tier(monkeypatch, "directory", Fault(FaultKind.DENIED, "delete"))
    job = Job()
    with run.open(job) as well:
        heard_errors: list[str] = []
        for step in range(8):
            try:
                kept(well, job, range(step, step + 1))
                well.check_for_errors()
            except PermanentStoreError as error:
                heard_errors.append(str(error))
                if well.latest_step() != step:  # it was `save` that raised
                    well.save(step).until("directory", PATIENCE_S)
        assert len(heard_errors) == 1
        assert "403 on delete" in heard_errors[0]
        assert well.metrics().lost_tiers == {}
        assert well.latest_step("directory") == well.latest_step("memory")


# A tier that refuses to be read.

NEWEST = "*/step/000000000004/*"
REFUSALS = {
    "newest pack": f"{NEWEST}.pack",
    "newest manifest": f"{NEWEST}.manifest.json",
    "newest commit record": "*/step/000000000004/commit.json",
    "layouts": "layouts/*",
    "base": "*/base/*",
    "everything": "0*",
}


@pytest.fixture
def trained(run: Run) -> Run:
    run.train(range(5))
    return run


@pytest.mark.parametrize("key", REFUSALS.values(), ids=REFUSALS)
def test_restore_went_back_to_an_older_step_where_it_was_not_let_read(
    trained: Run, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    copy = trained.copied("copy", memory=False)
    job = Job(seed=99)
    with monkeypatch.context() as patch:
        break_tier(patch, "directory", Fault(FaultKind.DENIED, "fetch", key, times=None))
        before = job.bits()
        with copy.open(job) as well:
            with pytest.raises(PermanentStoreError, match="403"):
                well.restore()
            assert well.restored is None
        assert job.bits() == before, "nothing was loaded"
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.exact, restored.lost_steps) == (4, True, 0)
    assert bits == uninterrupted(5)[4]


@pytest.mark.parametrize("key", ["*.pack", "*.manifest.json"])
def test_another_tier_serves_for_one_that_refuses(
    trained: Run, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    break_tier(monkeypatch, "memory", Fault(FaultKind.DENIED, "fetch", key, times=None))
    restored, bits = trained.restored()
    assert restored is not None
    assert (restored.step, restored.exact, restored.lost_steps) == (4, True, 0)
    assert any("memory: 403" in fault for fault in restored.faults)
    assert bits == uninterrupted(5)[4]


def test_damage_in_one_tier_and_a_refusal_in_the_other_cost_a_step(
    trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is damaged in the memory may be whole in the directory."""
    for path in trained.objects("directory", "*.pack")[-1:]:
        path.unlink()
    break_tier(monkeypatch, "memory", Fault(FaultKind.DENIED, "fetch", REFUSALS["newest pack"], times=None))
    job = Job(seed=99)
    with trained.open(job) as well, pytest.raises(PermanentStoreError, match="403"):
        well.restore()


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_missing_or_damaged_object_still_means_an_older_step(trained: Run, damage: str) -> None:
    copy = trained.copied("copy", memory=False)
    newest = copy.objects("directory", "*.pack")[-1]
    assert newest.parent.name == "000000000004"
    if damage == "missing":
        newest.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[:-1])
    with hearing() as told:
        restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.exact, restored.lost_steps) == (3, True, 1)
    assert heard(told, "step 3 was restored, 1 steps before the newest")
    assert bits == uninterrupted(4)[3]


# A peer that dies between the bytes of a step and their evidence.


class Mortal(FaultStore):
    """A directory that plays a peer: it dies once, before it takes a given object."""

    def __init__(self, inner: ObjectStore, root: Path, before: str, without: str) -> None:
        super().__init__(inner)
        self.lives = 1
        self._root, self._fatal, self._without = root, before, without

    @property
    def life(self) -> object:
        return self.lives

    async def _before(self, operation: str, key: str, size_bytes: int = 0) -> set[FaultKind]:
        if self.lives == 1 and operation in ("put", "create") and fnmatchcase(key, self._fatal):
            self.lives += 1
            for path in self._root.rglob("*"):
                if path.is_file() and fnmatchcase(str(path.relative_to(self._root)), self._without):
                    path.unlink()
        return await super()._before(operation, key, size_bytes)


def mortal(patch: pytest.MonkeyPatch, run: Run, before: str, without: str) -> Callable[[], Mortal]:
    made: list[Mortal] = []

    def tier(label: str, store: ObjectStore, **settings: object) -> Tier:
        if label == "directory":
            store = Mortal(store, run.directory, before, without)
            made.append(store)
        return Tier(label, store, **settings)  # type: ignore[arg-type]

    patch.setattr(assembly, "Tier", tier)
    return lambda: made[-1]


@pytest.mark.parametrize("without", ["0*", "*/step/*", "*/step/000000000003/*.pack"])
@pytest.mark.parametrize("evidence", ["rank-00000.manifest.json", "commit.json"])
def test_step_that_died_with_its_peer_before_its_evidence_was_acknowledged(
    run: Run, monkeypatch: pytest.MonkeyPatch, evidence: str, without: str
) -> None:
    run.directory_keys = {"on_error": "degrade"}
    store = mortal(monkeypatch, run, f"*/step/000000000003/{evidence}", without)
    job = Job()
    with hearing() as told, run.open(job) as well:
        for step in range(3):
            saved(well, job, step).until("directory", PATIENCE_S)
        handle = saved(well, job, 3)
        with pytest.raises(NotCommittedError, match="began anew"):
            handle.until("directory", PATIENCE_S)
        handle.until("memory", PATIENCE_S)
        assert store().lives == 2
        for step in range(4, 20):
            handle = saved(well, job, step)
            handle.until("memory", PATIENCE_S)
            if with_outcome(handle, "directory") is None:
                break
        saved(well, job, step + 1).until("directory", PATIENCE_S)
        assert 3 not in well.all_steps("directory")
        idle(well)
        copy = run.copied("copy", memory=False)
    assert heard(told, "tier directory")
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (step + 1, True)
    assert bits == uninterrupted(step + 2)[step + 1]


def test_step_that_outlived_the_death_of_its_peer_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = mortal(monkeypatch, run, "*/step/000000000003/rank-00000.manifest.json", "")
    job = Job()
    with run.open(job) as well:
        for step in range(6):
            saved(well, job, step).until("directory", PATIENCE_S)
        assert store().lives == 2
        assert [record.step for record in well.metrics().saves if record.base] == [0]
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (5, True)
    assert bits == uninterrupted(6)[5]
