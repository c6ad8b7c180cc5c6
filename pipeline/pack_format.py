"""One object that holds all chunks of one rank and one save, with their index and checksums.

::

    offset 0   header, 64 bytes      magic, format, kind, incarnation, step, rank, world, checksum
    offset 64  payload of chunk 0    then zeros up to the next multiple of 64
    ...        payload of chunk n-1  likewise
               index                 canonical JSON, begins at a multiple of 64
    end - 64   trailer, 64 bytes     where the index is, its checksum, total length, checksum

Every byte is covered: header and trailer by their own xxh3-64, the index by the xxh3-128 in the
trailer, each payload by the xxh3-64 in its row of the index, and the padding must be zero. Chunks with
equal payloads share one: the row of a later one names exactly the place of an earlier one. The
xxh3-128 of index + trailer therefore stands for the whole pack; manifests record it.

The first 64 bytes keep this form in all future versions, so that old code can name a newer one.
Payloads are ready to map: a base captured in place is a pack whose chunk i lies at
``64 + layout.chunks[i].offset_bytes``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Encoding, Kind
from stepwell.pipeline.casts import check_casts
from stepwell.pipeline.keys import incarnation_counter
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.pipeline.sealed import FORMAT, canonical_json, count, typed
from stepwell.stores.base import BytesLike

__all__ = [
    "ALIGNMENT",
    "HEADER_BYTES",
    "PackIdentity",
    "PackKind",
    "PackRow",
    "aligned",
    "check_header",
    "check_trailer",
    "encode_tail",
    "parse_index",
    "tail_hash",
]

HEADER_BYTES = 64
ALIGNMENT = 64
_MAGIC = b"STEPWELL"
_TRAILER_MAGIC = b"LLEWPETS"
# magic, format, kind, incarnation counter, incarnation random part, step, rank, world, zero | checksum
_HEADER = struct.Struct("<8sIIQQQIIQ")
# index offset, index length, xxh3-128 of the index, total length, magic, format, zero | checksum
_TRAILER = struct.Struct("<QQ16sQ8sII")
_CHECKSUM = struct.Struct("<Q")

# An index of 100,000 rows is about 30 MB; a larger one is not ours.
INDEX_BYTES_MAX = 256 << 20
# A tensor that cannot be cut is one chunk; no accelerator holds a larger one.
RAW_BYTES_MAX = 1 << 38
# Of lists and objects within an encoding. Ours go 2 deep; messages show them, and any depth has its stack.
ENCODING_DEPTH_MAX = 16


class PackKind(StrEnum):
    """What a pack holds."""

    GRADIENT = "gradient"
    STATE = "state"
    BASE = "base"


_KIND_CODES = {PackKind.GRADIENT: 1, PackKind.STATE: 2, PackKind.BASE: 3}


@dataclass(frozen=True, slots=True)
class PackIdentity:
    """Which pack this is."""

    kind: PackKind
    run: str
    incarnation: str
    step: int
    rank: int = 0
    world: int = 1

    def header_bytes(self) -> bytes:
        """Return the first 64 bytes of the pack; they follow from the identity alone."""
        head = _HEADER.pack(
            _MAGIC,
            FORMAT,
            _KIND_CODES[self.kind],
            incarnation_counter(self.incarnation),
            int(self.incarnation[7:], 16),
            self.step,
            self.rank,
            self.world,
            0,
        )
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


@dataclass(frozen=True, slots=True)
class PackRow:
    """One chunk in the index of a pack.

    ``offset`` counts from the start of the pack, ``xxh3`` (16 hexadecimal digits) is of the
    ``size_bytes`` stored bytes; the other fields are those of ``Chunk``.
    """

    key: str
    kind: Kind
    update: int
    part: int
    layout: str
    dtype: str
    raw_bytes: int
    offset: int
    size_bytes: int
    xxh3: str
    encodings: tuple[Encoding, ...]

    def as_json(self) -> list[object]:
        """Row as it stands in the index."""
        return [
            self.key,
            str(self.kind),
            self.update,
            self.part,
            self.layout,
            self.dtype,
            self.raw_bytes,
            self.offset,
            self.size_bytes,
            self.xxh3,
            [dict(encoding) for encoding in self.encodings],
        ]


def aligned(offset: int) -> int:
    """Next multiple of the alignment."""
    return offset + -offset % ALIGNMENT


def encode_tail(
    identity: PackIdentity, header: Mapping[str, object], rows: Sequence[PackRow], offset: int
) -> tuple[bytes, bytes]:
    """Return index and trailer of a pack whose index begins at `offset`."""
    index = canonical_json(
        {
            "format": FORMAT,
            "kind": str(identity.kind),
            "run": identity.run,
            "incarnation": identity.incarnation,
            "step": identity.step,
            "rank": identity.rank,
            "world": identity.world,
            "header": header,
            "chunks": [row.as_json() for row in rows],
        }
    )
    total = offset + len(index) + HEADER_BYTES
    trailer = _TRAILER.pack(
        offset, len(index), xxhash.xxh3_128_digest(index), total, _TRAILER_MAGIC, FORMAT, 0
    )
    return index, trailer + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(trailer))


def tail_hash(index: BytesLike, trailer: BytesLike) -> str:
    """xxh3-128 of index + trailer: stands for the whole pack, since both cover all other bytes."""
    state = xxhash.xxh3_128(index)
    state.update(trailer)
    return state.hexdigest()


def check_header(head: bytes, what: str) -> None:
    """Check the frozen part of a header: magic, checksum, version."""
    magic, version = head[:8], int.from_bytes(head[8:12], "little")
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head[:-8])) != head[-8:]:
        if magic != _MAGIC:
            raise FormatError(f"{what}: not a stepwell pack, or its header is damaged")
        raise IntegrityError(f"{what}: the header is damaged (its checksum does not match)")
    if magic != _MAGIC:
        raise FormatError(f"{what}: not a stepwell pack")
    if version > FORMAT:
        raise FormatError(
            f"{what}: written in format {version}, this stepwell reads up to format {FORMAT}; update it",
            newer=True,
        )


def check_trailer(trailer: bytes, size_bytes: int, what: str) -> tuple[int, int, bytes]:
    """Return index offset, length and checksum, all within the object."""
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(trailer[:-8])) != trailer[-8:]:
        raise IntegrityError(f"{what}: the trailer is damaged, or the object is cut short")
    offset, length, digest, total, magic, version, zero = _TRAILER.unpack(trailer[:-8])
    if magic != _TRAILER_MAGIC or version != FORMAT or zero:
        raise FormatError(f"{what}: the trailer is not one of ours")
    if total != size_bytes:
        raise IntegrityError(f"{what}: {size_bytes} bytes where {total} were written")
    if length > INDEX_BYTES_MAX:
        raise FormatError(f"{what}: an index of {length} bytes, more than the {INDEX_BYTES_MAX} it may have")
    if offset < HEADER_BYTES or offset % ALIGNMENT or offset + length + HEADER_BYTES != total:
        raise FormatError(f"{what}: the index at {offset} does not lie within the object")
    return offset, length, digest


def parse_index(
    index: Mapping[str, object], payload_end: int, what: str
) -> tuple[PackIdentity, dict[str, object], dict[str, PackRow]]:
    """Take over an index whose checksum is right, believing nothing it says about sizes.

    Returns identity, header, and rows by key. All rows lie between header and `payload_end`.
    """
    try:
        if index["format"] != FORMAT:
            raise FormatError(f"{what}: index of format {index['format']!r}")
        identity = PackIdentity(
            PackKind(str(index["kind"])),
            typed(index["run"], str),
            typed(index["incarnation"], str),
            count(index["step"]),
            count(index["rank"], 32),
            count(index["world"], 32),
        )
        header: dict[str, object] = typed(index["header"], dict)
        rows = [_row(fields) for fields in typed(index["chunks"], list)]
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        # RecursionError: a value nested about as deep as json goes, when a message shows it.
        raise FormatError(f"{what}: the index is not one of ours ({error!r})") from error
    position = HEADER_BYTES
    places: set[tuple[int, int, str]] = set()
    for row in rows:
        place = (row.offset, row.size_bytes, row.xxh3)
        if place in places:
            continue
        places.add(place)
        if row.offset < position or row.offset % ALIGNMENT:
            raise FormatError(f"{what}: chunk {row.key!r} at {row.offset} overlaps or is unaligned")
        position = row.offset + row.size_bytes
    if position > payload_end:
        raise FormatError(f"{what}: chunks of {position} bytes reach beyond the object")
    by_key = {row.key: row for row in rows}
    if len(by_key) != len(rows):
        raise FormatError(f"{what}: two chunks have one key")
    check_casts(rows, what)
    return identity, header, by_key


def _row(fields: object) -> PackRow:
    key, kind, update, part, layout, dtype, raw, offset, size, digest, encodings = typed(fields, list)
    if type(update) is not int or not -1 <= update < 1 << 31 or dtype not in ITEM_BYTES:
        raise ValueError(f"row {key!r}: update {update!r}, dtype {dtype!r}")
    row = PackRow(
        typed(key, str),
        Kind(kind),
        update,
        count(part),
        typed(layout, str),
        dtype,
        count(raw),
        count(offset),
        count(size),
        typed(digest, str),
        tuple(_encoding(encoding) for encoding in typed(encodings, list)),
    )
    if row.raw_bytes > RAW_BYTES_MAX:
        raise ValueError(f"row {key!r} claims {row.raw_bytes} raw bytes, more than {RAW_BYTES_MAX}")
    if row.raw_bytes % ITEM_BYTES[row.dtype]:
        raise ValueError(f"row {key!r} claims {row.raw_bytes} raw bytes, no whole elements of {row.dtype}")
    if not row.encodings and row.raw_bytes != row.size_bytes:
        raise ValueError(f"row {key!r} holds {row.size_bytes} of {row.raw_bytes} raw bytes")
    return row


def _encoding(value: object) -> Encoding:
    encoding: dict[str, object] = typed(value, dict)
    typed(encoding["id"], str)
    _check_depth(encoding, 0)
    return encoding


def _check_depth(value: dict[str, object] | list[object], depth: int) -> None:
    if depth > ENCODING_DEPTH_MAX:
        raise ValueError(f"an encoding nested more than {ENCODING_DEPTH_MAX} deep")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            _check_depth(item, depth + 1)
