"""A long run: are the sizes of both tiers, the process's memory and its descriptors bounded?

A small GPT trains for 1,000 steps with a checkpoint every step; every 50 steps the bytes in the memory
directory and in the checkpoint directory, the resident memory and the open descriptors are taken.

Keys::

    steps, params, state_bytes, machine
    rows                        of {step, memory_tier_bytes, directory_bytes, objects, rss_bytes, descriptors}
    memory_tier_bytes_max, directory_bytes_max
    memory_tier_growth, directory_growth, rss_growth
                                mean of the last quarter over mean of the second quarter
    bases                       bases committed
"""

from __future__ import annotations

import contextlib
import os
import statistics
from pathlib import Path

import torch

import stepwell
from benchmarks.gpt import GPT, train_step
from benchmarks.report import arguments, machine, memory_and_directory, places, publish


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(vocabulary=512, context=64, width=128, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with places(options.dir) as (root, arena):
        result = measure(model, optimizer, root, arena, options.steps, options.every)
    publish(result, as_json=options.json)


def measure(
    model: GPT, optimizer: torch.optim.Optimizer, root: Path, arena: Path, steps: int, every: int
) -> dict[str, object]:
    """Train and look every so many steps."""
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, int]] = []
    config = memory_and_directory(root, arena)
    with stepwell.open_sync(config, model=model, optimizer=optimizer) as well:
        for step in range(steps):
            train_step(model, optimizer, 4, 32, generator)
            well.save(step)
            if step % every == every - 1:
                well.wait_until_finished()
                rows.append(look(step, root, arena))
        saves = well.metrics().saves
    params = sum(p.numel() for p in model.parameters())
    return {
        "steps": steps,
        "params": params,
        "state_bytes": params * 12,
        "machine": machine(),
        "rows": rows,
        "memory_tier_bytes_max": max(row["memory_tier_bytes"] for row in rows),
        "directory_bytes_max": max(row["directory_bytes"] for row in rows),
        "memory_tier_growth": growth([row["memory_tier_bytes"] for row in rows]),
        "directory_growth": growth([row["directory_bytes"] for row in rows]),
        "rss_growth": growth([row["rss_bytes"] for row in rows]),
        "bases": sum(record.base for record in saves),
    }


def look(step: int, root: Path, arena: Path) -> dict[str, int]:
    """Take all sizes now."""
    sizes = sizes_below(root)
    return {
        "step": step,
        "memory_tier_bytes": sum(blocks for _, blocks in sizes_below(arena)),
        "directory_bytes": sum(size for size, _ in sizes),
        "objects": len(sizes),
        "rss_bytes": int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def sizes_below(top: Path) -> list[tuple[int, int]]:
    """Length and bytes on disk of every file; what is reclaimed meanwhile is left out."""
    sizes = []
    for directory, _, names in os.walk(top):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(os.path.join(directory, name))
                sizes.append((status.st_size, status.st_blocks * 512))
    return sizes


def growth(values: list[int]) -> float:
    """Mean of the last quarter over the mean of the second quarter."""
    quarter = max(1, len(values) // 4)
    return statistics.mean(values[-quarter:]) / statistics.mean(values[quarter : 2 * quarter] or values[:1])


if __name__ == "__main__":
    main()
