"""What a failing tier does by policy: raise, degrade, retry."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted, within

import stepwell
from stepwell.errors import NoSpaceError, PermanentStoreError, StoreError
from stepwell.stores.fault import Fault, FaultKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DENIED_PACK = Fault(FaultKind.DENIED, "put", "*step/000000000002/*.pack")
DENIED_COMMIT = Fault(FaultKind.DENIED, "create", "*step/000000000002/commit.json")
DENIED_LATER = Fault(FaultKind.DENIED, "put", "*step/*.pack", after=1, times=None)
AWAY_LATER = Fault(FaultKind.UNAVAILABLE, "create", "stepwell.json", after=1, times=None)  # it stays given up


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


def saved(well: stepwell.SyncWell, job: Job, step: int) -> stepwell.Handle:
    job.step()
    return well.save(step)


def with_outcome(handle: stepwell.Handle, tier: str) -> BaseException | None:
    return handle.future(tier).exception(PATIENCE_S)


def whole_life(run: Run, job: Job, total: int, error: Exception | None = None) -> None:
    with run.open(job) as well:
        for step in range(total):
            with_outcome(saved(well, job, step), "directory")
            if error is not None and step == total - 1:
                raise error


def test_degrade_gives_the_tier_up_and_the_other_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.directory_keys = {"on_error": "degrade"}
    break_tier(monkeypatch, "directory", DENIED_LATER, AWAY_LATER)
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            handle = saved(well, job, step)
            with_outcome(handle, "directory")
        job.step()
        with pytest.warns(UserWarning, match="tier directory is given up"):
            handle = well.save(3)
        handle.until("memory", PATIENCE_S)
        with pytest.raises(StoreError, match="given up"):
            handle.until("directory", PATIENCE_S)
        well.wait_until_finished(PATIENCE_S)
        assert "403" in well.metrics().lost_tiers["directory"]
        assert well.latest_step("memory") == 3
        assert well.latest_step("directory") == 1
    assert run.memory.exists()
    monkeypatch.undo()
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier) == (3, "memory")
    assert bits == uninterrupted(4)[3]


def test_a_tier_that_was_given_up_takes_part_again_after_a_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.directory_keys = {"on_error": "degrade"}
    break_tier(monkeypatch, "directory", DENIED_LATER, AWAY_LATER)
    job = Job()
    with warnings.catch_warnings(action="ignore"), run.open(job) as well:
        for step in range(4):
            with_outcome(saved(well, job, step), "directory")
    monkeypatch.undo()
    job = Job(seed=99)
    with run.open(job) as well:
        assert well.restore() is not None
        saved(well, job, 4).until("directory", PATIENCE_S)
        idle(well)
        copy = run.copied("copy", memory=False)
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 4
    assert bits == uninterrupted(5)[4]


def test_degrade_of_the_last_tier_raises(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no tier left nothing is protected, and that is never only a warning."""
    run.keys = {"on_error": "degrade", "tiers": [{"kind": "directory", "path": str(run.directory)}]}
    break_tier(monkeypatch, "directory", DENIED_LATER)
    job = Job()
    with pytest.raises(PermanentStoreError, match="403"):
        whole_life(run, job, 6)


def test_retry_outlasts_a_fault_and_commits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.directory_keys = {"on_error": "retry"}
    store = break_tier(
        monkeypatch, "directory", Fault(FaultKind.FULL, "put", "*step/000000000001/*.pack", times=3)
    )
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            saved(well, job, step)
        well.wait_until_finished(PATIENCE_S)
        assert well.all_steps("directory") == [0, 1, 2]
        assert [event.kind for event in store().events] == [FaultKind.FULL] * 3
        assert well.metrics().errors_total["directory"] == 0


def test_retry_ends_at_its_deadline_and_tells(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keys = {"stall_limit_s": 0.3}
    run.directory_keys = {"on_error": "retry"}
    break_tier(
        monkeypatch, "directory", Fault(FaultKind.FULL, "put", "*step/000000000001/*.pack", times=None)
    )
    job = Job()
    with run.open(job) as well, within(20):
        saved(well, job, 0).until(None, PATIENCE_S)
        handle = saved(well, job, 1)
        with pytest.raises(NoSpaceError):
            handle.until("directory", PATIENCE_S)
        with pytest.raises(NoSpaceError):
            well.check_for_errors()


def test_retry_does_not_wait_for_what_another_try_cannot_change(run: Run) -> None:
    """A restart finds the run's record there: that is an answer, not a fault to outwait."""
    run.keys = {"on_error": "retry", "stall_limit_s": 20.0}
    run.train(range(2))
    with within(10):
        restored, _ = run.restored()
    assert restored is not None
    assert restored.step == 1


@pytest.mark.parametrize(
    ("kind", "operation"),
    [(FaultKind.UNAVAILABLE, "*"), (FaultKind.UNANSWERED, "put"), (FaultKind.UNANSWERED, "create")],
    ids=["503", "unanswered put", "unanswered create"],
)
def test_some_transient_errors_were_not_retried(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: FaultKind, operation: str
) -> None:
    """s3fs 858: each kind of transient error twice, then it works: the step commits."""
    break_tier(monkeypatch, "directory", Fault(kind, operation, "*/step/000000000001/*", times=2))
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            saved(well, job, step)
        well.wait_until_finished(PATIENCE_S)
        assert well.all_steps("directory") == [0, 1, 2]


def test_a_refusal_is_not_retried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = break_tier(
        monkeypatch, "directory", Fault(FaultKind.DENIED, "put", "*/step/000000000001/*", times=None)
    )
    job = Job()
    with run.open(job) as well:
        saved(well, job, 0)
        handle = saved(well, job, 1)
        with pytest.raises(PermanentStoreError):
            handle.until("directory", PATIENCE_S)
        assert len(store().events) == 1
        with pytest.raises(PermanentStoreError):
            well.check_for_errors()
