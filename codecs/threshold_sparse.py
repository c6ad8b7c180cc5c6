"""Keep the elements above a threshold: what a difference or a gradient mostly consists of goes.

::

    kind 0  dense   one section, byte planes of all elements
    kind 1  gaps    )
    kind 2  bitmap  ) sections: index, values, scales, raw

    parameters (kinds 1 and 2)  values u8 (0 float32, 1 int8) | gap shift u8 | zero u16 | zero u32
                                | kept u64 | threshold f32 | error bound f32

The index is described in ``stepwell.codecs.sparse_index``, the int8 values with their scales and
the blocks kept raw in ``stepwell.codecs.sparse_values``, the frame in ``stepwell.codecs.sections``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, ClassVar

import numpy as np
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_apart, output_view
from stepwell.codecs.byteplane import check_level
from stepwell.codecs.planes import encoded_bytes_max
from stepwell.codecs.sections import (
    Composed,
    compose,
    composed_overhead,
    encode_section,
    open_section,
    read_composed,
    read_section,
)
from stepwell.codecs.sparse_index import (
    BITMAP_DENSITY,
    GAP_SHIFT_MAX,
    Positions,
    bitmap_of,
    gap_shift_of,
    gap_words,
    gap_words_max,
    positions_from_bitmap,
    positions_from_gaps,
)
from stepwell.codecs.sparse_select import Selection, float_of, select, threshold_bits
from stepwell.codecs.sparse_values import VALUE_BLOCK, dequantize, quantize, quantized_count
from stepwell.errors import ConfigError, IntegrityError, UnsupportedValueError, UsageError

__all__ = ["VALUES", "ThresholdSparse"]

VALUES = ("float32", "int8")
_MAGIC = b"SWTS"
_DENSE, _GAPS, _BITMAP = 0, 1, 2
_PARAMETERS = struct.Struct("<BBHIQff")
_KINDS = {_DENSE: (1, 0), _GAPS: (4, _PARAMETERS.size), _BITMAP: (4, _PARAMETERS.size)}
_RATE_MAX = 0.5  # the cap is twice the rate


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a sparse frame, checked as far as they can be alone."""

    int8: bool
    gap_shift: int
    kept: int
    threshold: float
    bound: float

    @classmethod
    def read(cls, frame: Composed) -> _Parameters:
        values, gap_shift, zero, also_zero, kept, threshold, bound = _PARAMETERS.unpack(frame.parameters)
        sane = isfinite(threshold) and isfinite(bound) and 0 <= threshold <= bound
        shift_fits = gap_shift <= GAP_SHIFT_MAX if frame.kind == _GAPS else gap_shift == 0
        if values >= len(VALUES) or zero or also_zero or not shift_fits or not sane:
            raise IntegrityError("frame is damaged: impossible parameters")
        if kept > frame.length // 4:
            raise IntegrityError(f"frame is damaged: it keeps {kept} of {frame.length // 4} elements")
        return cls(VALUES[values] == "int8", gap_shift, kept, threshold, bound)


