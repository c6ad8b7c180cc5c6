"""The index of a packed base as a target: any bytes in its place, with a manifest that vouches for them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from dice import Dice, damage
from fuzzing import CORPUS, bounded
from json_damage import damage_json, dumped
from saves import IDENTITY, LAYOUT

from stepwell.errors import IntegrityError, MissingObjectError
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack import PackKind
from stepwell.pipeline.zarr_group import GroupPlan
from stepwell.pipeline.zarr_pack import PackedPlan, export_packed
from stepwell.pipeline.zarr_pack_reader import PackedReader
from stepwell.stores.base import ObjectStore

PLAN = GroupPlan(LAYOUT)
RUN = np.arange(LAYOUT.size_bytes, dtype=np.uint64).astype(np.uint8)
WRITTEN = [
    ((key, b"".join(bytes(part) for part in parts)), entry)
    for (key, parts), entry in export_packed(
        PackedPlan(PLAN, 0, 2048), replace(IDENTITY, kind=PackKind.BASE), {"tree": {}}, RUN.data
    )
]
INDEX = WRITTEN[-1][1].key
OBJECTS = dict(item for item, _ in WRITTEN)
MANIFEST = Manifest(
    IDENTITY.run,
    IDENTITY.incarnation,
    IDENTITY.step,
    0,
    1,
    "base",
    None,
    True,
    tuple(entry for _, entry in WRITTEN),
    (LAYOUT.hash,),
)


class _Shelf:
    """What the reader needs of a store: objects in memory."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        if key not in self._objects:
            raise MissingObjectError(key)
        data = memoryview(self._objects[key])
        end = data.nbytes if length is None else start + length
        if end > data.nbytes:
            raise IntegrityError(f"{key}: too short")
        return data[start:end]


async def read(index: bytes) -> list[bytes]:
    """Read every chunk of the base by an index whose checksum is right."""
    entries = (*MANIFEST.objects[:-1], ObjectEntry.of(INDEX, index))
    store: ObjectStore = _Shelf({**OBJECTS, INDEX: index})  # type: ignore[assignment]
    reader = await PackedReader(store, replace(MANIFEST, objects=entries), PLAN).open()
    return [(await reader.read_chunk(part)).tobytes() for part in range(len(LAYOUT.chunks))]


WANTED = [
    RUN[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes].tobytes() for chunk in LAYOUT.chunks
]


def _read_bounded(case: bytes) -> list[bytes] | None:
    with bounded():
        try:
            return asyncio.run(read(case))
        except (IntegrityError, MissingObjectError):
            return None


@cache
def _warm() -> None:
    """Load what is loaded by the first read: it is no part of a case."""
    asyncio.run(read(OBJECTS[INDEX]))


@dataclass(frozen=True)
class ReferenceTarget:
    """Either the index is refused, or what is read by it is what was written: it has no other freedom."""

    name: str = "references"
    corpus: Path = field(default=CORPUS / "references")

    def check(self, case: bytes) -> None:
        """Assert that."""
        _warm()
        try:
            found = _read_bounded(case)
        except AssertionError:
            # Now and then a table of asyncio's grows; what a case asks for, it asks for again.
            found = _read_bounded(case)
        if found is None:
            return
        for chunk, got, wanted in zip(LAYOUT.chunks, found, WANTED, strict=True):
            for piece in chunk.pieces:  # between them is nothing that is kept
                start = piece.offset_bytes
                end = start + LAYOUT.tensors[piece.tensor].size_bytes
                assert got[start:end] == wanted[start:end]

    def make(self, dice: Dice) -> bytes:
        """Change the index in some places."""
        document = json.loads(OBJECTS[INDEX])
        for _ in range(dice.number(0, 3)):
            damage_json(dice, document)
        body = dumped(document)
        return damage(dice, body, (OBJECTS[INDEX],)) if dice.number(0, 7) == 0 else body


REFERENCES = {"references": ReferenceTarget()}
