"""The stage ``sparsify``: what exceeds a threshold goes, the rest follows when it has grown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lossy_rig import Reader, Writer, encodings, floats, gradients, policy, spec, states

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.choice import Rule

COUNT = 64 * 256
W = spec("model/h.weight", COUNT)
BIAS = spec("model/h.bias", 512, columns=0)

HOW = policy(sparse=frozenset({Kind.WEIGHT, Kind.GRADIENT}), small_elements=1024)


async def test_a_tenth_of_a_difference_is_sent_and_norms_and_biases_never_are_sparse() -> None:
    layout = states(W, BIAS, how=HOW)
    writer, reader = Writer.of(layout, HOW), Reader(layout)
    values = {W.name: floats(0, COUNT), BIAS.name: floats(1, 512)}
    await reader.read(await writer.save(values))
    moved = {name: value + floats(2, value.size, 1e-3) for name, value in values.items()}
    chunks = await writer.save(moved)
    assert sorted(encodings(chunks)) == [["difference", "int8"], ["difference", "threshold_sparse"]]
    found = await reader.read(chunks)
    changed = found[W.name].view(np.float32) != values[W.name]
    assert 0.05 < changed.mean() < 0.2
    assert (found[BIAS.name].view(np.float32) != values[BIAS.name]).mean() > 0.9
    assert np.abs(found[W.name].view(np.float32) - moved[W.name]).max() <= writer.header["bound"]
    assert writer.saved_bytes < 0.25 * COUNT


async def test_of_a_gradient_nothing_is_lost_for_good() -> None:
    layout = gradients(W, how=HOW)
    writer, reader = Writer.of(layout, HOW), Reader(layout)
    # The small elements always point the same way: they must come through in time.
    gradient = floats(0, COUNT)
    owed = np.zeros(COUNT)
    for _ in range(60):
        sent = (await reader.read(await writer.save({W.name: gradient})))[W.name].view(np.float32)
        owed += gradient.astype(np.float64) - sent
    assert np.abs(owed).mean() < 0.25 * 60 * np.abs(gradient).mean()
    assert encodings(await writer.save({W.name: gradient})) == [["threshold_sparse"]]


async def test_a_dense_refresh_keeps_the_error_within_eps() -> None:
    layout = states(W, how=HOW)
    writer, reader = Writer.of(layout, HOW, eps=8e-4), Reader(layout)
    weights, seen = floats(0, COUNT), set()
    await reader.read(await writer.save({W.name: weights}))
    for step in range(1, 30):
        weights = weights + floats(step, COUNT, 3e-3 if step == 20 else 3e-4)
        chunks = await writer.save({W.name: weights})
        found = (await reader.read(chunks))[W.name].view(np.float32)
        assert np.abs(found - weights).max() <= 8e-4
        seen |= {ids[-1] for ids in encodings(chunks)}
    assert seen == {"threshold_sparse", "ordered_delta"}


async def test_where_no_stage_makes_it_sparse_it_stays_exact() -> None:
    how = policy(rules=(Rule("h.*", {Kind.GRADIENT: "sparse"}),))
    layout = gradients(W, how=how)
    writer = Writer.of(layout, how)
    writer.stages = writer.stages[:2]
    writer.loop._offered -= {"sparse"}
    chunks = await writer.save({W.name: floats(0, COUNT)})
    assert "no stage makes it sparse" in str(writer.header["choices"])
    assert encodings(chunks) == [[]]


async def test_a_damaged_frame_is_an_error() -> None:
    layout = gradients(W, how=HOW)
    (chunk,) = await Writer.of(layout, HOW).save({W.name: floats(0, COUNT)})
    for buffer in (chunk.buffer[:-1], chunk.buffer[:20], np.zeros(64, np.uint8)):
        with pytest.raises(IntegrityError):
            await Reader(layout).read([replace(chunk, buffer=buffer)])
