"""A tier that fails: told to the trainer, once, and nothing that was safe is lost."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted

import stepwell
from stepwell.errors import NotCommittedError, PermanentStoreError
from stepwell.stores.fault import Fault, FaultKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DENIED_PACK = Fault(FaultKind.DENIED, "put", "*step/000000000002/*.pack")
DENIED_COMMIT = Fault(FaultKind.DENIED, "create", "*step/000000000002/commit.json")
DENIED_LATER = Fault(FaultKind.DENIED, "put", "*step/*.pack", after=1, times=None)


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


@pytest.mark.parametrize("fault", [DENIED_PACK, DENIED_COMMIT], ids=["pack", "commit record"])
def test_training_went_on_after_a_failed_save_and_nobody_knew(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """orbax 605: the failure reaches the next call, the handle raises, the save after it commits."""
    break_tier(monkeypatch, "directory", fault)
    job = Job()
    with run.open(job) as well:
        for step in (0, 1):
            saved(well, job, step).until(None, PATIENCE_S)
        failed = saved(well, job, 2)
        with pytest.raises(PermanentStoreError, match="403"):
            failed.until("directory", PATIENCE_S)
        failed.until("memory", PATIENCE_S)
        assert not failed.done()
        assert well.latest_step("directory") == 1
        assert well.latest_step("memory") == 2
        job.step()
        with pytest.raises(PermanentStoreError, match="403"):
            well.save(3)
        well.save(3).until(None, PATIENCE_S)  # raised once; the trainer may go on
        assert well.metrics().saves[-1].base, "the log has a hole, so a base closes it"
        well.wait_until_finished(PATIENCE_S)
        assert well.all_steps("directory") == [0, 1, 3]
        assert well.metrics().errors_total == {"memory": 0, "directory": 1}
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 3
    assert restored.exact
    assert bits == uninterrupted(4)[3]


def test_failure_is_raised_by_check_for_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_tier(monkeypatch, "directory", DENIED_PACK)
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            handle = saved(well, job, step)
        with pytest.raises(PermanentStoreError):
            handle.until("directory", PATIENCE_S)
        with pytest.raises(PermanentStoreError, match=r"step/000000000002"):
            well.check_for_errors()
        well.check_for_errors()


def test_failure_is_raised_on_leaving_the_block(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_tier(monkeypatch, "directory", DENIED_PACK)
    job = Job()
    with pytest.raises(PermanentStoreError, match="403"):
        whole_life(run, job, 3)
    assert run.memory.exists(), "the newest step is in memory alone, so the memory stays"
    monkeypatch.undo()
    restored, bits = run.restored()
    assert restored is not None
    assert restored.step == 2
    assert bits == uninterrupted(3)[2]


def test_error_of_the_body_is_not_hidden_by_that_of_the_close(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_tier(monkeypatch, "directory", DENIED_PACK)
    job = Job()
    with pytest.raises(ZeroDivisionError) as raised:
        whole_life(run, job, 3, error=ZeroDivisionError())
    assert "403" in raised.value.__notes__[0]


def test_many_failures_are_raised_together_so_that_a_later_save_gets_through(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that catches and goes on must not hear of old failures for ever after."""
    break_tier(monkeypatch, "directory", Fault(FaultKind.DENIED, "put", "*/step/*.pack", after=1, times=3))
    job = Job()
    heard = 0
    with run.open(job) as well:
        for step in range(12):
            job.step()
            try:
                handle = well.save(step)
            except PermanentStoreError:
                heard += 1
                handle = well.save(step)
            for tier in ("memory", "directory"):
                with_outcome(handle, tier)
        well.wait_until_finished(PATIENCE_S)
        assert heard >= 2
        assert well.latest_step("directory") == 11


def test_failed_save_leaves_retention_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bases that hold the last good step stay while nothing newer is committed."""
    run.keys = {"base_every": 2}
    run.directory_keys = {"keep": 1, "on_error": "degrade"}
    store = break_tier(
        monkeypatch, "directory", Fault(FaultKind.DENIED, "*", "*/00000000000[4-9]/*", times=None)
    )
    job = Job()
    with warnings.catch_warnings(action="ignore"), run.open(job) as well:
        for step in range(10):
            with_outcome(saved(well, job, step), "directory")
        assert well.latest_step("directory") == 3
        assert not [event for event in store().events if event.operation == "delete"]
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 3
    assert bits == uninterrupted(4)[3]


def test_saves_after_a_hole_are_not_acknowledged_before_the_base(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is written, but the save it builds on is not there: it must not count."""
    store = break_tier(
        monkeypatch,
        "directory",
        Fault(FaultKind.STALL, "put", "*step/000000000002/*.pack"),
        DENIED_PACK,
    )
    job = Job()
    with run.open(job) as well:
        handles = [saved(well, job, step) for step in range(4)]
        handles[3].until("memory", PATIENCE_S)
        store().release()
        with pytest.raises(PermanentStoreError):
            handles[2].until("directory", PATIENCE_S)
        with pytest.raises(NotCommittedError, match="an earlier save is missing"):
            handles[3].until("directory", PATIENCE_S)
        job.step()
        with pytest.raises(PermanentStoreError):
            well.save(4)
        well.save(4).until("directory", PATIENCE_S)
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 4
    assert restored.lost_steps == 0
    assert bits == uninterrupted(5)[4]


def test_step_after_a_base_that_did_not_arrive_was_acknowledged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base without a differential is what the next save builds on, in each tier."""
    store = break_tier(
        monkeypatch,
        "directory",
        Fault(FaultKind.STALL, "put", "*base/000000000002/*", times=None),
        Fault(FaultKind.DENIED, "put", "*base/000000000002/*", times=None),
    )
    job = Job()
    with run.open(job) as well:
        for step in range(2):
            saved(well, job, step)
        with well.paused():
            job.step()
        alone = well.save(2)
        later = saved(well, job, 3)
        later.until("memory", PATIENCE_S)
        assert not later.future("directory").done(), "the base still travels"
        assert well.latest_step("directory") == 1
        store().release()
        with pytest.raises(PermanentStoreError):
            alone.until("directory", PATIENCE_S)
        with pytest.raises(NotCommittedError):
            later.until("directory", PATIENCE_S)
        job.step()
        with pytest.raises(PermanentStoreError):
            well.save(4)
        well.save(4).until("directory", PATIENCE_S)
        assert well.all_steps("directory") == [0, 1, 4]


def test_every_step_that_no_tier_has_is_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keys = {"tiers": [{"kind": "directory", "path": str(run.directory)}]}
    break_tier(monkeypatch, "directory", DENIED_PACK)
    job = Job()
    with run.open(job) as well:
        for step in range(3):
            with_outcome(saved(well, job, step), "directory")
        assert well.latest_step() == 1  # also waits for the background to have told everything
        assert well.metrics().unprotected_steps == 1
        with pytest.raises(PermanentStoreError):
            well.check_for_errors()
