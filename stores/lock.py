"""One living owner per file, told by the kernel.

``lockf`` locks are used because a forked child does not inherit them: an orphaned worker of a
killed trainer keeps a ``flock`` alive, a ``lockf`` lock is gone (measured). They belong to the
process, with two consequences handled here: a second lock of the same process would be granted,
so a registry refuses it; and closing *any* descriptor of the file drops the lock, so nothing
else may ever open a lock file.
"""

from __future__ import annotations

import fcntl
import os
import struct
from types import TracebackType
from typing import Self

from stepwell.errors import LockedError, PermanentStoreError
from stepwell.stores.oserrors import store_error

__all__ = ["FileLock", "owner_of"]

_FLOCK = struct.Struct("hhqqi4x")  # of Linux on 64 bits: type, whence, start, length, pid

_HELD: dict[tuple[int, str], tuple[int, int] | None] = {}
"""(pid, real path) -> (device, inode) of every lock this process holds or is taking.

The pid is part of the key because a forked child inherits the dictionary but none of the locks.
"""

_ATTEMPTS_MAX = 16  # how often the file may be swapped under us before we give up


class FileLock:
    """An exclusive lock on a file, held by this process until `release` or its end.

    Parameters
    ----------
    path : str
        The lock file; made with mode 0600 when absent, never removed, holds the owner's pid.

    Notes
    -----
    Never waits. A context manager: ``with FileLock(path):``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._fd: int | None = None
        self._claim: tuple[int, str] | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock through this object; False in a forked child."""
        return self._fd is not None and self._claim is not None and self._claim[0] == os.getpid()

    def acquire(self) -> None:
        """Take the lock.

        Raises
        ------
        LockedError
            Another living process, or this one, holds it; the message names the process.
        PermanentStoreError, TransientStoreError
            The file cannot be opened or locked.
        """
        claim = (os.getpid(), os.path.realpath(self.path))
        # setdefault is atomic: of two threads one finds its own marker.
        marker = (-1, id(self))
        if _HELD.setdefault(claim, marker) is not marker:
            raise self._locked(os.getpid())
        try:
            self._refuse_other_name_of_held_file()
            self._fd = self._open_and_lock()
            status = os.fstat(self._fd)
        except BaseException:
            del _HELD[claim]
            raise
        _HELD[claim] = (status.st_dev, status.st_ino)
        self._claim = claim

    def release(self) -> None:
        """Give the lock back; harmless where it is not held."""
        fd, self._fd = self._fd, None
        claim, self._claim = self._claim, None
        if fd is None:
            return
        if claim is not None and claim[0] == os.getpid():
            os.ftruncate(fd, 0)
            # Forget last: a thread that opened the file while we close ours would lose its lock.
            os.close(fd)
            _HELD.pop(claim, None)
        else:
            os.close(fd)  # in a forked child: its own descriptor, which holds no lock

    def _refuse_other_name_of_held_file(self) -> None:
        """Refuse a hard link of a lock held here: opening and closing it would drop that lock."""
        try:
            status = os.stat(self.path)
        except OSError:
            return
        identity = (status.st_dev, status.st_ino)
        if any(held == identity and pid == os.getpid() for (pid, _), held in list(_HELD.items())):
            raise self._locked(os.getpid())

    def _open_and_lock(self) -> int:
        for _ in range(_ATTEMPTS_MAX):
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise store_error(error, "open the lock", where=self.path) from error
            try:
                self._lock(fd)
                if self._is_current(fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the owner removed the file before its end: lock the new one
        raise PermanentStoreError(f"lock {self.path} is replaced again and again by another program")

    def _lock(self, fd: int) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # POSIX allows EAGAIN and EACCES
            raise self._locked(_pid_in(fd)) from error
        except OSError as error:
            raise store_error(error, "lock", where=self.path) from error

    def _is_current(self, fd: int) -> bool:
        mine = os.fstat(fd)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _locked(self, pid: int | None) -> LockedError:
        if pid == os.getpid():
            owner = f"this process ({pid}) itself; close what it has open first"
        else:
            named = "a living process" if pid is None else f"process {pid}"
            owner = f"{named}; end it first, or open another run"
        return LockedError(f"{self.path} is locked by {owner}")

    def __enter__(self) -> Self:
        """Take the lock."""
        self.acquire()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the lock back."""
        self.release()


def _pid_in(fd: int) -> int | None:
    """Read the owner's pid; None when it is not (yet) written."""
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def owner_of(path: str | os.PathLike[str]) -> int | None:
    """Return the process that holds the lock on a file, without taking it; None if there is none.

    0 is one of another pid namespace. A file that is not there is locked by nobody.

    Raises
    ------
    PermanentStoreError, TransientStoreError
        The file cannot be looked at.
    """
    pid = os.getpid()
    if _HELD.get((pid, os.path.realpath(path))) is not None:
        return pid  # to open the file would end the lock
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, owner = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(error, "look at the lock", where=str(path)) from error
    return None if kind == fcntl.F_UNLCK else max(0, int(owner))
