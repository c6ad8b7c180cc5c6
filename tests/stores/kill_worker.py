"""Processes that die: run by the tests, never imported by them.

``kill_worker.py kill DIRECTORY SCENARIO...`` does each scenario again and again in forked children,
each in a directory of its own (``DIRECTORY/SCENARIO/0``, ``1``, ...), and kills the n-th child by
SIGKILL at its n-th write boundary: before every system call that changes the disk, and in the middle
of every write. A scenario ends with the first child that gets through; those numbers are printed.

``race DIRECTORY COUNT`` lets processes race for ``create`` and prints how many won, turn by turn.

``hold PATH`` takes a lock, leaves an orphan that inherited everything, says so and waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.errors import ObjectExistsError
from stepwell.stores import file as file_module
from stepwell.stores import region as region_module
from stepwell.stores.arena import Arena
from stepwell.stores.fault import FaultStore
from stepwell.stores.file import FileStore
from stepwell.stores.lock import FileLock
from stepwell.stores.memory import MemoryStore

OLD, NEW = b"old" * 3000, [b"new" * 2000, b"NEW" * 2000]
CALLS = (
    "open",
    "mkdir",
    "fsync",
    "rename",
    "link",
    "unlink",
    "rmdir",
    "ftruncate",
    "pwrite",
    "posix_fallocate",
)


class Killer:
    """Counts write boundaries once armed, and kills the process at one of them."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.armed = False

    def boundary(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        if not self.armed:
            return
        if self.left == 0:
            meanwhile()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def install(self) -> None:
        # One thread, so that the n-th boundary is the same one each time.
        file_module._THREAD_COUNT = 1  # type: ignore[misc]
        for name in CALLS:
            self._wrap(name, getattr(os, name))
        real_writev, real_page, real_copy = os.writev, region_module.write_page, np.copyto

        def writev(fd: int, parts: Any) -> int:
            self.boundary()
            first = memoryview(parts[0])
            self.boundary(lambda: real_writev(fd, [first[: first.nbytes // 2]]))
            return real_writev(fd, parts)

        def write_page(mapping: Any, page: bytes) -> None:
            self.boundary()
            self.boundary(lambda: mapping.__setitem__(slice(0, 50), page[:50]))
            real_page(mapping, page)

        def copyto(target: Any, source: Any) -> None:
            self.boundary(lambda: real_copy(target[: len(target) // 2], source[: len(target) // 2]))
            real_copy(target, source)

        os.writev, region_module.write_page, np.copyto = writev, write_page, copyto  # type: ignore[assignment]

    def _wrap(self, name: str, real: Callable[..., Any]) -> None:
        def wrapped(*args: Any, **options: Any) -> Any:
            if name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.boundary()
            return real(*args, **options)

        setattr(os, name, wrapped)


async def files(name: str, directory: Path, killer: Killer) -> None:
    store = FileStore(directory)
    await store.put("inc/other", [b"untouched"])
    if name in {"file-replace", "file-delete"}:
        await store.put("inc/step/k0", [OLD])
    killer.armed = True
    if name == "file-create":
        await store.create("inc/step/k0", NEW)
    elif name == "file-batch":
        await store.put_batch((f"inc/step/k{at}", NEW) for at in range(3))
    elif name == "file-delete":
        await store.delete("inc/step/k0")
    else:
        await store.put("inc/step/k0", NEW)


async def memory(name: str, directory: Path, killer: Killer) -> None:
    arena = Arena.open(directory / "arena", run="run")
    store = MemoryStore(arena)
    await store.put("inc/other", [b"untouched"])
    await store.put("inc/step/k0", [OLD])
    if name in {"memory-new", "memory-recycled"}:
        await store.delete("inc/step/k0")
    if name == "memory-new":
        arena.trim()
    if name == "memory-open":
        await store.put("dropped", [OLD])
        await store.delete("dropped")
        arena.reserve(100)
        arena.close()
        killer.armed = True
        Arena.open(directory / "arena", run="run")
    elif name == "memory-delete":
        killer.armed = True
        await store.delete("inc/step/k0")
    else:
        killer.armed = True
        await store.put("inc/step/k0", NEW)


async def first_open(name: str, directory: Path, killer: Killer) -> None:
    killer.armed = True
    Arena.open(directory / "deep" / "arena", run="run")


async def faults(name: str, directory: Path, killer: Killer) -> None:
    store = FaultStore(FileStore(directory), kill_at=killer.left)
    await store.put("inc/other", [b"untouched"])
    await store.put_batch((f"inc/step/k{at}", NEW) for at in range(2))
    await store.delete("inc/step/k1")


def kill(scenario: str, top: Path) -> int:
    run = {"file": files, "memory": memory, "first": first_open, "fault": faults}[scenario.split("-")[0]]
    top.mkdir()
    for at in range(200):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                killer = Killer(at)
                killer.install()
                directory = top / str(at)
                directory.mkdir()
                asyncio.run(run(scenario, directory, killer))
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return at
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise SystemExit(f"child {at} ended with status {status}")
    raise SystemExit("no child got through")


def race(top: Path, count: int) -> list[int]:
    won = []
    for turn in range(8):
        reading, writing = os.pipe()
        children = []
        for contender in range(count):
            child = os.fork()
            if child == 0:
                code = 2
                try:
                    os.close(writing)
                    store = FileStore(top)
                    os.read(reading, 1)  # ends when the parent closes its side: the start for all
                    asyncio.run(store.create(f"turn-{turn}", [str(contender).encode() * 10_000]))
                    code = 0
                except ObjectExistsError:
                    code = 1
                finally:
                    os._exit(code)
            children.append(child)
        os.close(reading)
        os.close(writing)
        codes = [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 1}, codes
        won.append(codes.count(0))
    return won


def hold(path: str) -> None:
    FileLock(path).acquire()
    if os.fork() == 0:
        sys.stdin.read()  # the orphan lives until the test closes the pipe
        os._exit(0)
    print("held", flush=True)
    signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        top = Path(sys.argv[2])
        print(json.dumps({scenario: kill(scenario, top / scenario) for scenario in sys.argv[3:]}))
    elif sys.argv[1] == "race":
        print(race(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        hold(sys.argv[2])
