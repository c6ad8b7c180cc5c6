"""Replay is bit-equal to the optimizer that ran: all classes and flags, sizes, cuts, missing gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepwell.errors import IntegrityError, StateMismatchError, UsageError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import bit_equal
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import gradient_layout
from stepwell.pipeline.replay import BlockedReplay, StepwiseReplay, blocks_exactly
from stepwell.pipeline.update import GroupEncoder, UpdateRecord, class_name_of, environment_of

FILLED = [(), (1,), (3,), (5, 7), (64,), (130,), (33, 67), (18, 128), (2, 3, 5)]
SHAPES = [(), (1,), (3,), (5, 7), (64,), (130,), (0,), (33, 67), (18, 128), (2, 0, 3)]
"""0-dim, tiny, odd, empty, and three that chunk_bytes=4096 (1024 elements) cuts."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """A parallel region per tiny update costs milliseconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Maker = Callable[[Iterable[object]], torch.optim.Optimizer]
State = dict[str, dict[str, object]]


def gradient_bytes(layout: Layout, gradients: dict[int, Tensor]) -> list[np.ndarray]:
    """Chunk buffers, read-only as a mapped pack is."""
    buffers = []
    for chunk in layout.chunks:
        buffer = np.zeros(chunk.size_bytes, dtype=np.uint8)
        for piece in chunk.pieces:
            gradient = gradients.get(piece.tensor)
            if gradient is not None:
                raw = gradient.contiguous().reshape(-1)[piece.start : piece.stop].view(torch.uint8).numpy()
                buffer[piece.offset_bytes : piece.offset_bytes + raw.size] = raw
        buffer.flags.writeable = False
        buffers.append(buffer)
    return buffers


class Recorded:
    """An optimizer that is stepped with random gradients while everything is written down."""

    def __init__(
        self,
        make: Maker,
        *,
        shapes: list[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        groups: int = 1,
        chunk_bytes: int = 4096,
        strided: bool = False,
    ) -> None:
        self.random = torch.Generator().manual_seed(17)
        self.parameters = [nn.Parameter(self.draw(shape, dtype)) for shape in shapes]
        if strided:
            for parameter in self.parameters:
                if parameter.ndim == 2:
                    parameter.data = parameter.data.t().contiguous().t()
        self.names = [f"model/p{i}" for i in range(len(shapes))]
        members = [list(range(g, len(shapes), groups)) for g in range(groups)]
        self.optimizer = make([{"params": [self.parameters[i] for i in rows]} for rows in members])
        where = {i: g for g, rows in enumerate(members) for i in rows}
        specs = [
            TensorSpec(
                name, tuple(p.shape), str(dtype).removeprefix("torch."), Kind.WEIGHT, f"optim:{where[i]}"
            )
            for i, (name, p) in enumerate(zip(self.names, self.parameters, strict=True))
        ]
        self.layout = gradient_layout(specs, chunk_bytes=chunk_bytes)
        self.encoder = GroupEncoder("optim", members)
        self.records: list[UpdateRecord] = []
        self.gradients: list[list[np.ndarray]] = []

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64).to(dtype)

    def update(
        self, missing: Iterable[int] = (), scale: float | None = None, found_inf: float | None = None
    ) -> None:
        """Step once, recording what a pre-hook sees."""
        opt = self.optimizer
        gone = sorted(missing)
        for i, parameter in enumerate(self.parameters):
            gradient = self.draw(tuple(parameter.shape), parameter.dtype)
            if not parameter.is_contiguous():
                gradient = torch.empty_like(parameter).copy_(gradient).detach()
            parameter.grad = None if i in gone else gradient
        opt.grad_scale = None if scale is None else torch.full((), scale)
        opt.found_inf = None if found_inf is None else torch.full((), found_inf)
        inline = self.encode_scalar
        self.records.append(
            UpdateRecord(
                optimizer=0,
                class_name=class_name_of(type(opt)),
                groups=self.encoder.encode(opt.param_groups),
                missing=tuple(gone),
                grad_scale=inline(opt.grad_scale),
                found_inf=inline(opt.found_inf),
                environment=environment_of("cpu"),
            )
        )
        present = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        self.gradients.append(gradient_bytes(self.layout, present))
        opt.step()

    @staticmethod
    def encode_scalar(value: Tensor | None) -> object:
        from stepwell.pipeline.tree import encode_tree

        return None if value is None else encode_tree(value, None, "scalar")

    def forget(self) -> None:
        self.records.clear()
        self.gradients.clear()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: torch.empty_like(p).copy_(p).detach()
            for name, p in zip(self.names, self.parameters, strict=True)
        }

    def state(self) -> State:
        state = self.optimizer.state
        return {
            name: copy.deepcopy(state[p])
            for name, p in zip(self.names, self.parameters, strict=True)
            if p in state
        }


