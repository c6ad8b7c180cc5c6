"""Chunks through the stages: order, the budget's bound, and the first error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from stepwell.errors import IntegrityError, StoreError, UnsupportedValueError
from stepwell.pipeline.base import Chunk, ChunkStage, Kind, StageContext
from stepwell.pipeline.budget import ByteBudget
from stepwell.pipeline.flow import flow, recover_chunk

Result = TypeVar("Result")


class Inline:
    """Runs work where it is."""

    async def run(self, function: Callable[[], Result]) -> Result:
        await asyncio.sleep(0)
        return function()


def chunk(part: int, size_bytes: int = 4) -> Chunk:
    data = np.full(size_bytes, part % 256, np.uint8)
    return Chunk(1, f"state/{part}", Kind.WEIGHT, -1, part, "layout", "uint8", size_bytes, data)


async def source(count: int, size_bytes: int = 4) -> AsyncIterator[Chunk]:
    for part in range(count):
        yield chunk(part, size_bytes)


class Adding:
    """Adds a number to every byte; tells itself by it."""

    def __init__(self, number: int, error_at: int = -1) -> None:
        self.name = f"adding {number}"
        self.number = number
        self.error_at = error_at

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        if chunk.part == self.error_at:
            raise UnsupportedValueError(f"stage {self.number} refuses part {chunk.part}")
        added = await context.run(lambda: chunk.buffer + np.uint8(self.number))
        own = {"id": "add", "number": self.number}
        return replace(chunk, buffer=added, encodings=(*chunk.encodings, own))

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        if not chunk.encodings or chunk.encodings[-1].get("number") != self.number:
            return chunk
        taken = await context.run(lambda: chunk.buffer - np.uint8(self.number))
        return replace(chunk, buffer=taken, encodings=chunk.encodings[:-1])


STAGES: list[ChunkStage] = [Adding(1), Adding(10), Adding(100)]


@pytest.mark.parametrize("stages", [[], STAGES[:1], STAGES], ids=["none", "one", "three"])
async def test_every_chunk_goes_through_every_stage_in_order_and_back(stages: list[ChunkStage]) -> None:
    seen: list[Chunk] = []

    async def sink(one: Chunk) -> None:
        seen.append(one)

    budget = ByteBudget(1 << 20)
    await flow(source(20), stages, sink, Inline(), budget)
    assert [one.part for one in seen] == list(range(20))
    assert budget.used_bytes == 0
    for one in seen:
        assert [encoding["number"] for encoding in one.encodings] == [1, 10, 100][: len(stages)]
        back = await recover_chunk(one, stages, Inline())
        assert back.buffer.tobytes() == chunk(one.part).buffer.tobytes()


async def test_whole_shard_was_staged_at_once() -> None:
    """Megatron 61: a budget of 64 bytes, a state of 4,000: the peak is the budget, never the state."""
    budget = ByteBudget(64)
    count = 0

    async def sink(one: Chunk) -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(0)

    await flow(source(1000), STAGES, sink, Inline(), budget)
    assert count == 1000
    assert budget.peak_bytes <= 64


async def test_chunks_larger_than_the_budget_pass_one_by_one() -> None:
    budget = ByteBudget(3)
    seen: list[int] = []

    async def sink(one: Chunk) -> None:
        seen.append(one.part)
        assert budget.used_bytes == 40

    await asyncio.wait_for(flow(source(7, 40), STAGES, sink, Inline(), budget), 30)
    assert seen == list(range(7))


@pytest.mark.parametrize("where", range(3))
async def test_error_of_a_stage_ends_the_flow_as_it_is_and_frees_the_budget(where: int) -> None:
    stages: list[ChunkStage] = [Adding(number, 5 if number == where else -1) for number in range(3)]
    budget = ByteBudget(16)

    async def sink(one: Chunk) -> None:
        await asyncio.sleep(0)

    with pytest.raises(UnsupportedValueError, match=f"stage {where} refuses part 5"):
        await asyncio.wait_for(flow(source(1000), stages, sink, Inline(), budget), 30)
    assert budget.used_bytes == 0


async def test_error_of_the_sink() -> None:
    budget = ByteBudget(16)

    async def sink(one: Chunk) -> None:
        if one.part == 2:
            raise StoreError("no room")

    with pytest.raises(StoreError, match="no room"):
        await asyncio.wait_for(flow(source(1000), STAGES, sink, Inline(), budget), 30)
    assert budget.used_bytes == 0


async def test_error_of_the_source() -> None:
    async def torn() -> AsyncIterator[Chunk]:
        yield chunk(0)
        raise IntegrityError("a gradient is torn")

    async def sink(one: Chunk) -> None:
        return None

    budget = ByteBudget(16)
    with pytest.raises(IntegrityError, match="torn"):
        await asyncio.wait_for(flow(torn(), STAGES, sink, Inline(), budget), 30)
    assert budget.used_bytes == 0


async def test_cancelled_from_outside_frees_the_budget() -> None:
    budget = ByteBudget(16)
    full = asyncio.Event()

    async def sink(one: Chunk) -> None:
        full.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(flow(source(1000), STAGES, sink, Inline(), budget))
    await full.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert budget.used_bytes == 0


async def test_encoding_that_no_stage_made_is_an_error_not_zeros() -> None:
    foreign = replace(chunk(3), encodings=({"id": "unknown"},))
    with pytest.raises(IntegrityError, match=r"4 of 4 bytes and the encodings \['unknown'\]"):
        await recover_chunk(foreign, STAGES, Inline())


async def test_chunk_of_another_length_than_it_had() -> None:
    with pytest.raises(IntegrityError, match="4 of 8 bytes"):
        await recover_chunk(replace(chunk(3), raw_bytes=8), STAGES, Inline())
