"""The frame of byte planes: its bytes, and every check made before any of them is believed.

::

    header   16 B   magic "SWPF" | version u8 | transform u8 | itemsize u8 | log2 of block elements u8
                    | raw length u64
    table    4 B per plane of every block, blocks in order, planes least significant byte first:
                    mode in the upper 2 bits (0 raw, 1 zstd, 2 constant), stored length in the rest
    planes          as the table says: raw bytes, one zstd frame, or the one byte that repeats
    tail            the last ``raw length % itemsize`` bytes as they are

All integers are little-endian. A block is a run of ``2**log2`` elements (the last may be shorter)
and plane i of a block holds byte i of each of its elements. Blocks keep scratch memory in cache
and bounded whatever the length. The frame carries no checksum: ``stepwell.xxh3`` goes around it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stepwell.codecs.buffers import Bytes, check_size
from stepwell.errors import FormatError, IntegrityError

__all__ = [
    "BLOCK_LOG2",
    "HEADER",
    "ITEMSIZE_MAX",
    "LENGTH_BITS",
    "MAGIC",
    "VERSION",
    "Frame",
    "Mode",
    "Transform",
    "block_count_of",
    "read_frame",
    "write_header",
]

MAGIC = b"SWPF"
VERSION = 1
HEADER = struct.Struct("<4sBBBBQ")
ITEMSIZE_MAX = 16  # complex128, the widest element torch has
BLOCK_LOG2 = 17  # 128 Ki elements: a plane is exactly one zstd block, which is at most 128 KiB
BLOCK_LOG2_MAX = 20  # bounds a reader's scratch at 16 MiB for the widest element
LENGTH_BITS = 30  # of a table entry; the mode is above


class Mode(IntEnum):
    """How a plane is stored."""

    RAW = 0
    ZSTD = 1
    CONSTANT = 2


class Transform(IntEnum):
    """What was done to the elements before they were split into planes."""

    NONE = 0
    INTEGER_REFERENCE = 1
    ORDERED_REFERENCE = 2
    INTEGER_PREDECESSOR = 3
    ORDERED_PREDECESSOR = 4
    XOR_REFERENCE = 5
    XOR_PREDECESSOR = 6


def block_count_of(count: int, block_log2: int = BLOCK_LOG2) -> int:
    """Return the number of blocks of `count` elements."""
    return -(-count >> block_log2) if count else 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose header and table were checked against each other and against its size.

    Attributes
    ----------
    transform : Transform
    itemsize : int
    length : int
        Raw bytes.
    block_log2 : int
    modes, lengths, offsets : ndarray, (blocks, itemsize), int64
        Of every plane; offsets count from the start of `data`.
    data : ndarray, (n,), uint8
        The whole frame.
    """

    transform: Transform
    itemsize: int
    length: int
    block_log2: int
    modes: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    data: Bytes

    @property
    def count(self) -> int:
        """Number of whole elements."""
        return self.length // self.itemsize

    @property
    def tail(self) -> Bytes:
        """The bytes after the last whole element."""
        return self.data[self.data.size - self.length % self.itemsize :]

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (block index, first element, last element + 1)."""
        for index, start in enumerate(range(0, self.count, 1 << self.block_log2)):
            yield index, start, min(start + (1 << self.block_log2), self.count)


def write_header(out: Bytes, transform: Transform, itemsize: int, length: int) -> None:
    """Write the header of a frame at the start of `out`."""
    packed = HEADER.pack(MAGIC, VERSION, transform, itemsize, BLOCK_LOG2, length)
    out[: HEADER.size] = np.frombuffer(packed, np.uint8)


def read_frame(data: Bytes, max_bytes: int | None = None) -> Frame:
    """Check the header and the table of a frame; allocates in proportion to `data` only.

    Parameters
    ----------
    data : ndarray, (n,), uint8
        One whole frame and nothing after it.
    max_bytes : int, optional
        Most raw bytes the caller is ready for. Without it a frame may claim what its table
        accounts for, which is at most ``2**20 / 5`` times its own size.

    Raises
    ------
    FormatError
        Not such a frame, or one of a newer version.
    IntegrityError
        It claims more than `max_bytes`, or it is cut short, has something after it, or its table
        contradicts its header.
    """
    if data.size < HEADER.size:
        raise IntegrityError(f"a frame of {data.size} bytes is cut short, its header has {HEADER.size}")
    magic, version, transform, itemsize, block_log2, length = HEADER.unpack_from(data.data)
    if magic != MAGIC:
        raise FormatError(f"not a frame of byte planes: starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"frame of byte planes of version {version}, this code reads version {VERSION}")
    if transform not in tuple(Transform):
        raise FormatError(f"frame of byte planes with the unknown transform {transform}")
    if not 1 <= itemsize <= ITEMSIZE_MAX or block_log2 > BLOCK_LOG2_MAX:
        raise IntegrityError(
            f"frame with elements of {itemsize} bytes in blocks of 2**{block_log2} is damaged"
        )
    check_size(length, max_bytes, "frame of byte planes")
    count, tail = divmod(length, itemsize)
    block_count = block_count_of(count, block_log2)
    table_end = HEADER.size + 4 * block_count * itemsize
    # Every plane stores at least a byte, so this bounds the claim by the size of the frame.
    if table_end + block_count * itemsize + tail > data.size:
        raise IntegrityError(f"frame of {data.size} bytes is cut short: it claims {length} raw bytes")
    table = data[HEADER.size : table_end].view("<u4").astype(np.int64).reshape(block_count, itemsize)
    modes, lengths = table >> LENGTH_BITS, table & ((1 << LENGTH_BITS) - 1)
    _check_table(modes, lengths, count, block_log2)
    ends = table_end + np.cumsum(lengths.reshape(-1), dtype=np.int64)
    if (int(ends[-1]) if ends.size else table_end) + tail != data.size:
        raise IntegrityError(f"frame of {data.size} bytes is cut short or has something after its end")
    offsets = ends.reshape(lengths.shape) - lengths
    return Frame(Transform(transform), itemsize, length, block_log2, modes, lengths, offsets, data)


def _check_table(
    modes: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], count: int, block_log2: int
) -> None:
    sizes = np.full((modes.shape[0], 1), 1 << block_log2, np.int64)
    if count & ((1 << block_log2) - 1):
        sizes[-1] = count & ((1 << block_log2) - 1)
    fits = (
        ((modes == Mode.RAW) & (lengths == sizes))
        | ((modes == Mode.ZSTD) & (lengths > 0) & (lengths < sizes))
        | ((modes == Mode.CONSTANT) & (lengths == 1))
    )
    if not fits.all():
        block, plane = (int(part) for part in np.argwhere(~fits)[0])
        raise IntegrityError(f"frame is damaged: table entry of block {block}, plane {plane} is impossible")
