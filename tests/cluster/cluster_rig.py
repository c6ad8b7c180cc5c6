"""A cluster for tests: hosts on a network of their own, with keepers and a trainer, all real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cluster_trainer import hash_of
from failure_rig import PATIENCE_S, uninterrupted
from keeper_rig import RUN
from network import Host, Network

from stepwell.stores.transport.secret import RunSecret

HERE = Path(__file__).resolve().parent
PORT = 7070
NODES = ("a", "b", "c")
SPARE = "d"

Event = dict[str, object]


def await_condition(what: str, condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Look until `condition` holds.

    Raises
    ------
    AssertionError
        It does not within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        pause.wait(0.01)


@cache
def wanted(total: int, width: int = 8) -> tuple[str, ...]:
    """Digests after each step of a run that nothing happens to."""
    return tuple(hash_of(bits) for bits in uninterrupted(total, width))


class Process:
    """A process on a host; what it says on stderr goes to a file."""

    def __init__(self, host: Host, log: Path, *words: str) -> None:
        self._log = log
        with log.open("a") as errors:
            self.popen = subprocess.Popen(
                host.namespace.command(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )

    @property
    def said(self) -> str:
        """The end of its stderr."""
        return self._log.read_text()[-4000:]

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def end(self) -> None:
        """End it with SIGKILL, also where it is stopped."""
        if self.popen.poll() is None:
            self.send(signal.SIGKILL)
        self.popen.wait(PATIENCE_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@dataclass
class Keeper:
    """The keeper of a host; after its death it can be started again."""

    host: Host
    directory: Path
    secret: Path
    log: Path
    port: int = PORT
    process: Process | None = field(default=None, repr=False)

    def start(self) -> Keeper:
        """Start it; `wait_until_ready` comes next."""
        assert self.process is None
        words = [sys.executable, "-m", "stepwell", "keeper", "--json", "--run", RUN, "--name", self.host.name]
        words += ["--memory", str(self.directory), "--secret-file", str(self.secret)]
        self.process = Process(self.host, self.log, *words, "--listen", f"{self.host.address}:{self.port}")
        return self

    def wait_until_ready(self) -> float:
        """Wait until it listens; return when, by the monotonic clock."""
        assert self.process is not None
        assert self.process.popen.stdout is not None
        line = self.process.popen.stdout.readline()
        assert line, f"keeper {self.host.name} did not start: {self.process.said}"
        assert json.loads(line)["pid"] == self.process.popen.pid
        return time.monotonic()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal that does not end it."""
        assert self.process is not None
        self.process.send(number)

    def kill(self) -> None:
        """End it with SIGKILL; its memory stays."""
        if self.process is not None:
            self.process.end()
            self.process = None

    def lose(self, aside: Path | None = None) -> None:
        """End it and lose what it held, which may be put aside to be looked at later."""
        self.kill()
        if aside is None:
            shutil.rmtree(self.directory)
        else:
            self.directory.rename(aside)

    def tier(self, **keys: object) -> dict[str, object]:
        """Return the peer tier that leads here."""
        name, address = self.host.name, f"{self.host.address}:{self.port}"
        where = {"address": address, "keeper": name, "secret_file": str(self.secret), "call_s": 20.0}
        return {"kind": "peer", "name": name, **where, **keys}


class Trainer:
    """A training process that does what it is told and tells what happens."""

    def __init__(self, host: Host, log: Path) -> None:
        self.process = Process(host, log, sys.executable, str(HERE / "cluster_trainer.py"))
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._ended = False
        self._listener = threading.Thread(target=self._listen, name="trainer-of-test")
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.popen.stdout is not None
        for line in self.process.popen.stdout:
            if not line.endswith("\n"):
                break  # killed while it spoke
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, what: str, condition: Callable[[Event], bool], after: int = 0) -> Event:
        """Wait for the first event from number `after` on that fits."""

        def fitting() -> Event | None:
            return next((event for event in self.events[after:] if condition(event)), None)

        with self._changed:
            met = self._changed.wait_for(lambda: fitting() is not None or self._ended, 2 * PATIENCE_S)
            found = fitting()
            assert found is not None, (
                f"{what} did not come{'' if met else ' in time'}; last: {self.events[-12:]}; "
                f"stderr: {self.process.said}"
            )
            return found

    def opened(self) -> Event:
        """Wait until the run is open; return what was restored."""
        return self.wait_for("open", lambda event: event["event"] == "open")

    def order(self, **order: object) -> None:
        """Give an order."""
        assert self.process.popen.stdin is not None
        self.process.popen.stdin.write(json.dumps(order) + "\n")
        self.process.popen.stdin.flush()

    def train(self, steps: int, bases: Sequence[int] = ()) -> None:
        """Let it train and save so many steps."""
        self.order(do="train", steps=steps, bases=list(bases))

    def saved(self, step: int) -> Event:
        """Wait until the save of a step has returned."""
        return self.wait_for(f"save {step}", lambda event: _is(event, "saved", step))

    def acknowledged(self, step: int, *tiers: str) -> None:
        """Wait until a step is committed in tiers."""
        for tier in tiers:
            told = self.wait_for(
                f"outcome of {step} in {tier}",
                lambda event, tier=tier: (  # type: ignore[misc]
                    event["event"] in ("ack", "failed") and event["step"] == step and event["tier"] == tier
                ),
            )
            assert told["event"] == "ack", told

    def state(self, do: str = "finish") -> Event:
        """Let it finish what is on its way, or only look; return what is where."""
        after = len(self.events)
        self.order(do=do)
        return self.wait_for("state", lambda event: event["event"] == "state", after)

    def all_of(self, event: str) -> list[Event]:
        """Return all events of a kind so far."""
        with self._changed:
            return [one for one in self.events if one["event"] == event]

    def kill(self) -> None:
        """End it with SIGKILL, and hear what it had said."""
        if self.process.popen.poll() is None:
            self.process.send(signal.SIGKILL)
        self.process.popen.wait(PATIENCE_S)
        self._listener.join(PATIENCE_S)
        self.process.end()

    def close(self) -> None:
        """Let it close the run and end."""
        self.order(do="close")
        self.wait_for("closed", lambda event: event["event"] == "closed")
        assert self.process.popen.wait(PATIENCE_S) == 0
        self.kill()


