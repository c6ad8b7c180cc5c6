"""The free files of an arena: used again where they fit, made and given up where they do not.

Recycling matters: a copy into fresh pages of tmpfs runs at a tenth of the speed of one into pages
that are there already (measured).
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path

from stepwell.errors import NoSpaceError
from stepwell.stores.arena_files import SPACE_PREFIX, os_errors
from stepwell.stores.header import PAGE_BYTES
from stepwell.stores.oserrors import store_error
from stepwell.stores.region import Region, make_file

__all__ = ["Space", "capacity_for"]

_PAGED_BYTES_MAX = 64 << 10


def capacity_for(size_bytes: int) -> int:
    """Round a payload size up, so that the packs of successive steps fit the same files.

    Whole pages up to 64 KiB, then eight steps for each doubling: at most 12.5 % are wasted.
    """
    step = PAGE_BYTES if size_bytes <= _PAGED_BYTES_MAX else 1 << (size_bytes.bit_length() - 4)
    return max(step, -(-size_bytes // step) * step)


class Space:
    """The free list of one arena.

    Every method may be called from any thread. Files change only by their owner's calls: a region
    that was taken is nobody else's until it is added again.

    Attributes
    ----------
    directory : Path
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mutex = threading.RLock()
        self._free: list[Region] = []

    @property
    def free_bytes(self) -> int:
        """Bytes of the tier in free files."""
        with self._mutex:
            return sum(region.file_bytes for region in self._free)

    @property
    def room_bytes(self) -> int:
        """Bytes that could be reserved at most: free files, and what the file system has left."""
        with os_errors(self.directory, "ask for free space"):
            file_system = os.statvfs(self.directory)
        return file_system.f_bavail * file_system.f_frsize + self.free_bytes

    def rename(self, region: Region) -> None:
        """Give a file the name of one that holds nothing."""
        path = self._new_path()
        os.rename(region.path, path)
        region.path = path

    def _new_path(self) -> str:
        return os.path.join(self.directory, f"{SPACE_PREFIX}{secrets.token_hex(8)}")

    def add(self, region: Region) -> None:
        """Put a region whose header is zero on the free list."""
        with self._mutex:
            self._free.append(region)

    def take(self, size_bytes: int) -> Region:
        """Return a region, not yet mapped, of at least `size_bytes`; see ``Arena.reserve``.

        Raises
        ------
        NoSpaceError
            With the bytes needed and those left.
        """
        capacity = capacity_for(size_bytes)
        region = self._take_free(capacity, 2 * capacity)
        if region is not None:
            return region
        self._give_up_smaller(capacity)
        while True:
            try:
                return self._make(capacity)
            except NoSpaceError as error:
                larger = self._take_free(capacity, None)
                if larger is not None:
                    return larger
                if not self.trim(0):
                    raise self.no_space(PAGE_BYTES + capacity) from error

    def trim(self, keep_bytes: int) -> int:
        """Remove free files, largest first, until at most `keep_bytes` are free; return bytes removed."""
        removed = 0
        with self._mutex:
            for region in sorted(self._free, key=lambda each: each.size_bytes, reverse=True):
                if self.free_bytes <= keep_bytes:
                    break
                removed += self._unlink(region)
        return removed

    def unmap(self) -> None:
        """Give back the address space of all free files."""
        with self._mutex:
            for region in self._free:
                region.unmap()

    def no_space(self, needed_bytes: int) -> NoSpaceError:
        """Say that the tier is too small."""
        return NoSpaceError(
            f"the memory tier in {self.directory} needs {needed_bytes} bytes and has {self.room_bytes} "
            f"left; make it larger (for a container: its shared memory size), keep fewer steps there, "
            f"or choose another directory"
        )

    def _take_free(self, capacity: int, capacity_max: int | None) -> Region | None:
        with self._mutex:
            fitting = [region for region in self._free if region.size_bytes >= capacity]
            # Of equal ones a mapped one: its pages are warm.
            region = min(fitting, key=lambda each: (each.size_bytes, not each.mapped), default=None)
            if region is None or (capacity_max is not None and region.size_bytes > capacity_max):
                return None
            self._free.remove(region)
            return region

    def _make(self, capacity: int) -> Region:
        region = Region(self._new_path(), capacity)
        try:
            # Outside of the mutex: this is the slow part, and the name is ours alone.
            make_file(region.path, region.file_bytes)
        except OSError as error:
            raise store_error(
                error, "reserve a region", where=str(self.directory), size_bytes=region.file_bytes
            ) from error
        return region

    def _give_up_smaller(self, capacity: int) -> None:
        """Remove free files too small for `capacity`, up to as many bytes: so the arena stays bounded."""
        removed = 0
        with self._mutex:
            for region in sorted(self._free, key=lambda each: each.size_bytes):
                if removed >= capacity or region.size_bytes >= capacity:
                    break
                removed += self._unlink(region)

    def _unlink(self, region: Region) -> int:
        with os_errors(self.directory, "remove a free file"), suppress(FileNotFoundError):
            os.unlink(region.path)
        self._free.remove(region)
        region.unmap()
        return region.file_bytes
