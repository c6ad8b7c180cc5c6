"""What the resume tests share: a training, an uninterrupted run of it, and one that crashes twice.

A crash is a copy of the files while the run is alive and saving: what SIGKILL leaves, at a chosen
step and in the same process. ``test_resume_killed`` does it with real processes and a real SIGKILL.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import stepwell
from stepwell.pipeline.bits import as_integers
from stepwell.pipeline.outcome import Restored, SaveRecord

TOTAL = 7
CRASH_AFTER = 5
"""Saves before the crash. The first is a base, the next two updates are on probation, then references."""


@dataclass
class Training:
    """Objects of one life, and what one step does with them."""

    model: object
    optimizer: object
    step: Callable[[int], None]
    extra: dict[str, object] = field(default_factory=dict)


Build = Callable[[], Training]


@dataclass
class Place:
    """A run's two tiers, in a directory of their own."""

    root: Path
    keys: dict[str, object] = field(default_factory=dict)

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    @property
    def directory(self) -> Path:
        return self.root / "directory"

    def config(self) -> dict[str, object]:
        tiers = [
            {"kind": "memory", "directory": str(self.memory)},
            {"kind": "directory", "path": str(self.directory)},
        ]
        # So small a log outgrows its base at once; tests that want bases on the way say so.
        few = {"log_budget": 1000.0, "chunk_bytes": 4096, "handle_sigterm": False}
        return {"tiers": tiers, **few, **self.keys}

    def open(self, training: Training, **overrides: object) -> stepwell.SyncWell:
        return stepwell.open_sync(
            self.config(),
            model=training.model,
            optimizer=training.optimizer,
            extra=training.extra,
            **overrides,
        )

    def crashed(self, name: str = "crashed") -> Place:
        """Copy what is in both tiers now."""
        copy = Place(self.root / name, self.keys)
        for source, target in ((self.memory, copy.memory), (self.directory, copy.directory)):
            for _ in range(100):
                try:
                    shutil.copytree(source, target)
                    break
                except (shutil.Error, FileNotFoundError):
                    # What is old goes in the background, also while it is being copied.
                    shutil.rmtree(target, ignore_errors=True)
        return copy


