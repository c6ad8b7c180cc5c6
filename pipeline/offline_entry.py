"""The save an offline view begins from: a base, or states captured after one, read chunk by chunk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, Encoding
from stepwell.pipeline.casts import cast_sources
from stepwell.pipeline.chain import Chain
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import ITEM_BYTES, Layout
from stepwell.pipeline.pack import base_chunk_key
from stepwell.pipeline.plan import pieces_by_tensor
from stepwell.pipeline.predictive import PREDICTIVE
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.source import BaseSource, SaveSource, StepSource
from stepwell.pipeline.state_ranges import ranges_of, state_order
from stepwell.pipeline.tree import JsonValue

__all__ = ["Entry", "Here", "Recent", "Tally", "tree_of"]

Result = TypeVar("Result")
Value = TypeVar("Value")

RECENT_BYTES_MAX = 64 << 20


class Here:
    """A ``StageContext`` that works where it is awaited, for callers that are in a worker already."""

    async def run(self, function: Callable[[], Result]) -> Result:
        """Call `function`."""
        return function()


class Tally:
    """Counts the chunks that were fetched and decoded."""

    name = "tally"

    def __init__(self) -> None:
        self.chunks = 0

    async def save(self, chunk: Chunk, context: object) -> Chunk:
        """Return `chunk` as it is."""
        return chunk

    async def recover(self, chunk: Chunk, context: object) -> Chunk:
        """Count `chunk`."""
        self.chunks += 1
        return chunk


class Recent(OrderedDict[Hashable, tuple[Value, int]]):
    """The values used last, up to a number of bytes; the newest is always kept."""

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._bytes = 0

    def find(self, key: Hashable) -> Value | None:
        """Return a value that is still there."""
        found = self.get(key)
        if found is None:
            return None
        self.move_to_end(key)
        return found[0]

    def keep(self, key: Hashable, value: Value, size_bytes: int) -> Value:
        """Keep a value, and let the oldest go."""
        self[key] = (value, size_bytes)
        self._bytes += size_bytes
        while self._bytes > self._bytes_max and len(self) > 1:
            self._bytes -= self.popitem(last=False)[1][1]
        return value


class Entry:
    """A whole state, as a base has it or as the last of a row of captured states left it.

    Made by `open`.

    Attributes
    ----------
    layout : Layout
    tree : dict
        Of the whole state, at the entry.
    follow : tuple of StepSource
        Gradient differentials that lead from here to the target.
    """

    def __init__(self, source: SaveSource, tally: Tally) -> None:
        self._source = source
        self._tally = tally
        self._base: BaseSource | None = None
        self._states: Sequence[StepSource] = ()
        self._recent: Recent[Bytes] = Recent()
        self.layout: Layout
        self.tree: dict[str, JsonValue] = {}
        self.follow: tuple[StepSource, ...] = ()

    @classmethod
    async def open(cls, source: SaveSource, chain: Chain, tally: Tally) -> Entry:
        """Open every save of a chain, and read layout and tree of its entry.

        Raises
        ------
        IntegrityError
            A save on the way is whole in no tier, or captured states follow gradients.
        """
        entry = cls(source, tally)
        steps = [await source.step(link) for link in chain.steps]
        states = sum(step.manifest.kind == "state" for step in steps)
        if any(step.manifest.kind != "state" for step in steps[:states]):
            raise IntegrityError(f"step {chain.target.step}: captured states follow gradients without a base")
        entry._states, entry.follow = steps[:states], tuple(steps[states:])
        if chain.base is not None:
            entry._base = await source.base(chain.base)
        if states:
            last = steps[states - 1]
            entry.layout = await source.layout(str(last.header.get("layout")))
            entry.tree = tree_of(last.header, f"step {last.link.step}")
        elif entry._base is not None:
            entry.layout = entry._base.layout
            entry.tree = tree_of(entry._base.header, f"base {entry._base.link.step}")
        else:
            raise IntegrityError(f"step {chain.target.step}: its chain has no entry")
        return entry

    async def piece(self, tensor: int, start: int, stop: int) -> Bytes:
        """Return elements [start, stop) of one tensor as fresh bytes."""
        item_bytes = ITEM_BYTES[self.layout.tensors[tensor].dtype]
        out = np.empty((stop - start) * item_bytes, np.uint8)
        for place in pieces_by_tensor(self.layout)[tensor]:
            low, high = max(start, place.piece.start), min(stop, place.piece.stop)
            if low >= high:
                continue
            data = await self._chunk(place.part)
            first = place.piece.offset_bytes + (low - place.piece.start) * item_bytes
            out[(low - start) * item_bytes : (high - start) * item_bytes] = data[
                first : first + (high - low) * item_bytes
            ]
        return out

    async def _chunk(self, part: int) -> Bytes:
        found = self._recent.find(part)
        if found is None:
            found = await (self._state_chunk(part) if self._states else self._base_chunk(part))
            if found.nbytes != self.layout.chunks[part].size_bytes:
                raise IntegrityError(f"chunk {part} has {found.nbytes} bytes, its layout says otherwise")
            self._recent.keep(part, found, found.nbytes)
        return found

    async def _base_chunk(self, part: int) -> Bytes:
        assert self._base is not None
        self._tally.chunks += 1
        return await self._base.chunk(part)

    async def _state_chunk(self, part: int) -> Bytes:
        """Go back to the newest state whose chunk stands for itself, and undo the differences after it."""
        parts, first = self._told_with(part), len(self._states) - 1
        while first >= 0 and any(_is_difference(self._states[first], base_chunk_key(one)) for one in parts):
            first -= 1
        stages, context = reading_stages([self._tally]), Here()
        if first < 0:
            for one in parts:
                await recover_chunk(await self._reference(one), stages[1:], context)
        found: dict[int, Chunk] = {}
        for step in self._states[max(first, 0) :]:
            for one in parts:
                found[one] = await recover_chunk(await step.chunk(base_chunk_key(one)), stages, context)
        for one, chunk in found.items():
            if chunk.layout != self.layout.hash or chunk.part != one:
                raise IntegrityError(
                    f"step {chunk.step}: chunk {chunk.key} is of another layout than its step"
                )
            if one != part:
                # Who reads a weight often reads its momentum next.
                self._recent.keep(one, chunk.buffer, chunk.buffer.nbytes)
        return found[part].buffer

    def _told_with(self, part: int) -> tuple[int, ...]:
        """Return the parts that are needed to tell this one, in the order of reading; it is the last.

        A cast needs its sources, and they what they are predicted from; that is as far as it goes.
        """
        needed = {part}
        for encodings in self._encodings([part]):
            needed |= cast_sources(encodings)
        for one in (ranges_of(self.layout).get(each) for each in tuple(needed)):
            if one is not None and any(map(_is_predicted, self._encodings([*one.moments, one.part]))):
                needed |= {*one.moments}
        return tuple(each for each in state_order(self.layout) if each in needed)

    def _encodings(self, parts: Sequence[int]) -> Iterator[tuple[Encoding, ...]]:
        """Encodings of some parts in all states of the entry."""
        for step in self._states:
            for row in (step.rows.get(base_chunk_key(part)) for part in parts):
                if row is not None:
                    yield row.encodings

    async def _reference(self, part: int) -> Chunk:
        """Return the base's chunk that the first difference is told against."""
        if self._base is None or part >= len(self._base.layout.chunks):
            raise IntegrityError(f"chunk {part} is a difference, and what it is told against is not there")
        layout = self._base.layout
        place = layout.chunks[part]
        return Chunk(
            self._base.link.step,
            base_chunk_key(part),
            place.kind,
            -1,
            part,
            layout.hash,
            place.dtype,
            place.size_bytes,
            await self._base_chunk(part),
        )


def tree_of(header: Mapping[str, object], what: str) -> dict[str, JsonValue]:
    """Return the tree that a header carries."""
    tree = header.get("tree")
    if not isinstance(tree, dict):
        raise FormatError(f"{what}: its header has no tree")
    return cast("dict[str, JsonValue]", tree)


def _is_predicted(encodings: Sequence[Mapping[str, object]]) -> bool:
    return any(encoding.get("id") == PREDICTIVE for encoding in encodings)


def _is_difference(step: StepSource, key: str) -> bool:
    row = step.rows.get(key)
    if row is None:
        raise IntegrityError(f"step {step.link.step}: its pack has no chunk {key}")
    return any(encoding.get("reference") == "previous" for encoding in row.encodings)
