"""The ``delta`` stage: what a chunk is told against.

``none`` passes chunks on. ``ordered_delta`` tells a chunk of a captured state against the same
chunk of the previous save, as differences of ordered integers (exact for every bit pattern).
``difference`` tells it against what the reader has, as differences of numbers that the lossy stages
after it take on (``stepwell.pipeline.loop``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xxhash

from stepwell.codecs.ordered_delta import decode_difference, encode_difference
from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Encoding, Kind, StageContext
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.pipeline.loop import Loop
from stepwell.pipeline.values import DIFFERENCE, add_difference

__all__ = ["DifferenceStage", "NoDelta", "OrderedDeltaStage", "delta_stage"]

CODEC = "stepwell.ordered_delta"


class NoDelta:
    """Every chunk stands for itself."""

    name = "delta: none"

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Return `chunk` as it is."""
        return chunk

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Return `chunk` as it is."""
        return chunk


class OrderedDeltaStage:
    """Difference against the same chunk of the previous save.

    The stage keeps one copy of each chunk it saw last, in memory of its own: one state's bytes.
    A chunk without a predecessor, or with one of another layout, passes unchanged and becomes
    the reference of the next one.
    """

    name = "delta: ordered_delta"

    def __init__(self) -> None:
        self._reference: dict[str, tuple[str, int, Bytes]] = {}

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push the difference; remember the chunk as the next reference."""
        reference = self._reference.get(chunk.key)

        def encode() -> Bytes | None:
            difference = None
            if reference is not None and reference[:2] == (chunk.layout, chunk.raw_bytes):
                difference = np.frombuffer(
                    encode_difference(chunk.buffer, reference[2], chunk.dtype), dtype=np.uint8
                )
            self._remember(chunk)
            return difference

        difference = await context.run(encode)
        if difference is None:
            return chunk
        encoding: Encoding = {"id": CODEC, "dtype": chunk.dtype, "reference": "previous"}
        return replace(chunk, buffer=difference, encodings=(*chunk.encodings, encoding))

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop the difference, if one is there; remember the result as the next reference.

        Raises
        ------
        IntegrityError
            A difference whose reference is not there or is of another length.
        """
        if chunk.encodings and chunk.encodings[-1].get("reference") == "previous":
            reference = self._reference.get(chunk.key)
            if reference is None or reference[1] != chunk.raw_bytes:
                raise IntegrityError(
                    f"step {chunk.step}, chunk {chunk.key}: the save it is told against was not read"
                )
            buffer = await context.run(
                lambda: decode_difference(chunk.buffer, reference[2], chunk.dtype, max_bytes=chunk.raw_bytes)
            )
            if buffer.nbytes != chunk.raw_bytes:
                raise IntegrityError(
                    f"step {chunk.step}, chunk {chunk.key}: {buffer.nbytes} bytes, expected {chunk.raw_bytes}"
                )
            chunk = replace(chunk, buffer=buffer, encodings=chunk.encodings[:-1])
        if chunk.kind is not Kind.GRADIENT:
            # Gradients have no predecessor; remembering them would only cost.
            await context.run(lambda: self._remember(chunk))
        return chunk

    def _remember(self, chunk: Chunk) -> None:
        kept = self._reference.get(chunk.key)
        if kept is not None and kept[2].nbytes == chunk.buffer.nbytes:
            np.copyto(kept[2], chunk.buffer)
            self._reference[chunk.key] = (chunk.layout, chunk.raw_bytes, kept[2])
        else:
            self._reference[chunk.key] = (chunk.layout, chunk.raw_bytes, chunk.buffer.copy())


class DifferenceStage(OrderedDeltaStage):
    """Difference against what the reader of the save will have.

    Forward, a chunk that a lossy stage is to take on becomes x - x^ in float32; all others, and all of a
    save that a base goes along with, become exact differences of ordered integers. Back, it undoes both.

    Parameters
    ----------
    loop : Loop or None
        None: for reading only.
    """

    name = "delta: difference"

    def __init__(self, loop: Loop | None = None) -> None:
        super().__init__()
        self.loop = loop

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push a difference where there is something to tell it against."""
        loop = self.loop
        if loop is None or not chunk.key.startswith("state/"):
            return chunk
        return await context.run(lambda: loop.difference(chunk) if loop.told(chunk) else chunk)

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop the difference, if one is there; remember the result as the next reference.

        Raises
        ------
        IntegrityError
            A difference whose reference is not there, or is not the one it was taken from.
        """
        if not chunk.encodings or chunk.encodings[-1].get("id") != DIFFERENCE:
            return await super().recover(chunk, context)
        about = f"step {chunk.step}, chunk {chunk.key}"
        kept = self._reference.get(chunk.key)
        if kept is None or kept[1] != chunk.raw_bytes or chunk.dtype not in ("float32", "bfloat16"):
            raise IntegrityError(f"{about}: the save it is told against was not read")
        if chunk.buffer.nbytes != 4 * (chunk.raw_bytes // ITEM_BYTES[chunk.dtype]):
            raise IntegrityError(f"{about}: a difference of {chunk.buffer.nbytes} bytes does not fit")

        def add() -> Bytes:
            if xxhash.xxh3_64_hexdigest(kept[2].data) != chunk.encodings[-1].get("of"):
                raise IntegrityError(f"{about}: what was read before is not what it is told against")
            return add_difference(kept[2], chunk.buffer, chunk.dtype)

        buffer = await context.run(add)
        chunk = replace(chunk, buffer=buffer, encodings=chunk.encodings[:-1])
        await context.run(lambda: self._remember(chunk))
        return chunk


def delta_stage(kind: str) -> ChunkStage:
    """Return the stage called `kind` in a configuration (``none`` or ``ordered_delta``)."""
    stages: dict[str, type[NoDelta] | type[OrderedDeltaStage]] = {
        "none": NoDelta,
        "ordered_delta": OrderedDeltaStage,
    }
    return stages[kind]()
