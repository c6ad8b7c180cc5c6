"""Small saves of every kind that a pack can hold, told against one save before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.codecs.codebook import Codebook
from stepwell.codecs.int4 import Int4
from stepwell.codecs.int8 import Int8
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Encoding, Kind
from stepwell.pipeline.casts import DERIVED, CastRun, cast_into
from stepwell.pipeline.delta import OrderedDeltaStage, PredictiveStage
from stepwell.pipeline.layout import ITEM_BYTES, Layout, LayoutChunk, Piece, TensorSpec
from stepwell.pipeline.pack import PackIdentity, PackKind, base_chunk_key, pack_parts
from stepwell.pipeline.predictive import AdamUpdate, MomentRun, UpdateHint
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.values import DIFFERENCE, widened

__all__ = ["AFTER", "BEFORE", "IDENTITY", "LAYOUT", "Here", "chunk_of", "packs", "predicted_packs"]

Result = TypeVar("Result")
Floats = npt.NDArray[np.float32]

IDENTITY = PackIdentity(PackKind.STATE, "run-a", "000002-0123456789abcdef", 41)
UPDATE = AdamUpdate(5, 1e-2, 0.9, 0.99, 1e-8, 0.1, True)


class Here:
    """A stage context that works where it is awaited."""

    async def run(self, function: Callable[[], Result]) -> Result:
        return function()


def _layout() -> Layout:
    """Weights with moments beside one without; weights alone in their chunk; other types."""
    tensors: list[TensorSpec] = []
    chunks: list[LayoutChunk] = []
    offset = 0
    for kind, dtype, group, members in (
        (Kind.MOMENT1, "float32", "", [("optim/state/a/exp_avg", 300)]),
        (Kind.MOMENT2, "float32", "", [("optim/state/a/exp_avg_sq", 300)]),
        (Kind.WEIGHT, "float32", "optim:0", [("model/bare", 20), ("model/a", 300)]),
        (Kind.MOMENT1, "float32", "", [("optim/state/c/exp_avg", 180)]),
        (Kind.MOMENT2, "float32", "", [("optim/state/c/exp_avg_sq", 180)]),
        (Kind.WEIGHT, "float32", "optim:1", [("model/c", 180)]),
        (Kind.WEIGHT, "bfloat16", "optim:2", [("model/h", 101)]),
        (Kind.AUX, "float32", "", [("optim/state/a/step", 1), ("optim/state/c/step", 1)]),
        (Kind.AUX, "int64", "", [("model/n", 3)]),
    ):
        pieces, place, end = [], 0, 0
        for name, count in members:
            pieces.append(Piece(len(tensors), 0, count, place))
            tensors.append(TensorSpec(name, (count,), dtype, kind, group))
            end = place + count * ITEM_BYTES[dtype]
            place = end + -end % 64
        chunks.append(LayoutChunk(kind, dtype, offset, end, tuple(pieces)))
        offset += end + -end % 64
    return Layout(tuple(tensors), tuple(chunks), offset)


LAYOUT = _layout()
RUNS = {
    1: (MomentRun(0, 1, 0, 0, 1200),),
    2: (MomentRun(0, 1, 0, 128, 1200),),
    4: (MomentRun(3, 4, 0, 0, 720),),
    5: (MomentRun(3, 4, 0, 0, 720),),
}


def _updated(kind: Kind, old: Floats, gradient: Floats, moments: Sequence[Floats]) -> Floats:
    """Return what an update makes of a momentum, a variance, or the weight at the end of a chunk."""
    if kind is Kind.MOMENT1:
        return old + (gradient - old) * np.float32(1 - UPDATE.beta1)
    if kind is Kind.MOMENT2:
        return old * np.float32(UPDATE.beta2) + gradient * gradient * np.float32(1 - UPDATE.beta2)
    root = np.float32((1 - UPDATE.beta2**UPDATE.count) ** 0.5)
    step = np.float32(UPDATE.lr / (1 - UPDATE.beta1**UPDATE.count))
    momentum, variance = moments
    new = old * np.float32(1 - UPDATE.lr * UPDATE.weight_decay)
    new[-momentum.size :] -= step * momentum / (np.sqrt(variance) / root + np.float32(1e-8))
    return new


def _states() -> list[list[Bytes]]:
    """Return the chunks before an update, after it, and after one with values of all kinds."""
    draw = np.random.default_rng(11)
    states: list[list[Bytes]] = [[], [], []]
    moments: list[Floats] = []
    gradient = np.empty(0, np.float32)
    for chunk in LAYOUT.chunks:
        if chunk.dtype != "float32" or chunk.kind is Kind.AUX:
            before = draw.integers(0, 64, chunk.size_bytes, np.uint8)
            after, odd = before.copy(), before.copy()
            after[: 8 : ITEM_BYTES[chunk.dtype]] ^= 1
            odd[::-3] ^= 2
        else:
            old = draw.standard_normal(chunk.size_bytes // 4, np.float32) * np.float32(0.1)
            if chunk.kind is Kind.MOMENT1:
                gradient, moments = draw.standard_normal(old.size, np.float32), []
            elif chunk.kind is Kind.MOMENT2:
                old = old * old
            new = _updated(chunk.kind, old, gradient, moments)
            moments.append(new)
            special = new.copy()
            values = np.array([np.nan, np.inf, -0.0, 1e-42, -np.inf, 3e38], np.float32)
            special[3::40] = np.resize(values, special[3::40].size)
            before, after, odd = (x.view(np.uint8) for x in (old, new, special))
        for state, data in zip(states, (before, after, odd), strict=True):
            state.append(data)
    return states


def chunk_of(part: int, data: Bytes, step: int, encodings: tuple[Encoding, ...] = ()) -> Chunk:
    """Return a chunk in a place of ``LAYOUT``."""
    place, key = LAYOUT.chunks[part], base_chunk_key(part)
    return Chunk(
        step, key, place.kind, -1, part, LAYOUT.hash, place.dtype, data.nbytes, data, encodings
    )  # fmt: skip


_BEFORE, _AFTER, _ODD = _states()
BEFORE = [chunk_of(part, data, 40) for part, data in enumerate(_BEFORE)]
AFTER = [chunk_of(part, data, 41) for part, data in enumerate(_AFTER)]
"""The save before and the one after an update, raw."""


def _sent(state: Sequence[Bytes], delta: OrderedDeltaStage, update: AdamUpdate | None) -> list[Chunk]:
    """Tell a state by a stage that has seen the one before."""
    before = None if update is None else replace(update, count=update.count - 1)
    sent: list[Chunk] = []
    for step, told, how in ((40, _BEFORE, before), (41, state, update)):
        stages: list[ChunkStage] = [delta, Shard()]
        sent = []
        for part, data in enumerate(told):
            hint = UpdateHint(how, RUNS[part]) if how is not None and part in RUNS else None
            chunk = replace(chunk_of(part, data, step), hint=hint)
            for stage in stages:
                work = stage.save(chunk, Here())
                try:
                    work.send(None)
                except StopIteration as stop:
                    chunk = stop.value
            sent.append(replace(chunk, hint=None))
    return sent


def _lossy() -> Iterator[Chunk]:
    """Tell float32 chunks in all lossy ways, by value and by difference; a gradient in exact ways."""
    int8, sparse = Int8(block=64), ThresholdSparse(rate=0.1, values="int8")
    for part, codec, against in (
        (0, int8, True),
        (1, LogQuant(), False),
        (2, Int4(), True),
        (3, Codebook(), False),
        (5, sparse, True),
        (6, int8, True),
    ):
        dtype, old = LAYOUT.chunks[part].dtype, _BEFORE[part]
        raw = widened(_AFTER[part], dtype)
        encodings: tuple[Encoding, ...] = ()
        if against:
            raw = raw - widened(old, dtype)
            of = xxhash.xxh3_64_hexdigest(old.data)
            encodings = ({"id": DIFFERENCE, "dtype": "float32", "reference": "previous", "of": of},)
        frame = np.frombuffer(codec.encode(raw), np.uint8)
        yield replace(AFTER[part], buffer=frame, encodings=(*encodings, codec.get_config()))


def _gradients() -> Iterator[Chunk]:
    scaled = (_AFTER[5].view(np.uint32) & 0xFFFF0000).view(np.float32) * np.float32(0.3)
    for part, data in ((2, _AFTER[2]), (5, scaled.view(np.uint8)), (8, _AFTER[8])):
        raw = chunk_of(part, data, 41)
        chunk = replace(raw, key=f"update/0/{part}", kind=Kind.GRADIENT, update=0)
        work = Shard().save(chunk, Here())
        try:
            work.send(None)
        except StopIteration as stop:
            yield stop.value


def _casts(other: int) -> Chunk:
    """Return the halves as a cast of weights, but for the last `other` of them."""
    count = 101 - other
    raw = AFTER[6].buffer.copy()
    cast_into(AFTER[5].buffer[: 4 * count], raw[: 2 * count], "bfloat16")
    digest = xxhash.xxh3_64_hexdigest(raw.data)
    casts = CastRun(5, 0, 0, count).numbers
    encoding = {"id": DERIVED, "dtype": "bfloat16", "casts": [casts], "xxh3": digest}
    return replace(AFTER[6], buffer=raw[2 * count :], encodings=(encoding,))


def _packed(chunks: Sequence[Chunk]) -> bytes:
    return b"".join(bytes(part) for part in pack_parts(IDENTITY, {"tree": {}, "bound": 0.5}, chunks).parts)


def packs() -> tuple[bytes, ...]:
    """Return packs of every kind of a save after ``BEFORE``."""
    saves = (
        _sent(_AFTER, PredictiveStage(), UPDATE),
        _sent(_AFTER, OrderedDeltaStage(), None),
        [*_lossy(), *_gradients()],
        [*AFTER[:6], _casts(0)],
        [*AFTER[:6], _casts(40)],
    )
    return tuple(_packed(chunks) for chunks in saves)


def predicted_packs() -> tuple[bytes, ...]:
    """Return packs of a save after ``BEFORE`` that hold momentum and what is predicted from it, no more."""
    found = []
    wrong = replace(UPDATE, lr=1.2e-2, beta2=0.985)
    for state, update in ((_AFTER, UPDATE), (_ODD, UPDATE), (_AFTER, wrong)):
        chunks = _sent(state, PredictiveStage(), update)
        found += [_packed(chunks[:3]), _packed(chunks[3:6])]
    return tuple(found)
