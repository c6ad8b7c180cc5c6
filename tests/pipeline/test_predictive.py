"""Differences against what an update predicts: small after AdamW, told otherwise where it is not that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import zarr
from predictive_rig import STATE_KINDS, Make, Pipeline, Training
from torch import nn, optim

import stepwell
from stepwell.pipeline.base import Kind
from stepwell.pipeline.delta import OrderedDeltaStage, PredictiveStage
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.predictive import (
    PREDICTIVE,
    AdamUpdate,
    VarianceRule,
    WeightRule,
    rule_from,
    rules_of,
    state_ratio,
)
from stepwell.pipeline.state_ranges import ranges_of, state_order

UPDATE = AdamUpdate(5, 1e-3, 0.9, 0.999, 1e-8, 0.01, True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many threads on few processors only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    shares = ", ".join(f"{kind} {pipeline.share(kind):.3f}" for kind in STATE_KINDS)
    print(f"predictive {min(ratios):.3f} to {max(ratios):.3f} ({shares}), ordered_delta {plain.ratio():.3f}")
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
    ranges = ranges_of(layout)
    wanted = [part for part, c in enumerate(layout.chunks) if c.kind in (Kind.WEIGHT, Kind.MOMENT2)]
    assert sorted(ranges) == wanted
    for part, one in ranges.items():
        (run,) = one.runs
        assert (run.there, run.here, run.size_bytes) == (0, 0, layout.chunks[part].size_bytes)
        assert order.index(run.variance) == order.index(run.momentum) + 1
        assert order.index(part) >= order.index(run.variance)
        assert layout.chunks[run.momentum].kind is Kind.MOMENT1
        assert layout.chunks[run.variance].kind is Kind.MOMENT2


class Patchy(nn.Module):
    """Parameters without a gradient, and one without dimensions, among others that share their chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen0 = nn.Parameter(torch.randn(33), requires_grad=False)
        self.one = nn.Parameter(torch.randn(70, 17))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.two = nn.Parameter(torch.randn(17, 90))
        self.frozen1 = nn.Parameter(torch.randn(40, 70), requires_grad=False)
        self.frozen2 = nn.Parameter(torch.randn(9), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(90))
        self.large = nn.Parameter(torch.randn(90, 90))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.one @ self.two * self.scale + self.bias) @ self.large


async def test_tensors_without_moments_do_not_spoil_the_chunk_they_share() -> None:
    torch.manual_seed(0)
    model = Patchy()
    optimizer = optim.AdamW(model.parameters())
    training, pipeline = Training(), Pipeline()
    training.live = LiveState(model, optimizer, {}, rng=False)
    for _ in range(4):
        for _ in range(10 if not training.saves else 1):
            optimizer.zero_grad()
            model(torch.randn(16, 70)).tanh().square().mean().backward()
            optimizer.step()
        chunks = await training.chunks()
        await pipeline.check(chunks)
    layout = training.layout
    assert layout is not None
    assert any(len(one.runs) > 1 for one in ranges_of(layout).values())
    told = {chunk.key: chunk for chunk in pipeline.sent}
    for chunk in chunks:
        if chunk.kind is Kind.WEIGHT:
            assert told[chunk.key].encodings[-1]["id"] == PREDICTIVE
            assert told[chunk.key].buffer.nbytes < 0.1 * chunk.raw_bytes


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


def config(path: Path, base_every: int) -> dict[str, object]:
    return {
        "tiers": [{"kind": "directory", "path": str(path)}],
        "pipeline": [{"capture": "state"}, {"delta": "predictive"}, "shard", "replicate", "commit"],
        "base_every": base_every,
        "log_budget": 1e9,
        "chunk_bytes": 8192,
    }


@pytest.mark.parametrize("base_every", [5, 100])
def test_a_run_of_states_is_restored_and_viewed(tmp_path: Path, base_every: int) -> None:
    """Told from the first save on, or from a base on the way."""
    settings = config(tmp_path / "run", base_every)
    torch.manual_seed(1)
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    wanted = {}
    with stepwell.open_sync(settings, model=model, optimizer=optimizer) as well:
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
    settings = config(tmp_path / "copy", base_every)
    packs = sorted((tmp_path / "copy").glob("*/step/*/*.pack"))
    assert any(b'"stepwell.predictive"' in pack.read_bytes() for pack in packs)

    group = {step: zarr.open_group(stepwell.view(settings, step), mode="r") for step in (7, 11)}
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
    with stepwell.open_sync(settings, model=model, optimizer=optimizer) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.exact, restored.faults) == (11, True, ())
        # Which of the bases it is depends on how long they travelled.
        assert (restored.base_step > 0) == (base_every == 5)
        assert bits_of(model, optimizer) == wanted[11]
