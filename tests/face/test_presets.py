"""Each preset: a whole training that crashes and comes back, twice, and says how sure it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from resume_rig import Place, Training, batch, bits_of, differences, seed_everything
from torch import nn

import stepwell
from stepwell.cli import app
from stepwell.config.presets import PRESETS

LOSSY = [preset for preset in PRESETS if preset != "exact"]
STATE = ["tiercheck", "fastcheck"]
STEPS, CRASH = 18, 13
CHUNKS = {"chunk_bytes": 1 << 20}


class Small(nn.Module):
    """An embedding, a norm, biases, and one weight that counts as large."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(40, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 1100)
        self.head = nn.Linear(1100, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.norm(self.wte(tokens).mean(1)))))


def build() -> Training:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(at: int) -> None:
        optimizer.zero_grad()
        tokens = (batch(at, 16, 6).abs() * 13).long().clamp(max=39)
        wanted = torch.stack([(tokens % 8 == kind).float().mean(1) for kind in range(8)], 1)
        (model(tokens) - wanted).square().mean().backward()
        optimizer.step()

    return Training(model, optimizer, step, {"count": {"steps": 0}})


def weights_of(training: Training) -> torch.Tensor:
    model = training.model
    assert isinstance(model, nn.Module)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def tensors_of(training: Training) -> list[torch.Tensor]:
    """Weights and optimizer states, copied."""
    optimizer = training.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [weights_of(training), *(state.detach().clone() for state in states)]


