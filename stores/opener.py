"""One living opener per run on object storage, where no kernel can tell who lives.

::

    .stepwell-opener-{name}/000001.json    who opened the run, created only if absent
    .stepwell-opener-{name}/000001.beat    a sign of life, replaced every few seconds

Openers are numbered; the highest number is the opener. The next one creates the next number, of racing
ones one succeeds, and it does so only when the opener before it

* said that it ended, or
* ran on this machine, in this pid namespace, and its process is gone, or
* let a whole lease pass without a sign of life, by the clock of whoever waits.

An opener that was given up wrongly (stopped, or cut off for longer than its lease) is fenced: before and
after each commit it asks whether there is a number above its own, and then the commit fails. What it wrote
before lies under the name of its own incarnation, so nothing of the next opener is overwritten; a save it
acknowledged was committed before the next opener looked at what there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stepwell.errors import LockedError, PermanentStoreError, StoreError, UsageError
from stepwell.stores.blobs import Blob, Blobs
from stepwell.stores.keys import OWN_PREFIX
from stepwell.stores.threads import wait_apart

__all__ = ["OpenerLock"]

BEATS_A_LEASE = 5
"""Signs of life in one lease: four in a row may be lost before anybody may take the run over."""

LEASE_S_MAX = 3600.0
"""Nobody is waited for longer, whatever its record says."""

_PREFIX = f"{OWN_PREFIX}opener-"
_NUMBER_DIGITS = 6


class OpenerLock:
    """The right to write a run on object storage. Made by ``RemoteStore.lock``.

    Parameters
    ----------
    blobs : Blobs
    name : str
        Several locks of one store have different names.
    lease_s : float
        How long an opener elsewhere is believed to live without a sign of life.
    monotonic : callable
        The clock of whoever waits.

    Attributes
    ----------
    number : int
        Which opener this is, from 1; 0 where it is not held.
    """

    def __init__(
        self,
        blobs: Blobs,
        name: str,
        lease_s: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = 0
        self._blobs = blobs
        self._directory = f"{_PREFIX}{name}/"
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        self._beats = 0

    @property
    def held(self) -> bool:
        """Whether this process opened the run through this object and did not release it."""
        return self.number > 0 and self._pid == os.getpid()

    def acquire(self) -> None:
        """Become the opener; waits for one lease at most.

        Raises
        ------
        LockedError
            Another opener lives; the message says where.
        PermanentStoreError
            The service does not keep conditions on writes, so nothing could be fenced.
        """
        if self.held:
            raise LockedError(f"{self._blobs.url} is open in this process ({os.getpid()}) already")
        wait_apart(self._acquire())
        self._ended.clear()
        self._beating = threading.Thread(target=self._beat_on, name="stepwell-opener", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Say that this opener ended; harmless where it is not held, or in a forked child."""
        if not self.held:
            return
        self._ended.set()
        assert self._beating is not None
        self._beating.join()
        number, self.number = self.number, 0
        # An unreachable store must not keep a run from ending; the next opener then waits for the lease.
        with contextlib.suppress(StoreError):
            wait_apart(self._blobs.write(self._key(number, "beat"), _blob({"ended": True})))

    async def check(self) -> None:
        """Raise if another opener has taken the run over.

        Raises
        ------
        PermanentStoreError
            It has: this process must not write here any more.
        UsageError
            The lock is not held.
        """
        if not self.held:
            raise UsageError(f"{self._blobs.url} is written without its lock")
        later = await self._blobs.read(self._key(self.number + 1, "json"))
        if later is not None:
            raise PermanentStoreError(
                f"{self._blobs.url} was taken over by {_where(_document(later))}, because this process "
                f"({os.getpid()}) gave no sign of life for {self._lease_s:g} s; it can save nothing there "
                "any more: end it"
            )

    # -- inside -------------------------------------------------------------------------------

    def _key(self, number: int, what: str) -> str:
        return f"{self._directory}{number:0{_NUMBER_DIGITS}d}.{what}"

    async def _acquire(self) -> None:
        number = await self._newest()
        if number:
            await self._outlive(number)
        if not await self._blobs.keeps_conditions(f"{self._directory}probe-"):
            raise PermanentStoreError(
                f"{self._blobs.url}: the service ignores conditions on writes (If-None-Match), so two runs "
                "could commit over each other; use a service or a version that has them"
            )
        mine = _blob({**_identity(), "token": secrets.token_hex(16), "lease_s": self._lease_s})
        key = self._key(number + 1, "json")
        if not await self._blobs.create(key, mine):
            raise self._locked(_document(await self._blobs.read(key)))
        self.number = number + 1

    async def _newest(self) -> int:
        numbers = []
        for key in await self._blobs.list(self._directory):
            digits, _, what = key[len(self._directory) :].partition(".")
            if what == "json" and digits.isascii() and digits.isdigit():
                numbers.append(int(digits))
        return max(numbers, default=0)

    async def _outlive(self, number: int) -> None:
        """Return when opener `number` is known or believed to be gone; raise if it lives."""
        opener = _document(await self._blobs.read(self._key(number, "json")))
        first = await self._blobs.read(self._key(number, "beat"))
        if _document(first).get("ended"):
            return
        lives = _lives_here(opener)
        if lives is not None:
            if lives:
                raise self._locked(opener)
            return
        # The other one's lease may be longer, and its signs of life rarer.
        theirs = opener.get("lease_s")
        lease_s = max(self._lease_s, min(theirs, LEASE_S_MAX) if isinstance(theirs, int | float) else 0.0)
        until = self._monotonic() + lease_s
        while self._monotonic() < until:
            await asyncio.sleep(lease_s / BEATS_A_LEASE / 2)
            beat = await self._blobs.read(self._key(number, "beat"))
            if beat != first:
                if _document(beat).get("ended"):
                    return
                raise self._locked(opener)
        # Nothing was heard for a whole lease.

    def _locked(self, opener: dict[str, object]) -> LockedError:
        return LockedError(
            f"{self._blobs.url} is open in {_where(opener)}; end it first, or open another run"
        )

    def _beat_on(self) -> None:
        while not self._ended.wait(self._lease_s / BEATS_A_LEASE):
            self._beats += 1
            beat = _blob({"beat": self._beats})
            # A store that cannot be reached: others see no sign of life, and the fence does its work.
            with contextlib.suppress(StoreError):
                asyncio.run(self._blobs.write(self._key(self.number, "beat"), beat))


def _identity() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _boot_of_this_machine(),
        "started": _started(os.getpid()),
        "opened_unix_s": time.time(),
    }


def _boot_of_this_machine() -> str:
    """Return what processes that can see each other's pids have in common; empty where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if there is none (or a zombie)."""
    try:
        # The second field is a name in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _lives_here(opener: dict[str, object]) -> bool | None:
    """Whether an opener's process lives on this machine; None where that cannot be seen from here."""
    pid, boot = opener.get("pid"), opener.get("boot")
    if not isinstance(pid, int) or not boot or boot != _boot_of_this_machine():
        return None
    return bool(opener.get("started")) and _started(pid) == opener.get("started")


def _where(opener: dict[str, object]) -> str:
    return f"process {opener.get('pid', '?')} on {opener.get('host', 'an unknown machine')}"


def _blob(document: dict[str, object]) -> Blob:
    return np.frombuffer(json.dumps(document).encode(), np.uint8)


def _document(data: bytes | None) -> dict[str, object]:
    """Read a document back; one that is missing or damaged says nothing."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
