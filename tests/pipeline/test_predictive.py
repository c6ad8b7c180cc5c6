"""Differences against what an update predicts: exact for any bits, small after AdamW, never trusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_rig import Here
from torch import nn, optim

import stepwell
from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Kind
from stepwell.pipeline.capture_stage import CaptureStage
from stepwell.pipeline.captured import CapturedSave, SaveKind, StateCopy
from stepwell.pipeline.collected import Collected
from stepwell.pipeline.delta import OrderedDeltaStage, PredictiveStage
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.predictive import (
    PREDICTIVE,
    AdamUpdate,
    UpdateHint,
    VarianceRule,
    WeightRule,
    rule_from,
    rules_of,
    state_ratio,
)
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.slots import CopyPlan, LayoutMemory
from stepwell.pipeline.state_ranges import ranges_of, state_order

UPDATE = AdamUpdate(5, 1e-3, 0.9, 0.999, 1e-8, 0.01, True)
CHUNK_BYTES = 1 << 14
STATE_KINDS = (Kind.WEIGHT, Kind.MOMENT1, Kind.MOMENT2)

Make = Callable[[Iterator[nn.Parameter]], optim.Optimizer]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many threads on few processors only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Training:
    """A small language of squares: a model whose training has gradients of all sizes."""

    def __init__(
        self, make: Make = optim.AdamW, *, width: int = 96, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(32, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 8),
        ).to(dtype)  # fmt: skip
        self.optimizer = make(self.model.parameters())
        self.live = LiveState(self.model, self.optimizer, {}, rng=False)
        self.truth = torch.randn(32, 8)
        self.dtype = dtype
        self.saves = 0
        self.layout: Layout | None = None

    def update(self) -> None:
        x = torch.randn(64, 32)
        y = torch.tanh(x @ self.truth)
        self.optimizer.zero_grad()
        (self.model(x.to(self.dtype)) - y.to(self.dtype)).square().mean().backward()
        self.optimizer.step()

    def collected(self) -> Collected:
        return self.live.collect()

    async def chunks(self) -> list[Chunk]:
        """The raw chunks of a captured state, as the capture stage yields them."""
        collected = self.collected()
        plan = CopyPlan(plan_layout(collected.specs, chunk_bytes=CHUNK_BYTES))
        memory = LayoutMemory(torch.empty(plan.layout.size_bytes, dtype=torch.uint8), plan)
        memory.copy_from(collected.tensors)
        self.layout = plan.layout
        self.saves += 1
        captured = CapturedSave(
            self.saves, SaveKind.STATE, None, (), None, StateCopy(memory, collected.tree), None, 0
        )
        return [chunk async for chunk in CaptureStage().chunks(captured)]


class Pipeline:
    """The stages of one life, and a reader who has only what they sent."""

    def __init__(self, delta: ChunkStage | None = None) -> None:
        self.stages: list[ChunkStage] = [delta or PredictiveStage(), Shard()]
        self.reader = reading_stages()
        self.sent: list[Chunk] = []

    async def save(self, chunks: list[Chunk]) -> list[Chunk]:
        self.sent = []
        for chunk in chunks:
            before = chunk.buffer.copy()
            sent = chunk
            for stage in self.stages:
                sent = await stage.save(sent, Here())
            assert np.array_equal(chunk.buffer, before), "a stage must not write into what it was given"
            if not sent.encodings:
                sent = replace(sent, buffer=sent.buffer.copy())
            self.sent.append(sent)
        return self.sent

    async def check(self, chunks: list[Chunk]) -> None:
        """Send a save and read it back: the same bits."""
        for raw, sent in zip(chunks, await self.save(chunks), strict=True):
            back = await recover_chunk(replace(sent, hint=None), self.reader, Here())
            assert np.array_equal(back.buffer, raw.buffer), raw.key

    def predicted(self) -> set[Kind]:
        return {chunk.kind for chunk in self.sent if any(e["id"] == PREDICTIVE for e in chunk.encodings)}

    def ratio(self) -> float:
        """Raw by stored bytes of weights and moments."""
        state = [chunk for chunk in self.sent if chunk.kind in STATE_KINDS]
        return sum(chunk.raw_bytes for chunk in state) / sum(chunk.buffer.nbytes for chunk in state)


async def test_a_step_of_adamw_shrinks_to_a_third_of_a_third() -> None:
    training, pipeline = Training(width=256), Pipeline()
    for _ in range(60):
        training.update()
    await pipeline.check(await training.chunks())
    ratios = []
    for _ in range(3):
        training.update()
        await pipeline.check(await training.chunks())
        assert pipeline.predicted() == {Kind.MOMENT2, Kind.WEIGHT}
        ratios.append(pipeline.ratio())
    plain = Pipeline(OrderedDeltaStage())
    await plain.check(await training.chunks())
    training.update()
    await plain.check(await training.chunks())
    print(f"predictive {min(ratios):.3f} to {max(ratios):.3f}, ordered_delta {plain.ratio():.3f}")
    assert min(ratios) >= 3.0
    assert min(ratios) > 1.5 * plain.ratio()


@pytest.mark.parametrize(
    "make",
    [
        partial(optim.AdamW, weight_decay=0.0),
        partial(optim.AdamW, fused=True),
        partial(optim.AdamW, foreach=False, betas=(0.8, 0.95)),
        partial(optim.Adam, weight_decay=0.1),
    ],
)
async def test_its_relatives_shrink_as_well(make: Make) -> None:
    training, pipeline = Training(make, width=256), Pipeline()
    for _ in range(40):
        training.update()
    await pipeline.check(await training.chunks())
    training.update()
    await pipeline.check(await training.chunks())
    assert pipeline.predicted() == {Kind.MOMENT2, Kind.WEIGHT}
    assert pipeline.ratio() >= 3.0


async def test_a_schedule_that_steps_before_the_save_is_seen_through() -> None:
    """The group then has the lr of the next update; the save before has this one's."""
    training, pipeline = Training(width=256), Pipeline()
    schedule = optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    for _ in range(40):
        training.update()
    for after in (True, True, True, False, False):
        training.update()
        schedule.step()
        if not after:
            # Now the lr is set before the update, by hand.
            training.update()
        await pipeline.check(await training.chunks())
        if after and training.saves > 1:
            assert pipeline.predicted() == {Kind.MOMENT2, Kind.WEIGHT}
            assert pipeline.ratio() >= 3.0
    for _ in range(3):
        training.optimizer.param_groups[0]["lr"] *= 0.9
        training.update()
        await pipeline.check(await training.chunks())
        assert pipeline.predicted() == {Kind.MOMENT2, Kind.WEIGHT}
        assert pipeline.ratio() >= 3.0


