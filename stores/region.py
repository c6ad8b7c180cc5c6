"""One file of an arena, mapped into memory: a header page and a payload."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from enum import StrEnum

import numpy as np

from stepwell.errors import UsageError
from stepwell.stores.header import BLANK, PAGE_BYTES, Header

__all__ = ["Region", "RegionState", "make_file", "write_page"]

# Linux 5.14; not in the mmap module of the Python versions we run on.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

# mmap(MAP_POPULATE) holds the interpreter lock for about 0.1 s per GiB, and the budget of the
# event loop is 10 ms. The same work in steps of this size lets others run in between.
_POPULATE_STEP_BYTES = 2 << 20


class RegionState(StrEnum):
    """Who may do what with a region."""

    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"


def make_file(path: str, size_bytes: int) -> None:
    """Make a file whose blocks are all there.

    A map past the end of a full tmpfs is a SIGBUS at some later store; ``posix_fallocate`` says
    ENOSPC here and now.

    Raises
    ------
    OSError
        The file is not left behind.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


class Region:
    """A file of an arena. Made, published and recycled by the arena only.

    Attributes
    ----------
    path : str
        Where the file is now; publishing and recycling rename it.
    size_bytes : int
        Length of the payload.
    state : RegionState
    header : Header or None
        What is published, None otherwise.
    """

    __slots__ = ("_guard", "_mapping", "_payload", "_writable", "header", "path", "size_bytes", "state")

    def __init__(self, path: str, size_bytes: int, *, writable: bool = True) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.state = RegionState.FREE
        self.header: Header | None = None
        self._writable = writable
        self._guard = threading.Lock()  # over the two below: one thread maps, another unmaps
        self._mapping: mmap.mmap | None = None
        self._payload: memoryview | None = None

    def __repr__(self) -> str:
        return f"Region({self.path!r}, {self.size_bytes} bytes, {self.state})"

    @property
    def file_bytes(self) -> int:
        """What the file takes of the tier."""
        return PAGE_BYTES + self.size_bytes

    @property
    def mapped(self) -> bool:
        """Whether the file is in memory already, so that reading it takes no time."""
        return self._mapping is not None

    @property
    def payload(self) -> memoryview:
        """The writable payload, page aligned; owned by whoever reserved the region.

        Views of it (numpy, torch) must not be written to after publishing or recycling.

        Raises
        ------
        UsageError
            The region is not reserved.
        """
        if self.state is not RegionState.RESERVED or self._payload is None:
            raise UsageError(f"{self!r} is not reserved: its payload belongs to the arena")
        return self._payload

    @property
    def contents(self) -> memoryview:
        """What was published, read-only and without a copy; valid until dropped or replaced.

        Raises
        ------
        UsageError
            Nothing is published in the region.
        """
        header = self.header
        if self.state is not RegionState.PUBLISHED or header is None:
            raise UsageError(f"nothing is published in {self!r}")
        with self._guard:
            return self._mapped_payload()[: header.length].toreadonly()

    def map(self) -> None:
        """Map the file with all its pages, if it is not mapped yet."""
        with self._guard:
            self._mapped_payload()

    def _mapped_payload(self) -> memoryview:
        payload = self._payload
        if payload is None:
            mapping = _map_file(self.path, self.file_bytes, writable=self._writable)
            payload = memoryview(mapping)[PAGE_BYTES:]
            self._mapping, self._payload = mapping, payload
        return payload

    def unmap(self) -> bool:
        """Give the address space back; False where somebody still has a view."""
        with self._guard:
            mapping, payload = self._mapping, self._payload
            if mapping is None or payload is None:
                return True
            try:
                payload.release()
            except BufferError:
                return False
            self._payload = None
            try:
                mapping.close()
            except BufferError:
                self._payload = memoryview(mapping)[PAGE_BYTES:]  # a view handed out lives on
                return False
            self._mapping = None
            return True

    def write_header(self, header: Header | None) -> None:
        """Write the header page, or zero it."""
        page = BLANK if header is None else header.encode()
        with self._guard:
            if self._mapping is not None:
                write_page(self._mapping, page)
            else:
                _write_page_unmapped(self.path, page)
        self.header = header


def write_page(mapping: mmap.mmap, page: bytes) -> None:
    """Write the header page of a mapped file."""
    mapping[:PAGE_BYTES] = page


def _write_page_unmapped(path: str, page: bytes) -> None:
    """Write the header page without mapping the file: the page cache is the same."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.pwrite(fd, page, 0) != len(page):
            raise OSError(errno.EIO, "header page written in part", path)
    finally:
        os.close(fd)


def _map_file(path: str, size_bytes: int, *, writable: bool) -> mmap.mmap:
    flags = os.O_RDWR if writable else os.O_RDONLY
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
    finally:
        os.close(fd)
    _populate(mapping, size_bytes, writable=writable)
    return mapping


def _populate(mapping: mmap.mmap, size_bytes: int, *, writable: bool) -> None:
    """Bring all pages into the page table; the contents stay."""
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    pages = np.frombuffer(mapping, np.uint8, size_bytes)
    # Not ``mmap.madvise``, which keeps the interpreter to itself while pages are found and zeroed.
    madvise = ctypes.CDLL(None).madvise
    for start in range(0, size_bytes, _POPULATE_STEP_BYTES):
        length = min(_POPULATE_STEP_BYTES, size_bytes - start)
        if madvise(ctypes.c_void_p(pages.ctypes.data + start), ctypes.c_size_t(length), advice):
            # An older kernel: read one byte of each page instead.
            pages[start : start + length : PAGE_BYTES].max()
