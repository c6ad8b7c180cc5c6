"""A child of the demo: trains, and tells its supervisor what happens as JSON lines on standard output.

Run as ``python -m stepwell.demo.worker FILE``, where FILE holds an `Order` as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stepwell.demo.model import Training

if TYPE_CHECKING:
    from stepwell import Restored

__all__ = ["Order", "main"]

STACKS_AFTER_S = 100.0  # before the supervisor's own deadline, so that a hang shows where


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to do.

    Attributes
    ----------
    steps : int
    final : str
        File that takes the outcome, as ``numpy.savez`` writes it.
    config : dict or None
        Configuration of the run; None trains without stepwell, for comparison.
    """

    steps: int
    final: str
    config: dict[str, object] | None

    def write(self, path: Path) -> None:
        """Write this order where a child finds it."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read an order back."""
        document = json.loads(path.read_text())
        return cls(document["steps"], document["final"], document["config"])


def tell(event: str, **facts: object) -> None:
    """Send one event to the supervisor."""
    print(json.dumps({"event": event, **facts}), flush=True)


def train_plain(training: Training, total: int) -> None:
    """Train without any checkpoint."""
    for step in range(total):
        begun_s = time.perf_counter()
        loss = training.step()
        tell("step", step=step, loss=loss, step_ms=_since_ms(begun_s), blocked_ms=0.0)


def train_saved(training: Training, total: int, config: dict[str, object]) -> None:
    """Train with a checkpoint at every step, from wherever the run had got to."""
    import stepwell

    with stepwell.open_sync(
        config, model=training.model, optimizer=training.optimizer, extra=training.extra
    ) as well:
        restored = well.restore()
        _tell_restored(restored)
        # `for step in well.steps(total)` does the same; here the last save is to be a base, too.
        for step in range(0 if restored is None else restored.step + 1, total):
            begun_s = time.perf_counter()
            loss = training.step()
            well.save(step, base=step == total - 1)
            spent_ms = _since_ms(begun_s)
            blocked_ms = well.metrics().saves[-1].blocked_s * 1e3
            tell("step", step=step, loss=loss, step_ms=spent_ms, blocked_ms=blocked_ms)


def _tell_restored(restored: Restored | None) -> None:
    if restored is not None:
        tell(
            "restored",
            step=restored.step,
            tier=restored.tier,
            seconds=restored.seconds,
            exact=restored.exact,
            lost_steps=restored.lost_steps,
        )


def _since_ms(begun_s: float) -> float:
    return (time.perf_counter() - begun_s) * 1e3


def main(path: str) -> None:
    """Carry out the order in the file at `path`."""
    order = Order.read(Path(path))
    training = Training(order.steps)
    tell("begin", params=training.parameter_count)
    if order.config is None:
        train_plain(training, order.steps)
    else:
        train_saved(training, order.steps, order.config)
    arrays = {name: tensor.detach().numpy() for name, tensor in training.final_state().items()}
    np.savez(order.final, **arrays)  # type: ignore[arg-type]
    tell("done")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STACKS_AFTER_S, repeat=True)
    main(sys.argv[1])