def _is(event: Event, kind: str, step: int) -> bool:
    return event["event"] == kind and event["step"] == step


class Cluster:
    """Nodes a, b, c, each a host with a keeper, and the host d, where nothing runs yet."""

    def __init__(self, memory: Path, place: Path) -> None:
        self._memory = memory
        self._place = place
        self.directory = place / "directory"
        self._trainers: list[Trainer] = []
        self._prepared: list[tuple[str, Trainer]] = []
        self._exhibits: list[Keeper] = []
        self._secret = place / "secret"
        self.keepers: dict[str, Keeper] = {}
        self.network: Network

    def begin(self) -> None:
        """Make the network and start the keepers."""
        RunSecret.make().write(self._secret)
        self.network = Network([*NODES, SPARE])
        for name in NODES:
            host = self.network.hosts[name]
            self.keepers[name] = Keeper(
                host, self.memory_of(name) / "kept", self._secret, self._log(name)
            ).start()
        for keeper in self.keepers.values():
            keeper.wait_until_ready()

    def _log(self, name: str) -> Path:
        return self._place / f"{name}.log"

    def memory_of(self, name: str) -> Path:
        """Where a host's memory is, with a directory for each who uses it."""
        found = self._memory / name
        found.mkdir(exist_ok=True)
        return found

    def config(self, host: str, *tiers: Mapping[str, object], **keys: object) -> dict[str, object]:
        """Return the configuration of a run on a host: its memory first, then `tiers`."""
        memory = {"kind": "memory", "directory": str(self.memory_of(host) / "own"), "keep": 1000}
        usual: dict[str, object] = {"log_budget": 1000.0, "handle_sigterm": False}
        usual |= {"stall_limit_s": 20.0, "close_deadline_s": PATIENCE_S}
        return {"tiers": [memory, *tiers], **usual, **keys}

    def prepare(self, *hosts: str) -> None:
        """Start trainers that wait: all that torch imports takes seconds, and may take them together."""
        for host in hosts:
            log = self._log(f"trainer-{len(self._trainers)}")
            self._trainers.append(Trainer(self.network.hosts[host], log))
            self._prepared.append((host, self._trainers[-1]))

    def trainer(self, host: str, config: Mapping[str, object], *, width: int = 8) -> Trainer:
        """Open a run on a host, with the trainer that waits there or a new one."""
        if host not in dict(self._prepared):
            self.prepare(host)
        found = next(one for one in self._prepared if one[0] == host)
        self._prepared.remove(found)
        found[1].order(config=config, width=width)
        return found[1]

    def exhibit(self, directory: Path) -> Keeper:
        """Start a keeper on the spare host that serves what another one held."""
        port = PORT + len(self._exhibits)
        keeper = Keeper(
            self.network.hosts[SPARE], directory, self._secret, self._log(f"exhibit-{port}"), port
        )
        self._exhibits.append(keeper.start())
        return keeper

    def held_by(self, *keepers: Keeper) -> list[tuple[dict[int, str], list[int]]]:
        """Read all that each keeper holds, from the spare host: a digest for each step, and the bases."""
        tiers = [keeper.tier(name=f"k{number}") for number, keeper in enumerate(keepers)]
        words = (sys.executable, str(HERE / "cluster_reader.py"), json.dumps({"tiers": tiers}))
        done = subprocess.run(
            self.network.hosts[SPARE].namespace.command(*words),
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told = json.loads(done.stdout)
        assert len(told) == len(keepers)
        return [({int(step): what for step, what in one["saves"].items()}, one["bases"]) for one in told]

    def lose_node(self, name: str) -> None:
        """Lose a node: everything that runs there, its memory, and its link."""
        self.network.cut(name)
        self.keepers[name].kill()
        shutil.rmtree(self.memory_of(name))

    def replace_nodes(self, *names: str) -> None:
        """Put empty machines in the place of lost nodes."""
        for name in names:
            self.memory_of(name)
            self.network.mend(name)
            self.keepers[name].start()
        for name in names:
            self.keepers[name].wait_until_ready()

    def end(self) -> None:
        """End everything."""
        for trainer in self._trainers:
            trainer.kill()
        for keeper in (*self.keepers.values(), *self._exhibits):
            keeper.kill()
        if hasattr(self, "network"):
            self.network.close()
