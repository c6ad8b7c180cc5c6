"""The live state: names, ties, shapes, buffers, in-place loading, RNG."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from stepwell.errors import FormatError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import bit_equal, own_copy
from stepwell.pipeline.collected import Collected, optimizer_states, overlay, with_optimizer_states
from stepwell.pipeline.live import LiveState


def frozen_copy(collected: Collected) -> Collected:
    """What a store would give back: own memory, the tree through canonical JSON."""
    tree = json.loads(json.dumps(collected.tree, sort_keys=True, allow_nan=False))
    return Collected(collected.specs, tuple(own_copy(t) for t in collected.tensors), tree)


def assert_same_state(first: LiveState, second: LiveState) -> None:
    a, b = first.collect(), second.collect()
    assert a.specs == b.specs
    for spec, x, y in zip(a.specs, a.tensors, b.tensors, strict=True):
        assert bit_equal(x, y), spec.name
    assert json.dumps(a.tree) == json.dumps(b.tree)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_buffer("later", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)) * self.scale)


def train(live: LiveState, model: nn.Module, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(0, 5, (6,))).square().mean()
        loss.backward()
        for ref in live.optimizers:
            ref.optimizer.step()
            ref.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tied_run(seed: int) -> tuple[Tied, LiveState]:
    torch.manual_seed(seed)
    model = Tied()
    return model, LiveState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_names_kinds_and_groups() -> None:
    model, live = tied_run(0)
    train(live, model)
    specs = {spec.name: spec for spec in live.collect().specs}
    assert [ref.name for ref in live.parameters] == [
        "model/embed.weight",
        "model/norm.weight",
        "model/norm.bias",
    ]
    assert [(ref.optimizer, ref.group, ref.index) for ref in live.parameters] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
    ]
    assert live.optimizers[0].name == "optim"
    assert live.optimizers[0].parameters == (tuple(ref.name for ref in live.parameters),)
    assert specs["model/embed.weight"].kind is Kind.WEIGHT
    assert specs["model/embed.weight"].group == "optim:0"
    first = specs["optim/state/embed.weight/exp_avg"]
    assert (first.kind, first.group, first.shape) == (Kind.MOMENT1, "optim:0", (5, 4))
    assert specs["optim/state/norm.bias/exp_avg_sq"].kind is Kind.MOMENT2
    assert (specs["optim/state/norm.bias/step"].kind, specs["optim/state/norm.bias/step"].group) == (
        Kind.AUX,
        "",
    )
    assert specs["model/norm.running_mean"].kind is Kind.AUX
    assert "model/scratch" not in specs
    assert "model/head.weight" not in specs
    assert live.trained_specs == tuple(specs[ref.name] for ref in live.parameters)


def test_tied_parameters_are_saved_once_and_tied_after_loading() -> None:
    model, live = tied_run(0)
    train(live, model)
    saved = frozen_copy(live.collect())
    assert saved.tree["model"]["aliases"] == {"model/head.weight": "model/embed.weight"}
    other, target = tied_run(1)
    storage = other.embed.weight.data_ptr()
    target.load(saved)
    assert other.head.weight is other.embed.weight
    assert other.embed.weight.data_ptr() == storage
    assert_same_state(live, target)


def test_resumed_run_continues_like_the_one_that_never_stopped() -> None:
    model, live = tied_run(0)
    train(live, model)
    saved = frozen_copy(live.collect())
    expected = train(live, model, 4)
    other, target = tied_run(1)
    train(target, other, 1)
    target.load(saved)
    assert train(target, other, 4) == expected
    assert_same_state(live, target)


def test_save_before_the_first_step_resumes_the_same() -> None:
    model, live = tied_run(0)
    saved = frozen_copy(live.collect())
    expected = train(live, model)
    other, target = tied_run(1)
    train(target, other, 1)  # has state, the checkpoint has none
    target.load(saved)
    assert not target.optimizers[0].optimizer.state
    assert train(target, other) == expected


def test_parameter_without_state_has_none_after_recovery() -> None:
    def build(seed: int) -> tuple[nn.Module, LiveState]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(5, 4), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
        model["frozen"].requires_grad_(False)
        return model, LiveState(model, torch.optim.Adam(model.parameters()))

    model, live = build(0)
    model["used"](torch.randn(3, 5)).sum().backward()
    live.optimizers[0].optimizer.step()
    other, target = build(1)
    target.load(frozen_copy(live.collect()))
    state = target.optimizers[0].optimizer.state
    assert set(state) == {other["used"].weight, other["used"].bias}
    assert_same_state(live, target)


def test_wrappers_leave_no_trace_in_names() -> None:
    class Compiled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = inner

    inner = nn.Sequential(Checkpointed(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    plain = [ref.name for ref in LiveState(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).parameters]
    wrapped = LiveState(nn.DataParallel(Compiled(inner)))
    assert [ref.name for ref in wrapped.parameters] == plain
    assert "model/1.running_var" in {spec.name for spec in wrapped.collect().specs}
    named_module = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert LiveState(named_module).parameters[0].name == "model/module.weight"


def test_several_models_and_optimizers_are_named() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    outside = torch.zeros(3, requires_grad=True)
    first = torch.optim.SGD([{"params": a.parameters()}, {"params": [outside], "lr": 1.0}], lr=0.1)
    second = torch.optim.SGD(b.parameters(), lr=0.1)
    live = LiveState({"gen": a, "dis": b}, [first, second])
    assert [ref.name for ref in live.optimizers] == ["optim.0", "optim.1"]
    names = [ref.name for ref in live.parameters]
    assert names == [
        "model/gen.weight",
        "model/gen.bias",
        "model/dis.weight",
        "model/dis.bias",
        "optim.0/param/1.0",
    ]
    assert [spec.group for spec in live.parameter_specs] == [
        "optim.0:0",
        "optim.0:0",
        "optim.1:0",
        "optim.1:0",
        "optim.0:1",
    ]
    assert [r.name for r in LiveState(None, {"g": first}).optimizers] == ["optim.g"]
    saved = frozen_copy(live.collect())
    with torch.no_grad():
        outside.add_(1)
    live.load(saved)
    assert not outside.any()


def test_shared_modules_cyclic_modules_and_shared_buffers() -> None:
    shared = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.BatchNorm1d(2)})
    model["c"].running_var = shared.running_mean
    model["a"].back = nn.ModuleList([model])
    live = LiveState(model)
    saved = frozen_copy(live.collect())
    aliases = saved.tree["model"]["aliases"]
    assert aliases["model/b.running_mean"] == "model/a.running_mean"
    assert aliases["model/c.running_var"] == "model/a.running_mean"
    shared.running_mean.fill_(7)
    live.load(saved)
    assert not shared.running_mean.any()


def test_buffers_replaced_by_assignment_are_seen_and_none_is_kept() -> None:
    model, live = tied_run(0)
    live.collect_aux()
    model.scale = torch.full((), 3.0)
    model.later = torch.arange(3)
    saved = frozen_copy(live.collect())
    assert float(saved.lookup("model/scale")) == 3.0
    other, target = tied_run(1)
    target.load(saved)
    assert torch.equal(other.later, torch.arange(3))
    model.later = None
    target.load(frozen_copy(live.collect()))
    assert other.later is None


def test_aux_reuses_specs_while_buffers_stay_and_follows_their_values() -> None:
    model, live = tied_run(0)
    first = live.collect_aux()
    assert {spec.name for spec in first.specs if spec.name.startswith("model/")} == {
        "model/norm.running_mean",
        "model/norm.running_var",
        "model/norm.num_batches_tracked",
        "model/scale",
    }
    train(live, model)
    second = live.collect_aux()
    by_name = {spec.name: spec for spec in first.specs}
    assert all(by_name[spec.name] is spec for spec in second.specs if spec.name.startswith("model/"))
    assert second.lookup("model/norm.running_mean") is model.norm.running_mean
    model.norm.running_mean.resize_(7)
    assert next(s for s in live.collect_aux().specs if s.name == "model/norm.running_mean").shape == (7,)


def test_frozen_parameters_are_in_aux_on_request_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    live = LiveState(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    assert not any(spec.kind is Kind.WEIGHT for spec in live.collect_aux().specs)
    frozen = [spec.name for spec in live.collect_aux(frozen=True).specs if spec.kind is Kind.WEIGHT]
    assert frozen == ["model/1.weight", "model/1.bias"]
    assert [spec.name for spec in live.trained_specs] == ["model/0.weight", "model/0.bias"]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_odd_parameters_round_trip(dtype: torch.dtype) -> None:
    def build(fill: int) -> LiveState:
        model = nn.Module()
        base = torch.full((4, 6), fill, dtype=torch.float32).to(dtype)
        model.whole = nn.Parameter(base.t(), requires_grad=False)
        model.scalar = nn.Parameter(base[0, 0].clone(), requires_grad=False)
        model.empty = nn.Parameter(base[:0], requires_grad=False)
        model.register_buffer("view", base.clone()[1:3, ::2])
        model.register_buffer("expanded", base[:1, :1].clone().expand(3, 2))
        return LiveState(model)

    first, second = build(3), build(5)
    second.load(frozen_copy(first.collect()))
    assert_same_state(first, second)


def test_view_of_a_large_tensor_is_saved_small() -> None:
    big = torch.zeros(1 << 20)
    live = LiveState(None, None, {"slice": big[:256]}, rng=False)
    collected = live.collect()
    assert [spec.size_bytes for spec in collected.specs] == [1024]


def test_generators_of_torch_numpy_and_python_come_back_last() -> None:
    class Draws:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            torch.rand(3), random.random(), np.random.random()

    own = [
        torch.Generator().manual_seed(5),
        np.random.default_rng(5),
        np.random.RandomState(5),
        random.Random(5),
    ]
    extra = {"draws": Draws(), **{f"own{i}": generator for i, generator in enumerate(own)}}

    def draw() -> list[float]:
        values = [torch.rand(()).item(), float(np.random.random()), random.random(), random.gauss(0, 1)]
        return [
            *values,
            torch.rand((), generator=own[0]).item(),
            float(own[1].standard_normal()),
            float(own[2].standard_normal()),
            own[3].gauss(0, 1),
        ]

    live = LiveState(None, None, extra)
    draw()
    saved = frozen_copy(live.collect())
    expected = draw()
    draw()
    live.load(saved)
    assert draw() == expected
    without = LiveState(None, None, extra, rng=False)
    before = torch.get_rng_state()
    without.load(frozen_copy(without.collect()))
    assert not torch.equal(torch.get_rng_state(), before)  # Draws drew, nobody reset


def test_plain_extra_values_are_updated_in_place_and_given_back() -> None:
    inner = {"best": 1.0}
    extra = {"counts": {"epoch": 1, "inner": inner}, "list": [1, [2]], "ema": torch.zeros(3), "number": 5}
    live = LiveState(None, None, extra, rng=False)
    saved = frozen_copy(live.collect())
    counts, values, ema = extra["counts"], extra["list"], extra["ema"]
    counts["epoch"], counts["new"], inner["best"], extra["number"] = 9, 1, 0.0, 6
    values.append(3)
    ema.add_(1)
    result = live.load(saved)
    assert counts is extra["counts"] is result["counts"]
    assert counts == {"epoch": 1, "inner": {"best": 1.0}}
    assert counts["inner"] is inner
    assert values == [1, [2]]
    assert not ema.any()
    assert extra["number"] == result["number"] == 5


def test_live_value_in_two_places_takes_two_saved_values() -> None:
    extra = {"v": [[1], [2]]}
    live = LiveState(None, None, extra, rng=False)
    saved = frozen_copy(live.collect())
    one = [0]
    extra["v"] = [one, one]
    live.load(saved)
    assert extra["v"] == [[1], [2]]


def test_restored_values_do_not_alias_the_checkpoint() -> None:
    class Keeps:
        kept: object = None

        def state_dict(self) -> dict[str, object]:
            return {"t": torch.ones(2), "a": np.ones(2)}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.kept = state

    keeps = Keeps()
    live = LiveState(None, None, {"keeps": keeps, "t": torch.zeros(2)}, rng=False)
    saved = frozen_copy(live.collect())
    live.load(saved)
    for tensor in saved.tensors:
        tensor.fill_(9)
    assert torch.equal(keeps.kept["t"], torch.ones(2))
    assert (keeps.kept["a"] == 1).all()
    keeps.kept["a"][0] = 2


def test_module_in_extra_keeps_versions_and_values() -> None:
    ema = nn.BatchNorm1d(2)
    live = LiveState(None, None, {"ema": ema}, rng=False)
    saved = frozen_copy(live.collect())
    assert {spec.name for spec in saved.specs} >= {"extra/ema/running_mean"}
    ema.running_mean.fill_(3)
    live.load(saved)
    assert not ema.running_mean.any()


def test_opaque_model_with_state_dict_shares_names_with_the_optimizer() -> None:
    class Opaque:
        def __init__(self) -> None:
            self.w = torch.zeros(3, requires_grad=True)
            self.epoch = 0

        def state_dict(self) -> dict[str, object]:
            return {"w": self.w.detach(), "epoch": self.epoch, "more": torch.arange(2)}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.epoch = state["epoch"]

    model = Opaque()
    live = LiveState(model, torch.optim.SGD([model.w], lr=1.0), rng=False)
    assert [ref.name for ref in live.parameters] == ["model/w"]
    model.epoch = 4
    saved = frozen_copy(live.collect())
    assert [spec.name for spec in saved.specs] == ["model/w", "model/more"]
    assert [spec.name for spec in live.collect_aux().specs] == ["model/more"]
    with torch.no_grad():
        model.w.add_(1)
    model.epoch = 0
    live.load(saved)
    assert model.epoch == 4
    assert not model.w.any()


def test_module_extra_state_round_trips() -> None:
    class Counts(nn.Linear):
        count = 0

        def get_extra_state(self) -> object:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    model = nn.Sequential(Counts(1, 1))
    model[0].count = 7
    live = LiveState(model)
    saved = frozen_copy(live.collect())
    model[0].count = 0
    live.load(saved)
    assert model[0].count == 7


def test_differential_laid_over_a_base_is_the_state_of_its_save() -> None:
    model, live = tied_run(0)
    base = frozen_copy(live.collect())  # before the first step: no optimizer state yet
    train(live, model)
    live.optimizers[0].optimizer.param_groups[0]["lr"] = 0.05
    now, aux = frozen_copy(live.collect()), frozen_copy(live.collect_aux())
    states = {"optim": optimizer_states(now.tree, "optim", now.lookup)}
    replayed = Collected(
        base.specs,
        tuple(
            now.lookup(spec.name) if spec.kind is Kind.WEIGHT else tensor
            for spec, tensor in zip(base.specs, base.tensors, strict=True)
        ),
        base.tree,
    )
    whole = overlay(with_optimizer_states(replayed, states), aux)
    assert {spec.name: spec for spec in whole.specs} == {spec.name: spec for spec in now.specs}
    _, target = tied_run(1)
    target.load(frozen_copy(whole))
    assert_same_state(live, target)


def test_differential_tree_alone_is_refused() -> None:
    _, live = tied_run(0)
    with pytest.raises(FormatError):
        live.load(frozen_copy(live.collect_aux()))
    other = LiveState(None, [], rng=False)
    with pytest.raises(FormatError, match="different optimizers"):
        overlay(live.collect(), other.collect_aux())


def test_regrouped_or_replaced_parameters_are_noticed() -> None:
    model, live = tied_run(0)
    assert live.structure_changed() is None
    assert not live.refresh()
    live.optimizers[0].optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert "2 parameter groups" in str(live.structure_changed())
    version = live.version
    assert live.refresh()
    assert live.version > version
    assert live.parameters[-1].name == "optim/param/1.0"
    model.norm.bias = nn.Parameter(torch.zeros(4))
    assert live.refresh()
    model.extra_layer = nn.Linear(1, 1)
    assert any(spec.name == "model/extra_layer.bias" for spec in live.collect().specs)


def test_obstacles_to_replay_are_named() -> None:
    model, live = tied_run(0)
    assert live.obstacles() == []
    flat = torch.zeros(8)
    model.a, model.b = nn.Parameter(flat[:5]), nn.Parameter(flat[4:])
    both = LiveState(model, [torch.optim.SGD([model.a, model.b]), torch.optim.SGD([model.a])])
    assert both.shared_memory == ("model/a", "model/b")
    assert len(both.obstacles()) == 2

    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, object]:
            return {"mine": len(self.param_groups)}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.loaded = state

    own = Own(model.parameters())
    custom = LiveState(model, own)
    assert custom.optimizers[0].custom
    assert "state_dict of its own" in custom.obstacles()[-1]
    custom.load(frozen_copy(custom.collect()))
    assert own.loaded == {"mine": 1}
