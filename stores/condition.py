"""What a refused condition on a write means."""

from __future__ import annotations

from stepwell.errors import TransientStoreError
from stepwell.stores.blobs import Blob, Blobs

__all__ = ["created_by_us"]


async def created_by_us(blobs: Blobs, key: str, data: Blob) -> bool:
    """Whether `key`, absent a moment ago and refused now, holds what we tried to create.

    HTTP clients send a request again by themselves when a connection is reset; the second one then
    meets what the first one stored. So what must tell two writers apart has to differ between them.

    Raises
    ------
    TransientStoreError
        Nothing is there: the refusal meant something else.
    PermanentStoreError
        There is not even a bucket.
    """
    there = await blobs.read(key)
    if there is None:
        await blobs.list(key)  # without a bucket reads find nothing and conditions are refused; this says why
        raise TransientStoreError(f"{key!r} in {blobs.url} was refused, though there is no such object")
    return there == data.tobytes()
