"""What is a cast of its masters is stored as that and read back as it was; whatever is not, as ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_rig import Here
from masters_rig import Masters, derived, halves
from predictive_rig import Pipeline

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Kind
from stepwell.pipeline.cast_pairs import CapturedRun
from stepwell.pipeline.casts import DERIVED, cast_into
from stepwell.pipeline.delta import DifferenceStage, NoDelta, OrderedDeltaStage, PredictiveStage
from stepwell.pipeline.derive import Derive, may_derive
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.quantize import Quantize
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard

DELTAS: dict[str, Callable[[], ChunkStage]] = {
    "none": NoDelta,
    "ordered_delta": OrderedDeltaStage,
    "predictive": PredictiveStage,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many threads on few processors only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pipeline(delta: str = "ordered_delta") -> Pipeline:
    made = Pipeline(DELTAS[delta]())
    made.stages.insert(0, Derive())
    return made


def stored(sent: list[Chunk], keys: set[str]) -> int:
    return sum(chunk.buffer.nbytes for chunk in sent if chunk.key in keys)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("where", ["optimizer", "state", "extra"])
async def test_copies_of_masters_cost_nothing(where: str, delta: str) -> None:
    training, lines, plain = Masters(where), pipeline(delta), Pipeline(DELTAS[delta]())
    for _ in range(6):
        training.update()
        chunks = await training.chunks()
        await lines.check(chunks)
        await plain.check(chunks)
        assert derived(lines.sent) == halves(chunks)
        assert stored(lines.sent, halves(chunks)) == 0
        assert stored(plain.sent, halves(chunks)) > 0
        for mine, other in zip(lines.sent, plain.sent, strict=True):
            if mine.key not in halves(chunks):
                assert mine.encodings == other.encodings
                assert np.array_equal(mine.buffer, other.buffer)


async def test_half_precision_of_the_other_kind_as_well() -> None:
    training, lines = Masters(dtype=torch.float16), pipeline()
    for _ in range(3):
        training.update()
        chunks = await training.chunks()
        await lines.check(chunks)
        assert derived(lines.sent) == halves(chunks)


async def test_a_copy_that_is_not_the_cast_goes_the_usual_way_and_comes_back() -> None:
    training, lines = Masters(width=256), pipeline()
    training.update()
    await lines.check(await training.chunks())
    wanted = derived(lines.sent)
    before: set[str] = set()
    for spoil in ("one bit", "all of it", "nothing", "all of it", "all of it"):
        training.update()
        with torch.no_grad():
            weight = training.weights[4].view(torch.int16)
            if spoil == "one bit":
                weight[-1, -1] ^= 1
            elif spoil == "all of it":
                weight ^= 1
        chunks = await training.chunks()
        await lines.check(chunks)
        layout, fell_back = training.layout, wanted - derived(lines.sent)
        place = layout.index_of["model/3.weight"]
        cuts = [f"state/{part}" for part, c in enumerate(layout.chunks) if c.pieces[0].tensor == place]
        assert len(cuts) > 1
        assert (
            fell_back
            == {
                "one bit": {cuts[-1]},
                "all of it": set(cuts),
                "nothing": set(),
            }[spoil]
        )
        for chunk in lines.sent:
            if chunk.key in fell_back:
                # Nothing is told against what was a cast in the save before.
                told = any(encoding.get("reference") == "previous" for encoding in chunk.encodings)
                assert told is (chunk.key in before)
        before = fell_back


async def test_a_tensor_without_master_does_not_spoil_the_chunk_it_shares() -> None:
    training, lines = Masters(), pipeline()
    alone = torch.nn.Parameter(torch.randn(130).bfloat16(), requires_grad=False)
    training.model.register_parameter("alone", alone)
    for _ in range(3):
        training.update()
        chunks = await training.chunks()
        await lines.check(chunks)
        assert derived(lines.sent) == halves(chunks)
        assert 0 < stored(lines.sent, halves(chunks)) <= 130 * 2 + 64


async def test_where_most_of_a_chunk_is_something_else_it_is_left_alone() -> None:
    training, lines = Masters(), pipeline()
    alone = torch.nn.Parameter(torch.randn(3000).bfloat16(), requires_grad=False)
    training.model.register_parameter("alone", alone)
    training.update()
    chunks = await training.chunks()
    await lines.check(chunks)
    place = training.layout.index_of["model/alone"]
    shared = [
        f"state/{part}"
        for part, chunk in enumerate(training.layout.chunks)
        if place in [piece.tensor for piece in chunk.pieces]
    ]
    assert set(shared) == halves(chunks) - derived(lines.sent)


async def test_without_masters_nothing_is_done() -> None:
    training, lines, plain = Masters("state"), pipeline(), Pipeline(OrderedDeltaStage())
    for _ in range(3):
        chunks = await training.chunks()
        await lines.check(chunks)
        await plain.check(chunks)
        assert not derived(lines.sent)
        assert [c.encodings for c in lines.sent] == [c.encodings for c in plain.sent]


# Any bits.

SPECIAL = [
    0,
    1,
    0x80000000,
    0x00018000,
    0x3F808000,
    0x3F818000,
    0x7F7FFFFF,
    0x7F800000,
    0x7F800001,
    0xFFFFFFFF,
]
words = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))


@st.composite
def states(draw: st.DrawFn) -> tuple[Layout, list[Bytes], set[int]]:
    """Runs of masters and copies in three saves; tensors of all lengths, and which copies are casts."""
    dtype = draw(st.sampled_from(["bfloat16", "float16"]))
    shapes = draw(st.lists(st.sampled_from([(), (1,), (7,), (32,), (64,), (3, 300)]), min_size=1, max_size=4))
    specs = [TensorSpec(f"m{i}", shape, "float32", Kind.AUX) for i, shape in enumerate(shapes)]
    specs += [TensorSpec(f"c{i}", shape, dtype, Kind.WEIGHT) for i, shape in enumerate(shapes)]
    layout = plan_layout(specs, chunk_bytes=1024)
    spoiled = draw(st.sets(st.integers(0, len(shapes) - 1), max_size=2))
    runs = []
    for _ in range(3):
        run = np.zeros(layout.size_bytes, np.uint8)
        for i, spec in enumerate(specs[: len(shapes)]):
            few = draw(st.lists(words, min_size=1, max_size=8))
            count = spec.element_count
            bits = np.resize(np.array(few, np.uint32), count)
            at, copy = layout.tensor_offsets[i], layout.tensor_offsets[i + len(shapes)]
            run[at : at + 4 * count] = bits.view(np.uint8)
            out = np.empty(2 * count, np.uint8)
            cast_into(bits.view(np.uint8), out, dtype)
            if i in spoiled:
                out[draw(st.integers(0, out.size - 1))] ^= 1 << draw(st.integers(0, 7))
            run[copy : copy + 2 * count] = out
        runs.append(run)
    return layout, runs, spoiled


def chunks_of(layout: Layout, run: Bytes, step: int) -> list[Chunk]:
    whole = CapturedRun(layout, run)
    return [
        Chunk(
            step, f"state/{part}", c.kind, -1, part, layout.hash, c.dtype, c.size_bytes,
            run[c.offset_bytes : c.offset_bytes + c.size_bytes],
            state=None if c.dtype == "float32" else whole,
        )
        for part, c in enumerate(layout.chunks)
    ]  # fmt: skip


@given(states(), st.sampled_from(sorted(DELTAS)))
@settings(max_examples=60, deadline=None)
async def test_any_bits_come_back(state: tuple[Layout, list[Bytes], set[int]], delta: str) -> None:
    layout, runs, spoiled = state
    lines = pipeline(delta)
    for step, run in enumerate(runs):
        chunks = chunks_of(layout, run, step)
        await lines.check(chunks)
        if not spoiled and all(math.prod(spec.shape) >= 32 for spec in layout.tensors):
            assert derived(lines.sent) == halves(chunks)


# Damage.


async def sent_once(delta: str = "none") -> tuple[list[Chunk], list[Chunk]]:
    training, lines = Masters(), pipeline(delta)
    training.update()
    chunks = await training.chunks()
    return chunks, await lines.save(chunks)


async def test_a_source_that_was_not_read_is_an_error() -> None:
    _, sent = await sent_once()
    stages = reading_stages()
    for chunk in sent:
        if chunk.encodings and chunk.encodings[0]["id"] == DERIVED:
            with pytest.raises(IntegrityError, match="that it is a cast of was not read"):
                await recover_chunk(chunk, stages, Here())


async def test_a_source_of_another_save_or_with_another_bit_is_an_error() -> None:
    _, sent = await sent_once()
    for damage in ("step", "bit"):
        stages = reading_stages()
        refused = 0
        for chunk in sent:
            if chunk.encodings and chunk.encodings[0]["id"] == DERIVED:
                with pytest.raises(
                    IntegrityError, match="was not read" if damage == "step" else "not what was"
                ):
                    await recover_chunk(chunk, stages, Here())
                refused += 1
                continue
            back = await recover_chunk(chunk, reading_stages(), Here())
            other = back.buffer.copy()
            # The upper half of a float32: what lies below may be rounded away.
            other[3::64] ^= 0x40
            step = chunk.step - 1 if damage == "step" else chunk.step
            buffer = other if damage == "bit" else back.buffer
            await recover_chunk(replace(back, step=step, buffer=buffer), stages, Here())
        assert refused


@pytest.mark.parametrize("change", ["longer", "casts", "xxh3", "twice"])
async def test_an_encoding_that_does_not_fit_is_an_error(change: str) -> None:
    _, sent = await sent_once()
    stages = reading_stages()
    for chunk in sent:
        if not chunk.encodings or chunk.encodings[0]["id"] != DERIVED:
            await recover_chunk(chunk, stages, Here())
            continue
        encoding = chunk.encodings[0]
        wrong = {
            "longer": replace(chunk, raw_bytes=1 << 38),
            "casts": replace(chunk, encodings=({**encoding, "casts": [[0, 0, 0, 1 << 40]]},)),
            "xxh3": replace(chunk, encodings=({**encoding, "xxh3": "0" * 16},)),
            "twice": replace(chunk, encodings=(encoding, encoding)),
        }[change]
        with pytest.raises(IntegrityError):
            await recover_chunk(wrong, stages, Here())
        return
    pytest.fail("nothing was derived")


async def test_a_difference_after_a_cast_has_nothing_to_be_told_against() -> None:
    """A writer never makes one; a reader refuses it."""
    _, sent = await sent_once()
    stages = reading_stages()
    for chunk in sent:
        await recover_chunk(chunk, stages, Here())
    copy = next(chunk for chunk in sent if chunk.encodings and chunk.encodings[0]["id"] == DERIVED)
    told = {"id": "stepwell.ordered_delta", "dtype": copy.dtype, "reference": "previous"}
    with pytest.raises(IntegrityError, match="was not read"):
        await recover_chunk(replace(copy, step=copy.step + 1, encodings=(told,)), stages, Here())


# Where it is, and where it is not.


class Foreign:
    """A third party's stage, which may do anything."""

    name = "foreign"

    async def save(self, chunk: Chunk, context: object) -> Chunk:
        return chunk

    async def recover(self, chunk: Chunk, context: object) -> Chunk:
        return chunk


def test_only_what_is_exact_and_ours_is_derived_from() -> None:
    assert may_derive([])
    assert all(may_derive([make()]) for make in DELTAS.values())
    assert not may_derive([DifferenceStage()])
    assert not may_derive([NoDelta(), Quantize()])
    assert not may_derive([Foreign()])


def test_readers_have_it_once_and_first() -> None:
    for configured in ([], [Derive(), NoDelta()], [Foreign()], [Derive(), PredictiveStage(), Foreign()]):
        stages = reading_stages(configured)
        places = [place for place, stage in enumerate(stages) if isinstance(stage, Derive)]
        assert len(places) == 1
        assert isinstance(stages[places[0] + 1], DifferenceStage)
        assert isinstance(stages[-1], Shard)
