"""The state of every optimizer and scheduler torch has resumes bit for bit, through JSON and bytes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stepwell.pipeline.bits import bit_equal, own_copy
from stepwell.pipeline.collected import Collected, optimizer_states
from stepwell.pipeline.live import LiveState

OPTIMIZERS = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
OPTIONS: dict[str, dict[str, object]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"lr": torch.tensor(0.01), "fused": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "LBFGS": {"max_iter": 3, "history_size": 4},
}

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer, LiveState]]


def stored(collected: Collected) -> Collected:
    tree = json.loads(json.dumps(collected.tree, sort_keys=True, allow_nan=False))
    return Collected(collected.specs, tuple(own_copy(t) for t in collected.tensors), tree)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, sparse: bool = False) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randint(0, 6, (4,)) if sparse else torch.randn(4, 6)).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def check_resumes(
    name: str, build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer, LiveState]]
) -> None:
    sparse = name == "SparseAdam"
    model, optimizer, live = build(0)
    for _ in range(3):
        step(model, optimizer, sparse)
    saved = stored(live.collect())
    losses = [step(model, optimizer, sparse) for _ in range(3)]
    for warm_steps in (0, 2):
        other, resumed, target = build(1)
        for _ in range(warm_steps):
            step(other, resumed, sparse)
        target.load(saved)
        loaded = target.collect()
        assert loaded.specs == saved.specs
        assert all(map(bit_equal, loaded.tensors, saved.tensors))
        assert stored(loaded).tree == saved.tree
        assert [step(other, resumed, sparse) for _ in range(3)] == losses
        assert all(map(bit_equal, target.collect().tensors, live.collect().tensors))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_resumes_bit_for_bit(name: str) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LiveState]:
        torch.manual_seed(seed)
        if name == "SparseAdam":
            model: nn.Module = nn.Embedding(6, 3, sparse=True)
        else:
            model = nn.Sequential(nn.Linear(6, 5, bias=name != "Muon"), nn.Linear(5, 3, bias=name != "Muon"))
        parameters: object = model.parameters()
        if name not in ("LBFGS", "SparseAdam", "Muon"):
            parameters = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.03}]
        options = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS.get(name, {}).items()
        }
        optimizer = OPTIMIZERS[name](parameters, **options)
        return model, optimizer, LiveState(model, optimizer)

    check_resumes(name, build)


def test_tensor_learning_rate_stays_the_same_tensor() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    live = LiveState(model, optimizer)
    saved = stored(live.collect())
    lr = optimizer.param_groups[0]["lr"]
    lr.fill_(0.1)
    live.load(saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5
    assert type(optimizer.param_groups[0]["betas"]) is tuple


def test_optimizer_state_keeps_its_memory_and_dtype() -> None:
    model = nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    live = LiveState(model, optimizer)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(4.0),
            "exp_avg": torch.randn(parameter.shape, dtype=torch.float32),
            "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float64),
        }
    saved = stored(live.collect())
    state = optimizer.state[model.weight]
    before = {key: value.data_ptr() for key, value in state.items()}
    for value in state.values():
        value.add_(1)
    live.load(saved)
    assert {key: value.data_ptr() for key, value in optimizer.state[model.weight].items()} == before
    assert optimizer.state[model.weight] is state
    fresh = LiveState(model, torch.optim.Adam(model.parameters(), foreach=False))
    fresh.load(saved)
    loaded = fresh.optimizers[0].optimizer.state[model.weight]
    assert [value.dtype for value in loaded.values()] == [torch.float32, torch.float32, torch.float64]


def test_aliases_in_state_come_back_and_false_ones_do_not() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveState(model, optimizer)
    shared = torch.arange(4.0).view(2, 2)
    optimizer.state[model.weight] = {
        "a": shared,
        "b": shared,
        "self": model.weight.detach(),
        "n": [shared, 1],
    }
    saved = stored(live.collect())
    optimizer.state[model.weight] = {}
    live.load(saved)
    state = optimizer.state[model.weight]
    assert state["a"] is state["b"] is state["n"][0]
    assert state["self"] is model.weight
    optimizer.state[model.weight] = {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)}
    apart = stored(live.collect())
    optimizer.state[model.weight] = {"a": shared, "b": shared}
    live.load(apart)
    state = optimizer.state[model.weight]
    assert not state["a"].any()
    assert state["b"].all()


def test_second_base_sees_every_change_of_optimizer_state() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveState(model, optimizer, rng=False)
    state = optimizer.state[model.weight] = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}

    def names() -> list[str]:
        collected = live.collect()
        for spec, tensor in zip(collected.specs, collected.tensors, strict=True):
            assert (spec.shape, f"torch.{spec.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        state = optimizer_states(collected.tree, "optim", collected.lookup)["model/weight"]
        assert list(state) == list(optimizer.state[model.weight])
        assert all(state[key] is value for key, value in optimizer.state[model.weight].items())
        return [spec.name.rsplit("/", 1)[1] for spec in collected.specs[1:]]

    first = live.collect()
    assert live.collect().tree == first.tree
    assert names() == ["a", "b"]
    state["a"] = torch.ones(2, 2)
    assert names() == ["a", "b"]
    state["a"].data = torch.full((2, 2), 7, dtype=torch.int32)
    assert names() == ["a", "b"]
    state["b"].data = torch.zeros(4)
    assert names() == ["a", "b"]
    state["c"] = torch.zeros(())
    assert names() == ["a", "b", "c"]
    del state["a"]
    state["a"] = torch.zeros(1)
    assert names() == ["b", "c", "a"]
    state["c"] = state["b"]
    assert names() == ["b", "a"]
    state["c"] = 3
    assert optimizer_states(live.collect().tree, "optim", live.collect().lookup)["model/weight"]["c"] == 3
    state["c"] = 4
    assert optimizer_states(live.collect().tree, "optim", live.collect().lookup)["model/weight"]["c"] == 4
    del optimizer.state[model.weight]
    assert optimizer_states(live.collect().tree, "optim", live.collect().lookup) == {}


def test_state_moved_onto_the_weight_is_an_alias_in_the_next_base() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveState(model, optimizer, rng=False)
    optimizer.state[model.weight] = {"a": torch.zeros(2, 2)}
    assert len(live.collect().specs) == 2
    optimizer.state[model.weight]["a"].data = model.weight.data
    assert len(live.collect().specs) == 1
    model.weight.data = torch.zeros(2, 2)
    assert len(live.collect().specs) == 2


def test_state_of_no_parameter_is_saved_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 3, "t": torch.ones(2)}
    live = LiveState(model, optimizer)
    saved = stored(live.collect())
    assert "belongs to no parameter" in live.obstacles()[0]
    del optimizer.state["global"]
    optimizer.state["stray"] = 1
    live.load(saved)
    assert set(optimizer.state) == {"global"}
    assert optimizer.state["global"]["count"] == 3


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def test_no_scheduler_of_torch_is_forgotten() -> None:
    base = lr_scheduler.LRScheduler
    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and not name.startswith("_")
        and value is not base
    }
    assert known <= set(SCHEDULERS)


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler_resumes_bit_for_bit(name: str, tensor_lr: bool) -> None:
    def build() -> tuple[torch.optim.Optimizer, object, LiveState]:
        model = nn.Linear(1, 1)
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        return optimizer, scheduler, LiveState(model, optimizer, {"scheduler": scheduler})

    def advance(optimizer: torch.optim.Optimizer, scheduler: object, steps: int) -> list[float]:
        rates = []
        for i in range(steps):
            optimizer.step()
            scheduler.step(*([1.0 + i % 2] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, scheduler, live = build()
    advance(optimizer, scheduler, 3)
    saved = stored(live.collect())
    expected = advance(optimizer, scheduler, 6)
    resumed, other, target = build()
    target.load(saved)
    assert advance(resumed, other, 6) == expected


@pytest.mark.filterwarnings("ignore:.*GradScaler.*")
def test_grad_scaler_resumes() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    live = LiveState(model, optimizer, {"scaler": scaler})

    def update() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    update()
    saved = stored(live.collect())
    update()
    assert scaler.get_scale() == 16.0
    live.load(saved)
    assert scaler.get_scale() == 8.0
    update()
    assert scaler.get_scale() == 16.0
