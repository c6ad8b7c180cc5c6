"""Pairs of masters and copies are found by their values, remembered, and looked for again where they end."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.pipeline import cast_pairs
from stepwell.pipeline.base import Bytes, Kind
from stepwell.pipeline.cast_pairs import CastPairs, joined
from stepwell.pipeline.casts import CastRun, cast_into
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import plan_layout


class State:
    """Float32 tensors `m0`, `m1`... and bfloat16 tensors `c0`, `c1`... of one shape."""

    def __init__(self, masters: int, copies: int, shape: tuple[int, ...] = (8, 64)) -> None:
        specs = [TensorSpec(f"m{i}", shape, "float32", Kind.AUX) for i in range(masters)]
        specs += [TensorSpec(f"c{i}", shape, "bfloat16", Kind.WEIGHT) for i in range(copies)]
        self.layout: Layout = plan_layout(specs, chunk_bytes=1024)
        self.run: Bytes = np.zeros(self.layout.size_bytes, np.uint8)
        self.random = np.random.default_rng(0)

    def bytes_of(self, name: str) -> Bytes:
        index = self.layout.index_of[name]
        start = self.layout.tensor_offsets[index]
        return self.run[start : start + self.layout.tensors[index].size_bytes]

    def fill(self, name: str) -> None:
        data = self.bytes_of(name)
        data[:] = self.random.standard_normal(data.nbytes // 4).astype(np.float32).view(np.uint8)

    def copy(self, master: str, copy: str) -> None:
        cast_into(self.bytes_of(master), self.bytes_of(copy), "bfloat16")

    def sources(self, pairs: CastPairs) -> dict[str, str | None]:
        """By what each copy is found to be a cast of, through the chunks."""
        found: dict[str, str | None] = {}
        for chunk in self.layout.chunks:
            for piece in chunk.pieces:
                spec = self.layout.tensors[piece.tensor]
                if spec.dtype != "bfloat16":
                    continue
                runs = pairs.runs_of(self.run, piece)
                names = {self.name_at(run) for run in runs}
                assert sum(run.count for run in runs) in (0, piece.stop - piece.start)
                assert len(names) <= 1
                found[spec.name] = names.pop() if names else None
        return found

    def name_at(self, run: CastRun) -> str:
        (name,) = [
            self.layout.tensors[piece.tensor].name
            for piece in self.layout.chunks[run.part].pieces
            if piece.offset_bytes <= run.there < piece.offset_bytes + 4 * (piece.stop - piece.start)
        ]
        return name


def test_values_decide_not_names_or_order() -> None:
    state = State(5, 3)
    for i in range(5):
        state.fill(f"m{i}")
    for master, copy in (("m4", "c0"), ("m0", "c1"), ("m4", "c2")):
        state.copy(master, copy)
    pairs = CastPairs(state.layout)
    pairs.begin(0)
    assert state.sources(pairs) == {"c0": "m4", "c1": "m0", "c2": "m4"}


def test_what_looks_alike_at_first_is_told_apart_later() -> None:
    """Biases and their moments all begin as zeros."""
    state = State(6, 2)
    pairs = CastPairs(state.layout)
    pairs.begin(0)
    assert state.sources(pairs) == {"c0": "m0", "c1": "m1"}
    for i in range(6):
        state.fill(f"m{i}")
    state.copy("m0", "c0")
    state.copy("m3", "c1")
    pairs.begin(1)
    assert state.sources(pairs) == {"c0": "m0", "c1": "m3"}


def test_a_sample_that_is_alike_by_chance_is_not_believed() -> None:
    state = State(1, 1, (64, 64))
    state.fill("m0")
    state.copy("m0", "c0")
    # Between the samples.
    state.bytes_of("c0")[2 * 500] ^= 1
    pairs = CastPairs(state.layout)
    pairs.begin(0)
    pieces = [piece for chunk in state.layout.chunks for piece in chunk.pieces if piece.tensor == 1]
    found = [bool(pairs.runs_of(state.run, piece)) for piece in pieces]
    assert found.count(False) == 1
    assert not found[[piece.start <= 500 < piece.stop for piece in pieces].index(True)]


def test_a_tensor_in_many_chunks_is_found_in_each() -> None:
    state = State(2, 1, (64, 64))
    for i in range(2):
        state.fill(f"m{i}")
    state.copy("m1", "c0")
    assert len(state.layout.chunks) > 10
    pairs = CastPairs(state.layout)
    pairs.begin(0)
    assert state.sources(pairs) == {"c0": "m1"}


def test_a_search_in_vain_is_made_at_ever_fewer_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(3, 1)
    for i in range(3):
        state.fill(f"m{i}")
    searched: list[int] = []
    alike = CastPairs._alike

    def counted(self: CastPairs, run: Bytes, target: int) -> int | None:
        searched.append(self._saves)
        return alike(self, run, target)

    monkeypatch.setattr(CastPairs, "_alike", counted)
    pairs = CastPairs(state.layout)
    for step in range(300):
        pairs.begin(step)
        assert state.sources(pairs) == {"c0": None}
    limit = cast_pairs._WAIT_SAVES_MAX
    assert sorted(set(searched)) == [1, 2, 4, 8, 16, 32, 64, *range(64 + limit, 301, limit)]
    assert len(searched) == len(set(searched))
    state.copy("m2", "c0")
    for step in range(300, 300 + limit + 1):
        pairs.begin(step)
        if state.sources(pairs) == {"c0": "m2"}:
            break
    else:
        pytest.fail("not found within the longest wait")


def test_other_shapes_and_types_are_never_looked_at() -> None:
    specs = [
        TensorSpec("m0", (8, 8), "float32", Kind.AUX),
        TensorSpec("c0", (64,), "bfloat16", Kind.WEIGHT),
        TensorSpec("c1", (8, 8), "int16", Kind.AUX),
        TensorSpec("c2", (0, 8), "bfloat16", Kind.WEIGHT),
        TensorSpec("m2", (0, 8), "float32", Kind.AUX),
    ]
    layout = plan_layout(specs)
    pairs = CastPairs(layout)
    pairs.begin(0)
    run = np.zeros(layout.size_bytes, np.uint8)
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            assert pairs.runs_of(run, piece) == []


def test_runs_that_go_on_from_one_another_are_one() -> None:
    runs = [CastRun(1, 0, 0, 32), CastRun(1, 128, 64, 7), CastRun(1, 192, 128, 32), CastRun(2, 0, 192, 5)]
    assert joined(runs) == [CastRun(1, 0, 0, 39), *runs[2:]]
    assert joined([CastRun(1, 0, 0, 4), CastRun(1, 16, 12, 4)]) == [
        CastRun(1, 0, 0, 4),
        CastRun(1, 16, 12, 4),
    ]
