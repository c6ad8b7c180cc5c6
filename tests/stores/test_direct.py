"""Writing past the page cache: the same bytes, whatever the disk does."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import NoSpaceError
from stepwell.stores.direct import BLOCK_BYTES, BUFFER_BYTES, DIRECT_BYTES_MIN, write_blocks
from stepwell.stores.file import FileStore

LARGE = 2 * BUFFER_BYTES + BLOCK_BYTES + 17
SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BUFFER_BYTES - 1, BUFFER_BYTES, LARGE]


def parts_of(data: bytes, cuts: Sequence[int]) -> list[memoryview]:
    """Cut bytes at odd places, so that no part is aligned."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [memoryview(data)[start:stop] for start, stop in pairwise(edges)]


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_whole_blocks_of_parts_of_any_length_are_written(tmp_path: Path, size: int) -> None:
    data = random_bytes(size)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        written = write_blocks(fd, parts_of(data, [1, 3, 4097, 70_001, size // 2 + 1]))
        assert written in (0, size // BLOCK_BYTES * BLOCK_BYTES)
        assert os.lseek(fd, 0, os.SEEK_CUR) == written
        assert os.pread(fd, size + 1, 0) == data[:written]
        os.write(fd, b"x")  # no longer direct: an odd write is possible
    finally:
        os.close(fd)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.mark.parametrize("extra", [-1, 0, 1, BLOCK_BYTES, BUFFER_BYTES + 3])
async def test_large_objects_come_back(store: FileStore, extra: int) -> None:
    data = random_bytes(DIRECT_BYTES_MIN + extra)
    await store.put("one", parts_of(data, [5, 4099, 999_999]))
    assert bytes(await store.fetch("one")) == data


def on_large_writes(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, Any], int]) -> list[int]:
    """Let `answer(fd, view)` stand for each direct write, which comes as one large view."""
    real, seen = os.writev, []

    def writev(fd: int, views: Any) -> int:
        if len(views) == 1 and views[0].nbytes >= BLOCK_BYTES and views[0].nbytes % BLOCK_BYTES == 0:
            seen.append(views[0].nbytes)
            return answer(fd, views[0])
        return real(fd, views)

    monkeypatch.setattr(os, "writev", writev)
    return seen


@pytest.mark.parametrize("refused", [1, 2], ids=["first", "second"])
async def test_a_file_system_that_refuses_is_written_the_usual_way(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    data = random_bytes(3 * BUFFER_BYTES + 5)
    real = os.write

    def answer(fd: int, view: Any) -> int:
        if len(seen) == refused:
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(fd, view)

    seen = on_large_writes(monkeypatch, answer)
    await store.put("one", [data])
    assert len(seen) >= refused
    assert bytes(await store.fetch("one")) == data


@pytest.mark.parametrize("short", [BLOCK_BYTES, BLOCK_BYTES + 512, 7])
async def test_short_writes_lose_nothing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    data = random_bytes(2 * BUFFER_BYTES + 11)
    real = os.write

    def answer(fd: int, view: Any) -> int:
        # A disk that writes a part of what is asked; unaligned ones come from the page cache.
        if short % BLOCK_BYTES:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return real(fd, view[:short] if len(seen) == 1 else view)

    seen = on_large_writes(monkeypatch, answer)
    await store.put("one", [data])
    assert seen
    assert bytes(await store.fetch("one")) == data


async def test_a_full_disk_is_told_and_leaves_nothing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(fd: int, view: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    seen = on_large_writes(monkeypatch, answer)
    with pytest.raises(NoSpaceError):
        await store.put("one", [random_bytes(DIRECT_BYTES_MIN)])
    assert seen
    assert not await store.exists("one")
    assert [path for path in store.root.rglob("*") if path.is_file()] == []
