"""Starts children that have torch imported already, talks with them, and kills them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

WORKER = Path(__file__).with_name("failure_worker.py")
PATIENCE_S = 60.0


class Child:
    """A process at work; its pid is that of the socket's peer."""

    def __init__(self, zygote: Zygote, listener: socket.socket) -> None:
        self._zygote = zygote
        listener.settimeout(PATIENCE_S)
        self._socket, _ = listener.accept()
        self._socket.settimeout(PATIENCE_S)
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)
        self._reader = self._socket.makefile("r")
        self.events: list[dict[str, object]] = []
        self._status: int | None = None

    def read(self) -> dict[str, object] | None:
        """Return the next event; None at the child's end."""
        text = self._reader.readline()
        if not text.endswith("\n"):
            return None
        self.events.append(json.loads(text))
        return self.events[-1]

    def until(self, event: str, **facts: object) -> dict[str, object]:
        """Read until an event comes."""
        while (found := self.read()) is not None:
            if found["event"] == event and all(found.get(key) == value for key, value in facts.items()):
                return found
        raise AssertionError(f"the child ended (status {self.status()}) before {event!r}: {self.events}")

    def rest(self) -> list[dict[str, object]]:
        """Read to the end; return all events there were."""
        while self.read() is not None:
            pass
        return self.events

    def send(self, text: str = "go") -> None:
        """Send a line."""
        self._socket.sendall(f"{text}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended by itself; its zygote has not waited for another since."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def status(self) -> int:
        """Wait for the end; the exit code, or minus the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(int(self._zygote.answer()))
        return self._status

    def end(self) -> None:
        """Kill it if it lives still, and hang up."""
        if self._status is None:
            self.signal(signal.SIGKILL)
            self.status()
        self._reader.close()
        self._socket.close()

    def newest(self, event: str, tier: str | None = None) -> int:
        """Newest step of an event, -1 for none."""
        steps = [e["step"] for e in self.events if e["event"] == event and tier in (None, e.get("tier"))]
        return max((int(str(step)) for step in steps), default=-1)


class Zygote:
    """Forks one child at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._children: list[Child] = []
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        """Read a line of the zygote's own."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, mode: str, config: dict[str, object], **order: object) -> Child:
        """Start a child and wait for its call."""
        self._count += 1
        path = self._directory / f"{self._count}.socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            assert self._process.stdin is not None
            text = json.dumps({"mode": mode, "config": config, "socket": str(path), **order})
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
            self._children.append(Child(self, listener))
            return self._children[-1]

    def clean(self) -> None:
        """End the children of a test."""
        for child in self._children:
            child.end()
        self._children.clear()

    def close(self) -> None:
        """End the zygote; it has no children any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