@pytest.mark.parametrize("lie", ["lr", "betas", "decay", "count"])
async def test_wrong_numbers_only_cost_bytes(lie: str) -> None:
    training, pipeline = Training(), Pipeline()
    for _ in range(5):
        training.update()
    for _ in range(4):
        chunks = []
        for chunk in await training.chunks():
            if chunk.hint is not None:
                update, hint = chunk.hint.update, chunk.hint
                wrong = {
                    "lr": replace(update, lr=1e30),
                    "betas": replace(update, beta1=0.0, beta2=0.5),
                    "decay": replace(update, weight_decay=1e6, decoupled=True),
                    "count": replace(update, count=update.count + 1000),
                }[lie]
                chunk = replace(chunk, hint=replace(hint, update=wrong))
            chunks.append(chunk)
        await pipeline.check(chunks)
        training.update()


# Fallbacks.


def sgd(parameters: Iterator[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def own(parameters: Iterator[nn.Parameter]) -> optim.Optimizer:
    class Own(optim.AdamW):
        pass

    return Own(parameters)


def tensor_lr(parameters: Iterator[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=torch.tensor(1e-3))


def once(training: Training) -> None:
    training.update()


def twice(training: Training) -> None:
    training.update()
    training.update()


def never(training: Training) -> None:
    assert training.saves


def one_left_out(training: Training) -> None:
    """The step counts of tensors that share chunks come apart."""
    x = torch.randn(4, 32)
    training.optimizer.zero_grad()
    training.model(x).square().mean().backward()
    for parameter in training.model[2].parameters():
        parameter.grad = None
    training.optimizer.step()


@pytest.mark.parametrize(
    ("make", "between", "dtype"),
    [
        (partial(optim.AdamW, amsgrad=True), once, torch.float32),
        (partial(optim.AdamW, maximize=True), once, torch.float32),
        (tensor_lr, once, torch.float32),
        (own, once, torch.float32),
        (sgd, once, torch.float32),
        (optim.NAdam, once, torch.float32),
        (optim.AdamW, once, torch.bfloat16),
        (optim.AdamW, once, torch.float64),
        (optim.AdamW, twice, torch.float32),
        (optim.AdamW, never, torch.float32),
    ],
)
async def test_what_cannot_be_predicted_is_told_as_ordered_delta_tells_it(
    make: Make, between: Callable[[Training], None], dtype: torch.dtype
) -> None:
    training, pipeline, plain = Training(make, dtype=dtype), Pipeline(), Pipeline(OrderedDeltaStage())
    for _ in range(3):
        training.update()
    for _ in range(3):
        chunks = await training.chunks()
        await pipeline.check(chunks)
        await plain.check(chunks)
        assert pipeline.predicted() == set()
        for mine, theirs in zip(pipeline.sent, plain.sent, strict=True):
            assert mine.encodings == theirs.encodings
            assert np.array_equal(mine.buffer, theirs.buffer)
        between(training)


async def test_where_step_counts_differ_only_that_chunk_falls_back() -> None:
    training, pipeline = Training(), Pipeline()
    for _ in range(3):
        training.update()
    await pipeline.check(await training.chunks())
    one_left_out(training)
    chunks = await training.chunks()
    await pipeline.check(chunks)
    hinted = {chunk.key for chunk in chunks if chunk.hint is not None}
    predicted = {c.key for c in pipeline.sent if any(e["id"] == PREDICTIVE for e in c.encodings)}
    assert predicted
    assert predicted <= hinted < {c.key for c in chunks if c.kind in STATE_KINDS}


async def test_another_layout_begins_anew() -> None:
    training, pipeline = Training(), Pipeline()
    training.update()
    await pipeline.check(await training.chunks())
    late = nn.Parameter(torch.ones(7))
    training.model.register_parameter("late", late)
    training.optimizer.add_param_group({"params": [late]})
    training.update()
    await pipeline.check(await training.chunks())
    assert not any(e.get("reference") for chunk in pipeline.sent for e in chunk.encodings)
    training.update()
    await pipeline.check(await training.chunks())
    assert pipeline.predicted()
    assert training.layout is not None
    assert "model/late" in training.layout.index_of


async def test_every_part_comes_once_and_ranges_stay_together() -> None:
    training = Training()
    training.update()
    chunks = await training.chunks()
    layout = training.layout
    assert layout is not None
    order = state_order(layout)
    assert sorted(order) == list(range(len(layout.chunks)))
    assert [chunk.part for chunk in chunks] == order
    ranges = {one.weight: one for one in ranges_of(layout).values()}
    assert len(ranges) == sum(chunk.kind is Kind.WEIGHT for chunk in layout.chunks)
    for one in ranges.values():
        place = order.index(one.momentum)
        assert tuple(order[place : place + 3]) == one.parts
        kinds = [layout.chunks[part].kind for part in one.parts]
        assert kinds == [Kind.MOMENT1, Kind.MOMENT2, Kind.WEIGHT]


async def test_memory_is_that_of_one_state_and_one_chunk() -> None:
    training, stage = Training(), PredictiveStage()
    pipeline = Pipeline(stage)
    for _ in range(4):
        training.update()
        chunks = await training.chunks()
        await pipeline.check(chunks)
    held = [kept[2] for kept in stage._reference.values()]
    assert stage._held is not None
    assert len({buffer.ctypes.data for buffer in [*held, stage._held.buffer]}) == len(held) + 1
    assert sum(buffer.nbytes for buffer in held) == sum(chunk.raw_bytes for chunk in chunks)


# Any bits.

SPECIAL = [
    *(0, 1, 0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FC00000, 0xFFFFFFFF),
]
words = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))
doubles = st.floats(allow_nan=False, allow_infinity=False)
betas = st.floats(0, 1, exclude_max=True)


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Bytes], AdamUpdate]:
    count = draw(st.integers(1, 40))
    arrays = [draw(st.lists(words, min_size=count, max_size=count)) for _ in range(6)]
    update = AdamUpdate(
        draw(st.integers(2, 1 << 24)), draw(doubles), draw(betas), draw(betas), draw(doubles), draw(doubles),
        draw(st.booleans()),
    )  # fmt: skip
    return [np.array(array, np.uint32).view(np.uint8) for array in arrays], update