def assert_state_equal(have: State, want: State) -> None:
    assert set(have) == set(want)
    for name, values in want.items():
        assert list(have[name]) == list(values), name
        for key, value in values.items():
            got = have[name][key]
            if isinstance(value, Tensor):
                assert isinstance(got, Tensor)
                assert bit_equal(got, value), f"{name} {key}"
                assert got.stride() == value.stride() or value.numel() < 2, f"{name} {key}"
            else:
                assert type(got) is type(value)
                assert got == value


def replay(run: Recorded, weights: dict[str, Tensor], state: State, *, block_elements: int = 512) -> None:
    if blocks_exactly(type(run.optimizer), run.records, weights):
        before = [[buffer.copy() for buffer in update] for update in run.gradients]
        blocked = BlockedReplay(
            type(run.optimizer), weights, state, run.layout, run.records, block_elements=block_elements
        )
        for part in reversed(range(len(run.layout.chunks))):
            blocked.run_chunk(part, [update[part] for update in run.gradients])
        blocked.finish()
        for update, copied in zip(run.gradients, before, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(update, copied, strict=True))
    else:
        stepwise(run, weights, state)


def stepwise(run: Recorded, weights: dict[str, Tensor], state: State) -> None:
    whole = StepwiseReplay(type(run.optimizer), weights, state, run.layout, run.records, like=run.optimizer)
    for k, update in enumerate(run.gradients):
        whole.run_update(k, dict(enumerate(update)))
    whole.finish()


def check(run: Recorded, weights: dict[str, Tensor], state: State) -> None:
    for name, parameter in zip(run.names, run.parameters, strict=True):
        assert bit_equal(weights[name], parameter.detach()), name
    assert_state_equal(state, run.state())


def exercise(
    make: Maker,
    *,
    scenario: Callable[[Recorded, int], None] = lambda run, _k: run.update(),
    both: bool = True,
    updates: int = 3,
    **options: object,
) -> Recorded:
    """Replay from the very start (state made lazily) and from a base in the middle, by both ways."""
    run = Recorded(make, **options)
    first = (run.weights(), run.state())
    for k in range(updates):
        scenario(run, k)
    weights, state = copy.deepcopy(first)
    replay(run, weights, state)
    check(run, weights, state)
    if both:
        weights, state = copy.deepcopy(first)
        stepwise(run, weights, state)
        check(run, weights, state)
    run.forget()
    weights, state = run.weights(), run.state()
    for k in range(2):
        scenario(run, k)
    replay(run, weights, state, block_elements=320)
    check(run, weights, state)
    return run


def adam_flags() -> list[dict[str, object]]:
    return [
        {},
        {"foreach": True},
        {"fused": True},
        {"amsgrad": True},
        {"amsgrad": True, "foreach": True},
        {"amsgrad": True, "fused": True},
        {"maximize": True, "weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.1, "foreach": True},
        {"maximize": True, "weight_decay": 0.1, "fused": True},
        {"lr": torch.tensor(0.01)},
        {"lr": torch.tensor([0.01], dtype=torch.float64), "fused": True},
        {"eps": 1e-3, "betas": (0.0, 0.5)},
    ]


def sgd_flags() -> list[dict[str, object]]:
    flags: list[dict[str, object]] = []
    for way in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
        flags += [
            {**way},
            {"momentum": 0.9, **way},
            {"momentum": 0.9, "nesterov": True, **way},
            {"momentum": 0.9, "nesterov": True, "maximize": True, **way},
            {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True, **way},
        ]
    return [*flags, {"lr": torch.tensor(0.05), "momentum": 0.9}]


def cases() -> list[tuple[type[torch.optim.Optimizer], dict[str, object]]]:
    optim = torch.optim
    both = ({}, {"foreach": True})
    found: list[tuple[type[torch.optim.Optimizer], dict[str, object]]] = []
    found += [(optim.Adam, flags) for flags in [*adam_flags(), {"weight_decay": 0.1}]]
    found += [(optim.AdamW, flags) for flags in adam_flags()]
    found += [(optim.SGD, {"lr": 0.05, **flags}) for flags in sgd_flags()]
    for way in both:
        found += [
            (optim.RMSprop, {**way, **flags})
            for flags in ({}, {"centered": True}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1})
        ]
        found += [(optim.RMSprop, {"momentum": 0.9, "maximize": True, **way})]
        found += [(optim.Adagrad, {**way}), (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.2, **way})]
        found += [(optim.Adagrad, {"initial_accumulator_value": 0.1, "maximize": True, **way})]
        for cls in (optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD):
            found += [(cls, {**way}), (cls, {"weight_decay": 0.1, "maximize": True, **way})]
        found += [(optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, **way})]
        found += [(optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, **way})]
        found += [(optim.ASGD, {"t0": 2.0, "lambd": 0.01, **way})]
        found += [(optim.Rprop, {**way}), (optim.Rprop, {"maximize": True, **way})]
        found += [(optim.Adafactor, {**way}), (optim.Adafactor, {"weight_decay": 0.1, **way})]
    found += [(optim.Adagrad, {"fused": True}), (optim.Adagrad, {"fused": True, "lr_decay": 0.1})]
    found += [(optim.Adamax, {"lr": torch.tensor(0.01)}), (optim.Rprop, {"lr": torch.tensor(0.01)})]
    return found


