"""Every kind of state a model has comes back bit for bit: frozen, shared, normalized, averaged, random."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from resume_rig import TOTAL, Build, Place, Training, batch, plain, resume, small_model
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def loss_of(network: nn.Module, at: int) -> torch.Tensor:
    return network(batch(at, 5, 9)).square().mean()


class Branches(nn.Module):
    """A frozen trunk, a head that is never used and one that is used every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(9, 9).requires_grad_(False)
        self.head = nn.Linear(9, 3)
        self.unused = nn.Linear(9, 3)
        self.rare = nn.Linear(9, 3)


def branches() -> Training:
    network = Branches()
    optimizer = optim.AdamW(network.parameters())

    def step(at: int) -> None:
        optimizer.zero_grad()
        trunk = network.trunk(batch(at, 5, 9))
        out = network.head(trunk) + (network.rare(trunk) if at % 2 else 0)
        out.square().mean().backward()
        optimizer.step()

    return Training(network, optimizer, step)


def unfrozen_later() -> Training:
    """Fine-tuning that frees the trunk half way; frozen parameters are in no optimizer until then."""
    network = Branches()
    heads = [*network.head.parameters(), *network.rare.parameters()]
    optimizer = optim.AdamW([{"params": heads}, {"params": list(network.trunk.parameters()), "lr": 1e-4}])

    def step(at: int) -> None:
        network.trunk.requires_grad_(at >= 4)
        optimizer.zero_grad()
        network.head(network.trunk(batch(at, 5, 9))).square().mean().backward()
        optimizer.step()

    return Training(network, optimizer, step)


def normalized() -> Training:
    network = nn.Sequential(
        nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None)
    )
    optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def step(at: int) -> None:
        optimizer.zero_grad()
        loss_of(network, at).backward()
        optimizer.step()

    return Training(network, optimizer, step)


def averaged() -> Training:
    network = small_model()
    optimizer = optim.AdamW(network.parameters())
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    mean = {name: p.detach().clone() for name, p in network.named_parameters()}

    def step(at: int) -> None:
        optimizer.zero_grad()
        loss_of(network, at).backward()
        optimizer.step()
        average.update_parameters(network)
        for name, p in network.named_parameters():
            mean[name].lerp_(p.detach(), 0.1)

    return Training(network, optimizer, step, {"average": average, "mean": mean})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 9)
        self.mix = nn.Linear(9, 9)
        self.out = nn.Linear(9, 11, bias=False)
        self.out.weight = self.embed.weight


def tied() -> Training:
    network = Tied()
    optimizer = optim.AdamW(network.parameters(), fused=True)

    def step(at: int) -> None:
        assert network.out.weight is network.embed.weight
        tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(at))
        optimizer.zero_grad()
        out = network.out(network.mix(network.embed(tokens)).tanh())
        nn.functional.cross_entropy(out, tokens.roll(1)).backward()
        optimizer.step()

    return Training(network, optimizer, step)


def random_draws() -> Training:
    """Dropout, noise from numpy, choices from Python, and a generator of its own."""
    network = nn.Sequential(nn.Linear(9, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = optim.AdamW(network.parameters())
    own = torch.Generator().manual_seed(5)

    def step(at: int) -> None:
        optimizer.zero_grad()
        data = batch(at, 5, 9) + torch.from_numpy(np.random.normal(size=(5, 9)).astype(np.float32))
        data = data * random.choice([0.5, 1.0, 2.0]) + torch.randn(5, 9, generator=own)
        network(data).square().mean().backward()
        optimizer.step()

    return Training(network, optimizer, step, {"own": own})


def autocast() -> Training:
    network = small_model()
    optimizer = optim.AdamW(network.parameters())

    def step(at: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(network, at)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return Training(network, optimizer, step)


CASES: dict[str, Build] = {
    "frozen-and-unused": branches,
    "unfrozen-later": unfrozen_later,
    "batch-norm": normalized,
    "averages": averaged,
    "tied": tied,
    "random": random_draws,
    "autocast": autocast,
    "bfloat16": plain(partial(optim.AdamW, fused=True), lambda: small_model().bfloat16()),
    "float64": plain(optim.AdamW, lambda: small_model().double()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_resumes_bit_for_bit_from_gradients(place: Place, name: str) -> None:
    lives = resume(CASES[name], place)
    assert lives.kinds() == ["base only", *["gradient"] * (TOTAL - 1)]
