"""Full, forbidden and stalled places: a deadline and one clear error each."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted, within

import stepwell
from stepwell.errors import DeadlineError, LockedError, NoSpaceError, NotCommittedError, PermanentStoreError
from stepwell.stores.fault import Fault, FaultKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STALLED = Fault(FaultKind.STALL, "put", "*/step/*.pack", after=1, times=None)


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs of 1 MiB cannot be mounted here; the same with a planned fault is tested above")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def outcome(handle: stepwell.Handle, tier: str) -> BaseException | None:
    return handle.future(tier).exception(PATIENCE_S)


def test_disk_full_at_the_last_save_ended_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """SimpleTuner 2353: the error names tier and bytes, training may go on, and later saves arrive."""
    break_tier(monkeypatch, "directory", Fault(FaultKind.FULL, "put", "*/step/*.pack", after=1, times=2))
    job = Job()
    with run.open(job) as well:
        for step in range(6):
            job.step()
            if step in (3, 4):
                with pytest.raises(NoSpaceError, match=r"no space for \d+ bytes on put .*directory"):
                    well.save(step)
            outcome(well.save(step), "directory")
        well.wait_until_finished(PATIENCE_S)
        assert well.latest_step("directory") == 5
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 5
    assert bits == uninterrupted(6)[5]


def test_really_full_disk_leaves_what_was_committed_and_no_temporaries(run: Run, tiny: Path) -> None:
    directory = tiny / "run"
    run.keys = {"tiers": [{"kind": "directory", "path": str(directory)}]}
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(0).until(None, PATIENCE_S)
        with pytest.raises(OSError, match="No space"):
            fill(tiny / "filler")
        job.step()
        failed = well.save(1)
        with pytest.raises(NoSpaceError, match=r"cannot put .*ENOSPC.*free some space"):
            failed.until(None, PATIENCE_S)
        assert well.latest_step() == 0
        assert not list(directory.rglob(".stepwell-tmp*"))
        (tiny / "filler").unlink()
        job.step()
        with pytest.raises(NoSpaceError):
            well.save(2)
        well.save(2).until(None, PATIENCE_S)
    restored, bits = run.restored()
    assert restored is not None
    assert restored.step == 2
    assert bits == uninterrupted(3)[2]


def test_shared_memory_too_small_says_the_size_needed_and_leaves_nothing(run: Run, tiny: Path) -> None:
    run.memory_keys = {"directory": str(tiny / "arena")}
    job = Job(width=40_000)  # slots of 1.6 MB
    needed = sum(parameter.numel() * 4 for parameter in job.model.parameters())
    with pytest.raises(NoSpaceError) as raised:
        run.open(job)
    message = str(raised.value)
    assert str(tiny) in message
    figures = [int(word) for word in message.replace(",", "").split() if word.isdigit()]
    assert any(figure >= needed for figure in figures), message
    assert sum(path.stat().st_size for path in tiny.rglob("*") if path.is_file()) < 65_536
    run.memory_keys = {}
    run.open(Job()).close()  # neither lock stayed


def test_memory_that_fills_up_later_skips_with_a_warning(run: Run, tiny: Path) -> None:
    """Slots fit, a base does not: the step is not protected, training goes on."""
    run.memory_keys = {"directory": str(tiny / "arena")}
    run.keys = {"stall_limit_s": 0.2}
    job = Job(width=6_000)  # slots of 3 x 0.24 MB; a base takes 0.7 MB more
    with run.open(job) as well, within(30):
        job.step()
        with pytest.warns(UserWarning, match=r"step 0 is not protected: .*bytes"):
            handle = well.save(0)
        assert handle.skipped is not None
        assert "bytes" in handle.skipped
        with pytest.raises(NotCommittedError, match="not saved"):
            handle.until()
        assert well.metrics().unprotected_steps == 1
        assert well.latest_step() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; patched below")
def test_permission_error_was_swallowed_and_reported_as_success(run: Run) -> None:
    """Lightning 21800."""
    run.directory.mkdir()
    run.directory.chmod(0o555)
    with pytest.raises(PermanentStoreError, match="EACCES"):
        run.open(Job())


def test_permission_taken_away_while_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with run.open(job) as well:
        for step in range(2):
            job.step()
            well.save(step).until(None, PATIENCE_S)
        opened = os.open

        def forbidden(path: object, flags: int, *args: object, **keys: object) -> int:
            if flags & os.O_CREAT and str(run.directory) in str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return opened(path, flags, *args, **keys)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(os, "open", forbidden)
        job.step()
        error = outcome(well.save(2), "directory")
        assert isinstance(error, PermanentStoreError)
        assert "EACCES" in str(error)
        monkeypatch.undo()
        with pytest.raises(PermanentStoreError):
            well.check_for_errors()


@pytest.mark.parametrize("parent", ["file", "missing/deep"])
def test_directory_that_cannot_be_made(run: Run, parent: str) -> None:
    """A missing one is made; a file in its place is an error that names it."""
    (run.root / "file").write_text("in the way")
    run.directory_keys = {"path": str(run.root / parent / "checkpoints")}
    if parent != "file":
        run.open(Job()).close()
        return
    with pytest.raises(stepwell.StepwellError, match="file"):
        run.open(Job())


def test_run_directory_that_is_a_file(run: Run) -> None:
    run.directory.write_text("in the way")
    with pytest.raises(stepwell.StepwellError, match=str(run.directory)):
        run.open(Job())


@pytest.mark.parametrize("backpressure", ["wait", "skip"])
def test_stalled_store_blocks_the_trainer_no_longer_than_its_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch, backpressure: str
) -> None:
    limit_s = 0.2
    run.keys = {"stall_limit_s": limit_s, "backpressure": backpressure}
    later = ("*/00000000000[2-9]/*", "*/00000000001?/*")
    store = break_tier(
        monkeypatch, "directory", *(Fault(FaultKind.STALL, "put", key, times=None) for key in later)
    )
    job = Job()
    with run.open(job) as well:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            handles = []
            for step in range(14):
                # A hook and a save may each wait once, and once for the region of a base.
                with within(3 * limit_s + 2):
                    job.step()
                    handles.append(well.save(step))
        skipped = [handle for handle in handles if handle.skipped]
        assert skipped
        assert len([one for one in told if "is not protected" in str(one.message)]) == len(skipped)
        assert well.metrics().unprotected_steps == len(skipped)
        waited_s = [record.waited_s for record in well.metrics().saves]
        if backpressure == "skip":
            assert max(waited_s) < limit_s
        store().release()
        for handle in handles:
            outcome(handle, "directory")
        idle(well)
        job.step()
        well.save(14).until(None, PATIENCE_S)
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 14
    assert bits == uninterrupted(15)[14]


def test_a_log_that_outgrows_its_bases_waits_for_the_one_in_flight(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 0.2
    run.keys = {"stall_limit_s": limit_s, "base_every": 3}
    store = break_tier(
        monkeypatch, "directory", Fault(FaultKind.STALL, "put", "*/base/00000000000[1-9]/*", times=None)
    )
    job = Job()
    with run.open(job) as well:
        for step in range(14):
            job.step()
            well.save(step)
            if step < 3:
                idle(well)  # the first base is through
        saves = well.metrics().saves
        first = next(record.step for record in saves if record.base and record.step > 0)
        overdue = first + 2 * 3
        assert max(record.waited_s for record in saves if record.step <= overdue) < limit_s / 2
        late = [record.waited_s for record in saves if record.step > overdue]
        assert late[0] > limit_s / 2
        assert max(late[1:]) < limit_s / 2, "a store that hangs is waited for once"
        assert not any(record.base for record in saves if record.step > first)
        store().release()
        idle(well)
        job.step()
        handle = well.save(14)
        handle.until(None, PATIENCE_S)
        assert well.metrics().saves[-1].base
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 14
    assert bits == uninterrupted(15)[14]


def test_close_ends_at_its_deadline_and_keeps_the_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that never answers: what is in memory stays for the next start, and the hooks are gone."""
    run.keys = {"close_deadline_s": 0.3, "stall_limit_s": 5.0}
    store = break_tier(monkeypatch, "directory", STALLED)
    job = Job()
    well = run.open(job)
    for step in range(3):
        job.step()
        well.save(step)
    with within(10), pytest.raises(DeadlineError, match="step 2 did not arrive"):
        well.close()
    with within(2):
        for _ in range(8):
            job.step()  # nobody waits for a slot any more
    with pytest.raises(LockedError):
        run.open(Job())  # what is stalled may still be written
    runner = well._session._runner
    store().release()
    runner._thread.join(PATIENCE_S)
    assert not runner._thread.is_alive()
    monkeypatch.undo()
    restored, bits = run.restored()
    assert restored is not None
    assert restored.step == 2
    assert bits == uninterrupted(3)[2]


def test_shards_were_moved_on_while_the_flush_was_still_going(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KempnerForge 102: stall the newest save and kill: the one before is whole, nothing was reclaimed."""
    run.keys = {"base_every": 2}
    run.directory_keys = {"keep": 1}
    store = break_tier(
        monkeypatch, "directory", Fault(FaultKind.STALL, "*", "*/00000000000[4-9]/*", times=None)
    )
    job = Job()
    with run.open(job) as well:
        for step in range(4):
            job.step()
            well.save(step).until(None, PATIENCE_S)
        idle(well)
        job.step()
        well.save(4, base=True).until("memory", PATIENCE_S)
        copy = run.copied("copy", memory=False)
        store().release()
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert restored.step == 3
    assert bits == uninterrupted(4)[3]


def test_values_changed_after_the_call_were_saved(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 144657, Megatron 2288: what is written is what was there at the call."""
    store = break_tier(monkeypatch, "directory", Fault(FaultKind.STALL, "put", "*", after=0, times=None))
    job = Job()
    with run.open(job) as well:
        job.step()
        handle = well.save(0)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1)
        store().release()
        handle.until(None, PATIENCE_S)
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    restored, bits = copy.restored()
    assert restored is not None
    assert bits == uninterrupted(1)[0]
