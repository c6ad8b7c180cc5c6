"""Faults that people reported of neighbouring projects, tried here: what lies in the tiers, and who reads it.

Each test is named for its symptom. ``docs/reports.md`` lists them all, also those that other files hold.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import unicodedata
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted
from report_rig import Things, open_with, read, told
from torch import Tensor, nn
from zygote import Zygote

import stepwell
from stepwell import assembly
from stepwell.errors import (
    IntegrityError,
    NoSpaceError,
    NotCommittedError,
    ObjectExistsError,
    StoreError,
)
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import BytesLike, ObjectStore
from stepwell.stores.fault import Fault, FaultKind, FaultStore
from stepwell.stores.lock import FileLock

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


def check(copy: Run, step: int, total: int) -> None:
    """Restore quietly; the step and its bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored, found = copy.restored()
    assert restored is not None
    assert (restored.step, found) == (step, uninterrupted(total)[step])


# Names.


NAMES = (
    *("w", "W", "FOO", "foo", "a", "a/b", "a//b", "/a", "a/", "c", "c/0", "zarr.json", "__x", ""),
    *(".", "..", "...", "../../up", "/etc/passwd", "back\\slash", "nul\0", "line\n", "%2e%2e", "=2e"),
    *("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}", "n" * 300, "N" * 300),
    *("commit.json", ".stepwell-tmp-1", "x.", "x"),
)


def test_names_collided_or_left_the_directory(run: Run) -> None:
    """zarr-specs 57, dandi 2881: every name its own objects, also where case and accents fold."""

    def named(sign: int) -> dict[str, object]:
        values: dict[object, Tensor] = {name: torch.tensor([sign * n]) for n, name in enumerate(NAMES, 1)}
        return {"names": values}

    things, extra = Things.of(nn.Linear(2, 2)), named(1)
    with open_with(run, things, extra) as well:
        for step in range(2):
            things.step()
            well.save(step, base=step == 1)
    found = named(-1)
    with open_with(run, Things.of(nn.Linear(2, 2)), found) as well:
        assert well.restore() is not None
    assert found == extra
    assert {path.name for path in run.root.iterdir()} == {"directory"}
    for base in run.objects("directory", "base/*/state"):
        paths = [str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()]
        arrays = [path for path in paths if "names" in path and path.endswith("zarr.json")]
        assert len(arrays) >= len(NAMES)
        folded = {unicodedata.normalize("NFKC", path).casefold() for path in paths}
        assert len(folded) == len(paths)


# Interrupted writes.


