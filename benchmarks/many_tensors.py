"""Blocked time of many small tensors beside one large tensor of the same bytes.

Two models of equal size are trained with a checkpoint every step: 10,000 parameters of 1 KiB each, and
one parameter of 10,000 KiB. SGD is used so that the update itself costs next to nothing. Saves go to the
memory tier alone: in a directory a base has two files for each array, which is not what is measured here.

Keys::

    tensors, tensor_bytes, steps, machine
    many_blocked_ms_p50, many_blocked_ms_p99     hooks and save on the trainer's thread, steps without a base
    one_blocked_ms_p50, one_blocked_ms_p99
    many_with_base_ms_p50, one_with_base_ms_p50  steps that also captured a base
    limit_ms                                     2 x one_blocked_ms_p50 + 20
    met                                          many_blocked_ms_p50 <= limit_ms
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

import stepwell
from benchmarks.report import arguments, machine, percentile, places, publish


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    elements = 256
    many = measure([torch.zeros(elements) for _ in range(options.tensors)], options.steps)
    one = measure([torch.zeros(elements * options.tensors)], options.steps)
    limit_ms = 2 * many_median(one, base=False) + 20
    publish(
        {
            "tensors": options.tensors,
            "tensor_bytes": elements * 4,
            "steps": options.steps,
            "machine": machine(),
            "many_blocked_ms_p50": many_median(many, base=False),
            "many_blocked_ms_p99": percentile([s * 1e3 for s, base in many if not base], 0.99),
            "one_blocked_ms_p50": many_median(one, base=False),
            "one_blocked_ms_p99": percentile([s * 1e3 for s, base in one if not base], 0.99),
            "many_with_base_ms_p50": many_median(many, base=True),
            "one_with_base_ms_p50": many_median(one, base=True),
            "limit_ms": limit_ms,
            "met": many_median(many, base=False) <= limit_ms,
        },
        as_json=options.json,
    )


def measure(values: list[torch.Tensor], steps: int) -> list[tuple[float, bool]]:
    """Return (blocked seconds, with base) of each save."""
    model = nn.ParameterList(nn.Parameter(value) for value in values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = list(model.parameters())
    with places() as (_, memory):
        settings: dict[str, object] = {"tiers": [{"kind": "memory", "directory": str(memory / "arena")}]}
        return saves(model, optimizer, parameters, settings, steps)


def saves(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    settings: dict[str, object],
    steps: int,
) -> list[tuple[float, bool]]:
    """Train with a save every step and return (blocked seconds, with base) of each but the first three."""
    generator = torch.Generator().manual_seed(0)
    with stepwell.open_sync(settings, model=model, optimizer=optimizer) as well:
        for step in range(steps):
            noise = torch.randn(sum(p.numel() for p in parameters), generator=generator)
            offset = 0
            for parameter in parameters:
                parameter.grad = noise[offset : offset + parameter.numel()].clone()
                offset += parameter.numel()
            optimizer.step()
            optimizer.zero_grad()
            well.save(step)
            # The interval the pipeline sustains is not what is measured here.
            well.wait_until_finished()
        records = well.metrics().saves
    return [(record.blocked_s, record.base) for record in records[3:]]


def many_median(rows: list[tuple[float, bool]], *, base: bool) -> float:
    """Median milliseconds of the saves with or without a base; NaN where there are none."""
    seconds = [s for s, with_base in rows if with_base is base]
    return statistics.median(seconds) * 1e3 if seconds else float("nan")


if __name__ == "__main__":
    main()
