"""States and gradients of a real training, to measure codecs on.

Two sources: a recorded file of twelve steps, and a byte-level GPT trained here on text that every
machine has, the top-level modules of Python's standard library, in order of their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.gpt import GPT
from benchmarks.text import library_files

__all__ = ["STEPS_MIN", "Floats", "Moment", "Phase", "Training", "load_shipped", "standard_library_text"]

Floats = npt.NDArray[np.float32]

STEPS_MIN = 64
EARLY_STEP = 20
WIDE_GAP = 10

_TEXT_BYTES_MAX = 4 << 20
_WARMUP_STEPS = 20
_LR, _LR_LAST = 1e-3, 1e-4
_BETAS, _EPS, _WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1  # those of the recorded file
_CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """One step: the gradient an update consumed and the state it left; all parameters in a row.

    Attributes
    ----------
    step : int
        Updates made.
    w, m, v : ndarray, (n,), float32
        Weights, first and second moments after the update.
    g : ndarray, (n,), float32
        The clipped gradient.
    g_bf16 : ndarray, (n,), float32
        The gradient rounded to bfloat16 values before it was clipped.
    """

    step: int
    w: Floats
    m: Floats
    v: Floats
    g: Floats
    g_bf16: Floats

    def cut(self, elements: int) -> Moment:
        """Return the same with the first `elements` of every tensor."""
        kept = (values[:elements] for values in (self.w, self.m, self.v, self.g, self.g_bf16))
        return Moment(self.step, *kept)


@dataclass(frozen=True, slots=True)
class Phase:
    """Three steps of one stage of a training: two consecutive ones, and one ten after the first."""

    name: str
    first: Moment
    second: Moment
    wide: Moment

    def cut(self, elements: int) -> Phase:
        """Return the same with the first `elements` of every tensor."""
        return Phase(self.name, *(moment.cut(elements) for moment in (self.first, self.second, self.wide)))


class Training:
    """A GPT that learns the standard library's sources, one batch a step.

    Parameters
    ----------
    steps : int
        The schedule: warm-up, then a cosine down to a tenth at this step, and flat after it.
    width, layers, heads : int
        256 and 8 make 6.4 million parameters.
    time, size : int
        Length and number of the sequences of a batch.
    """

    def __init__(
        self,
        steps: int,
        *,
        width: int = 256,
        layers: int = 8,
        heads: int = 8,
        time: int = 128,
        size: int = 4,
        seed: int = 0,
    ) -> None:
        if steps < STEPS_MIN:
            raise ValueError(f"steps must be at least {STEPS_MIN}, not {steps}: the stages would overlap")
        torch.manual_seed(seed)
        self.steps = steps
        self.taken = 0
        self.loss = math.nan
        self.norm = math.nan
        self.model = GPT(256, time, width, layers, heads)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": _WEIGHT_DECAY},
                {"params": [p for p in self.parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=_LR,
            betas=_BETAS,
            eps=_EPS,
        )
        self._text = standard_library_text()
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._shape = (size, time)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    def describe(self) -> dict[str, object]:
        """Return what is being trained on, and how far it came."""
        size, time = self._shape
        return {
            "tokens_per_step": size * time,
            "text_bytes": self._text.numel(),
            "loss": self.loss,
            "grad_norm": self.norm,
        }

    def step(self, *, round_gradients: bool = False, record: bool = False) -> Moment | None:
        """Make one update.

        Parameters
        ----------
        round_gradients : bool
            Round gradients to bfloat16 before they are clipped, as mixed precision leaves them.
        record : bool
            Return what the update consumed and left.
        """
        self.optimizer.zero_grad()
        tokens, targets = self._batch()
        loss = self.model(tokens, targets)
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        rounded = _flat(gradients).bfloat16().float() if record else None
        if round_gradients:
            for gradient in gradients:
                gradient.copy_(gradient.bfloat16())
        self._schedule()
        self.norm = float(nn.utils.clip_grad_norm_(self.parameters, _CLIP_NORM))
        self.optimizer.step()
        self.taken += 1
        self.loss = float(loss.detach())
        return None if rounded is None else self._moment(gradients, rounded)

    def phases(self) -> Iterator[Phase]:
        """Train to the end and yield the early, the middle and the late phase as they are reached."""
        starts = {
            "early": EARLY_STEP,
            "middle": self.steps // 2,
            "late": self.steps - WIDE_GAP,
        }
        for name, start in starts.items():
            wanted = (start, start + 1, start + WIDE_GAP)
            found: list[Moment] = []
            while self.taken < wanted[-1]:
                moment = self.step(record=self.taken + 1 in wanted)
                if moment is not None:
                    found.append(moment)
            yield Phase(name, *found)

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        size, time = self._shape
        starts = torch.randint(self._text.numel() - time - 1, (size,), generator=self._generator)
        rows = torch.stack([self._text[start : start + time + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def _schedule(self) -> None:
        warm = min(1.0, (self.taken + 1) / _WARMUP_STEPS)
        through = min(1.0, self.taken / self.steps)
        rate = warm * (_LR_LAST + (_LR - _LR_LAST) * (1 + math.cos(math.pi * through)) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _moment(self, gradients: Sequence[torch.Tensor], rounded: torch.Tensor) -> Moment:
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        return Moment(
            self.taken,
            _flat(self.parameters).numpy(),
            _flat([state["exp_avg"] for state in states]).numpy(),
            _flat([state["exp_avg_sq"] for state in states]).numpy(),
            _flat(gradients).numpy(),
            _clipped(rounded, _CLIP_NORM).numpy(),
        )


def standard_library_text(bytes_max: int = _TEXT_BYTES_MAX) -> torch.Tensor:
    """Return the sources of Python's standard library, (n,), uint8; the same on every run of one Python."""
    parts: list[bytes] = []
    size = 0
    for path in library_files():
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= bytes_max:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:bytes_max]), dtype=torch.uint8)


def load_shipped(path: Path) -> Phase | None:
    """Read the recorded trajectory, its tensors in a row in order of their names; None where there is none.

    Its gradients are clipped by the norm of the whole model's, as they were then.
    """
    if not path.exists():
        return None
    with np.load(path) as data:
        names = sorted({key.split("|")[0] for key in data.files if "|" in key})
        steps = [int(step) for step in data["steps"]]
        norms = [float(norm) for norm in data["grad_norm_before_step"]]
        rows = {
            kind: np.concatenate([data[f"{name}|{kind}"].reshape(len(steps), -1) for name in names], axis=1)
            for kind in "wmvg"
        }

    def moment(at: int) -> Moment:
        raw = torch.from_numpy(rows["g"][at].copy())
        norm = torch.tensor(norms[at])
        w, m, v = (np.ascontiguousarray(rows[kind][at]) for kind in "wmv")
        clipped = _clipped(raw, _CLIP_NORM, norm).numpy()
        return Moment(steps[at], w, m, v, clipped, _clipped(raw.bfloat16().float(), _CLIP_NORM, norm).numpy())

    return Phase("shipped", moment(0), moment(1), moment(WIDE_GAP))


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _clipped(raw: torch.Tensor, norm_max: float, norm: torch.Tensor | None = None) -> torch.Tensor:
    """Scale as ``clip_grad_norm_`` does: by one float32 for all, at most 1."""
    total = torch.linalg.vector_norm(raw) if norm is None else norm
    return raw * (norm_max / (total + 1e-6)).clamp(max=1.0).float()