def test_interrupted_write_left_a_mixed_array(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """SciStudio 167: what a kill before each chunk of a base leaves, looked at one by one."""
    taken: list[Run] = []

    class Watched(FaultStore):
        async def put(self, key: str, parts: list[BytesLike]) -> None:  # type: ignore[override]
            if f"base/{3:012d}/state/model/0.weight/c" in key:
                taken.append(run.copied(f"before-{len(taken)}", memory=False))
            await super().put(key, parts)

    def tier(label: str, store: ObjectStore, **settings: object) -> Tier:
        return Tier(label, Watched(store) if label == "directory" else store, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(assembly, "Tier", tier)
    run.keys = {"chunk_bytes": 4096}
    job = Job(width=1000)
    with run.open(job) as well:
        for step in range(4):
            job.step()
            well.save(step, base=step == 3).until(None, PATIENCE_S)
        idle(well)
        taken.append(run.copied("after", memory=False))
    monkeypatch.undo()
    assert len(taken) > 5, "a tensor of several chunks"
    found = []
    for copy in taken:
        # Without the differential nothing but the base can lead to step 3.
        for path in copy.objects("directory", f"step/{3:012d}/*"):
            path.unlink()
        again = Job(seed=99, width=1000)
        with copy.open(again) as well:
            restored = well.restore()
        assert restored is not None
        assert again.bits() == uninterrupted(4, 1000)[restored.step]
        found.append(restored.step)
    assert found == [2] * (len(taken) - 1) + [3]


@pytest.mark.parametrize("gone", ["manifest", "commit", "both"])
def test_shards_without_metadata_were_taken_for_a_checkpoint(run: Run, gone: str) -> None:
    """training-gym 506: the newest step loses its evidence in the only tier that is left."""
    run.train(range(4), base_at=[2])
    shutil.rmtree(run.memory)
    (step,) = [path for path in run.objects("directory", f"{3:012d}") if path.parent.name == "step"]
    if gone != "commit":
        (step / "rank-00000.manifest.json").unlink()
    if gone != "manifest":
        (step / "commit.json").unlink()
    # A commit record without its manifest is no crash but damage, and told as that.
    error = IntegrityError if gone == "manifest" else NotCommittedError
    with pytest.raises(error, match="manifest" if gone == "manifest" else "step 3 is not committed"):
        stepwell.view(str(run.directory), 3)
    if gone != "manifest":
        with run.open(Job()) as well:
            assert well.all_steps() == [0, 1, 2]
        with stepwell.view(str(run.directory)) as state:
            assert state.step == 2
    check(run, 2, 4)


# Retention.


@pytest.mark.parametrize("which", ["pack", "manifest", "commit"])
@pytest.mark.parametrize("series", ["step", "base"])
def test_keep_1_deleted_the_old_save_although_the_new_one_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, series: str, which: str
) -> None:
    """verl 4873: whichever write of the new save fails, the newest whole step is there after it."""
    run.keys = {"tiers": [{"kind": "directory", "path": str(run.directory), "keep": 1}]}
    name = {"pack": "*", "manifest": "*.manifest.json", "commit": "commit.json"}[which]
    plan = Fault(FaultKind.DENIED, "*", f"*/{series}/{3:012d}/{name}")
    store = break_tier(monkeypatch, "directory", plan)
    job, copy = Job(), run.root / "copy"
    with run.open(job) as well:
        for step in range(3):
            job.step()
            well.save(step).until(None, PATIENCE_S)
        idle(well)
        job.step()
        well.save(3, base=True).future("directory").exception(PATIENCE_S)
        idle(well)
        shutil.copytree(run.directory, copy)
        with suppress(StoreError):
            well.close()
    monkeypatch.undo()
    assert [event.kind for event in store().events] == [FaultKind.DENIED]
    whole = list(copy.glob(f"*/*/{3:012d}/commit.json"))
    assert len(whole) == 1, "one of the two ways to step 3 was cut"
    check(Run(run.root, {"tiers": [{"kind": "directory", "path": str(copy)}]}), 3, 4)
    shutil.rmtree(whole[0].parent)
    if series == "base":
        check(Run(run.root, {"tiers": [{"kind": "directory", "path": str(copy)}]}), 2, 4)


# Full disks.


@pytest.mark.parametrize("write", [0, 1, 2, 3, 9, 20, "manifest", "commit"])
def test_disk_full_at_any_write_ended_the_run_or_left_rubbish(
    run: Run, monkeypatch: pytest.MonkeyPatch, write: int | str
) -> None:
    """SimpleTuner 2353: tier and bytes are named, training goes on, and with space again it works."""
    place = f"*/{2:012d}/*{'' if isinstance(write, int) else write}*"
    after = write if isinstance(write, int) else 0
    full = [Fault(FaultKind.FULL, kind, place, after=after) for kind in ("put", "create")]
    store = break_tier(monkeypatch, "directory", *full)
    job = Job()
    with run.open(job) as well:
        for step in range(2):
            job.step()
            well.save(step).until(None, PATIENCE_S)
        job.step()
        well.save(2, base=True).future("directory").exception(PATIENCE_S)
        idle(well)
        assert store().events
        job.step()
        with pytest.raises(NoSpaceError, match=r"no space for \d+ bytes .*directory"):
            well.check_for_errors()
        with suppress(NoSpaceError):
            well.check_for_errors()
        well.save(3).until(None, PATIENCE_S)
        idle(well)
        assert not run.objects("directory", ".stepwell-tmp*")
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    check(copy, 3, 4)


# Looking.


WRITES: tuple[tuple[object, str], ...] = (
    *((os, name) for name in ("mkdir", "link", "rename", "replace", "unlink", "rmdir", "symlink")),
    *((os, name) for name in ("truncate", "ftruncate", "chmod", "utime", "posix_fallocate", "fsync")),
    *((fcntl, name) for name in ("lockf", "flock")),
)


def test_looking_at_a_read_only_tree_wrote_or_locked(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """borg 1035: a spy on every call that changes a file system, and on opening for writing."""
    run.train(range(3))
    source = run.root / "run.yaml"
    source.write_text(json.dumps(run.config()))
    for path in run.root.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    opened = os.open

    def read_only(path: str, flags: int, *more: int, **keys: int) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC), f"{path} opened for writing"
        return opened(path, flags, *more, **keys)

    def refused(name: str) -> Callable[..., None]:
        def call(*arguments: object, **keys: object) -> None:
            raise AssertionError(f"{name}{arguments}")

        return call

    with monkeypatch.context() as spies:
        spies.setattr(os, "open", read_only)
        for module, name in WRITES:
            spies.setattr(module, name, refused(name))
        for command in ("ls", "show", "verify"):
            code, report = told(capsys, command, str(source))
            assert code == 0, report
        for place in (str(run.directory), source):
            with stepwell.view(place, 2) as state:
                weight = bytes(read(state, "model/0.weight/c/0/0"))
    for path in (*run.root.rglob("*"), run.root):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert weight[: 8 * 6 * 4] == uninterrupted(3)[2]["model.0.weight"]


def test_listing_was_out_of_date_after_another_process_committed(
    run: Run, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    """gcsfs 562: each step of a living run is seen as soon as it is acknowledged."""
    child = zygote.start("train", run.config(), total=4, wait=True, linger=True)
    for step in range(4):
        child.until("ack", tier="directory", step=step)
        with stepwell.view(str(run.directory)) as state:
            assert state.step >= step
        code, listed = told(capsys, "ls", str(run.directory))
        assert code == 0
        assert f'"{step}"' in str(listed).replace("'", '"') or str(step) in str(listed)
        with stepwell.view(str(run.directory), step) as state:
            weight = bytes(read(state, "model/0.weight/c/0/0"))[: 8 * 6 * 4]
            assert weight == uninterrupted(4)[step]["model.0.weight"]


def test_clocks_decided_what_is_newest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """borg 10077: the clock steps back an hour with every life, and file times mean nothing."""
    run.keys = {"base_every": 2}
    run.directory_keys = {"keep": 1}
    now = time.time()
    for life in range(4):
        monkeypatch.setattr(time, "time", lambda life=life: now - 3600.0 * life)
        job = Job(seed=7 if life == 0 else 99)
        with run.crashing(job) as well:
            restored = well.restore()
            assert (None if restored is None else restored.step) == (2 * life - 1 if life else None)
            for step in range(2 * life, 2 * life + 2):
                job.step()
                well.save(step)
                monkeypatch.setattr(time, "time", lambda step=step: now - 86_400.0 * step)
            well.wait_until_finished(PATIENCE_S)
        assert job.bits() == uninterrupted(8)[2 * life + 1]
        for place, path in enumerate(sorted(run.root.rglob("*"))):
            os.utime(path, (now + 60.0 * (place % 7 - 3), now - 1000.0 * (place % 5)))
    shutil.rmtree(run.memory)
    check(run, 7, 8)


# Two writers.


def test_two_writers_lost_each_others_data(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """zarr-python 3682: even where a file system lies about locks, no object has two writers."""
    monkeypatch.setattr(FileLock, "acquire", lambda self: None)
    run.keys = {"tiers": [{"kind": "directory", "path": str(run.directory)}]}
    jobs = [Job(), Job()]
    with run.open(jobs[0]) as first:
        with run.open(jobs[1]) as second:
            jobs[0].step()
            first.save(0).until(None, PATIENCE_S)
            with pytest.raises(ObjectExistsError, match="belongs to run"):
                second.save(0)  # it drew a name of its own for the run, and came second
        with run.open(jobs[1], fresh=True) as second:
            for step in range(1, 4):
                for job, well in zip(jobs, (first, second), strict=True):
                    job.step()
                    well.save(step).until(None, PATIENCE_S)
    lives = sorted(path.name for path in run.directory.iterdir() if path.name[0] == "0")
    assert len(lives) == 2
    code, report = told(capsys, "verify", str(run.directory))
    assert code == 0, report
    for life in lives:
        for step in range(1, 4):
            with stepwell.view(str(run.directory), step, incarnation=life) as state:
                assert state.incarnation == life
