"""How fast a base comes to a local disk, durably, and back, beside others; and what many arrays cost.

A base of the given size (weights and moments of GPT-2-small blocks) is written in turns by: one plain write
with fsync; safetensors with fsync; DCP's ``save``; tensorstore alone, one zarr array each; and stepwell, as
a tree of objects and packed, with checksums, manifest and commit record. Then each is read back
into fresh memory, dropped from the page cache before (a virtual disk's host may still have it); ours verifies
every byte. Then the same for bases of
many small arrays in both layouts. What comes back is compared once, in a round that is not counted.

Keys::

    base_bytes, tensors, small_array_bytes, repeats, machine
    rows          one for each writer of the base and of 1,000 and 10,000 arrays:
      writer      "plain", "safetensors", "dcp", "tensorstore", "stepwell tree", "stepwell pack"
      arrays, bytes
      write_s, read_s                       medians
      write_s_min, write_s_max, read_s_min, read_s_max
      x_plain_write, x_plain_read           medians over the rounds of the ratio to plain in the same round
      objects                               files
    write_goal, write_met, read_goal, read_met     of each layout of ours: at most 1.1 times plain
    not_measured  why a writer is missing
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.base_writers import (
    Base,
    Dcp,
    Plain,
    Safetensors,
    Stepwell,
    Tensorstore,
    Writer,
    gpt_base,
    small_base,
)
from benchmarks.report import arguments, machine, places, publish

GOAL = 1.1
_WARM = 1  # rounds that count for nothing: threads, buffers and imports


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mb", type=int, default=1500, help="size of the base, in 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--arrays", type=int, nargs="*", default=[1_000, 10_000], help="counts of small arrays"
    )
    parser.add_argument("--array-bytes", type=int, default=16 << 10, help="size of a small array")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write (default: a temporary directory)"
    )
    options = parser.parse_args()
    with places(options.dir) as (disk, _):
        base = gpt_base(options.mb * 10**6)
        writers, missing = writers_of(base)
        rows = measure(base, writers, disk, options.repeats)
        for count in options.arrays:
            small = small_base(count, options.array_bytes)
            rows += measure(small, [Plain(small), *ours(small)], disk, options.repeats)
    publish(
        {
            "base_bytes": base.run.nbytes,
            "tensors": len(base.tensors),
            "small_array_bytes": options.array_bytes,
            "repeats": options.repeats,
            "machine": machine(),
            "rows": rows,
            **{f"{what}_goal": GOAL for what in ("write", "read")},
            **{f"{what}_met": met(rows, what, len(base.tensors)) for what in ("write", "read")},
            "not_measured": missing,
        },
        as_json=options.json,
    )


def ours(base: Base) -> list[Writer]:
    return [Stepwell(base, packed=False), Stepwell(base, packed=True)]


def writers_of(base: Base) -> tuple[list[Writer], dict[str, str]]:
    """Return all writers there are, and why the others are not."""
    writers: list[Writer] = []
    missing: dict[str, str] = {}
    for kind in (Plain, Safetensors, Dcp, Tensorstore):
        try:
            writers.append(kind(base))
        except ImportError as error:
            missing[kind.name] = str(error)
    return [*writers, *ours(base)], missing


def measure(base: Base, writers: Sequence[Writer], disk: Path, repeats: int) -> list[dict[str, object]]:
    """Time all writers in turns; return a row for each."""
    write_s: dict[str, list[float]] = {writer.name: [] for writer in writers}
    read_s: dict[str, list[float]] = {writer.name: [] for writer in writers}
    objects: dict[str, int] = {}
    place = disk / "base"
    for turn in range(_WARM + repeats):
        # Every other round the other way, so that each has both neighbours before it.
        for writer in writers if turn % 2 else list(reversed(writers)):
            began = time.perf_counter()
            writer.write(place)
            write_s[writer.name].append(time.perf_counter() - began)
            files = [path for path in place.rglob("*") if path.is_file()]
            objects[writer.name] = len(files)
            forget(files)
            began = time.perf_counter()
            found = writer.read(place)
            read_s[writer.name].append(time.perf_counter() - began)
            if turn < _WARM:
                base.check(found)
            del found
            shutil.rmtree(place)
            os.sync()
    return [
        {
            "writer": writer.name,
            "arrays": len(base.tensors),
            "bytes": base.run.nbytes,
            **spread("write", write_s, writer.name),
            **spread("read", read_s, writer.name),
            "objects": objects[writer.name],
        }
        for writer in writers
    ]


def spread(what: str, seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """Return median, extremes and the ratio to plain in the same round."""
    own, plain = seconds[name][_WARM:], seconds["plain"][_WARM:]
    return {
        f"{what}_s": statistics.median(own),
        f"{what}_s_min": min(own),
        f"{what}_s_max": max(own),
        f"x_plain_{what}": statistics.median(a / b for a, b in zip(own, plain, strict=True)),
    }


def met(rows: Sequence[dict[str, object]], what: str, arrays: int) -> dict[str, bool]:
    """Say for each layout of ours whether the large base kept to the goal."""
    found: dict[str, bool] = {}
    for row in rows:
        ratio = row[f"x_plain_{what}"]
        assert isinstance(ratio, float)
        if str(row["writer"]).startswith("stepwell") and row["arrays"] == arrays:
            found.setdefault(str(row["writer"]), ratio <= GOAL)
    return found


def forget(files: Sequence[Path]) -> None:
    """Drop durable files from this system's page cache, so that a read asks the disk."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


if __name__ == "__main__":
    main()
