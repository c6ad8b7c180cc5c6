"""Predicted differences give back any bits, are the same on any machine, and are never trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_rig import Here
from predictive_rig import Pipeline, Training

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, Kind
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.predictive import (
    PREDICTIVE,
    AdamUpdate,
    MomentRun,
    UpdateHint,
    VarianceRule,
    WeightRule,
    rules_of,
)
from stepwell.pipeline.reading import reading_stages

SPECIAL = [
    *(0, 1, 0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FC00000, 0xFFFFFFFF),
]
words = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))
doubles = st.floats(allow_nan=False, allow_infinity=False)
betas = st.floats(0, 1, exclude_max=True)


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Bytes], AdamUpdate]:
    count = draw(st.integers(1, 40))
    arrays = [draw(st.lists(words, min_size=count, max_size=count)) for _ in range(6)]
    update = AdamUpdate(
        draw(st.integers(2, 1 << 24)), draw(doubles), draw(betas), draw(betas), draw(doubles), draw(doubles),
        draw(st.booleans()),
    )  # fmt: skip
    return [np.array(array, np.uint32).view(np.uint8) for array in arrays], update


def chunk_of(step: int, kind: Kind, part: int, buffer: Bytes, update: AdamUpdate) -> Chunk:
    hint = UpdateHint(update, (MomentRun(0, 1, 0, 0, buffer.nbytes),))
    return Chunk(step, f"state/{part}", kind, -1, part, "layout", "float32", buffer.nbytes, buffer, hint=hint)


def chunks_of(step: int, m: Bytes, v: Bytes, w: Bytes, update: AdamUpdate) -> list[Chunk]:
    kinds = (Kind.MOMENT1, Kind.MOMENT2, Kind.WEIGHT)
    return [chunk_of(step, kind, i, data, update) for i, (kind, data) in enumerate(zip(kinds, (m, v, w)))]  # noqa: B905


@settings(max_examples=150, deadline=None)
@given(states())
async def test_any_bits_come_back(state: tuple[list[Bytes], AdamUpdate]) -> None:
    (m0, v0, w0, m1, v1, w1), update = state
    before = replace(update, count=update.count - 1)
    with pytest.MonkeyPatch.context() as patch:
        # Small things are rarely worth a prediction; here they have to be predicted.
        patch.setattr("stepwell.pipeline.delta.cheapest", lambda *arguments: next(iter(arguments[-1])))
        pipeline = Pipeline()
        await pipeline.check(chunks_of(1, m0, v0, w0, before))
        await pipeline.check(chunks_of(2, m1, v1, w1, update))
        assert Kind.MOMENT2 in pipeline.predicted()
        await pipeline.check(chunks_of(3, m0, v0, w0, replace(update, count=update.count + 1)))


@given(states())
@settings(max_examples=50, deadline=None)
def test_a_prediction_has_no_nan_of_its_own(state: tuple[list[Bytes], AdamUpdate]) -> None:
    """The bits of a NaN that arithmetic makes differ between processors."""
    (m0, v0, w0, m1, v1, _), update = state
    for rule, before, one, two in [
        *((rule, v0, m0, m1) for rule in rules_of(VarianceRule, [update])),
        *((rule, w0, m1, v1) for rule in rules_of(WeightRule, [update])),
    ]:
        found = rule.predict(before, one, two)
        nan = np.isnan(found.view(np.float32))
        assert np.array_equal(found.view(np.uint32)[nan], before.view(np.uint32)[nan])


def test_flushing_denormals_changes_no_prediction() -> None:
    tiny = np.float32(1e-41) * np.arange(1, 100, dtype=np.float32)
    rule = VarianceRule(0.9, 0.999)
    wanted = rule.predict(*(tiny.view(np.uint8),) * 3).copy()
    assert wanted.view(np.float32).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert np.array_equal(rule.predict(*(tiny.view(np.uint8),) * 3), wanted)
        assert (torch.full((1,), 1e-40) * 0.5).item() == 0.0, "it must be on again"
    finally:
        torch.set_flush_denormal(False)


def test_predictions_are_these_bits_on_any_machine() -> None:
    """Each operation rounded once, as doubles show; where that fails, what others wrote cannot be read."""
    draw = np.random.default_rng(7)
    w, m0, m1 = (draw.integers(-(1 << 23), 1 << 23, 200_000).astype(np.float32) / 2**20 for _ in range(3))
    v = np.abs(m0 * m1)
    raw_w, raw_m0, raw_m1, raw_v = (x.view(np.uint8) for x in (w, m0, m1, v))
    variance = VarianceRule(0.9, 0.999).predict(raw_v, raw_m0, raw_m1)
    weight = WeightRule(0.99999, 0.0024, 0.0706, 1e-8).predict(raw_w, raw_m1, variance)

    def once(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        # A double has more than twice the bits: rounding its result again rounds as if only once.
        return np.asarray(values).astype(np.float32).astype(np.float64)

    w, m0, m1, v = (once(x) for x in (w, m0, m1, v))
    gradient = once(m0 + once(once(m1 - m0) / once(1 - 0.9)))
    v = once(once(v * once(0.999)) + once(once(gradient * once(1 - 0.999)) * gradient))
    below = once(once(once(np.sqrt(v)) / once(0.0706)) + once(1e-8))
    w = once(once(w * once(0.99999)) + once(once(m1 * once(-0.0024)) / below))
    assert np.array_equal(variance.view(np.float32), v)
    assert np.array_equal(weight.view(np.float32), w)
    found = [xxhash.xxh3_64_hexdigest(x.data) for x in (variance, weight)]
    assert found == ["73378b6861e4991c", "24dc51fbbce6993f"]


# What is damaged.


async def two_saves() -> tuple[list[Chunk], list[Chunk]]:
    training, pipeline = Training(), Pipeline()
    training.update()
    first = await pipeline.save(await training.chunks())
    training.update()
    second = await pipeline.save(await training.chunks())
    assert pipeline.predicted() == {Kind.MOMENT2, Kind.WEIGHT}
    return first, second


DAMAGE: list[Mapping[str, object]] = [
    {"xxh3": "0" * 16},
    {"xxh3": None},
    {"predicts": "weather"},
    {"predicts": ["weight"]},
    {"moments": []},
    {"moments": "state/0"},
    {"moments": None},
    {"moments": [1, 2, 0, 0, 64]},
    {"moments": [[1, 2, 0, 0]]},
    {"moments": [[1, 2, 0, 0, 64.0]]},
    {"moments": [[1, 2, 0, 0, 63]]},
    {"moments": [[1, 2, 0, -64, 64]]},
    {"moments": [[1, 2, 0, 1 << 60, 64]]},
    {"moments": [[1, 2, 1 << 40, 0, 64]]},
    {"moments": [[1, 2, 0, 1 << 40, 64]]},
    {"moments": [[1, 2, 0, 0, 1 << 40]]},
    {"moments": [[999, 999, 0, 0, 64]]},
    {"beta1": 0.5, "step": 0.5},
    {"beta1": "0.9", "step": "0.9"},
    {"beta1": True, "step": True},
    {"beta1": 10**400, "step": 10**400},
    {"beta1": float("nan"), "step": float("inf")},
    {"beta1": None, "step": None},
]


@pytest.mark.parametrize("kind", [Kind.MOMENT2, Kind.WEIGHT])
@pytest.mark.parametrize("damage", DAMAGE, ids=str)
async def test_a_damaged_encoding_is_an_error(kind: Kind, damage: Mapping[str, object]) -> None:
    first, second = await two_saves()
    reader = reading_stages()
    for chunk in first:
        await recover_chunk(chunk, reader, Here())
    for chunk in second:
        if chunk.kind is kind and chunk.encodings[-1]["id"] == PREDICTIVE:
            bad = replace(chunk, encodings=({**chunk.encodings[-1], **damage},))
            with pytest.raises(IntegrityError, match=f"step {chunk.step}, chunk {chunk.key}"):
                await recover_chunk(bad, reader, Here())
            return
        await recover_chunk(chunk, reader, Here())
    pytest.fail("nothing was predicted")


async def test_what_was_not_read_before_is_an_error() -> None:
    first, second = await two_saves()
    predicted = [chunk for chunk in second if chunk.encodings[-1]["id"] == PREDICTIVE]
    for chunk in predicted:
        with pytest.raises(IntegrityError, match="was not read"):
            await recover_chunk(chunk, reading_stages(), Here())
    reader = reading_stages()
    for chunk in first:
        await recover_chunk(chunk, reader, Here())
    for chunk in predicted:
        # Their momentum is that of the save before.
        with pytest.raises(IntegrityError, match="was not read"):
            await recover_chunk(chunk, reader, Here())


async def test_a_wrong_reference_is_seen() -> None:
    first, second = await two_saves()
    reader = reading_stages()
    for chunk in first:
        raw = await recover_chunk(chunk, reader, Here())
        if raw.kind is Kind.WEIGHT:
            wrong = raw.buffer.copy()
            wrong[0] ^= 1
            await recover_chunk(replace(raw, buffer=wrong), reader, Here())
    seen = 0
    for chunk in second:
        if chunk.kind is Kind.WEIGHT and chunk.encodings[-1]["id"] == PREDICTIVE:
            with pytest.raises(IntegrityError, match="not what was saved"):
                await recover_chunk(chunk, reader, Here())
            seen += 1
        else:
            await recover_chunk(chunk, reader, Here())
    assert seen
