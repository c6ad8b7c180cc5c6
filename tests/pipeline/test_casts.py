"""Casts are the rounding of IEEE 754 on every bit pattern, and an index cannot lead a reader in circles."""

from __future__ import annotations

import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.casts import (
    DERIVED,
    CastRun,
    cast_into,
    cast_runs,
    cast_sources,
    check_casts,
    is_cast,
    rest_of,
)
from stepwell.pipeline.pack_format import PackRow

SPECIAL = [
    *(0, 1, 0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x7F7F7FFF, 0x00008000, 0x00018000),
    *(0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33800000, 0x387FE000, 0x38800000),
    *(0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F80FFFF),
]
words = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))


def cast(bits: list[int], dtype: str) -> list[int]:
    source = np.array(bits, np.uint32).view(np.uint8)
    out = np.full(source.nbytes // 2, 0xEE, np.uint8)
    cast_into(source, out, dtype)
    assert is_cast(source, out, dtype)
    return out.view(np.uint16).tolist()


def bfloat16_of(bits: int) -> int:
    """Round by exact fractions: the nearer of two neighbours, the even one where both are as near."""
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return bits >> 16 | 0x40
    if magnitude == 0x7F800000:
        return bits >> 16
    low = magnitude >> 16
    value, below = (_fraction(pattern) for pattern in (magnitude, low << 16))
    # The value that would follow the largest finite one stands for infinity.
    above = _fraction(low + 1 << 16) if low + 1 < 0x7F80 else Fraction(2) ** 128
    near = low if value - below < above - value else low + 1
    if value - below == above - value:
        near = low + low % 2
    return sign >> 16 | near


def _fraction(bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def float16_of(bits: int) -> int:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    if value != value:
        return bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x1FF
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return bits >> 16 & 0x8000 | 0x7C00


@given(st.lists(words, min_size=1, max_size=60))
@settings(max_examples=100)
def test_bfloat16_is_rounded_to_the_nearest(bits: list[int]) -> None:
    assert cast(bits, "bfloat16") == [bfloat16_of(one) for one in bits]


@given(st.lists(words, min_size=1, max_size=60))
@settings(max_examples=100)
def test_float16_is_rounded_to_the_nearest(bits: list[int]) -> None:
    assert cast(bits, "float16") == [float16_of(one) for one in bits]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_rounds_the_same_way(dtype: str) -> None:
    """What a training copies from its masters; beyond one block."""
    values = torch.randn(70_001) * torch.randn(70_001).exp()
    found = np.empty(2 * values.numel(), np.uint8)
    cast_into(values.numpy().view(np.uint8), found, dtype)
    wanted = values.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    assert np.array_equal(found, wanted)


@given(st.integers(0, 70_000), st.integers(0, 15))
@settings(max_examples=25)
def test_one_other_bit_is_no_cast(place: int, bit: int) -> None:
    source = np.zeros(4 * 70_001, np.uint8)
    wanted = np.zeros(70_001, np.uint16)
    wanted[place] = 1 << bit
    assert not is_cast(source, wanted.view(np.uint8), "bfloat16")


def test_flushed_denormals_change_nothing() -> None:
    assert torch.set_flush_denormal(True)
    try:
        assert cast([0x00018000, 0x80000001], "bfloat16") == [2, 0x8000]
        assert cast([0x33000001, 0x387FE000], "float16") == [1, 0x0400]
    finally:
        torch.set_flush_denormal(False)


def test_the_rest_is_what_lies_in_no_run() -> None:
    runs = [CastRun(0, 0, 4, 3), CastRun(0, 12, 10, 1), CastRun(1, 0, 20, 2)]
    assert rest_of(runs, 30) == [slice(0, 4), slice(12, 20), slice(24, 30)]
    assert rest_of([CastRun(0, 0, 0, 4)], 8) == []


# What an index may say.


def row(part: int, dtype: str = "float32", size: int = 64, *casts: list[int]) -> PackRow:
    encoding = {"id": DERIVED, "dtype": dtype, "casts": list(casts), "xxh3": "0" * 16}
    encodings = (encoding,) if casts else ()
    return PackRow(f"state/{part}", Kind.WEIGHT, -1, part, "layout", dtype, size, 64, 0, "0" * 16, encodings)


SOURCE = row(0, "float32", 64)
COPY = row(1, "bfloat16", 32, [0, 0, 0, 16])


def test_a_cast_of_what_comes_before_it_is_taken() -> None:
    check_casts([SOURCE, COPY], "pack")
    assert cast_sources(COPY.encodings) == {0}
    assert cast_sources(SOURCE.encodings) == set()


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([COPY], IntegrityError, "'state/0', which is not there"),
        ([COPY, SOURCE], FormatError, "does not come before it"),
        ([row(1, "bfloat16", 32, [1, 0, 0, 16])], FormatError, "does not come before it"),
        ([SOURCE, COPY, row(2, "bfloat16", 32, [1, 0, 0, 16])], FormatError, "not what it would need"),
        ([row(0, "float32", 60), COPY], FormatError, "not what it would need"),
        ([replace(SOURCE, layout="other"), COPY], FormatError, "not what it would need"),
        ([row(0, "int32"), COPY], FormatError, "not what it would need"),
        ([SOURCE, row(1, "bfloat16", 30, [0, 0, 0, 16])], FormatError, "cannot be a cast"),
        ([SOURCE, row(1, "float32", 64, [0, 0, 0, 16])], FormatError, "cannot be a cast"),
        ([SOURCE, replace(COPY, key="aux/1")], FormatError, "cannot be a cast"),
        ([SOURCE, row(1, "bfloat16", 1 << 30, [0, 0, 0, 16])], FormatError, "less than a half"),
        ([SOURCE, replace(COPY, encodings=COPY.encodings * 2)], FormatError, "does not say of what"),
        (
            [SOURCE, replace(COPY, encodings=({"id": "stepwell.byteplane"}, *COPY.encodings))],
            FormatError,
            "does not say of what",
        ),
        ([SOURCE, replace(COPY, encodings=({"id": DERIVED},))], FormatError, "does not say of what"),
    ],
)
def test_what_cannot_be_is_refused(rows: list[PackRow], error: type[IntegrityError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        check_casts(rows, "pack")
    assert type(raised.value) is error


def test_no_chain_of_casts_is_followed() -> None:
    """Each of a thousand names the next: refused by the first, not walked along."""
    rows = [row(part, "bfloat16", 32, [part + 1, 0, 0, 16]) for part in range(1000)]
    with pytest.raises(FormatError, match="'state/0' is a cast of 'state/1'"):
        check_casts(rows, "pack")


numbers = st.one_of(st.integers(-2, 70), st.sampled_from([2**31, 2**53 + 2, 2**64, 1.0, True, None, "0"]))
listed = st.one_of(st.lists(st.one_of(st.lists(numbers, max_size=5), numbers), max_size=4), numbers)


@given(listed, st.integers(0, 200))
@settings(max_examples=200)
def test_whatever_an_encoding_says_is_checked(casts: object, raw_bytes: int) -> None:
    encoding = {"id": DERIVED, "dtype": "bfloat16", "casts": casts}
    copy = replace(COPY, raw_bytes=raw_bytes, encodings=(encoding,))
    try:
        check_casts([SOURCE, copy], "pack")
    except IntegrityError:
        return
    runs = cast_runs(encoding)
    assert runs is not None
    end = 0
    for run in runs:
        assert run.part == 0
        assert 0 <= run.there <= 64 - 4 * run.count
        assert end <= run.here <= raw_bytes - 2 * run.count
        end = run.stop
