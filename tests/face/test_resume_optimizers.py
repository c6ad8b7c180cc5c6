"""Every optimizer comes back bit for bit, and is captured the way it should be."""

from __future__ import annotations

import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from resume_rig import CRASH_AFTER, TOTAL, Build, Place, Training, batch, odd, plain, resume, small_model
from torch import optim
from torch.optim import Optimizer

GRADIENTS = {
    "adamw": plain(optim.AdamW),
    "adamw-foreach": plain(partial(optim.AdamW, foreach=True)),
    "adamw-fused": plain(partial(optim.AdamW, fused=True)),
    "adam-amsgrad": plain(partial(optim.Adam, amsgrad=True, weight_decay=0.1)),
    "sgd-momentum": plain(partial(optim.SGD, lr=0.1, momentum=0.9, foreach=False)),
    "sgd-momentum-foreach": plain(partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "sgd-nesterov": plain(partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False)),
    "sgd-nesterov-foreach": plain(partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)),
    "rmsprop": plain(optim.RMSprop),
    "adafactor": plain(optim.Adafactor),
    "odd-adamw-fused": odd(partial(optim.AdamW, fused=True)),
    "odd-adam-fused": odd(partial(optim.Adam, fused=True, weight_decay=0.1)),
    "odd-sgd-fused": odd(partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True)),
}

OTHERS = {
    "adamw-foreach-maximize": partial(optim.AdamW, foreach=True, maximize=True),
    "adamw-tensor-lr": lambda ps: optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "adam-amsgrad-foreach": partial(optim.Adam, amsgrad=True, foreach=True),
    "adam-amsgrad-fused": partial(optim.Adam, amsgrad=True, fused=True),
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd-dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "rmsprop-centered": partial(optim.RMSprop, centered=True, momentum=0.9, foreach=True),
    "adagrad": partial(optim.Adagrad, lr_decay=0.1),
    "adagrad-fused": partial(optim.Adagrad, fused=True),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": partial(optim.NAdam, decoupled_weight_decay=True),
    "radam": optim.RAdam,
    "asgd": partial(optim.ASGD, t0=2),
    "rprop": optim.Rprop,
}


def all_others() -> Training:
    """Many optimizers in one run, each with a model of its own."""
    networks = {name: small_model() for name in OTHERS}
    optimizers = {name: make(list(networks[name].parameters())) for name, make in OTHERS.items()}

    def step(at: int) -> None:
        for name, network in networks.items():
            optimizers[name].zero_grad()
            network(batch(at, 5, 9)).square().mean().backward()
            optimizers[name].step()

    return Training(networks, optimizers, step)


GRADIENTS["all-others"] = all_others


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_bring_an_optimizer_back(place: Place, name: str) -> None:
    lives = resume(GRADIENTS[name], place)
    # Only the very first save is a base: an exact restore leads the log on.
    assert lives.kinds() == ["base only", *["gradient"] * (TOTAL - 1)]
    updates = len(OTHERS) if name == "all-others" else 1
    assert [restored.replayed for restored in lives.restored] == [
        updates * (CRASH_AFTER - 1),
        updates * (TOTAL - 1),
    ]
    assert [restored.base_step for restored in lives.restored] == [0, 0]


class Sign(Optimizer):
    """A third party's optimizer, with state of its own."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter.add_(mean.sign(), alpha=-group["lr"])


def test_an_optimizer_that_is_not_torchs_is_replayed_by_its_own_class(place: Place) -> None:
    assert resume(plain(Sign), place).kinds() == ["base only", *["gradient"] * (TOTAL - 1)]


def lbfgs() -> Training:
    network = small_model()
    optimizer = optim.LBFGS(network.parameters(), lr=0.1, max_iter=3, history_size=4)

    def step(at: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(batch(at, 5, 9)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(network, optimizer, step)


def compiled_step(backend: str = "eager") -> Training:
    torch.compiler.reset()
    network = small_model()
    optimizer = optim.AdamW(network.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False)
    update = torch.compile(optimizer.step, backend=backend)

    def step(at: int) -> None:
        optimizer.zero_grad()
        network(batch(at, 5, 9)).square().mean().backward()
        update()

    return Training(network, optimizer, step)


def step_compiled_to_machine_code() -> Training:
    """As users compile it: one fused kernel, which rounds unlike the eager step."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch's inductor needs a C++ compiler, and there is none")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("torch's inductor needs Python's C headers, and there are none")
    return compiled_step("inductor")


def closure_twice() -> Training:
    """An optimizer of torch's, whose closure a subclass calls twice, as SAM does."""

    class Twice(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=0.01)
            return super().step(closure)

    network = small_model()
    optimizer = Twice(network.parameters(), lr=0.05, momentum=0.9)

    def step(at: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(batch(at, 5, 9)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(network, optimizer, step)


STATES = {
    "lbfgs": lbfgs,
    "compiled-step": compiled_step,
    "compiled-step-inductor": step_compiled_to_machine_code,
    "closure-twice": closure_twice,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.parametrize("name", STATES)
def test_the_state_is_captured_where_gradients_would_not_do(place: Place, name: str) -> None:
    build: Build = STATES[name]
    lives = resume(build, place)
    assert set(lives.kinds()) <= {"base only", "state"}
    assert lives.kinds().count("state") >= TOTAL - 3
    assert all(record.reason for record in lives.saves)
