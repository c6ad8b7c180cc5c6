"""Digests: equal for equal bits, different for any changed bit, None where the window closed."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import FormatError, StateMismatchError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import tensor_bytes
from stepwell.pipeline.digest import (
    Digest,
    DigestWindow,
    MomentDigest,
    compare,
    digest_layout,
    parts_of_kind,
)
from stepwell.pipeline.digester import SUM64, XXH3_64, Digester
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import plan_layout

DTYPES = ["float32", "bfloat16", "float64", "complex64", "float16"]


def made(
    *, chunk_bytes: int = 64 << 10, dtypes: list[str] | None = None, strided: bool = False
) -> tuple[Layout, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    specs, tensors = [], {}
    for dtype in dtypes or ["float32"]:
        for i, shape in enumerate(
            [(), (3,), (0,), (5, 7), (100, 211), (64, 64), (20_000,), (2, 3, 1500), (1,)]
        ):
            name = f"model/{dtype}.{i}"
            tensor = torch.randn(shape, generator=random, dtype=torch.float64).to(getattr(torch, dtype))
            if strided and tensor.ndim > 1:
                tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
            tensors[name] = tensor
            specs.append(TensorSpec(name, shape, dtype, Kind.WEIGHT, "optim:0"))
    return plan_layout(specs, chunk_bytes=chunk_bytes), tensors


@cache
def made_once() -> tuple[Layout, dict[str, torch.Tensor]]:
    return made(dtypes=["float32", "bfloat16"])


def expected(layout: Layout, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The digest read another way: bytes of each chunk as they lie in a pack."""
    found = []
    for chunk in layout.chunks:
        buffer = np.zeros(chunk.size_bytes, np.uint8)
        for piece in chunk.pieces:
            spec = layout.tensors[piece.tensor]
            raw = tensor_bytes(tensors[spec.name].clone(memory_format=torch.contiguous_format))
            item = raw.size // max(spec.element_count, 1)
            raw = raw[piece.start * item : piece.stop * item]
            buffer[piece.offset_bytes : piece.offset_bytes + raw.size] = raw
        found.append(xxhash.xxh3_64_hexdigest(buffer.data))
    return found


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("chunk_bytes", [16 << 10, 64 << 10, 16 << 20])
def test_digest_is_the_hash_of_the_chunk_as_packed(chunk_bytes: int, strided: bool) -> None:
    layout, tensors = made(chunk_bytes=chunk_bytes, dtypes=DTYPES, strided=strided)
    want = expected(layout, tensors)
    assert digest_layout(layout, tensors) == want
    digester = Digester(layout, tensors, torch.full((7,), 9, dtype=torch.uint8))
    for _ in range(2):  # once planning, once from the plans, in another order
        found = {part: digester.digest(part) for part in reversed(range(len(layout.chunks)))}
        assert [found[part] for part in range(len(layout.chunks))] == want


