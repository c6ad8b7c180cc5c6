"""Reading a pack back, a chunk at a time; see ``stepwell.pipeline.pack_format`` for its form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

import numpy as np
import xxhash

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Chunk
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.pack_format import (
    HEADER_BYTES,
    PackIdentity,
    PackRow,
    check_header,
    check_trailer,
    parse_index,
    tail_hash,
)
from stepwell.pipeline.sealed import parse_json
from stepwell.stores.base import BytesLike

__all__ = ["Fetch", "PackReader", "off_loop"]

Result = TypeVar("Result")
Fetch = Callable[[int, int], Awaitable[memoryview]]
"""``await fetch(start, length)`` gives exactly that range of the object."""

# The end of the object is read in one go, so that most packs open with two reads.
_TAIL_READ_BYTES = 64 << 10
# Hashing this much takes a quarter of a millisecond (34 GB/s); more goes to a thread.
_INLINE_BYTES = 8 << 20
_PADDING_READ_BYTES = 4 << 20


class PackReader:
    """Reads one pack, a chunk at a time, and returns nothing unchecked.

    Parameters
    ----------
    fetch : coroutine function ``(start, length) -> memoryview``
    size_bytes : int
        Length of the object as the store tells it.
    what : str
        Name for messages: key and tier.
    """

    def __init__(self, fetch: Fetch, size_bytes: int, what: str) -> None:
        self._fetch = fetch
        self.size_bytes = size_bytes
        self.what = what
        self.identity: PackIdentity
        self.header: dict[str, object] = {}
        self.rows: dict[str, PackRow] = {}
        self.xxh3 = ""
        self._index_offset = 0

    @classmethod
    def over(cls, buffer: BytesLike, what: str) -> PackReader:
        """Read a pack that lies in memory; chunks alias `buffer`."""
        view = memoryview(buffer).cast("B").toreadonly()

        async def fetch(start: int, length: int) -> memoryview:
            return view[start : start + length]

        return cls(fetch, view.nbytes, what)

    async def open(self) -> PackReader:
        """Read and check header, index and trailer; fills ``identity``, ``header``, ``rows``, ``xxh3``.

        Raises
        ------
        IntegrityError
            Damaged or cut short.
        FormatError
            Not a pack, a newer format, or an index that cannot be true.
        """
        if self.size_bytes < 2 * HEADER_BYTES:
            raise IntegrityError(f"{self.what}: cut short, {self.size_bytes} bytes are no pack")
        head = bytes(await self._range(0, HEADER_BYTES))
        check_header(head, self.what)
        start = max(0, self.size_bytes - _TAIL_READ_BYTES)
        tail = await self._range(start, self.size_bytes - start)
        trailer = bytes(tail[-HEADER_BYTES:])
        offset, length, digest = check_trailer(trailer, self.size_bytes, self.what)
        index = tail[offset - start : -HEADER_BYTES] if offset >= start else await self._range(offset, length)
        if await off_loop(length, partial(xxhash.xxh3_128_digest, index)) != digest:
            raise IntegrityError(f"{self.what}: the index is damaged (its checksum does not match)")
        self._index_offset = offset
        document = await off_loop(length, partial(parse_json, index, f"index of {self.what}"))
        self.identity, self.header, self.rows = parse_index(document, offset, self.what)
        if self.identity.header_bytes() != head:
            raise IntegrityError(f"{self.what}: header and index name different packs")
        self.xxh3 = await off_loop(length, partial(tail_hash, index, trailer))
        return self

    async def chunk(self, key: str, layout: Layout | None = None) -> Chunk:
        """Fetch one chunk; its checksum is verified before it is returned.

        Parameters
        ----------
        key : str
        layout : Layout, optional
            The one its row names. With it the length that the row claims for the decoded chunk is the
            layout's; without it that length is only below a limit, and nothing to allocate by.

        Raises
        ------
        IntegrityError
            The chunk is not in this pack, damaged, or not what the layout has in its place.
        """
        row = self.rows.get(key)
        if row is None:
            raise IntegrityError(f"{self.what}: has no chunk {key!r}")
        if layout is not None:
            place = layout.chunks[row.part] if row.part < len(layout.chunks) else None
            claimed = (row.layout, row.dtype, row.raw_bytes)
            if place is None or claimed != (layout.hash, place.dtype, place.size_bytes):
                raise IntegrityError(
                    f"{self.what}: chunk {key!r}, {row.raw_bytes} bytes, is not part {row.part} of its layout"
                )
        view = await self._range(row.offset, row.size_bytes)
        if await off_loop(row.size_bytes, partial(xxhash.xxh3_64_hexdigest, view)) != row.xxh3:
            raise IntegrityError(f"{self.what}: chunk {key!r} is damaged (its checksum does not match)")
        return Chunk(
            self.identity.step,
            row.key,
            row.kind,
            row.update,
            row.part,
            row.layout,
            row.dtype,
            row.raw_bytes,
            np.frombuffer(view, dtype=np.uint8),
            row.encodings,
        )

    async def verify_all(self) -> AsyncIterator[str]:
        """Check every byte of an opened pack and yield each fault in words."""
        position = HEADER_BYTES
        for row in self.rows.values():
            if row.offset < position:
                continue  # stored once, checked already
            async for fault in self._padding_faults(position, row.offset):
                yield fault
            try:
                await self.chunk(row.key)
            except IntegrityError as error:
                yield str(error)
            position = row.offset + row.size_bytes
        async for fault in self._padding_faults(position, self._index_offset):
            yield fault

    async def _padding_faults(self, start: int, stop: int) -> AsyncIterator[str]:
        while start < stop:
            length = min(stop - start, _PADDING_READ_BYTES)
            if np.frombuffer(await self._range(start, length), np.uint8).any():
                yield f"{self.what}: padding at {start} is not zero"
            start += length

    async def _range(self, start: int, length: int) -> memoryview:
        if length == 0:
            return memoryview(b"")
        view = await self._fetch(start, length)
        if view.nbytes != length:
            raise IntegrityError(f"{self.what}: {view.nbytes} bytes at {start} where {length} were asked for")
        return view


async def off_loop(size_bytes: int, function: Callable[[], Result]) -> Result:
    """Run short work here and long work in a thread, so that the loop is not held up."""
    return function() if size_bytes <= _INLINE_BYTES else await asyncio.to_thread(function)
