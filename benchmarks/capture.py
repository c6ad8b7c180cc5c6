"""How long a save keeps the trainer, beside DCP's async_save and one memcpy of the state.

A GPT-2-small AdamW state (124 M parameters, 1.5 GB, 592 tensors) is trained for real, with a checkpoint
every step. ``blocked`` is everything stepwell does on the trainer's thread in one step: its optimizer
hooks and ``save``. Saves that also capture a base are reported apart. DCP saves the same state to the
same disk, one save at a time, each awaited before the next; memcpy copies the state into reused buffers.

Keys (milliseconds are medians over the repeats)::

    params, state_bytes, tensors, steps, dcp_repeats, memcpy_repeats, machine
    blocked_ms_p50, blocked_ms_p99, blocked_ms_max     steps without a base
    blocked_with_base_ms_p50                           steps that also captured a base (eager copy)
    dcp_async_blocked_ms_p50, dcp_async_blocked_ms_min, dcp_async_blocked_ms_max
    memcpy_ms_p50, memcpy_ms_min, memcpy_ms_max
    step_ms_p50                                        a whole training step, for scale
    ratio_to_dcp_async, ratio_to_memcpy                blocked_ms_p50 over theirs
"""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from pathlib import Path

import torch

import stepwell
from benchmarks.gpt import gpt2_small, train_step
from benchmarks.report import arguments, machine, memory_and_directory, percentile, places, publish


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7, help="of DCP and memcpy")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write (default: a temporary directory)"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    model = gpt2_small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with places(options.dir) as (disk, memory):
        result = measure(model, optimizer, disk, memory, options.steps, options.repeats)
    publish(result, as_json=options.json)


def measure(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    root: Path,
    memory: Path,
    steps: int,
    repeats: int,
) -> dict[str, object]:
    """Measure all three, one after the other, in this process."""
    generator = torch.Generator().manual_seed(1)
    plain: list[float] = []
    with_base: list[float] = []
    step_s: list[float] = []
    # Two steps first, so that the optimizer's state exists and pages are warm.
    for _ in range(2):
        train_step(model, optimizer, 1, 64, generator)
    with stepwell.open_sync(memory_and_directory(root, memory), model=model, optimizer=optimizer) as well:
        for step in range(steps):
            began = time.perf_counter()
            train_step(model, optimizer, 1, 64, generator)
            well.save(step)
            step_s.append(time.perf_counter() - began)
        for record in well.metrics().saves[2:]:  # the first two are probation, captured eagerly
            (with_base if record.base else plain).append(record.blocked_s)
    shutil.rmtree(root / "run", ignore_errors=True)

    state = live_state(model, optimizer)
    memcpy_s = measure_memcpy(state, repeats)
    dcp_s = measure_dcp(state, root, repeats)
    blocked_ms = statistics.median(plain) * 1e3
    memcpy_ms, dcp_ms = statistics.median(memcpy_s) * 1e3, statistics.median(dcp_s) * 1e3
    return {
        "params": sum(p.numel() for p in model.parameters()),
        "state_bytes": sum(t.numel() * t.element_size() for t in state.values()),
        "tensors": len(state),
        "steps": steps,
        "dcp_repeats": repeats,
        "memcpy_repeats": repeats,
        "machine": machine(),
        "blocked_ms_p50": blocked_ms,
        "blocked_ms_p99": percentile(plain, 0.99) * 1e3,
        "blocked_ms_max": max(plain) * 1e3,
        "blocked_with_base_ms_p50": statistics.median(with_base) * 1e3 if with_base else None,
        "dcp_async_blocked_ms_p50": dcp_ms,
        "dcp_async_blocked_ms_min": min(dcp_s) * 1e3,
        "dcp_async_blocked_ms_max": max(dcp_s) * 1e3,
        "memcpy_ms_p50": memcpy_ms,
        "memcpy_ms_min": min(memcpy_s) * 1e3,
        "memcpy_ms_max": max(memcpy_s) * 1e3,
        "step_ms_p50": statistics.median(step_s) * 1e3,
        "ratio_to_dcp_async": blocked_ms / dcp_ms,
        "ratio_to_memcpy": blocked_ms / memcpy_ms,
    }


def live_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every tensor of the model and the optimizer by name."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            state[f"optim.{name}.{key}"] = value
    return state


def measure_memcpy(state: dict[str, torch.Tensor], repeats: int) -> list[float]:
    """Copy the whole state into touched, reused buffers; seconds each."""
    buffers = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for name, tensor in state.items():
            buffers[name].copy_(tensor)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def measure_dcp(state: dict[str, torch.Tensor], root: Path, repeats: int) -> list[float]:
    """Time ``dcp.async_save`` (thread) until it returns; each save is awaited before the next."""
    import torch.distributed.checkpoint as dcp

    seconds = []
    for repeat in range(repeats + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            future = dcp.async_save(dict(state), checkpoint_id=str(root / f"dcp-{repeat}"))
            seconds.append(time.perf_counter() - began)
            future.result()  # type: ignore[union-attr]
        shutil.rmtree(root / f"dcp-{repeat}", ignore_errors=True)
    return seconds[1:]


if __name__ == "__main__":
    main()
