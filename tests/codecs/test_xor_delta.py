"""Bitwise differences: exact for every dtype, with a reference and along an array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.frame import BLOCK_LOG2
from stepwell.codecs.ordered import WORDS
from stepwell.codecs.ordered_delta import OrderedDelta, encode_difference
from stepwell.codecs.testing import CodecContract, peak_bytes, state_like
from stepwell.codecs.xor_delta import XorDelta, decode_xor, encode_xor
from stepwell.errors import ConfigError, IntegrityError, UnsupportedValueError, UsageError

BLOCK = 1 << BLOCK_LOG2


class TestXorDeltaOfFloat32(CodecContract):
    itemsize = 4
    lengths = (4, 8, 8192 * 4 + 4, 4 * BLOCK - 4, 4 * BLOCK, 4 * BLOCK + 4, 16 * BLOCK + 8)

    def codec(self) -> XorDelta:
        return XorDelta("float32")


@pytest.mark.parametrize("dtype", sorted(WORDS))
def test_any_bits_come_back_whatever_the_dtype(dtype: str) -> None:
    current, reference = np.random.default_rng(0).integers(0, 256, (2, 16 * 3000), np.uint8)
    assert np.array_equal(decode_xor(encode_xor(current, reference, dtype), reference, dtype), current)
    codec = XorDelta(dtype)
    assert np.array_equal(codec.decode(codec.encode(current)), current)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "float64", "bool", "complex128"]))
def test_any_two_buffers(data: st.DataObject, dtype: str) -> None:
    size = WORDS[dtype].itemsize * data.draw(st.integers(0, 60))
    current = data.draw(st.binary(min_size=size, max_size=size))
    reference = data.draw(st.binary(min_size=size, max_size=size))
    assert bytes(decode_xor(encode_xor(current, reference, dtype), reference, dtype)) == current


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 3])
def test_blocks_join_without_a_seam(count: int) -> None:
    flat = np.full(count, 0x3F812345, np.uint32)
    encoded = XorDelta("float32").encode(flat)
    assert encoded.size < 1000 + count // 100  # every difference but the first is 0, also across blocks
    assert np.array_equal(XorDelta("float32").decode(encoded).view(np.uint32), flat)


def test_the_reference_is_moved_forward_in_place() -> None:
    reference = state_like(4 * (BLOCK + 100))
    current = np.roll(reference, 4)
    frame = encode_xor(current, reference, "float32")
    moved = decode_xor(frame, reference, "float32", reference)
    assert np.shares_memory(moved, reference)
    assert np.array_equal(reference, current)


def test_encoding_into_a_given_buffer() -> None:
    current, reference = state_like(4000), state_like(4000, 1)
    out = np.empty(XorDelta("float32").size_bytes_max(4000), np.uint8)
    frame = encode_xor(current, reference, "float32", out=out)
    assert np.shares_memory(frame, out)
    assert np.array_equal(frame, encode_xor(current, reference, "float32"))
    with pytest.raises(UsageError, match="overlaps"):
        encode_xor(out[:4000], reference, "float32", out=out)


def test_what_does_not_fit_together_is_refused() -> None:
    current, reference = state_like(400), state_like(400, 1)
    frame = encode_xor(current, reference, "float32")
    with pytest.raises(UsageError, match="reference has 396 bytes"):
        encode_xor(current, reference[:-4], "float32")
    with pytest.raises(IntegrityError, match="its reference has 396"):
        decode_xor(frame, reference[:-4], "float32")
    with pytest.raises(UnsupportedValueError, match="not whole elements"):
        encode_xor(current[:-1], reference[:-1], "float32")
    for wrong in (XorDelta("float32"), OrderedDelta("float32")):
        with pytest.raises(IntegrityError, match="is not a difference"):
            wrong.decode(frame)
    with pytest.raises(IntegrityError, match="is not a difference"):
        decode_xor(encode_difference(current, reference, "float32"), reference, "float32")
    with pytest.raises(ConfigError, match="no difference is defined"):
        XorDelta("float33")
    named = XorDelta("float32", reference="step 519")
    assert named.get_config()["reference"] == "step 519"
    with pytest.raises(UsageError, match="step 519"):
        named.encode(current)
    assert np.array_equal(named.decode(named.encode(current, reference), reference=reference), current)


def test_a_frame_larger_than_its_reference_is_refused_before_allocation() -> None:
    zeros = np.zeros(32 << 20, np.uint8)
    frame = encode_xor(zeros, zeros, "float32")
    assert peak_bytes(lambda: decode_xor(frame, zeros[:400], "float32")) < 100_000


@pytest.mark.parametrize(("kind", "ratio"), [("w", 1.5), ("m", 1.18), ("v", 1.35)])
def test_real_steps_differ_little(repository: Path, kind: str, ratio: float) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        names = [name for name in data.files if name.endswith(f"|{kind}")]
        one, two = (np.concatenate([data[name][step].reshape(-1) for name in names]) for step in (5, 6))
    frame = encode_xor(two, one, "float32")
    assert np.array_equal(decode_xor(frame, one, "float32"), two.view(np.uint8))
    assert two.nbytes / frame.size > ratio
