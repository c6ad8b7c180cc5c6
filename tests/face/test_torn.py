"""Torn on purpose: something writes into gradients at random moments; nothing wrong is ever restored.

200 seeded runs. What is written, how much of it, by which way and when all come from the seed; the
thread's timing is the machine's. Live training uses what was written, so right is what each save saw.
"""

from __future__ import annotations

import random
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from resume_rig import Place, Training, batch, bits_of, differences, seed_everything
from torch import Tensor, nn, optim

import stepwell
from stepwell.errors import UsageError

RUNS = 200
BATCHES = 10
STEPS = 5

OPTIMIZERS: list[Callable[..., optim.Optimizer]] = [
    partial(optim.AdamW, fused=True),
    partial(optim.AdamW, foreach=True),
    partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    optim.RMSprop,
]


def in_place(gradient: Tensor, part: slice, value: float) -> None:
    gradient.view(-1)[part].add_(value)


def through_data(gradient: Tensor, part: slice, value: float) -> None:
    gradient.data.view(-1)[part].mul_(value)


def through_numpy(gradient: Tensor, part: slice, value: float) -> None:
    gradient.numpy().reshape(-1)[part] = value


WAYS = [in_place, through_data, through_numpy]
MOMENTS = ["thread", "after-update", "after-save", "thread-late", "all"]


class Vandal:
    """Writes into the gradients it was shown, when told and (as a thread) whenever it likes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.way = WAYS[seed % len(WAYS)]
        self.moment = MOMENTS[self.random.randrange(len(MOMENTS))]
        # By then the first updates, which are always copied at once, are over and gradients are held.
        self.first = 3 if self.moment == "thread-late" else self.random.randrange(0, 4)
        self.writes = 0
        self._prey: list[Tensor] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vandal")
        if self.moment.startswith("thread") or self.moment == "all":
            self._thread.start()

    def show(self, gradients: list[Tensor]) -> None:
        self._prey = gradients

    def told(self, step: int, moment: str) -> None:
        if step >= self.first and self.moment in (moment, "all") and self.random.random() < 0.7:
            self._write()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        mine = random.Random(self.first)
        # A pause of random length is the experiment here, not a way to wait for something.
        while not self._stop.wait(mine.random() * 0.002):
            self._write()

    def _write(self) -> None:
        for gradient in self._prey:
            count = gradient.numel()
            start = self.random.randrange(count)
            part = slice(start, start + self.random.choice([1, 7, count]))
            self.way(gradient, part, self.random.choice([-3.0, 0.0, 1.5, float("nan")]))
            self.writes += 1


def training(seed: int, vandal: Vandal) -> Training:
    width = (5, 40, 300)[seed % 3]
    network = nn.Sequential(nn.Linear(9, width), nn.Tanh(), nn.Linear(width, 60))
    optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)](network.parameters())
    cleared = seed % 2 == 0

    def step(at: int) -> None:
        optimizer.zero_grad()
        network(batch(at, 5, 9)).square().mean().backward()
        # Shown before the update: the writes hit the capture, the update, and what is held after it.
        if at >= vandal.first:
            vandal.show([p.grad for p in network.parameters() if p.grad is not None])
        optimizer.step()
        vandal.told(at, "after-update")
        if cleared:
            optimizer.zero_grad()

    return Training(network, optimizer, step)


def config(place: Place, seed: int) -> dict[str, object]:
    """One tier is enough for most; where there is one only, nothing else can hide a fault."""
    both = {**place.config(), "chunk_bytes": 1 << 20}
    tiers = both["tiers"]
    assert isinstance(tiers, list)
    chosen = {0: tiers, 1: tiers[1:], 2: tiers[1:]}
    return {**both, "tiers": chosen.get(seed % 11, tiers[:1])}


def one_run(place: Place, seed: int) -> str:
    """Train with a vandal about, come back, compare; return what became of the newest step."""
    seed_everything(seed)
    vandal = Vandal(seed)
    first = training(seed, vandal)
    seen: dict[int, dict[str, object]] = {}
    # Several updates between saves: more is captured, and 200 runs take less time.
    saves = (0, 2 + seed % 2, 4)
    try:
        with open_run(place, seed, first) as well:
            for step in range(STEPS):
                first.step(step)
                if step not in saves:
                    continue
                try:
                    well.save(step)
                except UsageError:
                    # A gradient written to after the update looks like one that none has used yet.
                    continue
                seen[step] = bits_of(first)
                vandal.told(step, "after-save")
    finally:
        vandal.stop()
    again = training(seed, vandal)
    with open_run(place, seed, again) as well:
        restored = well.restore()
        assert restored is not None
        where = f"seed {seed}, {vandal.way.__name__} {vandal.moment}: {restored}"
        assert not (names := differences(bits_of(again), seen[restored.step])), f"{where}: {names}"
        assert restored.exact, where
    newest = max(seen)
    if restored.step == newest:
        return "right" if len(seen) == len(saves) else "some refused"
    return "refused"


def open_run(place: Place, seed: int, run: Training) -> stepwell.SyncWell:
    return stepwell.open_sync(config(place, seed), model=run.model, optimizer=run.optimizer)


@pytest.mark.parametrize("batch_index", range(BATCHES))
def test_every_recovered_step_is_right_or_refused(place: Place, batch_index: int) -> None:
    found: Counter[str] = Counter()
    per_batch = RUNS // BATCHES
    for seed in range(batch_index * per_batch, (batch_index + 1) * per_batch):
        root = Path(place.root) / str(seed)
        with warnings.catch_warnings():
            # That a step is lost is warned of; here that is the point.
            warnings.simplefilter("ignore", UserWarning)
            found[one_run(Place(root), seed)] += 1
        shutil.rmtree(root)
    assert sum(found.values()) == per_batch
    assert found["right"], f"writes that harm nothing must not cost anything: {found}"
