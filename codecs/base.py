"""Contract of a codec: bytes to bytes and back. No implementation here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stepwell.codecs.buffers import BufferLike, Bytes

__all__ = ["LossyCodec", "PlainCodec"]


class PlainCodec(Protocol):
    """What every codec of ours does; each is also a ``numcodecs.abc.Codec``.

    Calls are independent of each other: one codec may be used by many threads at once. Inputs
    are neither changed nor kept. Everything long lets the interpreter lock go.
    """

    def encode(self, buf: BufferLike) -> Bytes:
        """Encode a contiguous buffer.

        Raises
        ------
        UnsupportedValueError
            What cannot be represented, or is no contiguous buffer.
        """
        ...

    def decode(
        self, buf: BufferLike, out: BufferLike | None = None, *, max_bytes: int | None = None
    ) -> Bytes:
        """Decode what ``encode`` made, and nothing else.

        Parameters
        ----------
        buf : bytes-like
        out : writable bytes-like, optional
            Of exactly the decoded size, apart from `buf`.
        max_bytes : int, optional
            Most decoded bytes the caller is ready for; checked before anything is allocated.

        Returns
        -------
        ndarray, (n,), uint8
            A view of `out` if given; else the caller's own, or a view of `buf`.

        Raises
        ------
        IntegrityError
            Damaged, cut short, followed by something, too large, or of another configuration.
        """
        ...

    def get_config(self) -> Mapping[str, object]:
        """Return the JSON-able configuration with its ``id``."""
        ...


class LossyCodec(PlainCodec, Protocol):
    """A codec whose decoded values differ from the encoded ones by no more than it says."""

    def bound(self, buf: BufferLike) -> float | None:
        """Return the largest error that encoding these raw bytes can make, from its formula.

        Returns
        -------
        float or None
            In the unit the codec's docstring names; 0.0 if everything is kept bit for bit, None
            where no bound is known.
        """
        ...
