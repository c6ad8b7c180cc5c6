"""What a checkpoint every step costs a training run: step time with it over step time without.

A GPT of 33.5 M parameters trains on one thread; stepwell works on what other cores there are, to memory
and to a directory on disk. Blocks of steps with and without checkpoints alternate in ABBA order in one
process; each pair of neighbouring blocks gives one ratio. A block is not begun before the pipeline has
finished the last one, so the cost shows inside the blocks with checkpoints or not at all.

Keys::

    params, steps_per_block, pairs, machine
    kept_freed_memory                   whether glibc was told to keep what is freed, for both kinds of blocks
    step_ms_with, step_ms_without       medians over all steps
    ratio, ratio_low, ratio_high        of the blocks' median steps: median over the pairs, 95 % interval
    verdict                             "met" | "missed" | "undecided" against 1.02
    mean_ratio, mean_ratio_low, mean_ratio_high
                                        the same of the blocks' whole times: with the steps that also copy a
                                        base on the trainer's thread (the first and every fourth or so)
    blocked_ms_p50, blocked_ms_p99      hooks and save on the trainer's thread, all saves
    bytes_per_param_step                differentials as stored, bases apart
    base_bytes_per_param, bases         how large a base is and how many were taken
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

import torch

import stepwell
from benchmarks.gpt import GPT, train_step
from benchmarks.report import (
    arguments,
    interval_of_median,
    keep_freed_memory,
    machine,
    memory_and_directory,
    percentile,
    places,
    publish,
)

GOAL = 1.02


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps per block")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--time", type=int, default=128, help="tokens per sequence")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write (default: a temporary directory)"
    )
    parser.add_argument(
        "--default-allocator", action="store_true", help="leave glibc as it is (see keep_freed_memory)"
    )
    options = parser.parse_args()

    kept = not options.default_allocator and keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(vocabulary=16384, context=256, width=512, layers=8, heads=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with places(options.dir) as (disk, memory):
        config = memory_and_directory(disk, memory)
        result = measure(model, optimizer, config, options.steps, options.pairs, options.batch, options.time)
    result["kept_freed_memory"] = kept
    publish(result, as_json=options.json)


def measure(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    config: dict[str, object],
    steps_per_block: int,
    pairs: int,
    batch_size: int,
    tokens: int,
) -> dict[str, object]:
    """Run the blocks and reduce them."""
    generator = torch.Generator().manual_seed(1)
    params = sum(p.numel() for p in model.parameters())
    times: dict[bool, list[float]] = {True: [], False: []}
    ratios: list[float] = []
    mean_ratios: list[float] = []
    label = 0

    with stepwell.open_sync(config, model=model, optimizer=optimizer) as well:

        def block(save: bool) -> tuple[float, float]:
            nonlocal label
            seconds = []
            with contextlib.nullcontext() if save else well.paused():
                for _ in range(steps_per_block):
                    began = time.perf_counter()
                    train_step(model, optimizer, batch_size, tokens, generator)
                    if save:
                        well.save(label)
                        label += 1
                    seconds.append(time.perf_counter() - began)
            well.wait_until_finished()
            times[save] += seconds
            return statistics.median(seconds), statistics.fmean(seconds)

        for save in (True, False):  # warm-up: probation, first base, page faults
            block(save)
        times = {True: [], False: []}
        first = len(well.metrics().saves)
        for pair in range(pairs):
            order = (True, False) if pair % 2 == 0 else (False, True)
            found = {save: block(save) for save in order}
            ratios.append(found[True][0] / found[False][0])
            mean_ratios.append(found[True][1] / found[False][1])
        saves = well.metrics().saves[first:]

    median, low, high = interval_of_median(ratios)
    mean, mean_low, mean_high = interval_of_median(mean_ratios)
    verdict = "met" if high <= GOAL else "missed" if low > GOAL else "undecided"
    differential_bytes = [record.differential_bytes for record in saves if record.differential_bytes]
    base_bytes = [record.base_bytes for record in saves if record.base_bytes]
    blocked = [record.blocked_s for record in saves]
    return {
        "params": params,
        "steps_per_block": steps_per_block,
        "pairs": pairs,
        "machine": machine(),
        "step_ms_with": statistics.median(times[True]) * 1e3,
        "step_ms_without": statistics.median(times[False]) * 1e3,
        "ratio": median,
        "ratio_low": low,
        "ratio_high": high,
        "verdict": verdict,
        "mean_ratio": mean,
        "mean_ratio_low": mean_low,
        "mean_ratio_high": mean_high,
        "blocked_ms_p50": statistics.median(blocked) * 1e3,
        "blocked_ms_p99": percentile(blocked, 0.99) * 1e3,
        "bytes_per_param_step": statistics.median(differential_bytes) / params,
        "base_bytes_per_param": statistics.median(base_bytes) / params if base_bytes else None,
        "bases": len(base_bytes),
    }


if __name__ == "__main__":
    main()
