"""A directory leaves out bases that the memory tier takes, and is no worse for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, idle, uninterrupted

import stepwell

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory, {"log_budget": 0.9}, {}, {"log_budget": 3.0})


def train(well: stepwell.SyncWell, job: Job, steps: range) -> list[int]:
    """Save step after step, none before the last is everywhere; return those with a base."""
    for step in steps:
        job.step()
        well.save(step)
        well.wait_until_finished(PATIENCE_S)
    idle(well)
    return [record.step for record in well.metrics().saves if record.base]


def train_past_a_base_left_out(run: Run, job: Job) -> int:
    """Train one life until the newest base is in memory only and a save follows it; return its step."""
    with run.crashing(job) as well:
        for last in range(40):
            bases = train(well, job, range(last, last + 1))
            if len(bases) >= 3 and bases[-1] == last - 1 and bases[-1] not in on_disk(run):
                return last
    pytest.fail(f"no base was left out: {bases} captured, {on_disk(run)} in the directory")


def on_disk(run: Run) -> list[int]:
    return sorted(int(path.parent.name) for path in run.directory.glob("*/base/*/commit.json"))


def test_run_that_lost_its_memory_comes_back_over_bases_that_were_left_out(run: Run) -> None:
    last = train_past_a_base_left_out(run, Job())
    shutil.rmtree(run.memory)
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact) == (last, "directory", True)
    assert bits == uninterrupted(last + 1)[last]


def test_run_restored_from_memory_goes_on_without_a_base_though_the_disk_has_another_one(run: Run) -> None:
    last = train_past_a_base_left_out(run, Job())
    job = Job(seed=99)
    with run.crashing(job) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.tier) == (last, "memory")
        train(well, job, range(last + 1, last + 3))
        assert not well.metrics().saves[0].base
    shutil.rmtree(run.memory)
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact) == (last + 2, "directory", True)
    assert bits == uninterrupted(last + 3)[-1]


def test_base_that_was_asked_for_reaches_the_directory(run: Run) -> None:
    job = Job()
    with run.crashing(job) as well:
        train(well, job, range(3))
        job.step()
        well.save(3, base=True)
        well.wait_until_finished(PATIENCE_S)
    assert 3 in on_disk(run)
