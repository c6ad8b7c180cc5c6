"""Byte planes: elements split by byte significance, each plane stored the way it pays."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_apart, output_view
from stepwell.codecs.frame import ITEMSIZE_MAX, Transform, read_frame
from stepwell.codecs.planes import encode_planes, encoded_bytes_max, merge_block
from stepwell.errors import ConfigError, IntegrityError

__all__ = ["LEVEL_MAX", "BytePlane", "check_level"]

LEVEL_MAX = 19  # above it zstd wants far more memory


def check_level(level: object) -> int:
    """Return `level` if it is a zstd level we take; ConfigError if not."""
    if type(level) is not int or not 1 <= level <= LEVEL_MAX:
        raise ConfigError(f"level must be an integer from 1 to {LEVEL_MAX}, not {level!r}")
    return level


class BytePlane(Codec):  # type: ignore[misc]
    """Split elements into byte planes; compress those where it pays, keep the others as they are.

    Lossless for any bytes of any length. Calls are independent and may run in any threads.

    Parameters
    ----------
    itemsize : int
        Bytes per element, 1 to 16 (4 for float32, 2 for bfloat16).
    level : int
        zstd level of planes that repeat. Above 1 gains next to nothing on training state.

    Notes
    -----
    The frame is described in ``stepwell.codecs.frame``. It has no checksum of its own.

    Examples
    --------
    >>> import numpy as np
    >>> codec = BytePlane(itemsize=4)
    >>> state = np.linspace(1, 2, 1000, dtype=np.float32)
    >>> np.array_equal(codec.decode(codec.encode(state)).view(np.float32), state)
    True
    """

    codec_id: ClassVar[str] = "stepwell.byteplane"

    def __init__(self, itemsize: int, level: int = 1) -> None:
        if type(itemsize) is not int or not 1 <= itemsize <= ITEMSIZE_MAX:
            raise ConfigError(f"itemsize must be an integer from 1 to {ITEMSIZE_MAX}, not {itemsize!r}")
        self.itemsize = itemsize
        self.level = check_level(level)

    def size_bytes_max(self, raw_bytes: int) -> int:
        """Return the most bytes ``encode`` makes of `raw_bytes` bytes."""
        return encoded_bytes_max(raw_bytes, self.itemsize)

    def encode(self, buf: BufferLike, *, out: BufferLike | None = None) -> Bytes:
        """Encode a contiguous buffer.

        Parameters
        ----------
        buf : bytes-like or ndarray
            Not changed, not kept.
        out : writable bytes-like, optional
            Where to put the frame, at least ``size_bytes_max(len(buf))`` bytes, apart from `buf`.

        Returns
        -------
        ndarray, (n,), uint8
            The frame: a view of `out` if given, else the caller's own.
        """
        raw = byte_view(buf)
        itemsize = self.itemsize
        target = None if out is None else byte_view(out)
        check_apart(target, raw)
        return encode_planes(
            lambda start, stop: raw[start * itemsize : stop * itemsize],
            raw.size,
            itemsize,
            level=self.level,
            tail=raw[raw.size - raw.size % itemsize :],
            out=target,
        )

    def decode(
        self, buf: BufferLike, out: BufferLike | None = None, *, max_bytes: int | None = None
    ) -> Bytes:
        """Decode one frame.

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
            The raw bytes: a view of `out` if given, else the caller's own.

        Raises
        ------
        FormatError
            Not our frame, or of a newer version.
        IntegrityError
            Damaged, cut short, followed by something, of another itemsize, or larger than allowed.
        """
        frame = read_frame(byte_view(buf), max_bytes)
        if frame.itemsize != self.itemsize or frame.transform is not Transform.NONE:
            raise IntegrityError(
                f"frame of {frame.itemsize}-byte elements, transform {frame.transform.name}, "
                f"does not belong to {self!r}"
            )
        raw = np.empty(frame.length, np.uint8) if out is None else output_view(out, frame.length, "frame")
        check_apart(raw, frame.data)
        for index, start, stop in frame.blocks():
            merge_block(frame, index, raw[start * self.itemsize : stop * self.itemsize])
        raw[raw.size - frame.tail.size :] = frame.tail
        return raw
