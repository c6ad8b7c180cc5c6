"""Replaying a row of gradient differentials: fetch and decode ahead while earlier chunks are applied.

Used by recovery on the live tensors and by offline views on loaded ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import Optimizer

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Bytes, ChunkStage, StageContext
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.private import optimizer_class
from stepwell.pipeline.replay import BlockedReplay, State, StepwiseReplay, blocks_exactly
from stepwell.pipeline.source import SaveSource, StepSource
from stepwell.pipeline.update import UpdateRecord

__all__ = ["RecordedUpdate", "Replayed", "decoded_gradient", "replay_updates", "updates_of"]

PARTS_AHEAD = 1  # chunks decoded while one is replayed; each holds the gradients of all its updates


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One update within a save."""

    step: StepSource
    index: int
    record: UpdateRecord
    layout: str

    def key(self, part: int) -> str:
        """Key of the gradient chunk of one layout part."""
        return f"update/{self.index}/{part}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did.

    Attributes
    ----------
    updates : int
    environments_differ : bool
        At least one update was made in another environment (torch, device, instruction set), so
        its rounding may differ here.
    """

    updates: int
    environments_differ: bool


def updates_of(step: StepSource) -> list[RecordedUpdate]:
    """Return the updates of one gradient differential, in order.

    Raises
    ------
    FormatError
        The header does not list them as it should.
    """
    rows = step.header.get("updates")
    if not isinstance(rows, list):
        raise FormatError(f"step {step.link.step}: the header of its pack lists no updates")
    found = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("layout"), str):
            raise FormatError(f"step {step.link.step}: update {index} names no layout")
        found.append(RecordedUpdate(step, index, UpdateRecord.from_json(row.get("record")), row["layout"]))
    return found


async def replay_updates(
    source: SaveSource,
    steps: Sequence[StepSource],
    *,
    optimizers: Sequence[tuple[str, Optimizer | None]],
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, State],
    stages: Sequence[ChunkStage],
    context: StageContext,
    environment: Callable[[str], Mapping[str, object]],
    wanted: Callable[[Layout, int], bool] | None = None,
) -> Replayed:
    """Apply the updates of `steps`, in order, to `weights` and `states`, in place.

    Parameters
    ----------
    source : SaveSource
    steps : sequence of StepSource
        Gradient differentials, oldest first.
    optimizers : sequence of (name, Optimizer or None)
        In the order records count them; the live object where there is one (needed for classes
        that are not torch's).
    weights : mapping of parameter name to Tensor
    states : mapping of optimizer name to its state by parameter name
    stages : sequence of ChunkStage
        In saving order; the encodings in the index drive them, not today's configuration.
    context : StageContext
    environment : callable
        ``device type -> environment`` of this process, to compare records with.
    wanted : callable, optional
        ``(layout, part) -> bool``: replay these chunks only (elementwise optimizers).

    Raises
    ------
    IntegrityError
        A chunk can be read whole from no tier, or records do not fit.
    StateMismatchError
        The recorded optimizer is of another class than the live one.
    """
    by_optimizer: dict[int, list[RecordedUpdate]] = {}
    for step in steps:
        for update in updates_of(step):
            by_optimizer.setdefault(update.record.optimizer, []).append(update)
    differ, count = False, 0
    for which, updates in sorted(by_optimizer.items()):
        if which >= len(optimizers):
            raise IntegrityError(
                f"updates of optimizer {which} are recorded, but there are {len(optimizers)}"
            )
        name, live = optimizers[which]
        state = states[name]
        for group in _rows_of_one_layout(updates):
            layout = await source.layout(group[0].layout)
            await _replay_row(group, layout, live, weights, state, stages, context, wanted)
        for update in updates:
            device = str(update.record.environment.get("device", "cpu"))
            differ = differ or dict(update.record.environment) != dict(environment(device))
        count += len(updates)
    return Replayed(count, differ)


def _rows_of_one_layout(updates: Sequence[RecordedUpdate]) -> list[list[RecordedUpdate]]:
    rows: list[list[RecordedUpdate]] = []
    for update in updates:
        if rows and rows[-1][0].layout == update.layout:
            rows[-1].append(update)
        else:
            rows.append([update])
    return rows


async def _replay_row(
    updates: Sequence[RecordedUpdate],
    layout: Layout,
    live: Optimizer | None,
    weights: Mapping[str, torch.Tensor],
    state: State,
    stages: Sequence[ChunkStage],
    context: StageContext,
    wanted: Callable[[Layout, int], bool] | None,
) -> None:
    records = [update.record for update in updates]
    cls = optimizer_class(records[0].class_name, live)
    own = {spec.name: weights[spec.name] for spec in layout.tensors if spec.name in weights}
    if blocks_exactly(cls, records, own):
        blocked = BlockedReplay(cls, own, state, layout, records)
        parts = [
            part
            for part, chunk in enumerate(layout.chunks)
            if (wanted is None or wanted(layout, part))
            and any(layout.tensors[piece.tensor].name in own for piece in chunk.pieces)
        ]
        try:
            await _run_ahead(updates, parts, stages, context, blocked.run_chunk)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await context.run(partial(blocked.finish, partial=wanted is not None))
        return
    stepwise = StepwiseReplay(cls, own, state, layout, records, like=live)
    for k, update in enumerate(updates):
        gradients = {}
        for part in range(len(layout.chunks)):
            buffer = await decoded_gradient(update, part, stages, context)
            if buffer is not None:
                gradients[part] = buffer
        await context.run(partial(stepwise.run_update, k, gradients))
    await context.run(stepwise.finish)


async def _run_ahead(
    updates: Sequence[RecordedUpdate],
    parts: Sequence[int],
    stages: Sequence[ChunkStage],
    context: StageContext,
    apply: Callable[[int, list[Bytes | None]], None],
) -> None:
    """Call ``apply(part, its gradient in every update)`` for each part while the next ones are decoded."""

    async def decode(part: int) -> list[Bytes | None]:
        return [await decoded_gradient(update, part, stages, context) for update in updates]

    async with asyncio.TaskGroup() as group:
        ahead: deque[asyncio.Task[list[Bytes | None]]] = deque()
        started = iter(parts)
        for part in parts:
            while len(ahead) <= PARTS_AHEAD and (following := next(started, None)) is not None:
                ahead.append(group.create_task(decode(following)))
            gradients = await ahead.popleft()
            await context.run(partial(apply, part, gradients))


async def decoded_gradient(
    update: RecordedUpdate, part: int, stages: Sequence[ChunkStage], context: StageContext
) -> Bytes | None:
    """Fetch one gradient chunk and undo its encodings; None where no tensor in it had a gradient."""
    key = update.key(part)
    if key not in update.step.rows:
        return None
    chunk = await update.step.chunk(key)
    if chunk.layout != update.layout or chunk.part != part:
        raise IntegrityError(
            f"step {update.step.link.step}: chunk {key} is of another layout than its update"
        )
    return (await recover_chunk(chunk, stages, context)).buffer
