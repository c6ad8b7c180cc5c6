"""A child of the demo: trains, and tells its supervisor what happens as JSON lines on standard output.

Run as ``python -m stepwell.demo.worker FILE``, where FILE holds an `Order` as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stepwell.demo.model import Training

if TYPE_CHECKING:
    from stepwell import Metrics, Restored

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


class Teller:
    """Times the steps of a life: from the beginning of one body to that of the next."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._begun_s = 0.0

    def next(self, blocked_s: float = 0.0) -> None:
        """A body begins (or the loop ended): tell about the one before, whose save took `blocked_s`."""
        now_s = time.perf_counter()
        if self._last is not None:
            step, loss = self._last
            spent_ms = (now_s - self._begun_s) * 1e3
            tell("step", step=step, loss=loss, step_ms=spent_ms, blocked_ms=blocked_s * 1e3)
            self._last = None
        self._begun_s = now_s

    def trained(self, step: int, loss: float) -> None:
        """A body is through."""
        self._last = (step, loss)


def train_plain(training: Training, steps: Iterable[int]) -> None:
    """Train without any checkpoint."""
    teller = Teller()
    for step in steps:
        teller.next()
        teller.trained(step, training.step())
    teller.next()


def train_saved(training: Training, order: Order) -> None:
    """Train with a checkpoint at every step, from wherever the run had got to."""
    import stepwell

    teller = Teller()
    with stepwell.open_sync(
        order.config, model=training.model, optimizer=training.optimizer, extra=training.extra
    ) as well:
        first = True
        for step in well.steps(order.steps):
            if first:
                first = False
                _tell_restored(well.restored)
            teller.next(_last_blocked_s(well.metrics()))
            teller.trained(step, training.step())
        teller.next(_last_blocked_s(well.metrics()))
        well.wait_until_finished()


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


def _last_blocked_s(metrics: Metrics) -> float:
    return metrics.blocked_s[-1] if metrics.blocked_s else 0.0


def main(path: str) -> None:
    """Carry out the order in the file at `path`."""
    faulthandler.dump_traceback_later(STACKS_AFTER_S, repeat=True, file=sys.stderr)
    order = Order.read(Path(path))
    training = Training(order.steps)
    tell("begin", params=training.parameter_count)
    if order.config is None:
        train_plain(training, range(order.steps))
    else:
        train_saved(training, order)
    arrays = {name: tensor.detach().numpy() for name, tensor in training.final_state().items()}
    np.savez(order.final, **arrays)  # type: ignore[arg-type]
    tell("done")


if __name__ == "__main__":
    main(sys.argv[1])
