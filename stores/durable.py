"""Files that are there after a power failure, or not at all.

A file is durable when its bytes, its name, and the names of all directories above it are. So:
write under a temporary name, ``fsync``, rename, ``fsync`` the directory, and once for every
directory that this process has not seen before, the ones above it.

A temporary file is locked (``flock``) as long as its writer lives, so leftovers of the dead can
be told from the work of the living without asking a clock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stepwell.stores.direct import DIRECT_BYTES_MIN, write_blocks

__all__ = [
    "TEMP_PREFIX",
    "DirectorySync",
    "Temporary",
    "make_directories",
    "prune",
    "remove_leftover",
    "write_temporary",
]

TEMP_PREFIX = ".stepwell-tmp-"

_IOV_COUNT_MAX = 1024  # IOV_MAX of Linux
_ATTEMPTS_MAX = 16  # how often a directory may be pruned by a neighbour just as we enter it


@dataclass(slots=True)
class Temporary:
    """A file that is written but not yet called by its name. Close it by `rename` or `discard`."""

    path: str
    fd: int

    def sync(self) -> None:
        """Make the bytes durable."""
        os.fsync(self.fd)

    def rename(self, target: str) -> None:
        """Give it its name, in place of what is there."""
        os.rename(self.path, target)
        self._close()

    def link(self, target: str) -> None:
        """Give it its name if that is free.

        Raises
        ------
        FileExistsError
            It is not. The temporary file is gone in any case.
        """
        try:
            os.link(self.path, target)
        except OSError:
            # A network file system may repeat a request whose answer was lost, and then finds
            # its own work: the number of names tells.
            if os.fstat(self.fd).st_nlink != 2:
                raise
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary name, if it is still there."""
        if self.fd >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
            self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)  # also drops the flock


def write_temporary(root: str, directory: str, parts: Sequence[memoryview]) -> Temporary:
    """Write `parts` into a new file in `directory`, making that where needed; not yet durable.

    Raises
    ------
    OSError
        Nothing is left behind.
    """
    temporary = _open_temporary(root, directory)
    try:
        # Unsupported on some network file systems; then nobody sweeps there.
        with suppress(OSError):
            fcntl.flock(temporary.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = 0
        if sum(part.nbytes for part in parts) >= DIRECT_BYTES_MIN:
            written = write_blocks(temporary.fd, parts)
        _write_all(temporary.fd, _rest(parts, written))
    except BaseException:
        temporary.discard()
        raise
    return temporary


def _open_temporary(root: str, directory: str) -> Temporary:
    path = os.path.join(directory, f"{TEMP_PREFIX}{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for attempt in range(_ATTEMPTS_MAX):
        try:
            return Temporary(path, os.open(path, flags, 0o666))
        except FileNotFoundError:
            if attempt == _ATTEMPTS_MAX - 1:
                raise
        make_directories(root, directory)
    raise AssertionError("the last attempt returns or raises")


def _rest(parts: Sequence[memoryview], written: int) -> Sequence[memoryview]:
    """Return what is left of the parts after so many bytes."""
    for index, part in enumerate(parts):
        if written < part.nbytes:
            return [part[written:], *parts[index + 1 :]]
        written -= part.nbytes
    return []


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    """Write all parts without joining them."""
    while parts:
        written = os.writev(fd, parts[:_IOV_COUNT_MAX])
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        parts = _rest(parts, written)


def make_directories(root: str, directory: str) -> None:
    """Make `directory`, which is `root` or below it, and what is missing above.

    What is made above `root` is durable at once; the rest is `DirectorySync`'s work.
    """
    missing: list[str] = []
    path = directory
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path)
            if len(path) <= len(root):
                sync_directory(os.path.dirname(path))


def prune(root: str, directory: str) -> tuple[str, list[str]]:
    """Remove `directory` and those above it, below `root`, while they are empty.

    Returns the first one that stays, and those removed.
    """
    removed: list[str] = []
    while len(directory) > len(root):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError:
            break
        removed.append(directory)
        directory = os.path.dirname(directory)
    return directory, removed


def remove_leftover(path: str) -> bool:
    """Remove a temporary file unless its writer lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EINTR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
            return False  # its writer lives, or nobody can tell
        raise
    finally:
        os.close(fd)
    return True


class DirectorySync:
    """Makes names durable: a directory, and those above it that are not known to be.

    Parameters
    ----------
    root : str
        Top of the store; the name of `root` itself is made durable too.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        # Directory -> (device, inode) whose name in its parent is durable. A directory that was
        # removed and made again has another inode.
        self._named: dict[str, tuple[int, int]] = {}

    def plan(self, directories: Iterable[str]) -> tuple[list[str], dict[str, tuple[int, int]]]:
        """Return the directories to pass to `sync_one`, each once, and what is known after that."""
        needed: dict[str, None] = {}
        fresh: dict[str, tuple[int, int]] = {}
        for directory in directories:
            needed[directory] = None
            while len(directory) >= len(self._root) and directory not in fresh:
                status = os.stat(directory)
                identity = (status.st_dev, status.st_ino)
                if self._named.get(directory) == identity:
                    break
                fresh[directory] = identity
                directory = os.path.dirname(directory)
                needed[directory] = None
        return list(needed), fresh

    def sync_one(self, directory: str) -> None:
        """Make the names in one directory durable."""
        try:
            sync_directory(directory)
        except PermissionError:
            # Above the root we may be allowed to pass but not to look. Then we did not make the
            # root either, and its name is as durable as whoever made it saw to.
            if len(directory) >= len(self._root):
                raise

    def learn(self, fresh: dict[str, tuple[int, int]]) -> None:
        """Remember what `plan` said, once all its directories are synced."""
        self._named.update(fresh)

    def sync(self, directories: Iterable[str]) -> None:
        """Make all names in `directories`, and their own, durable."""
        needed, fresh = self.plan(directories)
        for directory in needed:
            self.sync_one(directory)
        self.learn(fresh)

    def forget(self, directories: Iterable[str]) -> None:
        """Drop what is known about directories that were removed: keeps the memory bounded."""
        for directory in directories:
            self._named.pop(directory, None)


def sync_directory(path: str) -> None:
    """Make the names in one directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems have no such call for directories: their names are durable with the
        # files, or cannot be made so.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(fd)