def chunk_of(step: int, kind: Kind, part: int, buffer: Bytes, update: AdamUpdate) -> Chunk:
    hint = UpdateHint(update, "state/0", "state/1")
    return Chunk(step, f"state/{part}", kind, -1, part, "layout", "float32", buffer.nbytes, buffer, hint=hint)


def chunks_of(step: int, m: Bytes, v: Bytes, w: Bytes, update: AdamUpdate) -> list[Chunk]:
    kinds = (Kind.MOMENT1, Kind.MOMENT2, Kind.WEIGHT)
    return [chunk_of(step, kind, i, data, update) for i, (kind, data) in enumerate(zip(kinds, (m, v, w)))]  # noqa: B905


@settings(max_examples=150, deadline=None)
@given(states())
async def test_any_bits_come_back(state: tuple[list[Bytes], AdamUpdate]) -> None:
    (m0, v0, w0, m1, v1, w1), update = state
    before = replace(update, count=update.count - 1)
    with pytest.MonkeyPatch.context() as patch:
        # Small things are rarely worth a prediction; here they have to be predicted.
        patch.setattr("stepwell.pipeline.delta.cheapest", lambda *arguments: next(iter(arguments[-1])))
        pipeline = Pipeline()
        await pipeline.check(chunks_of(1, m0, v0, w0, before))
        await pipeline.check(chunks_of(2, m1, v1, w1, update))
        assert Kind.MOMENT2 in pipeline.predicted()
        await pipeline.check(chunks_of(3, m0, v0, w0, replace(update, count=update.count + 1)))


