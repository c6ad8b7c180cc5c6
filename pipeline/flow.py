"""Drive chunks through the chunk stages: one task a stage, bounded queues between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Chunk, ChunkStage, StageContext
from stepwell.pipeline.budget import ByteBudget

__all__ = ["flow", "recover_chunk"]

QUEUE_CHUNKS = 2  # enough to keep each stage busy; bytes are bounded by the budget, not by this


async def flow(
    source: AsyncIterator[Chunk],
    stages: Sequence[ChunkStage],
    sink: Callable[[Chunk], Awaitable[None]],
    context: StageContext,
    budget: ByteBudget,
) -> None:
    """Send every chunk of `source` through the stages, in order, into `sink`.

    The raw bytes of a chunk are admitted by `budget` when it leaves the source and given back
    once `sink` has it. The first error ends the whole flow and is raised as it is.

    Parameters
    ----------
    source : async iterator of Chunk
    stages : sequence of ChunkStage
        Applied first to last, each in its own task.
    sink : callable
        Awaited with every chunk, in the order of the source.
    context : StageContext
    budget : ByteBudget
    """
    queues: list[asyncio.Queue[Chunk | None]] = [
        asyncio.Queue(maxsize=QUEUE_CHUNKS) for _ in range(len(stages) + 1)
    ]
    held = 0

    async def read() -> None:
        nonlocal held
        async for chunk in source:
            await budget.acquire(chunk.raw_bytes)
            held += chunk.raw_bytes
            await queues[0].put(chunk)
        await queues[0].put(None)

    async def work(
        stage: ChunkStage, inbox: asyncio.Queue[Chunk | None], outbox: asyncio.Queue[Chunk | None]
    ) -> None:
        while (chunk := await inbox.get()) is not None:
            await outbox.put(await stage.save(chunk, context))
        await outbox.put(None)

    async def drain() -> None:
        nonlocal held
        while (chunk := await queues[-1].get()) is not None:
            await sink(chunk)
            budget.release(chunk.raw_bytes)
            held -= chunk.raw_bytes

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            for stage, inbox, outbox in zip(stages, queues, queues[1:], strict=False):
                group.create_task(work(stage, inbox, outbox))
            group.create_task(drain())
    except ExceptionGroup as errors:
        # The group cancelled the others; the first error is the cause.
        raise errors.exceptions[0] from None
    finally:
        if held:
            budget.release(held)


async def recover_chunk(chunk: Chunk, stages: Sequence[ChunkStage], context: StageContext) -> Chunk:
    """Send one chunk back through the stages, last to first, until it is raw again.

    Raises
    ------
    IntegrityError
        It does not decode, or has an encoding that none of the stages made.
    """
    for stage in reversed(stages):
        chunk = await stage.recover(chunk, context)
    if chunk.encodings or chunk.buffer.nbytes != chunk.raw_bytes:
        raise IntegrityError(
            f"step {chunk.step}, chunk {chunk.key}: {chunk.buffer.nbytes} of {chunk.raw_bytes} bytes "
            f"and the encodings {[encoding.get('id') for encoding in chunk.encodings]}"
        )
    return chunk
