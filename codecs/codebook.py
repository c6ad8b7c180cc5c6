"""Index compression of momentum: each element an index of 4 bits into its block's 16 entries.

::

    kind 0  dense     one section, byte planes of all elements
    kind 1  codebook  sections: shapes, classes, scales, codes, raw

    parameters (kind 1)  block elements u16 | zero u16 | error bound f32

    shapes   17 float32 each: 16 entries, then the most an element of a block lies from its entry
    classes  a byte per block: which shape; 255 for a block kept raw
    scales   a float32 per block, its largest magnitude; 0 for a block kept raw
    codes    4 bits per element of the other blocks, first element in the lower half of a byte
    raw      the elements of blocks kept raw

The last block may be shorter. The last four sections are byte planes; the frame is described in
``stepwell.codecs.sections``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_apart, output_view
from stepwell.codecs.byteplane import check_level
from stepwell.codecs.codebook_blocks import RAW_CLASS, BlockCoder, decode_blocks
from stepwell.codecs.codebook_fit import ENTRIES, SHAPES_MAX
from stepwell.codecs.planes import encoded_bytes_max
from stepwell.codecs.sections import (
    Composed,
    compose,
    composed_overhead,
    encode_section,
    read_composed,
    read_section,
)
from stepwell.errors import ConfigError, IntegrityError, UnsupportedValueError

__all__ = ["BLOCKS", "Codebook"]

Floats = npt.NDArray[np.float32]

BLOCKS = (64, 128, 256)
_MAGIC = b"SWCB"
_DENSE, _CODEBOOK = 0, 1
_PARAMETERS = struct.Struct("<HHf")
_KINDS = {_DENSE: (1, 0), _CODEBOOK: (5, _PARAMETERS.size)}
_SHAPE_BYTES = 4 * (ENTRIES + 1)
_SMALLEST = 2.0**-149  # what rounding a denormal product may cost
_LARGEST = float(np.finfo(np.float32).max)


class Codebook(Codec):  # type: ignore[misc]
    """Replace every float32 element by the nearest of 16 entries of its block's codebook.

    Parameters
    ----------
    block : int
        Elements per block: 64, 128 or 256. about 4.4, 4.1 or 4 bits per element.
    level : int
        zstd level of planes that repeat.

    Notes
    -----
    A block's codebook is its largest magnitude times one of at most 8 shapes, fitted to a sample
    of the tensor's blocks (``stepwell.codecs.codebook_fit``)::

        x^ = scale_b * entry[shape_b][code]
        abs(x - x^) <= scale_b * radius[shape_b] + 2**-149

    where radius is the most that any element of this shape's blocks lies from its entry, written
    into the frame. ``bounds_of_frame`` reads it for each block, ``bound_of_frame`` the largest.
    Zero comes back as +0.0; no element changes its sign, small ones may become 0 (never use it for
    second moments). A block with an infinity or a NaN is kept raw.

    Source: FastCheck compresses momentum to cluster indices, without a published layout; ExCP
    (Li et al. 2024) does so with k-means over a whole tensor. Where we differ: entries of a block
    of its own, as 16 numbers, would cost 1 to 4 bits per element, and on real momentum 8 rounds
    of Lloyd per block end with a larger error than the common shapes do.

    Examples
    --------
    >>> import numpy as np
    >>> momentum = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    >>> codec = Codebook()
    >>> frame = codec.encode(momentum)
    >>> error = np.abs(codec.decode(frame).view(np.float32) - momentum).max()
    >>> bool(error <= codec.bound_of_frame(frame) < 1), momentum.nbytes // frame.size
    (True, 7)
    """

    codec_id: ClassVar[str] = "stepwell.codebook"

    def __init__(self, block: int = 128, level: int = 1) -> None:
        if type(block) is not int or block not in BLOCKS:
            raise ConfigError(f"block must be one of {', '.join(map(str, BLOCKS))}, not {block!r}")
        self.block = block
        self.level = check_level(level)

    def size_bytes_max(self, raw_bytes: int) -> int:
        """Return the most bytes ``encode`` makes of `raw_bytes` bytes."""
        return composed_overhead(1, 0) + encoded_bytes_max(raw_bytes, 4)

    def encode(self, buf: BufferLike) -> Bytes:
        """Encode float32 elements.

        Parameters
        ----------
        buf : bytes-like or ndarray
            float32, little-endian, contiguous; not changed, not kept.

        Returns
        -------
        ndarray, (n,), uint8
            The frame, the caller's own.

        Raises
        ------
        UnsupportedValueError
            Not whole elements, or no contiguous buffer.
        """
        raw = byte_view(buf)
        if raw.size % 4:
            raise UnsupportedValueError(f"{raw.size} bytes are not whole elements of float32")
        bits = raw.view("<u4")
        coder = BlockCoder(bits, self.block)
        coder.run()
        frame = _compose(coder, self.block, self.level)
        if frame.size < raw.size:
            return frame
        return compose(_MAGIC, _DENSE, raw.size, b"", [encode_section(bits, self.level)])

    def decode(
        self, buf: BufferLike, out: BufferLike | None = None, *, max_bytes: int | None = None
    ) -> Bytes:
        """Decode one frame; any configuration reads the frames of all.

        Parameters
        ----------
        buf : bytes-like
            One frame and nothing else.
        out : writable bytes-like, optional
            Of exactly the decoded size, apart from `buf`. Partly written if an error is raised.
        max_bytes : int, optional
            Most bytes the caller is ready for; checked before anything is allocated.

        Returns
        -------
        ndarray, (n,), uint8
            The elements' bytes: a view of `out` if given, else the caller's own.

        Raises
        ------
        FormatError
            Not our frame, or of a newer version.
        IntegrityError
            Damaged, cut short, followed by something, or larger than allowed.
        """
        data = byte_view(buf)
        frame = _read(data, max_bytes)
        target = None if out is None else output_view(out, frame.length, "frame")
        check_apart(target, data)
        if frame.kind == _DENSE:
            return read_section(frame.sections[0], 4, frame.length, "elements", target)
        book = _Book.read(frame)
        quantized = book.quantized_count()
        codes = read_section(frame.sections[3], 1, -(-quantized // 2), "codes")
        raw = read_section(frame.sections[4], 4, 4 * (book.count - quantized), "raw values").view("<u4")
        if target is None:
            target = np.empty(frame.length, np.uint8)
        decode_blocks(codes, raw, book.classes, book.scales, book.entries, book.block, target.view("<u4"))
        return target

    def bound(self, buf: BufferLike) -> float:
        """Return the largest error that encoding these raw bytes makes; costs as much as encoding."""
        return self.bound_of_frame(self.encode(buf))

    @staticmethod
    def bound_of_frame(buf: BufferLike) -> float:
        """Return the largest error of any finite element of a frame; IntegrityError as ``decode``."""
        frame = _read(byte_view(buf), None)
        return 0.0 if frame.kind == _DENSE else _bound_of(frame)

    @staticmethod
    def bounds_of_frame(buf: BufferLike) -> npt.NDArray[np.float64]:
        """Return the largest error of each block of a frame, 0 for those kept raw.

        Returns
        -------
        ndarray, (blocks,), float64
            Empty for a frame that is exact as a whole.
        """
        frame = _read(byte_view(buf), None)
        if frame.kind == _DENSE:
            return np.empty(0)
        book = _Book.read(frame)
        radii = np.append(book.radii.astype(np.float64), np.zeros(RAW_CLASS + 1 - book.radii.size))
        return np.where(book.scales > 0, book.scales * radii[book.classes] + _SMALLEST, 0.0)


def _compose(coder: BlockCoder, block: int, level: int) -> Bytes:
    """Join what was encoded."""
    radii = coder.radii()
    table = np.concatenate([coder.shapes.entries, radii[:, None]], axis=1).astype("<f4")
    sections = [
        table.reshape(-1).view(np.uint8),
        encode_section(coder.classes, level),
        encode_section(coder.scales, level),
        encode_section(np.concatenate(coder.codes), level),
        encode_section(np.concatenate(coder.raw), level),
    ]
    largest = np.zeros(len(table))
    quantized = coder.classes != RAW_CLASS
    np.maximum.at(largest, coder.classes[quantized], coder.scales[quantized])
    bound = float(np.where(largest > 0, largest * radii + _SMALLEST, 0.0).max())
    parameters = _PARAMETERS.pack(block, 0, _float_above(bound))
    return compose(_MAGIC, _CODEBOOK, 4 * coder.bits.size, parameters, sections)


def _float_above(value: float) -> float:
    """Round a bound up to a float32; 0 being an entry, no error exceeds the largest one."""
    if not 0 < value < _LARGEST:
        return min(value, _LARGEST)
    return float(np.nextafter(np.float32(value), np.float32(_LARGEST)))


def _read(data: Bytes, max_bytes: int | None) -> Composed:
    frame = read_composed(data, _MAGIC, _KINDS, max_bytes)
    if frame.length % 4:
        raise IntegrityError(f"frame is damaged: {frame.length} bytes are not whole elements of float32")
    return frame


def _bound_of(frame: Composed) -> float:
    block, zero, bound = _PARAMETERS.unpack(frame.parameters)
    if block not in BLOCKS or zero or not isfinite(bound) or bound < 0:
        raise IntegrityError("frame is damaged: impossible parameters")
    return float(bound)


@dataclass(frozen=True, slots=True)
class _Book:
    """The codebooks of a frame, checked.

    Attributes
    ----------
    count : int
        Elements.
    block : int
    entries : ndarray, (shapes * 16,), float32
    radii : ndarray, (shapes,), float32
    classes : ndarray, (blocks,), uint8
    scales : ndarray, (blocks,), float32
    raw : ndarray, (blocks,), bool
    """

    count: int
    block: int
    entries: Floats
    radii: Floats
    classes: npt.NDArray[np.uint8]
    scales: Floats
    raw: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, frame: Composed) -> _Book:
        """Read everything but the codes and the raw elements.

        Raises
        ------
        IntegrityError
            Something no encoder writes.
        """
        _bound_of(frame)
        block, count = _PARAMETERS.unpack(frame.parameters)[0], frame.length // 4
        block_count = -(-count // block)
        shape_count, rest = divmod(frame.sections[0].size, _SHAPE_BYTES)
        if rest or not 1 <= shape_count <= SHAPES_MAX:
            raise IntegrityError(f"frame is damaged: shapes of {frame.sections[0].size} bytes")
        table = frame.sections[0].view("<f4").astype(np.float32).reshape(shape_count, -1)
        classes = read_section(frame.sections[1], 1, block_count, "classes")
        scales = read_section(frame.sections[2], 4, 4 * block_count, "scales").view("<f4")
        raw = classes == RAW_CLASS
        # In this form a NaN is refused as well.
        sane = (np.abs(table[:, :ENTRIES]) <= 1).all() and (np.abs(table) <= 2).all()
        scaled = np.where(raw, scales == 0, scales >= 0)
        if not (sane and (raw | (classes < shape_count)).all() and scaled.all()):
            raise IntegrityError("frame is damaged: an impossible codebook")
        if not np.isfinite(scales).all():
            raise IntegrityError("frame is damaged: a block has an impossible scale")
        entries = np.ascontiguousarray(table[:, :ENTRIES]).reshape(-1)
        return cls(count, block, entries, table[:, ENTRIES], classes, scales, raw)

    def quantized_count(self) -> int:
        """Return how many elements are in blocks that have codes."""
        missing = -self.count % self.block if self.count and not self.raw[-1] else 0
        return self.block * int(np.count_nonzero(~self.raw)) - missing
