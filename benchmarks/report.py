"""How every benchmark prints: machine, sizes, repeats, then flat keys."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = [
    "arguments",
    "interval_of_median",
    "keep_freed_memory",
    "machine",
    "memory_and_directory",
    "percentile",
    "places",
    "publish",
]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows ``--json``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    import torch

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; `share` in [0, 1]."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, low, high): the 95 % interval of the median by order statistics.

    The ranks come from the binomial distribution with p = 1/2 (sign test); below 6 values no pair
    of ranks reaches 95 %, and the extremes are returned.
    """
    from math import comb

    ordered = sorted(values)
    count = len(ordered)
    rank, tail = 0, 0.0
    for k in range(count // 2):
        tail += comb(count, k) / 2**count
        if tail > 0.025:
            break
        rank = k + 1
    low = ordered[max(0, rank - 1)]
    high = ordered[min(count - 1, count - max(rank, 1))]
    return statistics.median(ordered), low, high


def publish(result: Mapping[str, object], *, as_json: bool) -> None:
    """Print the result: one JSON object, or one line a key."""
    if as_json:
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        print(f"{key:<{width}}  {text}")


@contextlib.contextmanager
def places(directory: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """Give an empty directory on disk and one in memory, both removed at the end, also after SIGTERM.

    Parameters
    ----------
    directory : Path, optional
        Where the one on disk is made. Default: where temporary files go.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-bench-", dir=directory) as disk,
        tempfile.TemporaryDirectory(prefix="stepwell-bench-", dir="/dev/shm") as memory,
    ):
        yield Path(disk), Path(memory)


def memory_and_directory(disk: Path, memory: Path) -> dict[str, object]:
    """Return a configuration with the two tiers that are there by default, in the places given."""
    return {
        "tiers": [
            {"kind": "memory", "directory": str(memory / "arena")},
            {"kind": "directory", "path": str(disk / "run")},
        ]
    }


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed instead of giving it back; False where there is no glibc.

    By default it gives back and takes anew, page by page, the gradients of every step or none of
    them, as they happen to lie. That is up to an eighth of a step here, with and without
    checkpoints, and more than what is to be measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    settings = ((m_trim_threshold, (1 << 31) - 1), (m_top_pad, 256 << 20), (m_mmap_max, 0))
    return all([bool(mallopt(option, value)) for option, value in settings])


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
