"""What one update of Adam or AdamW makes of a state, told from the state before and the new momentum.

Optimizer-predictive difference: of the momentum m its difference goes out; the gradient that made it
follows from that, and with it the variance v and the weight w follow up to rounding::

    g~ = m' + (m - m') / (1 - beta1)
    v~ = beta2 * v' + ((1 - beta2) * g~) * g~
    w~ = w' * decay + (-step * m) / (sqrt(v) / root + eps)

with decay = 1 - lr * weight_decay where that is decoupled (else 1), step = lr / (1 - beta1**t) and root =
sqrt(1 - beta2**t); primes are the save before. What goes out of v and w is what they differ by from v~ and
w~, as ordered integers: almost always 0 or 1 (measured sizes: docs/architecture.md, Decisions).

Nothing depends on a prediction being right; a wrong one costs bytes. But reader and writer must have the
same one, on any machine: each line above is one float32 operation of numpy after the other, all of which
IEEE 754 rounds in one way only (torch's own kernels contract and take square roots of a vector library,
which another processor does otherwise). Where a prediction is NaN, whose bits IEEE leaves open, the value
before stands in; flushing of denormals is off meanwhile; and powers are taken by the writer alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from stepwell.codecs.ordered_delta import encode_difference

__all__ = [
    "PREDICTIVE",
    "AdamUpdate",
    "MomentRun",
    "Rule",
    "UpdateHint",
    "VarianceRule",
    "WeightRule",
    "candidates",
    "cheapest",
    "rule_from",
    "rules_of",
    "runs_from",
    "state_ratio",
]

PREDICTIVE = "stepwell.predictive"
"""Encoding of a chunk that is a residual against a prediction."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BLOCK = 1 << 16  # elements worked on at once: five runs of 256 KiB stay in a second-level cache
_SAMPLES, _SAMPLE = 4, 4096  # runs and elements of each that decide which way is cheaper
_COUNT_MAX = 1 << 24  # float32 counts no further, and torch counts updates in it
_INT_MAX = 1 << 53  # a larger integer is no double, and a number here is one
_CLASSES: Mapping[str, bool] = {"torch.optim.adam:Adam": False, "torch.optim.adamw:AdamW": True}
"""Classes whose update is the one above, and whether their weight decay is decoupled if no flag says so."""


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """One update of Adam or AdamW, by the values of its parameter group.

    Attributes
    ----------
    count : int
        Which update of these parameters it was; the first is 1.
    lr, beta1, beta2, eps, weight_decay : float
    decoupled : bool
        The weight decay is AdamW's.
    """

    count: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @classmethod
    def of(cls, class_name: object, values: Mapping[object, object], count: float) -> AdamUpdate | None:
        """Read the values of a parameter group.

        Parameters
        ----------
        class_name : str
            ``module:qualname`` of the optimizer's class.
        values : mapping
            The group without its parameters.
        count : float
            What the state of the parameters calls ``step``.

        Returns
        -------
        AdamUpdate or None
            None where the update is another than the one predicted here: another class, amsgrad, maximize,
            a tensor as lr or beta, values out of their range.
        """
        if class_name not in _CLASSES or values.get("amsgrad") or values.get("maximize"):
            return None
        betas = values.get("betas")
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            return None
        numbers = [values.get("lr"), *betas, values.get("eps"), values.get("weight_decay")]
        found = [float(number) for number in numbers if _is_number(number)]
        if len(found) != len(numbers):
            return None
        lr, beta1, beta2, eps, weight_decay = found
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and 1 <= count < _COUNT_MAX and count == int(count)):
            return None
        flag = values.get("decoupled_weight_decay")
        decoupled = flag if isinstance(flag, bool) else _CLASSES[str(class_name)]
        return cls(int(count), lr, beta1, beta2, eps, weight_decay, decoupled)


@dataclass(frozen=True, slots=True)
class MomentRun:
    """Where the moments of a run of elements lie: whole tensors, or the one piece of a chunk.

    Attributes
    ----------
    momentum, variance : int
        Parts of the layout, cut alike.
    there, here : int
        Where the run begins in these two chunks, and in the chunk that is told; bytes.
    size_bytes : int
    """

    momentum: int
    variance: int
    there: int
    here: int
    size_bytes: int

    @property
    def numbers(self) -> list[int]:
        """JSON form."""
        return [self.momentum, self.variance, self.there, self.here, self.size_bytes]


