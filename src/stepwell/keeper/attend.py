"""Starting this node's keeper along with a run, and again when it dies while the run is open."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stepwell.config import Config
from stepwell.errors import ConfigError, FormatError, MissingObjectError, StepwellError
from stepwell.keeper.configured import completed, finished_by, keeper_directory
from stepwell.keeper.keeper import ARENA_NAME
from stepwell.keeper.record import LOG_NAME, KeeperRecord
from stepwell.stores.arena_files import LOCK_NAME
from stepwell.stores.lock import owner_of
from stepwell.stores.oserrors import store_error

__all__ = ["Attendant", "stop_keeper"]

START_S = 60.0  # a machine under load; else half a second
POLL_S = 0.02
PAUSE_S_MAX = 64.0  # between attempts to start one that dies at once


class Attendant:
    """Sees to it that a keeper runs on this node while a run is open; the keeper outlives it.

    Parameters
    ----------
    config : Config
        With a `keeper`.
    """

    def __init__(self, config: Config) -> None:
        keeper = config.keeper
        assert keeper is not None
        self._keeper = completed(keeper, config)
        self._run = config.run
        self._directory = keeper_directory(self._keeper, config.run)
        self._finish = list(map(str, finished_by(config)))
        self._child: int | None = None
        self._watched = False
        self._closed = threading.Event()

    def start(self) -> KeeperRecord:
        """Start a keeper unless one runs, and wait until peers can connect to it.

        Returns
        -------
        KeeperRecord
            Of the one that runs.

        Raises
        ------
        ConfigError
            It cannot be started so; or one runs that listens elsewhere.
        StoreError
            Its directory cannot be written.
        StepwellError
            It was started and is not there in time.
        """
        deadline = time.monotonic() + START_S
        refused = 0
        while (owner := self._owner()) is None or (record := self._record(owner)) is None:
            if owner is None and self._child is None:
                if refused == 2:  # once may be because another process was starting it, too
                    raise ConfigError(f"the keeper of this node cannot be started: {self._said()}")
                self._child = self._spawn()
            elif self._child is not None and _reaped(self._child):
                self._child = None
                refused += 1
            if time.monotonic() > deadline:
                raise StepwellError(f"the keeper of this node is not there after {START_S} s: {self._said()}")
            time.sleep(POLL_S)
        self._check(record)
        return record

    def watch(self, tell: Callable[[str], None]) -> None:
        """Start it again when it dies, from a thread, until `close`.

        Parameters
        ----------
        tell : callable
            Told what the trainer should know of; called in that thread.
        """
        self._watched = True
        threading.Thread(target=self._watch, args=(tell,), name="stepwell-attendant", daemon=True).start()

    def close(self) -> None:
        """Leave the keeper to itself."""
        self._closed.set()
        if not self._watched:
            self.watch(lambda text: None)  # takes note of its end, and no more

    def _watch(self, tell: Callable[[str], None]) -> None:
        pause_s = 1.0
        while True:
            began = time.monotonic()
            self._outlive()
            if self._closed.is_set():
                return
            pause_s = 1.0 if time.monotonic() - began > PAUSE_S_MAX else min(2 * pause_s, PAUSE_S_MAX)
            try:
                self.start()
            except StepwellError as error:
                tell(f"the keeper of this node ended, and nothing is held for others here: {error}")
            else:
                tell("the keeper of this node ended and was started again; what it held is there")
            if self._closed.wait(pause_s):
                return

    def _outlive(self) -> None:
        """Wait for the end of the keeper, and take note of it if it was this process's child."""
        owner = self._owner()
        if self._child is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = None
        elif owner:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(owner)
                try:
                    ended = select.poll()
                    ended.register(descriptor, select.POLLIN)
                    ended.poll()
                finally:
                    os.close(descriptor)
        elif owner == 0:  # of another pid namespace: nobody here can tell when it ends
            self._closed.wait()

    def _owner(self) -> int | None:
        return owner_of(self._directory / ARENA_NAME / LOCK_NAME)

    def _record(self, owner: int) -> KeeperRecord | None:
        """Return what the keeper says of itself; None where that is still of an earlier one."""
        try:
            record = KeeperRecord.read(self._directory)
        except (MissingObjectError, FormatError):
            return None
        return record if owner in (0, record.pid) else None

    def _check(self, record: KeeperRecord) -> None:
        asked = [(host, port) for host, port in self._keeper.addresses if port]
        found = {address.rpartition(":")[2] for address in record.addresses}
        missing = [port for _, port in asked if str(port) not in found]
        if missing:
            raise ConfigError(
                f"a keeper of run {record.run}, process {record.pid}, runs on this node already and listens "
                f"at {', '.join(record.addresses)}, not at port {missing[0]}; "
                "end it first (stepwell keeper --stop), or change `listen`"
            )

    def _spawn(self) -> int:
        """Start the process in a session of its own, so that what ends the trainer leaves it alone."""
        told = {
            "run": self._run,
            "keeper": self._keeper.model_dump(mode="json"),
            "finish": self._finish,
            # Who has its arena open is known by that; without one, for as long as this process lives.
            "trainer": None if self._finish else os.getpid(),
        }
        log = self._directory / LOG_NAME
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            reading, writing = os.pipe()
            try:
                os.write(writing, json.dumps(told).encode())
                os.close(writing)
                return os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-m", "stepwell.keeper"],
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, reading, 0),
                        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                        (os.POSIX_SPAWN_DUP2, 1, 2),
                    ],
                    setsid=True,
                )
            finally:
                os.close(reading)
        except OSError as error:
            raise store_error(error, "start the keeper", where=str(self._directory)) from error

    def _said(self) -> str:
        """Return the last line of its log."""
        try:
            lines = (self._directory / LOG_NAME).read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def stop_keeper(directory: Path, deadline_s: float = 30.0) -> bool:
    """End the keeper in a directory with SIGTERM, and wait for its end; what it holds stays.

    Returns
    -------
    bool
        False where none runs.

    Raises
    ------
    StepwellError
        It is of another pid namespace or user, or does not end.
    """
    import signal

    path = directory / ARENA_NAME / LOCK_NAME
    owner = owner_of(path)
    if owner is None:
        return False
    if owner == 0:
        raise StepwellError(f"the keeper in {directory} runs in another container; end it there")
    try:
        os.kill(owner, signal.SIGTERM)
    except ProcessLookupError:
        return True
    except PermissionError as error:
        raise StepwellError(f"the keeper in {directory}, process {owner}, is somebody else's") from error
    deadline = time.monotonic() + deadline_s
    while owner_of(path) == owner:
        if time.monotonic() > deadline:
            raise StepwellError(f"the keeper in {directory}, process {owner}, did not end")
        time.sleep(POLL_S)
    return True


def _reaped(child: int) -> bool:
    """Whether a child has ended; it is gone then."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True
