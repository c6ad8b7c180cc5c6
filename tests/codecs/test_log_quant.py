"""Logarithmic steps: zeros stay zeros, nothing else becomes one, and the error of log2 is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.blocks import MAGIC
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.sections import compose, encode_section, read_composed
from stepwell.codecs.testing import LossyContract, peak_bytes
from stepwell.errors import ConfigError, IntegrityError

TINY = float(np.finfo(np.float32).tiny)


class TestLogQuantOfFloat32(LossyContract):
    lengths = (4, 4 * 255, 4 * 256, 4 * 257, 4 * 32768 + 4)

    def codec(self) -> LogQuant:
        return LogQuant(block=16)

    def error(self, found: npt.NDArray[np.float64], true: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return _log_error(found, true)

    def test_a_bound_is_stated_for_every_input(self) -> None:
        assert LogQuant().bound(b"") == 0.0
        assert LogQuant().bound(-np.ones(300, np.float32)) == 0.0  # stored as it is
        assert LogQuant().bound(_moments(300)) > 0


def _moments(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.square(np.random.default_rng(seed).standard_normal(count, np.float32)) * np.float32(1e-7)


def _log_error(found: npt.NDArray[np.float64], true: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    positive = true > 0
    error = np.where(found == true, 0.0, np.inf)
    error[positive] = np.abs(np.log2(found[positive]) - np.log2(true[positive]))
    return error


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bits=st.sampled_from([8, 4]))
def test_any_values_keep_their_zeros_and_the_bound(data: st.DataObject, bits: int) -> None:
    top = data.draw(st.sampled_from([2.0**-100, 1.0, 2.0**127]))
    value = st.one_of(st.just(0.0), st.floats(TINY, top, width=32))
    values = np.array(data.draw(st.lists(value, max_size=70)), np.float32)
    codec = LogQuant(bits=bits, block=16)
    found = codec.decode(codec.encode(values)).view(np.float32)
    assert np.array_equal(found == 0, values == 0)
    assert not np.signbit(found).any()
    assert np.isfinite(found).all()
    assert (found[values > 0] >= TINY).all()
    error = _log_error(found.astype(np.float64), values.astype(np.float64))
    assert not values.size or error.max() <= codec.bound(values)


@pytest.mark.parametrize("bits", [8, 4])
def test_bfloat16_moments_too(bits: int) -> None:
    values = (_moments(5000).view(np.uint32) >> 16).astype(np.uint16)
    values[::7] = 0
    codec = LogQuant("bfloat16", bits)
    found = codec.decode(codec.encode(values)).view(np.uint16)
    assert np.array_equal(found == 0, values == 0)
    wide, true = (
        (side.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for side in (found, values)
    )
    assert _log_error(wide, true).max() <= codec.bound(values)


@pytest.mark.parametrize("bad", [-1.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40])
def test_a_block_with_such_a_value_is_stored_as_it_is(bad: float) -> None:
    values = _moments(800)
    values[300] = bad
    codec = LogQuant()
    found = codec.decode(codec.encode(values)).view(np.float32)
    assert found[256:512].tobytes() == values[256:512].tobytes()
    assert not np.array_equal(found[:256], values[:256])


def test_the_widest_range_stays_finite_and_normal() -> None:
    values = np.geomspace(TINY, np.finfo(np.float32).max, 256).astype(np.float32)
    values[0], values[-1] = TINY, np.finfo(np.float32).max
    for bits in (8, 4):
        codec = LogQuant(bits=bits, block=256)
        found = codec.decode(codec.encode(values)).view(np.float32)
        assert np.isfinite(found).all()
        assert (found >= TINY).all()
        assert np.abs(np.log2(found) - np.log2(values)).max() <= codec.bound(values)


def test_equal_values_take_nothing_and_come_back_near() -> None:
    values = np.full(1 << 16, 3.25e-9, np.float32)
    codec = LogQuant()
    frame = codec.encode(values)
    assert frame.size < 300
    found = codec.decode(frame).view(np.float32)
    assert np.abs(np.log2(found / values)).max() <= codec.bound(values) < 0.01


def test_wrong_parameters_are_refused() -> None:
    for bits in (0, 2, 16, 8.0, "8", None, True):
        with pytest.raises(ConfigError, match="bits"):
            LogQuant(bits=bits)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block"):
        LogQuant(block=100)
    with pytest.raises(ConfigError, match="dtype"):
        LogQuant("float64")
    assert (LogQuant(bits=8).block, LogQuant(bits=4).block) == (256, 64)


def test_impossible_ranges_and_claims_are_refused() -> None:
    codec = LogQuant()
    frame = codec.encode(_moments(512))
    parts = read_composed(frame, MAGIC, {2: (3, 4)})
    for mark in (0x00000001, 0x0001007F, 0x7F000081, 0x00008000, 0x00010000):
        marks = encode_section(np.array([mark, mark], np.uint32), 1)
        with pytest.raises(IntegrityError, match="impossible"):
            codec.decode(compose(MAGIC, 2, 2048, parts.parameters, [marks, *parts.sections[1:]]))
    claiming = frame.tobytes()[:8] + (1 << 40).to_bytes(8, "little") + frame.tobytes()[16:]
    assert peak_bytes(lambda: codec.decode(claiming)) < 100_000
    with pytest.raises(IntegrityError):
        codec.decode(claiming)


@pytest.mark.parametrize(("bits", "ratio", "error"), [(8, 4.0, 0.007), (4, 7.5, 0.1)])
def test_real_second_moments(repository: Path, bits: int, ratio: float, error: float) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        names = [name for name in data.files if name.endswith("|v")]
        moments = np.concatenate([data[name][5].reshape(-1) for name in names])
    codec = LogQuant(bits=bits)
    frame = codec.encode(moments)
    found = codec.decode(frame).view(np.float32)
    assert moments.nbytes / frame.size > ratio
    differences = _log_error(found.astype(np.float64), moments.astype(np.float64))
    assert differences.max() <= codec.bound(moments)
    assert np.sqrt(np.mean(differences**2)) < error
