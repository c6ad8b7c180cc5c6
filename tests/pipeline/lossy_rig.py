"""A lossy pipeline without a runner: stages of one life, and a reader that has only what was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Kind
from stepwell.pipeline.choice import Choices, Policy
from stepwell.pipeline.delta import DifferenceStage
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.loop import Loop
from stepwell.pipeline.plan import gradient_layout, plan_layout
from stepwell.pipeline.quantize import Quantize
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.sparsify import Sparsify

Result = TypeVar("Result")
Floats = npt.NDArray[np.float32]

ALL = {
    Kind.GRADIENT: "int8",
    Kind.WEIGHT: "int8",
    Kind.MOMENT1: "int8",
    Kind.MOMENT2: "log_quant",
}


class Here:
    """A stage context that works where it is awaited."""

    async def run(self, function: Callable[[], Result]) -> Result:
        return function()


def policy(**changes: object) -> Policy:
    settings: dict[str, object] = {"treatments": ALL, "difference": True, **changes}
    return Policy(**settings)  # type: ignore[arg-type]


def spec(
    name: str, count: int, kind: Kind = Kind.WEIGHT, *, dtype: str = "float32", columns: int = 64
) -> TensorSpec:
    shape = (count // columns, columns) if columns else (count,)
    return TensorSpec(name, shape, dtype, kind, "" if kind is Kind.AUX else "optim:0")


@dataclass
class Writer:
    """The saving half of one life."""

    layout: Layout
    loop: Loop
    stages: list[ChunkStage]
    step: int = 0
    saved_bytes: int = 0
    header: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, how: Policy | None = None, **options: object) -> Writer:
        loop = Loop(Choices(how or policy()))
        eps = options.get("eps")
        rate = options.get("rate", 0.1)
        assert eps is None or isinstance(eps, float)
        assert isinstance(rate, float)
        stages: list[ChunkStage] = [
            DifferenceStage(loop),
            Quantize(loop, eps=eps),
            Sparsify(loop, rate=rate, eps=eps),
            Shard(),
        ]
        return cls(layout, loop, stages)

    async def save(
        self,
        values: Mapping[str, npt.NDArray[np.generic]],
        *,
        after_base: bool = False,
        with_base: bool = False,
    ) -> list[Chunk]:
        """Encode one save, as the runner does."""
        run = laid_out(self.layout, values)
        self.loop.begin([self.layout], after_base=after_base, with_base=with_base)
        sent = []
        for chunk in chunks_of(self.layout, run, self.step):
            before = chunk.buffer.copy()
            raw = chunk
            for stage in self.stages:
                chunk = await stage.save(chunk, Here())
            assert np.array_equal(raw.buffer, before), "a stage must not write into what it was given"
            sent.append(chunk)
        self.header = self.loop.header()
        self.saved_bytes = sum(chunk.buffer.nbytes for chunk in sent)
        self.step += 1
        return sent


class Reader:
    """What a recovery has of a run."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stages = reading_stages()

    async def base(self, values: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Begin with a base."""
        for chunk in chunks_of(self.layout, laid_out(self.layout, values), 0):
            await recover_chunk(chunk, self.stages, Here())

    async def read(self, chunks: list[Chunk]) -> dict[str, Bytes]:
        """Decode one save; tensors by name, as bytes."""
        run = np.zeros(self.layout.size_bytes, np.uint8)
        for chunk in chunks:
            raw = await recover_chunk(chunk, self.stages, Here())
            place = self.layout.chunks[chunk.part]
            run[place.offset_bytes : place.offset_bytes + place.size_bytes] = raw.buffer
        found = {}
        for one, offset in zip(self.layout.tensors, self.layout.tensor_offsets, strict=True):
            found[one.name] = run[offset : offset + one.size_bytes]
        return found


def laid_out(layout: Layout, values: Mapping[str, npt.NDArray[np.generic]]) -> Bytes:
    run = np.zeros(layout.size_bytes, np.uint8)
    for one, offset in zip(layout.tensors, layout.tensor_offsets, strict=True):
        data = np.ascontiguousarray(values[one.name]).reshape(-1).view(np.uint8)
        assert data.nbytes == one.size_bytes, one.name
        run[offset : offset + one.size_bytes] = data
    return run


def chunks_of(layout: Layout, run: Bytes, step: int) -> list[Chunk]:
    made = []
    for part, place in enumerate(layout.chunks):
        gradient = place.kind is Kind.GRADIENT
        key = f"update/0/{part}" if gradient else f"state/{part}"
        data = run[place.offset_bytes : place.offset_bytes + place.size_bytes]
        made.append(
            Chunk(
                step,
                key,
                place.kind,
                0 if gradient else -1,
                part,
                layout.hash,
                place.dtype,
                place.size_bytes,
                data,
            )
        )
    return made


def states(*specs: TensorSpec, how: Policy | None = None) -> Layout:
    return plan_layout(labelled(specs, how), chunk_bytes=1 << 16)


def gradients(*specs: TensorSpec, how: Policy | None = None) -> Layout:
    return gradient_layout(labelled(specs, how), chunk_bytes=1 << 16)


def labelled(specs: tuple[TensorSpec, ...], how: Policy | None) -> list[TensorSpec]:
    """Add what keeps classes apart in chunks, as the live state does."""
    choices = Choices(how or policy())
    return [replace(one, group=one.group + choices.label(one)) if one.group else one for one in specs]


def floats(seed: int, count: int, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(count) * scale).astype(np.float32)


def rms(values: npt.NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def encodings(chunks: list[Chunk]) -> list[list[str]]:
    """Ids of the encodings of each chunk."""
    return [[str(one["id"]).removeprefix("stepwell.") for one in chunk.encodings] for chunk in chunks]
