"""A training of a small byte-level GPT that can be branched: two branches take the same way, bit for bit."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch

from benchmarks.capture import live_state
from benchmarks.gpt import GPT
from benchmarks.text import VOCABULARY, Text

__all__ = ["State", "Training"]

CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 64, 128, 3, 4, 8
LR, LR_LAST, BETAS, WEIGHT_DECAY, CLIP_NORM = 1e-3, 1e-4, (0.9, 0.95), 0.1, 1.0
VALIDATION_SEQUENCES = 512
BLIND = math.log(VOCABULARY)

State = dict[str, torch.Tensor]


class Training:
    """A model, its optimizer, and the data of each step, which depends on seed and step alone.

    Parameters
    ----------
    text : Text
    seed : int
        Of the weights and of the data.
    """

    validation_bytes = VALIDATION_SEQUENCES * CONTEXT

    def __init__(self, text: Text, seed: int) -> None:
        torch.manual_seed(seed)
        self.text, self.seed = text, seed
        self.model = GPT(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY
        )

    @property
    def params(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, at: int) -> float:
        """Train on the data of step `at` and return its loss."""
        loss = self.model(*self.text.batch(BATCH, CONTEXT, self.seed * 1_000_000 + at))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def run(self, steps: Iterable[int]) -> Training:
        """Train on the data of these steps, in this order."""
        for at in steps:
            self.step(at)
        return self

    def finish(self, steps: Sequence[int]) -> Training:
        """Do the same while the learning rate falls linearly to a tenth; stop where all is lost."""
        for number, at in enumerate(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = LR + (LR_LAST - LR) * number / len(steps)
            if not math.isfinite(self.step(at)):
                break
        return self

    def branch(self) -> Training:
        """Return another training in the same state."""
        other = Training(self.text, self.seed)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def state(self) -> State:
        """Return weights and optimizer states by name, live."""
        return live_state(self.model, self.optimizer)

    def put(self, values: Mapping[str, torch.Tensor]) -> Training:
        """Overwrite tensors of the state by name."""
        live = self.state()
        with torch.no_grad():
            for name, value in values.items():
                live[name].copy_(value)
        return self

    def validation_loss(self) -> float:
        """Return the loss on text that was held out; a blind guess's where it is worse or not finite."""
        tokens, targets = self.text.validation(VALIDATION_SEQUENCES, CONTEXT)
        with torch.no_grad():
            losses = [
                float(self.model(*some)) for some in zip(tokens.split(64), targets.split(64), strict=True)
            ]
        loss = statistics.fmean(losses)
        return min(loss, BLIND) if math.isfinite(loss) else BLIND
