"""Calls that are not allowed in a situation, and those at its edge that are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from failure_rig import PATIENCE_S, Bits, Job, Run, files_of, idle, uninterrupted

from stepwell.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


@pytest.fixture
def trained(run: Run) -> Run:
    """Three steps, as a kill leaves them."""
    run.train(range(3))
    return run


def test_save_in_the_middle_of_gradient_accumulation(run: Run) -> None:
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(0)
        job.model(torch.randn(4, 6)).square().sum().backward()
        with pytest.raises(UsageError, match=r"gradient accumulation: model/0.weight .*optimizer.step\(\)"):
            well.save(1)
        job.optimizer.step()
        job.optimizer.zero_grad()
        well.save(1).until(None, PATIENCE_S)
        wanted = job.bits()
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (1, True)
    assert bits == wanted


@pytest.mark.parametrize("step", [3, 4])
def test_steps_that_do_not_grow(run: Run, step: int) -> None:
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(4)
        job.step()
        with pytest.raises(UsageError, match=f"step {step} was asked .* after step 4; steps only grow"):
            well.save(step)
        well.save(5).until(None, PATIENCE_S)
        assert well.all_steps() == [4, 5]


def test_step_saved_before_the_restart_is_not_saved_again(trained: Run) -> None:
    job = Job(seed=99)
    with trained.open(job) as well:
        well.restore()
        with pytest.raises(UsageError, match="step 2 was asked to be saved after step 2"):
            well.save(2)


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "3", 10**12], ids=str)
def test_step_that_no_key_can_hold(run: Run, step: object) -> None:
    with run.open(Job()) as well:
        with pytest.raises(UsageError, match="step must be an int from 0 to 999999999999"):
            well.save(step)  # type: ignore[arg-type]
        assert well.latest_step() is None


def test_largest_step(run: Run) -> None:
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(10**12 - 1).until(None, PATIENCE_S)
    restored, _ = run.restored()
    assert restored is not None
    assert restored.step == 10**12 - 1


def test_save_into_a_run_with_checkpoints_that_were_not_restored(trained: Run) -> None:
    stored = files_of(trained)
    job = Job()
    job.step()
    with trained.open(job) as well:
        with pytest.raises(UsageError, match=r"up to step 2 .*restore\(\) first, or open with fresh=True"):
            well.save(0)
        assert well.latest_step() == 2
    assert files_of(trained) == stored


def test_fresh_begins_anew_and_keeps_the_old_until_newer_bases_are_there(trained: Run) -> None:
    job = Job()
    with trained.open(job, fresh=True, base_every=2) as well:
        assert well.restore() is None
        seen = []
        for step in well.steps(8):
            seen.append(step)
            job.step()
            if step == 0:
                idle(well)
                assert trained.objects("directory", "000001-*/base/*/commit.json"), "the old stays for now"
        assert seen == list(range(8))
        well.wait_until_finished(PATIENCE_S)
        idle(well)
        assert well.all_steps()[-1] == 7
        assert not trained.objects("directory", "000001-*/*/*/commit.json"), "a dead branch goes"
    restored, bits = trained.restored()
    assert restored is not None
    assert (restored.step, restored.lost_steps) == (7, 0)
    assert bits == uninterrupted(8)[7]


def test_restore_after_the_first_save(run: Run) -> None:
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(0)
        with pytest.raises(UsageError, match="restore comes first"):
            well.restore()


def test_steps_after_a_restore_of_one_s_own_that_found_nothing(run: Run) -> None:
    job = Job()
    with run.open(job) as well:
        assert well.restore() is None
        for _ in well.steps(2):
            job.step()
        assert [step for step in well.steps(4) if job.step() is None] == [2, 3]
    assert job.bits() == uninterrupted(4)[3]


def test_use_after_close_says_so(run: Run) -> None:
    well = run.open(Job())
    well.close()
    well.close()
    for call in (lambda: well.save(0), well.restore, well.latest_step, well.wait_until_finished):
        with pytest.raises(UsageError, match="closed"):
            call()  # type: ignore[no-untyped-call]


def test_unknown_tier_names_the_ones_there_are(run: Run) -> None:
    job = Job()
    with run.open(job) as well:
        job.step()
        handle = well.save(0)
        for call in (well.latest_step, well.all_steps, handle.until, handle.done):
            with pytest.raises(UsageError, match="no tier 'disk' here; the tiers are memory, directory"):
                call("disk")  # type: ignore[operator]


def test_resume_from_a_save_before_the_first_update(run: Run) -> None:
    """torchtitan 848: the optimizer has no state yet."""
    job = Job()
    with run.open(job) as well:
        well.save(0).until(None, PATIENCE_S)
    job = Job(seed=99)
    with run.open(job) as well:
        restored = well.restore()
        assert restored is not None
        assert restored.step == 0
        steps: list[Bits] = []
        for step in (1, 2):
            job.step()
            steps.append(job.bits())
            well.save(step)
    assert steps == list(uninterrupted(2))


def test_save_without_an_update_in_between(run: Run) -> None:
    job = Job()
    job.step()
    with run.open(job) as well:
        for step in range(3):
            well.save(step)
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (2, True)
    assert bits == uninterrupted(1)[0]
