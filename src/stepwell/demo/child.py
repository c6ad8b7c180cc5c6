"""One child of the demo, from its start to its end or its violent death."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from stepwell.demo.worker import Order
from stepwell.errors import DeadlineError, StepwellError

__all__ = ["Child", "Event"]

Event = dict[str, object]

SILENCE_S = 120.0  # a child that says nothing for this long hangs
STDERR_LINES_SHOWN = 20


class Child:
    """A worker process; leaving the ``with`` block kills it if it still lives.

    Parameters
    ----------
    order : Order
    directory : Path
        Takes the order and what the child writes to standard error.
    name : str
        For files and messages.
    """

    def __init__(self, order: Order, directory: Path, name: str) -> None:
        self.name = name
        path = directory / f"{name}.json"
        order.write(path)
        self._stderr_path = directory / f"{name}.stderr"
        with self._stderr_path.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stepwell.demo.worker", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it lives."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def events(self) -> Iterator[Event]:
        """Yield what the child tells, until it ends.

        Raises
        ------
        StepwellError
            It ended without saying that it is done; with the end of its standard error.
        DeadlineError
            It said nothing for too long.
        """
        done = False
        for line in self._lines():
            event: Event = json.loads(line)
            done = event["event"] == "done"
            yield event
        code = self._process.wait()
        if code or not done:
            raise StepwellError(f"the child {self.name!r} ended with {code}:\n{self._stderr_tail()}")

    def _lines(self) -> Iterator[bytes]:
        stdout = self._process.stdout
        assert stdout is not None
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(SILENCE_S):
                    raise DeadlineError(
                        f"the child {self.name!r} said nothing for {SILENCE_S:.0f} s:\n{self._stderr_tail()}"
                    )
                data = os.read(stdout.fileno(), 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from lines

    def _stderr_tail(self) -> str:
        text = self._stderr_path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-STDERR_LINES_SHOWN:]) or "(nothing on its standard error)"
