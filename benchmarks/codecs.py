"""Ratio and speed of every codec on real training states, beside memcpy and other compressors.

Measured on a recorded trajectory of twelve steps (if it is there) and on a byte-level GPT that is
trained here on the sources of Python's standard library: AdamW, warm-up and cosine schedule, gradients
clipped at norm 1. Of its early, middle and late phase two consecutive steps and one ten steps later are
kept: weights (w), moments (m, v) and clipped gradients (g) of all parameters. Then the late model trains
on with a save every step through the real pipeline, into a memory tier.

All figures are of one thread. Codecs of a group (rows of equal tensor, dtype, gap and phase) take turns on
the same bytes within each repeat; speeds are raw bytes by processor time, medians over the repeats. What a
codec decodes to is compared before it is timed. Gap 0 is a tensor by itself; gap 1 and 10 are differences
from so many steps before; their ``zstd-1`` row is of the same tensor without a difference, ``xor, zstd-1``
with one.

Keys::

    params, steps, elements, repeats, machine, seconds
    absent                  compressors that are not installed; the rest have rows
    shipped                 whether the recorded trajectory was there
    training                {tokens_per_step, text_bytes, loss, grad_norm}, the last two of the last step
    memcpy_gbps             copies of the same arrays, among the timings
    rows                    {codec, tensor (w|m|v|g), dtype, gap, lossless, ratio, encode_gbps, decode_gbps,
                            phase (shipped|early|middle|late)}
    bytes_per_param_step    {exact, exact_bf16, compact, tiercheck, fastcheck}: of differentials as stored, of
                            the late model; exact_bf16 with gradients rounded to bfloat16 before clipping
    state_predictive_ratio  12 over the bytes of a predicted difference of w, m and v; null without the stage
    index_bits              {density, places, kept, elements, bits, entropy_bits}: of the index that
                            threshold_sparse makes, per kept element; places is gradient (those of the
                            largest elements) or random
    goals                   {goal, value, limit, met}; met is null where there is no value
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from benchmarks.codec_rows import BASELINE, LOSSLESS, Row, find_peers, measure_phase
from benchmarks.codec_sizes import STATE_BYTES, bytes_per_parameter, index_rows, state_predictive_ratio
from benchmarks.report import arguments, keep_freed_memory, machine, publish
from benchmarks.trajectory import STEPS_MIN, Phase, Training, load_shipped

SHIPPED = Path(__file__).resolve().parents[2] / "shared" / "data" / "trajectory_small.npz"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--steps", type=int, default=300, help="updates of the training; the last ones are late"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of every timing")
    parser.add_argument(
        "--elements", type=int, default=1 << 24, help="most elements of a tensor that are measured"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the training; measured is with one")
    parser.add_argument("--shipped", type=Path, default=SHIPPED, help="a recorded trajectory")
    options = parser.parse_args()
    if options.steps < STEPS_MIN or options.repeats < 1 or options.elements < 1:
        parser.error(f"--steps must be at least {STEPS_MIN}, --repeats and --elements at least 1")
    keep_freed_memory()
    result = measure(options.steps, options.repeats, options.elements, options.threads, options.shipped)
    if options.json:
        publish(result, as_json=True)
    else:
        show(result)


def measure(steps: int, repeats: int, elements: int, threads: int, shipped: Path) -> dict[str, object]:
    """Train, and measure on the way."""
    began = time.perf_counter()
    peers, absent = find_peers()
    rows: list[Row] = []
    copies: list[float] = []

    def add(phase: Phase) -> None:
        torch.set_num_threads(1)
        found, copied = measure_phase(phase.cut(elements), peers, repeats)
        rows.extend(found)
        copies.extend(copied)
        torch.set_num_threads(threads)

    recorded = load_shipped(shipped)
    if recorded is not None:
        add(recorded)
    torch.set_num_threads(threads)
    training = Training(steps)
    phase = None
    for phase in training.phases():
        add(phase)
    assert phase is not None
    described = training.describe()
    index = index_rows(phase.second.g)
    sizes: dict[str, float] = {
        "exact": bytes_per_parameter(training, {"preset": "exact"}),
        "exact_bf16": bytes_per_parameter(training, {"preset": "exact"}, round_gradients=True),
        "compact": bytes_per_parameter(training, {"preset": "compact"}),
        "tiercheck": bytes_per_parameter(training, {"preset": "tiercheck"}, kind="state"),
        "fastcheck": bytes_per_parameter(training, {"preset": "fastcheck"}, kind="state"),
    }
    predictive = state_predictive_ratio(training)
    return {
        "params": training.parameter_count,
        "steps": steps,
        "elements": min(elements, training.parameter_count),
        "repeats": repeats,
        "machine": machine(),
        "absent": absent,
        "shipped": recorded is not None,
        "training": described,
        "seconds": time.perf_counter() - began,
        "memcpy_gbps": statistics.median(copies),
        "rows": rows,
        "bytes_per_param_step": sizes,
        "state_predictive_ratio": predictive,
        "index_bits": index,
        "goals": goals(rows, sizes, predictive, index),
    }


def goals(
    rows: Sequence[Row],
    sizes: Mapping[str, float],
    predictive: float | None,
    index: Sequence[Row],
) -> list[dict[str, object]]:
    """Hold the figures against what was asked for; of speeds and densities the worst counts."""
    found: list[dict[str, object]] = []
    phases = [name for name in ("shipped", "late") if any(row["phase"] == name for row in rows)]
    for phase in phases:
        planes = statistics.harmonic_mean([ratio_of(rows, phase, "byteplane", tensor, 0) for tensor in "wmv"])
        found.append(at_least(f"byteplane, float32, w, m and v together ({phase})", planes, 1.19))
        for tensor, limit in (("w", 1.65), ("v", 1.45)):
            ratio = ratio_of(rows, phase, "ordered_delta", tensor, 1)
            found.append(at_least(f"ordered_delta {tensor}, one step apart ({phase})", ratio, limit))
    found.append(at_least("state_predictive_ratio", predictive, 3.3))
    found.append(at_least("gradient, exact: of 12 bytes", STATE_BYTES / sizes["exact"], 3.4))
    found.append(
        at_least("gradient, exact, bfloat16 values: of 12 bytes", STATE_BYTES / sizes["exact_bf16"], 8)
    )
    found.append(at_most("compact: bytes per parameter and step", sizes["compact"], 1.0))
    excess = max(cast(float, row["bits"]) / cast(float, row["entropy_bits"]) for row in index)
    found.append(at_most("index bits over entropy bits, worst density", excess, 1.05))
    for codec in LOSSLESS:
        for where, names in (("shipped", ("shipped",)), ("trained", ("early", "middle", "late"))):
            of_phases = [row for row in rows if row["phase"] in names]
            if of_phases:
                speed, slow = slowest(of_phases, codec)
                goal = f"{codec}, encode speed over {BASELINE} ({where}), slowest: {slow}"
                found.append(at_least(goal, speed, 1.0))
    return found


def at_least(goal: str, value: float | None, limit: float) -> dict[str, object]:
    met = None if value is None else value >= limit
    return {"goal": f"{goal} >= {limit}", "value": value, "limit": limit, "met": met}


def at_most(goal: str, value: float, limit: float) -> dict[str, object]:
    return {"goal": f"{goal} <= {limit}", "value": value, "limit": limit, "met": value <= limit}


def ratio_of(rows: Sequence[Row], phase: str, codec: str, tensor: str, gap: int) -> float:
    """Return the ratio in the one row of float32 elements that fits."""
    wanted = (phase, codec, tensor, gap, "float32")
    (ratio,) = (
        cast(float, row["ratio"])
        for row in rows
        if (row["phase"], row["codec"], row["tensor"], row["gap"], row["dtype"]) == wanted
    )
    return ratio


def slowest(rows: Sequence[Row], codec: str) -> tuple[float, str]:
    """Return the least encode speed of a codec beside that of zstd-1 on the same tensor, and where it is."""

    def group(row: Row) -> tuple[object, ...]:
        return row["tensor"], row["dtype"], row["gap"], row["phase"]

    baselines = {group(row): cast(float, row["encode_gbps"]) for row in rows if row["codec"] == BASELINE}
    return min(
        (
            cast(float, row["encode_gbps"]) / baselines[group(row)],
            f"{row['tensor']}, {row['dtype']}, gap {row['gap']}, {row['phase']}",
        )
        for row in rows
        if row["codec"] == codec
    )


def show(result: Mapping[str, object]) -> None:
    """Print the result for people: plain keys, then a table a list."""
    tables = ("rows", "index_bits", "goals")
    publish({key: value for key, value in result.items() if key not in tables}, as_json=False)
    for name in tables:
        rows = cast(Sequence[Row], result[name])
        print(f"\n{name}")
        texts = [[text(value) for value in row.values()] for row in rows]
        texts.insert(0, list(rows[0]))
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        for line in texts:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
