"""What the demo trains: a small GPT that learns the English of Python's own language reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Batches", "Gpt", "Training", "english_text"]

CONTEXT_LENGTH = 64
BATCH_SIZE = 8
WIDTH = 192
HEADS = 4
BLOCKS = 4
DROPOUT = 0.1
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
SEED = 20


def english_text() -> str:
    """Return English text that every Python brings along: the language reference of ``help()``."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out; the docstrings of the built-ins are always there
        import builtins

        return "\n".join(str(value.__doc__) for _, value in sorted(vars(builtins).items()) if value.__doc__)
    return "\n".join(text for _, text in sorted(topics.items()))


class Batches:
    """A data loader with a random generator of its own, whose state is saved with the model's.

    Yields pairs of (BATCH_SIZE, CONTEXT_LENGTH) int64: characters and the characters after them.
    """

    def __init__(self, text: str) -> None:
        self.vocabulary = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.vocabulary)}
        self._codes = torch.tensor([codes[character] for character in text])
        self._generator = torch.Generator().manual_seed(SEED)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        last = len(self._codes) - CONTEXT_LENGTH - 1
        starts = torch.randint(last, (BATCH_SIZE, 1), generator=self._generator)
        rows = self._codes[starts + torch.arange(CONTEXT_LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next batch depends on."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state."""
        self._generator.set_state(state["generator"])


class Block(nn.Module):
    """Attention to what came before, then a wide layer; both with a residual and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) float32 to the same."""
        batch, length, _ = x.shape
        heads = self.attention(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(  # type: ignore[no-any-return]
            self.narrow(functional.gelu(self.wide(self.norm2(x))))
        )


class Gpt(nn.Module):
    """A character model of about 1.9 million parameters; the output layer is the embedding, tied."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, WIDTH)
        self.position = nn.Embedding(CONTEXT_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Map (batch, length) int64 to (batch, length, vocabulary) float32 logits."""
        x = self.embedding(codes) + self.position(torch.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Training:
    """Model, AdamW, cosine schedule and data, made the same way in every process."""

    def __init__(self, total_steps: int) -> None:
        torch.manual_seed(SEED)
        # The second core is for the checkpoints; and sums come out the same only with equal threads.
        torch.set_num_threads(1)
        self.batches = Batches(english_text())
        self.model = Gpt(len(self.batches.vocabulary))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total_steps)

    @property
    def parameter_count(self) -> int:
        """Number of weights, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def extra(self) -> dict[str, object]:
        """What is saved beside model and optimizer."""
        return {"scheduler": self.scheduler, "data": self.batches}

    def step(self) -> float:
        """Train on one batch and return the loss."""
        codes, targets = self.batches.next()
        loss = functional.cross_entropy(self.model(codes).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def final_state(self) -> dict[str, Tensor]:
        """Return everything the outcome is compared by, by names as the checkpoint has them."""
        state = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        names = [name for name, _ in self.model.named_parameters()]
        for index, values in self.optimizer.state_dict()["state"].items():
            for key, tensor in values.items():
                state[f"optim/state/{names[index]}/{key}"] = tensor
        state["lr"] = torch.tensor(self.scheduler.get_last_lr(), dtype=torch.float64)
        state["rng/torch"] = torch.get_rng_state()
        state["rng/data"] = self.batches.state_dict()["generator"]
        return state
