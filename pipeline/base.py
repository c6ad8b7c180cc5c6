"""Contracts of the pipeline: what flows and what a stage is. No implementation here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from stepwell.pipeline.cast_pairs import CapturedRun
    from stepwell.pipeline.predictive import UpdateHint

__all__ = [
    "Bytes",
    "Chunk",
    "ChunkStage",
    "Encoding",
    "Kind",
    "PackData",
    "SourceStage",
    "StageContext",
    "StepStage",
]

Result = TypeVar("Result")
Bytes = npt.NDArray[np.uint8]
Encoding = Mapping[str, object]
"""JSON-able numcodecs configuration, ``{"id": "stepwell.byteplane", ...}``."""


class Kind(StrEnum):
    """What the elements of a chunk are."""

    GRADIENT = "gradient"
    WEIGHT = "weight"
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    AUX = "aux"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that flows: a run of bytes with its place in the state.

    Attributes
    ----------
    step : int
        Label of the save the chunk belongs to.
    key : str
        Unique within the step, e.g. ``"update/0/chunk/12"`` or ``"state/3"`` or ``"aux/0"``.
    kind : Kind
    update : int
        Index of the update within the step; -1 where it belongs to none.
    part : int
        Index of the chunk in its layout (``Layout.chunks``); says which tensors and ranges.
    layout : str
        Hash of that layout.
    dtype : str
        torch name without the prefix (``"float32"``) of the raw elements; all pieces share it.
    raw_bytes : int
        Length before any encoding.
    buffer : ndarray, (n,), uint8, C-contiguous
        The bytes as they are now, owned by who made the chunk until the stage returns; none writes into it.
    encodings : tuple of Encoding
        Innermost first. Saving pushes, recovering pops.
    hint : UpdateHint, optional
        What update led to it, for the stages of a save; never stored.
    state : CapturedRun, optional
        The state it was captured with, likewise, where it may be a cast of another chunk in it.
    """

    step: int
    key: str
    kind: Kind
    update: int
    part: int
    layout: str
    dtype: str
    raw_bytes: int
    buffer: Bytes = field(repr=False)
    encodings: tuple[Encoding, ...] = ()
    hint: UpdateHint | None = field(default=None, repr=False, compare=False)
    state: CapturedRun | None = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class PackData:
    """All chunks of one rank and one save on their way, with what is said about them.

    ``header`` is the JSON-able description that becomes the index of the pack (see
    ``stepwell.pipeline.pack``), except for the rows of the chunks.
    """

    step: int
    header: dict[str, object]
    chunks: list[Chunk]


class StageContext(Protocol):
    """What the runner gives a stage to work with."""

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run CPU or blocking work in the pipeline's own executor and wait for it."""
        ...


@runtime_checkable
class SourceStage(Protocol):
    """Yields the chunks of one captured save (capture)."""

    name: str

    def chunks(self, captured: object) -> AsyncIterator[Chunk]:
        """Yield raw chunks in layout order."""
        ...


@runtime_checkable
class ChunkStage(Protocol):
    """Transforms one chunk at a time (delta, quantize, sparsify)."""

    name: str

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Forward: push one encoding, or return the chunk unchanged."""
        ...

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Back: pop the encodings this stage pushed; a foreign top encoding is left alone."""
        ...


@runtime_checkable
class StepStage(Protocol):
    """Works on whole saves (shard, replicate, commit)."""

    name: str

    async def save(self, item: object, context: StageContext) -> object:
        """Forward."""
        ...

    async def recover(self, item: object, context: StageContext) -> object:
        """Back."""
        ...
