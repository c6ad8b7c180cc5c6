"""The capture stage: reads the raw chunks of a captured save out of slot memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace

from stepwell.errors import DeadlineError, IntegrityError, UsageError
from stepwell.pipeline.base import Chunk
from stepwell.pipeline.captured import CapturedSave
from stepwell.pipeline.cast_pairs import CapturedRun
from stepwell.pipeline.casts import CAST_DTYPES
from stepwell.pipeline.predictive import UpdateHint
from stepwell.pipeline.slots import LayoutMemory
from stepwell.pipeline.state_ranges import hints_of, state_order

__all__ = ["CaptureStage"]


class CaptureStage:
    """The source stage: raw chunks of a captured save.

    Parameters
    ----------
    ready_timeout_s : float
        How long one background copy may take.
    """

    name = "capture"

    def __init__(self, ready_timeout_s: float = 60.0) -> None:
        self._ready_timeout_s = ready_timeout_s

    async def chunks(self, captured: object) -> AsyncIterator[Chunk]:
        """Yield raw chunks over slot memory: ``update/<u>/<part>``, then ``aux/<part>``; or ``state/<part>``.

        Chunks all of whose gradients are None are left out; the record of the update says so. Those of a
        state come range by range (``state_ranges.state_order``), with a hint where an update is known and
        with the state itself where they may be casts of other chunks of it.

        Raises
        ------
        IntegrityError
            A gradient is torn: the save must not be committed.
        DeadlineError
            A background copy did not end in time.
        """
        if not isinstance(captured, CapturedSave):
            raise UsageError(f"capture reads a CapturedSave, not a {type(captured).__name__}")
        for number, update in enumerate(captured.updates):
            await self._ready(update.ready, captured.step)
            if update.torn is not None:
                raise IntegrityError(f"step {captured.step}, update {number}: {update.torn}; it is not saved")
            for part in update.parts:
                yield _chunk(captured.step, f"update/{number}/{part}", update.memory, part, number)
        if captured.aux is not None:
            for part in range(len(captured.aux.layout.chunks)):
                yield _chunk(captured.step, f"aux/{part}", captured.aux.memory, part, -1)
        if captured.state is not None:
            layout, memory = captured.state.layout, captured.state.memory
            hints = hints_of(layout, memory.run, captured.state.tree)
            whole = CapturedRun(layout, memory.run)
            for part in state_order(layout):
                chunk = _chunk(captured.step, f"state/{part}", memory, part, -1, hints.get(part))
                yield replace(chunk, state=whole) if chunk.dtype in CAST_DTYPES else chunk

    async def _ready(self, ready: Future[None], step: int) -> None:
        if ready.done():
            return
        # Waited for, not awaited: what the copy raised is told by ``torn``.
        _, waiting = await asyncio.wait([asyncio.wrap_future(ready)], timeout=self._ready_timeout_s)
        if waiting:
            raise DeadlineError(
                f"step {step}: a background copy did not end within {self._ready_timeout_s} s"
            )


def _chunk(
    step: int, key: str, memory: LayoutMemory, part: int, update: int, hint: UpdateHint | None = None
) -> Chunk:
    planned = memory.layout.chunks[part]
    return Chunk(
        step=step,
        key=key,
        kind=planned.kind,
        update=update,
        part=part,
        layout=memory.layout.hash,
        dtype=planned.dtype,
        raw_bytes=planned.size_bytes,
        buffer=memory.chunk(part),
        hint=hint,
    )