@pytest.mark.parametrize("algorithm", [XXH3_64, SUM64])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_changes_exactly_its_chunk(algorithm: str, data: st.DataObject) -> None:
    layout, tensors = made_once()
    digester = Digester(layout, tensors, algorithm=algorithm)
    before = [digester.digest(part) for part in range(len(layout.chunks))]
    index = data.draw(st.integers(0, len(layout.tensors) - 1))
    spec = layout.tensors[index]
    if spec.element_count == 0:
        return
    element = data.draw(st.integers(0, spec.element_count - 1))
    raw = tensors[spec.name].reshape(-1).view(torch.uint8)
    item = raw.numel() // spec.element_count
    byte = element * item + data.draw(st.integers(0, item - 1))
    flip = 1 << data.draw(st.integers(0, 7))
    raw[byte] ^= flip
    after = [digester.digest(part) for part in range(len(layout.chunks))]
    raw[byte] ^= flip
    changed = [part for part, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    holds = [
        part
        for part, chunk in enumerate(layout.chunks)
        if any(p.tensor == index and p.start <= element < p.stop for p in chunk.pieces)
    ]
    assert changed == holds


@pytest.mark.parametrize("algorithm", [XXH3_64, SUM64])
def test_swapped_tensors_and_elements_show(algorithm: str) -> None:
    specs = [TensorSpec(f"model/{i}", (9000,), "float32", Kind.WEIGHT) for i in range(2)]
    layout = plan_layout(specs)
    a, b = torch.arange(9000.0), torch.arange(9000.0).flip(0).contiguous()
    seen = {
        Digester(layout, {"model/0": x, "model/1": y}, algorithm=algorithm).digest(0)
        for x, y in ((a, b), (b, a), (a, a), (a.roll(4096), b), (a.roll(1), b))
    }
    assert len(seen) == 5


def test_sum64_does_not_depend_on_strides() -> None:
    layout, tensors = made(strided=True)
    straight = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for part in range(len(layout.chunks)):
        assert Digester(layout, tensors, algorithm=SUM64).digest(part) == Digester(
            layout, straight, algorithm=SUM64
        ).digest(part)


def test_new_storage_behind_a_parameter_is_read() -> None:
    layout, tensors = made()
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    digester = Digester(layout, parameters)
    for part in range(len(layout.chunks)):
        digester.digest(part)
    for name in ("model/float32.3", "model/float32.4"):
        parameters[name].data = parameters[name].data * 2
    want = expected(layout, {name: p.detach() for name, p in parameters.items()})
    assert [digester.digest(part) for part in range(len(layout.chunks))] == want


def test_other_tensors_than_the_layout_has_are_refused() -> None:
    layout, tensors = made()
    with pytest.raises(StateMismatchError, match=r"float32\.3"):
        Digester(layout, {**tensors, "model/float32.3": torch.zeros(7, 5)})
    with pytest.raises(StateMismatchError, match="absent"):
        Digester(layout, {})
    with pytest.raises(StateMismatchError, match="md5"):
        Digester(layout, tensors, algorithm="md5")


def test_window_closes_at_the_next_update() -> None:
    layout, tensors = made(chunk_bytes=16 << 10)
    reads = []

    def begun() -> int:
        reads.append(1)
        return 5 if len(reads) < 9 else 6

    digest = DigestWindow(begun, 5).weights(Digester(layout, tensors), first=2)
    want = expected(layout, tensors)
    # Two looks per chunk: the ninth falls before the fifth chunk, which is not begun.
    assert [part for part, value in enumerate(digest.values) if value is not None] == [2, 3, 4, 5]
    assert all(value in (None, want[part]) for part, value in enumerate(digest.values))
    assert not digest.complete


def test_window_that_closed_while_reading_gives_nothing() -> None:
    layout, tensors = made()
    counts = iter([5, 6, 6, 6])
    window = DigestWindow(lambda: next(counts), 5)
    assert window.read(Digester(layout, tensors), 0) is None
    assert not window.open


def test_window_disturbed_by_other_writes_gives_no_digest() -> None:
    layout, tensors = made()
    window = DigestWindow(lambda: 5, 5, lambda: False)
    assert set(window.weights(Digester(layout, tensors)).values) == {None}
    assert not window.undisturbed
    whole = DigestWindow(lambda: 5, 5, lambda: True)
    assert whole.weights(Digester(layout, tensors)).complete
    assert whole.undisturbed


def test_moments_rotate() -> None:
    specs = [
        TensorSpec("model/w", (64,), "float32", Kind.WEIGHT, "o:0"),
        TensorSpec("o/state/w/exp_avg", (64,), "float32", Kind.MOMENT1, "o:0"),
        TensorSpec("o/state/w/exp_avg_sq", (64,), "float32", Kind.MOMENT2, "o:0"),
    ]
    layout = plan_layout(specs)
    tensors = {spec.name: torch.ones(64) for spec in specs}
    parts = parts_of_kind(layout, ["moment1", "moment2"])
    assert parts == [1, 2]
    moment = DigestWindow(lambda: 1, 1).moment(Digester(layout, tensors), parts[1])
    assert moment == MomentDigest(layout.hash, 2, digest_layout(layout, tensors)[2])
    assert DigestWindow(lambda: 2, 1).moment(Digester(layout, tensors), 1) is None


def test_comparison() -> None:
    full = Digest(XXH3_64, "l", ("a", "b"), MomentDigest("s", 3, "m"))
    assert compare(full, full) == "match"
    assert compare(full, Digest(XXH3_64, "l", ("a", "b"))) == "match"
    assert compare(full, Digest(XXH3_64, "l", ("a", None))) == "partial"
    assert compare(full, Digest(XXH3_64, "l", ("x", None))) == "mismatch"
    assert compare(full, Digest(XXH3_64, "l", ("a", "b"), MomentDigest("s", 3, "x"))) == "mismatch"
    assert compare(full, Digest(XXH3_64, "l", ("a", "b"), MomentDigest("s", 4, "x"))) == "match"
    for other in (
        Digest(SUM64, "l", ("x", "y")),
        Digest(XXH3_64, "k", ("x", "y")),
        Digest(XXH3_64, "l", ("x",)),
    ):
        assert compare(full, other) == "partial"


def test_json_both_ways_and_damage() -> None:
    for digest in (
        Digest(XXH3_64, "l", ("a", None), MomentDigest("s", 3, "m")),
        Digest(SUM64, "l", ()),
    ):
        document = json.loads(json.dumps(digest.to_json()))
        assert Digest.from_json(document) == digest
        assert document["complete"] is digest.complete
    for damaged in (None, [], {}, {**document, "values": [1]}, {**document, "moment": 3}):
        with pytest.raises(FormatError, match="not a digest"):
            Digest.from_json(damaged)
