"""SIGKILL at every write boundary of a real process: the old object or the new, nothing between."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwell.stores.arena import Arena
from stepwell.stores.file import FileStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.testing import fetched

WORKER = Path(__file__).with_name("kill_worker.py")
OLD, NEW = b"old" * 3000, b"new" * 2000 + b"NEW" * 2000
KEYS = ("inc/step/k0", "inc/step/k1", "inc/step/k2")


def work(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_on_disk(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def arena_bytes_on_disk(directory: Path) -> int:
    names = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert not [name for name in names if name.startswith(".")]
    return sum(size for name, size in names.items() if name.startswith(("object-", "space-")))


async def contents(store: FileStore | MemoryStore) -> dict[str, bytes]:
    return {key: await fetched(store, key) for key in [key async for key in store.list()]}


async def files_after(directory: Path) -> dict[str, bytes]:
    """Return what is listed; check that a sweep leaves that and nothing else."""
    store = FileStore(directory)
    found = await contents(store)
    await store.sweep_temps()
    assert files_on_disk(directory) == set(found)
    await store.put(KEYS[0], [b"goes on"])
    store.close()
    return found


async def memory_after(directory: Path) -> dict[str, bytes]:
    """Return what is published; check that every other file of the arena is free and usable."""
    with Arena.open(directory, run="run") as arena:
        store = MemoryStore(arena)
        found = await contents(store)
        assert arena.used_bytes + arena.free_bytes == arena_bytes_on_disk(directory)
        await store.put(KEYS[0], [b"goes on" * 1000])
        store.close()
    return found


SCENARIOS = (
    "file-new",
    "file-create",
    "file-replace",
    "file-delete",
    "file-batch",
    "memory-new",
    "memory-recycled",
    "memory-replace",
    "memory-delete",
    "memory-open",
    "first-open",
    "fault-store",
)


@dataclass(frozen=True)
class Killed:
    """Where the killed processes left their files, and how many were killed in each scenario."""

    top: Path
    counts: dict[str, int]


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    top = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir=root))
    try:
        yield Killed(top, json.loads(work("kill", top, *SCENARIOS)))
    finally:
        shutil.rmtree(top, ignore_errors=True)


def outcomes(scenario: str, killed: Killed, boundaries_min: int) -> list[dict[str, bytes]]:
    """Run a scenario; return what each killed child left, and last what the one that got through left."""
    through = killed.counts[scenario]
    directory = killed.top / scenario
    assert through >= boundaries_min, "boundaries were passed over"
    check = memory_after if scenario.startswith("memory") else files_after
    place = "arena" if scenario.startswith("memory") else ""
    left = [asyncio.run(check(directory / str(at) / place)) for at in range(through + 1)]
    for found in left[:-1]:
        assert found.pop("inc/other") == b"untouched"
    assert left[-1].pop("inc/other") == b"untouched"
    return left


@pytest.mark.parametrize(
    ("scenario", "old", "boundaries_min"),
    [
        ("file-new", None, 8),
        ("file-create", None, 9),
        ("file-replace", OLD, 6),
        ("memory-new", None, 6),
        ("memory-recycled", None, 4),
        ("memory-replace", OLD, 6),
    ],
)
def test_object_is_old_or_new(scenario: str, old: bytes | None, boundaries_min: int, killed: Killed) -> None:
    left = [found.get(KEYS[0]) for found in outcomes(scenario, killed, boundaries_min)]
    assert set(left) == {old, NEW}
    assert left[0] == old
    assert left[-1] == NEW
    assert left == sorted(left, key=lambda content: content == NEW)  # once new, never old again


@pytest.mark.parametrize(("scenario", "boundaries_min"), [("file-delete", 2), ("memory-delete", 3)])
def test_deleted_object_is_whole_or_gone(scenario: str, boundaries_min: int, killed: Killed) -> None:
    left = [found.get(KEYS[0]) for found in outcomes(scenario, killed, boundaries_min)]
    assert set(left) == {OLD, None}
    assert left[-1] is None


def test_batch_leaves_no_object_half_written(killed: Killed) -> None:
    left = outcomes("file-batch", killed, 15)
    for found in left:
        assert set(found) <= set(KEYS)
        assert set(found.values()) <= {NEW}
    assert left[-1] == dict.fromkeys(KEYS, NEW)
    assert {len(found) for found in left} == {0, 1, 2, 3}


def test_taking_over_an_arena_loses_nothing(killed: Killed) -> None:
    for found in outcomes("memory-open", killed, 5):
        assert found == {KEYS[0]: OLD}


def test_making_an_arena_can_be_done_again(killed: Killed) -> None:
    through = killed.counts["first-open"]
    assert through >= 5
    for at in range(through + 1):
        assert asyncio.run(memory_after(killed.top / "first-open" / str(at) / "deep" / "arena")) == {}


def test_fault_store_kills_at_the_boundary_it_is_told(killed: Killed) -> None:
    through = killed.counts["fault-store"]
    assert through == 8  # two for each of three puts and one deletion
    left = [asyncio.run(files_after(killed.top / "fault-store" / str(at))) for at in range(through + 1)]
    assert [len(found) for found in left] == [0, 1, 1, 2, 2, 3, 3, 2, 2]


def test_of_racing_processes_exactly_one_creates(memory_directory: Path) -> None:
    assert json.loads(work("race", memory_directory, "4")) == [1] * 8
    names = sorted(path.name for path in memory_directory.iterdir())
    assert names == sorted(f"turn-{turn}" for turn in range(8))
    for name in names:
        content = (memory_directory / name).read_bytes()
        assert len(content) == 10_000
        assert len(set(content)) == 1
