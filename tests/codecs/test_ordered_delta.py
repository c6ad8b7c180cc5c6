"""Ordered differences: exact for every bit pattern, with a reference and along an array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.frame import BLOCK_LOG2
from stepwell.codecs.ordered import WORDS, swap_order, undo_zigzag, zigzag
from stepwell.codecs.ordered_delta import OrderedDelta, decode_difference, encode_difference
from stepwell.codecs.testing import CodecContract, peak_bytes, state_like
from stepwell.errors import ConfigError, IntegrityError, UnsupportedValueError, UsageError
from stepwell.pipeline.layout import ITEM_BYTES

BLOCK = 1 << BLOCK_LOG2
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0, 5e-324, -5e-324, 1e-45, 3e38, -3e38]


class TestOrderedDeltaOfFloat32(CodecContract):
    itemsize = 4
    lengths = (4, 8, 8192 * 4 + 4, 4 * BLOCK - 4, 4 * BLOCK, 4 * BLOCK + 4, 16 * BLOCK + 8)

    def codec(self) -> OrderedDelta:
        return OrderedDelta("float32")


class TestOrderedDeltaOfBfloat16(CodecContract):
    itemsize = 2
    lengths = (2, 4, 2 * BLOCK, 2 * BLOCK + 2)

    def codec(self) -> OrderedDelta:
        return OrderedDelta("bfloat16", level=2)


class TestOrderedDeltaOfFloat64(CodecContract):
    itemsize = 8
    lengths = (8, 16, 8 * BLOCK + 8)

    def codec(self) -> OrderedDelta:
        return OrderedDelta("float64")


class TestOrderedDeltaOfUint8(CodecContract):
    lengths = (1, 2, BLOCK, BLOCK + 1)

    def codec(self) -> OrderedDelta:
        return OrderedDelta("uint8")


def test_every_dtype_that_can_be_saved_has_differences() -> None:
    assert set(WORDS) == set(ITEM_BYTES)
    for dtype, word in WORDS.items():
        assert ITEM_BYTES[dtype] == word.itemsize * (2 if dtype.startswith("complex") else 1)


@pytest.mark.parametrize("dtype", sorted(WORDS))
def test_any_bits_come_back_whatever_the_dtype(dtype: str) -> None:
    generator = np.random.default_rng(0)
    current, reference = generator.integers(0, 256, (2, 16 * 3000), np.uint8)
    assert np.array_equal(
        decode_difference(encode_difference(current, reference, dtype), reference, dtype), current
    )
    codec = OrderedDelta(dtype)
    assert np.array_equal(codec.decode(codec.encode(current)), current)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16"])
def test_every_pattern_of_16_bits_against_others(dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    codec = OrderedDelta(dtype)
    for shift in (0, 1, 0x7FFF, 0x8000, 0x8001, 12345):
        reference = np.roll(patterns, shift)
        frame = encode_difference(patterns, reference, dtype)
        assert np.array_equal(decode_difference(frame, reference, dtype).view(np.uint16), patterns)
        assert np.array_equal(codec.decode(codec.encode(reference)).view(np.uint16), reference)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_signed_zeros_payloads_and_infinities_stay(kind: type[np.float32] | type[np.float64]) -> None:
    with np.errstate(over="ignore"):
        values = np.array(SPECIAL, kind)
    bits = np.dtype(kind).itemsize * 8
    payloads = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFFFFFFFF], np.uint64) << (bits - 32)
    values = np.concatenate([values, payloads.astype(f"<u{bits // 8}").view(kind)])
    current, reference = np.repeat(values, values.size), np.tile(values, values.size)
    name = np.dtype(kind).name
    decoded = decode_difference(encode_difference(current, reference, name), reference, name)
    assert decoded.tobytes() == current.tobytes()
    assert OrderedDelta(name).decode(OrderedDelta(name).encode(reference)).tobytes() == reference.tobytes()


def test_ordered_integers_keep_the_order_of_floats() -> None:
    floats = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    floats = np.sort(floats[np.isfinite(floats) & (floats != 0)])
    ordered = np.empty(floats.size, np.int16)
    swap_order(floats.view(np.int16), ordered)
    assert (np.diff(ordered.astype(np.int32)) > 0).all()
    back = np.empty_like(ordered)
    swap_order(ordered, back)
    assert np.array_equal(back.view(np.float16), floats)


def test_zigzag_makes_small_numbers_of_either_sign_small() -> None:
    values = np.array([0, -1, 1, -2, 2, 127, -128], np.int8)
    coded, scratch = values.copy(), np.empty_like(values)
    zigzag(coded, scratch)
    assert coded.view(np.uint8).tolist() == [0, 1, 2, 3, 4, 254, 255]
    undo_zigzag(coded, scratch)
    assert np.array_equal(coded, values)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "float64", "int64", "float8_e5m2"]))
def test_any_two_buffers(data: st.DataObject, dtype: str) -> None:
    size = WORDS[dtype].itemsize * data.draw(st.integers(0, 60))
    current = data.draw(st.binary(min_size=size, max_size=size))
    reference = data.draw(st.binary(min_size=size, max_size=size))
    frame = encode_difference(current, reference, dtype)
    assert bytes(decode_difference(frame, reference, dtype)) == current


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 3])
def test_blocks_join_without_a_seam(count: int) -> None:
    reference = state_like(4 * count)
    current = (reference.view(np.float32) * np.float32(1.0001)).view(np.uint8)
    frame = encode_difference(current, reference, "float32")
    assert np.array_equal(decode_difference(frame, reference, "float32"), current)
    rising = np.arange(count, dtype=np.int32)
    codec = OrderedDelta("int32")
    encoded = codec.encode(rising)
    assert encoded.size < 2000 + count // 400  # every difference is 1, also across blocks
    assert np.array_equal(codec.decode(encoded).view(np.int32), rising)


def test_the_reference_is_moved_forward_in_place() -> None:
    reference = state_like(4 * (BLOCK + 100))
    current = np.roll(reference, 4)
    frame = encode_difference(current, reference, "float32")
    moved = decode_difference(frame, reference, "float32", reference)
    assert np.shares_memory(moved, reference)
    assert np.array_equal(reference, current)
    shifted = np.concatenate([current, current])
    with pytest.raises(UsageError, match="overlaps"):
        decode_difference(frame, shifted[: current.size], "float32", shifted[4 : current.size + 4])


def test_encoding_into_a_given_buffer() -> None:
    current, reference = state_like(4000), state_like(4000, 1)
    out = np.empty(OrderedDelta("float32").size_bytes_max(4000), np.uint8)
    frame = encode_difference(current, reference, "float32", out=out)
    assert np.shares_memory(frame, out)
    assert np.array_equal(frame, encode_difference(current, reference, "float32"))
    with pytest.raises(UsageError, match="overlaps"):
        encode_difference(out[:4000], reference, "float32", out=out)


def test_what_does_not_fit_together_is_refused() -> None:
    current, reference = state_like(400), state_like(400, 1)
    frame = encode_difference(current, reference, "float32")
    with pytest.raises(UsageError, match="reference has 396 bytes"):
        encode_difference(current, reference[:-4], "float32")
    with pytest.raises(IntegrityError, match="its reference has 396"):
        decode_difference(frame, reference[:-4], "float32")
    with pytest.raises(UnsupportedValueError, match="not whole elements"):
        encode_difference(current[:-1], reference[:-1], "float32")
    for wrong in ("int32", "bfloat16", "float64"):
        with pytest.raises(IntegrityError, match="is not a difference"):
            decode_difference(frame, reference, wrong)
    with pytest.raises(IntegrityError, match="is not a difference"):
        OrderedDelta("float32").decode(frame)
    with pytest.raises(IntegrityError, match="is not a difference"):
        decode_difference(OrderedDelta("float32").encode(current), reference, "float32")
    with pytest.raises(IntegrityError, match="is not a difference"):
        decode_difference(BytePlane(4).encode(current), reference, "float32")
    with pytest.raises(IntegrityError, match="does not belong"):
        BytePlane(4).decode(frame)
    with pytest.raises(IntegrityError, match="at most 399"):
        decode_difference(frame, reference, "float32", max_bytes=399)


def test_a_frame_larger_than_its_reference_is_refused_before_allocation() -> None:
    zeros = np.zeros(32 << 20, np.uint8)
    frame = encode_difference(zeros, zeros, "float32")
    assert peak_bytes(lambda: decode_difference(frame, zeros[:400], "float32")) < 100_000


@pytest.mark.parametrize("dtype", ["float33", "", "torch.float32", 4, None])
def test_an_unknown_dtype_is_refused(dtype: object) -> None:
    with pytest.raises(ConfigError, match="no difference is defined"):
        OrderedDelta(dtype)  # type: ignore[arg-type]


def test_a_named_reference_must_be_passed() -> None:
    codec = OrderedDelta("float32", reference="step 519")
    current, reference = state_like(400), state_like(400, 1)
    assert codec.get_config() == {
        "id": "stepwell.ordered_delta",
        "dtype": "float32",
        "level": 1,
        "reference": "step 519",
    }
    frame = codec.encode(current, reference)
    assert np.array_equal(codec.decode(frame, reference=reference), current)
    with pytest.raises(UsageError, match="step 519"):
        codec.encode(current)
    with pytest.raises(UsageError, match="step 519"):
        codec.decode(frame)
    with pytest.raises(ConfigError, match="reference"):
        OrderedDelta("float32", reference=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "ratio"), [("w", 1.55), ("m", 1.19), ("v", 1.4)])
def test_real_steps_differ_little(repository: Path, kind: str, ratio: float) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        names = [name for name in data.files if name.endswith(f"|{kind}")]
        one, two = (np.concatenate([data[name][step].reshape(-1) for name in names]) for step in (5, 6))
    frame = encode_difference(two, one, "float32")
    assert np.array_equal(decode_difference(frame, one, "float32"), two.view(np.uint8))
    assert two.nbytes / frame.size > ratio
