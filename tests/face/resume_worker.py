"""A process that trains under two runs at once and is killed, or comes back and ends; see its test.

``resume_worker.py train ROOT`` kills itself with SIGKILL in the middle of a step.
``resume_worker.py finish ROOT`` restores, trains on and compares with uninterrupted runs.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from resume_rig import (
    TOTAL,
    Build,
    Lives,
    Place,
    Training,
    assert_same,
    batch,
    bits_of,
    odd,
    seed_everything,
    small_model,
    uninterrupted,
)
from torch import distributed, optim
from torch.nn.parallel import DistributedDataParallel

KILLED_IN = 5
ACKNOWLEDGED = 4


def replicated(*, set_to_none: bool) -> Build:
    def build() -> Training:
        network = DistributedDataParallel(small_model(), gradient_as_bucket_view=True)
        optimizer = optim.AdamW(network.parameters(), fused=True)

        def step(at: int) -> None:
            optimizer.zero_grad(set_to_none=set_to_none)
            network(batch(at, 5, 9)).square().mean().backward()
            optimizer.step()

        return Training(network, optimizer, step)

    return build


BUILDS: dict[str, Build] = {
    "bucket-view": replicated(set_to_none=True),
    "bucket-view-kept": replicated(set_to_none=False),
    "odd-fused": odd(partial(optim.AdamW, fused=True)),
}


def first_life(root: Path) -> None:
    wells, trainings = [], []
    for name, build in BUILDS.items():
        seed_everything(1)
        trainings.append(build())
        wells.append(Place(root / name).open(trainings[-1]))
    for step in range(TOTAL):
        for well, training in zip(wells, trainings, strict=True):
            if step == KILLED_IN and training is trainings[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            # Each run draws from generators of the process; none of these trainings does.
            training.step(step)
            handle = well.save(step)
            if step == ACKNOWLEDGED:
                handle.until("memory", timeout_s=60)


def last_life(root: Path) -> None:
    for name, build in BUILDS.items():
        lives = Lives(uninterrupted(build))
        seed_everything(2)
        training = build()
        torch.set_rng_state(torch.Generator().manual_seed(1).get_state())
        with Place(root / name).open(training) as well:
            restored = well.restore()
            assert restored is not None
            assert restored.exact
            assert restored.tier == "memory"
            assert ACKNOWLEDGED <= restored.step <= KILLED_IN, restored
            compare(training, lives, restored.step, name)
            for step in range(restored.step + 1, TOTAL):
                training.step(step)
                well.save(step)
                compare(training, lives, step, name)
            kinds = [record.kind for record in well.metrics().saves]
            assert set(kinds) == {"gradient"}, (name, kinds)
        training = build()
        with Place(root / name).open(training) as well:
            restored = well.restore()
            assert restored is not None
            assert (restored.step, restored.exact, restored.tier) == (TOTAL - 1, True, "directory")
            compare(training, lives, TOTAL - 1, name)
    without_replicas(root)
    print("bit-equal")


def without_replicas(root: Path) -> None:
    """What replicas saved, a plain model of the same names takes, and trains on as they would."""
    lives = Lives(uninterrupted(BUILDS["bucket-view"]))
    network = small_model()
    training = Training(network, optim.AdamW(network.parameters(), fused=True), lambda at: None)
    with Place(root / "bucket-view").open(training) as well:
        assert well.restore() is not None
    wanted = lives.wanted[TOTAL - 1]
    for name, value in bits_of(training).items():
        if name.startswith("model./") and not name.endswith("keys"):
            assert value == wanted[name.replace("model./", "model./module.")], name
        elif name.startswith("optimizer"):
            assert value == wanted[name], name


def compare(training: Training, lives: Lives, step: int, name: str) -> None:
    """Compare all but the generators, which the runs of one process share."""
    found, wanted = (
        {path: value for path, value in bits.items() if not path.startswith("rng")}
        for bits in (bits_of(training), lives.wanted[step])
    )
    assert_same(found, wanted, f"{name}, step {step}")


def main() -> None:
    what, root = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous-{what}", rank=0, world_size=1
    )
    try:
        {"train": first_life, "finish": last_life}[what](root)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
