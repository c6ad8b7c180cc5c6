"""The ``derive`` stage: what is a cast of other chunks of the same save is not stored again.

The weights of a model in bfloat16 whose optimizer steps float32 masters are those masters, rounded. Forward,
a chunk of a captured state for which that holds bit for bit, now, in this save, becomes a note of where its
source lies; whatever is not exactly that goes the usual way. Back, the source is cast again.

It is there by itself where everything after it is exact: what a reader has of a source that was stored with
a loss is not what the copy was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import xxhash

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Encoding, StageContext
from stepwell.pipeline.cast_pairs import CapturedRun, CastPairs, joined
from stepwell.pipeline.casts import DERIVED, CastRun, cast_into, cast_runs, rest_of
from stepwell.pipeline.delta import NoDelta, OrderedDeltaStage, PredictiveStage

__all__ = ["Derive", "may_derive"]

Fresh = Callable[[Chunk, int], Bytes | None]
"""``fresh(chunk, part)``: another chunk of the same save, raw, None if it was not read yet."""


class Derive:
    """Store casts of other chunks by reference.

    Parameters
    ----------
    fresh : callable, optional
        Where a reader finds the chunks that were read before; None: for saving only.
    """

    name = "derive"

    def __init__(self, fresh: Fresh | None = None) -> None:
        self._fresh = fresh
        self._pairs: tuple[str, CastPairs] | None = None

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push where the chunk's source lies, if it has one; else return it unchanged."""
        state = chunk.state
        if state is None or chunk.encodings or not chunk.raw_bytes:
            return chunk
        return await context.run(lambda: self._derived(chunk, state))

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Cast the source again, if the chunk is a cast.

        Raises
        ------
        IntegrityError
            The source was not read, or its cast is not what was saved.
        """
        if not chunk.encodings or chunk.encodings[-1].get("id") != DERIVED:
            return chunk
        return await context.run(lambda: self._restored(chunk))

    def _derived(self, chunk: Chunk, state: CapturedRun) -> Chunk:
        if self._pairs is None or self._pairs[0] != chunk.layout:
            self._pairs = chunk.layout, CastPairs(state.layout)
        pairs = self._pairs[1]
        pairs.begin(chunk.step)
        pieces = state.layout.chunks[chunk.part].pieces
        runs = joined([run for piece in pieces for run in pairs.runs_of(state.run, piece)])
        if 4 * sum(run.count for run in runs) < chunk.raw_bytes:
            # The rest, by itself, could cost more than the whole chunk told against the save before.
            return chunk
        rest = _join([chunk.buffer[place] for place in rest_of(runs, chunk.raw_bytes)])
        encoding: Encoding = {
            "id": DERIVED,
            "dtype": chunk.dtype,
            "casts": [run.numbers for run in runs],
            "xxh3": xxhash.xxh3_64_hexdigest(chunk.buffer.data),
        }
        return replace(chunk, buffer=rest if rest.any() else rest[:0], encodings=(encoding,))

    def _restored(self, chunk: Chunk) -> Chunk:
        about, encoding = f"step {chunk.step}, chunk {chunk.key}", chunk.encodings[-1]
        runs = cast_runs(encoding)
        if runs is None or runs[-1].stop > chunk.raw_bytes or len(chunk.encodings) > 1:
            raise IntegrityError(f"{about}: an encoding that cannot be read: {dict(encoding)!r:.200}")
        places = rest_of(runs, chunk.raw_bytes)
        rest_bytes = sum(place.stop - place.start for place in places)
        if chunk.buffer.nbytes not in (0, rest_bytes) or 2 * rest_bytes > chunk.raw_bytes:
            raise IntegrityError(f"{about}: {chunk.buffer.nbytes} bytes are not what its casts leave over")
        sources = [(run, self._source(chunk, run, about)) for run in runs]
        buffer = np.zeros(chunk.raw_bytes, np.uint8)
        start = 0
        for place in places if chunk.buffer.nbytes else ():
            stop = start + place.stop - place.start
            buffer[place] = chunk.buffer[start:stop]
            start = stop
        for run, source in sources:
            cast_into(source, buffer[run.here : run.stop], chunk.dtype)
        if xxhash.xxh3_64_hexdigest(buffer.data) != encoding.get("xxh3"):
            raise IntegrityError(f"{about}: what it is a cast of is not what was saved")
        return replace(chunk, buffer=buffer, encodings=())

    def _source(self, chunk: Chunk, run: CastRun, about: str) -> Bytes:
        source = None if self._fresh is None else self._fresh(chunk, run.part)
        end = run.there + 4 * run.count
        if source is None or source.nbytes < end:
            raise IntegrityError(f"{about}: the chunk state/{run.part} that it is a cast of was not read")
        return source[run.there : end]


def may_derive(stages: Iterable[ChunkStage]) -> bool:
    """Say whether nothing that comes after can change what a reader has of a chunk: all is ours and exact."""
    return all(type(stage) in (NoDelta, OrderedDeltaStage, PredictiveStage) for stage in stages)


def _join(parts: list[Bytes]) -> Bytes:
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
