from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from stepwell.errors import LockedError, PermanentStoreError
from stepwell.stores.lock import FileLock, owner_of

WORKER = Path(__file__).with_name("kill_worker.py")


def in_child(body: str, path: Path) -> subprocess.CompletedProcess[str]:
    script = f"import sys\nfrom stepwell.stores.lock import FileLock\nlock = FileLock(sys.argv[1])\n{body}"
    return subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False, timeout=60
    )


def test_second_lock_in_this_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path) as lock:
        assert lock.held
        for same in (path, tmp_path / "." / "lock", tmp_path / "x" / ".." / "lock"):
            with pytest.raises(LockedError, match=f"process \\({os.getpid()}\\) itself"):
                FileLock(same).acquire()
        with pytest.raises(LockedError):
            lock.acquire()
        assert lock.held
        assert path.read_text().strip() == str(os.getpid())
        assert path.stat().st_mode & 0o777 == 0o600
    assert not lock.held
    with FileLock(path):
        pass


def test_refused_attempt_does_not_drop_the_lock(tmp_path: Path) -> None:
    # Closing any descriptor of the file in this process would.
    path = tmp_path / "lock"
    other_name = tmp_path / "hard-link"
    with FileLock(path):
        os.link(path, other_name)
        for name in (path, other_name):
            with pytest.raises(LockedError):
                FileLock(name).acquire()
        child = in_child("lock.acquire()", path)
    assert child.returncode == 1
    assert "LockedError" in child.stderr
    assert f"process {os.getpid()}" in child.stderr


def test_of_many_threads_one_gets_it(tmp_path: Path) -> None:
    path, start, got = tmp_path / "lock", threading.Barrier(8), []

    def attempt() -> None:
        lock = FileLock(path)
        start.wait(20)
        try:
            lock.acquire()
        except LockedError:
            return
        got.append(lock)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


def test_gone_with_its_killed_owner_even_if_an_orphan_lives(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, str(WORKER), "hold", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"process {owner.pid}"):
            FileLock(path).acquire()
        owner.kill()
        owner.wait(20)
        with FileLock(path):
            assert path.read_text().strip() == str(os.getpid())
    # Leaving the block closes the pipe that keeps the orphan.


def test_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads; it only asks and ends
            child = os.fork()
        if child == 0:
            code = 1
            try:
                refused = False
                try:
                    FileLock(tmp_path / "lock").acquire()
                except LockedError:
                    refused = True
                lock.release()
                code = 0 if refused and not lock.held else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert "LockedError" in in_child("lock.acquire()", tmp_path / "lock").stderr


def test_replaced_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    real, swaps = os.open, []

    def swapped_after_open(name: str, *args: int) -> int:
        fd = real(name, *args)
        if len(swaps) < 2:
            swaps.append(fd)
            os.unlink(path)  # as the owner's Arena.remove does
        return fd

    monkeypatch.setattr(os, "open", swapped_after_open)
    with FileLock(path):
        assert len(swaps) == 2
        assert path.read_text().strip() == str(os.getpid())


def test_owner_is_told_without_taking_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert owner_of(path) is None
    assert not path.exists()
    with FileLock(path) as lock:
        assert owner_of(path) == os.getpid()
        assert lock.held
        told = f"from stepwell.stores.lock import owner_of; print(owner_of({str(path)!r}))"
        assert in_child(told, path).stdout.split() == [str(os.getpid())]
    assert owner_of(path) is None


def test_place_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PermanentStoreError):
        FileLock(tmp_path).acquire()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(PermanentStoreError):
        FileLock(tmp_path / "link").acquire()
    assert not (tmp_path / "target").exists()
