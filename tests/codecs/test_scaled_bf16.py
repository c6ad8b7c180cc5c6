"""Clipped bfloat16 gradients at eleven bits, and every bit of anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.scaled_bf16 import MAGIC, ScaledBf16, factor_of
from stepwell.codecs.sections import compose, encode_section, read_composed
from stepwell.codecs.testing import CodecContract, peak_bytes, state_like
from stepwell.errors import ConfigError, FormatError, IntegrityError, UnsupportedValueError

FACTOR = np.float32(0.3711234)


class TestScaledBf16(CodecContract):
    itemsize = 4
    lengths = (4, 4096, 4 * 1025, 4 * 32768, 4 * 32769, 4 * 200_001)

    def codec(self) -> ScaledBf16:
        return ScaledBf16()


def _gradient(count: int, seed: int = 0, factor: np.float32 = FACTOR) -> npt.NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(1e-3)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32) * factor


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 32768, 32769, 300_000])
@pytest.mark.parametrize("factor", [FACTOR, np.float32(1), np.float32(2.0**-9), np.float32(0.99999994)])
def test_bfloat16_values_times_a_factor_take_their_own_bits(count: int, factor: np.float32) -> None:
    values = _gradient(count, factor=factor)
    frame = ScaledBf16().encode(values)
    assert ScaledBf16().decode(frame).tobytes() == values.tobytes()
    if count > 10_000:
        assert 8 * frame.size < 11.6 * count
        found = factor_of(frame)
        assert found is not None
        assert np.frexp(found)[0] == np.frexp(factor)[0] or factor == 2.0**-9


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bits_among_them_come_back(data: st.DataObject) -> None:
    values = _gradient(data.draw(st.integers(1, 5000)), seed=3)
    bits = values.view(np.uint32)
    for _ in range(data.draw(st.integers(0, 8))):
        bits[data.draw(st.integers(0, bits.size - 1))] = data.draw(st.integers(0, (1 << 32) - 1))
    assert ScaledBf16().decode(ScaledBf16().encode(values)).tobytes() == values.tobytes()


@pytest.mark.parametrize("factor", [FACTOR, np.float32(1)])
def test_special_values_come_back_bit_for_bit(factor: np.float32) -> None:
    values = _gradient(20_000, factor=factor)
    special = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 1, 0x80000001, 0x7F7FFFFF, 0xFFFFFFFF],
        np.uint32,
    )
    values.view(np.uint32)[5000:15000:1000] = special
    frame = ScaledBf16().encode(values)
    assert factor_of(frame) is not None
    assert ScaledBf16().decode(frame).tobytes() == values.tobytes()


def test_a_tensor_summed_in_float32_beside_others_costs_only_itself() -> None:
    values = _gradient(64 * 1024)
    values[16 * 1024 : 32 * 1024] = state_like(4 * 16 * 1024).view(np.float32)
    frame = ScaledBf16().encode(values)
    assert factor_of(frame) is not None
    assert ScaledBf16().decode(frame).tobytes() == values.tobytes()
    assert 8 * frame.size / values.size < 0.75 * 11.6 + 0.25 * 28


def test_other_gradients_are_stored_as_byte_planes() -> None:
    for values in (state_like(4 * 100_000), np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)):
        frame = ScaledBf16().encode(values)
        assert factor_of(frame) is None
        assert np.array_equal(ScaledBf16().decode(frame), values)
        assert frame.size <= BytePlane(4).encode(values).size + 24
        assert frame.size < 1.005 * values.size


def test_the_factor_of_one_chunk_is_the_hint_of_the_next() -> None:
    frame = ScaledBf16().encode(_gradient(20_000))
    hint = factor_of(frame)
    second = _gradient(20_000, seed=1)
    assert np.array_equal(ScaledBf16().encode(second, hint=hint), ScaledBf16().encode(second))
    for wrong in (0.5, 1.0, -1.0, float("nan"), 3e38):
        again = ScaledBf16().encode(second, hint=wrong)
        assert ScaledBf16().decode(again).tobytes() == second.tobytes()
        assert 8 * again.size < 11.6 * second.size


def test_the_bound_on_the_size_holds() -> None:
    for count in (0, 1, 1000, 5000, 70_000):
        mixed = _gradient(count)
        mixed[: count // 2] = state_like(4 * (count // 2)).view(np.float32)
        for values in (_gradient(count), mixed, state_like(4 * count)):
            assert ScaledBf16().encode(values).size <= ScaledBf16().size_bytes_max(4 * count)


def test_wrong_input_and_configuration_are_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="whole elements"):
        ScaledBf16().encode(bytes(7))
    with pytest.raises(ConfigError, match="level"):
        ScaledBf16(level=77)
    with pytest.raises(FormatError, match="not a frame"):
        ScaledBf16().decode(BytePlane(4).encode(state_like(400)))
    with pytest.raises(IntegrityError):
        factor_of(b"SWBF")


@pytest.mark.parametrize("claim", [1 << 40, (1 << 64) - 4, 1 << 26, 4001])
@pytest.mark.parametrize("values", [_gradient(1000), state_like(4000)], ids=["scaled", "plain"])
def test_a_frame_that_claims_a_terabyte_is_refused_before_allocation(
    claim: int, values: npt.NDArray[np.generic]
) -> None:
    frame = ScaledBf16().encode(values).tobytes()
    claiming = frame[:8] + claim.to_bytes(8, "little") + frame[16:]
    with pytest.raises(IntegrityError):
        ScaledBf16().decode(claiming)
    assert peak_bytes(lambda: ScaledBf16().decode(claiming)) < 100_000


def test_damage_in_a_section_is_found() -> None:
    frame = read_composed(ScaledBf16().encode(_gradient(3000)), MAGIC, {1: (3, 4)})
    halves, flags, raw = frame.sections
    codec = ScaledBf16()
    for factor in (0.0, -1.0, float("nan"), float("inf"), 1e-40):
        parameters = np.array([factor], "<f4").tobytes()
        with pytest.raises(IntegrityError, match="its factor is"):
            codec.decode(compose(MAGIC, 1, 12_000, parameters, frame.sections))
    for wrong in (8, 255):
        flagged = encode_section(np.array([wrong], np.uint8), 1)
        with pytest.raises(IntegrityError, match="does not have"):
            codec.decode(compose(MAGIC, 1, 12_000, frame.parameters, [halves, flagged, raw]))
    flagged = encode_section(np.array([4], np.uint8), 1)
    for sections in ([halves, flagged, raw], [flags, flags, raw], [halves, raw, raw], [raw, flags, raw]):
        with pytest.raises(IntegrityError):
            codec.decode(compose(MAGIC, 1, 12_000, frame.parameters, sections))
    last = encode_section(np.arange(3000 - 2048, dtype=np.uint32), 1)  # a short block stored as it is
    decoded = codec.decode(compose(MAGIC, 1, 12_000, frame.parameters, [halves, flagged, last]))
    assert decoded.view(np.uint32)[2048:].tolist() == list(range(3000 - 2048))


def test_real_gradients_computed_in_bfloat16(repository: Path) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        raw = data["h.0.qkv.weight|g"][5].reshape(-1)
    rounded = ((raw.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    for factor in (np.float32(1), FACTOR):
        frame = ScaledBf16().encode(rounded * factor)
        assert ScaledBf16().decode(frame).tobytes() == (rounded * factor).tobytes()
        assert 8 * frame.size / raw.size < 12
