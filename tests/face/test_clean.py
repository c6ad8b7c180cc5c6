"""``stepwell clean``: dead arenas are listed and go when asked for, living ones never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run

from stepwell.cli.app import run as run_command
from stepwell.stores.arena import Arena

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, object]]]:
    code = run_command(["clean", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)["arenas"]


@pytest.fixture
def run(memory_directory: Path) -> Run:
    run = Run(memory_directory)
    run.train(range(4))
    return run


def test_dead_run_is_listed_with_its_newest_step(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.memory.rglob("*"))
    code, (arena,) = told(capsys, str(run.root))
    assert code == 0
    assert (arena["path"], arena["owner"]) == (str(run.memory), None)
    assert (arena["newest_step"], arena["removed"]) == (3, False)
    assert arena["size_bytes"] > 10_000
    assert sorted(run.memory.rglob("*")) == before, "to look changes nothing"
    assert run_command(["clean", str(run.root)]) == 0
    assert "none" in capsys.readouterr().out


def test_dead_run_goes_when_told_and_only_its_arena(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.memory / "notes.txt").write_text("somebody's own")
    _, (arena,) = told(capsys, str(run.root), "--remove")
    assert arena["removed"] is True
    assert [path.name for path in run.memory.iterdir()] == ["notes.txt"]
    restored, _ = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier) == (3, "directory")


def test_living_run_is_never_touched(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    import multiprocessing

    job = Job(seed=99)
    with run.open(job) as well:
        assert well.restore() is not None
        job.step()
        well.save(4).until(None, PATIENCE_S)
        # From another process: a lock is invisible to its own.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            code = pool.apply(run_command, (["clean", str(run.root), "--remove"],))
        assert code == 0
        job.step()
        well.save(5).until("memory", PATIENCE_S)
        assert well.latest_step("memory") == 5


def test_other_things_are_left_alone(memory_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (memory_directory / "a" / "b" / "c" / "d").mkdir(parents=True)
    (memory_directory / "a" / "file").write_text("x")
    assert told(capsys, str(memory_directory), "--remove") == (3, [])
    assert told(capsys, str(memory_directory / "missing")) == (3, [])
    assert (memory_directory / "a" / "file").read_text() == "x"


def test_arena_whose_record_is_damaged_is_named_and_kept(
    memory_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Arena.open(memory_directory / "arena", run="run"):
        pass
    record = memory_directory / "arena" / "arena.json"
    record.write_bytes(b"?" * 10)
    code, (arena,) = told(capsys, str(memory_directory), "--remove")
    assert code == 0
    assert (arena["run"], arena["removed"]) == ("", False)
    assert record.exists()
