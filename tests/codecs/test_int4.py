"""Int4: the contract on bfloat16, two codes to a byte."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.codecs.int4 import Int4
from stepwell.codecs.testing import LossyContract


class TestInt4OfBfloat16(LossyContract):
    itemsize = 2
    dtype = "bfloat16"
    lengths = (2, 4, 6, 2 * 255, 2 * 256, 2 * 257, 2 * 32768, 2 * 32768 + 2, 2 * 200_001)

    def codec(self) -> Int4:
        return Int4("bfloat16")


def test_multiples_of_the_scale_come_back_bit_for_bit() -> None:
    values = np.tile(np.arange(-7, 8, dtype=np.float32) * np.float32(2**-9), 21)
    for count in (values.size, values.size - 1):
        assert Int4().decode(Int4().encode(values[:count])).tobytes() == values[:count].tobytes()


def test_two_values_take_a_byte() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    assert Int4().encode(values).size < 0.53 * values.size
    assert Int4().bound(values) == pytest.approx(np.abs(values).max() / 14, rel=1e-3)
