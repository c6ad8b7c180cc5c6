"""What weights in bfloat16 cost in a differential of states beside their float32 masters, derived or not.

A byte-level GPT in bfloat16 is trained by AdamW on float32 masters and its whole state is saved after each
step: masters, both moments, and the bfloat16 weights, 14 bytes per parameter. The stages of the pipeline
encode the same chunks with and without the stage ``derive``, on one thread. ``spoiled`` is the same with
every weight one bit beside the cast of its master, so that nothing is derived and each search is in vain.
Gradient capture, which keeps copies whole beside the gradients of masters, is told for comparison.

Keys::

    params, saves, machine
    rows                      one for each of delta (none, ordered_delta, predictive), by:
      delta
      bytes_plain, bytes_derived            of a pack, per parameter; median
      halves_plain, halves_derived          the part of it that is bfloat16 weights
      encode_ns_plain, encode_ns_derived    processor time of the stages per parameter, median
      encode_ns_spoiled                     the same where the stage is there and finds nothing
      encode_ns_spoiled_plain               and without the stage, of these weights
    gradient_bytes, gradient_half_bytes     of a pack of gradient capture, and of bfloat16 weights in it
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

import stepwell
from benchmarks.gpt import GPT
from benchmarks.report import arguments, machine, places, publish
from benchmarks.text import VOCABULARY, library_text
from stepwell.pipeline.base import Chunk, ChunkStage
from stepwell.pipeline.capture_stage import CaptureStage
from stepwell.pipeline.captured import CapturedSave, SaveKind, StateCopy
from stepwell.pipeline.casts import CAST_DTYPES
from stepwell.pipeline.delta import delta_stage
from stepwell.pipeline.derive import Derive
from stepwell.pipeline.keys import incarnation_name
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.offline_entry import Here
from stepwell.pipeline.pack import PackIdentity, PackKind, PackReader, pack_parts
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.slots import CopyPlan, LayoutMemory

CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 64, 256, 8, 4, 8
DELTAS = ("none", "ordered_delta", "predictive")
_IDENTITY = (PackKind.STATE, "0" * 32, incarnation_name(1, 1))


class Training:
    """A bfloat16 model, its masters, and what a save of both captures."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.text = library_text()
        self.model = GPT(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS).bfloat16()
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.live = LiveState(self.model, self.optimizer, {}, rng=False)
        self.params = sum(weight.numel() for weight in self.weights)
        self.steps = 0

    def step(self) -> None:
        """Train on one batch."""
        self.model.zero_grad()
        self.model(*self.text.batch(BATCH, CONTEXT, self.steps)).backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)
        self.steps += 1

    async def chunks(self, *, spoiled: bool) -> list[Chunk]:
        """Return the raw chunks of a save."""
        collected = self.live.collect()
        plan = CopyPlan(plan_layout(collected.specs))
        memory = LayoutMemory(torch.zeros(plan.layout.size_bytes, dtype=torch.uint8), plan)
        memory.copy_from(collected.tensors)
        for index, spec in enumerate(plan.layout.tensors):
            if spoiled and spec.dtype in CAST_DTYPES:
                start = plan.layout.tensor_offsets[index]
                memory.run[start : start + spec.size_bytes].view(np.uint16)[...] ^= 1
        state = StateCopy(memory, collected.tree)
        captured = CapturedSave(self.steps, SaveKind.STATE, None, (), None, state, None, 0)
        return [chunk async for chunk in CaptureStage().chunks(captured)]


class Line:
    """One pipeline: its stages, and what each save took."""

    def __init__(self, delta: str, *, derive: bool) -> None:
        self.stages: list[ChunkStage] = [*([Derive()] if derive else []), delta_stage(delta), Shard()]
        self.pack_bytes: list[int] = []
        self.half_bytes: list[int] = []
        self.encode_s: list[float] = []

    async def save(self, chunks: Sequence[Chunk]) -> None:
        """Encode a save."""
        sent: list[Chunk] = []
        begun = time.thread_time()
        for raw in chunks:
            chunk = raw
            for stage in self.stages:
                chunk = await stage.save(chunk, Here())
            sent.append(chunk)
        self.encode_s.append(time.thread_time() - begun)
        packed = pack_parts(PackIdentity(*_IDENTITY, chunks[0].step), {}, sent)
        self.pack_bytes.append(packed.size_bytes)
        self.half_bytes.append(sum(chunk.buffer.nbytes for chunk in sent if chunk.dtype in CAST_DTYPES))


async def state_capture(training: Training, saves: int) -> list[dict[str, object]]:
    """Save steps into all pipelines, and tell what each took."""
    lines = {
        (delta, derive, spoiled): Line(delta, derive=derive)
        for delta in DELTAS
        for derive in (False, True)
        for spoiled in (False, True)
    }
    for _ in range(saves + 1):
        training.step()
        for spoiled in (False, True):
            chunks = await training.chunks(spoiled=spoiled)
            for (_, _, wants), line in lines.items():
                if wants is spoiled:
                    await line.save(chunks)

    def median(values: Sequence[float]) -> float:
        # The first save has nothing to be told against.
        return statistics.median(values[1:]) / training.params

    rows: list[dict[str, object]] = []
    for delta in DELTAS:
        plain, derived = lines[delta, False, False], lines[delta, True, False]
        vain, vain_plain = lines[delta, True, True], lines[delta, False, True]
        rows.append(
            {
                "delta": delta,
                "bytes_plain": median(plain.pack_bytes),
                "bytes_derived": median(derived.pack_bytes),
                "halves_plain": median(plain.half_bytes),
                "halves_derived": median(derived.half_bytes),
                "encode_ns_plain": 1e9 * median(plain.encode_s),
                "encode_ns_derived": 1e9 * median(derived.encode_s),
                "encode_ns_spoiled": 1e9 * median(vain.encode_s),
                "encode_ns_spoiled_plain": 1e9 * median(vain_plain.encode_s),
            }
        )
    return rows


def gradient_capture(training: Training, saves: int) -> tuple[float, float]:
    """Save steps as gradients; return medians of bytes per parameter, all of a pack and bfloat16 weights."""
    sizes: list[int] = []
    halves: list[int] = []
    with places() as (disk, _):
        tier = {"kind": "directory", "path": str(disk / "run")}
        settings = {"tiers": [tier], "log_budget": 1000.0}
        with stepwell.open_sync(settings, model=training.model, optimizer=training.optimizer) as well:
            for step in range(saves + 1):
                training.step()
                well.save(step)
                well.wait_until_finished(120)
            if {record.kind for record in well.metrics().saves[1:]} != {"gradient"}:
                raise AssertionError("not every step was saved as gradients")
            for path in (disk / "run").glob("*/step/*/*.pack"):
                data = path.read_bytes()
                pack = asyncio.run(PackReader.over(data, path.name).open())
                sizes.append(len(data))
                halves.append(sum(row.size_bytes for row in pack.rows.values() if row.dtype in CAST_DTYPES))
    return statistics.median(sizes) / training.params, statistics.median(halves) / training.params


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training()
    for _ in range(options.warmup):
        training.step()
    rows = asyncio.run(state_capture(training, options.saves))
    gradient_bytes, half_bytes = gradient_capture(training, options.saves)
    result = {
        "params": training.params,
        "saves": options.saves,
        "machine": machine(),
        "rows": rows,
        "gradient_bytes": gradient_bytes,
        "gradient_half_bytes": half_bytes,
    }
    publish(result, as_json=options.json)


if __name__ == "__main__":
    main()
