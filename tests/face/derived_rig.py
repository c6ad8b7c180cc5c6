"""Trainings of bfloat16 models whose float32 masters are kept where people keep them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from resume_rig import Build, Place, Training, batch
from torch import nn, optim

MASTERS = ("optimizer", "state", "extra")


def told_by(delta: str) -> list[object]:
    """A pipeline of captured states."""
    return [{"capture": "state"}, {"delta": delta}, "shard", "replicate", "commit"]


class MasterSGD(optim.SGD):
    """Keeps float32 masters in its state; its updates are no gradient's alone, so states are captured."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if "master" not in self.state[weight]:
                    self.state[weight]["master"] = weight.detach().float().clone()
                master = self.state[weight]["master"]
                master.add_(weight.grad.float(), alpha=-group["lr"])
                weight.copy_(master)


def masters(where: str, width: int = 33, *, spoiled: Collection[int] = ()) -> Build:
    """A model in bfloat16; `where` is one of ``MASTERS``; in some steps a copy is left one bit beside."""

    def build() -> Training:
        network = nn.Sequential(
            nn.Linear(9, width), nn.Tanh(), nn.Linear(width, width, bias=False), nn.Linear(width, 3)
        ).bfloat16()
        weights = list(network.parameters())
        extra: dict[str, object] = {}
        if where == "state":
            optimizer: optim.Optimizer = MasterSGD(weights, lr=0.05)
        else:
            kept = [weight.detach().float().clone() for weight in weights]
            optimizer = optim.AdamW(kept, lr=1e-3)
            if where == "extra":
                # Some trainers keep a list of masters beside everything else.
                extra["masters"] = {str(i): master for i, master in enumerate(kept)}

        def step(at: int) -> None:
            network.zero_grad()
            network(batch(at, 5, 9).bfloat16()).float().square().mean().backward()
            if where != "state":
                for master, weight in zip(kept, weights, strict=True):
                    master.grad = None if weight.grad is None else weight.grad.float()
            optimizer.step()
            if where != "state":
                with torch.no_grad():
                    for master, weight in zip(kept, weights, strict=True):
                        weight.copy_(master)
            if at in spoiled:
                weights[2].view(torch.int16).bitwise_xor_(1)

        return Training(network, optimizer, step, extra)

    return build


def capturing(place: Place, delta: str = "none") -> Place:
    """The same place with captured states."""
    place.keys["pipeline"] = told_by(delta)
    return place
