"""Keepers for tests: real processes on loopback, each with memory of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from failure_rig import PATIENCE_S

RUN = "run"


@dataclass
class Node:
    """One keeper and what it is started with; after its death it can be started again at its port."""

    directory: Path
    name: str
    secret: Path
    options: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def start(self) -> Node:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "stepwell", "keeper", "--json", "--run", RUN, "--name", self.name]
        command += ["--memory", str(self.directory), "--secret-file", str(self.secret)]
        command += ["--listen", f"127.0.0.1:{self.port}", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        assert told["pid"] == self.process.pid, told
        self.port = int(told["addresses"][0].rpartition(":")[2])
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it with a signal; return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def lose(self) -> None:
        """Lose the node: its keeper dies, and its memory with it."""
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.directory)

    def tier(self, **keys: object) -> dict[str, object]:
        """Return the tier that leads here."""
        where = {"address": f"127.0.0.1:{self.port}", "keeper": self.name, "secret_file": str(self.secret)}
        return {"kind": "peer", "name": self.name, **where, "call_s": 5.0, **keys}


def make_secret(path: Path) -> Path:
    """Write a secret as a person would."""
    command = [sys.executable, "-m", "stepwell", "keeper", "--make-secret", str(path)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    assert os.stat(path).st_mode & 0o777 == 0o600
    return path
