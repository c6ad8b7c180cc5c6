"""A training whose states are captured, and the stages that tell them by prediction, without a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from lossy_rig import Here
from torch import nn, optim

from stepwell.pipeline.base import Chunk, ChunkStage, Kind
from stepwell.pipeline.capture_stage import CaptureStage
from stepwell.pipeline.captured import CapturedSave, SaveKind, StateCopy
from stepwell.pipeline.delta import PredictiveStage
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.predictive import PREDICTIVE
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.slots import CopyPlan, LayoutMemory

CHUNK_BYTES = 1 << 14
STATE_KINDS = (Kind.WEIGHT, Kind.MOMENT1, Kind.MOMENT2)

Make = Callable[[Iterator[nn.Parameter]], optim.Optimizer]


class Training:
    """A small language of squares: a model whose training has gradients of all sizes."""

    def __init__(
        self, make: Make = optim.AdamW, *, width: int = 96, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(32, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 8),
        ).to(dtype)  # fmt: skip
        self.optimizer = make(self.model.parameters())
        self.live = LiveState(self.model, self.optimizer, {}, rng=False)
        self.truth = torch.randn(32, 8)
        self.dtype = dtype
        self.saves = 0
        self.layout: Layout | None = None

    def update(self) -> None:
        x = torch.randn(64, 32)
        y = torch.tanh(x @ self.truth)
        self.optimizer.zero_grad()
        (self.model(x.to(self.dtype)) - y.to(self.dtype)).square().mean().backward()
        self.optimizer.step()

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


class Pipeline:
    """The stages of one life, and a reader who has only what they sent."""

    def __init__(self, delta: ChunkStage | None = None) -> None:
        self.stages: list[ChunkStage] = [delta or PredictiveStage(), Shard()]
        self.reader = reading_stages()
        self.sent: list[Chunk] = []

    async def save(self, chunks: list[Chunk]) -> list[Chunk]:
        self.sent = []
        for chunk in chunks:
            before = chunk.buffer.copy()
            sent = chunk
            for stage in self.stages:
                sent = await stage.save(sent, Here())
            assert np.array_equal(chunk.buffer, before), "a stage must not write into what it was given"
            if not sent.encodings:
                sent = replace(sent, buffer=sent.buffer.copy())
            self.sent.append(sent)
        return self.sent

    async def check(self, chunks: list[Chunk]) -> None:
        """Send a save and read it back: the same bits."""
        for raw, sent in zip(chunks, await self.save(chunks), strict=True):
            back = await recover_chunk(replace(sent, hint=None), self.reader, Here())
            assert np.array_equal(back.buffer, raw.buffer), raw.key

    def predicted(self) -> set[Kind]:
        return {chunk.kind for chunk in self.sent if any(e["id"] == PREDICTIVE for e in chunk.encodings)}

    def share(self, kind: Kind) -> float:
        """Stored by raw bytes of one kind."""
        chunks = [chunk for chunk in self.sent if chunk.kind is kind]
        return sum(chunk.buffer.nbytes for chunk in chunks) / sum(chunk.raw_bytes for chunk in chunks)

    def ratio(self) -> float:
        """Raw by stored bytes of weights and moments."""
        state = [chunk for chunk in self.sent if chunk.kind in STATE_KINDS]
        return sum(chunk.raw_bytes for chunk in state) / sum(chunk.buffer.nbytes for chunk in state)
