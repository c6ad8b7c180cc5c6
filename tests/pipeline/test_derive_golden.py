"""A pack with casts that format 1 wrote is still read, and written the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lossy_rig import Here

from stepwell.pipeline.base import Bytes, Chunk, Kind
from stepwell.pipeline.cast_pairs import CapturedRun
from stepwell.pipeline.casts import CAST_DTYPES, DERIVED, cast_into
from stepwell.pipeline.derive import Derive
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.pack import PackIdentity, PackKind, PackReader, pack_parts
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.state_ranges import state_order

GOLDEN = Path(__file__).parent.parent / "golden" / "format-1" / "derived.pack"
IDENTITY = PackIdentity(PackKind.STATE, "0123456789abcdef" * 2, "000002-0123456789abcdef", 41)
LAYOUT: Layout = plan_layout(
    [
        TensorSpec("model/w", (2, 320), "bfloat16", Kind.WEIGHT),
        TensorSpec("model/b", (40,), "bfloat16", Kind.WEIGHT),
        TensorSpec("model/alone", (7,), "bfloat16", Kind.WEIGHT),
        TensorSpec("model/h", (96,), "float16", Kind.WEIGHT),
        TensorSpec("optim/param/0.0", (2, 320), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("optim/param/0.1", (40,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("optim/param/0.2", (96,), "float32", Kind.WEIGHT, "optim:0"),
    ],
    chunk_bytes=1600,
)
COPIES = {"model/w": "optim/param/0.0", "model/b": "optim/param/0.1", "model/h": "optim/param/0.2"}


def golden_state() -> Bytes:
    """All bytes of the state: scattered bit patterns, NaN and infinities among them, and their casts."""
    run = np.zeros(LAYOUT.size_bytes, np.uint8)

    def place(name: str) -> Bytes:
        index = LAYOUT.index_of[name]
        start = LAYOUT.tensor_offsets[index]
        return run[start : start + LAYOUT.tensors[index].size_bytes]

    for number, spec in enumerate(LAYOUT.tensors):
        data = place(spec.name)
        if spec.dtype == "float32":
            bits = np.arange(data.nbytes // 4, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(number)
            bits[:3] = (0x7F800000, 0xFF812345, 0x80000000)
            data[:] = bits.view(np.uint8)
    for copy, master in COPIES.items():
        cast_into(place(master), place(copy), LAYOUT.tensors[LAYOUT.index_of[copy]].dtype)
    place("model/alone")[:] = np.arange(1, 15, dtype=np.uint8)
    return run


def raw_chunks() -> list[Chunk]:
    whole = CapturedRun(LAYOUT, golden_state())
    chunks = []
    for part in state_order(LAYOUT):
        place = LAYOUT.chunks[part]
        buffer = whole.run[place.offset_bytes : place.offset_bytes + place.size_bytes]
        state = whole if place.dtype in CAST_DTYPES else None
        chunks.append(
            Chunk(
                41, f"state/{part}", place.kind, -1, part, LAYOUT.hash, place.dtype, place.size_bytes, buffer,
                state=state,
            )
        )  # fmt: skip
    return chunks


async def golden_pack() -> bytes:
    """Without byte planes: how those look is told by golden files of their own."""
    stages = (Derive(), Shard("none"))
    sent = []
    for raw in raw_chunks():
        chunk = raw
        for stage in stages:
            chunk = await stage.save(chunk, Here())
        sent.append(chunk)
    header: dict[str, object] = {"tree": {}, "layout": LAYOUT.hash, "digest": None}
    return b"".join(bytes(part) for part in pack_parts(IDENTITY, header, sent).parts)


async def test_the_golden_pack_with_casts_of_format_1_is_still_read() -> None:
    data = GOLDEN.read_bytes()
    reader = await PackReader.over(data, "golden").open()
    assert [fault async for fault in reader.verify_all()] == []
    stages = reading_stages()
    halves = 0
    for raw in raw_chunks():
        stored = await reader.chunk(raw.key, LAYOUT)
        assert bool(stored.encodings) is (raw.state is not None)
        if stored.encodings:
            assert stored.encodings[0]["id"] == DERIVED
            halves += stored.buffer.nbytes
        back = await recover_chunk(stored, stages, Here())
        assert np.array_equal(back.buffer, raw.buffer), raw.key
    # What has no master: seven elements, and the gap before them.
    assert halves == 14 + 48


async def test_it_is_written_the_same() -> None:
    data = GOLDEN.read_bytes()
    assert data == await golden_pack(), "the format changed: bump the version and keep this file"
