"""A long run: are the sizes of all tiers, the memory of all processes and their descriptors bounded?

A small GPT trains for 1,000 steps with a checkpoint every step, to memory, to a keeper in a process of its
own, and to a directory; every 50 steps the bytes in the memory directories and in the checkpoint directory,
the private memory of trainer and keeper and their open descriptors are taken. At the end the run is closed,
the keeper is ended, and ``stepwell clean --remove`` removes what it holds.

Keys::

    steps, params, state_bytes, machine
    rows                        of {step, memory_tier_bytes, keeper_bytes, directory_bytes, objects,
                                rss_bytes, private_bytes, descriptors, keeper_private_bytes,
                                keeper_descriptors}
    memory_tier_bytes_max, directory_bytes_max, keeper_bytes_max
    memory_tier_growth, keeper_growth, directory_growth, rss_growth
                                mean of the last quarter over mean of the second quarter
    private_bytes_per_save, keeper_private_bytes_per_save
                                slope of a line through the rows of the last three quarters
    descriptors_growth, keeper_descriptors_growth
                                most in the last quarter less most in the second quarter
    left_in_memory              files in both memory directories after the run's end and ``clean``
    bases                       bases committed
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import stepwell
from benchmarks.gpt import GPT, train_step
from benchmarks.report import arguments, machine, places, publish

_END_S = 30.0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(vocabulary=512, context=64, width=128, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with places(options.dir) as (disk, memory):
        with keeper_of(memory / "keeper") as keeper:
            result = measure(model, optimizer, disk, memory, keeper, options.steps, options.every)
        command = [sys.executable, "-m", "stepwell", "clean", str(memory), "--remove"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_END_S)
        result["left_in_memory"] = len(sizes_below(memory))
    publish(result, as_json=options.json)


@contextmanager
def keeper_of(directory: Path) -> Iterator[dict[str, object]]:
    """Start a keeper of this machine; gives what it says of itself."""
    command = [sys.executable, "-m", "stepwell", "keeper", "--json", "--run", "run", "--name", "beside"]
    process = subprocess.Popen([*command, "--memory", str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(_END_S)
        process.stdout.close()


def measure(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    disk: Path,
    memory: Path,
    keeper: dict[str, object],
    steps: int,
    every: int,
) -> dict[str, object]:
    """Train and look every so many steps."""
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, int]] = []
    (address,) = keeper["addresses"]  # type: ignore[misc]
    config = {
        "tiers": [
            {"kind": "memory", "directory": str(memory / "arena")},
            {"kind": "peer", "address": address, "on_error": "raise"},
            {"kind": "directory", "path": str(disk / "run")},
        ]
    }
    with stepwell.open_sync(config, model=model, optimizer=optimizer) as well:
        for step in range(steps):
            train_step(model, optimizer, 4, 32, generator)
            well.save(step)
            if step % every == every - 1:
                well.wait_until_finished()
                rows.append(look(step, disk, memory, int(str(keeper["pid"]))))
        saves = well.metrics().saves
    params = sum(p.numel() for p in model.parameters())

    def of(key: str) -> list[int]:
        return [row[key] for row in rows]

    return {
        "steps": steps,
        "params": params,
        "state_bytes": params * 12,
        "machine": machine(),
        "rows": rows,
        "memory_tier_bytes_max": max(of("memory_tier_bytes")),
        "keeper_bytes_max": max(of("keeper_bytes")),
        "directory_bytes_max": max(of("directory_bytes")),
        "memory_tier_growth": growth(of("memory_tier_bytes")),
        "keeper_growth": growth(of("keeper_bytes")),
        "directory_growth": growth(of("directory_bytes")),
        "rss_growth": growth(of("rss_bytes")),
        "private_bytes_per_save": slope(of("step"), of("private_bytes")),
        "keeper_private_bytes_per_save": slope(of("step"), of("keeper_private_bytes")),
        "descriptors_growth": more(of("descriptors")),
        "keeper_descriptors_growth": more(of("keeper_descriptors")),
        "bases": sum(record.base for record in saves),
    }


def look(step: int, disk: Path, memory: Path, keeper: int) -> dict[str, int]:
    """Take all sizes now."""
    sizes = sizes_below(disk)
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "step": step,
        "memory_tier_bytes": sum(blocks for _, blocks in sizes_below(memory / "arena")),
        "keeper_bytes": sum(blocks for _, blocks in sizes_below(memory / "keeper")),
        "directory_bytes": sum(size for size, _ in sizes),
        "objects": len(sizes),
        "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "private_bytes": private_bytes(os.getpid()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keeper_private_bytes": private_bytes(keeper),
        "keeper_descriptors": len(os.listdir(f"/proc/{keeper}/fd")),
    }


def private_bytes(pid: int) -> int:
    """Resident memory of a process that is no file's, so neither an arena's nor a library's."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not tell RssAnon")


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
    last, second = _quarters(values)
    return statistics.mean(last) / statistics.mean(second)


def more(values: list[int]) -> int:
    """Most in the last quarter less most in the second quarter."""
    last, second = _quarters(values)
    return max(last) - max(second)


def slope(steps: list[int], values: list[int]) -> float:
    """Rise for each step of a line through all but the first quarter."""
    first = len(steps) // 4
    if len(steps) - first < 2:
        return 0.0
    return statistics.linear_regression(steps[first:], values[first:]).slope


def _quarters(values: list[int]) -> tuple[list[int], list[int]]:
    quarter = max(1, len(values) // 4)
    return values[-quarter:], values[quarter : 2 * quarter] or values[:1]


if __name__ == "__main__":
    main()
