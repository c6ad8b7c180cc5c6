"""Saves that were captured and nothing more when their trainer was killed: somebody else commits them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Bits, Job, Run, flip, uninterrupted
from keeper_rig import Node, make_secret

import stepwell
from stepwell.cli.app import run as run_command
from stepwell.pipeline import finish
from stepwell.pipeline.finish import finish_captures, finish_in
from stepwell.pipeline.keys import parse_key
from stepwell.stores.arena import Arena
from stepwell.stores.arena_files import FINISH_LOCK_NAME
from stepwell.stores.lock import FileLock

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 7
HELD = 5  # the first step that is captured only


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


@pytest.fixture
def node(memory_directory: Path, tmp_path: Path, run: Run) -> Iterator[Node]:
    """A keeper that finishes what the run's trainer leaves."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run.config()))  # JSON is YAML
    keeper = Node(
        memory_directory / "keeper", "node", make_secret(tmp_path / "secret"), ("--finish", str(config))
    )
    yield keeper.start()
    if keeper.process is not None:
        keeper.stop(signal.SIGKILL)


def killed(
    run: Run, tmp_path: Path, *words: str, updates: int = 1, steps: int = STEPS, held: int = HELD
) -> None:
    """Train until the steps from `held` on are captured, and be killed there."""
    worker = Path(__file__).with_name("captured_worker.py")
    numbers = [str(number) for number in (steps, held, updates)]
    command = [sys.executable, str(worker), json.dumps(run.config()), *numbers, *words]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, stderr=log, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]


def marks_of(run: Run) -> list[Path]:
    return sorted(run.memory.glob("capture-*"))


def came_back(run: Run, step: int, bits: Bits) -> None:
    """Restore from memory, and compare every bit."""
    restored, found = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact, restored.lost_steps) == (step, "memory", True, 0)
    assert found == bits


def test_keeper_commits_what_a_trainer_had_captured_when_it_was_killed(
    run: Run, node: Node, tmp_path: Path
) -> None:
    killed(run, tmp_path)
    assert node.process is not None
    assert node.process.stdout is not None
    told = json.loads(node.process.stdout.readline())
    assert told == {"finished": [5, 6], "memory": str(run.memory)}
    assert node.stop() == 0, "it has let go of the arena"
    assert marks_of(run) == []
    with Arena.inspect(run.memory) as arena:
        steps = [place.step for place in map(parse_key, arena.keys()) if place is not None]
    assert steps.count(6) == 2, "a pack and its manifest"
    came_back(run, 6, uninterrupted(STEPS)[6])


def test_next_start_commits_it_where_there_is_no_keeper(run: Run, tmp_path: Path) -> None:
    killed(run, tmp_path)
    assert len(marks_of(run)) >= 4, "two saves, each with a slot and a record"
    came_back(run, 6, uninterrupted(STEPS)[6])
    assert marks_of(run) == []


@pytest.mark.parametrize("delta", ["none", "ordered_delta", "predictive"])
def test_captured_states_are_finished_too(run: Run, tmp_path: Path, delta: str) -> None:
    run.keys["pipeline"] = [{"capture": "state"}, {"delta": delta}, "shard", "replicate", "commit"]
    killed(run, tmp_path)
    came_back(run, 6, uninterrupted(STEPS)[6])


def test_save_of_two_updates_lies_in_two_slots(run: Run, tmp_path: Path) -> None:
    killed(run, tmp_path, updates=2, steps=HELD + 1)
    came_back(run, 5, uninterrupted(12)[11])


def test_finished_saves_can_be_drained(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(run, tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run.config()))
    assert run_command(["drain", str(config), "--json", "--remove"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(tier["tier"], tier["step"]) for tier in told["tiers"]] == [("directory", 6)]
    restored, found = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact) == (6, "directory", True)
    assert found == uninterrupted(STEPS)[6]


def test_training_goes_on_from_a_finished_save(run: Run, tmp_path: Path) -> None:
    killed(run, tmp_path)
    job = Job(seed=99)
    with run.open(job) as well:
        restored = well.restore()
        assert restored is not None
        for step in range(restored.step + 1, 12):
            job.step()
            well.save(step)
    assert job.bits() == uninterrupted(12)[11]
    restored, found = run.restored()
    assert restored is not None
    assert (restored.step, found) == (11, uninterrupted(12)[11])


def test_capture_whose_record_is_damaged_is_told_of_and_the_step_before_comes_back(
    run: Run, tmp_path: Path
) -> None:
    killed(run, tmp_path, steps=HELD + 1)
    damaged = [path for path in marks_of(run) if b'"kind":"capture"' in path.read_bytes()]
    assert len(damaged) == 1
    data = damaged[0].read_bytes()
    flip(damaged[0], (data.index(b'"kind":"capture"') + 9) / len(data))
    with pytest.warns(UserWarning, match="captures/.*damaged"):
        came_back(run, 4, uninterrupted(STEPS)[4])
    assert marks_of(run) == []


