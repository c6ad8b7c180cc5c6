"""What the tests of public reports share."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from failure_rig import Run
from torch import nn

import stepwell
from stepwell.cli import app
from stepwell.viewing import View

GRADIENTS = [{"capture": "gradient"}, "shard", "replicate", "commit"]
STATES = [{"capture": "state"}, {"delta": "ordered_delta"}, "shard", "replicate", "commit"]


@dataclass
class Things:
    """What a run is opened with, where the usual job does not do."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module) -> Things:
        return cls(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


def open_with(
    run: Run, things: Things, extra: dict[str, object] | None = None, **keys: object
) -> stepwell.SyncWell:
    return run.open(things, extra=extra, **keys)  # type: ignore[arg-type]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; return its exit code and its one object."""
    code = app.run([*arguments, "--json"])
    told = capsys.readouterr()
    assert told.out.count("\n") == 1, told
    return code, json.loads(told.out)


def read(state: View, key: str) -> memoryview:
    """Read one object of a view."""
    return asyncio.run(state.fetch(key))
