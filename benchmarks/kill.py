"""SIGKILL at random moments, many times in a row: does the newest acknowledged step come back, bit for bit?

A child trains a small GPT with a checkpoint every step and writes down each step as soon as its save is
acknowledged by the memory tier. The parent kills it after a random time, starts it again, and compares:
the restored step must be the newest acknowledged one or a newer one, and the whole state (weights,
moments, step counts) must have the checksum of an uninterrupted run at that step. Every tenth life also
loses the memory tier, so that the directory is used; there the newest step acknowledged by the directory
is the floor.

Keys::

    kills, steps_reached, seed, machine
    right, wrong                 restores with the right bits, and others (0 expected)
    lost_acknowledged            restores older than an acknowledged step (0 expected)
    from_memory, from_directory  restores by tier
    not_exact                    restores that did not call themselves exact
    restore_s_p50, restore_s_max
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import xxhash

import stepwell
from benchmarks.gpt import GPT, train_step
from benchmarks.report import arguments, machine, places, publish

STEPS = 1_000_000


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.5, help="seconds a life trains at most")
    parser.add_argument("--child", type=Path, default=None, help=argparse_hidden())
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return
    with places() as (root, arena):
        result = parent(root, arena, options.kills, options.seed, options.longest)
    publish(result, as_json=options.json)
    if result["wrong"] or result["lost_acknowledged"]:
        sys.exit(1)


def argparse_hidden() -> str:
    """Return what makes argparse leave an option out of its help."""
    import argparse

    return argparse.SUPPRESS


def build() -> tuple[GPT, torch.optim.Optimizer]:
    """Return the model and optimizer every life begins with."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=32, width=96, layers=2, heads=4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def one_step(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Train one step whose data depends on its number alone."""
    train_step(model, optimizer, 4, 32, torch.Generator().manual_seed(step))


def checksum(model: GPT, optimizer: torch.optim.Optimizer) -> str:
    """Checksum of every weight and every tensor of the optimizer's state."""
    state = xxhash.xxh3_128()
    for parameter in model.parameters():
        state.update(parameter.detach().numpy().data.cast("B"))
        for key in sorted(optimizer.state[parameter]):
            state.update(optimizer.state[parameter][key].contiguous().view(-1).numpy().data.cast("B"))
    return state.hexdigest()


def child(place: Path) -> None:
    """Train until killed; tell restores and acknowledgements on standard output, a line each."""
    settings = json.loads(place.read_text(encoding="utf-8"))
    model, optimizer = build()
    with stepwell.open_sync(settings, model=model, optimizer=optimizer) as well:
        restored = well.restore()
        if restored is not None:
            say(
                restored=restored.step,
                tier=restored.tier,
                exact=restored.exact,
                seconds=restored.seconds,
                checksum=checksum(model, optimizer),
            )
        else:
            say(restored=None)
        waiting: list[stepwell.Handle] = []
        for step in range(0 if restored is None else restored.step + 1, STEPS):
            one_step(model, optimizer, step)
            waiting.append(well.save(step))
            for tier in ("memory", "directory"):
                done = [handle.step for handle in waiting if handle.done(tier)]
                if done:
                    say(acknowledged=max(done), tier=tier)
            waiting = [handle for handle in waiting if not handle.done("directory")]


def say(**values: object) -> None:
    """Print one JSON line and flush it."""
    print(json.dumps(values), flush=True)


def parent(root: Path, arena: Path, kills: int, seed: int, longest: float) -> dict[str, object]:
    """Kill and compare."""
    draw = random.Random(seed)
    place = root / "settings.json"
    place.write_text(
        json.dumps(
            {
                "tiers": [
                    {"kind": "memory", "directory": str(arena / "a")},
                    {"kind": "directory", "path": str(root / "run")},
                ]
            }
        ),
        encoding="utf-8",
    )
    model, optimizer = build()
    reference = -1
    floor = {"memory": -1, "directory": -1}
    counts = dict.fromkeys(
        ("right", "wrong", "lost_acknowledged", "from_memory", "from_directory", "not_exact"), 0
    )
    seconds: list[float] = []
    for life in range(kills + 1):
        lost_memory = life % 10 == 9
        if lost_memory:
            shutil.rmtree(arena / "a", ignore_errors=True)
        lines = one_life(place, draw.uniform(0.05, longest))
        first = json.loads(lines[0])
        expected = floor["directory"] if lost_memory else max(floor.values())
        if first["restored"] is None:
            counts["lost_acknowledged"] += expected >= 0
        else:
            step = first["restored"]
            if step < reference:
                # An older step than compared before: begin the uninterrupted run anew.
                (model, optimizer), reference = build(), -1
            while reference < step:
                reference += 1
                one_step(model, optimizer, reference)
            good = first["checksum"] == checksum(model, optimizer)
            counts["right" if good else "wrong"] += 1
            counts["lost_acknowledged"] += step < expected
            counts["not_exact"] += not first["exact"]
            counts[f"from_{first['tier']}"] += 1
            seconds.append(first["seconds"])
        # What lies beyond the restored step belongs to a branch that was given up.
        newest = -1 if first["restored"] is None else first["restored"]
        floor = {"memory": newest, "directory": min(newest, floor["directory"])}
        for line in lines[1:]:
            told = json.loads(line)
            floor[told["tier"]] = max(floor[told["tier"]], told["acknowledged"])
    return {
        "kills": kills,
        "steps_reached": max(floor.values()),
        "seed": seed,
        "machine": machine(),
        **counts,
        "restore_s_p50": statistics.median(seconds) if seconds else None,
        "restore_s_max": max(seconds, default=None),
    }


def one_life(place: Path, train_s: float) -> list[str]:
    """Start a child, let it train, kill it; return the whole lines it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kill", "--child", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    if not first:
        raise RuntimeError(f"the child ended by itself:\n{process.stderr.read()}")
    end = time.monotonic() + train_s
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the child ended by itself ({process.returncode}):\n{errors}")
    whole = rest[: rest.rfind("\n") + 1].splitlines()
    return [first, *whole]


if __name__ == "__main__":
    main()
