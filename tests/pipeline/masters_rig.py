"""A model in half precision beside float32 masters, kept in each of the places where people keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from predictive_rig import CHUNK_BYTES
from torch import nn, optim

from stepwell.pipeline.base import Chunk
from stepwell.pipeline.capture_stage import CaptureStage
from stepwell.pipeline.captured import CapturedSave, SaveKind, StateCopy
from stepwell.pipeline.casts import DERIVED
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.slots import CopyPlan, LayoutMemory


class MasterAdamW(optim.AdamW):
    """Keeps float32 masters in its state, as those of large trainers do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["master"] = weight.detach().float().clone()
                gradient = weight.grad.float()
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                state["master"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-1e-3)
                weight.copy_(state["master"])


class Masters:
    """A model in half precision; `where` says who keeps its masters: ``optimizer``, ``state``, ``extra``."""

    def __init__(
        self, where: str = "optimizer", *, width: int = 96, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        torch.manual_seed(0)
        self.where = where
        self.model = nn.Sequential(
            nn.Linear(32, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 8),
        ).to(dtype)  # fmt: skip
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        extra: dict[str, object] = {}
        if where == "state":
            self.optimizer: optim.Optimizer = MasterAdamW(self.weights)
        else:
            self.optimizer = optim.AdamW(self.masters)
            if where == "extra":
                extra["masters"] = list(self.masters)
        self.live = LiveState(self.model, self.optimizer if where != "extra" else None, extra, rng=False)
        self.dtype = dtype
        self.saves = 0
        self.layout: Layout
        self.truth = torch.randn(32, 8)

    def update(self) -> None:
        x = torch.randn(64, 32)
        self.model.zero_grad()
        loss = (self.model(x.to(self.dtype)).float() - torch.tanh(x @ self.truth)).square().mean()
        loss.backward()
        if self.where != "state":
            for master, weight in zip(self.masters, self.weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
        self.optimizer.step()
        if self.where != "state":
            self.copy()

    @torch.no_grad()
    def copy(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)

    async def chunks(self) -> list[Chunk]:
        """The raw chunks of a captured state, as the capture stage yields them."""
        collected = self.live.collect()
        plan = CopyPlan(plan_layout(collected.specs, chunk_bytes=CHUNK_BYTES))
        memory = LayoutMemory(torch.empty(plan.layout.size_bytes, dtype=torch.uint8), plan)
        memory.copy_from(collected.tensors)
        self.layout = plan.layout
        self.saves += 1
        captured = CapturedSave(
            self.saves, SaveKind.STATE, None, (), None, StateCopy(memory, collected.tree), None, 0
        )
        return [chunk async for chunk in CaptureStage().chunks(captured)]


def derived(chunks: Iterable[Chunk]) -> set[str]:
    """Keys of the chunks that were stored as casts."""
    return {chunk.key for chunk in chunks if any(e["id"] == DERIVED for e in chunk.encodings)}


def halves(chunks: Iterable[Chunk]) -> set[str]:
    """Keys of the chunks in half precision."""
    return {chunk.key for chunk in chunks if chunk.dtype in ("bfloat16", "float16")}
