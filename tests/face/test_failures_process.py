"""Processes that die, fork, or open a run twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from failure_rig import Job, Run, uninterrupted, within
from zygote import Zygote

import stepwell
from stepwell.errors import LockedError

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


def test_second_opener_in_the_same_process_is_refused(run: Run) -> None:
    with run.open(Job()), pytest.raises(LockedError, match="this process"):
        run.open(Job())
    run.open(Job()).close()


def test_second_opener_in_another_process_is_refused(run: Run, zygote: Zygote) -> None:
    with run.open(Job()):
        child = zygote.start("hold", run.config())
        refused = child.until("refused")
        assert refused["kind"] == "LockedError"
        assert child.status() == 0
    child = zygote.start("hold", run.config())
    child.until("open")
    with pytest.raises(LockedError, match=f"locked by process {child.pid}"):
        run.open(Job())
    child.send()
    assert child.status() == 0


def test_memory_alone_is_locked_too(run: Run) -> None:
    """Two runs that share only the arena must not both write there."""
    with run.open(Job()):
        other = Run(run.root, {"tiers": [{"kind": "memory", "directory": str(run.memory)}]})
        with pytest.raises(LockedError):
            other.open(Job())


def test_lock_of_a_killed_process_is_free_again(run: Run, zygote: Zygote) -> None:
    """CPython 82300: kill -9 the owner; the next start takes over at once."""
    child = zygote.start("hold", run.config())
    child.until("open")
    child.signal(signal.SIGKILL)
    assert child.status() == -signal.SIGKILL
    run.open(Job()).close()


def test_a_failed_opening_leaves_no_lock(run: Run) -> None:
    for _ in range(2):
        with pytest.raises(stepwell.ConfigError):
            run.open(Job(), stall_limit=3)
    job = Job()
    with pytest.raises(stepwell.UsageError, match="model"):
        stepwell.open_sync(run.config(), model=3, optimizer=job.optimizer)
    run.open(job).close()


def test_use_in_a_forked_child_hung(run: Run, zygote: Zygote) -> None:
    """s3fs 914: every call of the child raises at once, and its training stays its own."""
    child = zygote.start("fork", run.config())
    child.until("exact")
    calls = [event for event in child.events if event["event"] == "call"]
    assert {call["name"] for call in calls} == {
        "save",
        "restore",
        "latest_step",
        "wait_until_finished",
        "check_for_errors",
        "metrics",
        "until",
        "steps",
    }
    for call in calls:
        assert call["kind"] == "UsageError", call
        assert "forked" in str(call["message"])
        assert float(str(call["seconds"])) < 1
    trained = next(event for event in child.events if event["event"] == "trained")
    assert float(str(trained["seconds"])) < 5
    child.signal(signal.SIGKILL)
    child.status()
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (3, True)
    assert bits == uninterrupted(4)[3]


@pytest.mark.parametrize("tier", ["memory", "directory"])
@pytest.mark.parametrize("kill_at", [0, 1, 2, 3, 5, 6, 7, 10, 13, 18, 24])
def test_kill_at_a_write_boundary_gives_an_old_or_the_new_step(
    run: Run, zygote: Zygote, tier: str, kill_at: int
) -> None:
    """SciStudio 167 and others: whatever the moment, what comes back is whole and not older than told."""
    config = run.config(base_every=3)
    child = zygote.start("train", config, total=6, tier=tier, kill_at=kill_at, base_at=[3], wait=True)
    child.rest()
    assert child.status() in (-signal.SIGKILL, 0)
    check_both_tiers(run, child.newest("ack", "memory"), child.newest("ack", "directory"))


def check_both_tiers(run: Run, memory: int, directory: int) -> None:
    """Restore from the directory alone, then from both; each time what was acknowledged, or newer."""
    if not run.directory.exists():
        assert directory == -1
    else:
        alone = run.copied("alone", memory=False)
        check(alone, directory)
    check(run, max(memory, directory))


def check(run: Run, acknowledged: int) -> None:
    restored, bits = run.restored()
    if restored is None:
        assert acknowledged == -1
        return
    assert restored.exact
    assert restored.step >= acknowledged
    assert bits == uninterrupted(12)[restored.step]


@pytest.mark.parametrize("moment", [3, 6, 9, 13, 17, 21])
def test_killed_at_any_moment_twice_in_a_row_training_goes_on_bit_for_bit(
    run: Run, zygote: Zygote, moment: int
) -> None:
    config = run.config(base_every=4)
    told = {"memory": -1, "directory": -1}
    for life in range(2):
        child = zygote.start("train", config, total=12, base_at=[2 + life])
        for _ in range(moment):
            if child.read() is None:
                break
        child.signal(signal.SIGKILL)
        child.rest()
        child.status()
        for tier in told:
            told[tier] = max(told[tier], child.newest("ack", tier))
    check_both_tiers(run, told["memory"], told["directory"])


def test_open_with_deadline_of_the_lock(run: Run, zygote: Zygote) -> None:
    """A refusal comes at once: nobody waits for a lock."""
    child = zygote.start("hold", run.config())
    child.until("open")
    with within(5), pytest.raises(LockedError):
        run.open(Job())
    child.send()
    child.status()
