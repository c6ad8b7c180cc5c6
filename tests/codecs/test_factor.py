"""The factor of clipped bfloat16 values is found to its last bit, and not where there is none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.factor import find_factor


def bfloat16_values(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(1e-3)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def _significand(factor: np.float32 | float) -> float:
    return float(np.frexp(factor)[0])


@settings(max_examples=80, deadline=None)
@given(factor=st.floats(2.0**-20, 4, width=32), seed=st.integers(0, 1 << 30), count=st.integers(400, 3000))
def test_any_factor_is_found(factor: float, seed: int, count: int) -> None:
    values = bfloat16_values(count, seed) * np.float32(factor)
    found = find_factor(values)
    assert found is not None
    quotients = values / found
    bits = (quotients.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    assert np.array_equal(bits.view(np.float32) * found, values)


def test_the_hint_decides_the_exponent_and_saves_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    values = bfloat16_values(4000) * np.float32(0.3711234)
    for hint in (0.7, 0.02, 3.0):
        found = find_factor(values, hint)
        assert found is not None
        assert _significand(found) == _significand(np.float32(0.3711234))
        assert np.frexp(found)[1] == np.frexp(hint)[1]
    monkeypatch.setattr("stepwell.codecs.factor._search", lambda samples: pytest.fail("searched"))
    assert find_factor(values, float(np.float32(0.3711234))) == np.float32(0.3711234)
    assert find_factor(bfloat16_values(4000), 0.3711234) == 1


@pytest.mark.parametrize("hint", [0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e38])
def test_a_useless_hint_is_ignored(hint: float) -> None:
    values = bfloat16_values(4000) * np.float32(0.3711234)
    assert find_factor(values, hint) == find_factor(values)


def test_where_there_is_none_none_is_found() -> None:
    for seed in range(20):
        assert find_factor(np.random.default_rng(seed).standard_normal(5000, np.float32)) is None
    assert find_factor(np.zeros(100, np.float32)) is None
    assert find_factor(np.zeros(0, np.float32)) is None
    assert find_factor(np.full(100, np.nan, np.float32)) is None
    assert find_factor(np.full(100, 1e-42, np.float32)) is None


def test_it_is_found_among_zeros_and_among_others() -> None:
    factor = np.float32(0.123456)
    values = np.zeros(100_000, np.float32)
    values[::50] = bfloat16_values(2000) * factor
    found = find_factor(values)
    assert found is not None
    assert _significand(found) == _significand(factor)
    mixed = np.random.default_rng(0).standard_normal(8000, np.float32)
    mixed[3000:] = bfloat16_values(5000) * factor
    found = find_factor(mixed)
    assert found is not None
    assert _significand(found) == _significand(factor)


def test_values_that_fit_by_a_common_divisor_do_not_end_the_search() -> None:
    # A third of the significands stay within 8 bits when tripled: 1 fits these, 3 fits all.
    assert find_factor(bfloat16_values(4000) * np.float32(3)) == np.float32(0.75)


def test_one_value_is_enough_for_a_factor_that_explains_it() -> None:
    for value in (0.1, -3.3, 1.0):
        values = np.full(7, value, np.float32)
        found = find_factor(values)
        assert found is not None
