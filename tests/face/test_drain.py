"""``stepwell drain``: what a killed run left in memory is brought to the tiers that stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from failure_rig import PATIENCE_S, Job, Run, flip, uninterrupted

import stepwell
from stepwell.cli.app import run as run_command
from stepwell.cli.reading import arena_of, config_of
from stepwell.config import load_config
from stepwell.stores.arena import Arena

if TYPE_CHECKING:
    from s3_rig import Bucket

STEPS = 12


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


@pytest.fixture
def drained(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, object]]]:
    """Drain the run; gives the exit code and what was said."""

    def drain(*options: str) -> tuple[int, dict[str, object]]:
        config = run.root / "run.json"
        config.write_text(json.dumps({**run.config(), "tiers": run.config()["tiers"]}))
        config = config.rename(config.with_suffix(".yaml"))  # JSON is YAML
        code = run_command(["drain", str(config), "--json", *options])
        told = json.loads(capsys.readouterr().out)
        assert isinstance(told, dict)
        return code, told

    return drain


def lose_steps_from(run: Run, first_step: int) -> None:
    for path in run.directory.glob("*/step/*"):
        if int(path.name) >= first_step:
            shutil.rmtree(path)


def lose_directory(run: Run, first_step: int = 0) -> None:
    """Let the directory be one that never got the steps from one on, and no base."""
    lose_steps_from(run, first_step)
    if not first_step:
        for path in run.directory.glob("*/base"):
            shutil.rmtree(path)


def from_directory(run: Run) -> stepwell.Restored:
    """Restore where memory is gone, and compare every bit."""
    shutil.rmtree(run.memory, ignore_errors=True)
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.tier, restored.exact, restored.lost_steps) == ("directory", True, 0)
    assert bits == uninterrupted(STEPS)[restored.step]
    return restored


def only_told(told: dict[str, object]) -> dict[str, object]:
    tiers = told["tiers"]
    assert isinstance(tiers, list)
    assert len(tiers) == 1
    assert isinstance(tiers[0], dict)
    return tiers[0]


def test_steps_that_memory_alone_had_are_restored_from_the_directory(
    run: Run, drained: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    run.train(range(STEPS))
    lose_directory(run, 7)
    code, told = drained()
    assert code == 0
    tier = only_told(told)
    assert (tier["tier"], tier["step"], tier["bases"]) == ("directory", STEPS - 1, 0)
    assert tier["saves"] == STEPS - 7, "the log goes on where it ended there"
    assert run.memory.exists(), "kept unless asked otherwise"
    assert run_command(["verify", str(run.directory)]) == 0
    assert from_directory(run).step == STEPS - 1


@pytest.mark.parametrize("layout", ["tree", "pack"])
def test_a_base_is_brought_where_no_log_leads_to(
    run: Run, drained: Callable[..., tuple[int, dict[str, object]]], layout: str
) -> None:
    run.directory_keys = {"layout": layout}
    run.train(range(STEPS), base_at=(6,))
    lose_directory(run)
    code, told = drained("--remove")
    assert code == 0
    tier = only_told(told)
    assert (tier["step"], tier["bases"], tier["saves"]) == (STEPS - 1, 1, STEPS - 1 - 6)
    assert not run.memory.exists()
    assert run_command(["verify", str(run.directory)]) == 0
    assert from_directory(run).step == STEPS - 1


def test_nothing_is_brought_twice(run: Run, drained: Callable[..., tuple[int, dict[str, object]]]) -> None:
    run.train(range(STEPS))
    code, told = drained()
    assert code == 0
    assert only_told(told) == {"tier": "directory", "step": STEPS - 1, "saves": 0, "bases": 0, "bytes": 0}


def test_a_damaged_save_in_memory_is_not_brought(
    run: Run, drained: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    run.train(range(STEPS))
    lose_directory(run)
    with Arena.inspect(run.memory) as arena:
        names = arena.keys()
        (base,) = (name for name in names if "/base/" in name and name.endswith(".pack"))
        region = arena.find(base)
        assert region is not None
        path = Path(region.path)
    flip(path, 4400 / path.stat().st_size)  # behind the header of its region
    code, told = drained()
    assert code == 1, told
    assert "checksum" in str(told) or "damaged" in str(told)
    assert run.memory.exists()


def committed(root: Path) -> dict[str, bytes]:
    """All files by name, but locks."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "lock" not in path.name
    }


@pytest.mark.parametrize("own_too", [False, True])
def test_a_directory_of_another_run_is_refused_and_nothing_is_written(
    run: Run, drained: Callable[..., tuple[int, dict[str, object]]], own_too: bool
) -> None:
    second = run.root / "second"
    run.keys = {"tiers": [*run.tiers(), {"kind": "directory", "name": "second", "path": str(second)}]}
    run.train(range(STEPS))
    other = Run(run.root / "other")
    other.root.mkdir()
    other.train(range(3))
    for path in (second,) if own_too else (second, run.directory):
        shutil.rmtree(path)
        shutil.copytree(other.directory, path)
    lose_steps_from(run, 7)
    before = committed(run.directory), committed(second)
    code, told = drained("--remove")
    assert code == 2, told
    assert "belongs to" in str(told)
    assert (committed(run.directory), committed(second)) == before
    assert run.memory.exists()


