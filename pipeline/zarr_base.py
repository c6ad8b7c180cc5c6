"""Writing a base as a zarr v3 group that needs no stepwell to read, and our own way to read it back.

The form is described in ``stepwell.pipeline.zarr_group``. Payloads are never copied: the parts of an
object alias the captured run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import xxhash

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.keys import state_prefix
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack_format import PackIdentity
from stepwell.pipeline.pack_reader import off_loop
from stepwell.pipeline.zarr_group import GroupPlan, PieceObject, piece_fault, piece_parts, root_document
from stepwell.pipeline.zarr_pack_reader import PackedReader, is_packed
from stepwell.pipeline.zarr_root import root_about, root_header
from stepwell.stores.base import BytesLike, ObjectStore, WriteItem

# Reads of small objects in flight at once; a chunk of many tiny tensors has thousands.
_PIECES_AT_ONCE = 16

__all__ = ["BaseReader", "GroupPlan", "export_base", "read_base"]


def export_base(
    plan: GroupPlan, identity: PackIdentity, header: Mapping[str, object], run: memoryview
) -> Iterator[tuple[WriteItem, ObjectEntry]]:
    """Yield every object of the group with its manifest entry; chunks first, the root last.

    Parameters
    ----------
    plan : GroupPlan
    identity : PackIdentity
    header : mapping
        JSON-able; holds the tree of the state.
    run : memoryview, (layout.size_bytes,), uint8
        The captured bytes in layout order. The parts of the items alias it: it must stay unchanged
        until they are stored. Checksums are computed here, so run this off the event loop.
    """
    prefix = state_prefix(identity.incarnation, identity.step)
    longest = max((item.padding_bytes for row in plan.objects for item in row), default=0)
    zeros = memoryview(bytes(longest))
    for row in plan.objects:
        for item in row:
            data = run[item.offset_bytes : item.offset_bytes + item.size_bytes]
            yield _written(f"{prefix}/{item.key}", piece_parts(item, data, zeros))
    for key, document in plan.documents.items():
        yield _written(f"{prefix}/{key}", [document])
    about = root_about(plan.layout.hash, identity, header)
    yield _written(f"{prefix}/zarr.json", [root_document(plan, about)])


class BaseReader:
    """Reads a base group in terms of its layout; every byte is checked before it is returned.

    Made by ``read_base``.

    Attributes
    ----------
    manifest : Manifest
    plan : GroupPlan
    header : dict
        What was given to ``export_base``.
    """

    def __init__(self, store: ObjectStore, manifest: Manifest, plan: GroupPlan) -> None:
        self._store = store
        self._prefix = state_prefix(manifest.incarnation, manifest.step)
        self._entries = {entry.key: entry for entry in manifest.objects}
        self.manifest = manifest
        self.plan = plan
        self.header: dict[str, object] = {}

    async def open(self) -> BaseReader:
        """Check that the manifest names all the layout needs, and read the root."""
        for row in self.plan.objects:
            for item in row:
                entry = self._entry(item.key)
                if entry.size_bytes != item.stored_bytes:
                    raise FormatError(
                        f"{entry.key}: {entry.size_bytes} bytes, its layout needs {item.stored_bytes}"
                    )
        key = f"{self._prefix}/zarr.json"
        document = await self._object("zarr.json")
        self.header = root_header(document, key, self.manifest, self.plan.layout.hash)
        return self

    async def read_chunk(self, part: int) -> Bytes:
        """Return the bytes of one chunk of the layout, as they lay in the captured run.

        Raises
        ------
        IntegrityError
            An object is damaged, of another length, or its padding is not zero.
        MissingObjectError
            An object is not there.
        """
        chunk = self.plan.layout.chunks[part]
        row = self.plan.objects[part]
        if len(row) == 1 and row[0].size_bytes == chunk.size_bytes:
            return await self._piece(row[0])
        whole = np.zeros(chunk.size_bytes, np.uint8)
        for first in range(0, len(row), _PIECES_AT_ONCE):
            some = row[first : first + _PIECES_AT_ONCE]
            for item, piece in zip(some, await asyncio.gather(*map(self._piece, some)), strict=True):
                start = item.offset_bytes - chunk.offset_bytes
                whole[start : start + item.size_bytes] = piece
        return whole

    async def _piece(self, item: PieceObject) -> Bytes:
        view = await self._object(item.key)
        fault = await off_loop(view.nbytes, partial(piece_fault, view, item))
        if fault is not None:
            raise IntegrityError(f"{self._prefix}/{item.key}: {fault}")
        return np.frombuffer(view, np.uint8)[: item.size_bytes]

    async def _object(self, key: str) -> memoryview:
        entry = self._entry(key)
        # The length is named, so that an object somebody made huge is not read as a whole.
        view = await self._store.fetch(entry.key, 0, entry.size_bytes)
        await off_loop(view.nbytes, partial(entry.check, view))
        return view

    def _entry(self, key: str) -> ObjectEntry:
        try:
            return self._entries[f"{self._prefix}/{key}"]
        except KeyError:
            raise FormatError(f"{self.manifest.key}: does not name {key!r}, which its layout needs") from None


async def read_base(store: ObjectStore, manifest: Manifest, plan: GroupPlan) -> BaseReader | PackedReader:
    """Open the base that a checked manifest describes, a group or a packed one as the manifest says.

    Raises
    ------
    IntegrityError, FormatError
        Root and manifest do not belong together, or objects the layout needs are not named.
    """
    if is_packed(manifest):
        return await PackedReader(store, manifest, plan).open()
    return await BaseReader(store, manifest, plan).open()


def _written(key: str, parts: Sequence[BytesLike]) -> tuple[WriteItem, ObjectEntry]:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    size_bytes = sum(memoryview(part).nbytes for part in parts)
    return (key, parts), ObjectEntry(key, size_bytes, state.hexdigest())
