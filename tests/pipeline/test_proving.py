"""The proof as wired into a run: quiet where the log is sound, heard where it is not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import stepwell
from stepwell.pipeline import proving as proving_module
from stepwell.pipeline.proof import Outcome


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def config(memory: Path, directory: Path) -> dict[str, object]:
    return {
        "tiers": [
            {"kind": "memory", "directory": str(memory)},
            {"kind": "directory", "path": str(directory)},
        ]
    }


def test_the_first_updates_and_every_base_are_proven(
    memory_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving_module, "BASE_SHARE", 1000.0)  # else the later ones wait for their share
    model, optimizer = build()
    with stepwell.open_sync(
        config(memory_directory, tmp_path / "run"), model=model, optimizer=optimizer
    ) as well:
        for step in range(12):
            train(model, optimizer, step)
            well.save(step, base=step in (5, 9))
            well.wait_until_finished()
        proving = well._session._proving
        assert proving is not None
        proving.close()
        whole = [verdict for verdict in proving.verdicts if verdict.what.startswith("steps")]
    assert [verdict.outcome for verdict in proving.verdicts if verdict.outcome is Outcome.MISMATCH] == []
    assert len(whole) >= 3
    assert any(verdict.outcome is Outcome.PROVEN for verdict in whole)


def test_updates_that_were_not_captured_are_not_held_against_the_log(
    memory_directory: Path, tmp_path: Path
) -> None:
    model, optimizer = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with stepwell.open_sync(
            config(memory_directory, tmp_path / "run"), model=model, optimizer=optimizer
        ) as well:
            for step in range(0, 30, 3):
                train(model, optimizer, step)
                well.save(step)
                well.wait_until_finished()
                with well.paused():
                    train(model, optimizer, step + 1)
                train(model, optimizer, step + 2)
                well.save(step + 2)
                well.wait_until_finished()
        kinds = {record.kind for record in well.metrics().saves}
    assert kinds == {"base only", "gradient"}


def test_weights_changed_behind_the_optimizer_are_found_while_training(
    memory_directory: Path, tmp_path: Path
) -> None:
    model, optimizer = build()
    weight = next(model.parameters())
    with stepwell.open_sync(
        config(memory_directory, tmp_path / "run"), model=model, optimizer=optimizer
    ) as well:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for step in range(60):
                train(model, optimizer, step)
                if step >= 5:
                    weight.data.mul_(0.999)
                well.save(step)
                well.wait_until_finished()
        assert any("the state is captured from now on" in str(warning.message) for warning in heard)
        assert well.metrics().saves[-1].kind == "state"