def label(case: object) -> str:
    return (
        case.__name__ if isinstance(case, type) else ",".join(f"{k}={v}" for k, v in case.items()) or "plain"
    )


@pytest.mark.parametrize(("cls", "flags"), cases(), ids=label)
def test_every_optimizer_and_flag_replays_bit_for_bit(
    cls: type[torch.optim.Optimizer], flags: dict[str, object]
) -> None:
    # Adafactor divides by the number of elements.
    shapes = FILLED if cls is torch.optim.Adafactor else SHAPES
    exercise(lambda groups: cls(groups, **copy.deepcopy(flags)), groups=2, shapes=shapes)


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]


WAYS: list[dict[str, object]] = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize(
    ("dtype", "way"),
    # torch has no fused update of complex parameters.
    [(d, w) for d in DTYPES for w in WAYS if not (d.is_complex and w.get("fused"))],
    ids=lambda value: label(value) if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD], ids=label)
def test_other_dtypes(cls: type[torch.optim.Optimizer], way: dict[str, object], dtype: torch.dtype) -> None:
    # Fused SGD with momentum is not deterministic in 16 bits: see test_private.
    sixteen = dtype.itemsize == 2 and way.get("fused")
    flags = {"momentum": 0.9} if cls is torch.optim.SGD and not sixteen else {}
    exercise(lambda groups: cls(groups, lr=0.01, weight_decay=0.1, **way, **flags), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "cls", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.ASGD]
)
def test_other_dtypes_of_rarer_classes(cls: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    exercise(lambda groups: cls(groups, lr=0.01, weight_decay=0.1), dtype=dtype)


@pytest.mark.parametrize("way", WAYS, ids=label)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad], ids=label)
def test_training_on_two_threads_replays_on_one(
    cls: type[torch.optim.Optimizer], way: dict[str, object]
) -> None:
    """Threads cut a tensor at places of their own; that must not show in the bits."""
    flags = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = Recorded(
            lambda groups: cls(groups, lr=0.01, weight_decay=0.1, **way, **flags),
            shapes=[(100_003,), (257, 513), (70_001, 1)],
            chunk_bytes=1 << 18,
        )
        weights, state = run.weights(), run.state()
        for _ in range(3):
            run.update()
        torch.set_num_threads(1)
        replay(run, weights, state, block_elements=16384)
        check(run, weights, state)
    finally:
        torch.set_num_threads(before)


def changing(run: Recorded, k: int) -> None:
    """Another lr, betas, weight decay each time; some gradients missing, one always."""
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01 / (k + 1)
        group["weight_decay"] = 0.1 * (k % 2)
        if "betas" in group:
            group["betas"] = (0.9 - 0.1 * k, 0.95)
        if "momentum" in group:
            group["momentum"] = 0.0 if k == 0 else 0.9
    run.update(missing={(k * 3) % len(SHAPES), (k * 3 + 4) % len(SHAPES), 5})


@pytest.mark.parametrize("way", WAYS, ids=label)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad], ids=label)
def test_changed_groups_and_missing_gradients(
    cls: type[torch.optim.Optimizer], way: dict[str, object]
) -> None:
    if cls is torch.optim.SGD and way.get("fused"):
        # A fused SGD with momentum refuses a mixture of old and new parameters.
        exercise(
            lambda groups: cls(groups, lr=0.1, **way), scenario=lambda run, k: run.update({5, k}), groups=3
        )
        return
    run = exercise(lambda groups: cls(groups, lr=0.1, **way), scenario=changing, groups=3)
    if cls is not torch.optim.Adagrad:
        assert run.parameters[5] not in run.optimizer.state


