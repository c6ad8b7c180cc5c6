"""A checksum around anything: xxh3-64 behind the bytes, verified before they are believed."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import xxhash
from numcodecs.abc import Codec  # type: ignore[import-untyped]

from stepwell.codecs.buffers import BufferLike, Bytes, byte_view, check_size, output_view
from stepwell.errors import IntegrityError

__all__ = ["DIGEST_BYTES", "Xxh3"]

DIGEST_BYTES = 8


class Xxh3(Codec):  # type: ignore[misc]
    """Append the xxh3-64 of the bytes; on decoding verify and remove it. Always outermost.

    The digest is in xxHash's canonical form, most significant byte first. It guards against
    damage, not against an adversary.

    Examples
    --------
    >>> bytes(Xxh3().decode(Xxh3().encode(b"state")))
    b'state'
    """

    codec_id: ClassVar[str] = "stepwell.xxh3"

    def encode(self, buf: BufferLike) -> Bytes:
        """Return the bytes of `buf` with their digest behind them, as an array of the caller's own."""
        raw = byte_view(buf)
        framed = np.empty(raw.size + DIGEST_BYTES, np.uint8)
        np.copyto(framed[: raw.size], raw)
        # Hash what will be stored: a buffer that changes meanwhile cannot make a wrong digest.
        digest = xxhash.xxh3_64_digest(framed[: raw.size].data)
        framed[raw.size :] = np.frombuffer(digest, np.uint8)
        return framed

    def decode(
        self, buf: BufferLike, out: BufferLike | None = None, *, max_bytes: int | None = None
    ) -> Bytes:
        """Verify and return the bytes.

        Parameters
        ----------
        buf : bytes-like
        out : writable bytes-like, optional
            Of exactly the decoded size; written only after the bytes were found good.
        max_bytes : int, optional
            Most bytes the caller is ready for.

        Returns
        -------
        ndarray, (n,), uint8
            A view of `out` if given, else of `buf` (no copy).

        Raises
        ------
        IntegrityError
            The bytes are not those that were encoded.
        """
        framed = byte_view(buf)
        if framed.size < DIGEST_BYTES:
            raise IntegrityError(f"{framed.size} bytes are too short to hold a checksum: cut short")
        raw, stored = framed[:-DIGEST_BYTES], bytes(framed[-DIGEST_BYTES:])
        check_size(raw.size, max_bytes, "checked buffer")
        found = xxhash.xxh3_64_digest(raw.data)
        if found != stored:
            raise IntegrityError(
                f"checksum mismatch over {raw.size} bytes: stored {stored.hex()}, found {found.hex()}"
            )
        if out is None:
            return raw
        target = output_view(out, raw.size, "checked buffer")
        np.copyto(target, raw)
        return target
