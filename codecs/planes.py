"""The kernel under ``byteplane`` and ``ordered_delta``: split into byte planes, probe, compress, merge.

Works in cache-sized blocks with reused scratch and only with calls that release the GIL. Per run
of four blocks a sample of every plane decides how the plane is stored, so noise is never fed to
the compressor. Two coders (``stepwell.codecs.coders``) compete for the rest: *match* for planes that
repeat, *entropy* for those that only lean to some values. Exponent bytes of noisy floats hold only
spurious matches of 4 to 6 bytes; looking for them costs most of the time and gains little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import zstandard

from stepwell.codecs.buffers import Bytes, byte_view
from stepwell.codecs.coders import CODERS
from stepwell.codecs.frame import (
    BLOCK_LOG2,
    HEADER,
    LENGTH_BITS,
    Frame,
    Mode,
    Transform,
    block_count_of,
    write_header,
)
from stepwell.errors import IntegrityError, UsageError

__all__ = ["BlockSource", "encode_planes", "encoded_bytes_max", "merge_block"]

BlockSource = Callable[[int, int], Bytes]
"""``source(start, stop)`` gives the bytes of these elements; valid until the next call."""

_PROBE_BLOCKS = 4  # one probe costs about 60 us, four blocks of float32 gradients about 1 ms
_SAMPLE_PIECES = 4
_SAMPLE_ELEMENTS = 2048  # per piece: 8 KiB per plane, where a Huffman table weighs about 1 %
_FEW_BYTES = 64  # a frame of zstd of one byte that repeats has 20
# Of the sample's size. zstd itself stores a block raw that gains less than 1.6 %.
_WORTHWHILE = 0.97
# Of all bytes sampled. Looking for matches takes two to three times as long as Huffman coding: what it
# saves must be worth that. (In whole blocks it saves 1 to 4 % more of a plane than in a sample.)
_SLACK = 0.0015


class _Choice(Enum):
    RAW = 0
    CONSTANT = 1
    ENTROPY = 2
    MATCH = 3


def encoded_bytes_max(length: int, itemsize: int) -> int:
    """Return the largest size of the frame of `length` raw bytes."""
    return HEADER.size + 4 * itemsize * block_count_of(length // itemsize) + length


def encode_planes(
    source: BlockSource,
    length: int,
    itemsize: int,
    *,
    transform: Transform = Transform.NONE,
    level: int = 1,
    tail: Bytes | None = None,
    out: Bytes | None = None,
) -> Bytes:
    """Encode elements into one frame (see ``stepwell.codecs.frame``).

    Parameters
    ----------
    source : BlockSource
        Called with ranges of elements, some of them twice (samples).
    length : int
        Raw bytes.
    itemsize : int
        Bytes per element, 1 to 16.
    transform : Transform
        What `source` does to the elements; only recorded.
    level : int
        zstd level of the planes that repeat.
    tail : ndarray, uint8
        The ``length % itemsize`` bytes after the last whole element.
    out : ndarray, uint8, optional
        Where to write; at least ``encoded_bytes_max`` bytes, not overlapping what `source` reads.

    Returns
    -------
    ndarray, (n,), uint8
        The frame; a view of `out` where that was given, else owned by the caller.
    """
    bound = encoded_bytes_max(length, itemsize)
    target = np.empty(bound, np.uint8) if out is None else out
    if target.size < bound:
        raise UsageError(f"the buffer given as `out` has {target.size} bytes, the frame may need {bound}")
    count, tail_bytes = divmod(length, itemsize)
    block_count = block_count_of(count)
    write_header(target, transform, itemsize, length)
    writer = _PlaneWriter.make(target, count, itemsize, level, HEADER.size + 4 * itemsize * block_count)
    entries: list[int] = []
    block_elements = 1 << BLOCK_LOG2
    for first in range(0, count, _PROBE_BLOCKS * block_elements):
        last = min(first + _PROBE_BLOCKS * block_elements, count)
        if last - first <= block_elements:
            block = source(first, last)
            choices = _choose(_part_of(block, first, itemsize), first, last, itemsize, level)
            entries.extend(writer.add(block, plane, choice) for plane, choice in enumerate(choices))
            continue
        choices = _choose(source, first, last, itemsize, level)
        for start in range(first, last, block_elements):
            block = source(start, min(start + block_elements, last))
            entries.extend(writer.add(block, plane, choice) for plane, choice in enumerate(choices))
    table = target[HEADER.size : HEADER.size + 4 * len(entries)]
    table[:] = np.array(entries, "<u4").view(np.uint8)
    end = writer.position + tail_bytes
    if tail is not None:
        target[writer.position : end] = tail
    frame = target[:end]
    # A small frame must not keep a large allocation alive.
    return frame.copy() if out is None and 2 * end < bound else frame


def _part_of(block: Bytes, first: int, itemsize: int) -> BlockSource:
    """Give elements of the one block there is, so that a sample of them is not made a second time."""
    return lambda start, stop: block[(start - first) * itemsize : (stop - first) * itemsize]


def _choose(source: BlockSource, first: int, last: int, itemsize: int, level: int) -> list[_Choice]:
    """Decide from a sample of the elements from `first` to `last` how each plane is stored."""
    count = last - first
    if count <= _SAMPLE_PIECES * _SAMPLE_ELEMENTS:
        return [_Choice.MATCH] * itemsize  # as cheap as a sample; falls back to raw by itself
    size = _SAMPLE_ELEMENTS
    rows = np.empty((_SAMPLE_PIECES, size * itemsize), np.uint8)
    stride = (count - size) // (_SAMPLE_PIECES - 1)
    for piece in range(_SAMPLE_PIECES):
        start = first + piece * stride
        rows[piece] = source(start, start + size)
    plane, scratch = np.empty(rows.size // itemsize, np.uint8), np.empty(rows.size // itemsize, np.uint8)
    choices = []
    for index in range(itemsize):
        split_plane(rows.reshape(-1), itemsize, index, plane)
        choices.append(_choose_plane(plane, level, _SLACK * rows.size, scratch))
    return choices


def _choose_plane(sample: Bytes, level: int, slack_bytes: float, scratch: Bytes) -> _Choice:
    # What the search for matches finds incompressible, Huffman coding finds so too: noise costs one trial.
    match_bytes = CODERS.match_of(level).encode_into(sample, scratch)
    if not 0 < match_bytes <= _WORTHWHILE * sample.size:
        return _Choice.RAW
    if match_bytes <= _FEW_BYTES and sample.min() == sample.max():
        return _Choice.CONSTANT
    entropy_bytes = CODERS.entropy().encode_into(sample, scratch) or sample.size
    return _Choice.ENTROPY if entropy_bytes <= match_bytes + slack_bytes else _Choice.MATCH


@dataclass(slots=True)
class _PlaneWriter:
    """Writes planes one after the other; holds the scratch of one frame."""

    target: Bytes
    itemsize: int
    level: int
    position: int
    plane: Bytes

    @classmethod
    def make(cls, target: Bytes, count: int, itemsize: int, level: int, position: int) -> _PlaneWriter:
        scratch = min(count, 1 << BLOCK_LOG2)
        return cls(target, itemsize, level, position, np.empty(scratch, np.uint8))

    def add(self, block: Bytes, plane: int, choice: _Choice) -> int:
        """Write one plane of `block` and return its table entry."""
        size = block.size // self.itemsize
        raw = self.target[self.position : self.position + size]
        if choice is _Choice.RAW:
            split_plane(block, self.itemsize, plane, raw)
            return self._entry(Mode.RAW, size)
        data = self.plane[:size]
        split_plane(block, self.itemsize, plane, data)
        if choice is _Choice.CONSTANT and data.min() == data.max():
            self.target[self.position] = data[0]
            return self._entry(Mode.CONSTANT, 1)
        coder = CODERS.entropy() if choice is _Choice.ENTROPY else CODERS.match_of(self.level)
        packed = coder.encode_into(data, raw[: size - (size >> 7) - 1])  # a percent is worth decoding
        if not packed:
            np.copyto(raw, data)
            return self._entry(Mode.RAW, size)
        return self._entry(Mode.ZSTD, packed)

    def _entry(self, mode: Mode, length: int) -> int:
        self.position += length
        return mode << LENGTH_BITS | length


def split_plane(block: Bytes, itemsize: int, plane: int, destination: Bytes) -> None:
    """Copy byte `plane` of each element of a block.

    Parameters
    ----------
    block : ndarray, (count * itemsize,), uint8
        One element or more.
    itemsize, plane : int
    destination : ndarray, (count,), uint8
    """
    if itemsize not in (2, 4, 8):
        np.copyto(destination, block[plane::itemsize])
        return
    # Narrowing whole words is vectorised, a strided copy of bytes is not. A word that is read from
    # byte `plane` of an element on has that byte lowest. The last one would end after the block.
    inner = (destination.size - 1) * itemsize
    np.copyto(destination[:-1], block[plane : plane + inner].view(f"<u{itemsize}"), casting="unsafe")
    destination[-1] = block[inner + plane]


def merge_block(frame: Frame, index: int, destination: Bytes) -> None:
    """Decode block `index` of a checked frame.

    Parameters
    ----------
    frame : Frame
    index : int
    destination : ndarray, (elements * itemsize,), uint8
        Written whole.

    Raises
    ------
    IntegrityError
        A compressed plane is damaged or is not of its declared size.
    """
    rows = destination.reshape(-1, frame.itemsize)
    for plane in range(frame.itemsize):
        offset = int(frame.offsets[index, plane])
        stored = frame.data[offset : offset + int(frame.lengths[index, plane])]
        if frame.modes[index, plane] == Mode.ZSTD:
            stored = _decompress(stored, rows.shape[0], index, plane)
        np.copyto(rows[:, plane], stored)  # a constant is one byte and is broadcast


def _decompress(stored: Bytes, size: int, index: int, plane: int) -> Bytes:
    where = f"block {index}, plane {plane}"
    try:
        # The decompressor allocates what the zstd header declares: check that first.
        declared = zstandard.get_frame_parameters(stored.data).content_size
        if declared != size:
            raise IntegrityError(f"{where} is damaged: it declares {declared} bytes instead of {size}")
        packed = CODERS.decompressor().decompress(stored.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    if len(packed) != size:
        raise IntegrityError(f"{where} is damaged: it holds {len(packed)} bytes instead of {size}")
    return byte_view(packed)
