"""Bases as a tree of objects or packed: written as configured, read as their manifests say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from failure_rig import PATIENCE_S, Job, Run, flip, idle, uninterrupted

import stepwell
from stepwell import assembly
from stepwell.cli.app import run as run_command
from stepwell.config import load_config
from stepwell.errors import ConfigError
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import BytesLike, ObjectStore
from stepwell.stores.fault import FaultStore

if TYPE_CHECKING:
    from s3_rig import Bucket

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def packing(root: Path, **keys: object) -> Run:
    """A run whose directory has packed bases and takes all of them."""
    return Run(root, dict(keys), {}, {"layout": "pack", "log_budget": 0.0})


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return packing(memory_directory)


def names_below(run: Run, step: int) -> set[str]:
    """What a base consists of, the tree of a group as ``state``."""
    return {path.name for path in run.objects("directory", f"base/{step:012d}/*")}


PACKED = {"commit.json", "rank-00000.manifest.json", "rank-00000.refs.json", "rank-00000.data-00000"}
TREE = {"commit.json", "rank-00000.manifest.json", "state"}


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, object]:
    assert run_command([*command, "--json"]) == 0, capsys.readouterr()
    return dict(json.loads(capsys.readouterr().out))


def test_a_packed_base_comes_back_bit_for_bit(run: Run) -> None:
    run.train(range(6), base_at=[3])
    assert names_below(run, 3) == PACKED
    shutil.rmtree(run.memory)
    back, bits = run.restored()
    assert back is not None
    assert (back.step, back.tier, back.exact, back.faults) == (5, "directory", True, ())
    assert bits == uninterrupted(6)[5]


def test_a_run_may_have_bases_of_both_layouts(
    memory_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration decides what is written; what is read is never asked of it."""
    tree = Run(memory_directory, {}, {}, {"layout": "tree", "log_budget": 0.0, "keep": 9})
    packed = Run(memory_directory, {}, {}, {"layout": "pack", "log_budget": 0.0, "keep": 9})
    tree.train(range(3), base_at=[2])
    job = Job(seed=99)
    with packed.crashing(job) as well:
        assert well.restore() is not None
        for step in range(3, 7):
            job.step()
            well.save(step, base=step == 5)
    assert (names_below(tree, 2), names_below(tree, 5)) == (TREE, PACKED)
    where = str(tree.directory)
    assert printed(capsys, "verify", where)["faults"] == []
    assert printed(capsys, "ls", where)
    shown = [printed(capsys, "show", where, str(step), "--base", "--tier", "directory") for step in (2, 5)]
    tensors, objects = [[document[key] for document in shown] for key in ("tensors", "objects")]
    assert tensors[0] == tensors[1], "the same arrays, the same bytes each"
    assert isinstance(objects[1], list)
    assert len(objects[1]) == 2
    shutil.rmtree(tree.memory)
    for reader in (tree, packed):
        for step in (2, 3, 5, 6):
            assert weight_in_view(reader, step) == uninterrupted(7)[step]["model.0.weight"], step
        copy = reader.copied(f"read-{reader.directory_keys['layout']}", memory=False)
        back, bits = copy.restored()
        assert back is not None
        assert (back.step, back.exact) == (6, True)
        assert bits == uninterrupted(7)[6]


def weight_in_view(run: Run, step: int) -> bytes:
    with stepwell.view({"tiers": [{"kind": "directory", "path": str(run.directory)}]}, step) as opened:
        array = zarr.open_group(opened, mode="r")["model/0.weight"]
        assert isinstance(array, zarr.Array)
        return np.ascontiguousarray(array[...]).tobytes()


