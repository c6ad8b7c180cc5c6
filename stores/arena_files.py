"""What the files of an arena are called, and how they are looked at without mapping them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from stepwell.errors import IntegrityError, MissingObjectError, ObjectExistsError, PermanentStoreError
from stepwell.stores.arena_record import RECORD_NAME, TEMP_PREFIX
from stepwell.stores.header import PAGE_BYTES, Header
from stepwell.stores.oserrors import store_error
from stepwell.stores.region import Region

__all__ = [
    "CAPTURE_PREFIX",
    "FINISH_LOCK_NAME",
    "LOCK_NAME",
    "OBJECT_PREFIX",
    "SPACE_PREFIX",
    "TEMP_PREFIX",
    "has_captures",
    "has_objects",
    "is_ours",
    "make_private",
    "mark",
    "object_name",
    "os_errors",
    "read_region",
]

LOCK_NAME = "lock"
FINISH_LOCK_NAME = "finish.lock"
"""Held beside the lock by a process that has the arena only until it has finished what was captured."""

OBJECT_PREFIX = "object-"
SPACE_PREFIX = "space-"
CAPTURE_PREFIX = "capture-"


def object_name(key: str) -> str:
    """Return the file name of a published key; the key itself is in the header."""
    return f"{OBJECT_PREFIX}{xxhash.xxh3_128_hexdigest(key.encode())}"


def is_ours(name: str) -> bool:
    """Say whether an arena made the file, apart from its lock."""
    known = name in (RECORD_NAME, FINISH_LOCK_NAME)
    return known or name.startswith((OBJECT_PREFIX, SPACE_PREFIX, CAPTURE_PREFIX, TEMP_PREFIX))


def has_objects(directory: Path) -> bool:
    """Say whether something was published in the directory."""
    return _has(directory, OBJECT_PREFIX)


def has_captures(directory: Path) -> bool:
    """Say whether something is marked in the directory; none where there is no such directory."""
    return _has(directory, CAPTURE_PREFIX)


def _has(directory: Path, prefix: str) -> bool:
    try:
        return any(name.startswith(prefix) for name in os.listdir(directory))
    except FileNotFoundError:
        return False


def read_region(path: str, *, writable: bool) -> tuple[Region | None, Header | None]:
    """Read a file's size and header without mapping it; no region where it is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        page = os.pread(fd, PAGE_BYTES, 0)
    finally:
        os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        return None, None
    region = Region(path, max(0, status.st_size - PAGE_BYTES), writable=writable)
    try:
        return region, Header.decode(page, payload_bytes=region.size_bytes)
    except (IntegrityError, PermanentStoreError):
        return region, None  # half written or damaged: as good as not there


def mark(region: Region, header: Header, name: str) -> None:
    """Write a region's header and give its file the name that makes it count; all of it, or nothing."""
    target = os.path.join(os.path.dirname(region.path), name)
    region.write_header(header)
    try:
        os.rename(region.path, target)
    except BaseException:
        region.write_header(None)
        raise
    region.path = target


def make_private(directory: Path) -> None:
    """Make the directory and its parents with mode 0700; refuse one that is not ours alone.

    Raises
    ------
    PermanentStoreError
        Somebody else owns it or may write to it.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    status, link = os.stat(directory), os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise PermanentStoreError(f"{directory} is no directory")
    # Anyone may have made this name before us in a shared directory such as /dev/shm.
    if status.st_uid != os.geteuid() or link.st_uid not in {os.geteuid(), 0}:
        raise PermanentStoreError(
            f"{directory} belongs to user {status.st_uid}, not to {os.geteuid()}; choose another directory"
        )
    if status.st_mode & 0o077 == 0:
        return
    names = os.listdir(directory)
    if not status.st_mode & stat.S_ISVTX and (not names or RECORD_NAME in names):
        os.chmod(directory, 0o700)  # nothing but ours can be in it
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISVTX):
        raise PermanentStoreError(
            f"{directory} may be written by other users; choose a directory of its own, e.g. one inside it"
        )


@contextmanager
def os_errors(directory: Path, what: str) -> Iterator[None]:
    """Translate errors of the operating system."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, MissingObjectError):
            raise
        raise MissingObjectError(f"cannot {what} in {directory}: {error}") from error
    except OSError as error:
        if isinstance(error, ObjectExistsError):
            raise
        raise store_error(error, what, where=str(directory)) from error