@dataclass(frozen=True, slots=True)
class UpdateHint:
    """What capture knows about a chunk of a state that an update made; never stored.

    Attributes
    ----------
    update : AdamUpdate
        The newest update of everything in the chunk, with the values its group has at the save.
    runs : tuple of MomentRun
        In the order of the chunk. Elements in none have no moments; a variance has one run, all of it.
    """

    update: AdamUpdate
    runs: tuple[MomentRun, ...]


@dataclass(frozen=True, slots=True)
class VarianceRule:
    """How a variance is predicted, from the momentum before and after."""

    name: ClassVar[str] = "variance"
    beta1: float
    beta2: float

    @property
    def numbers(self) -> dict[str, float]:
        """What a reader needs, as JSON."""
        return {"beta1": self.beta1, "beta2": self.beta2}

    def predict(self, before: Bytes, momentum_before: Bytes, momentum: Bytes) -> Bytes:
        """Predict the variance.

        Parameters
        ----------
        before, momentum_before, momentum : ndarray, (n,), uint8
            Of float32, all of one length; not changed, not kept.

        Returns
        -------
        ndarray, (n,), uint8
            The caller's own.
        """
        numbers = (1 - self.beta1, self.beta2, 1 - self.beta2)
        return _in_blocks(_variance, numbers, before, momentum_before, momentum)


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How a weight is predicted, from momentum and variance after the update."""

    name: ClassVar[str] = "weight"
    decay: float
    step: float
    root: float
    eps: float

    @property
    def numbers(self) -> dict[str, float]:
        """What a reader needs, as JSON."""
        return {"decay": self.decay, "step": self.step, "root": self.root, "eps": self.eps}

    def predict(self, before: Bytes, momentum: Bytes, variance: Bytes) -> Bytes:
        """Predict the weight; see ``VarianceRule.predict``."""
        numbers = (self.decay, -self.step, self.root, self.eps)
        return _in_blocks(_weight, numbers, before, momentum, variance)


Rule = VarianceRule | WeightRule


def rules_of(kind: type[Rule], updates: Sequence[AdamUpdate]) -> list[Rule]:
    """Return the different rules of one kind that these updates give; none where a number is not finite."""
    rules: list[Rule] = []
    for update in updates:
        rule: Rule = VarianceRule(update.beta1, update.beta2)
        if kind is WeightRule:
            decay = 1 - update.lr * update.weight_decay if update.decoupled else 1.0
            bias1, bias2 = 1 - update.beta1**update.count, 1 - update.beta2**update.count
            rule = WeightRule(decay, update.lr / bias1, bias2**0.5, update.eps)
        if all(math.isfinite(number) for number in rule.numbers.values()) and rule not in rules:
            rules.append(rule)
    return rules


def rule_from(encoding: Mapping[str, object]) -> Rule | None:
    """Read the rule that an encoding carries; None if it carries none that is known."""
    kind = next((kind for kind in (VarianceRule, WeightRule) if kind.name == encoding.get("predicts")), None)
    if kind is None:
        return None
    names = ("beta1", "beta2") if kind is VarianceRule else ("decay", "step", "root", "eps")
    numbers = {name: number for name in names if _is_number(number := encoding.get(name))}
    if len(numbers) != len(names):
        return None
    return kind(**{name: float(number) for name, number in numbers.items()})  # type: ignore[arg-type]


def runs_from(encoding: Mapping[str, object]) -> list[MomentRun] | None:
    """Read the runs that an encoding carries; None if they are none."""
    runs: list[MomentRun] = []
    listed = encoding.get("moments")
    for numbers in listed if isinstance(listed, list | tuple) else ():
        if not isinstance(numbers, list | tuple) or len(numbers) != 5:
            return None
        if not all(type(number) is int and 0 <= number <= _INT_MAX for number in numbers):
            return None
        run = MomentRun(*numbers)
        if (run.there | run.here | run.size_bytes) % 4:
            return None
        runs.append(run)
    return runs or None


def cheapest(
    current: Bytes, before: Bytes, first: Bytes, second: Bytes, rules: Sequence[Rule]
) -> Rule | None:
    """Return the rule under which a chunk is smallest, None where its difference from `before` is.

    Sixteen thousand elements of the chunk are encoded each way; all of them, if it has no more.
    """
    pieces = _sample(current.nbytes // 4)

    def some(buffer: Bytes) -> Bytes:
        return np.concatenate([buffer[piece] for piece in pieces])

    wanted, old, one, two = (some(buffer) for buffer in (current, before, first, second))
    best, least = None, encode_difference(wanted, old, "float32").nbytes
    for rule in rules:
        size_bytes = encode_difference(wanted, rule.predict(old, one, two), "float32").nbytes
        if size_bytes < least:
            best, least = rule, size_bytes
    return best


def state_ratio(
    previous: Sequence[npt.NDArray[np.float32]],
    current: Sequence[npt.NDArray[np.float32]],
    update: AdamUpdate,
) -> float:
    """Return how much smaller one difference of a state is than the state, encoded as the stage does.

    Parameters
    ----------
    previous, current : sequence of three ndarrays, float32, of one shape
        Weight, momentum and variance, before and after the update.
    update : AdamUpdate

    Returns
    -------
    float
        Raw bytes of the three by encoded bytes of the three; encodings and index are not counted.
    """
    weight0, momentum0, variance0 = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in previous)
    weight, momentum, variance = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in current)
    total = encode_difference(momentum, momentum0, "float32").nbytes
    for kind, new, old, one, two in (
        (VarianceRule, variance, variance0, momentum0, momentum),
        (WeightRule, weight, weight0, momentum, variance),
    ):
        rule = cheapest(new, old, one, two, rules_of(kind, [update]))
        reference = old if rule is None else rule.predict(old, one, two)
        total += encode_difference(new, reference, "float32").nbytes
    return (weight.nbytes + momentum.nbytes + variance.nbytes) / total


def candidates(now: AdamUpdate, before: AdamUpdate | None) -> list[AdamUpdate]:
    """Return what the newest update may have been, given the values of its group at both saves.

    A scheduler that steps between update and save leaves the values of the *next* update in the group;
    those of this one are what the save before has seen. Empty unless there was exactly one update.
    """
    if before is None or before.count + 1 != now.count:
        return []
    return [replace(before, count=now.count), now]


def _sample(count: int) -> list[slice]:
    """Byte ranges of evenly spread runs of 4-byte elements."""
    if count <= _SAMPLES * _SAMPLE:
        return [slice(0, 4 * count)]
    starts = (place * (count - _SAMPLE) // (_SAMPLES - 1) for place in range(_SAMPLES))
    return [slice(4 * start, 4 * (start + _SAMPLE)) for start in starts]


def _in_blocks(
    compute: Callable[..., None], numbers: Sequence[float], before: Bytes, first: Bytes, second: Bytes
) -> Bytes:
    old, one, two = (buffer.view("<f4") for buffer in (before, first, second))
    found = np.empty(old.size, "<f4")
    scratch = np.empty(min(old.size, _BLOCK), "<f4")
    with _gradual_underflow(), np.errstate(all="ignore"):
        singles = [np.float32(number) for number in numbers]
        for start in range(0, old.size, _BLOCK):
            part = slice(start, min(start + _BLOCK, old.size))
            out = found[part]
            compute(old[part], one[part], two[part], out, scratch[: out.size], *singles)
            nan = np.isnan(out)
            if nan.any():
                np.copyto(out.view("<u4"), old[part].view("<u4"), where=nan)
    return found.view(np.uint8)


def _variance(
    old: Floats, was: Floats, now: Floats, out: Floats, scratch: Floats, *numbers: np.float32
) -> None:
    share1, keep2, share2 = numbers
    np.subtract(now, was, out=out)
    np.divide(out, share1, out=out)
    np.add(was, out, out=out)
    np.multiply(out, share2, out=scratch)
    np.multiply(scratch, out, out=scratch)
    np.multiply(old, keep2, out=out)
    np.add(out, scratch, out=out)


def _weight(
    old: Floats, momentum: Floats, variance: Floats, out: Floats, scratch: Floats, *numbers: np.float32
) -> None:
    decay, step, root, eps = numbers
    np.sqrt(variance, out=scratch)
    np.divide(scratch, root, out=scratch)
    np.add(scratch, eps, out=scratch)
    np.multiply(momentum, step, out=out)
    np.divide(out, scratch, out=out)
    np.multiply(old, decay, out=scratch)
    np.add(scratch, out, out=out)


@contextmanager
def _gradual_underflow() -> Iterator[None]:
    """Take denormals as they are on this thread, which may have been told otherwise."""
    smallest = np.full(1, 2.0**-140, np.float32)
    flushed = bool((smallest * np.float32(0.5) == 0).all())
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) <= _INT_MAX
    return type(value) is float and math.isfinite(value)