@pytest.mark.parametrize("what", ["refs.json", "data-00000"])
# At the beginning lie the weights; what is later may be replaced by newer values anyway.
@pytest.mark.parametrize(
    "damage", [lambda path: flip(path, 0.01), lambda path: path.unlink(), lambda path: os.truncate(path, 100)]
)
def test_a_damaged_packed_base_is_named_and_gone_around(
    run: Run, what: str, damage: object, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(range(7), base_at=[4])
    shutil.rmtree(run.memory)
    (path,) = run.objects("directory", f"base/{4:012d}/*.{what}")
    assert callable(damage)
    damage(path)
    assert run_command(["verify", str(run.directory), "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert {fault["key"] for fault in faults} == {path.relative_to(run.directory).as_posix()}
    back, bits = run.restored()
    assert back is not None
    assert (back.step, back.exact, back.lost_steps) == (6, True, 0)
    assert any(f"{4:012d}" in fault or "base 4" in fault for fault in back.faults)
    assert bits == uninterrupted(7)[6]


def test_packed_bases_are_reclaimed_whole(run: Run) -> None:
    run.train(range(9), base_at=[2, 4, 6, 8])
    left = sorted(int(path.name) for path in run.directory.glob("*/base/*"))
    assert left == [6, 8]
    assert all(names_below(run, step) == PACKED for step in left)


def test_what_a_death_leaves_of_a_packed_base_is_swept(run: Run) -> None:
    run.train(range(4), base_at=[2])
    for name in ("commit.json", "rank-00000.manifest.json"):
        next(run.directory.glob(f"*/base/{2:012d}/{name}")).unlink()
    assert names_below(run, 2) == PACKED - {"commit.json", "rank-00000.manifest.json"}
    shutil.rmtree(run.memory)
    back, bits = run.restored()
    assert back is not None
    assert (back.step, back.faults) == (3, ())
    assert bits == uninterrupted(4)[3]
    assert names_below(run, 2) == set()


def test_a_death_before_any_object_of_a_packed_base_leaves_the_old_step_or_the_new(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Run] = []

    class Watched(FaultStore):
        def _watch(self, key: str) -> None:
            if f"base/{3:012d}" in key:
                taken.append(run.copied(f"before-{len(taken)}", memory=False))

        async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
            self._watch(key)
            await super().put(key, parts)

        async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
            self._watch(key)
            await super().create(key, parts)

    def tier(label: str, store: ObjectStore, **settings: object) -> Tier:
        return Tier(label, Watched(store) if label == "directory" else store, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(assembly, "Tier", tier)
    job = Job()
    with run.open(job) as well:
        for step in range(4):
            job.step()
            well.save(step, base=step == 3).until(None, PATIENCE_S)
        idle(well)
        taken.append(run.copied("after", memory=False))
    monkeypatch.undo()
    assert len(taken) == 5, "data, index, manifest, commit record, and after"
    found = []
    for copy in taken:
        # Without the differential nothing but the base can lead to step 3.
        for path in copy.objects("directory", f"step/{3:012d}/*"):
            path.unlink()
        again = Job(seed=99)
        with copy.open(again) as well:
            back = well.restore()
        assert back is not None
        assert again.bits() == uninterrupted(4)[back.step]
        found.append(back.step)
    assert found == [2, 2, 2, 2, 3]


def s3_config(s3: Bucket, memory: Path, **keys: object) -> dict[str, object]:
    remote = {"kind": "remote", "url": s3.url, "endpoint": s3.endpoint, "lease_s": 1.0, "timeout_s": 10.0}
    tiers = [{"kind": "memory", "directory": str(memory)}, {**remote, "layout": "pack", **keys}]
    return {
        "tiers": tiers,
        "log_budget": 1000.0,
        "chunk_bytes": 64 << 10,
        "handle_sigterm": False,
        "close_deadline_s": PATIENCE_S,
    }


def s3_trained(config: dict[str, object], steps: int, width: int) -> Job:
    job = Job(width=width)
    with stepwell.open_sync(config, model=job.model, optimizer=job.optimizer) as well:
        for step in range(steps):
            job.step()
            well.save(step, base=step == steps - 1).until(None, PATIENCE_S)
        idle(well)
    return job


def test_on_object_storage_a_packed_base_is_cut_below_the_largest_put(
    s3: Bucket, memory_directory: Path
) -> None:
    width, limit = 40_000, 1 << 20
    job = s3_trained(s3_config(s3, memory_directory / "one", put_bytes_max=limit), 3, width)
    keys = [key for key in s3.listed("run/") if f"/base/{2:012d}/" in key]
    data = [key for key in keys if ".data-" in key]
    assert len(data) > 3
    assert not [key for key in keys if "parts" in key], "no object was split by the store: fsspec reads them"
    assert max(len(s3.get(key) or b"") for key in data) <= limit
    again = Job(seed=99, width=width)
    config = s3_config(s3, memory_directory / "two", put_bytes_max=limit)
    with stepwell.open_sync(config, model=again.model, optimizer=again.optimizer) as well:
        back = well.restore()
    assert back is not None
    assert (back.step, back.tier, back.exact) == (2, "remote", True)
    assert again.bits() == job.bits()


def test_on_object_storage_plain_zarr_opens_a_packed_base(s3: Bucket, memory_directory: Path) -> None:
    """Through fsspec's reference file system and s3fs, in a process that never imports stepwell."""
    job = s3_trained(s3_config(s3, memory_directory), 3, 8)
    (index,) = (key for key in s3.listed("run/") if key.endswith(f"/base/{2:012d}/rank-00000.refs.json"))
    code = (
        "import sys, json, zarr\n"
        "service = {'client_kwargs': {'endpoint_url': sys.argv[2]}}\n"
        "here = sys.argv[1].rpartition('/')[0] + '/'\n"
        "options = {'fo': sys.argv[1], 'target_options': service, 'template_overrides': {'here': here},\n"
        "           'remote_protocol': 's3', 'remote_options': {**service, 'asynchronous': True}}\n"
        "group = zarr.open_group('reference://', mode='r', storage_options=options)\n"
        "weight = group['model/0.weight'][:]\n"
        "assert 'stepwell' not in sys.modules\n"
        "print(json.dumps([sorted(group['model'].array_keys()), weight.tobytes().hex()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"s3://{s3.name}/{index}", s3.endpoint],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **s3.environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names, weight = json.loads(done.stdout)
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert bytes.fromhex(weight) == job.bits()["model.0.weight"]


def test_the_key_is_one_of_tiers_with_bases_of_zarr(tmp_path: Path) -> None:
    def of(**tier: object) -> object:
        return load_config({"tiers": [tier]}).tiers[0]

    assert of(kind="directory", path=str(tmp_path)).layout == "tree"  # type: ignore[attr-defined]
    assert of(kind="remote", url="memory://x/y", layout="pack").layout == "pack"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="layout"):
        of(kind="memory", layout="pack")
    with pytest.raises(ConfigError, match="tree"):
        of(kind="directory", path=str(tmp_path), layout="flat")
