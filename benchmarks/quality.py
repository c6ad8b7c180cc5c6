"""What a lossy checkpoint costs: the loss of a training resumed from one, against one that never stopped.

A byte-level GPT is trained with AdamW (betas 0.9 and 0.95, weight decay 0.1) on the sources of Python's
standard library; some files are held out. All runs of a seed share the first `steps_before` steps. Then the
state of every step goes through a scheme, `checkpointed_steps` of them; a fresh model and optimizer take
what the scheme gives back, and train on for `steps_after` steps, with a falling learning rate, on the data
that the uninterrupted run saw. ``loss_change`` is the validation loss of the resumed run at the end minus
that of the uninterrupted one, in nats per byte; a loss that is not finite or above a blind guess's, ln 256,
counts as ln 256.

Through ``stepwell.open_sync``, with no base but the first, so that everything comes back from one base and
the whole log of differentials; closed, and opened again by a fresh model::

    exact, compact, tiercheck, fastcheck    the presets
    closed_loop_int8                        state differences: w and m int8, v log_quant

Made here from the codecs, because the pipeline does not offer them::

    open_loop_int8         each difference of w, m and v is int8, and is taken against the true state before,
                           not against what the reader has: errors add up, and where small v have become
                           negative the update takes the root of a negative number
    open_loop_int8_mended  the same; v below zero counts as zero when it is read
    open_loop_sparse       of each difference of w only the largest tenth; against the true state before, so
                           that the rest is never sent. m and v as they are
    linear_v               w and m as they are, v of the last step in linear 8 bits, one scale for each tensor
    linear_v_blocks        the same with a scale for each block of 256: fewer small v become zero
    stale_base             nothing but the base: `checkpointed_steps` steps of training are lost

To know what zero looks like::

    noise                  nothing is lost, but the data after the restore comes in another order; two orders

Rule of the verdicts: ``zero_spread`` is the largest abs(loss_change) among all rows of `noise`. A scheme is
"harmful" where the loss_change of every seed is above zero_spread, else "within the spread of zero" where
abs(mean) <= zero_spread, and "unclear" otherwise.

Keys::

    params, steps_before, checkpointed_steps, steps_after, seeds, validation_bytes, machine, seconds
    rows                  of {scheme, seed, loss_change}; two for each seed of `noise`
    summary               {scheme: {mean, spread}}; spread is the sample standard deviation over its rows
    zero_spread
    verdicts              {scheme: "within the spread of zero", "harmful" or "unclear"}
    goals                 {what: met or not}
    loss_reference        {seed: validation loss of the uninterrupted run at the end}
    bytes_per_param_step  {scheme: mean stored bytes of a differential over params}, where a pipeline ran
    restored_error        {scheme: largest over seeds of rms(w restored - w) / rms(w - w at the base)}
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import stepwell
from benchmarks.byte_gpt import State, Training
from benchmarks.report import arguments, keep_freed_memory, machine, memory_and_directory, places, publish
from benchmarks.text import library_text
from stepwell.codecs.base import PlainCodec
from stepwell.codecs.int8 import Int8
from stepwell.codecs.threshold_sparse import ThresholdSparse

PIPELINES: Mapping[str, Mapping[str, object]] = {
    "exact": {"preset": "exact"},
    "compact": {"preset": "compact"},
    "closed_loop_int8": {
        "pipeline": [
            {"capture": "state"},
            {"delta": "difference"},
            {"quantize": "int8"},
            "shard",
            "replicate",
            "commit",
        ]
    },
    "tiercheck": {"preset": "tiercheck"},
    "fastcheck": {"preset": "fastcheck"},
}
HARMFUL = ("open_loop_int8", "open_loop_sparse", "linear_v", "stale_base")
HARMLESS = ("exact", "compact", "closed_loop_int8")
NOISE_ORDERS = 2


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=200, help="steps before the first checkpoint")
    parser.add_argument("--saves", type=int, default=100, help="steps with a checkpoint each")
    parser.add_argument("--after", type=int, default=200, help="steps after the restore")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    sizes = Sizes(options.prefix, options.saves, options.after)
    result = measure(sizes, options.seeds, options.dir)
    publish(result, as_json=options.json)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Steps before the first checkpoint, with checkpoints, and after the restore."""

    prefix: int
    saves: int
    after: int

    @property
    def saved(self) -> range:
        """Steps that are checkpointed."""
        return range(self.prefix, self.prefix + self.saves)

    @property
    def rest(self) -> range:
        """Steps after the restore."""
        return range(self.saved.stop, self.saved.stop + self.after)


