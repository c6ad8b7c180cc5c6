"""A keeper started along with its run: there in time, outliving its trainer, gone when nobody needs it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, uninterrupted
from keeper_rig import make_secret

import stepwell
from stepwell.cli.app import run as run_command
from stepwell.errors import ConfigError
from stepwell.keeper import keeper as keeper_module
from stepwell.keeper.attend import stop_keeper
from stepwell.keeper.keeper import ARENA_NAME
from stepwell.keeper.record import KeeperRecord
from stepwell.pipeline.keys import parse_key
from stepwell.stores.arena import Arena
from stepwell.stores.arena_files import LOCK_NAME
from stepwell.stores.lock import owner_of
from stepwell.stores.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PRESSING_S = 0.5  # to linger, where a test waits for the end


class Started:
    """A node whose keeper is started by its run."""

    def __init__(self, root: Path, secret: Path, name: str = "here", **keys: object) -> None:
        root.mkdir(exist_ok=True)
        self.directory = root / "keeper"
        self.keeper = {"directory": str(self.directory), "name": name, "secret_file": str(secret), **keys}
        self.run = Run(root, keys={"keeper": self.keeper})

    @property
    def record(self) -> KeeperRecord:
        return KeeperRecord.read(self.directory)

    def owner(self) -> int | None:
        return owner_of(self.directory / ARENA_NAME / LOCK_NAME)

    def tier(self, **keys: object) -> dict[str, object]:
        """Return the tier that leads here."""
        secret = self.keeper["secret_file"]
        return {
            "kind": "peer",
            "address": list(self.record.addresses),
            "secret_file": secret,
            "call_s": 5.0,
            **keys,
        }


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return make_secret(tmp_path / "secret")


@pytest.fixture
def node(memory_directory: Path, secret: Path) -> Iterator[Started]:
    started = Started(memory_directory, secret)
    yield started
    if started.directory.is_dir():
        stop_keeper(started.directory)


def ended(pid: int, within_s: float = PATIENCE_S) -> bool:
    """Wait until a process has ended; say whether it did."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(within_s * 1e3))
        finally:
            os.close(descriptor)
    return True


def test_is_there_when_the_run_is_open_and_stays_when_its_trainer_is_killed(
    node: Started, memory_directory: Path, secret: Path, tmp_path: Path
) -> None:
    worker = Path(__file__).with_name("captured_worker.py")
    command = [sys.executable, str(worker), json.dumps(node.run.config()), "7", "5", "1"]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, stderr=log, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
    assert node.owner() == node.record.pid, "in a session of its own"
    other = Started(memory_directory / "other", secret, "there")
    other.run.keys["tiers"] = [*other.run.tiers()[:1], node.tier()]
    job = Job()
    with other.run.open(job) as well:
        assert other.owner() == other.record.pid
        job.step()
        well.save(0).until("peer", PATIENCE_S)
        with Arena.inspect(node.directory / ARENA_NAME) as held:
            assert any(place.step == 0 for place in map(parse_key, held.keys()) if place is not None)
    assert stop_keeper(other.directory)
    restored, bits = node.run.restored()  # in the order of the locks: finished by then, or by this
    assert restored is not None
    assert (restored.step, restored.tier, restored.exact) == (6, "memory", True)
    assert bits == uninterrupted(7)[6]


