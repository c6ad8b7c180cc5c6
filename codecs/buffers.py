"""Buffers as flat bytes: what a codec accepts and what it refuses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.errors import IntegrityError, UnsupportedValueError, UsageError

__all__ = ["BufferLike", "Bytes", "byte_view", "check_apart", "check_size", "output_view"]

Bytes = npt.NDArray[np.uint8]
BufferLike = bytes | bytearray | memoryview | npt.NDArray[np.generic]


def byte_view(buffer: BufferLike) -> Bytes:
    """View a contiguous buffer as flat bytes, without a copy.

    Parameters
    ----------
    buffer : bytes-like or ndarray
        C- or Fortran-contiguous; anything else that exports a C-contiguous buffer is taken too.

    Returns
    -------
    ndarray, (n,), uint8
        Shares memory with `buffer`, in memory order.

    Raises
    ------
    UnsupportedValueError
        No buffer, a strided one, or one that holds Python objects.
    """
    try:
        if isinstance(buffer, np.ndarray):
            if buffer.dtype.hasobject:
                raise TypeError("it holds Python objects")
            if not (buffer.flags.c_contiguous or buffer.flags.f_contiguous):
                raise TypeError("its memory is not contiguous")
            return np.asarray(buffer).reshape(-1, order="A").view(np.uint8)
        view = memoryview(buffer)
        if view.nbytes == 0:  # a view with a zero in its shape cannot be cast
            return np.empty(0, np.uint8)
        return np.asarray(view.cast("B"))
    except (TypeError, ValueError) as error:
        raise UnsupportedValueError(
            f"cannot encode or decode a {type(buffer).__name__}: {error}; pass a contiguous buffer"
        ) from error


def check_size(length: int, max_bytes: int | None, what: str) -> None:
    """Refuse a declared decoded size before anything is allocated for it.

    Raises
    ------
    IntegrityError
        `length` is above `max_bytes`.
    """
    if max_bytes is not None and length > max_bytes:
        raise IntegrityError(f"{what} claims {length} bytes, at most {max_bytes} were expected")


def output_view(out: BufferLike, length: int, what: str) -> Bytes:
    """View the caller's buffer for `length` decoded bytes.

    Raises
    ------
    UsageError
        `out` cannot be written.
    IntegrityError
        `out` is not of exactly `length` bytes.
    """
    view = byte_view(out)
    if view.size != length:
        raise IntegrityError(f"{what} holds {length} bytes, the buffer for them has {view.size}")
    if length and not view.flags.writeable:
        raise UsageError("the buffer given as `out` is read-only; pass a writable one")
    return view


def check_apart(out: Bytes | None, other: Bytes | None, *, same_start_allowed: bool = False) -> None:
    """Refuse an output that would overwrite an input still to be read.

    Raises
    ------
    UsageError
        The two overlap (and, if `same_start_allowed`, do not start at the same byte).
    """
    if out is None or other is None or not np.may_share_memory(out, other):
        return
    if not (same_start_allowed and out.ctypes.data == other.ctypes.data):
        raise UsageError("the buffer given as `out` overlaps an input; pass one apart from it")
