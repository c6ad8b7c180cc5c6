"""Private optimizers run torch's own step without anyone's hooks, and nothing is imported by name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepwell.errors import StateMismatchError
from stepwell.pipeline.private import (
    is_elementwise,
    is_per_tensor,
    optimizer_class,
    private_optimizer,
    raw_step,
    why_not_repeatable,
    writes_gradients,
)
from stepwell.pipeline.update import class_name_of


class Mine(torch.optim.SGD):
    """A subclass: torch's step, but who knows."""


class Keeping(torch.optim.Optimizer):
    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.5})
        self.factor = torch.tensor(2.0)
        self.history: list[int] = []

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.history.append(1)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * self.factor * self.defaults["lr"])


def parameter() -> nn.Parameter:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return p


def test_which_classes_are_elementwise() -> None:
    names = [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "ASGD",
        "Rprop",
    ]
    assert all(is_elementwise(getattr(torch.optim, name)) for name in names)
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, Mine, Keeping):
        assert not is_elementwise(cls)
    assert is_per_tensor(torch.optim.AdamW)
    assert is_per_tensor(torch.optim.Adafactor)
    assert not is_per_tensor(Mine)


def test_a_class_that_only_borrows_the_name_is_not_torchs() -> None:
    impostor = type("AdamW", (torch.optim.SGD,), {"__module__": "torch.optim.adamw"})
    assert not is_elementwise(impostor)


def test_classes_are_found_by_comparison_only() -> None:
    live = Keeping([parameter()])
    assert optimizer_class(class_name_of(torch.optim.AdamW)) is torch.optim.AdamW
    assert optimizer_class(class_name_of(torch.optim.Adafactor), live) is torch.optim.Adafactor
    assert optimizer_class(class_name_of(Keeping), live) is Keeping
    for name in (class_name_of(Keeping), "os:system", "torch.optim.optimizer:Optimizer", "antigravity:x", ""):
        with pytest.raises(StateMismatchError, match="not one of torch"):
            optimizer_class(name)
    with pytest.raises(StateMismatchError, match=r"the live optimizer is .*:Keeping"):
        optimizer_class("somewhere:Else", live)


def test_no_hook_is_called_and_none_is_added() -> None:
    calls: list[str] = []
    live = torch.optim.SGD([parameter()], lr=0.5)
    live.register_step_pre_hook(lambda *_: calls.append("pre"))
    live.register_step_post_hook(lambda *_: calls.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    try:
        p = parameter()
        values = {key: value for key, value in live.param_groups[0].items() if key != "params"}
        private = private_optimizer(torch.optim.SGD, [{"params": [p], **values}], {}, live)
        with torch.no_grad():
            raw_step(torch.optim.SGD)(private)
        assert calls == []
        assert torch.equal(p.detach(), torch.full((3,), 0.5))
    finally:
        for handle in handles:
            handle.remove()
    assert len(live._optimizer_step_pre_hooks) == 1


def test_groups_and_state_are_used_as_they_are() -> None:
    p = parameter()
    group = {"params": [p], "odd": 1}
    state: dict[str, object] = {"step": 3}
    private = private_optimizer(torch.optim.AdamW, [group], {p: state})
    assert private.param_groups[0] is group
    assert group == {"params": [p], "odd": 1}
    assert private.state[p] is state
    assert state == {"step": 3}


def test_attributes_of_a_users_class_are_taken_over_and_not_reached_back() -> None:
    live = Keeping([parameter()])
    scheduler = torch.optim.lr_scheduler.StepLR(live, 1)
    assert "step" in vars(live), "the scheduler wraps step on the instance"
    live.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    p = parameter()
    private = private_optimizer(Keeping, [{"params": [p]}], {}, live)
    raw_step(Keeping)(private)
    assert torch.equal(p.detach(), torch.zeros(3))
    assert live.history == []
    assert private.factor is not live.factor
    assert scheduler.last_epoch == 0


def test_raw_step_takes_off_only_torchs_wrapper() -> None:
    Keeping([parameter()])
    torch.optim.AdamW([parameter()])
    assert Keeping.step.hooked
    p = parameter()
    private = private_optimizer(Keeping, [{"params": [p]}], {}, Keeping([p]))
    p.requires_grad_(True)
    raw_step(Keeping)(private)  # no_grad, which lies below the wrapper, is still there
    assert p.is_leaf


def test_who_writes_gradients() -> None:
    assert writes_gradients(torch.optim.SGD, {"nesterov": True}, False)
    assert not writes_gradients(torch.optim.SGD, {"nesterov": False}, False)
    assert not writes_gradients(torch.optim.AdamW, {}, False)
    assert writes_gradients(torch.optim.AdamW, {}, True)
    assert writes_gradients(Keeping, {}, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_with_momentum_in_16_bits_is_not_repeatable(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    assert why_not_repeatable(torch.optim.SGD([p], fused=True)) is None
    assert why_not_repeatable(torch.optim.SGD([p], momentum=0.9)) is None
    assert "16-bit" in str(why_not_repeatable(torch.optim.SGD([p], momentum=0.9, fused=True)))
    assert why_not_repeatable(torch.optim.AdamW([p], fused=True)) is None


def test_fused_sgd_that_skips_its_first_step_is_not_repeatable() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], momentum=0.9, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    assert why_not_repeatable(optimizer) is None
    optimizer.found_inf = torch.tensor(1.0)
    assert "uninitialised" in str(why_not_repeatable(optimizer))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    p.grad, optimizer.found_inf = torch.ones(3), torch.tensor(1.0)
    assert why_not_repeatable(optimizer) is None