def shown_rows(
    place: Place, step: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, list[str]]]:
    """What ``stepwell show`` says of each tensor of a save."""
    assert app.run(["show", str(place.directory), str(step), "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}


@pytest.mark.parametrize("base_every", [1000, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_training_that_is_abandoned_comes_back_twice(place: Place, preset: str, base_every: int) -> None:
    place.keys = {"preset": preset, "base_every": base_every, **CHUNKS}
    seed_everything(1)
    training = build()
    start = weights_of(training).clone()
    with place.open(training) as well:
        assert well.restore() is None
        for step in range(CRASH):
            training.step(step)
            well.save(step)
        well.wait_until_finished(60)
        saved, bits = tensors_of(training), bits_of(training)
        loop_bytes = well.metrics().forecast_bytes.get("closed_loop")
        assert (loop_bytes is None) == (preset == "exact")
        crashed = place.crashed()
    seed_everything(2)
    training = build()
    with crashed.open(training) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.lost_steps, restored.faults) == (CRASH - 1, 0, ())
        at_base = base_every == 4 and restored.base_step == CRASH - 1
        check_restored(restored, preset, saved, tensors_of(training), start, exact=at_base)
        if preset == "exact":
            assert not differences(bits_of(training), bits)
        for step in range(CRASH, STEPS):
            training.step(step)
            well.save(step)
        well.wait_until_finished(60)
        first = well.metrics().saves[0]
        assert first.base or restored.exact, "after a lossy restore the next save is a base"
        saved = tensors_of(training)
    seed_everything(3)
    training = build()
    with crashed.open(training) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.tier) == (STEPS - 1, "directory")
        at_base = restored.base_step == STEPS - 1
        check_restored(restored, preset, saved, tensors_of(training), start, exact=at_base)


def check_restored(
    restored: stepwell.Restored,
    preset: str,
    saved: list[torch.Tensor],
    found: list[torch.Tensor],
    start: torch.Tensor,
    *,
    exact: bool,
) -> None:
    errors = [float((one - other).abs().max()) for one, other in zip(saved, found, strict=True)]
    if preset == "exact" or exact:
        assert (restored.exact, restored.bound, max(errors)) == (True, 0.0, 0.0)
        return
    assert not restored.exact
    if preset in STATE:
        assert restored.bound is not None
        assert 0 < max(errors) <= restored.bound
    else:
        assert restored.bound is None
    moved = float((saved[0] - start).square().mean().sqrt())
    error = float((saved[0] - found[0]).square().mean().sqrt())
    assert error < 0.25 * moved, "far nearer than where it began"


@pytest.mark.parametrize("preset", LOSSY)
def test_a_lossy_save_is_small_and_show_says_what_was_chosen_and_why(
    place: Place, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place.keys = {"preset": preset, "base_every": 1000, **CHUNKS}
    training = build()
    model = training.model
    assert isinstance(model, nn.Module)
    with place.open(training) as well:
        for step in range(5):
            training.step(step)
            well.save(step)
            well.wait_until_finished(60)
        last = well.metrics().saves[-1]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert last.differential_bytes < {"compact": 1.3, "tiercheck": 2.8, "fastcheck": 3.0}[preset] * count
    rows = shown_rows(place, 4, capsys)
    choices = {name: " ".join(row["choices"]) for name, row in rows.items()}
    if preset == "compact":
        assert choices["model/up.weight"] == "int8: gradient"
    if preset == "tiercheck":
        assert choices["model/up.weight"] == "sparse: large weight"
        assert "never sparse" in choices["model/norm.weight"]
        assert "an embedding" in choices["model/wte.weight"]
        assert choices["optim/state/up.weight/exp_avg_sq"] == "log_quant: variance"
        assert choices["optim/state/up.weight/step"].startswith("exact: ")
    if preset == "fastcheck":
        assert choices["optim/state/up.weight/exp_avg"] == "codebook: momentum"
    assert app.run(["show", str(place.directory), "4"]) == 0
    printed = capsys.readouterr().out
    assert ("no bound known" if preset == "compact" else "of what was saved") in printed
    assert "kept as" in printed


@pytest.mark.parametrize("preset", LOSSY)
def test_a_view_of_a_lossy_save_is_what_a_restore_gives(place: Place, preset: str) -> None:
    import zarr

    place.keys = {"preset": preset, "base_every": 1000, **CHUNKS}
    training = build()
    with place.open(training) as well:
        for step in range(4):
            training.step(step)
            well.save(step)
    restored = build()
    with place.open(restored) as well:
        assert well.restore() is not None
        model = restored.model
        assert isinstance(model, nn.Module)
        wanted = model.get_parameter("up.weight").detach().numpy().copy()
        with stepwell.view(str(place.directory), 3) as view:
            found = zarr.open_group(view, mode="r")["model/up.weight"][:]  # type: ignore[index]
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("preset", STATE)
def test_where_a_base_is_gone_the_older_one_and_the_log_lead_to_the_same(place: Place, preset: str) -> None:
    place.keys = {"preset": preset, "base_every": 4, **CHUNKS}
    training = build()
    with place.open(training) as well:
        for step in range(7):
            training.step(step)
            well.save(step)
            well.wait_until_finished(60)
    bases = sorted(place.directory.glob("*/base/*"))
    assert bases
    for manifest in bases[-1].glob("rank-*.manifest.json"):
        manifest.write_bytes(b"damaged")
    again = build()
    with place.open(again) as well:
        restored = well.restore()
        assert restored is not None
        assert restored.step == 6
        assert restored.faults
        assert restored.bound is not None
    errors = [
        float((one - other).abs().max())
        for one, other in zip(tensors_of(training), tensors_of(again), strict=True)
    ]
    assert max(errors) <= restored.bound


def test_compact_captures_states_exactly_where_gradients_cannot_be_had(place: Place) -> None:
    place.keys = {"preset": "compact", "base_every": 1000, **CHUNKS}

    def lbfgs() -> Training:
        model = nn.Linear(9, 5)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        def step(at: int) -> None:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch(at, 4, 9)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        return Training(model, optimizer, step)

    training = lbfgs()
    with place.open(training) as well:
        for step in range(3):
            training.step(step)
            well.save(step)
    bits = bits_of(training)
    again = lbfgs()
    with place.open(again) as well:
        restored = well.restore()
        assert restored is not None
        assert restored.exact
        assert not differences(bits_of(again), bits)


def test_a_rule_keeps_a_tensor_exact(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    quantize = {"gradient": "int8", "rules": {"head.*": "exact"}}
    stages = ["capture", {"quantize": quantize}, "shard", "replicate", "commit"]
    place.keys = {"pipeline": stages, "base_every": 1000, **CHUNKS}
    training = build()
    with place.open(training) as well:
        for step in range(4):
            training.step(step)
            well.save(step)
    rows = shown_rows(place, 3, capsys)
    assert rows["model/head.weight"]["choices"] == ["exact: rule 'head.*'"]
    assert rows["model/head.weight"]["encodings"] != ["stepwell.int8"]
    assert rows["model/up.weight"]["encodings"] == ["stepwell.int8"]


def test_what_a_lossy_run_left_is_read_and_led_on_under_another_preset(place: Place) -> None:
    for preset in ("compact", "tiercheck", "exact", "fastcheck", "exact"):
        place.keys = {"preset": preset, "base_every": 1000, **CHUNKS}
        training = build()
        with place.open(training) as well:
            before = well.restore()
            first = 0 if before is None else before.step + 1
            for step in range(first, first + 3):
                training.step(step)
                well.save(step)
    again = build()
    with place.open(again) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.exact) == (14, True)
    assert torch.equal(weights_of(again), weights_of(training))


WORKER = textwrap.dedent("""
    import os, signal, sys
    sys.path.insert(0, sys.argv[2])
    import torch
    torch.set_num_threads(1)
    from contextlib import ExitStack
    from pathlib import Path
    from resume_rig import seed_everything
    from test_presets import KILLED, build, place_of
    with ExitStack() as opened:
        runs = []
        for preset in KILLED:
            seed_everything(1)
            training = build()
            runs.append((training, opened.enter_context(place_of(Path(sys.argv[1]), preset).open(training))))
        for step in range(7):
            for training, well in runs:
                training.step(step)
                handle = well.save(step)
        for _, well in runs:
            well.wait_until_finished(60)
        os.kill(os.getpid(), signal.SIGKILL)
""")

KILLED = ("compact", "tiercheck", "fastcheck")


def place_of(root: Path, preset: str) -> Place:
    return Place(root / preset, {"run": preset, "preset": preset, "base_every": 1000, **CHUNKS})


def test_killed_for_real(place: Place) -> None:
    here = str(Path(__file__).parent)
    killed = subprocess.run(
        [sys.executable, "-c", WORKER, str(place.root), here],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    seed_everything(1)
    wanted = build()
    for step in range(7):
        wanted.step(step)
    for preset in KILLED:
        training = build()
        with place_of(place.root, preset).open(training) as well:
            restored = well.restore()
            assert restored is not None
            assert (restored.step, restored.tier, restored.exact) == (6, "memory", False)
            assert torch.allclose(weights_of(training), weights_of(wanted), atol=5e-3)
            training.step(7)
            well.save(7)
            well.wait_until_finished(60)
            assert well.metrics().saves[0].base