def test_rmsprop_scenario_of_missing_gradients() -> None:
    exercise(lambda groups: torch.optim.NAdam(groups), scenario=lambda run, k: run.update({k, 8}))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_scaled_gradients_and_inf_steps_under_fused(cls: type[torch.optim.Optimizer]) -> None:
    """GradScaler gives fused optimizers scaled gradients, and has them skip the step on inf."""

    def scenario(run: Recorded, k: int) -> None:
        run.update(scale=1024.0 / (1 + k), found_inf=float(k == 2))

    exercise(lambda groups: cls(groups, lr=0.1, fused=True), scenario=scenario)


def test_sgd_momentum_under_fused_and_a_later_inf_step() -> None:
    def scenario(run: Recorded, k: int) -> None:
        run.update(scale=512.0, found_inf=float(k == 2))

    exercise(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True), scenario=scenario)


@pytest.mark.parametrize("way", [{}, {"foreach": True}], ids=label)
def test_weights_that_are_not_contiguous(way: dict[str, object]) -> None:
    exercise(lambda groups: torch.optim.AdamW(groups, **way), strided=True)
    exercise(lambda groups: torch.optim.Adafactor(groups, **way), strided=True, shapes=FILLED)


def test_fused_over_transposed_weights_goes_stepwise() -> None:
    run = exercise(lambda groups: torch.optim.AdamW(groups, fused=True), strided=True)
    assert not blocks_exactly(torch.optim.AdamW, run.records, run.weights())
    with pytest.raises(UsageError, match="StepwiseReplay"):
        BlockedReplay(torch.optim.AdamW, run.weights(), run.state(), run.layout, run.records)


class Lookahead(torch.optim.Optimizer):
    """A user's optimizer: whole-tensor norms, a counter in the group, an attribute, an odd entry."""

    def __init__(self, params: Iterable[object], lr: float = 0.1, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.power = power
        self.seen = [1.0]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            total = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is None:
                    continue
                entry = self.state[p]
                entry["calls"] = entry.get("calls", 0) + 1
                entry.setdefault("slow", torch.zeros_like(p)).lerp_(p, 0.1)
                p.grad.mul_(self.power * self.seen[0])
                p.sub_(p.grad, alpha=group["lr"] / (1.0 + total) / group["calls"])


def test_an_optimizer_of_the_user() -> None:
    run = Recorded(lambda groups: Lookahead(groups, power=0.7), groups=2)
    weights, state = run.weights(), run.state()
    for k in range(4):
        run.update(missing={k})
    stepwise(run, weights, state)
    check(run, weights, state)
    assert run.optimizer.seen == [1.0]
    assert run.optimizer.param_groups[0]["calls"] == 4


def test_scheduled_and_hooked_optimizers_do_not_leak_into_replay() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups, lr=0.1))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    calls: list[int] = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(2))
    try:
        weights, state = run.weights(), run.state()
        for _ in range(4):
            run.update()
            scheduler.step()
        counted = len(calls)
        replay(run, weights, state)
        assert len(calls) == counted == 8
    finally:
        handle.remove()
    check(run, weights, state)


def test_large_blocks_and_default_chunks() -> None:
    run = Recorded(
        lambda groups: torch.optim.AdamW(groups), chunk_bytes=16 << 20, shapes=[(3, 300_007), (11,)]
    )
    weights, state = run.weights(), run.state()
    for _ in range(2):
        run.update()
    blocked = BlockedReplay(torch.optim.AdamW, weights, state, run.layout, run.records)
    for part in range(len(run.layout.chunks)):
        blocked.run_chunk(part, [update[part] for update in run.gradients])
    blocked.finish()
    check(run, weights, state)


def test_a_subset_of_the_tensors() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    weights, state = run.weights(), run.state()
    for _ in range(3):
        run.update()
    some = {name: weights[name] for name in ("model/p7", "model/p2")}
    blocked = BlockedReplay(torch.optim.AdamW, some, state, run.layout, run.records)
    for part, chunk in enumerate(run.layout.chunks):
        if any(run.layout.tensors[piece.tensor].name in some for piece in chunk.pieces):
            blocked.run_chunk(part, [update[part] for update in run.gradients])
    blocked.finish()
    want = run.state()
    for name in some:
        assert bit_equal(weights[name], run.parameters[run.names.index(name)].detach())
        assert_state_equal({name: state[name]}, {name: want[name]})
    assert set(state) == set(some)


