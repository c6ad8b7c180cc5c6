"""Only our own codecs are made from what a manifest says."""

from __future__ import annotations

import pytest

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.codebook import Codebook
from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.registry import CODECS, codec_from
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.xxh3 import Xxh3
from stepwell.errors import IntegrityError


def test_our_codecs_are_made() -> None:
    assert codec_from({"id": "stepwell.byteplane", "itemsize": 2, "level": 3}) == BytePlane(2, 3)
    assert codec_from({"id": "stepwell.ordered_delta", "dtype": "float32"}) == OrderedDelta("float32")
    assert codec_from({"id": "stepwell.xxh3"}) == Xxh3()
    assert codec_from({"id": "stepwell.codebook", "block": 64}) == Codebook(64)
    sparse = codec_from({"id": "stepwell.threshold_sparse", "rate": 0.1, "values": "int8"})
    assert sparse == ThresholdSparse(0.1, "int8")
    assert all(codec_id.startswith("stepwell.") for codec_id in CODECS)


@pytest.mark.parametrize(
    "config",
    [
        {"id": "zstd", "level": 1},
        {"id": "pickle"},
        {"id": "stepwell.unknown"},
        {"id": None},
        {"id": ["stepwell.xxh3"]},
        {},
        [],
        "stepwell.xxh3",
        None,
        {"id": "stepwell.byteplane"},
        {"id": "stepwell.byteplane", "itemsize": 0},
        {"id": "stepwell.byteplane", "itemsize": "4"},
        {"id": "stepwell.byteplane", "itemsize": 4, "shuffle": True},
        {"id": "stepwell.byteplane", "itemsize": 4, 3: 4},
        {"id": "stepwell.ordered_delta", "dtype": "float32", "level": 99},
        {"id": "stepwell.ordered_delta", "dtype": ["float32"]},
        {"id": "stepwell.xxh3", "seed": 1},
    ],
    ids=repr,
)
def test_anything_else_is_refused(config: object) -> None:
    with pytest.raises(IntegrityError):
        codec_from(config)  # type: ignore[arg-type]