def test_capture_in_the_middle_that_is_gone_ends_what_is_finished(run: Run, tmp_path: Path) -> None:
    """The save after it leads on from nothing."""
    killed(run, tmp_path, steps=HELD + 3)
    for path in marks_of(run):
        with path.open("rb") as file:
            if b"/6/" in file.read(4096):
                path.unlink()
    came_back(run, 5, uninterrupted(STEPS)[5])


def test_slot_that_serves_another_save_by_now_is_not_taken_for_the_one_recorded(
    run: Run, tmp_path: Path
) -> None:
    """A slot whose mark was made anew has another serial than the record names."""
    killed(run, tmp_path, steps=HELD + 1)
    with Arena.inspect(run.memory) as inspected:
        name = inspected.run
    with Arena.open(run.memory, run=name) as arena:
        for region in arena.left():
            header = region.header
            assert header is not None
            if header.key.endswith("/0"):
                arena.unmark(region)
                arena.mark(region, header.key, header.length)
    came_back(run, 4, uninterrupted(STEPS)[4])


def test_capture_of_an_older_life_adds_nothing_to_a_newer_one(run: Run, tmp_path: Path) -> None:
    """The trainer was killed, its memory copied, a newer life has begun: the older one is over."""
    killed(run, tmp_path, steps=HELD + 1)
    older = run.copied("older")
    job = Job(seed=99)
    with run.open(job) as well:
        well.restore()
        for step in (6, 7):
            job.step()
            well.save(step).until("memory", PATIENCE_S)
        shared = {path.name: path.read_bytes() for path in run.memory.glob("object-*")}
    # Where the older capture lies beside what the newer life has committed.
    for name, data in shared.items():
        (older.memory / name).write_bytes(data)
    assert marks_of(older)
    assert finish_in(older.memory) == []
    assert marks_of(older) == []


def test_lossy_pipeline_marks_nothing(run: Run, tmp_path: Path) -> None:
    """What its reader will have is known to the dead process alone."""
    run.keys["preset"] = "compact"
    killed(run, tmp_path, "unmarked")
    assert marks_of(run) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored, _ = run.restored()
    assert restored is not None
    assert restored.step == 4


def test_nothing_stays_marked_while_saves_are_committed(run: Run) -> None:
    job = Job()
    with run.open(job) as well:
        for step in range(20):
            job.step()
            well.save(step)
        well.wait_until_finished(PATIENCE_S)
        assert marks_of(run) == []


def test_fresh_run_lets_go_of_what_was_captured(run: Run, tmp_path: Path) -> None:
    killed(run, tmp_path)
    job = Job()
    with run.open(job, fresh=True) as well:
        assert marks_of(run) == []
        assert well.latest_step() == 4


def test_start_waits_for_a_keeper_that_is_finishing(run: Run, tmp_path: Path) -> None:
    """It was refused, as if another trainer lived."""
    killed(run, tmp_path)
    with Arena.inspect(run.memory) as inspected:
        name = inspected.run
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from stepwell.stores.arena import Arena; from stepwell.stores.lock import FileLock\n"
            "lock = FileLock(sys.argv[1]); lock.acquire(); arena = Arena.open(sys.argv[2], run=sys.argv[3])\n"
            "print('held', flush=True); sys.stdin.readline(); arena.close(); lock.release()",
            str(run.memory / FINISH_LOCK_NAME),
            str(run.memory),
            name,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        waits = threading.Event()

        class Clock:
            """Tells when the first wait begins."""

            monotonic = staticmethod(time.monotonic)

            @staticmethod
            def sleep(seconds: float) -> None:
                waits.set()
                time.sleep(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(finish, "time", Clock)
            found: list[tuple[stepwell.Restored | None, Bits]] = []
            opener = threading.Thread(target=lambda: found.append(run.restored()))
            opener.start()
            assert waits.wait(PATIENCE_S)
            holder.stdin.write("\n")
            holder.stdin.flush()
            opener.join(PATIENCE_S)
    assert found
    assert found[0][0] is not None
    assert found[0][0].step == 6


def test_second_trainer_is_refused_at_once_although_keepers_finish(run: Run) -> None:
    with run.open(Job()), pytest.raises(stepwell.LockedError, match="locked by"), run.open(Job()):
        pass


def test_two_that_finish_one_arena_exclude_each_other(run: Run, tmp_path: Path) -> None:
    killed(run, tmp_path)
    with FileLock(run.memory / FINISH_LOCK_NAME), pytest.raises(stepwell.LockedError):
        finish_in(run.memory)
    assert len(finish_in(run.memory)) == 2
    assert finish_in(run.memory) == []


def test_arena_without_room_says_that_the_captures_are_lost(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(run, tmp_path)
    with Arena.inspect(run.memory) as inspected:
        name = inspected.run
    with Arena.open(run.memory, run=name) as arena:

        def full(size_bytes: int) -> None:
            raise stepwell.NoSpaceError("full")

        monkeypatch.setattr(arena, "reserve", full)
        with pytest.warns(UserWarning, match="cannot be committed: .*full"):
            assert finish_captures(arena) == []
