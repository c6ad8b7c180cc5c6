"""Stored layouts come back equal, and hostile ones are refused although their hash is right."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import xxhash

from stepwell.errors import FormatError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import plan_layout


def layout() -> Layout:
    specs = [
        TensorSpec("model/a", (1000, 64), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/b", (3,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/empty", (0, 2), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/c", (), "bfloat16", Kind.AUX),
    ]
    return plan_layout(specs, chunk_bytes=64 << 10)


def test_a_stored_layout_comes_back_equal() -> None:
    planned = layout()
    assert Layout.decode(planned.encoded, planned.hash) == planned


def test_flipped_byte_of_a_layout_is_found() -> None:
    planned = layout()
    damaged = bytearray(planned.encoded)
    damaged[10] ^= 1
    with pytest.raises(FormatError, match="checksum"):
        Layout.decode(bytes(damaged), planned.hash)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["chunks"][0].__setitem__(2, 1 << 40),
        lambda d: d["chunks"][0][4][0].__setitem__(2, 1 << 40),
        lambda d: d["chunks"][0][4][0].__setitem__(1, -64),
        lambda d: d["chunks"][0][4][0].__setitem__(0, 99),
        lambda d: d["chunks"][-1][4][0].__setitem__(3, 1 << 20),
        lambda d: d["chunks"].pop(),
        lambda d: d["chunks"].reverse(),
        lambda d: d.__setitem__("size_bytes", 1),
        lambda d: d["tensors"][0].__setitem__(1, [1 << 40]),
        lambda d: d.__setitem__("format", 2),
        lambda d: d.pop("tensors"),
    ],
)
def test_layout_that_points_outside_is_refused(change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads(layout().encoded)
    change(document)
    data = json.dumps(document).encode()
    with pytest.raises(FormatError):
        Layout.decode(data, xxhash.xxh3_128_hexdigest(data))
