"""The memory tier of one rank: recycled files on tmpfs that outlive the process.

Over 400 lines: an object, a capture and free space are three states of one file, and every change between
them is judged here.

Files in the directory::

    lock                    held by the owner (see ``stepwell.stores.lock``)
    arena.json              whose arena this is
    object-{xxh3-128}       published; the name is the hash of the key, the header has the key
    space-{random}          reserved or free; its header is zero (or not to be trusted)
    capture-{random}        reserved, and the header says what its owner has put there (see ``mark``)

An object is published in this order, each step leaving something that a new owner can judge:

1. the header is zero, the file is called ``space-*``: after a crash it is free again;
2. the payload is written: the same;
3. the header is written: the same, the name decides;
4. the file is renamed: published. A rename replaces an older object of the same key at once.

It is taken back in the order: zero the header, rename to ``space-*``. An ``object-*`` with a zero
or half-written header is therefore free too. What survives: the death of the process in any way.
What does not: the machine.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from stepwell.errors import FormatError, MissingObjectError, ObjectExistsError, UsageError
from stepwell.stores.arena_files import (
    CAPTURE_PREFIX,
    LOCK_NAME,
    OBJECT_PREFIX,
    SPACE_PREFIX,
    TEMP_PREFIX,
    has_objects,
    is_ours,
    make_private,
    mark,
    object_name,
    os_errors,
    read_region,
)
from stepwell.stores.arena_record import RECORD_NAME, check_record, read_record, write_record
from stepwell.stores.header import PAGE_BYTES, Header
from stepwell.stores.keys import check_key
from stepwell.stores.lock import FileLock
from stepwell.stores.region import Region, RegionState
from stepwell.stores.space import Space

__all__ = ["Arena"]

# Each mapping costs a file descriptor, and 1,024 are a common limit of a process.
_MAPPED_COUNT_MAX = 256


class Arena:
    """Files of one run in one directory, owned by one process at a time.

    Made by `open` (owner) or `inspect` (reads only, takes no lock). All methods may be called from
    any thread; those that make a file take about 2 s per GiB and belong off the event loop.

    Attributes
    ----------
    directory : Path
    run : str
    read_only : bool
    """

    def __init__(self, directory: Path, run: str, lock: FileLock | None) -> None:
        # Not for callers: `open` and `inspect` check what must be checked first.
        self.directory = directory
        self.run = run
        self.read_only = lock is None
        self._lock = lock
        self._pid = os.getpid()
        self._closed = False
        self._mutex = threading.RLock()
        self._published: dict[str, Region] = {}
        self._space = Space(directory)
        self._reserved: set[Region] = set()
        self._left: list[Region] = []

    @classmethod
    def open(cls, directory: Path | str, *, run: str, create: bool = True) -> Arena:
        """Become the owner of the arena in `directory`; what was published there is found again.

        Raises
        ------
        LockedError
            Another living process, or this one, has it open.
        UsageError
            The arena belongs to another run.
        FormatError
            It has another format version, or its record is damaged. Nothing was written.
        MissingObjectError
            There is none and `create` is False.
        PermanentStoreError, NoSpaceError
            The directory belongs to somebody else or cannot be made or written.
        """
        path = Path(os.path.abspath(directory))
        Header(run, "run", 0, 0).encode()  # refuses a run name that no header can hold
        with os_errors(path, "open the arena"):
            if check_record(path, run) is None:
                if not create:
                    raise MissingObjectError(f"there is no arena in {path}")
                if has_objects(path):
                    raise FormatError(
                        f"{path} holds files of an arena but no {RECORD_NAME}; remove it to start anew"
                    )
            make_private(path)
        lock = FileLock(path / LOCK_NAME)
        lock.acquire()
        arena = cls(path, run, lock)
        try:
            with os_errors(path, "open the arena"):
                if check_record(path, run) is None:  # once more: now nobody can change it
                    write_record(path, run)
                arena._adopt()
        except BaseException:
            lock.release()
            raise
        return arena

    @classmethod
    def inspect(cls, directory: Path | str) -> Arena:
        """Open for reading, beside a living owner or after its death; writes and locks nothing.

        Raises
        ------
        MissingObjectError
            There is no arena.
        FormatError
            It has another format version, or its record is damaged.
        """
        path = Path(os.path.abspath(directory))
        with os_errors(path, "inspect the arena"):
            run = read_record(path)
        if run is None:
            raise MissingObjectError(f"there is no arena in {path}")
        return cls(path, run, None)

    # -- what is there ------------------------------------------------------------------------

    def find(self, key: str) -> Region | None:
        """Return the region published under `key`, or None.

        An inspecting arena looks into the directory each time; its region stays what it was only
        as long as the owner leaves it; `unchanged` tells.
        """
        self._check_usable()
        check_key(key)
        if self.read_only:
            return self._look(object_name(key))
        with self._mutex:
            return self._published.get(key)

    def keys(self) -> tuple[str, ...]:
        """Return all published keys, sorted."""
        self._check_usable()
        if not self.read_only:
            with self._mutex:
                return tuple(sorted(self._published))
        with os_errors(self.directory, "list the arena"):
            names = [name for name in os.listdir(self.directory) if name.startswith(OBJECT_PREFIX)]
        headers = [region.header for region in map(self._look, names) if region is not None]
        return tuple(sorted(header.key for header in headers if header is not None))

    def unchanged(self, header: Header) -> bool:
        """Say whether what `header` describes is still published.

        Take a region's header, read its contents, ask, and only then trust what was read: the
        owner may use the file again, and changes the header before it touches the payload.
        """
        region = self.find(header.key)
        return region is not None and region.header == header

    @property
    def used_bytes(self) -> int:
        """Bytes of the tier in files that are reserved or published."""
        with self._mutex:
            return sum(each.file_bytes for each in (*self._reserved, *self._published.values()))

    @property
    def free_bytes(self) -> int:
        """Bytes of the tier in files that wait to be used again."""
        return self._space.free_bytes

    # -- reserve, publish, recycle ------------------------------------------------------------

    def check_room(self, size_bytes: int) -> None:
        """Raise NoSpaceError when `size_bytes` more could never be reserved here.

        Counts what the file system has left and what this arena has on its free list.
        """
        self._check_writable()
        if size_bytes > self._space.room_bytes:
            raise self._space.no_space(size_bytes)

    def reserve(self, size_bytes: int) -> Region:
        """Return a region of at least `size_bytes`, mapped, its pages present, its header zero.

        A free file that fits (at most twice as large) is used again; otherwise one is made, in
        place of free files that are too small. When the tier is full, a larger free file is
        taken, or free files are given up, before the call fails.

        Raises
        ------
        NoSpaceError
            With the bytes needed and those left.
        """
        self._check_writable()
        if size_bytes < 0:
            raise UsageError(f"cannot reserve {size_bytes} bytes")
        region = self._space.take(size_bytes)
        with self._mutex:
            region.state = RegionState.RESERVED
            self._reserved.add(region)
        try:
            with os_errors(self.directory, "map a region"):
                region.map()
        except BaseException:
            self.recycle(region)
            raise
        return region

    def publish(self, region: Region, key: str, length: int, *, replace: bool = True) -> None:
        """Publish the first `length` bytes of a reserved region under `key`, without a copy.

        From here on the payload belongs to the arena. With ``replace=False`` a key that is there
        already is an error, and the region stays reserved.

        Raises
        ------
        UsageError
            The region is not reserved here, or shorter than `length`.
        ObjectExistsError
            The key is there and `replace` is False.
        """
        self._check_writable()
        check_key(key)
        if not 0 <= length <= region.size_bytes:
            raise UsageError(f"cannot publish {length} bytes of {region!r}")
        header = Header(self.run, key, length, secrets.randbits(64))
        with self._mutex, os_errors(self.directory, f"publish {key!r}"):
            if region not in self._reserved:
                raise UsageError(f"{region!r} is not reserved: it cannot be published")
            old = self._published.get(key)
            if old is not None and not replace:
                raise ObjectExistsError(f"{key!r} is there already in {self.directory}")
            mark(region, header, object_name(key))
            region.state = RegionState.PUBLISHED
            self._reserved.discard(region)
            self._published[key] = region
            if old is not None:
                # Its file is gone with the rename; views of it stay valid.
                old.state, old.header = RegionState.FREE, None
                old.unmap()
            self._limit_mappings()

    def recycle(self, region: Region) -> None:
        """Give a reserved region back; its payload is no longer the caller's."""
        self._check_writable()
        with self._mutex:
            if region not in self._reserved:
                raise UsageError(f"{region!r} is not reserved: it cannot be recycled")
            if region.header is not None:
                self.unmark(region)
            self._reserved.discard(region)
            region.state = RegionState.FREE
        self._space.add(region)

    def mark(self, region: Region, key: str, length: int) -> int:
        """Say what a reserved region holds, for the next owner if this one dies; it stays the caller's.

        Take the mark back before the payload is changed.

        Returns
        -------
        int
            The mark's serial, random: the next owner can tell this mark from an older one.
        """
        self._check_writable()
        if not 0 <= length <= region.size_bytes:
            raise UsageError(f"cannot mark {length} bytes of {region!r}")
        header = Header(self.run, check_key(key), length, secrets.randbits(63))
        with self._mutex, os_errors(self.directory, f"mark {key!r}"):
            if region not in self._reserved or region.header is not None:
                raise UsageError(f"{region!r} is not reserved, or marked already")
            mark(region, header, f"{CAPTURE_PREFIX}{secrets.token_hex(8)}")
        return header.serial

    def unmark(self, region: Region) -> None:
        """Take a mark back; the region stays reserved. Harmless where there is none."""
        self._check_writable()
        with self._mutex, os_errors(self.directory, "take a mark back"):
            if region in self._reserved and region.header is not None:
                region.write_header(None)
                self._space.rename(region)

    def left(self) -> list[Region]:
        """Return what an earlier owner had marked at its death, once: reserved, and now the caller's."""
        self._check_writable()
        with self._mutex:
            left, self._left = self._left, []
        with os_errors(self.directory, "map what was left"):
            for region in left:
                region.map()
        return left

    def drop(self, key: str) -> bool:
        """Take back what is published under `key`; False if there is nothing.

        Views of it become invalid: the file may be written to again at once.
        """
        self._check_writable()
        with self._mutex, os_errors(self.directory, f"drop {key!r}"):
            region = self._published.get(check_key(key))
            if region is None:
                return False
            region.write_header(None)
            del self._published[key]
            region.state = RegionState.FREE
            self._space.rename(region)
        self._space.add(region)
        return True

    def trim(self, keep_bytes: int = 0) -> int:
        """Remove free files, largest first, until at most `keep_bytes` are free; return bytes removed."""
        self._check_writable()
        return self._space.trim(keep_bytes)

    # -- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up ownership; everything published stays for the next owner. Idempotent.

        Views that were handed out stay readable. In a forked child nothing is touched.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._mutex:
            self._closed = True
            self._space.unmap()
            for region in (*self._published.values(), *self._reserved):
                region.unmap()
            if self._lock is not None:
                self._lock.release()

    def remove(self) -> None:
        """Delete all files of the arena and close it; the directory goes too if nothing else is in it."""
        self._check_writable()
        with self._mutex, os_errors(self.directory, "remove the arena"):
            # The record goes last: what is left after a crash still says whose it is.
            names = [name for name in os.listdir(self.directory) if name != LOCK_NAME]
            for name in sorted(filter(is_ours, names), key=lambda name: name == RECORD_NAME):
                with suppress(FileNotFoundError):
                    os.unlink(self.directory / name)
            os.unlink(self.directory / LOCK_NAME)
            with suppress(OSError):
                os.rmdir(self.directory)
            self.close()

    def __enter__(self) -> Self:
        """Return the arena itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # -- inside -------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise UsageError(f"the arena in {self.directory} is closed")
        if os.getpid() != self._pid:
            raise UsageError(
                f"the arena in {self.directory} was opened by process {self._pid} and is used in its forked "
                f"child {os.getpid()}; start processes with 'spawn', or use Arena.inspect there"
            )

    def _check_writable(self) -> None:
        self._check_usable()
        if self.read_only:
            raise UsageError(f"the arena in {self.directory} was opened with Arena.inspect: it only reads")

    def _adopt(self) -> None:
        """Sort what an earlier owner left: published, or free."""
        for name in sorted(os.listdir(self.directory)):
            path = os.path.join(self.directory, name)
            if name.startswith(TEMP_PREFIX):
                os.unlink(path)
            elif name.startswith((OBJECT_PREFIX, SPACE_PREFIX, CAPTURE_PREFIX)):
                self._adopt_file(name, path)

    def _adopt_file(self, name: str, path: str) -> None:
        region, header = read_region(path, writable=True)
        if region is None:
            return  # no regular file: not made by us
        if header is not None and header.run == self.run and name == object_name(header.key):
            region.header, region.state = header, RegionState.PUBLISHED
            self._published[header.key] = region
        elif header is not None and header.run == self.run and name.startswith(CAPTURE_PREFIX):
            region.header, region.state = header, RegionState.RESERVED
            self._reserved.add(region)
            self._left.append(region)
        elif region.size_bytes < PAGE_BYTES or os.stat(path).st_blocks * 512 < region.file_bytes:
            os.unlink(path)  # died before all of its blocks were there
        else:
            region.write_header(None)
            if not name.startswith(SPACE_PREFIX):
                self._space.rename(region)
            self._space.add(region)

    def _look(self, name: str) -> Region | None:
        """Read one object's header from the directory; None if it is not (or no longer) whole."""
        try:
            with os_errors(self.directory, "read the arena"):
                region, header = read_region(os.path.join(self.directory, name), writable=False)
        except MissingObjectError:
            return None
        if region is None or header is None or header.run != self.run or name != object_name(header.key):
            return None
        region.header, region.state = header, RegionState.PUBLISHED
        return region

    def _limit_mappings(self) -> None:
        """Unmap the oldest objects that nobody looks at when there are too many mappings."""
        mapped = [region for region in self._published.values() if region.mapped]
        for region in mapped[: max(0, len(mapped) - _MAPPED_COUNT_MAX)]:
            region.unmap()
