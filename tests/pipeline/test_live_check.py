"""What does not fit or cannot be saved is refused, with everything named and nothing changed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from stepwell.errors import FormatError, StateMismatchError, UnsupportedValueError, UsageError
from stepwell.pipeline.bits import bit_equal, own_copy
from stepwell.pipeline.collected import Collected
from stepwell.pipeline.live import LiveState


def frozen_copy(collected: Collected) -> Collected:
    """What a store would give back: own memory, the tree through canonical JSON."""
    tree = json.loads(json.dumps(collected.tree, sort_keys=True, allow_nan=False))
    return Collected(collected.specs, tuple(own_copy(t) for t in collected.tensors), tree)


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


def test_checkpoint_of_another_model_lists_every_difference_and_changes_nothing() -> None:
    model, live = tied_run(0)
    train(live, model)
    saved = frozen_copy(live.collect())
    torch.manual_seed(3)
    other = Tied()
    other.more = nn.Linear(2, 2)
    del other.scale
    other.norm = nn.BatchNorm1d(3)
    other.embed.weight.data = other.embed.weight.data.double()
    target = LiveState(other, torch.optim.AdamW(other.parameters()), {"new": 1})
    before = frozen_copy(target.collect())
    with pytest.raises(StateMismatchError) as caught:
        target.load(saved)
    text = str(caught.value)
    for words in (
        "missing in the checkpoint: model/more.bias, model/more.weight",
        "not in the live model: model/scale",
        "model/norm.weight (saved [4], live [3])",
        "model/embed.weight (saved float32, live float64)",
        "optim group 0 had not: model/more.bias",
        "extra missing in the checkpoint: new",
    ):
        assert words in text
    after = target.collect()
    assert all(map(bit_equal, before.tensors, after.tensors))


def test_ties_that_differ_are_a_mismatch() -> None:
    _, live = tied_run(0)
    saved = frozen_copy(live.collect())
    loose = Tied()
    loose.head.weight = nn.Parameter(torch.zeros(5, 4))
    target = LiveState(loose, torch.optim.AdamW(loose.parameters()))
    with pytest.raises(StateMismatchError, match="tied in the checkpoint"):
        target.load(saved)
    with pytest.raises(StateMismatchError, match="tied in the live model"):
        live.load(frozen_copy(target.collect()))


def test_other_optimizer_or_rng_is_a_mismatch() -> None:
    model = nn.Linear(2, 2)
    saved = frozen_copy(LiveState(model, torch.optim.Adam(model.parameters()), rng=False).collect())
    with pytest.raises(StateMismatchError, match="no RNG state"):
        LiveState(model, torch.optim.Adam(model.parameters())).load(saved)
    with pytest.raises(StateMismatchError, match=r"saved from torch\.optim\.adam:Adam"):
        LiveState(model, torch.optim.SGD(model.parameters()), rng=False).load(saved)


def test_newer_or_damaged_tree_is_refused_before_anything_changes() -> None:
    model, live = tied_run(0)
    train(live, model)
    saved = frozen_copy(live.collect())
    before = frozen_copy(live.collect())
    train(live, model)
    now = frozen_copy(live.collect())
    damaged = [
        {**saved.tree, "format": 2},
        {**saved.tree, "rng": {"$tensor": "rng/none"}},
        {**saved.tree, "extra": None},
        {**saved.tree, "model": {**saved.tree["model"], "aliases": {"model/head.weight": "gone"}}},
    ]
    state = saved.tree["optimizers"]["optim"]["state"]
    for pairs in ([["model/norm.bias", {"$dict": [["step", {"$what": 1}]]}]], [*state, 5], None):
        optimizer = {**saved.tree["optimizers"]["optim"], "state": pairs}
        damaged.append({**saved.tree, "optimizers": {"optim": optimizer}})
    for tree in damaged:
        with pytest.raises((FormatError, StateMismatchError)):
            live.load(Collected(saved.specs, saved.tensors, tree))
        assert all(map(bit_equal, live.collect().tensors[:-3], now.tensors[:-3]))
    live.load(saved)
    assert all(map(bit_equal, live.collect().tensors, before.tensors))


def test_extra_that_refuses_its_state_is_named() -> None:
    class Refuses:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("not mine")

    live = LiveState(None, None, {"odd": Refuses()}, rng=False)
    with pytest.raises(StateMismatchError, match=r"extra 'odd': .*Refuses does not take .*: not mine"):
        live.load(frozen_copy(live.collect()))


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="model is a int"):
        LiveState(5)
    with pytest.raises(UsageError, match=r"optim\.1"):
        LiveState(None, [torch.optim.SGD([torch.zeros(1)]), 3])
    with pytest.raises(UsageError, match="only one of"):
        LiveState(None, None, {"x": type("Half", (), {"state_dict": lambda self: {}})()})
    with pytest.raises(UsageError, match="key 1"):
        LiveState(None, None, {1: 2})
    with pytest.raises(UnsupportedValueError, match=r"model/weight: a lazy parameter"):
        LiveState(nn.LazyLinear(2))
    with pytest.raises(UnsupportedValueError, match=r"extra/a/f.*function"):
        LiveState(None, None, {"a": {"f": len}}).collect()
    model = nn.Module()
    model.register_buffer("s", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedValueError, match=r"model/s: .*sparse"):
        LiveState(model).collect_aux()


def test_same_name_without_wrappers_is_refused() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self._orig_mod = nn.Linear(1, 1)

    with pytest.raises(UnsupportedValueError, match=r"model/weight: two members"):
        LiveState(Wrapper())
