"""What works beside the training works behind it; what the training waits for does not."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import stepwell
from stepwell.stores.threads import BACKGROUND_NICE


def priorities(others: set[threading.Thread]) -> dict[str, int]:
    return {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id)
        for thread in set(threading.enumerate()) - others
        if thread.name.startswith("stepwell") and thread.native_id is not None
    }


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_a_restore_has_the_priority_of_the_training_and_saves_come_behind(
    memory_directory: Path, tmp_path: Path
) -> None:
    config = {
        "tiers": [
            {"kind": "memory", "directory": str(memory_directory)},
            {"kind": "directory", "path": str(tmp_path / "run")},
        ]
    }
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for life in range(2):
        others = set(threading.enumerate())  # of runs before, if they have not ended yet
        model = nn.Linear(40, 40)
        optimizer = torch.optim.Adam(model.parameters())
        with stepwell.open_sync(config, model=model, optimizer=optimizer) as well:
            restored = well.restore()
            assert (restored is None) == (life == 0)
            assert {name: nice for name, nice in priorities(others).items() if nice != own} == {}
            for step in range(2 * life, 2 * life + 2):
                model(torch.ones(2, 40)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                well.save(step)
                well.wait_until_finished()
            behind = [
                name for name, nice in priorities(others).items() if nice == min(19, own + BACKGROUND_NICE)
            ]
            assert {"stepwell-runner", "stepwell-encode_0"} <= set(behind)
            assert any(name.startswith("stepwell-file") for name in behind)
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
