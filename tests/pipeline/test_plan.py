"""Layouts: complete, aligned, the same cuts for gradient, weight and moments, regular grids; sizes only."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.pipeline.base import Kind
from stepwell.pipeline.layout import ITEM_BYTES, Layout, TensorSpec
from stepwell.pipeline.plan import gradient_layout, grid_of, pieces_by_tensor, plan_layout

extents = st.one_of(
    st.integers(0, 9), st.sampled_from([64, 100, 384, 768, 1000, 4096, 50257, 65536, 1 << 20])
)
shapes = st.lists(extents, max_size=4).map(tuple)
KINDS = [Kind.WEIGHT, Kind.MOMENT1, Kind.MOMENT2, Kind.AUX]


@st.composite
def states(draw: st.DrawFn) -> list[TensorSpec]:
    count = draw(st.integers(0, 12))
    return [
        TensorSpec(
            f"model/{i}",
            draw(shapes),
            draw(st.sampled_from(sorted(ITEM_BYTES))),
            draw(st.sampled_from(KINDS)),
            draw(st.sampled_from(["", "optim:0", "optim:1"])),
        )
        for i in range(count)
    ]


def check_layout(layout: Layout, chunk_bytes: int) -> None:
    end = 0
    for chunk in layout.chunks:
        assert chunk.offset_bytes % 64 == 0
        assert end <= chunk.offset_bytes < end + 64
        end = chunk.offset_bytes + chunk.size_bytes
        inside = 0
        assert len({layout.tensors[p.tensor].group for p in chunk.pieces}) == 1
        for piece in chunk.pieces:
            spec = layout.tensors[piece.tensor]
            assert (spec.kind, spec.dtype) == (chunk.kind, chunk.dtype)
            assert piece.start % 64 == 0
            assert piece.offset_bytes % 64 == 0
            assert inside <= piece.offset_bytes < inside + 64
            inside = piece.offset_bytes + (piece.stop - piece.start) * ITEM_BYTES[spec.dtype]
        assert inside == chunk.size_bytes
        if len(chunk.pieces) > 1:
            assert chunk.size_bytes <= chunk_bytes // 4 * ITEM_BYTES[chunk.dtype] + 64 * len(chunk.pieces)
    assert end <= layout.size_bytes < end + 64
    for spec, offset, pieces in zip(
        layout.tensors, layout.tensor_offsets, pieces_by_tensor(layout), strict=True
    ):
        check_tensor_pieces(layout, spec, offset, [p.piece for p in pieces], [p.part for p in pieces])


def check_tensor_pieces(
    layout: Layout, spec: TensorSpec, offset: int, pieces: list, parts: list[int]
) -> None:
    item = ITEM_BYTES[spec.dtype]
    assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
    assert pieces[-1].stop == spec.element_count
    assert offset % 64 == 0
    for part, piece in zip(parts, pieces, strict=True):
        assert layout.chunks[part].offset_bytes + piece.offset_bytes == offset + piece.start * item
    grid = grid_of(spec, layout)
    assert len(grid) == len(spec.shape)
    assert all(1 <= g <= max(extent, 1) for g, extent in zip(grid, spec.shape, strict=True))
    if len(pieces) == 1:
        assert grid == tuple(max(extent, 1) for extent in spec.shape)
        return
    sizes = {p.stop - p.start for p in pieces[:-1]}
    assert sizes == {prod(grid)}
    assert pieces[-1].stop - pieces[-1].start <= prod(grid)
    assert prod(-(-extent // g) for extent, g in zip(spec.shape, grid, strict=True)) == len(pieces)
    axis = next(i for i, g in enumerate(grid) if g > 1) if prod(grid) > 1 else 0
    assert grid[axis + 1 :] == spec.shape[axis + 1 :]
    # Only a single row of chunks may end in a shorter one.
    assert spec.shape[axis] % grid[axis] == 0 or prod(spec.shape[:axis]) == 1


@settings(max_examples=80, deadline=None)
@given(states(), st.sampled_from([1024, 4096, 1 << 16, 1 << 20, 16 << 20]))
def test_layout_is_complete_aligned_and_regular(specs: list[TensorSpec], chunk_bytes: int) -> None:
    specs = [spec for spec in specs if spec.element_count < chunk_bytes * 200]
    layout = plan_layout(specs, chunk_bytes=chunk_bytes)
    check_layout(layout, chunk_bytes)
    assert layout == plan_layout(specs, chunk_bytes=chunk_bytes)
    assert Layout.decode(layout.encoded, layout.hash) == layout


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(shapes, st.sampled_from(["optim:0", "optim:1"])), min_size=1, max_size=8))
def test_gradient_weight_and_moments_get_the_same_ranges_whatever_their_dtypes(
    parameters: list[tuple[tuple[int, ...], str]],
) -> None:
    weights = [
        TensorSpec(f"model/{i}", shape, "bfloat16", Kind.WEIGHT, group)
        for i, (shape, group) in enumerate(parameters)
        if prod(shape) < 1 << 24
    ]
    states = [
        TensorSpec(f"optim/state/{w.name[6:]}/{key}", w.shape, dtype, kind, w.group)
        for w in weights
        for key, dtype, kind in [
            ("exp_avg", "float32", Kind.MOMENT1),
            ("exp_avg_sq", "float64", Kind.MOMENT2),
            ("max_exp_avg_sq", "float32", Kind.MOMENT2),
        ]
    ]
    whole = plan_layout([*weights, *states], chunk_bytes=1 << 16)
    gradients = gradient_layout(weights, chunk_bytes=1 << 16)

    def cuts(layout: Layout, last: str) -> list[list[tuple[int, int, int]]]:
        """Per chunk of one role: (parameter, start, stop)."""
        found = []
        for chunk in layout.chunks:
            names = [layout.tensors[p.tensor].name for p in chunk.pieces]
            if names[0].startswith("model/") if last == "model" else names[0].endswith("/" + last):
                indices = [int(name.split("/")[1 if last == "model" else 2]) for name in names]
                found.append([(i, p.start, p.stop) for i, p in zip(indices, chunk.pieces, strict=True)])
        return found

    expected = cuts(gradients, "model")
    assert {c.kind for c in gradients.chunks} <= {Kind.GRADIENT}
    assert [replace(t, kind=Kind.WEIGHT) for t in gradients.tensors] == weights
    for role in ("model", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert cuts(whole, role) == expected


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((50257, 768), (5461, 768)),
        ((64, 14336, 4096), (1, 1024, 4096)),
        ((3 << 30,), (4194304,)),
        ((512, 512, 3, 3), (512, 512, 3, 3)),
        ((70000, 70000), (56, 70000)),
        ((2, 8388609), (2, 8388609)),
        ((8388609, 3), (1398080, 3)),
    ],
)
def test_large_tensors_are_cut_into_rows_of_a_zarr_grid(
    shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    spec = TensorSpec("model/w", shape, "float32", Kind.WEIGHT, "optim:0")
    layout = plan_layout([spec])
    assert grid_of(spec, layout) == grid
    check_layout(layout, 16 << 20)


def test_no_chunk_of_a_huge_tensor_exceeds_what_codecs_take() -> None:
    specs = [
        TensorSpec(f"model/{i}", shape, "complex128", Kind.WEIGHT)
        for i, shape in enumerate([(1 << 34,), (300000, 49152), (7, 128, 1 << 24), (3, 5, 1 << 30)])
    ]
    layout = plan_layout(specs)
    check_layout(layout, 16 << 20)
    assert max(chunk.size_bytes for chunk in layout.chunks) <= 64 << 20
    assert layout.size_bytes == sum(spec.size_bytes for spec in specs)


def test_twenty_thousand_scalars_share_few_chunks() -> None:
    specs = [TensorSpec(f"optim/state/{i}/step", (), "float32", Kind.AUX) for i in range(20000)]
    layout = plan_layout(specs)
    assert len(layout.chunks) == 1
    assert layout.size_bytes <= 64 * 20000
    assert {grid_of(spec, layout) for spec in specs} == {()}


def test_groups_and_empty_tensors_never_mix_up() -> None:
    specs = [
        TensorSpec("model/a", (0, 3), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/b", (3,), "float32", Kind.WEIGHT, "optim:1"),
        TensorSpec("model/c", (5,), "float32", Kind.WEIGHT, "optim:0"),
    ]
    layout = plan_layout(specs)
    check_layout(layout, 16 << 20)
    assert [[p.tensor for p in chunk.pieces] for chunk in layout.chunks] == [[0, 2], [1]]
    assert grid_of(specs[0], layout) == (1, 3)
    assert plan_layout([]).chunks == ()


def test_same_name_twice_and_tiny_chunks_are_refused() -> None:
    spec = TensorSpec("model/a", (1,), "float32", Kind.WEIGHT)
    with pytest.raises(ValueError, match="same name"):
        plan_layout([spec, spec])
    with pytest.raises(ValueError, match="1024"):
        plan_layout([spec], chunk_bytes=512)