class OpenLoop:
    """A reader that adds up differences, each sent for itself.

    Parameters
    ----------
    state : mapping of str to Tensor
        What it begins with, copied.
    sent : callable
        What arrives of a difference.
    """

    def __init__(self, state: State, sent: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.reached = cloned(state)
        self._before, self._sent = cloned(state), sent

    def see(self, state: State) -> None:
        """Take the differences from the true state before."""
        for name, before in self._before.items():
            self.reached[name] += self._sent(state[name] - before)
            before.copy_(state[name])


@dataclass
class Figures:
    """What all seeds gave."""

    rows: list[dict[str, object]] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)
    stored: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def changes(self, scheme: str) -> list[float]:
        """Return the loss changes of one scheme."""
        return [float(str(row["loss_change"])) for row in self.rows if row["scheme"] == scheme]

    @property
    def schemes(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(str(row["scheme"]) for row in self.rows))


def measure(sizes: Sizes, seeds: int, directory: Path | None) -> dict[str, object]:
    """Run every scheme for every seed."""
    began, text, figures = time.monotonic(), library_text(), Figures()
    for seed in range(seeds):
        one_seed(Training(text, seed), sizes, figures, directory, Progress(began, seed))
    zero_spread = max(abs(change) for change in figures.changes("noise"))
    summary = {scheme: summarised(figures.changes(scheme)) for scheme in figures.schemes}
    verdicts = {scheme: verdict(figures.changes(scheme), zero_spread) for scheme in figures.schemes}
    return {
        "params": Training(text, 0).params,
        "steps_before": sizes.prefix,
        "checkpointed_steps": sizes.saves,
        "steps_after": sizes.after,
        "seeds": seeds,
        "validation_bytes": Training.validation_bytes,
        "machine": machine(),
        "seconds": time.monotonic() - began,
        "rows": figures.rows,
        "summary": summary,
        "zero_spread": zero_spread,
        "verdicts": verdicts,
        "goals": goals(verdicts),
        "loss_reference": figures.reference,
        "bytes_per_param_step": {name: statistics.fmean(values) for name, values in figures.stored.items()},
        "restored_error": figures.errors,
    }


def one_seed(
    training: Training, sizes: Sizes, figures: Figures, directory: Path | None, progress: Progress
) -> None:
    """Run the uninterrupted training, and every scheme against it."""
    start = training.run(range(sizes.prefix)).branch()
    int8 = OpenLoop(floats_of(start.state()), through_int8)
    sparse = OpenLoop(weights_of(start.state()), through_threshold)
    for at in sizes.saved:
        training.step(at)
        int8.see(training.state())
        sparse.see(training.state())
    end = training.branch()
    wanted = training.finish(sizes.rest).validation_loss()
    figures.reference[str(training.seed)] = wanted
    progress.say(f"uninterrupted: loss {wanted:.4f}")

    def judge(scheme: str, resumed: Training, steps: Sequence[int]) -> None:
        error = moved_error(resumed.state(), end.state(), start.state())
        figures.errors[scheme] = max(error, figures.errors.get(scheme, 0.0))
        change = resumed.finish(steps).validation_loss() - wanted
        figures.rows.append({"scheme": scheme, "seed": training.seed, "loss_change": change})
        progress.say(f"{scheme}: {change:+.5f}")

    for name, settings in PIPELINES.items():
        resumed, stored = through_pipeline(start, end, sizes.saved, settings, directory)
        figures.stored.setdefault(name, []).append(stored / end.params)
        if name == "exact" and not same_bits(resumed.state(), end.state()):
            raise AssertionError("the preset exact did not give back what it was given")
        judge(name, resumed, sizes.rest)
    harmful = {
        "open_loop_int8": int8.reached,
        "open_loop_int8_mended": {**int8.reached, **each_v(int8.reached, lambda v: v.clamp(min=0))},
        "open_loop_sparse": sparse.reached,
        "linear_v": each_v(end.state(), through_one_scale),
        "linear_v_blocks": each_v(end.state(), through_int8),
        "stale_base": start.state(),
    }
    for name, values in harmful.items():
        judge(name, end.branch().put(values), sizes.rest)
    for number in range(NOISE_ORDERS):
        judge("noise", end.branch(), in_another_order(sizes.rest, number))


