"""The stage ``quantize``: what is chosen for which tensor and why, and that all of it can be undone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lossy_rig import (
    Here,
    Reader,
    Writer,
    chunks_of,
    encodings,
    floats,
    gradients,
    laid_out,
    policy,
    spec,
    states,
)

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.choice import EXACT, Choices, Rule
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.loop import Loop, loop_of
from stepwell.pipeline.quantize import Quantize
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.values import narrowed, widened

COUNT = 64 * 64
W = spec("model/h.weight", COUNT)
M = spec("optim/state/h.weight/exp_avg", COUNT, Kind.MOMENT1)
V = spec("optim/state/h.weight/exp_avg_sq", COUNT, Kind.MOMENT2)

ADAPTIVE = {"sparse": frozenset({Kind.WEIGHT})}


@pytest.mark.parametrize(
    ("name", "count", "columns", "kind", "dtype", "treatment", "why"),
    [
        ("model/h.weight", 1 << 16, 64, Kind.WEIGHT, "float32", "sparse", "large weight"),
        ("model/h.weight", (1 << 16) - 64, 64, Kind.WEIGHT, "float32", "int8", "fewer than 65536 elements"),
        ("model/h.weight", 1 << 16, 64, Kind.WEIGHT, "bfloat16", "sparse", "large weight"),
        ("model/wte.weight", 1 << 20, 64, Kind.WEIGHT, "float32", "int8", "an embedding"),
        ("model/h.0.attn.bias", 1 << 20, 0, Kind.WEIGHT, "float32", "int8", "norm or bias"),
        ("model/ln_f.weight", 1 << 20, 64, Kind.WEIGHT, "float32", "int8", "norm or bias"),
        ("optim/state/h.weight/exp_avg", 1 << 20, 64, Kind.MOMENT1, "float32", "int8", "momentum"),
        ("optim/state/h.weight/exp_avg_sq", 1 << 20, 64, Kind.MOMENT2, "float32", "log_quant", "variance"),
        ("model/h.weight", 1 << 20, 64, Kind.GRADIENT, "float32", "int8", "gradient"),
        ("model/h.weight", 1 << 20, 64, Kind.WEIGHT, "float64", EXACT, "float64 is never"),
        ("model/h.weight", 1 << 20, 64, Kind.WEIGHT, "float16", EXACT, "float16 is never"),
        ("model/h.mask", 1 << 20, 64, Kind.WEIGHT, "bool", EXACT, "bool is never"),
        ("model/h.running_mean", 1 << 20, 64, Kind.AUX, "float32", EXACT, "no tensor that an optimizer"),
    ],
)
def test_the_adaptive_choice(
    name: str, count: int, columns: int, kind: Kind, dtype: str, treatment: str, why: str
) -> None:
    choice = Choices(policy(**ADAPTIVE)).of(spec(name, count, kind, dtype=dtype, columns=columns), kind)
    assert choice.treatment == treatment
    assert why in choice.reason


def test_the_first_rule_that_fits_a_name_decides() -> None:
    rules = (
        Rule("h.?.weight", {Kind.WEIGHT: EXACT}),
        Rule("h.*", {Kind.WEIGHT: "int4", Kind.MOMENT2: "int4", Kind.MOMENT1: "codebook"}),
    )
    choices = Choices(policy(**ADAPTIVE, rules=rules))
    assert choices.of(spec("model/h.1.weight", COUNT), Kind.WEIGHT).treatment == EXACT
    assert choices.of(spec("model/h.12.weight", COUNT), Kind.WEIGHT).treatment == "int4"
    assert "rule 'h.*'" in choices.of(spec("model/h.12.weight", COUNT), Kind.WEIGHT).reason
    assert choices.of(spec("optim/state/h.12/exp_avg", COUNT), Kind.MOMENT1).treatment == "codebook"
    assert choices.of(spec("optim/state/h.1.weight/exp_avg", COUNT), Kind.MOMENT1).treatment == "int8"
    ruined = choices.of(spec("optim/state/h.12/exp_avg_sq", COUNT), Kind.MOMENT2)
    assert (ruined.treatment, "would ruin" in ruined.reason) == (EXACT, True)


def test_tensors_of_two_classes_never_share_a_chunk() -> None:
    how = policy(**ADAPTIVE)
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    mixed = [spec(f"model/{name}", 640, columns=0 if "bias" in name else 64) for name in names]
    layout = states(*mixed, how=how)
    assert sorted(len(chunk.pieces) for chunk in layout.chunks) == [2, 2]
    assert all(spec.group.rpartition(":")[0] == "optim" for spec in layout.tensors)


def test_of_a_mixed_chunk_the_most_careful_choice_counts() -> None:
    rules = (Rule("a*", {Kind.GRADIENT: "int8"}), Rule("b*", {Kind.GRADIENT: "int4"}))
    layout = gradients(spec("model/a", 640), spec("model/b", 640))
    assert len(layout.chunks[0].pieces) == 2, "planned under another configuration"
    choices = Choices(policy(rules=(*rules, Rule("*", {Kind.GRADIENT: "int4"}))))
    assert choices.of_chunk(layout, 0).treatment == "int8"


async def test_a_gradient_comes_back_within_the_codecs_bound_at_a_quarter_of_the_bytes() -> None:
    layout = gradients(W)
    writer, gradient = Writer.of(layout), floats(0, COUNT)
    chunks = await writer.save({W.name: gradient})
    assert encodings(chunks) == [["int8"]]
    assert writer.saved_bytes < 1.1 * COUNT
    found = (await Reader(layout).read(chunks))[W.name].view(np.float32)
    assert np.abs(found - gradient).max() <= np.abs(gradient).max() / 127 / 2 * 1.01
    assert writer.header == {"choices": {"int8: gradient": ["update/0/0"]}, "bound": None}


async def test_each_kind_of_state_has_its_own_codec_and_the_first_save_is_exact() -> None:
    layout = states(W, M, V)
    how = policy(treatments={Kind.WEIGHT: "int8", Kind.MOMENT1: "codebook", Kind.MOMENT2: "log_quant4"})
    writer, reader = Writer.of(layout, how), Reader(layout)
    values = {W.name: floats(0, COUNT), M.name: floats(1, COUNT), V.name: floats(2, COUNT) ** 2}
    first = await writer.save(values)
    assert encodings(first) == [["byteplane"]] * 3
    found = await reader.read(first)
    assert all(np.array_equal(found[name].view(np.float32), values[name]) for name in values)
    values = {name: value * np.float32(1.01) for name, value in values.items()}
    second = await writer.save(values)
    assert encodings(second) == [["difference", "int8"], ["codebook"], ["log_quant"]]
    found = await reader.read(second)
    bound = writer.header["bound"]
    for name, wanted in values.items():
        assert 0 < np.abs(found[name].view(np.float32) - wanted).max() <= bound
    assert np.array_equal(found[V.name].view(np.float32) == 0, values[V.name] == 0)


async def test_without_a_difference_no_state_loses_anything() -> None:
    layout = states(W, M, V)
    writer = Writer.of(layout, policy(difference=False))
    for _ in range(2):
        chunks = await writer.save(
            {W.name: floats(0, COUNT), M.name: floats(1, COUNT), V.name: floats(2, COUNT) ** 2}
        )
        assert not any("int8" in ids or "log_quant" in ids for ids in encodings(chunks))


async def test_infinities_and_nans_come_back_as_they_are_and_are_not_carried() -> None:
    layout = gradients(W)
    writer, reader = Writer.of(layout), Reader(layout)
    odd = floats(0, COUNT)
    odd[:3] = [np.inf, -np.inf, np.nan]
    found = (await reader.read(await writer.save({W.name: odd})))[W.name].view(np.float32)
    assert np.array_equal(found[:256].view(np.uint32), odd[:256].view(np.uint32)), "the block is kept raw"
    after = (await reader.read(await writer.save({W.name: floats(1, COUNT)})))[W.name].view(np.float32)
    assert np.isfinite(after).all()
    layout = states(W)
    writer, reader = Writer.of(layout), Reader(layout)
    for values in (floats(0, COUNT), odd, floats(2, COUNT), floats(3, COUNT)):
        found = (await reader.read(await writer.save({W.name: values})))[W.name].view(np.float32)
        if values is odd:
            assert np.array_equal(found.view(np.uint32), odd.view(np.uint32)), "sent exactly as a whole"
    assert np.abs(found - values).max() <= writer.header["bound"]


@pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.WEIGHT])
async def test_bfloat16(kind: Kind) -> None:
    one = spec("model/h.weight", COUNT, dtype="bfloat16")
    layout = gradients(one) if kind is Kind.GRADIENT else states(one)
    writer, reader = Writer.of(layout), Reader(layout)
    owed = np.zeros(COUNT)
    for step in range(20):
        values = floats(0, COUNT) if kind is Kind.WEIGHT else np.zeros(COUNT, np.float32)
        raw = narrowed(values + floats(step, COUNT, 1e-2), "bfloat16")
        chunks = await writer.save({one.name: raw.view(np.uint16)})
        found = (await reader.read(chunks))[one.name]
        error = widened(raw, "bfloat16").astype(np.float64) - widened(found, "bfloat16")
        owed += error
    assert any(encoding["id"] == "stepwell.int8" for encoding in chunks[0].encodings)
    if kind is Kind.WEIGHT:
        assert np.abs(error).max() <= writer.header["bound"] < 0.05
    else:
        assert np.abs(owed).max() < 1e-3, "the residual is carried in float32"


async def test_what_cannot_gain_is_kept_as_it_is() -> None:
    layout = gradients(W)
    noise = np.random.default_rng(0).integers(0, 1 << 32, COUNT, np.uint32).view(np.float32)
    writer = Writer.of(layout)
    chunks = await writer.save({W.name: noise})
    assert "int8" not in encodings(chunks)[0]
    assert "no gain" in str(writer.header["choices"])
    assert chunks[0].buffer.nbytes <= 1.005 * W.size_bytes


async def test_any_configuration_reads_what_another_one_wrote() -> None:
    layout = gradients(W)
    chunks = await Writer.of(layout).save({W.name: floats(0, COUNT)})
    loop = Loop(Choices(policy(treatments={})))
    for configured in ([], [Quantize(loop)]):
        back = await recover_chunk(chunks[0], reading_stages(configured), Here())
        assert back.buffer.nbytes == W.size_bytes
    assert loop_of([Quantize(loop)]) is loop


async def test_damage_is_an_error_before_anything_large_is_made() -> None:
    layout = gradients(W)
    (chunk,) = await Writer.of(layout).save({W.name: floats(0, COUNT)})
    for buffer in (chunk.buffer[:-1], chunk.buffer[:0], np.zeros(40, np.uint8)):
        with pytest.raises(IntegrityError):
            await recover_chunk(replace(chunk, buffer=buffer), reading_stages(), Here())
    with pytest.raises(IntegrityError):
        await recover_chunk(replace(chunk, raw_bytes=chunk.raw_bytes - 4), reading_stages(), Here())
    wrong = ({**chunk.encodings[0], "dtype": "bfloat16"},)
    with pytest.raises(IntegrityError):
        await recover_chunk(replace(chunk, encodings=wrong), reading_stages(), Here())


async def test_shard_finds_bfloat16_values_times_a_factor_and_stays_exact() -> None:
    layout = gradients(W)
    plain = floats(0, COUNT)
    scaled = widened(narrowed(plain, "bfloat16"), "bfloat16") * np.float32(0.37)
    shard = Shard()
    sizes = []
    for values, codec in ((scaled, "scaled_bf16"), (plain, "byteplane")):
        (chunk,) = chunks_of(layout, laid_out(layout, {W.name: values}), 0)
        stored = await shard.save(chunk, Here())
        assert encodings([stored]) == [[codec]]
        back = await recover_chunk(stored, reading_stages(), Here())
        assert np.array_equal(back.buffer, chunk.buffer)
        sizes.append(stored.buffer.nbytes)
    assert sizes[0] < 0.6 * sizes[1]
