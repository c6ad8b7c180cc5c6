"""Copies on other nodes: real keepers, killed, emptied, away, and strangers at the door."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from failure_rig import PATIENCE_S, Bits, Job, uninterrupted
from keeper_rig import RUN, Node, make_secret

import stepwell
from stepwell.cli.app import run as run_command
from stepwell.errors import NotCommittedError, PermanentStoreError
from stepwell.keeper.keeper import ARENA_NAME
from stepwell.stores.arena import Arena

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Start = Callable[..., Node]


@pytest.fixture
def start(memory_directory: Path, tmp_path: Path) -> Iterator[Start]:
    """Start keepers by name; all are ended afterwards."""
    secret = make_secret(tmp_path / "secret")
    nodes: list[Node] = []

    def begin(name: str, *options: str) -> Node:
        nodes.append(Node(memory_directory / name, name, secret, options).start())
        return nodes[-1]

    yield begin
    for node in nodes:
        if node.process is not None:
            node.stop(signal.SIGKILL)


def config_of(memory: Path, *tiers: dict[str, object]) -> dict[str, object]:
    return {
        "tiers": [{"kind": "memory", "directory": str(memory)}, *tiers],
        "log_budget": 1000.0,
        "handle_sigterm": False,
        "close_deadline_s": PATIENCE_S,
    }


def opened(config: dict[str, object], job: Job) -> stepwell.SyncWell:
    return stepwell.open_sync(config, model=job.model, optimizer=job.optimizer)


def restored(config: dict[str, object]) -> tuple[stepwell.Restored | None, Bits]:
    job = Job(seed=99)
    with opened(config, job) as well:
        return well.restore(), job.bits()


def saved(well: stepwell.SyncWell, job: Job, step: int, tier: str, **keys: bool) -> None:
    job.step()
    well.save(step, **keys).until(tier, PATIENCE_S)


def test_lost_node_and_one_of_its_two_peers(start: Start, memory_directory: Path, tmp_path: Path) -> None:
    """Killed with SIGKILL, memory gone, one holder gone with its memory: back from the other, bit for bit."""
    first, second = start("first"), start("second")
    config = config_of(memory_directory / "own", first.tier(), second.tier())
    worker = Path(__file__).with_name("remote_worker.py")
    command = [sys.executable, str(worker), json.dumps(config), "7", "[3]"]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=100, check=False
        )
    assert done.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
    assert done.stdout.split()[-1] == "5"
    shutil.rmtree(memory_directory / "own")
    first.lose()
    with pytest.warns(UserWarning, match="tier first is given up"):
        again, bits = restored(config_of(memory_directory / "new", first.tier(), second.tier()))
    assert again is not None
    assert again.step >= 5
    assert (again.tier, again.exact, again.lost_steps) == ("second", True, 0)
    assert bits == uninterrupted(7)[again.step]


def test_killed_keeper_finds_what_it_held_and_the_log_goes_on(start: Start, memory_directory: Path) -> None:
    node = start("peer")
    job = Job()
    with opened(config_of(memory_directory / "own", node.tier()), job) as well:
        for step in range(3):
            saved(well, job, step, "peer")
        assert node.stop(signal.SIGKILL) == -signal.SIGKILL
        node.start()
        for step in range(3, 6):
            saved(well, job, step, "peer")
        assert [record.step for record in well.metrics().saves if record.base] == [0]
        assert well.all_steps("peer") == list(range(6))
    again, bits = restored(config_of(memory_directory / "new", node.tier()))
    assert again is not None
    assert (again.step, again.tier, again.exact) == (5, "peer", True)
    assert bits == uninterrupted(6)[5]


def test_keeper_that_came_back_empty_acknowledges_nothing_before_a_base(
    start: Start, memory_directory: Path
) -> None:
    node = start("peer")
    job = Job()
    config = config_of(memory_directory / "own", node.tier())
    with opened(config, job) as well, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            saved(well, job, step, "peer")
        node.lose()
        node.start()
        with pytest.raises(NotCommittedError, match="began anew"):
            saved(well, job, 3, "peer")
        step = 3
        while True:  # asked for, tried, written: a base follows within a few saves
            step += 1
            assert step < 20
            job.step()
            handle = well.save(step)
            well.wait_until_finished(PATIENCE_S)
            if handle.future("peer").exception(PATIENCE_S) is None:
                break
        saved(well, job, step + 1, "peer")
        assert well.all_steps("peer")[-2:] == [step, step + 1]
        assert not {0, 1, 2, 3} & set(well.all_steps("peer")), "they are gone there"
    assert any("began anew" in str(one.message) for one in told)
    again, bits = restored(config_of(memory_directory / "new", node.tier()))
    assert again is not None
    assert (again.step, again.tier, again.exact) == (step + 1, "peer", True)
    assert bits == uninterrupted(step + 2)[step + 1]


def test_peer_that_is_away_for_a_while_stops_nobody_and_catches_up(
    start: Start, memory_directory: Path
) -> None:
    node = start("peer")
    job = Job()
    # The peer comes last, so that it keeps what it holds when the run ends.
    config = config_of(memory_directory / "own", _directory(memory_directory), node.tier())
    with opened(config, job) as well, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saved(well, job, 0, "peer")
        node.stop(signal.SIGKILL)
        for step in range(1, 4):
            saved(well, job, step, "directory")
        well.wait_until_finished(PATIENCE_S)
        assert "peer" in well.metrics().lost_tiers
        node.start()
        step = 3
        while "peer" in well.metrics().lost_tiers or step not in well.all_steps("peer"):
            step += 1
            assert step < 20
            saved(well, job, step, "directory", base=step == 4)
            well.wait_until_finished(PATIENCE_S)
    said = [str(one.message) for one in told]
    assert any("tier peer is given up" in one for one in said), said
    assert any("tier peer answers again" in one for one in said), said
    again, bits = restored(config_of(memory_directory / "new", node.tier()))
    assert again is not None
    assert (again.step, again.tier, again.exact) == (step, "peer", True)
    assert bits == uninterrupted(step + 1)[step]


def _directory(place: Path) -> dict[str, object]:
    return {"kind": "directory", "path": str(place / "directory")}


def test_end_of_a_run_frees_what_its_peers_hold(start: Start, memory_directory: Path) -> None:
    """Everything is in the directory then; the records stay, and the next life goes on."""
    node = start("peer")
    config = config_of(memory_directory / "own", node.tier(), _directory(memory_directory))
    job = Job()
    with opened(config, job) as well:
        for step in range(3):
            saved(well, job, step, "peer")
        well.wait_until_finished(PATIENCE_S)
    assert held(node) == {"step": 0, "base": 0}
    again = Job(seed=99)
    with opened(config, again) as well:
        back = well.restore()
        assert back is not None
        assert (back.step, back.tier) == (2, "directory")
        saved(well, again, 3, "peer")
        well.wait_until_finished(PATIENCE_S)
        assert held(node) == {"step": 1, "base": 0}, "the directory, which survives more, has the rest"
    assert held(node) == {"step": 0, "base": 0}


def held(node: Node) -> dict[str, int]:
    """How many saves and bases a keeper holds."""
    with Arena.inspect(node.directory / ARENA_NAME) as arena:
        names = arena.keys()
        return {
            series: sum(f"/{series}/" in name and name.endswith(".pack") for name in names)
            for series in ("step", "base")
        }


def test_run_opens_without_its_peer_and_says_so(start: Start, memory_directory: Path) -> None:
    node = start("peer")
    config = config_of(memory_directory / "own", node.tier(), _directory(memory_directory))
    job = Job()
    with opened(config, job) as well:
        for step in range(3):
            saved(well, job, step, "directory")
    node.stop(signal.SIGKILL)
    with pytest.warns(UserWarning, match="tier peer is given up"):
        again, bits = restored(config)
    assert again is not None
    assert (again.step, again.lost_steps) == (2, 0)
    assert bits == uninterrupted(3)[2]
    refusing = config_of(memory_directory / "own", node.tier(on_error="raise"), _directory(memory_directory))
    with pytest.raises(stepwell.TransientStoreError):
        opened(refusing, Job())


def test_life_that_was_followed_by_another_acknowledges_nothing_more(
    start: Start, memory_directory: Path
) -> None:
    """A node that was cut off goes on training beside the run that was restored from its peer."""
    node = start("peer")
    wanted = uninterrupted(6)
    second_job, first_job = Job(seed=99), Job()
    first = opened(config_of(memory_directory / "one", node.tier(on_error="raise")), first_job)
    for step in range(3):
        saved(first, first_job, step, "peer")
    drawn = torch.get_rng_state()
    second = opened(config_of(memory_directory / "two", node.tier()), second_job)
    back = second.restore()
    assert back is not None
    assert back.step == 2
    saved(second, second_job, 3, "peer")
    follower = torch.get_rng_state()
    torch.set_rng_state(drawn)
    with pytest.raises(PermanentStoreError, match="incarnation 1 of the run is over"):
        saved(first, first_job, 3, "peer")
    node.stop(signal.SIGKILL)
    node.start()  # it remembers whose run it is
    first_job.step()
    with pytest.raises(PermanentStoreError, match="is over"):
        first.save(4)
    with pytest.raises(PermanentStoreError, match="is over"):
        first.save(4).until("peer", PATIENCE_S)
    with pytest.raises(PermanentStoreError, match="is over"):
        first.close()
    torch.set_rng_state(follower)
    saved(second, second_job, 4, "peer")
    second.close()
    again, bits = restored(config_of(memory_directory / "three", node.tier()))
    assert again is not None
    assert (again.step, again.exact) == (4, True)
    assert bits == wanted[4]


def test_wrong_secret_is_an_error_at_the_start(start: Start, memory_directory: Path, tmp_path: Path) -> None:
    node = start("peer")
    other = make_secret(tmp_path / "other")
    tier = {**node.tier(), "secret_file": str(other)}
    with pytest.raises(PermanentStoreError, match="secret"):
        opened(config_of(memory_directory / "own", tier), Job())
    with opened(config_of(memory_directory / "own", node.tier()), Job()) as well:
        assert well.restore() is None, "nothing was written, and the keeper serves on"


def test_run_of_another_name_is_refused(start: Start, memory_directory: Path) -> None:
    node = start("peer")
    config = {**config_of(memory_directory / "own", node.tier()), "run": "other"}
    with pytest.raises(PermanentStoreError, match="run"):
        opened(config, Job())


def test_full_keeper_refuses_and_training_goes_on(start: Start, memory_directory: Path) -> None:
    node = start("peer", "--budget", "100000")
    config = config_of(memory_directory / "own", node.tier(), _directory(memory_directory))
    job = Job()
    with opened(config, job) as well, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(6):
            saved(well, job, step, "directory", base=True)
        well.wait_until_finished(PATIENCE_S)
        job.step()
        well.save(6).until("directory", PATIENCE_S)
    said = " ".join(str(one.message) for one in told)
    assert "tier peer is given up" in said
    assert "budget" in said
    used = sum(path.stat().st_blocks * 512 for path in node.directory.rglob("*") if path.is_file())
    assert used < 200_000


def test_two_keepers_on_one_arena(start: Start, memory_directory: Path) -> None:
    node = start("peer")
    command = [sys.executable, "-m", "stepwell", "keeper", "--run", RUN, "--memory", str(node.directory)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert second.returncode == 2
    assert f"process {node.process.pid}" in second.stderr
    other = ["--run", "other", "--memory", str(node.directory)]
    node.stop()
    second = subprocess.run([*command[:4], *other], capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert "belongs to run" in second.stderr


def test_clean_end_and_status(
    start: Start, memory_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start("peer")
    job = Job()
    with opened(config_of(memory_directory / "own", node.tier()), job) as well:
        saved(well, job, 0, "peer")
        saved(well, job, 1, "peer")

    def status() -> tuple[int, dict[str, object]]:
        code = run_command(["keeper", "--status", "--memory", str(node.directory), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, said = status()
    assert code == 0
    assert (said["running"], said["pid"]) == (True, node.process.pid)
    assert said["objects"] > 4
    assert said["held_bytes"] > 10_000
    assert node.stop() == 0
    code, after = status()
    assert (code, after["running"], after["held_bytes"]) == (3, False, said["held_bytes"])
    assert run_command(["keeper", "--status", "--memory", str(memory_directory / "none"), "--json"]) == 3


def test_what_a_keeper_holds_is_looked_at(
    start: Start, memory_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start("peer")
    config = config_of(memory_directory / "own", node.tier())
    job = Job()
    with opened(config, job) as well:
        for step in range(3):
            saved(well, job, step, "peer")
    shutil.rmtree(memory_directory / "own", ignore_errors=True)
    file = tmp_path / "run.json.yaml"
    file.write_text(json.dumps(config))
    for command in (["ls"], ["show"], ["verify"]):
        assert run_command([*command, str(file), "--json"]) == 0, capsys.readouterr()
        assert json.loads(capsys.readouterr().out)
    with stepwell.view(config, 2) as view:
        import zarr

        weight = zarr.open_group(view, mode="r")["model/0.weight"][:]
    assert (weight == job.model[0].weight.detach().numpy()).all()
    node.stop(signal.SIGKILL)
    assert run_command(["ls", str(file)]) == 3
    assert "tier peer is left out" in capsys.readouterr().err
