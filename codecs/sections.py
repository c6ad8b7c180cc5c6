"""Frames composed of sections, and every check made before any of them is believed.

::

    header     16 B   magic | version u8 | kind u8 | section count u8 | zero u8 | raw length u64
    lengths    8 B per section, u64
    parameters        of a size the codec knows for each kind
    sections          one after the other
    padding           zeros, until the frame has a 2**17th of its raw length

All integers are little-endian. Codecs that keep next to nothing of an array would let a few bytes
claim any size; the padding bounds the claim by the size of the frame, as the table of a frame of
byte planes does, and costs 8 bytes per MiB where nothing else is left. Sections that hold more
than a few numbers are frames of byte planes themselves (``stepwell.codecs.frame``). The frame
carries no checksum: ``stepwell.xxh3`` goes around it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.codecs.buffers import Bytes, check_size
from stepwell.codecs.frame import Frame, Transform, read_frame
from stepwell.codecs.planes import encode_planes, merge_block
from stepwell.errors import FormatError, IntegrityError

__all__ = [
    "RATIO_MAX",
    "Composed",
    "compose",
    "composed_overhead",
    "encode_section",
    "open_section",
    "read_composed",
    "read_section",
]

VERSION = 1
RATIO_MAX = 1 << 17  # what a frame of byte planes claims per byte at most, to a factor of two
_HEADER = struct.Struct("<4sBBBBQ")


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed frame whose sizes were checked against each other and against its own.

    Attributes
    ----------
    kind : int
    length : int
        Raw bytes.
    parameters : bytes
    sections : tuple of ndarray, (n,), uint8
        Views of the frame.
    """

    kind: int
    length: int
    parameters: bytes
    sections: tuple[Bytes, ...]


def composed_overhead(section_count: int, parameter_bytes: int) -> int:
    """Return the bytes of a frame that are neither sections nor padding."""
    return _HEADER.size + 8 * section_count + parameter_bytes


def compose(magic: bytes, kind: int, length: int, parameters: bytes, sections: Sequence[Bytes]) -> Bytes:
    """Join sections into a frame of the caller's own.

    Parameters
    ----------
    magic : bytes
        Four of them.
    kind : int
    length : int
        Raw bytes.
    parameters : bytes
    sections : sequence of ndarray, (n,), uint8
        Copied.
    """
    start = composed_overhead(len(sections), len(parameters))
    sizes = [section.size for section in sections]
    frame = np.empty(max(start + sum(sizes), -(-length // RATIO_MAX)), np.uint8)
    head = _HEADER.pack(magic, VERSION, kind, len(sections), 0, length)
    head += struct.pack(f"<{len(sizes)}Q", *sizes) + parameters
    frame[:start] = np.frombuffer(head, np.uint8)
    for section in sections:
        np.copyto(frame[start : start + section.size], section)
        start += section.size
    frame[start:] = 0
    return frame


def read_composed(
    data: Bytes, magic: bytes, kinds: Mapping[int, tuple[int, int]], max_bytes: int | None = None
) -> Composed:
    """Check all sizes of a composed frame; allocates nothing in proportion to what it claims.

    Parameters
    ----------
    data : ndarray, (n,), uint8
        One whole frame and nothing after it.
    magic : bytes
    kinds : mapping
        From each kind to its number of sections and its size of parameters.
    max_bytes : int, optional
        Most raw bytes the caller is ready for.

    Raises
    ------
    FormatError
        Not such a frame, or one of a newer version.
    IntegrityError
        It claims more than `max_bytes` or than a frame of its size may, it is cut short, or it has
        something after its end.
    """
    if data.size < _HEADER.size:
        raise IntegrityError(f"a frame of {data.size} bytes is cut short, its header has {_HEADER.size}")
    found, version, kind, section_count, zero, length = _HEADER.unpack_from(data.data)
    if found != magic:
        raise FormatError(f"not a frame of this codec: starts with {found!r}, not {magic!r}")
    if version != VERSION:
        raise FormatError(f"frame of version {version}, this code reads version {VERSION}")
    if kind not in kinds:
        raise FormatError(f"frame of the unknown kind {kind}")
    expected_count, parameter_bytes = kinds[kind]
    if section_count != expected_count or zero:
        raise IntegrityError(f"frame of kind {kind} with {section_count} sections is damaged")
    check_size(length, max_bytes, "frame")
    if length > RATIO_MAX * data.size:
        raise IntegrityError(f"frame of {data.size} bytes is cut short: it claims {length} raw bytes")
    start = composed_overhead(section_count, parameter_bytes)
    if start > data.size:
        raise IntegrityError(f"a frame of {data.size} bytes is cut short, its header has {start}")
    sizes = struct.unpack_from(f"<{section_count}Q", data.data, _HEADER.size)
    parameters = bytes(data[start - parameter_bytes : start])
    if data.size != max(start + sum(sizes), -(-length // RATIO_MAX)):
        raise IntegrityError(f"frame of {data.size} bytes is cut short or has something after its end")
    sections = []
    for size in sizes:
        sections.append(data[start : start + size])
        start += size
    if data[start:].any():
        raise IntegrityError("frame is damaged: its padding is not zero")
    return Composed(kind, length, parameters, tuple(sections))


def encode_section(values: np.ndarray[tuple[int], np.dtype[np.generic]], level: int) -> Bytes:
    """Encode numbers as byte planes; nothing for none.

    Parameters
    ----------
    values : ndarray, (n,)
        Contiguous, of 1 to 8 bytes each, little-endian.
    level : int
        zstd level of planes that repeat.
    """
    if not values.size:
        return np.empty(0, np.uint8)
    raw, itemsize = values.view(np.uint8), values.dtype.itemsize
    return encode_planes(
        lambda start, stop: raw[start * itemsize : stop * itemsize], raw.size, itemsize, level=level
    )


def open_section(section: Bytes, itemsize: int, bytes_max: int, what: str) -> Frame | None:
    """Check a section of byte planes for reading it block by block; None if it is empty.

    Raises
    ------
    IntegrityError
        Damaged, or of more than `bytes_max` raw bytes, or of other elements.
    """
    if not section.size:
        return None
    try:
        frame = read_frame(section, bytes_max)
    except FormatError as error:  # the frame around it is of our format: only damage explains this
        raise IntegrityError(f"{what}: {error}") from error
    if frame.itemsize != itemsize or frame.transform is not Transform.NONE or frame.tail.size:
        raise IntegrityError(f"{what} of a frame are damaged: {frame.itemsize} bytes per element")
    return frame


def read_section(section: Bytes, itemsize: int, length: int, what: str, out: Bytes | None = None) -> Bytes:
    """Decode a whole section of byte planes that must hold `length` raw bytes.

    Returns
    -------
    ndarray, (length,), uint8
        `out` if given, else the caller's own.

    Raises
    ------
    IntegrityError
        It is damaged or holds something else.
    """
    frame = open_section(section, itemsize, length, what)
    found = 0 if frame is None else frame.length
    if found != length:
        raise IntegrityError(f"{what} of a frame are damaged: {found} bytes instead of {length}")
    raw = np.empty(length, np.uint8) if out is None else out
    if frame is not None:
        for index, start, stop in frame.blocks():
            merge_block(frame, index, raw[start * itemsize : stop * itemsize])
    return raw