@given(states())
@settings(max_examples=50, deadline=None)
def test_a_prediction_has_no_nan_of_its_own(state: tuple[list[Bytes], AdamUpdate]) -> None:
    """The bits of a NaN that arithmetic makes differ between processors."""
    (m0, v0, w0, m1, v1, _), update = state
    for rule, before, one, two in [
        *((rule, v0, m0, m1) for rule in rules_of(VarianceRule, [update])),
        *((rule, w0, m1, v1) for rule in rules_of(WeightRule, [update])),
    ]:
        found = rule.predict(before, one, two)
        nan = np.isnan(found.view(np.float32))
        assert np.array_equal(found.view(np.uint32)[nan], before.view(np.uint32)[nan])


def test_flushing_denormals_changes_no_prediction() -> None:
    tiny = np.float32(1e-41) * np.arange(1, 100, dtype=np.float32)
    rule = VarianceRule(0.9, 0.999)
    wanted = rule.predict(*(tiny.view(np.uint8),) * 3).copy()
    assert wanted.view(np.float32).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert np.array_equal(rule.predict(*(tiny.view(np.uint8),) * 3), wanted)
        assert (torch.full((1,), 1e-40) * 0.5).item() == 0.0, "it must be on again"
    finally:
        torch.set_flush_denormal(False)


