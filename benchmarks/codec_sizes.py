"""What ``benchmarks.codecs`` reads off real saves and real frames: sizes, without a clock."""

from __future__ import annotations

import statistics
from math import log2
from pathlib import Path

import numpy as np

import stepwell
from benchmarks.report import places
from benchmarks.trajectory import Floats, Training
from stepwell.codecs.buffers import Bytes
from stepwell.codecs.sections import read_composed
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.config.stages import BUILTIN

__all__ = ["DENSITIES", "bytes_per_parameter", "index_rows", "state_predictive_ratio"]

DENSITIES = (0.001, 0.01, 0.05, 0.1)
STATE_BYTES = 12  # of float32 weight, momentum and variance

_SAVES = 12
_SPARSE_KINDS = {1: (4, 24), 2: (4, 24)}  # gaps and bitmap, as threshold_sparse documents them


def bytes_per_parameter(
    training: Training,
    pipeline: dict[str, object],
    *,
    kind: str = "gradient",
    round_gradients: bool = False,
) -> float:
    """Train on with a save every step and return the median bytes of a differential, per parameter.

    Parameters
    ----------
    training : Training
        Moved on by twelve steps.
    pipeline : dict
        What of the configuration is not the default: a preset, or stages.
    kind : str
        What must have been captured at every step, ``gradient`` or ``state``.
    round_gradients : bool
        See ``Training.step``.
    """
    with places() as (_, memory):
        tier = {"kind": "memory", "directory": str(Path(memory) / "arena")}
        settings: dict[str, object] = {"tiers": [tier], **pipeline}
        with stepwell.open_sync(settings, model=training.model, optimizer=training.optimizer) as well:
            for step in range(_SAVES):
                training.step(round_gradients=round_gradients)
                well.save(step)
                # Sizes are wanted, not speed: no save is skipped for want of room.
                well.wait_until_finished()
            records = well.metrics().saves[1:]  # the first is a base, or a state that stands for itself
    # A pack holds everything else that changed as well.
    sizes = [record.differential_bytes for record in records]
    if not all(sizes) or any(record.kind != kind for record in records):
        raise AssertionError(f"not every step was saved as configured: {records}")
    return statistics.median(sizes) / training.parameter_count


def state_predictive_ratio(training: Training) -> float | None:
    """Return 12 over the bytes of a predicted difference of w, m and v; None without that stage."""
    if "predictive" not in BUILTIN["delta"].settings:
        return None
    stages = [{"capture": "state"}, {"delta": "predictive"}, "shard", "replicate", "commit"]
    return STATE_BYTES / bytes_per_parameter(training, {"pipeline": stages}, kind="state")


def index_rows(gradient: Floats) -> list[dict[str, object]]:
    """Measure the index of ``threshold_sparse`` alone, at each density, beside the entropy of random places.

    Once with the places of a gradient's largest elements, once with as many places at random.

    Parameters
    ----------
    gradient : ndarray, (n,), float32
        Large enough that a few headers do not count.
    """
    generator = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for density in DENSITIES:
        scattered = np.zeros_like(gradient)
        kept = round(density * gradient.size)
        scattered[generator.choice(gradient.size, kept, replace=False, shuffle=False)] = 1
        codec = ThresholdSparse(density)
        for places_of, values in (("gradient", gradient), ("random", scattered)):
            rows.append({"places": places_of, **_index_row(codec, values, density)})
    return rows


def _index_row(codec: ThresholdSparse, values: Floats, density: float) -> dict[str, object]:
    frame: Bytes = codec.encode(values)
    decoded = codec.decode(frame).view(np.float32)
    kept = int(np.count_nonzero(decoded))
    index = read_composed(frame, b"SWTS", _SPARSE_KINDS).sections[0]
    share = kept / values.size
    entropy_bits = -(share * log2(share) + (1 - share) * log2(1 - share)) / share
    return {
        "density": density,
        "kept": kept,
        "elements": values.size,
        "bits": 8 * index.size / kept,
        "entropy_bits": entropy_bits,
    }
