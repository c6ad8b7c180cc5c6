"""The small documents as a target: run and incarnation records, manifests, commit records, layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xxhash
from dice import Dice, damage
from fuzzing import CORPUS, bounded
from json_damage import damage_json, dumped
from saves import IDENTITY, LAYOUT

from stepwell.errors import IntegrityError
from stepwell.pipeline.keys import Series
from stepwell.pipeline.layout import ITEM_BYTES, Layout
from stepwell.pipeline.manifest import CommitRecord, Manifest, ObjectEntry
from stepwell.pipeline.plan import pieces_by_tensor
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.state_ranges import ranges_of, state_order

INCARNATION = IDENTITY.incarnation
PACK = f"{INCARNATION}/step/{IDENTITY.step:012d}/rank-00000.pack"
RUN = RunRecord("run-a", "nano", 1.5)
LIFE = IncarnationRecord(
    "run-a", INCARNATION, Link("000001-00000000000000aa", 40), 1, LAYOUT.hash, 2, 12.0, {"device": "cpu"},
    Link(INCARNATION, 41),
)  # fmt: skip
MANIFEST = Manifest(
    "run-a",
    INCARNATION,
    IDENTITY.step,
    0,
    1,
    "state",
    Link(INCARNATION, 40),
    False,
    (ObjectEntry(PACK, 1234, "00" * 16),),
    (LAYOUT.hash,),
    {"algorithm": "xxh3", "values": [None, "1f"]},
    {"torch": "2.13", "é": "\ud800", "threads": 2, "flags": [True, 0.5]},
)
COMMIT = CommitRecord(
    "run-a", INCARNATION, Series.STEP, IDENTITY.step, 1, (ObjectEntry.of(MANIFEST.key, MANIFEST.encode()),)
)


class Document(Protocol):
    """A record that can be written again."""

    def encode(self) -> bytes: ...


SEALED: list[tuple[Document, str, Callable[[bytes, str], Document]]] = [
    (RUN, "stepwell.json", RunRecord.decode),
    (LIFE, LIFE.key, IncarnationRecord.decode),
    (MANIFEST, MANIFEST.key, Manifest.decode),
    (COMMIT, COMMIT.key, CommitRecord.decode),
]
VALID = (*(value.encode() for value, _, _ in SEALED), LAYOUT.encoded)


def check_layout(layout: Layout) -> None:
    """Assert that readers can go by a layout: whole numbers, everything within what it lies in."""
    assert type(layout.size_bytes) is int
    for chunk in layout.chunks:
        assert 0 <= chunk.offset_bytes <= chunk.offset_bytes + chunk.size_bytes <= layout.size_bytes
        for piece in chunk.pieces:
            numbers = (piece.tensor, piece.start, piece.stop, piece.offset_bytes)
            assert all(type(number) is int and number >= 0 for number in numbers)
            end = piece.offset_bytes + (piece.stop - piece.start) * ITEM_BYTES[chunk.dtype]
            assert end <= chunk.size_bytes
            assert layout.tensors[piece.tensor].dtype == chunk.dtype
            begin = layout.tensor_offsets[piece.tensor] + piece.start * ITEM_BYTES[chunk.dtype]
            assert begin == chunk.offset_bytes + piece.offset_bytes
    for spec, offset in zip(layout.tensors, layout.tensor_offsets, strict=True):
        assert type(spec.name) is str
        assert type(spec.group) is str
        assert all(type(length) is int and length >= 0 for length in spec.shape)
        assert offset + spec.size_bytes <= layout.size_bytes
    assert sorted(state_order(layout)) == list(range(len(layout.chunks)))
    assert set(ranges_of(layout)) <= set(range(len(layout.chunks)))
    assert len(pieces_by_tensor(layout)) == len(layout.tensors)
    assert Layout.decode(layout.encoded, layout.hash) == layout


@dataclass(frozen=True)
class DocumentTarget:
    """Every reader of documents gets every case; who reads it must be able to write it again."""

    name: str = "documents"
    corpus: Path = field(default=CORPUS / "documents")

    def check(self, case: bytes) -> None:
        """Assert that each reader refuses a document in the one way allowed, or reads it wholly."""
        with bounded():
            for _, key, decode in SEALED:
                try:
                    found = decode(case, key)
                except IntegrityError:
                    continue
                assert decode(found.encode(), key) == found
            try:
                layout = Layout.decode(case, xxhash.xxh3_128_hexdigest(case))
            except IntegrityError:
                return
            check_layout(layout)

    def make(self, dice: Dice) -> bytes:
        """Change a valid document, most often behind a checksum that is right."""
        data = VALID[dice.number(0, len(VALID) - 1)]
        document: Any = json.loads(data)
        layout = "document" not in document
        inner = document if layout else document["document"]
        for _ in range(dice.number(0, 3)):
            damage_json(dice, inner)
        body = dumped(inner)
        if dice.number(0, 7) == 0:
            body = damage(dice, body, VALID)
        if not layout:
            digest = xxhash.xxh3_128_hexdigest(body).encode()
            body = b'{"document":' + body + b',\n"xxh3_128":"' + digest + b'"}\n'
        return damage(dice, body, VALID) if dice.number(0, 7) == 0 else body


DOCUMENTS = {"documents": DocumentTarget()}