@dataclass
class Lives:
    """What the lives of one run told."""

    wanted: dict[int, dict[str, object]] = field(default_factory=dict)
    saves: list[SaveRecord] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return [record.kind for record in self.saves]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def batch(step: int, *shape: int, micro: int = 0) -> Tensor:
    """Data of a step, the same in every life."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + micro))


def bits_of(training: Training) -> dict[str, object]:
    """Everything a resume must bring back, as integers, by path."""
    found: dict[str, object] = {}
    model = training.model
    modules = model if isinstance(model, Mapping) else {"": model}
    for name, module in modules.items():
        _flatten(module.state_dict(), f"model.{name}", found)
    optimizers = training.optimizer
    if isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    for index, one in enumerate(optimizers if isinstance(optimizers, Sequence) else [optimizers]):
        _flatten(one.state_dict(), f"optimizer.{index}", found)
    for name, value in training.extra.items():
        state = value.state_dict() if hasattr(value, "state_dict") else value
        _flatten(state, f"extra.{name}", found)
    _flatten(torch.get_rng_state(), "rng.torch", found)
    name, words, *place = np.random.get_state()
    found["rng.numpy"] = (name, words.tobytes(), place)
    found["rng.python"] = random.getstate()
    return found


def _flatten(value: object, path: str, found: dict[str, object]) -> None:
    if isinstance(value, Tensor):
        found[path] = (str(value.dtype), tuple(value.shape), as_integers(value.detach()).numpy().tobytes())
    elif isinstance(value, Mapping):
        found[f"{path}/keys"] = sorted(map(repr, value))
        for key, item in value.items():
            _flatten(item, f"{path}/{key}", found)
    elif isinstance(value, list | tuple):
        found[f"{path}/length"] = len(value)
        for index, item in enumerate(value):
            _flatten(item, f"{path}/{index}", found)
    elif isinstance(value, float):
        found[path] = value.hex()
    elif isinstance(value, torch.Generator):
        _flatten(value.get_state(), path, found)
    else:
        found[path] = (type(value).__name__, repr(value))


def differences(found: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """Name what is not equal."""
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def assert_same(found: Mapping[str, object], wanted: Mapping[str, object], where: str) -> None:
    assert not (names := differences(found, wanted)), f"{where}: {names}"


def uninterrupted(build: Build, total: int = TOTAL) -> dict[int, dict[str, object]]:
    """Train without stepwell; the state after each step. -1 is the state before the first."""
    seed_everything(1)
    training = build()
    wanted = {-1: bits_of(training)}
    for step in range(total):
        training.step(step)
        wanted[step] = bits_of(training)
    return wanted


def resume(
    build: Build,
    place: Place,
    *,
    total: int = TOTAL,
    crash_after: int = CRASH_AFTER,
    saved: Callable[[int], bool] = lambda step: True,
    exact: bool = True,
    patient: bool = False,
) -> Lives:
    """Train, crash, come back from memory, train on, end, come back from the directory.

    The state is compared with that of an uninterrupted run after every step of every life. `patient`
    waits for each save, so that no base is put off because another one is on its way.
    """
    lives = Lives(uninterrupted(build, total))
    seed_everything(1)
    training = build()
    with place.open(training) as well:
        assert well.restore() is None
        train(well, training, lives, range(crash_after), saved, patient)
        well.wait_until_finished(60)
        crashed = place.crashed()
    seed_everything(2)
    training = build()
    with crashed.open(training) as well:
        last = max(step for step in range(crash_after) if saved(step))
        restore(well, training, lives, step=last, tier="memory", exact=exact)
        train(well, training, lives, range(last + 1, total), saved, patient)
    assert not crashed.memory.exists(), "after a clean end nothing stays in memory"
    seed_everything(3)
    training = build()
    with crashed.open(training) as well:
        last = max(step for step in range(total) if saved(step))
        restore(well, training, lives, step=last, tier="directory", exact=exact)
    return lives


def train(
    well: stepwell.SyncWell,
    training: Training,
    lives: Lives,
    steps: range,
    saved: Callable[[int], bool] = lambda step: True,
    patient: bool = False,
) -> None:
    for step in steps:
        training.step(step)
        if saved(step):
            well.save(step)
            if patient:
                well.wait_until_finished(60)
        assert_same(bits_of(training), lives.wanted[step], f"step {step}")
    lives.saves.extend(well.metrics().saves)


def restore(
    well: stepwell.SyncWell, training: Training, lives: Lives, *, step: int, tier: str, exact: bool
) -> None:
    restored = well.restore()
    assert restored is not None
    assert (restored.step, restored.lost_steps, restored.faults) == (step, 0, ())
    assert_same(bits_of(training), lives.wanted[step], f"restored step {step} from {restored.tier}")
    assert restored.tier == tier
    assert restored.exact is exact
    assert restored.bound == (0.0 if exact else None)
    lives.restored.append(restored)


# Models.


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 7, bias=False), nn.Linear(7, 3))


class Odd(nn.Module):
    """Parameters of every awkward size: 0-dim, one, odd, empty, and some that 4 KiB chunks cut."""

    SHAPES = ((), (1,), (3,), (5, 7), (64,), (130,), (0,), (33, 67), (40, 128), (2, 0, 3), (8, 8))

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in self.SHAPES])

    def loss(self, step: int) -> Tensor:
        random_of = torch.Generator().manual_seed(step)
        terms = [(w * torch.randn(w.shape, generator=random_of)).square().sum() for w in self.weights]
        return torch.stack(terms).sum()


def plain(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    model: Callable[[], nn.Module] = small_model,
    *,
    set_to_none: bool = True,
) -> Build:
    """The ordinary loop: one model, one optimizer, no more."""

    def build() -> Training:
        network = model()
        optimizer = make(list(network.parameters()))
        dtype = next(network.parameters()).dtype

        def step(at: int) -> None:
            optimizer.zero_grad(set_to_none=set_to_none)
            network(batch(at, 5, 9).to(dtype)).square().mean().backward()
            optimizer.step()

        return Training(network, optimizer, step)

    return build


def odd(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Build:
    """A model of awkward sizes."""

    def build() -> Training:
        network = Odd()
        optimizer = make(list(network.parameters()))

        def step(at: int) -> None:
            optimizer.zero_grad()
            network.loss(at).backward()
            optimizer.step()

        return Training(network, optimizer, step)

    return build
