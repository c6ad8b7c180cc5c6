"""What codecs of differences share: the checks around them and the codec's shell.

``ordered_delta`` and ``xor_delta`` differ in their arithmetic only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_apart, output_view
from stepwell.codecs.byteplane import check_level
from stepwell.codecs.frame import Frame, Transform, read_frame
from stepwell.codecs.ordered import word_of
from stepwell.codecs.planes import BlockSource, encode_planes, encoded_bytes_max
from stepwell.errors import ConfigError, IntegrityError, UnsupportedValueError, UsageError

__all__ = ["Difference", "Opened", "encode_against", "open_difference"]


def encode_against(
    current: BufferLike,
    reference: BufferLike | None,
    dtype: str,
    source_of: Callable[[Bytes, Bytes | None], BlockSource],
    *,
    transform: Transform,
    level: int,
    out: BufferLike | None,
) -> Bytes:
    """Encode the differences that ``source_of(current, reference)`` gives, as one frame.

    Raises
    ------
    UnsupportedValueError
        Not whole elements of `dtype`, or no contiguous buffer.
    UsageError
        The reference is of another length, or `out` overlaps an input or is too small.
    """
    itemsize = word_of(dtype).itemsize
    raw = byte_view(current)
    if raw.size % itemsize:
        raise UnsupportedValueError(f"{raw.size} bytes are not whole elements of {dtype}")
    against = None if reference is None else byte_view(reference)
    if against is not None and against.size != raw.size:
        raise UsageError(f"the reference has {against.size} bytes, what is encoded has {raw.size}")
    target = None if out is None else byte_view(out)
    check_apart(target, raw)
    check_apart(target, against)
    return encode_planes(
        source_of(raw, against), raw.size, itemsize, transform=transform, level=level, out=target
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """A frame of differences that fits its reference, and where its result goes.

    Attributes
    ----------
    frame : Frame
    reference : ndarray, (n,), uint8, or None
    out : ndarray, (n,), uint8
    """

    frame: Frame
    reference: Bytes | None
    out: Bytes


def open_difference(
    buf: BufferLike,
    reference: BufferLike | None,
    dtype: str,
    transform: Transform,
    out: BufferLike | None,
    max_bytes: int | None,
) -> Opened:
    """Check a frame of differences against all that is known of it, then find room for the result.

    Raises
    ------
    IntegrityError
        Damaged, or not a difference of this dtype, transform and length.
    UsageError
        `out` is read-only, or overlaps an input; it may be the reference itself.
    """
    itemsize = word_of(dtype).itemsize
    frame = read_frame(byte_view(buf), max_bytes)
    if frame.itemsize != itemsize or frame.transform is not transform or frame.tail.size:
        raise IntegrityError(
            f"frame of {frame.length} bytes, {frame.itemsize} per element, transform {frame.transform.name}, "
            f"is not a difference of {dtype} with transform {transform.name}"
        )
    against = None if reference is None else byte_view(reference)
    if against is not None and against.size != frame.length:
        raise IntegrityError(f"difference of {frame.length} bytes, but its reference has {against.size}")
    raw = np.empty(frame.length, np.uint8) if out is None else output_view(out, frame.length, "difference")
    check_apart(raw, frame.data)
    check_apart(raw, against, same_start_allowed=True)
    return Opened(frame, against, raw)


class Difference(Codec):  # type: ignore[misc]
    """The shell of a codec of differences; subclasses bring the arithmetic."""

    def __init__(self, dtype: str, level: int = 1, reference: str | None = None) -> None:
        word_of(dtype)
        if reference is not None and not isinstance(reference, str):
            raise ConfigError(f"reference must be a name or null, not {reference!r}")
        self.dtype = dtype
        self.level = check_level(level)
        self.reference = reference

    @abstractmethod
    def _encode(self, buf: BufferLike, reference: BufferLike | None, out: BufferLike | None) -> Bytes: ...

    @abstractmethod
    def _decode(
        self, buf: BufferLike, reference: BufferLike | None, out: BufferLike | None, max_bytes: int | None
    ) -> Bytes: ...

    def get_config(self) -> dict[str, object]:
        """Return the JSON-able configuration; `reference` only where there is one."""
        config: dict[str, object] = {"id": self.codec_id, "dtype": self.dtype, "level": self.level}
        return config if self.reference is None else {**config, "reference": self.reference}

    def size_bytes_max(self, raw_bytes: int) -> int:
        """Return the most bytes ``encode`` makes of `raw_bytes` bytes."""
        return encoded_bytes_max(raw_bytes, word_of(self.dtype).itemsize)

    def encode(
        self, buf: BufferLike, reference: BufferLike | None = None, *, out: BufferLike | None = None
    ) -> Bytes:
        """Encode whole elements against `reference`; without it, from predecessors."""
        self._check_reference(reference)
        return self._encode(buf, reference, out)

    def decode(
        self,
        buf: BufferLike,
        out: BufferLike | None = None,
        *,
        reference: BufferLike | None = None,
        max_bytes: int | None = None,
    ) -> Bytes:
        """Decode one frame; `reference` is given exactly if it was to ``encode``."""
        self._check_reference(reference)
        return self._decode(buf, reference, out, max_bytes)

    def _check_reference(self, reference: BufferLike | None) -> None:
        if self.reference is not None and reference is None:
            raise UsageError(f"differences from {self.reference!r}: pass its bytes as `reference`")
