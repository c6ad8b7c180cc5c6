"""What the failure tests share: a small training, its uninterrupted run, tiers that fail by plan."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import stepwell
from stepwell import assembly
from stepwell.pipeline.tier import Tier
from stepwell.stores.base import ObjectStore
from stepwell.stores.fault import Fault, FaultStore

PATIENCE_S = 30.0
"""Deadline of waits that end at once unless something is broken."""

Bits = dict[str, bytes]


class Job:
    """A training whose every step draws from the global generator: its random state counts."""

    def __init__(self, seed: int = 7, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        """One update."""
        self.model(torch.randn(4, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> Bits:
        """Weights, optimizer state and random state, as bytes."""
        found = {f"model.{name}": _bytes(tensor) for name, tensor in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optim.{index}.{name}": _bytes(value) for name, value in state.items()}
        found["rng"] = _bytes(torch.get_rng_state())
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@cache
def uninterrupted(total: int, width: int = 8) -> tuple[Bits, ...]:
    """Bits after each step of a run that nothing happens to."""
    found = []
    with torch.random.fork_rng(devices=[]):
        job = Job(width=width)
        for _ in range(total):
            job.step()
            found.append(job.bits())
    return tuple(found)


@dataclass
class Run:
    """A run's two tiers, in a directory of their own."""

    root: Path
    keys: dict[str, object] = field(default_factory=dict)
    memory_keys: dict[str, object] = field(default_factory=dict)
    directory_keys: dict[str, object] = field(default_factory=dict)

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    @property
    def directory(self) -> Path:
        return self.root / "directory"

    def tiers(self) -> list[dict[str, object]]:
        return [
            {"kind": "memory", "directory": str(self.memory), **self.memory_keys},
            {"kind": "directory", "path": str(self.directory), **self.directory_keys},
        ]

    def config(self, **keys: object) -> dict[str, object]:
        usual = {"log_budget": 1000.0, "handle_sigterm": False, "close_deadline_s": PATIENCE_S}
        return {"tiers": self.tiers(), **usual, **self.keys, **keys}

    def open(
        self, job: Job, *, extra: Mapping[str, object] | None = None, fresh: bool = False, **keys: object
    ) -> stepwell.SyncWell:
        return stepwell.open_sync(
            self.config(**keys), model=job.model, optimizer=job.optimizer, extra=extra, fresh=fresh
        )

    def copied(self, name: str, *, memory: bool = True) -> Run:
        """Copy what is in the tiers now, with or without the memory."""
        copy = Run(self.root / name, self.keys, self.memory_keys, self.directory_keys)
        copy.root.mkdir()
        if memory:
            shutil.copytree(self.memory, copy.memory)
        shutil.copytree(self.directory, copy.directory)
        return copy

    def restored(self, **keys: object) -> tuple[stepwell.Restored | None, Bits]:
        """Restore into a new job; say what came back and with which bits."""
        job = Job(seed=99)
        with self.open(job, **keys) as well:
            return well.restore(), job.bits()

    def train(self, steps: range, job: Job | None = None, *, base_at: Sequence[int] = ()) -> Job:
        """Train and save the steps of one life, wait for all of them, leave the run as a kill would."""
        job = job or Job()
        with self.crashing(job) as well:
            for step in steps:
                job.step()
                well.save(step, base=step in base_at)
            well.wait_until_finished(PATIENCE_S)
        return job

    @contextmanager
    def crashing(self, job: Job, **keys: object) -> Iterator[stepwell.SyncWell]:
        """Open the run; at the end keep what the tiers held before an orderly close."""
        with self.open(job, **keys) as well:
            yield well
            idle(well)
            kept = self.copied("kept")
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.directory)
        kept.memory.rename(self.memory)
        kept.directory.rename(self.directory)
        kept.root.rmdir()

    def objects(self, tier: str, pattern: str) -> list[Path]:
        """Files of a tier by name; those of the arena have no names, so give ``object-*`` for it."""
        return sorted((self.memory if tier == "memory" else self.directory).rglob(pattern))


def break_tier(patch: pytest.MonkeyPatch, name: str, *plan: Fault, seed: int = 1) -> Callable[[], FaultStore]:
    """Let the store of one tier fail by plan in every run that is opened; returns how to get at it."""
    made: list[FaultStore] = []

    def tier(label: str, store: ObjectStore, **settings: object) -> Tier:
        if label == name:
            store = FaultStore(store, seed, plan)
            made.append(store)
        return Tier(label, store, **settings)

    patch.setattr(assembly, "Tier", tier)
    return lambda: made[-1]


def files_of(run: Run) -> dict[str, bytes]:
    """Everything committed in the directory, by name."""
    return {
        str(path.relative_to(run.directory)): path.read_bytes()
        for path in run.directory.rglob("*")
        if path.is_file() and "lock" not in path.name
    }


def idle(well: stepwell.SyncWell) -> None:
    """Wait until nothing is on its way, so that the files stand still."""
    session = well._session
    session._outwait(time.monotonic() + PATIENCE_S)
    bases = session._bases
    with bases._condition:
        assert bases._condition.wait_for(lambda: not bases._busy and not bases._refilling, PATIENCE_S)


def flip(path: Path, place: float = 0.5) -> None:
    """Flip one bit of a file, in place."""
    data = np.fromfile(path, dtype=np.uint8)
    data[min(int(len(data) * place), len(data) - 1)] ^= 0x10
    with path.open("r+b") as file:
        file.write(data.tobytes())


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < limit_s, f"took {took_s:.1f} s, allowed are {limit_s} s"
