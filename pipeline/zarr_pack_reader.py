"""Reading a packed base in terms of its layout; see ``stepwell.pipeline.zarr_pack`` for its form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.keys import Area, data_key, parse_key, references_key
from stepwell.pipeline.layout import LayoutChunk
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack_reader import off_loop
from stepwell.pipeline.sealed import count, parse_json, reading, typed
from stepwell.pipeline.zarr_group import GroupPlan, PieceObject, piece_fault
from stepwell.pipeline.zarr_pack import HERE, ranges_hash, reference_url
from stepwell.pipeline.zarr_root import root_header
from stepwell.stores.base import ObjectStore

__all__ = ["PackedReader", "is_packed"]

# Making sense of an index costs this many times what hashing it does.
_PARSING = 200


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the pieces of one chunk of the layout lie, one after the other.

    Attributes
    ----------
    number : int
        Of the data object.
    start, length : int
        In bytes.
    checksums : sequence of str
        xxh3-64 of each piece's range.
    """

    number: int
    start: int
    length: int
    checksums: Sequence[str]


class PackedReader:
    """Reads a packed base; every byte is checked before it is returned.

    Made by ``stepwell.pipeline.zarr_base.read_base``.

    Attributes
    ----------
    manifest : Manifest
    plan : GroupPlan
    header : dict
        What was given to ``export_packed``.
    """

    def __init__(self, store: ObjectStore, manifest: Manifest, plan: GroupPlan) -> None:
        self._store = store
        self.manifest = manifest
        self.plan = plan
        self.header: dict[str, object] = {}
        self._data: list[ObjectEntry] = []
        self._places: list[_Place | None] = []

    async def open(self) -> PackedReader:
        """Read the index, and check that it says what the layout needs and leaves out no byte.

        Raises
        ------
        IntegrityError, FormatError
        """
        entry = self._sort_entries()
        view = await self._store.fetch(entry.key, 0, entry.size_bytes)
        await off_loop(view.nbytes, partial(entry.check, view))
        await off_loop(_PARSING * view.nbytes, partial(self._read_index, view, entry.key))
        return self

    async def read_chunk(self, part: int) -> Bytes:
        """Return the bytes of one chunk of the layout, as they lay in the captured run.

        Raises
        ------
        IntegrityError
            A range is damaged, or its padding is not zero.
        MissingObjectError
            The object is not there.
        """
        chunk, place = self.plan.layout.chunks[part], self._places[part]
        if place is None:
            return np.zeros(chunk.size_bytes, np.uint8)
        key = self._data[place.number].key
        view = await self._store.fetch(key, place.start, place.length)
        row = self.plan.objects[part]
        return await off_loop(view.nbytes, partial(_unpacked, view, row, place, chunk, key))

    async def faults(self, entry: ObjectEntry) -> AsyncIterator[str]:
        """Check every byte of one data object and yield each fault in words."""
        for part, place in enumerate(self._places):
            if place is not None and self._data[place.number] == entry:
                try:
                    await self.read_chunk(part)
                except IntegrityError as error:
                    yield str(error)

    def _sort_entries(self) -> ObjectEntry:
        """Tell index and data apart; return the index."""
        m = self.manifest
        index: ObjectEntry | None = None
        for entry in m.objects:
            place = parse_key(entry.key)
            assert place is not None, "a manifest has keys of ours alone"
            if entry.key == references_key(m.incarnation, m.step, m.rank) and index is None:
                index = entry
            elif entry.key == data_key(m.incarnation, m.step, m.rank, len(self._data)):
                self._data.append(entry)
            else:
                raise FormatError(f"{m.key}: {entry.key!r} does not belong to a packed base")
        if index is None:
            raise FormatError(f"{m.key}: names no index of its packed base")
        return index

    def _read_index(self, view: memoryview, key: str) -> None:
        document = parse_json(view, key)
        with reading(key):
            refs = typed(document["refs"], dict)
            ours = typed(document["stepwell"], dict)
            checksums = [_checksum(value) for value in typed(ours["xxh3_64"], list)]
            if (count(document["version"]), document["templates"]) != (1, {HERE: ""}):
                raise ValueError("not a reference index of version 1 with our template")
            root = typed(refs["zarr.json"], str).encode()
            self._place_rows(refs, checksums)
        self.header = root_header(root, f"{key}: zarr.json", self.manifest, self.plan.layout.hash)

    def _place_rows(self, refs: Mapping[str, object], checksums: Sequence[str]) -> None:
        """Work out where each chunk lies; the ranges must fill the data objects in the order of the plan."""
        ends: list[tuple[int, int]] = []  # of each data object: bytes, and ranges so far
        done = 0
        for row in self.plan.objects:
            if not row:
                self._places.append(None)
                continue
            if refs[row[0].key] == [reference_url(self.manifest.rank, len(ends)), 0, row[0].stored_bytes]:
                ends.append((0, done))
            if not ends:
                raise ValueError(f"{row[0].key!r} is not at the start of the data")
            number, start = len(ends) - 1, ends[-1][0]
            url, at = reference_url(self.manifest.rank, number), start
            for item in row:
                if refs[item.key] != [url, at, item.stored_bytes]:
                    raise ValueError(f"{item.key!r} is not at {at} of data object {number}")
                at += item.stored_bytes
            self._places.append(_Place(number, start, at - start, checksums[done : done + len(row)]))
            done += len(row)
            ends[-1] = (at, done)
        if done != len(checksums) or [size for size, _ in ends] != [e.size_bytes for e in self._data]:
            raise ValueError("its ranges are not those of the data its manifest names")
        first = 0
        for (_, last), entry in zip(ends, self._data, strict=True):
            if ranges_hash(checksums[first:last]) != entry.xxh3:
                raise IntegrityError(f"{entry.key}: the index has other checksums than the manifest")
            first = last


def is_packed(manifest: Manifest) -> bool:
    """Whether a base is a packed one."""
    places = (parse_key(entry.key) for entry in manifest.objects)
    return any(place is not None and place.area in (Area.REFERENCES, Area.DATA) for place in places)


def _unpacked(
    view: memoryview, row: Sequence[PieceObject], place: _Place, chunk: LayoutChunk, key: str
) -> Bytes:
    """Check the ranges of one chunk and return it; one that is one piece aliases `view`."""
    whole: Bytes | None = None
    at = 0
    for item, checksum in zip(row, place.checksums, strict=True):
        stored = view[at : at + item.stored_bytes]
        fault = piece_fault(stored, item) if xxhash.xxh3_64_hexdigest(stored) == checksum else "damaged"
        if fault is not None:
            raise IntegrityError(f"{key}: {item.key!r} at {place.start + at}: {fault}")
        piece: Bytes = np.frombuffer(stored, np.uint8)[: item.size_bytes]
        if item.size_bytes == chunk.size_bytes:
            return piece
        if whole is None:
            whole = np.zeros(chunk.size_bytes, np.uint8)
        start = item.offset_bytes - chunk.offset_bytes
        whole[start : start + item.size_bytes] = piece
        at += item.stored_bytes
    assert whole is not None, "a place has at least one piece"
    return whole


def _checksum(value: object) -> str:
    text = typed(value, str)
    if len(text) != 16 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{text!r:.200} is no xxh3-64")
    return text
