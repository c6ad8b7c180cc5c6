"""Int8: the contract, the bound in closed form, and what it makes of real gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepwell.codecs.blocks import BLOCK_MAX
from stepwell.codecs.int8 import Int8
from stepwell.codecs.testing import LossyContract, state_like


class TestInt8OfFloat32(LossyContract):
    lengths = (4, 60, 4 * 255, 4 * 256, 4 * 257, 4 * 32768, 4 * 32768 + 4, 4 * 200_001)

    def codec(self) -> Int8:
        return Int8()


def test_the_bound_is_half_a_step_of_the_largest_block() -> None:
    values = np.ones(512, np.float32)
    values[:256] *= 127
    assert Int8().bound(values) == pytest.approx(0.5, rel=1e-3)
    assert Int8().bound(values[256:]) == pytest.approx(0.5 / 127, rel=1e-3)
    assert Int8(block=BLOCK_MAX).bound(values[256:]) == pytest.approx(0.5 / 127, rel=1e-3)


def test_multiples_of_the_scale_come_back_bit_for_bit() -> None:
    values = np.arange(-127, 128, dtype=np.float32) * np.float32(2**-9)
    assert Int8().decode(Int8().encode(values)).tobytes() == values.tobytes()


def test_a_closed_loop_keeps_the_error_of_one_call() -> None:
    generator, codec = np.random.default_rng(0), Int8()
    true, reader = (np.zeros(4096, np.float32) for _ in range(2))
    for _ in range(30):
        true += generator.standard_normal(4096, np.float32)
        change = true - reader
        reader += codec.decode(codec.encode(change)).view(np.float32)
        assert np.abs(true - reader).max() <= codec.bound(change) * 1.01


def test_real_gradients_take_about_a_byte(repository: Path) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        names = [name for name in data.files if name.endswith("|g")]
        gradient = np.concatenate([data[name][5].reshape(-1) for name in names])
    frame = Int8().encode(gradient)
    found = Int8().decode(frame).view(np.float32)
    assert gradient.nbytes / frame.size > 4.2
    assert np.linalg.norm(found - gradient) < 0.01 * np.linalg.norm(gradient)


def test_incompressible_input_costs_next_to_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
    noise.view(np.uint32)[::256] |= 0x7F800000  # every block has a NaN or an infinity
    frame = Int8().encode(noise)
    assert np.array_equal(Int8().decode(frame), noise)
    assert frame.size < 1.005 * noise.size


def test_the_bound_on_the_size_holds() -> None:
    for length in (0, 4, 1020, 4096, 500_000):
        assert Int8().encode(state_like(length)).size <= Int8().size_bytes_max(length)
        noise = np.random.default_rng(1).integers(0, 256, length, np.uint8)
        assert Int8().encode(noise).size <= Int8().size_bytes_max(length)