class ThresholdSparse(Codec):  # type: ignore[misc]
    """Keep float32 elements whose magnitude exceeds a threshold; the others become 0.

    The threshold tau is taken from a sample and from the last call's, so that about `rate` of the
    elements exceed it. Never more than ``2 * rate`` are kept: tau rises where more would be.
    Infinities and NaNs are always kept, bit for bit, and count for nothing.

    Parameters
    ----------
    rate : float
        Share of the elements to keep, above 0 and at most 0.5.
    values : str
        How kept elements are stored: ``"float32"``, exact, or ``"int8"``, see
        ``stepwell.codecs.sparse_values``.
    level : int
        zstd level of planes that repeat.

    Notes
    -----
    Error bound of a finite x, decoded x^: ``abs(x - x^) <= max(tau, (hi - lo) / 254)``, the second
    over the blocks of 256 kept elements and for int8 values only; ``bound_of_frame`` reads it.
    Dropped elements, -0.0 among them, come back as +0.0; kept ones keep their sign and are no
    zero. An array that would not get smaller is stored whole and exact (bound 0).

    The share kept of a *difference* should be what the reader needs; whoever sends differences
    carries what was dropped to the next one (closed loop), or the errors add up.

    Source: threshold sparsification with a tracked threshold as TierCheck describes it; the
    one-pass cap, the split gaps and the offset int8 are ours.

    Examples
    --------
    >>> import numpy as np
    >>> gradient = np.full(1000, 0.25, np.float32)
    >>> gradient[[3, 500]] = [-3, np.inf]
    >>> codec = ThresholdSparse(rate=0.0005)
    >>> frame = codec.encode(gradient)
    >>> codec.decode(frame).view(np.float32)[[0, 3, 500]].tolist(), codec.bound_of_frame(frame)
    ([0.0, -3.0, inf], 0.25)
    """

    codec_id: ClassVar[str] = "stepwell.threshold_sparse"

    def __init__(self, rate: float = 0.01, values: str = "float32", level: int = 1) -> None:
        if type(rate) not in (float, int) or not 0 < rate <= _RATE_MAX:
            raise ConfigError(f"rate must be a number above 0 and at most {_RATE_MAX}, not {rate!r}")
        if values not in VALUES:
            raise ConfigError(f"values must be one of {', '.join(VALUES)}, not {values!r}")
        self.rate = float(rate)
        self.values = values
        self.level = check_level(level)

    def kept_max(self, count: int) -> int:
        """Return the most finite elements kept of `count`."""
        return min(ceil(2 * self.rate * count), count)

    def size_bytes_max(self, raw_bytes: int) -> int:
        """Return the most bytes ``encode`` makes of `raw_bytes` bytes."""
        return composed_overhead(1, 0) + encoded_bytes_max(raw_bytes, 4)

    def encode(self, buf: BufferLike, *, hint: float | None = None) -> Bytes:
        """Encode float32 elements.

        Parameters
        ----------
        buf : bytes-like or ndarray
            float32, little-endian, contiguous; not changed, not kept.
        hint : float, optional
            The ``threshold`` of the last frame made of the same tensor.

        Returns
        -------
        ndarray, (n,), uint8
            The frame, the caller's own.

        Raises
        ------
        UnsupportedValueError
            Not whole elements, or no contiguous buffer.
        UsageError
            A hint that is no threshold.
        """
        raw = byte_view(buf)
        if raw.size % 4:
            raise UnsupportedValueError(f"{raw.size} bytes are not whole elements of float32")
        if hint is not None and not (isfinite(hint) and hint >= 0):
            raise UsageError(f"hint must be the threshold of an earlier frame, not {hint!r}")
        bits = raw.view("<u4")
        start = threshold_bits(bits, self.rate, hint)
        chosen = select(bits, start, self.kept_max(bits.size))
        # Kept raw they cost 4 bytes and an index; not even tried where that cannot pay.
        if chosen.positions.size * 4 < raw.size or self.values == "int8":
            frame = self._encode_sparse(chosen, bits.size)
            if frame.size < raw.size:
                return frame
        return compose(_MAGIC, _DENSE, raw.size, b"", [encode_section(bits, self.level)])

    def _encode_sparse(self, chosen: Selection, count: int) -> Bytes:
        kept = chosen.positions.size
        bitmap = kept > BITMAP_DENSITY * count
        shift = 0 if bitmap else gap_shift_of(count, kept)
        places = bitmap_of(chosen.positions, count) if bitmap else gap_words(chosen.positions, shift)
        bound = float_of(chosen.threshold)
        int8 = self.values == "int8"
        numbers: list[np.ndarray[tuple[int], np.dtype[Any]]]
        if int8:
            quantized = quantize(chosen.bits)
            bound = max(bound, quantized.error)
            numbers = [quantized.codes, quantized.scales.reshape(-1), quantized.raw]
        else:
            numbers = [chosen.bits, np.empty(0, "<f4"), np.empty(0, "<u4")]
        parameters = _PARAMETERS.pack(int8, shift, 0, 0, kept, float_of(chosen.threshold), bound)
        sections = [encode_section(part, self.level) for part in (places, *numbers)]
        return compose(_MAGIC, _BITMAP if bitmap else _GAPS, 4 * count, parameters, sections)

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
        parameters = _Parameters.read(frame)
        values = _read_values(frame, parameters)
        if target is None:
            target = np.zeros(frame.length, np.uint8)
        else:
            target.fill(0)
        elements = target.view("<u4")
        done = 0
        for positions in _read_positions(frame, parameters):
            if done + positions.size > parameters.kept:
                raise IntegrityError(f"frame is damaged: it keeps more than {parameters.kept} elements")
            elements[positions] = values[done : done + positions.size]
            done += positions.size
        if done != parameters.kept:
            raise IntegrityError(f"frame is damaged: it keeps {done} elements, not {parameters.kept}")
        return target

    def bound(self, buf: BufferLike) -> float:
        """Return the largest error that encoding these raw bytes makes; costs as much as encoding."""
        return self.bound_of_frame(self.encode(buf))

    @staticmethod
    def bound_of_frame(buf: BufferLike) -> float:
        """Return the largest error of any finite element of a frame; IntegrityError as ``decode``."""
        frame = _read(byte_view(buf), None)
        return 0.0 if frame.kind == _DENSE else _Parameters.read(frame).bound

    @staticmethod
    def threshold(buf: BufferLike) -> float:
        """Return the threshold a frame was made with, the hint for the next; 0 if it is dense."""
        frame = _read(byte_view(buf), None)
        return 0.0 if frame.kind == _DENSE else _Parameters.read(frame).threshold


def _read(data: Bytes, max_bytes: int | None) -> Composed:
    frame = read_composed(data, _MAGIC, _KINDS, max_bytes)
    if frame.length % 4:
        raise IntegrityError(f"frame is damaged: {frame.length} bytes are not whole elements of float32")
    return frame


def _read_positions(frame: Composed, parameters: _Parameters) -> Iterator[Positions]:
    count, index = frame.length // 4, frame.sections[0]
    if frame.kind == _BITMAP:
        bitmap = open_section(index, 1, -(-count // 8), "bitmap")
        return iter(()) if bitmap is None else positions_from_bitmap(bitmap, count)
    words_max = gap_words_max(count, parameters.kept, parameters.gap_shift)
    gaps = open_section(index, 2, 2 * words_max, "gaps")
    return iter(()) if gaps is None else positions_from_gaps(gaps, parameters.gap_shift, count)


def _read_values(frame: Composed, parameters: _Parameters) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    _, values, scales, raw = frame.sections
    kept = parameters.kept
    if not parameters.int8:
        if scales.size or raw.size:
            raise IntegrityError("frame is damaged: float32 values with scales")
        return read_section(values, 4, 4 * kept, "values").view("<u4")
    pairs = read_section(scales, 4, 8 * -(-kept // VALUE_BLOCK), "scales").view("<f4").reshape(-1, 2)
    quantized = quantized_count(pairs, kept)
    codes = read_section(values, 1, quantized, "values")
    elements = read_section(raw, 4, 4 * (kept - quantized), "raw values").view("<u4")
    return dequantize(codes, pairs, elements, kept)
