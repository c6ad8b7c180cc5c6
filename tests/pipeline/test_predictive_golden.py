"""Saves told by prediction that the first version wrote are read by every later one, bit for bit.

Three packs in ``tests/golden/format-1``: a state, raw (``state-before.pack``), the state one update of AdamW
later as ``delta: predictive`` told it (``state-predicted.pack``), and that state raw (``state-after.pack``).
The frames of the second are zstd's, whose releases differ; so it is read here, and not written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from lossy_rig import Here

from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Kind
from stepwell.pipeline.delta import PredictiveStage
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout, LayoutChunk, Piece, TensorSpec
from stepwell.pipeline.pack import PackIdentity, PackKind, PackReader, base_chunk_key, pack_parts
from stepwell.pipeline.predictive import PREDICTIVE, AdamUpdate, MomentRun, UpdateHint
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard

GOLDEN = Path(__file__).parent.parent / "golden" / "format-1"
INC = "000002-0123456789abcdef"
UPDATE = AdamUpdate(7, 0.0078125, 0.875, 0.96875, 1e-8, 0.125, True)
# Its bias corrections: lr / (1 - beta1**7) and sqrt(1 - beta2**7).
STEP, ROOT = np.float32(0.012864231), np.float32(0.44640513)

Floats = npt.NDArray[np.float32]

LAYOUT = Layout(
    tensors=(
        TensorSpec("optim/state/a/exp_avg", (200,), "float32", Kind.MOMENT1, "optim:0"),
        TensorSpec("optim/state/a/exp_avg_sq", (200,), "float32", Kind.MOMENT2, "optim:0"),
        TensorSpec("model/bare", (24,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/a", (200,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("optim/state/b/exp_avg", (90,), "float32", Kind.MOMENT1, "optim:0"),
        TensorSpec("optim/state/b/exp_avg_sq", (90,), "float32", Kind.MOMENT2, "optim:0"),
        TensorSpec("model/b", (90,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/n", (2,), "int64", Kind.AUX),
    ),
    chunks=(
        LayoutChunk(Kind.MOMENT1, "float32", 0, 800, (Piece(0, 0, 200, 0),)),
        LayoutChunk(Kind.MOMENT2, "float32", 832, 800, (Piece(1, 0, 200, 0),)),
        LayoutChunk(Kind.WEIGHT, "float32", 1664, 928, (Piece(2, 0, 24, 0), Piece(3, 0, 200, 128))),
        LayoutChunk(Kind.MOMENT1, "float32", 2624, 360, (Piece(4, 0, 90, 0),)),
        LayoutChunk(Kind.MOMENT2, "float32", 3008, 360, (Piece(5, 0, 90, 0),)),
        LayoutChunk(Kind.WEIGHT, "float32", 3392, 360, (Piece(6, 0, 90, 0),)),
        LayoutChunk(Kind.AUX, "int64", 3776, 16, (Piece(7, 0, 2, 0),)),
    ),
    size_bytes=3792,
)
RUNS = {
    1: (MomentRun(0, 1, 0, 0, 800),),
    2: (MomentRun(0, 1, 0, 128, 800),),
    4: (MomentRun(3, 4, 0, 0, 360),),
    5: (MomentRun(3, 4, 0, 0, 360),),
}
# NaNs with payloads, infinities, zeros, numbers below the smallest normal one, the largest.
SPECIAL = [0x7FC12345, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0]


def spread(count: int, seed: int) -> Floats:
    """Return numbers in [-1, 1) that need no generator and no rounding."""
    words = (np.arange(1, count + 1, dtype=np.uint64) * 2654435761 + seed * 40503) & 0xFFFFFFFF
    return ((words >> 8).astype(np.float32) - 2**23) / np.float32(2**23)


def states() -> tuple[list[Bytes], list[Bytes]]:
    """Return the chunks before and after; numpy's float32 + - * / and square root are IEEE's everywhere."""
    before: list[Bytes] = []
    after: list[Bytes] = []
    for count, bare in ((200, 32), (90, 0)):
        m, g, w = (spread(count, seed) for seed in (count, count + 1, count + 2))
        v, more = m * m, spread(bare, 3)
        m1 = m + (g - m) * np.float32(0.125)
        v1 = v * np.float32(0.96875) + g * g * np.float32(0.03125)
        w1 = w * np.float32(0.9990234375) - STEP * m1 / (np.sqrt(v1) / ROOT + np.float32(1e-8))
        more[24:] = 0  # a gap, not a tensor
        for old, new in ((m, m1), (v, v1), (np.append(more, w), np.append(more, w1))):
            some = new.view(np.uint32)[bare + 5 :: 11]
            some[:] = np.resize(np.array(SPECIAL, np.uint32), some.size)
            before.append(old.view(np.uint8))
            after.append(new.view(np.uint8))
    before.append(np.array([3, -1], np.int64).view(np.uint8))
    after.append(np.array([4, -1], np.int64).view(np.uint8))
    return before, after


def chunks_of(step: int, state: Sequence[Bytes], update: AdamUpdate) -> list[Chunk]:
    chunks = []
    for part, (place, data) in enumerate(zip(LAYOUT.chunks, state, strict=True)):
        hint = UpdateHint(update, RUNS[part]) if part in RUNS else None
        key = base_chunk_key(part)
        chunks.append(
            Chunk(step, key, place.kind, -1, part, LAYOUT.hash, place.dtype, data.nbytes, data, hint=hint)
        )
    return chunks


def packed(step: int, chunks: Sequence[Chunk]) -> bytes:
    identity = PackIdentity(PackKind.STATE, "run-a", INC, step)
    header = {"layout": LAYOUT.hash, "tree": {}}
    return b"".join(bytes(part) for part in pack_parts(identity, header, chunks).parts)


def written() -> dict[str, bytes]:
    """Return the three packs as this version writes them."""

    async def told() -> list[Chunk]:
        stages: list[ChunkStage] = [PredictiveStage(), Shard()]
        for chunks in (first, second):
            sent = []
            for chunk in chunks:
                for stage in stages:
                    chunk = await stage.save(chunk, Here())
                sent.append(chunk)
        return sent

    before, after = states()
    first = chunks_of(40, before, replace(UPDATE, count=UPDATE.count - 1))
    second = chunks_of(41, after, UPDATE)
    return {
        "state-before.pack": packed(40, first),
        "state-predicted.pack": packed(41, asyncio.run(told())),
        "state-after.pack": packed(41, second),
    }


async def read(before: bytes, data: bytes) -> tuple[dict[str, bytes], list[Chunk]]:
    """Read a save and the one before: raw chunks by key, and the chunks as they are stored."""
    stages, found, stored = reading_stages(), {}, []
    for pack in (before, data):
        reader = await PackReader.over(pack, "golden").open()
        assert [fault async for fault in reader.verify_all()] == []
        stored = [await reader.chunk(key, LAYOUT) for key in reader.rows]
        found = {chunk.key: (await recover_chunk(chunk, stages, Here())).buffer.tobytes() for chunk in stored}
    return found, stored


@pytest.mark.parametrize("name", ["state-before.pack", "state-after.pack"])
def test_the_golden_states_are_what_they_were(name: str) -> None:
    assert (GOLDEN / name).read_bytes() == written()[name], "the format changed: bump the version"


async def test_the_golden_predicted_pack_of_format_1_is_still_read() -> None:
    before, predicted, after = (
        (GOLDEN / f"state-{name}.pack").read_bytes() for name in ("before", "predicted", "after")
    )
    found, stored = await read(before, predicted)
    wanted, raw = await read(before, after)
    assert found == wanted
    assert list(found) == [base_chunk_key(part) for part in range(len(LAYOUT.chunks))]
    assert not any(chunk.encodings for chunk in raw)
    told = [chunk.encodings[-1].get("predicts") for chunk in stored]
    assert told == [None, "variance", "weight", None, "variance", "weight", None]


async def test_it_is_told_as_this_version_tells_it() -> None:
    """Frames may come out otherwise, what a reader goes by not."""
    before = (GOLDEN / "state-before.pack").read_bytes()
    found, then = await read(before, (GOLDEN / "state-predicted.pack").read_bytes())
    again, now = await read(before, await asyncio.to_thread(lambda: written()["state-predicted.pack"]))
    assert found == again
    for old, new in zip(then, now, strict=True):
        assert (old.key, old.kind, len(old.encodings)) == (new.key, new.kind, len(new.encodings))
        for one, other in zip(old.encodings, new.encodings, strict=True):
            numbers = {key for key, value in one.items() if isinstance(value, float)}
            assert {key: other[key] for key in other.keys() - numbers} == {
                key: one[key] for key in one.keys() - numbers
            }
            # Powers are the writer's alone, and its C library's.
            assert [other[key] for key in sorted(numbers)] == pytest.approx(
                [one[key] for key in sorted(numbers)], rel=1e-14
            )
    assert sum(chunk.encodings[-1]["id"] == PREDICTIVE for chunk in now) == 4
