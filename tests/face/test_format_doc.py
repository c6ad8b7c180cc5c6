"""The code in docs/format.md runs, in order, on a run made here, and gives the state that was saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import stepwell


def test_the_recipes_read_what_was_saved(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    tiers = [
        {"kind": "directory", "path": "checkpoints"},
        {"kind": "directory", "path": "packed", "name": "packed", "layout": "pack"},
    ]
    with stepwell.open_sync({"tiers": tiers}, model=model, optimizer=optimizer) as well:
        well.restore()
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 8, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            well.save(step, base=step == 2)
    found: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (repository / "docs/format.md").read_text(), re.DOTALL):
        exec(code, found)
    for recipe in ("state_dict", "packed_state_dict"):
        restored = found[recipe]
        assert isinstance(restored, dict)
        assert restored.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(restored[name].view(torch.uint16), tensor.view(torch.uint16))
    assert len(found["groups"]) == 1  # type: ignore[arg-type]


def test_the_dumps_are_those_of_the_golden_pack(repository: Path) -> None:
    text = (repository / "docs/format.md").read_text()
    data = (repository / "tests/golden/format-1/gradient.pack").read_bytes()
    lines = re.findall(r"^((?:[0-9a-f]{4} ){8}) ", text, re.MULTILINE)
    assert bytes.fromhex("".join(lines)) == data[:64] + data[-64:]
