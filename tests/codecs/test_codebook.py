"""Codebooks of momentum: stated bounds per block, zeros kept, blocks that do not fit kept raw."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.codebook import BLOCKS, Codebook
from stepwell.codecs.codebook_fit import ENTRIES, GRID_POINTS, SHAPES_MAX, fit_shapes
from stepwell.codecs.sections import compose, encode_section
from stepwell.codecs.testing import peak_bytes, state_like
from stepwell.codecs.testing_dropping import DroppingContract
from stepwell.errors import ConfigError, FormatError, IntegrityError

Floats = npt.NDArray[np.float32]

CHUNK = 4 << 16
PARAMETERS = struct.Struct("<HHf")


class TestCodebook(DroppingContract):
    lengths = (4, 8, 4 * 127, 4 * 128, 4 * 129, 4 * 4001, CHUNK - 4, CHUNK, CHUNK + 4, 3 * CHUNK + 12)

    def codec(self) -> Codebook:
        return Codebook()


class TestCodebookOf64(DroppingContract):
    lengths = (4, 4 * 63, 4 * 64, 4 * 65, CHUNK + 4 * 65)

    def codec(self) -> Codebook:
        return Codebook(64, level=2)


class TestCodebookOf256(DroppingContract):
    lengths = (4, 4 * 255, 4 * 256, 4 * 257, CHUNK + 4 * 257)

    def codec(self) -> Codebook:
        return Codebook(256)


def noise(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def heavy(count: int, seed: int = 0) -> Floats:
    """Blocks of many kinds: from nearly uniform to one element that stands out."""
    generator = np.random.default_rng(seed)
    powers = np.repeat(generator.uniform(0.3, 6, -(-count // 256)), 256)[:count]
    values = generator.standard_normal(count)
    return (np.sign(values) * np.abs(values) ** powers).astype(np.float32)


def round_trip(codec: Codebook, values: Floats) -> Floats:
    decoded: Floats = codec.decode(codec.encode(values)).view(np.float32)
    return decoded


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("make", [noise, heavy])
def test_every_block_keeps_its_own_bound(make: Any, block: int) -> None:
    values = make(100_001)
    codec = Codebook(block)
    frame = codec.encode(values)
    error = np.abs(codec.decode(frame).view(np.float32).astype(np.float64) - values)
    bounds = codec.bounds_of_frame(frame)
    starts = np.arange(0, values.size, block)
    worst = np.maximum.reduceat(error, starts)
    assert bounds.shape == starts.shape
    assert (worst <= bounds).all()
    assert (bounds <= np.maximum.reduceat(np.abs(values), starts)).all()
    assert bounds.max() <= codec.bound_of_frame(frame) <= bounds.max() * 1.0001
    if make is noise:  # where blocks are alike, it says what happens
        assert worst.max() > 0.7 * bounds.max()


@pytest.mark.parametrize(("block", "bits", "error"), [(64, 4.65, 0.095), (128, 4.35, 0.1), (256, 4.2, 0.105)])
def test_what_it_costs_and_loses_on_noise(block: int, bits: float, error: float) -> None:
    values = noise(1 << 18)
    frame = Codebook(block).encode(values)
    decoded = Codebook(block).decode(frame).view(np.float32)
    assert 8 * frame.size / values.size < bits
    assert np.linalg.norm(decoded - values) < error * np.linalg.norm(values)


def test_it_is_better_than_int4_where_elements_stand_out() -> None:
    values = heavy(1 << 18)
    rows = values.reshape(-1, 64)
    scales = np.abs(rows).max(axis=1, keepdims=True) / 7
    linear = (np.rint(rows / scales) * scales).reshape(-1)
    decoded = round_trip(Codebook(64), values)
    assert np.linalg.norm(decoded - values) < 0.9 * np.linalg.norm(linear - values)


def test_zero_stays_zero() -> None:
    values = noise(50_000)
    values[::3] = 0
    values[1000:3000] = 0
    values[20_000:20_128] = -0.0
    for block in BLOCKS:
        decoded = round_trip(Codebook(block), values)
        assert not decoded[values == 0].any()


def test_only_blocks_that_are_not_finite_are_kept_raw() -> None:
    values = heavy(100 * 128 + 5)
    values[[5 * 128, 7 * 128 + 127, 100 * 128 + 2]] = [np.nan, -np.inf, np.inf]
    codec = Codebook()
    frame = codec.encode(values)
    exact = np.flatnonzero(codec.bounds_of_frame(frame) == 0)
    assert exact.tolist() == [5, 7, 100]
    decoded = codec.decode(frame).view(np.float32)
    kept = np.isin(np.arange(values.size) // 128, exact)
    assert decoded[kept].tobytes() == values[kept].tobytes()
    assert (decoded[~kept] != values[~kept]).mean() > 0.9
    assert frame.size < 5.0 / 8 * values.size + 4 * 300


@pytest.mark.parametrize(
    "values", [np.full(70_000, 3.5), np.tile([1.0, -1.0, 0.0], 30_000), np.zeros(70_000)]
)
def test_a_few_values_are_kept_exactly(values: npt.NDArray[np.float64]) -> None:
    array = values.astype(np.float32)
    frame = Codebook().encode(array)
    assert np.array_equal(Codebook().decode(frame).view(np.float32), array)
    assert frame.size < array.nbytes / 15


def test_one_sign_uses_all_entries() -> None:
    values = np.abs(noise(1 << 17))
    decoded = round_trip(Codebook(), values)
    assert np.linalg.norm(decoded - values) < 0.055 * np.linalg.norm(values)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(0, 600), kinds=st.integers(1, 5))
def test_any_sample_gives_codebooks_in_order(seed: int, blocks: int, kinds: int) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.choice(generator.uniform(-1, 1, kinds), (blocks, 64))
    rows = (rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-30)).astype(np.float32)
    shapes = fit_shapes(rows)
    count = len(shapes.entries)
    assert 1 <= count <= SHAPES_MAX
    assert shapes.entries.shape == (count, ENTRIES)
    assert (np.diff(shapes.entries, axis=1) >= 0).all()
    assert (np.abs(shapes.entries) <= 1).all()
    assert (shapes.entries == 0).any(axis=1).all()
    assert shapes.codes.shape == (count * GRID_POINTS,)
    assert shapes.codes.max() < ENTRIES
    assert np.isfinite(shapes.distances).all()


def test_the_largest_tensors_use_several_shapes() -> None:
    frame = Codebook(64).encode(heavy(64 * 4096))
    shape_bytes = struct.unpack_from("<Q", frame.tobytes(), 16)[0]
    assert shape_bytes == 5 * 4 * (ENTRIES + 1)  # one per 256 of the sample's 1366 blocks


@pytest.mark.parametrize("claim", [1 << 40, (1 << 64) - 4, 1 << 34])
def test_a_frame_that_claims_a_terabyte_is_refused_before_allocation(claim: int) -> None:
    frame = Codebook().encode(noise(20_000)).tobytes()
    claiming = frame[:8] + struct.pack("<Q", claim) + frame[16:]
    assert peak_bytes(lambda: Codebook().decode(claiming)) < 100_000
    with pytest.raises(IntegrityError, match="claims"):
        Codebook().decode(claiming)
    large = Codebook().encode(np.zeros(1 << 24, np.float32))
    assert peak_bytes(lambda: Codebook().decode(large, max_bytes=1 << 20)) < 100_000
    assert peak_bytes(lambda: Codebook().decode(large, np.empty(4, np.float32))) < 100_000


def book(count: int = 100, block: int = 64, bound: float = 0.5, **change: Any) -> npt.NDArray[np.uint8]:
    """A frame of two blocks, the first 1 and 0 in turn, the second kept raw; or something wrong."""
    entries = np.linspace(-1, 1, 17, dtype=np.float32)[1:]
    parts: dict[str, npt.NDArray[Any]] = {
        "shapes": np.append(entries, np.float32(0.1)),
        "classes": np.array([0, 255], np.uint8),
        "scales": np.array([1, 0], np.float32),
        "codes": np.full(32, 0x7F, np.uint8),
        "raw": np.arange(36, dtype=np.float32),
    }
    parts.update(change)
    shapes = parts.pop("shapes").view(np.uint8)
    sections = [shapes, *(encode_section(part, 1) for part in parts.values())]
    return compose(b"SWCB", 1, 4 * count, PARAMETERS.pack(block, 0, bound), sections)


def test_frames_made_by_hand_are_read() -> None:
    decoded = Codebook().decode(book()).view(np.float32)
    assert decoded[:64].tolist() == [1.0, 0.0] * 32
    assert decoded[64:].tolist() == list(range(36))
    assert Codebook().bounds_of_frame(book())[1] == 0


SHAPE = np.append(np.zeros(16), 0.1).astype(np.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"block": 32},
        {"block": 0},
        {"bound": float("nan")},
        {"bound": -1.0},
        {"bound": float("inf")},
        {"count": 129},
        {"count": 64},
        {"shapes": np.zeros(0, np.float32)},
        {"shapes": SHAPE[:16]},
        {"shapes": np.tile(SHAPE, 9)},
        {"shapes": np.append(SHAPE[:16], np.float32(3))},
        {"shapes": np.append(SHAPE[:16], np.float32(np.nan))},
        {"shapes": np.concatenate([[np.float32(1.5)], SHAPE[1:]])},
        {"shapes": np.concatenate([[np.float32(np.nan)], SHAPE[1:]])},
        {"classes": np.array([1, 255], np.uint8)},
        {"classes": np.array([0, 0], np.uint8)},
        {"classes": np.array([0], np.uint8)},
        {"classes": np.array([255, 255], np.uint8)},
        {"scales": np.array([1], np.float32)},
        {"scales": np.array([-1, 0], np.float32)},
        {"scales": np.array([1, 1], np.float32)},
        {"scales": np.array([np.inf, 0], np.float32)},
        {"scales": np.array([np.nan, 0], np.float32)},
        {"codes": np.zeros(31, np.uint8)},
        {"codes": np.zeros(33, np.uint8)},
        {"codes": np.zeros(16, np.uint16)},
        {"raw": np.zeros(35, np.float32)},
        {"raw": np.zeros(0, np.float32)},
    ],
    ids=str,
)
def test_what_no_encoder_writes_is_refused(change: dict[str, Any]) -> None:
    frame = book(**change)
    with pytest.raises(IntegrityError):
        Codebook().decode(frame)
    assert peak_bytes(lambda: Codebook().decode(frame)) < 100_000


def test_a_frame_of_another_format_or_version_is_named() -> None:
    frame = Codebook().encode(noise(1000)).tobytes()
    with pytest.raises(FormatError, match="version 2, this code reads version 1"):
        Codebook().decode(frame[:4] + b"\x02" + frame[5:])
    with pytest.raises(FormatError, match="not a frame"):
        Codebook().decode(b"SWTS" + frame[4:])


@pytest.mark.parametrize("block", [0, 16, 100, 512, 64.0, "64", None, True])
def test_a_wrong_block_is_refused(block: Any) -> None:
    with pytest.raises(ConfigError, match="block"):
        Codebook(block)


def test_the_bound_on_the_size_holds() -> None:
    for raw in (state_like(40_000), np.full(10_000, np.nan, np.float32), noise(5), noise(0)):
        for block in BLOCKS:
            assert Codebook(block).encode(raw).size <= Codebook(block).size_bytes_max(raw.nbytes)


@pytest.mark.parametrize(
    ("block", "bits", "error"), [(64, 4.5, 0.092), (128, 4.1, 0.096), (256, 3.95, 0.099)]
)
def test_real_momentum_takes_four_bits(repository: Path, block: int, bits: float, error: float) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        momentum = np.concatenate([data[name].reshape(-1) for name in data.files if name.endswith("|m")])
    frame = Codebook(block).encode(momentum)
    decoded = Codebook(block).decode(frame).view(np.float32)
    assert 8 * frame.size / momentum.size < bits
    assert np.linalg.norm(decoded - momentum) < error * np.linalg.norm(momentum)
