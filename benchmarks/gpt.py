"""A GPT in plain PyTorch, large enough to measure with, and text to train it on."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn

__all__ = ["GPT", "batch", "gpt2_small", "train_step"]


class Block(nn.Module):
    """Pre-norm attention and MLP, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        count, time, width = x.shape
        q, k, v = (
            part.view(count, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(count, time, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer with tied embeddings."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context, self.vocabulary = context, vocabulary
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of (batch, time) tokens."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2_small() -> GPT:
    """Return a model of GPT-2's smallest shape: 124 M parameters in 148 tensors."""
    return GPT(vocabulary=50257, context=1024, width=768, layers=12, heads=12)


def batch(model: GPT, size: int, time: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, targets), each (size, time), int64, from a skewed source worth learning."""
    draw = torch.rand(size, time + 1, generator=generator)
    tokens = (draw.pow(3) * model.vocabulary).long()
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % model.vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, size: int, time: int, generator: torch.Generator
) -> float:
    """Run one whole step (forward, backward, clip, update, zero_grad) and return the loss."""
    tokens, targets = batch(model, size, time, generator)
    loss = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