def test_one_chunk_of_a_cut_tensor_for_a_view() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    weights, state = run.weights(), run.state()
    run.update()
    run.update()
    part = next(i for i, chunk in enumerate(run.layout.chunks) if chunk.pieces[0].start > 0)
    (piece,) = run.layout.chunks[part].pieces
    name = run.layout.tensors[piece.tensor].name
    blocked = BlockedReplay(torch.optim.AdamW, {name: weights[name]}, state, run.layout, run.records)
    blocked.run_chunk(part, [update[part] for update in run.gradients])
    blocked.finish(partial=True)
    live = run.parameters[piece.tensor].detach()
    want = {"weight": live, **run.optimizer.state[run.parameters[piece.tensor]]}
    have = {"weight": weights[name], **state[name]}
    assert list(have) == ["weight", "step", "exp_avg", "exp_avg_sq"]
    assert bit_equal(have.pop("step"), want.pop("step"))
    for key, value in want.items():
        got = have[key].reshape(-1)[piece.start : piece.stop]
        assert bit_equal(got, value.reshape(-1)[piece.start : piece.stop]), key


def test_state_tensors_keep_their_identity() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    run.update()
    run.forget()
    weights, state = run.weights(), run.state()
    before = {(name, key): value for name, row in state.items() for key, value in row.items()}
    run.update()
    replay(run, weights, state)
    check(run, weights, state)
    assert all(state[name][key] is value for (name, key), value in before.items())


def test_half_replayed_tensors_are_refused() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    weights, state = run.weights(), run.state()
    run.update()
    blocked = BlockedReplay(torch.optim.AdamW, weights, state, run.layout, run.records)
    cut = next(i for i, chunk in enumerate(run.layout.chunks) if chunk.pieces[0].start > 0)
    blocked.run_chunk(cut, [run.gradients[0][cut]])
    with pytest.raises(UsageError, match="chunks were replayed"):
        blocked.finish()


def test_missing_and_short_gradients_are_errors() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    weights, state = run.weights(), run.state()
    run.update()
    blocked = BlockedReplay(torch.optim.AdamW, weights, state, run.layout, run.records)
    part = next(i for i, chunk in enumerate(run.layout.chunks) if chunk.size_bytes > 0)
    with pytest.raises(IntegrityError, match="none is there"):
        blocked.run_chunk(part, [None])
    with pytest.raises(IntegrityError, match="bytes where"):
        blocked.run_chunk(part, [run.gradients[0][part][:-1]])
    whole = StepwiseReplay(torch.optim.AdamW, weights, state, run.layout, run.records)
    with pytest.raises(IntegrityError, match="not there"):
        whole.run_update(0, {})


def test_other_classes_shapes_and_dtypes_are_refused() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    run.update()
    weights = run.weights()
    with pytest.raises(StateMismatchError, match="cannot be replayed with"):
        BlockedReplay(torch.optim.SGD, weights, {}, run.layout, run.records)
    for wrong in (torch.zeros(6), torch.zeros(5, 7, dtype=torch.float64)):
        with pytest.raises(StateMismatchError, match="model/p3"):
            BlockedReplay(torch.optim.AdamW, {**weights, "model/p3": wrong}, {}, run.layout, run.records)


def test_updates_out_of_order_are_refused() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups))
    weights, state = run.weights(), run.state()
    run.update()
    run.update()
    whole = StepwiseReplay(torch.optim.AdamW, weights, state, run.layout, run.records)
    with pytest.raises(UsageError, match="next one is 0"):
        whole.run_update(1, dict(enumerate(run.gradients[1])))
    whole.run_update(0, dict(enumerate(run.gradients[0])))
    with pytest.raises(UsageError, match="1 of 2"):
        whole.finish()


def test_a_record_read_back_from_json_replays_alike() -> None:
    run = Recorded(lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.03)), groups=2)
    weights, state = run.weights(), run.state()
    run.update()
    run.update(missing={1})
    run.records = [UpdateRecord.from_json(record.to_json()) for record in run.records]
    replay(run, weights, state)
    check(run, weights, state)


def test_denormals_are_flushed_as_they_were() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        run = Recorded(lambda groups: torch.optim.SGD(groups, lr=1e-30, momentum=0.5), shapes=[(130,), (7,)])
        for parameter in run.parameters:
            parameter.data.mul_(1e-37)
        weights, state = run.weights(), run.state()
        for _ in range(3):
            run.update()
    finally:
        torch.set_flush_denormal(False)
    replay(run, weights, state)
    check(run, weights, state)
    assert (torch.full((), 5e-324, dtype=torch.float64) * 1.0).item() != 0.0