@pytest.mark.filterwarnings("ignore:.*the run is known from what else is there")
@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.98])
@pytest.mark.parametrize(
    "damaged",
    [
        "*/step/*/rank-00000.pack",
        "*/step/*/rank-00000.manifest.json",
        "*/step/*/commit.json",
        "*/base/*/rank-00000.manifest.json",
        "*/base/*/commit.json",
        "*/base/*/*/zarr.json",
        "*/base/**/c/*",
        "layouts/*.json",
        "incarnations/*.json",
        "stepwell.json",
    ],
)
def test_memory_was_let_go_of_although_the_directory_was_damaged(
    run: Run, drained: Callable[..., tuple[int, dict[str, object]]], damaged: str, fraction: float
) -> None:
    """Either the drain says so and keeps the memory, or the directory alone leads to every bit."""
    run.train(range(STEPS))
    path = sorted(path for path in run.directory.glob(damaged) if path.is_file())[0]
    flip(path, fraction)
    lose_steps_from(run, 7)
    code, told = drained("--remove")
    if code == 0:
        assert not run.memory.exists()
        assert from_directory(run).step == STEPS - 1
    else:
        assert code == 1, told
        assert run.memory.exists()
        restored, bits = run.restored()
        assert restored is not None
        assert (restored.step, restored.exact) == (STEPS - 1, True)
        assert bits == uninterrupted(STEPS)[STEPS - 1]


@pytest.mark.parametrize("preset", ["compact", "tiercheck", "fastcheck"])
def test_a_lossy_log_does_not_stand_in_for_a_base(
    run: Run, drained: Callable[..., tuple[int, dict[str, object]]], preset: str
) -> None:
    run.keys = {"preset": preset}
    run.train(range(STEPS), base_at=(6,))
    expected, bits = run.copied("copy").restored()
    lose_directory(run, 3)
    for path in sorted(run.directory.glob("*/base/*"))[1:]:
        shutil.rmtree(path)
    code, told = drained("--remove")
    assert code == 0, told
    assert only_told(told)["bases"] == 1
    restored, same = run.restored()
    assert expected is not None
    assert restored is not None
    assert (restored.step, restored.bound) == (expected.step, expected.bound)
    assert same == bits, "as memory would have given it"


def test_a_run_with_no_tier_that_stays_is_told_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(range(3))
    config = run.root / "run.yaml"
    peer = {"kind": "peer", "address": "127.0.0.1:9"}
    config.write_text(json.dumps({**run.config(), "tiers": [run.tiers()[0], peer]}))
    assert run_command(["drain", str(config), "--remove"]) == 2
    assert "no directory and no object storage" in capsys.readouterr().err
    assert run.memory.exists()


def test_a_run_with_a_name_was_not_found_by_its_directory(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its memory lies follows from its name, which the directory knows."""
    run.keys = {"run": "night"}
    run.train(range(STEPS))
    usual = arena_of(config_of(str(run.directory)))
    assert usual != arena_of(load_config(str(run.directory)))
    usual.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.move(run.memory, usual)
    lose_directory(run, 7)
    assert run_command(["drain", str(run.directory), "--json", "--remove"]) == 0
    assert only_told(json.loads(capsys.readouterr().out))["saves"] == STEPS - 7
    assert from_directory(run).step == STEPS - 1


def test_a_living_run_is_left_alone(run: Run, drained: Callable[..., tuple[int, dict[str, object]]]) -> None:
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(0).until(None, PATIENCE_S)
        code, told = drained()
        assert code == 2
        assert "open" in str(told)
        job.step()
        well.save(1).until(None, PATIENCE_S)


def test_no_memory_is_told(run: Run, drained: Callable[..., tuple[int, dict[str, object]]]) -> None:
    assert drained()[0] == 3
    assert not run.directory.exists() or not list(run.directory.iterdir())


def test_memory_is_brought_to_object_storage(
    s3: Bucket, memory_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(memory_directory)
    remote = {"kind": "remote", "url": s3.url, "endpoint": s3.endpoint, "lease_s": 1.0}
    memory = {"kind": "memory", "directory": str(run.memory)}
    run.keys = {"tiers": [memory, {"kind": "directory", "path": str(run.directory)}]}
    run.train(range(STEPS))
    shutil.rmtree(run.directory)
    config = run.root / "run.yaml"
    config.write_text(json.dumps({**run.config(), "tiers": [memory, remote]}))
    assert run_command(["drain", str(config), "--json"]) == 0, capsys.readouterr().out
    shutil.rmtree(run.memory)
    job = Job(seed=99)
    with stepwell.open_sync(config, model=job.model, optimizer=job.optimizer) as well:
        restored = well.restore()
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact) == (STEPS - 1, "remote", True)
    assert job.bits() == uninterrupted(STEPS)[STEPS - 1]
