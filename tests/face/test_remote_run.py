"""A run on object storage: killed and brought back, refused twice, fenced, looked at from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import zarr
from failure_rig import PATIENCE_S, Bits, Job, uninterrupted
from s3_proxy import Trouble, Way

import stepwell
from stepwell.cli.app import run as run_command
from stepwell.errors import LockedError, PermanentStoreError
from stepwell.stores.remote_options import RemoteOptions
from stepwell.stores.remote_url import blobs_of

if TYPE_CHECKING:
    from s3_rig import Bucket

STEPS = 7
BASE_AT = 3


def config_of(s3: Bucket, memory: Path, **keys: object) -> dict[str, object]:
    tiers = [
        {"kind": "memory", "directory": str(memory)},
        {"kind": "remote", "url": s3.url, "endpoint": s3.endpoint, "lease_s": 1.0, "timeout_s": 10.0, **keys},
    ]
    return {"tiers": tiers, "log_budget": 1000.0, "handle_sigterm": False, "close_deadline_s": PATIENCE_S}


def opened(config: dict[str, object], job: Job) -> stepwell.SyncWell:
    return stepwell.open_sync(config, model=job.model, optimizer=job.optimizer)


def killed(s3: Bucket, config: dict[str, object], log: Path) -> int:
    """Let a process train and die; return the newest step that it knew to be on object storage."""
    worker = Path(__file__).with_name("remote_worker.py")
    command = [sys.executable, str(worker), json.dumps(config), str(STEPS), json.dumps([BASE_AT])]
    with log.open("w") as told:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            timeout=100,
            env={**os.environ},
            check=False,
        )
    assert done.returncode == -signal.SIGKILL, log.read_text()[-3000:]
    return max(int(line.split()[1]) for line in done.stdout.splitlines())


def restored(config: dict[str, object]) -> tuple[stepwell.Restored | None, Bits]:
    job = Job(seed=99)
    with opened(config, job) as well:
        return well.restore(), job.bits()


@pytest.mark.usefixtures("one_torch_thread")
def test_a_killed_run_whose_memory_is_gone_comes_back_bit_for_bit(
    s3: Bucket, memory_directory: Path, tmp_path: Path
) -> None:
    acknowledged = killed(s3, config_of(s3, memory_directory / "first"), tmp_path / "worker.log")
    assert acknowledged == STEPS - 2
    assert (memory_directory / "first").exists(), "memory outlives the process; here the machine is lost too"
    config = config_of(s3, memory_directory / "second")
    wanted = uninterrupted(STEPS + 3)
    job = Job(seed=99)
    with opened(config, job) as well:
        back = well.restore()
        assert back is not None
        assert back.step >= acknowledged, "what was acknowledged is there"
        assert (back.tier, back.exact, back.lost_steps, back.faults) == ("remote", True, 0, ())
        assert job.bits() == wanted[back.step]
        for step in range(back.step + 1, STEPS + 3):
            job.step()
            well.save(step)
            assert job.bits() == wanted[step]
    again, bits = restored(config_of(s3, memory_directory / "third"))
    assert again is not None
    assert again.step == STEPS + 2
    assert bits == wanted[STEPS + 2]


@pytest.fixture
def run(s3: Bucket, memory_directory: Path, one_torch_thread: None) -> Job:
    """A run of four saves, closed; object storage alone has it."""
    job = Job()
    with opened(config_of(s3, memory_directory / "m"), job) as well:
        for step in range(4):
            job.step()
            well.save(step)
    return job


def base_in(s3: Bucket, step: int) -> str:
    (commit,) = (key for key in s3.listed("run/") if key.endswith(f"/base/{step:012d}/commit.json"))
    return commit.removesuffix("commit.json") + "state"


def test_a_url_alone_opens_and_is_looked_at(
    s3: Bucket, run: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The endpoint comes from the environment, as with every other client of S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    job = Job(seed=99)
    with stepwell.open_sync(s3.url, model=job.model, optimizer=job.optimizer, handle_sigterm=False) as well:
        back = well.restore()
        assert back is not None
        assert (back.step, back.exact) == (3, True)
        assert well.all_steps("remote") == [0, 1, 2, 3]
    assert job.bits() == run.bits()
    with stepwell.view(s3.url, 3) as view:
        group = zarr.open_group(view, mode="r")
        array = np.asarray(group["model/0.weight"])
    assert np.array_equal(array, run.model[0].weight.detach().numpy())
    for command in (["ls"], ["show"], ["verify"]):
        assert run_command([*command, s3.url, "--json"]) == 0, capsys.readouterr()
        json.loads(capsys.readouterr().out)


def test_a_base_opens_without_stepwell(s3: Bucket, run: Job) -> None:
    """Through tensorstore, and through zarr with s3fs, in a process that never imports stepwell."""
    import tensorstore as ts

    prefix = base_in(s3, 0)
    spec = {"driver": "s3", "bucket": s3.name, "endpoint": s3.endpoint, "aws_region": "us-east-1"}
    array = ts.open({"driver": "zarr3", "kvstore": {**spec, "path": f"{prefix}/model/0.weight/"}}).result()
    read = np.asarray(array.read().result())
    code = (
        "import sys, json, zarr\n"
        "group = zarr.open_group(sys.argv[1], mode='r', storage_options="
        "{'client_kwargs': {'endpoint_url': sys.argv[2]}})\n"
        "weight = group['model/0.weight'][:]\n"
        "assert 'stepwell' not in sys.modules\n"
        "print(json.dumps([sorted(group['model'].array_keys()), weight.tobytes().hex()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"s3://{s3.name}/{prefix}", s3.endpoint],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **s3.environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names, weight = json.loads(done.stdout)
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert weight == read.tobytes().hex()
    assert torch.isfinite(torch.from_numpy(read)).all()


def test_a_death_after_any_request_leaves_the_old_step_or_the_new(
    s3: Bucket, memory_directory: Path, one_torch_thread: None
) -> None:
    """Every state that the bucket went through is put into a place of its own and restored from there.

    A request is carried out or not, so these are all the states that a death can leave.
    """
    wanted = uninterrupted(4)
    job = Job()
    config = config_of(s3, memory_directory / "m")
    known: list[tuple[int, int]] = []
    with opened(config, job) as well:
        for step in range(4):
            job.step()
            # One at a time, so that the requests of two saves do not mix.
            well.save(step, base=step == 2).until("remote", timeout_s=PATIENCE_S)
            known.append((len(_changes_of(s3)), step))
    changes = _changes_of(s3)
    assert len(changes) > 60
    # Objects of one base are equal in what they mean for a recovery: every fourth of them is tried.
    tried = [at for at in range(len(changes) + 1) if at % 4 == 0 or not _is_part_of_base(changes[at - 1])]
    found: set[int | None] = set()
    for at in tried:
        url = f"memory://died-{os.getpid()}-{s3.name}-{at}/run"
        asyncio.run(_put_changes(url, changes[:at]))
        acknowledged = max((step for count, step in known if count <= at), default=None)
        back, bits = restored({"tiers": [{"kind": "remote", "url": url}], "handle_sigterm": False})
        found.add(None if back is None else back.step)
        if back is None:
            assert acknowledged is None, f"after {at} requests"
            continue
        following = 0 if acknowledged is None else acknowledged + 1
        assert back.step in (acknowledged, following), f"after {at} requests"
        assert back.exact
        assert back.faults == (), f"after {at} requests"
        assert bits == wanted[back.step], f"after {at} requests"
    assert found == {None, 0, 1, 2, 3}


def _changes_of(s3: Bucket) -> list[tuple[str, str, bytes]]:
    """What was stored, without the records of the opener: this process lives, as nobody's would."""
    return [change for change in s3.proxy.changes if "/.stepwell-opener-" not in change[1]]


