"""Retention: bounded over many saves, never the last whole chain, dead branches gone."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted

import stepwell
from stepwell.cli.app import run as run_command
from stepwell.stores.arena import Arena
from stepwell.stores.fault import Fault, FaultKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


def size_of(path: Path) -> tuple[int, int]:
    """Bytes and number of files and directories."""
    found = list(path.rglob("*"))
    return sum(one.stat().st_size for one in found if one.is_file()), len(found)


def committed(run: Run, series: str) -> list[int]:
    return sorted(int(path.parent.name) for path in run.directory.glob(f"*/{series}/*/commit.json"))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_sizes_of_both_tiers_are_bounded(run: Run, keep: int) -> None:
    """transformers 25136: a limit of 1 deleted all; here the newest chains stay and nothing else."""
    run.keys = {"base_every": 5}
    run.memory_keys = run.directory_keys = {"keep": keep}
    job = Job()
    sizes = []
    with run.open(job) as well:
        for step in range(60):
            job.step()
            well.save(step)
            if step % 5 == 4:
                well.wait_until_finished(PATIENCE_S)
                idle(well)
                assert well.latest_step() == step
                sizes.append((size_of(run.memory), size_of(run.directory)))
        bases = committed(run, "base")
        assert len(bases) == keep
        assert committed(run, "step") == list(range(bases[0] + 1, 60))
    for tier, room in ((0, 1.6), (1, 1.1)):  # in memory a proof may hold one more chain for a while
        for figure in (0, 1):
            early = max(size[tier][figure] for size in sizes[4:8])
            late = max(size[tier][figure] for size in sizes[8:])
            assert late <= early * room, f"tier {tier}, figure {figure}: {early} grew to {late}"
    restored, bits = run.restored()
    assert restored is not None
    assert restored.step == 59
    assert bits == uninterrupted(60)[59]


@pytest.mark.parametrize("after", range(0, 24, 3))
def test_keep_1_deleted_the_old_before_the_new_was_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """verl 4873: fail each write of the newer saves in turn; a whole step stays at every moment."""
    run.keys = {"tiers": [{"kind": "directory", "path": str(run.directory), "keep": 1}], "base_every": 3}
    break_tier(
        monkeypatch, "directory", Fault(FaultKind.DENIED, "put", "*/00000000000[2-9]/*", after=after, times=9)
    )
    job, told = Job(), -1
    with run.open(job) as well:
        for step in range(8):
            job.step()
            try:
                handle = well.save(step)
            except stepwell.PermanentStoreError:
                handle = well.save(step)
            if handle.future().exception(PATIENCE_S) is None:
                told = step
            idle(well)
            shutil.rmtree(run.root / "copy", ignore_errors=True)
            shutil.copytree(run.directory, run.root / "copy")
            check_copy(run, told)
        with suppress(stepwell.PermanentStoreError):
            well.check_for_errors()


def check_copy(run: Run, told: int) -> None:
    copy = Run(run.root, {"tiers": [{"kind": "directory", "path": str(run.root / "copy")}]})
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        restored, bits = copy.restored()
    assert restored is not None
    assert restored.step >= told
    assert bits == uninterrupted(8)[restored.step]


def test_dead_branches_are_reclaimed_once_newer_bases_are_committed(run: Run) -> None:
    """A life that went back leaves saves behind that nothing leads to."""
    run.keys = {"base_every": 2}
    run.train(range(6))
    for path in run.directory.glob(f"*/*/{5:012d}/commit.json"):
        path.unlink()
    shutil.rmtree(run.memory)
    job = Job(seed=99)
    with run.open(job) as well:
        restored = well.restore()
        assert restored is not None
        assert restored.step == 4
        for step in range(5, 9):
            job.step()
            well.save(step)
        well.wait_until_finished(PATIENCE_S)
        idle(well)
        assert well.all_steps()[-4:] == [5, 6, 7, 8]
        lives = {path.name for path in run.directory.iterdir() if path.name[0] == "0"}
        assert len(lives) <= 2
        live = [path for path in run.directory.glob("000001-*/*/*") if int(path.name) > 4]
        assert not live, "the dead branch is gone"
    assert job.bits() == uninterrupted(9)[8]


def test_many_short_lives_are_bounded_too(run: Run) -> None:
    """A job that dies after every two saves for days must not fill the disk."""
    run.keys = {"base_every": 3}
    sizes = []
    for life in range(14):
        job = Job(seed=life)
        with run.crashing(job) as well:
            restored = well.restore()
            first = 0 if restored is None else restored.step + 1
            for step in range(first, first + 2):
                job.step()
                well.save(step)
        sizes.append(size_of(run.directory))
    early, late = max(sizes[6:9]), max(sizes[11:])
    # Each life leaves its record, some 400 bytes, for ever.
    assert late[0] <= early[0] * 1.1 + 10 * 1024
    assert late[1] <= early[1] * 1.1 + 16


def test_check_needed_to_write_a_lock_on_a_read_only_mount(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """borg 1035: looking writes nothing, also beside a living owner."""
    run.train(range(3))
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    opened = os.open

    def spy(path: object, flags: int, *args: object, **keys: object) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        assert not (writes and str(run.root) in str(path)), f"{path} was opened for writing"
        return opened(path, flags, *args, **keys)  # type: ignore[call-overload, no-any-return]

    with run.open(Job()):
        monkeypatch.setattr(os, "open", spy)
        for command in ("ls", "show", "verify"):
            assert run_command([command, str(run.directory), "--json"]) == 0, capsys.readouterr()
        stepwell.view(str(run.directory), 2).close()
        with Arena.inspect(run.memory) as arena:
            assert arena.keys()
        monkeypatch.undo()
    after = {path: path.stat().st_mtime_ns for path in run.root.rglob("*") if path in before}
    unchanged = {path: time for path, time in after.items() if path.is_file() and "lock" not in path.name}
    assert unchanged == {path: before[path] for path in unchanged}


def test_another_process_commits_and_an_inspector_sees_it_without_restart(run: Run) -> None:
    """gcsfs 562: no listing is cached."""
    job = Job()
    with run.open(job) as well:
        seen = []
        for step in range(3):
            job.step()
            well.save(step).until(None, PATIENCE_S)
            seen.append(len(list(run.directory.glob("*/step/*/commit.json"))))
            assert well.all_steps("directory")[-1] == step
        assert seen == sorted(seen)


def test_memory_grew_with_each_save(run: Run) -> None:
    """torch 170163: 60 saves of 2 MB; nothing is kept for each."""
    run.keys = {"base_every": 10, "memory_budget_bytes": 4 << 20}
    job = Job(width=10_000)  # weights of 0.36 MB, a state of 1.1 MB

    def own_bytes() -> int:
        """Memory of this process alone; that of the arena is looked at above."""
        (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in one]
        return int(line.split()[1]) * 1024

    with run.open(job) as well:
        for step in range(60):
            job.step()
            well.save(step)
            if step == 30:
                well.wait_until_finished(PATIENCE_S)
                idle(well)
                early = own_bytes()
        well.wait_until_finished(PATIENCE_S)
        idle(well)
        assert own_bytes() - early < 8 << 20, "30 saves left more behind than their gradients"
        assert well._session._runner._handles == set()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("stepwell")]
    assert len(threads) < 20
    assert not [one for one in threading.enumerate() if one.name.startswith("stepwell-runner")]
