"""The bytes handed to a store, as flat views; nothing is joined or copied here."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.errors import UsageError
from stepwell.stores.base import BytesLike

__all__ = ["flat_views"]


def flat_views(key: str, parts: Sequence[BytesLike]) -> tuple[tuple[memoryview, ...], int]:
    """Return the non-empty parts as one-dimensional byte views, and their total length.

    Raises
    ------
    UsageError
        `parts` is no sequence of C-contiguous bytes-like objects.
    """
    views: list[memoryview] = []
    if isinstance(parts, bytes | bytearray | memoryview | str):
        raise UsageError(f"parts of {key!r} must be a sequence of bytes-like objects, not one of them")
    for index, part in enumerate(parts):
        try:
            view = memoryview(part)
        except TypeError as error:
            raise UsageError(
                f"part {index} of {key!r} is a {type(part).__name__}, not a bytes-like object"
            ) from error
        if not view.c_contiguous:
            raise UsageError(f"part {index} of {key!r} is not C-contiguous; copy it first")
        if view.nbytes:  # a view with a zero in its shape cannot be cast
            views.append(view.cast("B"))
    return tuple(views), sum(view.nbytes for view in views)