def _is_part_of_base(change: tuple[str, str, bytes]) -> bool:
    return "/state/" in change[1]


async def _put_changes(url: str, changes: list[tuple[str, str, bytes]]) -> None:
    """Do to a place in memory what was done to the bucket."""
    blobs = blobs_of(RemoteOptions(url))
    for method, path, body in changes:
        key = unquote(path).split("/run/", 1)[1]
        if method == "PUT":
            await blobs.write(key, np.frombuffer(body, np.uint8))
        else:
            await blobs.delete(key)


def test_two_openers_are_one_too_many(s3: Bucket, memory_directory: Path, one_torch_thread: None) -> None:
    job, other = Job(), Job()
    with opened(config_of(s3, memory_directory / "one"), job) as well:
        job.step()
        well.save(0)
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            opened(config_of(s3, memory_directory / "two"), other)
    assert restored(config_of(s3, memory_directory / "two"))[0] is not None


def test_an_opener_that_was_taken_for_dead_can_commit_nothing_more(
    s3: Bucket, memory_directory: Path, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    """A machine that was cut off for longer than its lease comes back beside the run that followed it."""
    from stepwell.stores import opener

    wanted = uninterrupted(8)
    first_job = Job()
    first = opened(config_of(s3, memory_directory / "one"), first_job)
    for step in range(3):
        first_job.step()
        first.save(step)
    first.wait_until_finished(PATIENCE_S)
    # The drawing of random numbers goes on where the other run took it up.
    drawn = torch.get_rng_state()
    second_job = Job(seed=99)
    monkeypatch.setattr(opener.OpenerLock, "_beat_on", lambda self: None)
    lock = _lock_of(first)
    lock._ended.set()
    lock._beating.join()
    with monkeypatch.context() as patch:
        patch.setattr(opener, "_boot_of_this_machine", lambda: "another machine")
        second = opened(config_of(s3, memory_directory / "two"), second_job)
    back = second.restore()
    assert back is not None
    assert back.step == 2
    second_job.step()
    second.save(3)
    second.wait_until_finished(PATIENCE_S)
    assert second_job.bits() == wanted[3]
    ours = set(s3.listed("run/"))
    torch.set_rng_state(drawn)
    first_job.step()
    first.save(3)
    with pytest.raises(PermanentStoreError, match="taken over by process"):
        first.wait_until_finished(PATIENCE_S)
    first.close()
    assert (memory_directory / "one").exists(), "what it could not save elsewhere stays in memory"
    added = set(s3.listed("run/")) - ours
    assert not [key for key in added if key.endswith("commit.json")], "nothing of it is committed"
    assert ours <= set(s3.listed("run/")), "and nothing was taken away"
    second.close()
    again, bits = restored(config_of(s3, memory_directory / "three"))
    assert again is not None
    assert again.step == 3
    assert bits == wanted[3]


def _lock_of(well: stepwell.SyncWell) -> object:
    store = well._session.tiers[-1].store
    return store._lock


def test_troubles_of_the_service_cost_no_step(
    s3: Bucket, memory_directory: Path, one_torch_thread: None
) -> None:
    """503, resets and lost answers while saving, and again while restoring."""

    def plan() -> list[Trouble]:
        ways = (Way.SLOW_DOWN, Way.RESET, Way.UNANSWERED)
        methods = ("PUT", "PUT", "GET", "HEAD")
        return [Trouble(way, method, after=at) for at, way in enumerate(ways * 4) for method in methods]

    wanted = uninterrupted(5)
    job = Job()
    with opened(config_of(s3, memory_directory / "one"), job) as well:
        s3.proxy.plan = plan()
        for step in range(5):
            job.step()
            well.save(step, base=step == 3)
        well.wait_until_finished(PATIENCE_S)
        assert not any(trouble.times for trouble in s3.proxy.plan if trouble.method == "PUT")
    s3.proxy.plan = plan()
    back, bits = restored(config_of(s3, memory_directory / "two"))
    assert back is not None
    assert (back.step, back.lost_steps, back.exact) == (4, 0, True)
    assert bits == wanted[4]


def test_a_service_that_is_away_for_some_steps_catches_up(
    s3: Bucket, memory_directory: Path, one_torch_thread: None
) -> None:
    """The trainer goes on meanwhile; with ``retry`` nothing is missing in the end."""
    job = Job()
    config = config_of(s3, memory_directory / "one", on_error="retry", retry_for_s=0.2)
    with opened(config, job) as well:
        job.step()
        well.save(0).until("remote", timeout_s=PATIENCE_S)
        s3.proxy.plan = [Trouble(Way.SLOW_DOWN, "PUT", "*.pack", times=1_000_000)]
        for step in range(1, 5):
            job.step()
            well.save(step).until("memory", timeout_s=PATIENCE_S)
        assert well.latest_step("memory") == 4
        assert well.latest_step("remote") == 0
        assert s3.proxy.plan[0].times < 1_000_000
        s3.proxy.plan = []
        well.wait_until_finished(PATIENCE_S)
        assert well.all_steps("remote") == list(range(5))
    back, bits = restored(config_of(s3, memory_directory / "two"))
    assert back is not None
    assert back.step == 4
    assert bits == job.bits()


def test_credentials_that_are_refused_are_said_at_the_start(
    s3: Bucket, memory_directory: Path, one_torch_thread: None
) -> None:
    s3.proxy.plan = [Trouble(Way.DENIED, times=1000)]
    with pytest.raises(PermanentStoreError, match="check the credentials"):
        opened(config_of(s3, memory_directory / "one"), Job())
    assert not list(memory_directory.iterdir()), "nothing was reserved"
