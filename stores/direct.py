"""Writing past the page cache.

The bytes of a checkpoint are not read again by the run that wrote them, so pages of the cache are
taken from the training for nothing, and filling pages that the system has to find first was the
largest single cost of a save: 0.5 s of a processor for each step of 212 MB, against 0.05 s so
(a virtual machine whose free memory belongs to its host).

Parts of any length and alignment go through one small aligned buffer for each thread, which stays
in the processor's cache. Where a file system refuses (``EINVAL``), the caller writes the usual way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["DIRECT_BYTES_MIN", "write_blocks"]

DIRECT_BYTES_MIN = 1 << 20
"""Smaller files are written the usual way: setting up costs more than it saves."""

BLOCK_BYTES = 4096
"""What direct writes must be aligned to, on every disk there is."""

BUFFER_BYTES = 2 << 20

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

_local = threading.local()


def write_blocks(fd: int, parts: Sequence[memoryview]) -> int:
    """Write as many whole blocks of `parts` as can be written directly; `fd` is at its start.

    Parameters
    ----------
    fd : int
        Left as it was found, but at the end of what was written.
    parts : sequence of memoryview, uint8

    Returns
    -------
    int
        Bytes written; 0 where this cannot be done. What is left over must be written the usual way.

    Raises
    ------
    OSError
        The disk refused.
    """
    if not _O_DIRECT or not _switch(fd, on=True):
        return 0
    try:
        return _write_whole_blocks(fd, parts)
    finally:
        _switch(fd, on=False)


def _write_whole_blocks(fd: int, parts: Sequence[memoryview]) -> int:
    total = 0
    for block in _blocks(parts):
        rest = block[: block.nbytes // BLOCK_BYTES * BLOCK_BYTES]
        while rest.nbytes:
            try:
                written = os.writev(fd, [rest])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return total
            total += written
            if written % BLOCK_BYTES or not written:
                return total  # no longer aligned
            rest = rest[written:]
    return total


def _blocks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of all parts through the thread's buffer; all but the last fill it."""
    buffer, filled = _buffer(), 0
    for part in parts:
        source: NDArray[np.uint8] = np.frombuffer(part, dtype=np.uint8)
        at = 0
        while at < source.size:
            count = min(source.size - at, BUFFER_BYTES - filled)
            # Releases the interpreter, unlike an assignment to a slice of the map.
            np.copyto(buffer[filled : filled + count], source[at : at + count])
            at, filled = at + count, filled + count
            if filled == BUFFER_BYTES:
                yield buffer.data
                filled = 0
    if filled:
        yield buffer.data[:filled]


def _buffer() -> NDArray[np.uint8]:
    buffer: NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = _new_buffer()
    return buffer


def _new_buffer() -> NDArray[np.uint8]:
    """Return an aligned buffer, in one huge page where there are any: the disk then has one request of it."""
    mapped = mmap.mmap(-1, 2 * BUFFER_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapped, dtype=np.uint8)
    start = -int(whole.ctypes.data) % BUFFER_BYTES
    return whole[start : start + BUFFER_BYTES]


def _switch(fd: int, *, on: bool) -> bool:
    """Turn direct writing on or off; False if it cannot be."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