def test_commits_what_was_captured_without_being_told_to(node: Started, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("captured_worker.py")
    command = [sys.executable, str(worker), json.dumps(node.run.config()), "7", "5", "1"]
    assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGKILL
    pid = node.record.pid
    assert run_command(["keeper", "--run", "run", "--memory", str(node.directory), "--stop"]) == 0
    assert ended(pid), "and what it was about is done"
    log = (node.directory / "keeper.log").read_text()
    if "committed in" not in log:  # it was ended first: then the next start does it
        assert list(node.run.memory.glob("capture-*"))
    restored, bits = node.run.restored()
    assert restored is not None
    assert (restored.step, restored.exact) == (6, True)
    assert bits == uninterrupted(7)[6]


def test_killed_while_the_run_is_open_it_is_started_again_and_said(node: Started) -> None:
    job = Job()
    with node.run.open(job) as well:
        first = node.record
        os.kill(first.pid, signal.SIGKILL)
        told: list[str] = []
        for step in range(2000):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                job.step()
                well.save(step).until(None, PATIENCE_S)
            told += [str(one.message) for one in caught]
            if told:
                break
        assert "the keeper of this node ended and was started again" in told[0]
        assert node.owner() == node.record.pid
        assert node.record.session != first.session


def test_ends_by_itself_when_nobody_needs_it(memory_directory: Path, secret: Path) -> None:
    node = Started(memory_directory, secret, linger_s=PRESSING_S)
    job = Job()
    with node.run.open(job) as well:
        job.step()
        well.save(0).until(None, PATIENCE_S)
        pid = node.record.pid
        assert node.owner() == pid
    assert ended(pid)
    assert not node.directory.exists(), "and leaves nothing"


def test_stays_with_what_it_holds_of_others(memory_directory: Path, secret: Path) -> None:
    """The other has nothing that survives more, so what it had here must be found."""
    node = Started(memory_directory, secret, linger_s=PRESSING_S)
    other = Started(memory_directory / "other", secret, "there")
    job = Job()
    with node.run.open(job) as well:
        job.step()
        well.save(0).until(None, PATIENCE_S)
        pid = node.record.pid
        other.run.keys = {"tiers": [*other.run.tiers()[:1], node.tier()]}
        theirs = Job()
        with other.run.open(theirs) as their_well:
            theirs.step()
            their_well.save(0).until("peer", PATIENCE_S)
    assert not ended(pid, 4 * PRESSING_S), "it holds what nobody else has"
    assert stop_keeper(node.directory)


def test_one_serves_all_trainers_of_the_node(node: Started, memory_directory: Path) -> None:
    second = Run(memory_directory / "second", keys={"keeper": node.keeper})
    second.root.mkdir()
    with node.run.open(Job()):
        session = node.record.session
        with second.open(Job()):
            assert node.record.session == session


def test_a_place_to_listen_that_is_not_there_is_said(node: Started) -> None:
    node.run.keys["keeper"] = {**node.keeper, "listen": "203.0.113.77:7070"}
    with pytest.raises(ConfigError, match=r"203\.0\.113\.77") as caught, node.run.open(Job()):
        pass
    assert "cannot be started" in str(caught.value)


def test_a_wrong_secret_file_is_said(node: Started, tmp_path: Path) -> None:
    node.run.keys["keeper"] = {**node.keeper, "secret_file": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="none"), node.run.open(Job()):
        pass


def test_one_that_listens_elsewhere_is_said(node: Started) -> None:
    with node.run.open(Job()):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    node.run.keys["keeper"] = {**node.keeper, "listen": f"127.0.0.1:{port}"}
    with pytest.raises(ConfigError, match="runs on this node already"), node.run.open(Job()):
        pass


def test_status_and_stop(node: Started, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["keeper", "--run", "run", "--memory", str(node.directory)]
    with node.run.open(Job()):
        assert run_command([*there, "--status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["running"] is True
    assert run_command([*there, "--stop"]) == 0
    assert run_command([*there, "--stop"]) == 3
    assert run_command([*there, "--status", "--json"]) == 3


def test_secret_of_the_peers_is_its_own(node: Started, secret: Path) -> None:
    del node.keeper["secret_file"]
    node.run.keys["tiers"] = [
        *node.run.tiers(),
        {"kind": "peer", "address": "127.0.0.1:9", "secret_file": str(secret), "call_s": 0.2},
    ]
    with pytest.warns(UserWarning, match="peer"), node.run.open(Job()):
        assert node.owner() == node.record.pid


def test_config_of_a_keeper_is_checked(node: Started) -> None:
    node.run.keys["keeper"] = {"listen": ["127.0.0.1:7070", "127.0.0.2:7071"], "linger": 3}
    with pytest.raises(ConfigError) as caught:
        stepwell.open_sync(node.run.config(), model=Job().model)
    assert "one port for all addresses" in str(caught.value)
    assert "linger_s" in str(caught.value), "did you mean"


def test_what_came_while_it_was_ending_stays(memory_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was acknowledged: nobody needed the keeper a moment before."""
    key = "000001-0123456789abcdef/step/000000000000/rank-00000.pack"

    async def brought(options: object, stopped: object, server: object, arena: Arena) -> None:
        await MemoryStore(arena).put(key, [b"a save"])

    monkeypatch.setattr(keeper_module, "_needed", brought)
    options = keeper_module.KeeperOptions("run", "here", ["127.0.0.1"], 0, memory_directory / "keeper")
    asyncio.run(keeper_module.keep(options, lambda record: None))
    with Arena.inspect(options.directory / ARENA_NAME) as arena:
        assert arena.find(key) is not None
    assert KeeperRecord.read(options.directory).name == "here"