def test_predictions_are_these_bits_on_any_machine() -> None:
    """Each operation rounded once, as doubles show; where that fails, what others wrote cannot be read."""
    draw = np.random.default_rng(7)
    w, m0, m1 = (draw.integers(-(1 << 23), 1 << 23, 200_000).astype(np.float32) / 2**20 for _ in range(3))
    v = np.abs(m0 * m1)
    raw_w, raw_m0, raw_m1, raw_v = (x.view(np.uint8) for x in (w, m0, m1, v))
    variance = VarianceRule(0.9, 0.999).predict(raw_v, raw_m0, raw_m1)
    weight = WeightRule(0.99999, 0.0024, 0.0706, 1e-8).predict(raw_w, raw_m1, variance)

    def once(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        # A double has more than twice the bits: rounding its result again rounds as if only once.
        return np.asarray(values).astype(np.float32).astype(np.float64)

    w, m0, m1, v = (once(x) for x in (w, m0, m1, v))
    gradient = once(m0 + once(once(m1 - m0) / once(1 - 0.9)))
    v = once(once(v * once(0.999)) + once(once(gradient * once(1 - 0.999)) * gradient))
    below = once(once(once(np.sqrt(v)) / once(0.0706)) + once(1e-8))
    w = once(once(w * once(0.99999)) + once(once(m1 * once(-0.0024)) / below))
    assert np.array_equal(variance.view(np.float32), v)
    assert np.array_equal(weight.view(np.float32), w)
    found = [xxhash.xxh3_64_hexdigest(x.data) for x in (variance, weight)]
    assert found == ["73378b6861e4991c", "24dc51fbbce6993f"]


# What is damaged.


async def two_saves() -> tuple[list[Chunk], list[Chunk]]:
    training, pipeline = Training(), Pipeline()
    training.update()
    first = await pipeline.save(await training.chunks())
    training.update()
    second = await pipeline.save(await training.chunks())
    assert pipeline.predicted() == {Kind.MOMENT2, Kind.WEIGHT}
    return first, second


DAMAGE: list[Mapping[str, object]] = [
    {"xxh3": "0" * 16},
    {"xxh3": None},
    {"predicts": "weather"},
    {"predicts": ["weight"]},
    {"from": []},
    {"from": "state/0"},
    {"from": ["state/0", "state/1", "state/2"]},
    {"from": ["nothing", "nothing"]},
    {"from": [["state/0"], {}]},
    {"beta1": 0.5, "step": 0.5},
    {"beta1": "0.9", "step": "0.9"},
    {"beta1": True, "step": True},
    {"beta1": 10**400, "step": 10**400},
    {"beta1": float("nan"), "step": float("inf")},
    {"beta1": None, "step": None},
]


@pytest.mark.parametrize("kind", [Kind.MOMENT2, Kind.WEIGHT])
@pytest.mark.parametrize("damage", DAMAGE, ids=str)
async def test_a_damaged_encoding_is_an_error(kind: Kind, damage: Mapping[str, object]) -> None:
    first, second = await two_saves()
    reader = reading_stages()
    for chunk in first:
        await recover_chunk(chunk, reader, Here())
    for chunk in second:
        if chunk.kind is kind and chunk.encodings[-1]["id"] == PREDICTIVE:
            bad = replace(chunk, encodings=({**chunk.encodings[-1], **damage},))
            with pytest.raises(IntegrityError, match=f"step {chunk.step}, chunk {chunk.key}"):
                await recover_chunk(bad, reader, Here())
            return
        await recover_chunk(chunk, reader, Here())
    pytest.fail("nothing was predicted")


async def test_what_was_not_read_before_is_an_error() -> None:
    first, second = await two_saves()
    predicted = [chunk for chunk in second if chunk.encodings[-1]["id"] == PREDICTIVE]
    for chunk in predicted:
        with pytest.raises(IntegrityError, match="was not read"):
            await recover_chunk(chunk, reading_stages(), Here())
    reader = reading_stages()
    for chunk in first:
        await recover_chunk(chunk, reader, Here())
    for chunk in predicted:
        # Their momentum is that of the save before.
        with pytest.raises(IntegrityError, match="was not read"):
            await recover_chunk(chunk, reader, Here())


async def test_a_wrong_reference_is_seen() -> None:
    first, second = await two_saves()
    reader = reading_stages()
    for chunk in first:
        raw = await recover_chunk(chunk, reader, Here())
        if raw.kind is Kind.WEIGHT:
            wrong = raw.buffer.copy()
            wrong[0] ^= 1
            await recover_chunk(replace(raw, buffer=wrong), reader, Here())
    seen = 0
    for chunk in second:
        if chunk.kind is Kind.WEIGHT and chunk.encodings[-1]["id"] == PREDICTIVE:
            with pytest.raises(IntegrityError, match="not what was saved"):
                await recover_chunk(chunk, reader, Here())
            seen += 1
        else:
            await recover_chunk(chunk, reader, Here())
    assert seen


def test_rules_survive_json() -> None:
    for kind in (VarianceRule, WeightRule):
        (rule,) = rules_of(kind, [UPDATE])
        assert rule_from(json.loads(json.dumps({"predicts": rule.name, **rule.numbers}))) == rule
    assert rules_of(WeightRule, [replace(UPDATE, lr=1e308, weight_decay=1e308)]) == []


def test_the_ratio_of_three_arrays() -> None:
    training = Training(width=256)
    for _ in range(40):
        training.update()
    before = arrays_of(training)
    training.update()
    group = training.optimizer.param_groups[0]
    update = AdamUpdate.of("torch.optim.adamw:AdamW", group, 41.0)
    assert update is not None
    assert state_ratio(before, arrays_of(training), update) >= 3.0
    assert state_ratio(before, arrays_of(training), replace(update, lr=1.0)) < 2.5


def arrays_of(training: Training) -> list[npt.NDArray[np.float32]]:
    weight = training.model[3].weight
    state = training.optimizer.state[weight]
    return [x.detach().numpy().copy() for x in (weight, state["exp_avg"], state["exp_avg_sq"])]


# The whole of it.


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8))


