"""Linear blocks: what cannot be kept is stored as it is; signs stay; the bound holds for any bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.blocks import MAGIC
from stepwell.codecs.int4 import Int4
from stepwell.codecs.int8 import Int8
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.sections import compose, encode_section, read_composed
from stepwell.codecs.testing import peak_bytes, state_like
from stepwell.errors import ConfigError, FormatError, IntegrityError, UnsupportedValueError

BOTH = pytest.mark.parametrize("kind", [Int8, Int4])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _found(codec: Int8 | Int4, values: np.ndarray) -> np.ndarray:
    return codec.decode(codec.encode(values)).view(np.float32)


@BOTH
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_finite_values_stay_within_the_bound(kind: type[Int8 | Int4], data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
    drawn = data.draw(st.lists(st.one_of(FINITE, st.floats(-1, 1, width=32)), max_size=70))
    values = np.array([value if abs(value) > 1e18 else value * scale for value in drawn], np.float32)
    codec = kind(block=16)
    found = _found(codec, values)
    assert np.array_equal(np.signbit(found), np.signbit(values))
    assert np.isfinite(found).all()
    error = np.abs(found.astype(np.float64) - values)
    assert not values.size or error.max() <= codec.bound(values)
    normal = np.abs(found) >= np.finfo(np.float32).tiny
    raw = np.repeat(codec.bound(values) == 0, values.size)
    assert (normal | (found == 0) | (found == values) | raw).all()  # no denormal is made


@BOTH
@pytest.mark.parametrize(
    "bits",
    [0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x00800000],
    ids=["inf", "-inf", "nan", "payload", "denormal", "-denormal", "max", "smallest"],
)
def test_a_block_with_such_a_value_is_stored_as_it_is(kind: type[Int8 | Int4], bits: int) -> None:
    values = state_like(4 * 800).view(np.float32).copy()
    if bits == 0x00800000:
        values[256:512] = 0  # alone it is too small for a scale; beside others it is nothing special
    values.view(np.uint32)[300] = bits
    found = _found(kind(), values)
    assert found[256:512].tobytes() == values[256:512].tobytes()
    assert not np.array_equal(found[:256], values[:256])


@BOTH
def test_zeros_of_either_sign_come_back_bit_for_bit(kind: type[Int8 | Int4]) -> None:
    values = state_like(4 * 600).view(np.float32).copy()
    values[::3], values[1::3] = 0.0, -0.0
    found = _found(kind(), values)
    for start in (0, 1):
        assert found[start::3].tobytes() == values[start::3].tobytes()
    zeros = np.array([0.0, -0.0] * 300, np.float32)
    assert _found(kind(), zeros).tobytes() == zeros.tobytes()
    assert kind().bound(zeros) == 0.0


@BOTH
def test_a_value_that_rounds_to_zero_keeps_its_sign(kind: type[Int8 | Int4]) -> None:
    values = np.full(256, -1e-6, np.float32)
    values[0], values[1] = 1.0, 1e-6
    found = _found(kind(), values)
    assert not found[1:].any()
    assert np.signbit(found[2:]).all()
    assert not np.signbit(found[1])


def test_every_bfloat16_pattern_keeps_class_and_sign() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for codec in (Int8("bfloat16", block=16), Int4("bfloat16", block=16), LogQuant("bfloat16", block=16)):
        found = codec.decode(codec.encode(patterns)).view(np.uint16)
        assert np.array_equal(found >> 15, patterns >> 15)
        special = (patterns & 0x7F80 == 0x7F80) | (patterns & 0x7F80 == 0)
        assert np.array_equal(found[special], patterns[special])


@BOTH
def test_wrong_parameters_are_refused(kind: type[Int8 | Int4]) -> None:
    for dtype in ("float16", "float64", "int8", "", None, 4):
        with pytest.raises(ConfigError, match="dtype"):
            kind(dtype)  # type: ignore[arg-type]
    for block in (0, 8, 100, 8192, -256, 256.0, True, None, "256"):
        with pytest.raises(ConfigError, match="block"):
            kind(block=block)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="level"):
        kind(level=0)
    with pytest.raises(UnsupportedValueError, match="whole elements"):
        kind().encode(bytes(6))


@BOTH
def test_a_frame_of_another_codec_or_configuration_is_refused(kind: type[Int8 | Int4]) -> None:
    frame = kind().encode(state_like(4000))
    others = [kind("bfloat16"), kind(block=64), Int4() if kind is Int8 else Int8()]
    for other in others:
        with pytest.raises(IntegrityError, match="does not belong"):
            other.decode(frame)
    with pytest.raises(FormatError, match="kind 1"):
        LogQuant().decode(frame)


@BOTH
@pytest.mark.parametrize("claim", [1 << 40, (1 << 64) - 4, 1 << 26])
def test_a_frame_that_claims_a_terabyte_is_refused_before_allocation(
    kind: type[Int8 | Int4], claim: int
) -> None:
    frame = kind().encode(state_like(4000)).tobytes()
    claiming = frame[:8] + claim.to_bytes(8, "little") + frame[16:]
    with pytest.raises(IntegrityError):
        kind().decode(claiming)
    assert peak_bytes(lambda: kind().decode(claiming)) < 100_000


@BOTH
def test_damage_in_a_section_is_found_where_it_shows(kind: type[Int8 | Int4]) -> None:
    codec = kind()
    frame = read_composed(codec.encode(state_like(4 * 512)), MAGIC, {1: (3, 4)})
    marks, codes, raw = frame.sections
    for scale in (np.inf, -1.0, 3e38, 1e-40):
        wrong = encode_section(np.array([1.0, scale], np.float32), 1)
        with pytest.raises(IntegrityError, match="impossible"):
            codec.decode(compose(MAGIC, 1, 4 * 512, frame.parameters, [wrong, codes, raw]))
    one_raw = encode_section(np.array([1.0, np.nan], np.float32), 1)
    for sections, match in (
        ([one_raw, codes, raw], "raw blocks"),
        ([marks, codes, encode_section(np.zeros(256, np.float32), 1)], "raw blocks"),
        ([marks, raw, raw], "codes"),
        ([raw, codes, raw], "blocks"),
        ([marks, encode_section(np.zeros(1 << 20, np.uint8), 1), raw], "codes"),
        ([marks, b"", raw], "codes"),
        ([codes, codes, raw], "blocks"),
    ):
        parts = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in sections]
        with pytest.raises(IntegrityError, match=f"{match}|frame of byte planes"):
            codec.decode(compose(MAGIC, 1, 4 * 512, frame.parameters, parts))
