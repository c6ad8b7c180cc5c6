"""Making packs: one object that holds all chunks of one rank and one save.

The form is described in ``stepwell.pipeline.pack_format``, reading is in ``pack_reader``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from stepwell.errors import NoSpaceError
from stepwell.pipeline.base import Chunk
from stepwell.pipeline.layout import ITEM_BYTES, Layout
from stepwell.pipeline.pack_format import (
    ALIGNMENT,
    HEADER_BYTES,
    PackIdentity,
    PackKind,
    PackRow,
    aligned,
    encode_tail,
    tail_hash,
)
from stepwell.pipeline.pack_reader import PackReader
from stepwell.stores.base import BytesLike

__all__ = [
    "HEADER_BYTES",
    "PackIdentity",
    "PackKind",
    "PackReader",
    "PackRow",
    "Packed",
    "base_chunk_key",
    "finish_region",
    "pack_parts",
    "region_size",
]


@dataclass(frozen=True, slots=True)
class Packed:
    """A pack ready for ``store.put``.

    Attributes
    ----------
    parts : tuple of bytes-like
        In order; payloads alias the buffers of the chunks. Empty for a pack finished in place.
    size_bytes : int
        Length of the whole object.
    xxh3 : str
        xxh3-128 of index + trailer, for the manifest.
    rows : tuple of PackRow
    """

    parts: tuple[BytesLike, ...]
    size_bytes: int
    xxh3: str
    rows: tuple[PackRow, ...]


def base_chunk_key(part: int) -> str:
    """Key of layout chunk `part` within a base pack."""
    return f"state/{part}"


def pack_parts(identity: PackIdentity, header: Mapping[str, object], chunks: Sequence[Chunk]) -> Packed:
    """Put chunks together without joining their buffers; equal ones are stored once.

    Parameters
    ----------
    identity : PackIdentity
    header : mapping
        JSON-able description of the save, stored in the index as it is.
    chunks : sequence of Chunk
        Their buffers stay the caller's, and unchanged until the pack is stored.
    """
    parts: list[BytesLike] = [identity.header_bytes()]
    rows: list[PackRow] = []
    offset = HEADER_BYTES
    written: dict[tuple[str, int], tuple[int, memoryview]] = {}
    for chunk in chunks:
        view = chunk.buffer.data if chunk.buffer.size else memoryview(b"")
        digest = xxhash.xxh3_64_hexdigest(view)
        at, same = written.setdefault((digest, view.nbytes), (offset, view))
        if at != offset and not np.array_equal(np.frombuffer(same, np.uint8), np.frombuffer(view, np.uint8)):
            at = offset  # another chunk with the same checksum
        rows.append(
            PackRow(
                chunk.key,
                chunk.kind,
                chunk.update,
                chunk.part,
                chunk.layout,
                chunk.dtype,
                chunk.raw_bytes,
                at,
                view.nbytes,
                digest,
                chunk.encodings,
            )
        )
        if at != offset:
            continue
        parts.append(view)
        offset += view.nbytes
        padding = -offset % ALIGNMENT
        if padding:
            parts.append(bytes(padding))
            offset += padding
    index, trailer = encode_tail(identity, header, rows, offset)
    parts += (index, trailer)
    return Packed(tuple(parts), offset + len(index) + len(trailer), tail_hash(index, trailer), tuple(rows))


def region_size(identity: PackIdentity, header: Mapping[str, object], layout: Layout) -> int:
    """Bytes a region needs for a base of `layout` captured in place, exact for this `header`.

    A header of a later save may be a little longer; reserve a margin for what grows in it.
    """
    rows = _base_rows(layout, None)
    index, trailer = encode_tail(identity, header, rows, aligned(HEADER_BYTES + layout.size_bytes))
    return aligned(HEADER_BYTES + layout.size_bytes) + len(index) + len(trailer)


def finish_region(
    payload: memoryview, identity: PackIdentity, header: Mapping[str, object], layout: Layout
) -> Packed:
    """Make a pack of a state that was copied in place.

    Parameters
    ----------
    payload : memoryview, writable
        Payload of a region. The run of `layout` lies in it from byte 64 on; all other bytes may
        hold anything (recycled memory) and are written here: header, padding, index, trailer.

    Returns
    -------
    Packed
        Without parts; ``size_bytes`` is what to publish.

    Raises
    ------
    NoSpaceError
        The region is too small for the index.
    """
    end = aligned(HEADER_BYTES + layout.size_bytes)
    if end > payload.nbytes:
        raise NoSpaceError(
            f"base of step {identity.step}: {end} bytes needed, the region has {payload.nbytes}"
        )
    _zero_gaps(payload, layout)
    rows = _base_rows(layout, payload)
    index, trailer = encode_tail(identity, header, rows, end)
    total = end + len(index) + len(trailer)
    if total > payload.nbytes:
        raise NoSpaceError(
            f"base of step {identity.step}: {total} bytes needed, the region has {payload.nbytes}"
        )
    payload[:HEADER_BYTES] = identity.header_bytes()
    payload[end:total] = index + trailer
    return Packed((), total, tail_hash(index, trailer), tuple(rows))


def _base_rows(layout: Layout, payload: memoryview | None) -> list[PackRow]:
    """Rows of a base in place; with `payload` None the checksums are blanks of the right length."""
    rows = []
    for part, chunk in enumerate(layout.chunks):
        start = HEADER_BYTES + chunk.offset_bytes
        digest = "0" * 16
        if payload is not None:
            digest = xxhash.xxh3_64_hexdigest(payload[start : start + chunk.size_bytes])
        rows.append(
            PackRow(
                base_chunk_key(part),
                chunk.kind,
                -1,
                part,
                layout.hash,
                chunk.dtype,
                chunk.size_bytes,
                start,
                chunk.size_bytes,
                digest,
                (),
            )
        )
    return rows


def _zero_gaps(payload: memoryview, layout: Layout) -> None:
    """Zero what no tensor covers, within chunks and between them."""
    run = np.frombuffer(payload, np.uint8)[HEADER_BYTES:]
    for start, stop in _gaps(layout):
        run[start:stop] = 0


def _gaps(layout: Layout) -> Iterator[tuple[int, int]]:
    position = 0
    for chunk in layout.chunks:
        item_bytes = ITEM_BYTES[chunk.dtype]
        for piece in chunk.pieces:
            start = chunk.offset_bytes + piece.offset_bytes
            if start > position:
                yield position, start
            position = start + (piece.stop - piece.start) * item_bytes
    end = aligned(HEADER_BYTES + layout.size_bytes) - HEADER_BYTES
    if end > position:
        yield position, end
