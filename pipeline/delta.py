"""The ``delta`` stage: what a chunk is told against.

``none`` passes chunks on. ``ordered_delta`` tells a chunk of a captured state against the same
chunk of the previous save, as differences of ordered integers (exact for every bit pattern).
``difference`` tells it against what the reader has, as differences of numbers that the lossy stages
after it take on (``stepwell.pipeline.loop``). ``predictive`` is ``ordered_delta`` for everything but what
an update of Adam made of momentum: of that only the residual against a prediction goes out
(``stepwell.pipeline.predictive``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from stepwell.codecs.ordered_delta import decode_difference, encode_difference
from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, Encoding, Kind, StageContext
from stepwell.pipeline.casts import is_derived
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.pipeline.loop import Loop
from stepwell.pipeline.pack import base_chunk_key
from stepwell.pipeline.predictive import (
    PREDICTIVE,
    AdamUpdate,
    MomentRun,
    Rule,
    VarianceRule,
    WeightRule,
    candidates,
    cheapest,
    rule_from,
    rules_of,
    runs_from,
)
from stepwell.pipeline.values import DIFFERENCE, add_difference

__all__ = ["DifferenceStage", "NoDelta", "OrderedDeltaStage", "PredictiveStage", "delta_stage"]

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
        if is_derived(chunk.encodings):
            return self._passed_by(chunk)
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
        if is_derived(chunk.encodings):
            return self._passed_by(chunk)
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

    def _passed_by(self, chunk: Chunk) -> Chunk:
        """Let a cast of other chunks pass: nothing is told against it, so it need not be kept."""
        self._reference.pop(chunk.key, None)
        return chunk

    def _remember(self, chunk: Chunk) -> None:
        kept = self._reference.get(chunk.key)
        if kept is not None and kept[2].nbytes == chunk.buffer.nbytes:
            np.copyto(kept[2], chunk.buffer)
            self._reference[chunk.key] = (chunk.layout, chunk.raw_bytes, kept[2])
        else:
            self._reference[chunk.key] = (chunk.layout, chunk.raw_bytes, chunk.buffer.copy())


@dataclass(frozen=True, slots=True)
class _Held:
    """A momentum before it was moved on: its variance is still to come."""

    key: str
    step: int
    layout: str
    buffer: Bytes


class PredictiveStage(OrderedDeltaStage):
    """Difference against what the newest update of Adam makes of the chunk of the previous save.

    A chunk of variances passes right after its momentum, one of weights after both
    (``stepwell.pipeline.state_ranges``). Momentum is told as by ``ordered_delta``; so is everything that has
    no hint, was updated more or less than once since the previous save, or comes out smaller that way.
    Beside the copy of a state that ``ordered_delta`` keeps, one chunk of momentum is held.
    """

    name = "delta: predictive"

    def __init__(self) -> None:
        super().__init__()
        self._held: _Held | None = None
        self._steps: dict[str, int] = {}
        self._updates: dict[str, AdamUpdate] = {}

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push the residual against a prediction or the difference; remember the chunk."""
        predicted = await context.run(lambda: self._against_prediction(chunk))
        if predicted is None:
            saved = await super().save(chunk, context)
        else:
            await context.run(lambda: self._remember(chunk))
            saved = predicted
        if chunk.hint is None:
            self._updates.pop(chunk.key, None)
        else:
            self._updates[chunk.key] = chunk.hint.update
        return saved

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop what ``save`` pushed, if it is there; remember the result as the next reference.

        Raises
        ------
        IntegrityError
            What a residual or a difference is told against is not there or is of another length, or
            the result is not what was saved.
        """
        if not chunk.encodings or chunk.encodings[-1].get("id") != PREDICTIVE:
            return await super().recover(chunk, context)

        def decode() -> Chunk:
            raw = self._from_prediction(chunk)
            self._remember(raw)
            return raw

        return await context.run(decode)

    def _against_prediction(self, chunk: Chunk) -> Chunk | None:
        hint, before = chunk.hint, self._reference.get(chunk.key)
        kind = {Kind.MOMENT2: VarianceRule, Kind.WEIGHT: WeightRule}.get(chunk.kind)
        if hint is None or kind is None or before is None or chunk.encodings:
            return None
        rules = rules_of(kind, candidates(hint.update, self._updates.get(chunk.key)))
        inputs = self._inputs(chunk, kind, hint.runs)
        if not rules or inputs is None or before[:2] != (chunk.layout, chunk.raw_bytes):
            return None
        rule = cheapest(chunk.buffer, before[2], *inputs, rules)
        if rule is None:
            return None
        residual = encode_difference(chunk.buffer, rule.predict(before[2], *inputs), chunk.dtype)
        encoding: Encoding = {
            "id": PREDICTIVE,
            "dtype": chunk.dtype,
            "reference": "previous",
            "predicts": rule.name,
            "moments": [run.numbers for run in hint.runs],
            **rule.numbers,
            "xxh3": xxhash.xxh3_64_hexdigest(chunk.buffer.data),
        }
        return replace(chunk, buffer=np.frombuffer(residual, np.uint8), encodings=(encoding,))

    def _from_prediction(self, chunk: Chunk) -> Chunk:
        about, encoding = f"step {chunk.step}, chunk {chunk.key}", chunk.encodings[-1]
        rule, runs, before = rule_from(encoding), runs_from(encoding), self._reference.get(chunk.key)
        if rule is None or runs is None or chunk.dtype != "float32" or chunk.raw_bytes % 4:
            raise IntegrityError(f"{about}: an encoding that cannot be read: {dict(encoding)!r}")
        inputs = self._inputs(chunk, type(rule), runs)
        if before is None or before[1] != chunk.raw_bytes or inputs is None:
            raise IntegrityError(f"{about}: what its prediction is made of was not read")
        prediction = rule.predict(before[2], *inputs)
        buffer = decode_difference(
            chunk.buffer, prediction, chunk.dtype, prediction, max_bytes=chunk.raw_bytes
        )
        if xxhash.xxh3_64_hexdigest(buffer.data) != encoding.get("xxh3"):
            raise IntegrityError(f"{about}: what it decodes to is not what was saved")
        return replace(chunk, buffer=buffer, encodings=chunk.encodings[:-1])

    def _inputs(
        self, chunk: Chunk, kind: type[Rule], runs: Sequence[MomentRun]
    ) -> tuple[Bytes, Bytes] | None:
        """Return what a prediction is made of: momentum before and after, or momentum and variance after."""
        whole = MomentRun(runs[0].momentum, runs[0].variance, 0, 0, chunk.raw_bytes)
        if kind is VarianceRule:
            held, now = self._held, self.fresh(chunk, whole.momentum)
            if runs[0] != whole or held is None or now is None or held.buffer.nbytes != now.nbytes:
                return None
            place = (base_chunk_key(whole.momentum), chunk.step, chunk.layout)
            return (held.buffer, now) if (held.key, held.step, held.layout) == place else None
        found: list[tuple[MomentRun, Bytes, Bytes]] = []
        for run in runs:
            momentum, variance = self.fresh(chunk, run.momentum), self.fresh(chunk, run.variance)
            if momentum is None or variance is None or run.here + run.size_bytes > chunk.raw_bytes:
                return None
            if run.there + run.size_bytes > min(momentum.nbytes, variance.nbytes):
                return None
            if run == whole and momentum.nbytes == variance.nbytes == chunk.raw_bytes:
                return momentum, variance
            found.append((run, momentum, variance))
        # Where there are no moments NaN stands for them, and the prediction is the value before.
        both = np.full((2, chunk.raw_bytes), 0xFF, np.uint8)
        for run, *moments in found:
            for target, moment in zip(both, moments, strict=True):
                target[run.here : run.here + run.size_bytes] = moment[run.there : run.there + run.size_bytes]
        return both[0], both[1]

    def fresh(self, chunk: Chunk, part: int) -> Bytes | None:
        """Return another chunk of the same save and layout, raw; None if it did not pass yet."""
        key = base_chunk_key(part)
        kept = self._reference.get(key)
        current = kept is not None and kept[0] == chunk.layout and self._steps.get(key) == chunk.step
        return kept[2] if kept is not None and current else None

    def _remember(self, chunk: Chunk) -> None:
        kept, spare = self._reference.get(chunk.key), self._held
        if chunk.kind is Kind.MOMENT1 and kept is not None:
            self._held = _Held(chunk.key, chunk.step, kept[0], kept[2])
            del self._reference[chunk.key]
            if spare is not None:
                # The memory of the momentum held before serves for this one.
                self._reference[chunk.key] = (kept[0], kept[1], spare.buffer)
        super()._remember(chunk)
        self._steps[chunk.key] = chunk.step


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
    """Return the stage called `kind` in a configuration: ``none``, ``ordered_delta`` or ``predictive``."""
    stages: dict[str, type[NoDelta] | type[OrderedDeltaStage]] = {
        "none": NoDelta,
        "ordered_delta": OrderedDeltaStage,
        "predictive": PredictiveStage,
    }
    return stages[kind]()
