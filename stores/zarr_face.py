"""zarr's side of a store, made from the methods of `ObjectStore`.

A store defines ``put``, ``put_batch``, ``create``, ``fetch``, ``exists``, ``delete``, ``getsize``,
``list_prefix`` and ``list_dir``; zarr's other members follow here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.buffer.core import default_buffer_prototype

from stepwell.errors import MissingObjectError, ObjectExistsError, PermanentStoreError
from stepwell.stores.base import ObjectStore
from stepwell.stores.keys import check_key

__all__ = ["ReadOnlyStoreError", "ZarrFace"]


class ReadOnlyStoreError(PermanentStoreError, ValueError):
    """A write to a store that was opened for reading; zarr expects a ValueError here."""


class ZarrFace(ObjectStore):
    """Base of our stores: what zarr wants beyond the contract of `ObjectStore`."""

    @property
    def supports_writes(self) -> bool:
        """Always: a single store object may still be read-only."""
        return True

    @property
    def supports_deletes(self) -> bool:
        """Always."""
        return True

    @property
    def supports_listing(self) -> bool:
        """Always."""
        return True

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyStoreError(
                f"{self.url}: store was opened in read-only mode and does not support writing"
            )

    async def _ready_to_write(self, key: str) -> str:
        """Check what every write checks first, and return the key."""
        self._check_writable()
        await self._ensure_open()
        return check_key(key)

    async def _read(self, key: str, start: int, length: int | None) -> memoryview:
        """Like ``fetch``, but what is returned stays as it is whatever happens to the object.

        zarr decodes later and knows nothing of the lifetime of a view, so a store whose ``fetch``
        returns views of memory that is used again overrides this.
        """
        return await self.fetch(key, start, length)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return the bytes, or those of `byte_range` as far as the object reaches; None if absent."""
        await self._ensure_open()
        buffer_class = (prototype or default_buffer_prototype()).buffer
        try:
            if byte_range is None:
                view = await self._read(key, 0, None)
            else:
                start, length = _resolve(byte_range, await self.getsize(key))
                view = await self._read(key, start, length)
        except MissingObjectError:
            return None
        return buffer_class.from_array_like(np.frombuffer(view, np.uint8) if view.nbytes else _empty())

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several ranges, in order."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def set(self, key: str, value: Buffer) -> None:
        """Store `value`, durable when this returns."""
        self._check_writable()
        await self._ensure_open()
        await self.put(key, [_bytes_of(value)])

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Store `value` only if the key is absent; safe among racing writers."""
        self._check_writable()
        await self._ensure_open()
        with suppress(ObjectExistsError):
            await self.create(key, [_bytes_of(value)])

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        self._check_writable()
        await self._ensure_open()
        await self.put_batch((key, [_bytes_of(value)]) for key, value in values)

    def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        return self.list_prefix("")


def _bytes_of(value: object) -> memoryview:
    if not isinstance(value, Buffer):
        raise TypeError(f"the value to store must be a zarr Buffer, not a {type(value).__name__}")
    return value.as_numpy_array().data


def _empty() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.empty(0, np.uint8)


def _resolve(byte_range: ByteRequest, size_bytes: int) -> tuple[int, int]:
    """Cut a request to what the object has: start and length."""
    match byte_range:
        case RangeByteRequest(start, end):
            first, last = start, end
        case OffsetByteRequest(offset):
            first, last = offset, size_bytes
        case SuffixByteRequest(suffix):
            first, last = max(0, size_bytes - suffix), size_bytes
        case _:
            raise ValueError(f"Unexpected byte_range, got {byte_range}.")
    first, last = min(max(first, 0), size_bytes), min(last, size_bytes)
    return first, max(0, last - first)