def through_pipeline(
    start: Training,
    end: Training,
    steps: range,
    settings: Mapping[str, object],
    directory: Path | None,
) -> tuple[Training, float]:
    """Train these steps with a checkpoint each, and return what a fresh process would have of the last.

    Returns
    -------
    Training
        Restored.
    float
        Mean stored bytes of a differential.

    Raises
    ------
    AssertionError
        The checkpoints changed the training, or something else than the last step came back.
    """
    with places(directory) as (disk, memory):
        config = {
            **memory_and_directory(disk, memory),
            **settings,
            "base_every": 10 * len(steps),
            "log_budget": len(steps) / 2,
            "handle_sigterm": False,
        }
        saved = start.branch()
        with stepwell.open_sync(config, model=saved.model, optimizer=saved.optimizer) as well:
            for at in steps:
                saved.step(at)
                well.save(at, base=at == steps[0])
            well.wait_until_finished()
            sizes = [record.differential_bytes for record in well.metrics().saves if not record.base]
        if not same_bits(saved.state(), end.state()):
            raise AssertionError("the training took another way because it was checkpointed")
        fresh = Training(start.text, start.seed)
        with stepwell.open_sync(config, model=fresh.model, optimizer=fresh.optimizer) as well:
            restored = well.restore()
        if restored is None or (restored.step, restored.base_step) != (steps[-1], steps[0]):
            raise AssertionError(f"not the last step from the first base: {restored}")
    return fresh, statistics.fmean(sizes)


def in_another_order(steps: range, number: int) -> list[int]:
    """Return the same steps in another order."""
    order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(number))
    return [steps[int(index)] for index in order]


def through_int8(value: torch.Tensor) -> torch.Tensor:
    """Return what linear int8 with a scale per block of 256 gives back."""
    return through(Int8(), value)


def through_threshold(value: torch.Tensor) -> torch.Tensor:
    """Return what is left of the largest tenth, as the stage sparsify keeps it by default."""
    return through(ThresholdSparse(0.1, "int8"), value)


def through_one_scale(value: torch.Tensor) -> torch.Tensor:
    """Return what linear 8 bits without a sign and with one scale for the whole tensor give back."""
    scale = value.max() / 255
    return (value / scale).round() * scale


def through(codec: PlainCodec, value: torch.Tensor) -> torch.Tensor:
    """Encode and decode float32 values."""
    found = codec.decode(codec.encode(value.detach().flatten().numpy()))
    return torch.from_numpy(found.copy()).view(torch.float32).view(value.shape)


def floats_of(state: State) -> State:
    """Return weights and moments; what counts steps is left out."""
    return {name: value for name, value in state.items() if not name.endswith(".step")}


def weights_of(state: State) -> State:
    """Return the weights."""
    return {name: value for name, value in state.items() if name.startswith("model.")}


def each_v(state: State, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
    """Return the second moments, changed."""
    return {name: change(value) for name, value in state.items() if name.endswith(".exp_avg_sq")}


def cloned(state: State) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def same_bits(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.view(torch.int32), other[name].view(torch.int32)) for name, value in one.items()
    )


def moved_error(found: State, wanted: State, start: State) -> float:
    """Return the error of the weights over the way they went since the base."""
    weights = weights_of(wanted).items()
    error = sum(float((found[name] - value).double().square().sum()) for name, value in weights)
    moved = sum(float((start[name] - value).double().square().sum()) for name, value in weights)
    return math.sqrt(error / moved)


def summarised(changes: Sequence[float]) -> dict[str, float]:
    """Mean and sample standard deviation; a single value has no spread, which is given as zero."""
    spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
    return {"mean": statistics.fmean(changes), "spread": spread}


def verdict(changes: Sequence[float], zero_spread: float) -> str:
    """Judge a scheme by the rule in the head of this file."""
    if min(changes) > zero_spread:
        return "harmful"
    return "within the spread of zero" if abs(statistics.fmean(changes)) <= zero_spread else "unclear"


def goals(verdicts: Mapping[str, str]) -> dict[str, bool]:
    """Say which schemes are as they should be."""
    within = {f"{name} within the spread of zero": (name, "within the spread of zero") for name in HARMLESS}
    harmful = {f"{name} shown to be harmful": (name, "harmful") for name in HARMFUL}
    return {what: verdicts[name] == wanted for what, (name, wanted) in {**within, **harmful}.items()}


@dataclass(frozen=True, slots=True)
class Progress:
    """Lines for whoever waits."""

    began: float
    seed: int

    def say(self, what: str) -> None:
        """Print a line to stderr."""
        print(
            f"{time.monotonic() - self.began:6.1f} s  seed {self.seed}  {what}", file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()