def bits_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, bytes]:
    found = {name: tensor.detach().numpy().tobytes() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = value.numpy().tobytes()
    return found


def config(path: Path) -> dict[str, object]:
    return {
        "tiers": [{"kind": "directory", "path": str(path)}],
        "pipeline": [{"capture": "state"}, {"delta": "predictive"}, "shard", "replicate", "commit"],
        "base_every": 100,
        "log_budget": 1000.0,
        "chunk_bytes": 8192,
    }


def test_a_run_of_states_is_restored_and_viewed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    wanted = {}
    with stepwell.open_sync(config(tmp_path / "run"), model=model, optimizer=optimizer) as well:
        for step in range(12):
            x = torch.randn(16, 32)
            optimizer.zero_grad()
            (model(x) - x[:, :8].tanh()).square().mean().backward()
            optimizer.step()
            schedule.step()
            well.save(step)
            wanted[step] = bits_of(model, optimizer)
        well.wait_until_finished(60)
        # As it is in the middle of the run: an orderly end may write a base of the last step.
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
    packs = sorted((tmp_path / "copy").glob("*/step/*/*.pack"))
    assert any(b'"stepwell.predictive"' in pack.read_bytes() for pack in packs)

    group = {
        step: zarr.open_group(stepwell.view(config(tmp_path / "copy"), step), mode="r") for step in (7, 11)
    }
    for step, opened in group.items():
        for name in ("3.weight", "0.bias"):
            array = opened[f"model/{name}"]
            assert isinstance(array, zarr.Array)
            assert np.asarray(array[...]).tobytes() == wanted[step][name]
            for key in ("exp_avg", "exp_avg_sq"):
                array = opened[f"optim/state/{name}/{key}"]
                assert isinstance(array, zarr.Array)
                assert np.asarray(array[...]).tobytes() == wanted[step][f"{name}/{key}"]

    torch.manual_seed(2)
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=1.0)
    with stepwell.open_sync(config(tmp_path / "copy"), model=model, optimizer=optimizer) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.exact, restored.faults) == (11, True, ())
        assert bits_of(model, optimizer) == wanted[11]
