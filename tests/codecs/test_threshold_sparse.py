"""Sparse differences: the cap holds, the index costs what it must, nothing non-finite is lost."""

from __future__ import annotations

import struct
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.sections import RATIO_MAX, compose, encode_section
from stepwell.codecs.sparse_index import BITMAP_DENSITY, gap_shift_of, gap_words
from stepwell.codecs.sparse_select import bits_of, float_of, select, threshold_bits
from stepwell.codecs.testing import peak_bytes, state_like
from stepwell.codecs.testing_dropping import DroppingContract
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.errors import ConfigError, FormatError, IntegrityError, UsageError

Floats = npt.NDArray[np.float32]

CHUNK = 4 << 16
PARAMETERS = struct.Struct("<BBHIQff")
PARAMETERS_AT = 16 + 4 * 8


class TestThresholdSparse(DroppingContract):
    lengths = (4, 8, 400, 4 * 255, 4 * 4096, CHUNK - 4, CHUNK, CHUNK + 4, 9 * CHUNK + 4)

    def codec(self) -> ThresholdSparse:
        return ThresholdSparse()


class TestThresholdSparseOfFew(DroppingContract):
    lengths = (4, 4 * 70_000, 8 * CHUNK + 12)

    def codec(self) -> ThresholdSparse:
        return ThresholdSparse(0.0005, "int8", level=3)


class TestThresholdSparseBitmapInt8(DroppingContract):
    lengths = (4, 4 * 255, 4 * 256, 4 * 257, CHUNK, 9 * CHUNK + 28)

    def codec(self) -> ThresholdSparse:
        return ThresholdSparse(0.2, "int8")


def noise(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def parameters_of(frame: npt.NDArray[np.uint8]) -> tuple[Any, ...]:
    return PARAMETERS.unpack_from(frame.tobytes(), PARAMETERS_AT)


def index_bits(frame: npt.NDArray[np.uint8]) -> float:
    return 8 * struct.unpack_from("<Q", frame.tobytes(), 16)[0] / parameters_of(frame)[4]


def entropy_bits(share: float) -> float:
    return (-share * log2(share) - (1 - share) * log2(1 - share)) / share


@pytest.mark.parametrize("rate", [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2])
def test_the_index_is_within_five_percent_of_the_entropy(rate: float) -> None:
    values = noise(1 << 21)
    frame = ThresholdSparse(rate).encode(values)
    kept = parameters_of(frame)[4]
    assert 0.7 * rate < kept / values.size < 1.4 * rate
    assert index_bits(frame) < 1.05 * entropy_bits(kept / values.size)


@pytest.mark.parametrize("values", ["float32", "int8"])
@pytest.mark.parametrize("rate", [0.0001, 0.01, 0.05, 0.3])
def test_what_is_kept_is_what_is_large(rate: float, values: str) -> None:
    array = noise(300_000)
    codec = ThresholdSparse(rate, values)
    frame = codec.encode(array)
    decoded = codec.decode(frame).view(np.float32)
    tau = codec.threshold(frame)
    kept = np.abs(array) > tau
    assert np.array_equal(decoded != 0, kept)
    assert np.count_nonzero(kept) <= codec.kept_max(array.size)
    if values == "float32":
        assert np.array_equal(decoded[kept], array[kept])
        assert codec.bound(array) == tau
    else:
        error = np.abs(decoded[kept].astype(np.float64) - array[kept]).max()
        # The blocks' extremes are at most those of all that is kept.
        assert error <= (np.abs(array[kept]).max() - tau) / 254 + 1e-6
        assert codec.bound(array) == tau


def test_the_cap_holds_where_the_sample_misleads() -> None:
    count = 1 << 20
    stride = count // (1 << 16) | 1
    array = noise(count) + np.float32(10)
    array[::stride] = 0  # all the sample sees
    codec = ThresholdSparse(0.01)
    frame = codec.encode(array)
    kept = parameters_of(frame)[4]
    assert kept == ceil(2 * 0.01 * count)
    decoded = codec.decode(frame).view(np.float32)
    largest = np.partition(array, count - kept)[count - kept :]
    assert np.array_equal(np.sort(decoded[decoded != 0]), np.sort(largest))


def test_memory_stays_in_proportion_to_the_cap() -> None:
    array = np.arange(1, (1 << 21) + 1, dtype=np.float32)  # every element exceeds those before it
    bits = array.view(np.uint32)
    assert peak_bytes(lambda: select(bits, 0, 2000)) < 4 << 20
    chosen = select(bits, 0, 2000)
    assert chosen.positions.tolist() == list(range(array.size - 2000, array.size))
    assert float_of(chosen.threshold) == array.size - 2000


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 3000), kept_max=st.integers(1, 200))
def test_any_selection_keeps_the_largest(seed: int, count: int, kept_max: int) -> None:
    generator = np.random.default_rng(seed)
    array = generator.integers(-20, 21, count).astype(np.float32)  # many are equal
    array[generator.integers(0, count, 5)] = np.nan
    chosen = select(array.view(np.uint32), 0, kept_max)
    magnitudes = np.abs(array)
    finite = np.isfinite(array)
    assert np.count_nonzero(finite[chosen.positions]) == min(kept_max, np.count_nonzero(magnitudes[finite]))
    assert set(np.flatnonzero(~finite)) <= set(chosen.positions.tolist())
    assert np.array_equal(array.view(np.uint32)[chosen.positions], chosen.bits)
    dropped = np.delete(magnitudes, chosen.positions)
    tau = float_of(chosen.threshold)
    assert dropped.max(initial=0) <= tau
    assert (magnitudes[chosen.positions][finite[chosen.positions]] >= tau).all()


def test_equal_elements_make_progress() -> None:
    array = np.full(100_000, 0.5, np.float32)
    codec = ThresholdSparse(0.1)
    left = array.copy()
    for _ in range(5):  # a closed loop: what was dropped is carried
        left -= codec.decode(codec.encode(left)).view(np.float32)
    assert not left.any()


def test_the_threshold_follows_its_hint() -> None:
    codec = ThresholdSparse(0.01)
    first = codec.encode(noise(1 << 20))
    tau = codec.threshold(first)
    bits = noise(1 << 20, 1).view(np.uint32)
    tracked = float_of(threshold_bits(bits, 0.01, tau))
    alone = float_of(threshold_bits(bits, 0.01, None))
    assert tracked != alone
    assert abs(tracked - tau) <= abs(alone - tau)
    for useless in (0.0, tau * 10, tau / 10):
        assert float_of(threshold_bits(bits, 0.01, useless)) == alone
    hinted = codec.encode(bits, hint=tau)
    assert codec.threshold(hinted) == tracked
    assert abs(parameters_of(hinted)[4] / bits.size / 0.01 - 1) < 0.15
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="hint"):
            codec.encode(bits, hint=wrong)
    largest = float(np.finfo(np.float32).max)
    assert threshold_bits(np.full(9, bits_of(largest), np.uint32), 0.01, largest) < 0x7F800000


def test_a_sample_meets_every_column() -> None:
    array = np.zeros((1 << 13, 256), np.float32)
    array[:, 77] = noise(1 << 13)  # a stride of 32 would see it or nothing
    tau = float_of(threshold_bits(array.view(np.uint32).reshape(-1), 0.001, None))
    share = np.count_nonzero(np.abs(array) > tau) / array.size
    assert 0.0007 < share < 0.0014


@pytest.mark.parametrize("density", [0.00002, 0.0001, 0.003, 0.02, 0.0799, 0.0801, 0.3, 0.49])
@pytest.mark.parametrize("clustered", [False, True])
def test_every_density_comes_back(density: float, clustered: bool) -> None:
    count = 400_003
    array = np.zeros(count, np.float32)
    places = np.random.default_rng(1).choice(count, int(density * count), replace=False)
    if clustered:
        places = places // 10 + count // 2
    array[places] = noise(places.size)
    codec = ThresholdSparse(0.5)
    frame = codec.encode(array)
    assert codec.bound_of_frame(frame) == 0  # everything that is not zero fits under the cap
    assert frame[5] == (2 if np.count_nonzero(array) > BITMAP_DENSITY * count else 1)
    assert np.array_equal(codec.decode(frame).view(np.float32), array)


@settings(max_examples=60, deadline=None)
@given(gaps=st.lists(st.integers(0, 70_000), min_size=1, max_size=40), shift=st.integers(0, 8))
def test_gaps_longer_than_a_word_are_carried(gaps: list[int], shift: int) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    count = int(positions[-1]) + 1
    words = gap_words(positions, shift)
    parameters = PARAMETERS.pack(0, shift, 0, 0, positions.size, 0.0, 0.0)
    values = np.arange(1, positions.size + 1, dtype=np.float32)
    sections = [encode_section(part, 1) for part in (words, values, values[:0], values[:0])]
    decoded = ThresholdSparse.decode(
        ThresholdSparse(), compose(b"SWTS", 1, 4 * count, parameters, sections)
    ).view(np.float32)
    assert np.array_equal(np.flatnonzero(decoded), positions)
    assert np.array_equal(decoded[positions], values)


def test_the_split_of_gaps_follows_their_mean() -> None:
    assert [gap_shift_of(1 << 20, (1 << 20) // mean) for mean in (10, 30, 100, 1000, 50_000)] == [
        8,
        8,
        4,
        7,
        8,
    ]
    assert gap_shift_of(0, 0) == gap_shift_of(5, 0) == 8


def test_nothing_is_nearly_nothing() -> None:
    codec = ThresholdSparse()
    for count, most in ((1 << 10, 200), (1 << 22, 200), (1 << 24, 4 * (1 << 24) // RATIO_MAX)):
        frame = codec.encode(np.zeros(count, np.float32))
        assert frame.size <= most
        assert not codec.decode(frame).any()


@pytest.mark.parametrize("claim", [1 << 40, (1 << 64) - 4, 1 << 32])
def test_a_frame_that_claims_a_terabyte_is_refused_before_allocation(claim: int) -> None:
    frame = ThresholdSparse().encode(noise(20_000)).tobytes()
    claiming = frame[:8] + struct.pack("<Q", claim) + frame[16:]
    assert peak_bytes(lambda: ThresholdSparse().decode(claiming)) < 100_000
    with pytest.raises(IntegrityError, match="claims"):
        ThresholdSparse().decode(claiming)


def test_a_large_but_consistent_claim_is_refused_by_its_bound() -> None:
    frame = ThresholdSparse().encode(np.zeros(1 << 24, np.float32))
    with pytest.raises(IntegrityError, match="at most"):
        ThresholdSparse().decode(frame, max_bytes=1 << 20)
    with pytest.raises(IntegrityError, match="buffer"):
        ThresholdSparse().decode(frame, np.empty(1 << 20, np.uint8))
    assert peak_bytes(lambda: ThresholdSparse().decode(frame, max_bytes=1 << 20)) < 100_000


def sparse(
    count: int = 100, *, kind: int = 1, kept: int = 2, shift: int = 8, values: int = 0, **change: Any
) -> npt.NDArray[np.uint8]:
    """A frame that keeps elements 3 and 10, or one with something wrong."""
    index: npt.NDArray[Any] = np.array([3, 6], "<u2")
    if kind == 2:
        index = np.packbits(np.isin(np.arange(count), [3, 10]), bitorder="little")
    parts = {"index": index, "values": np.array([1, 2], "<f4"), "scales": np.empty(0, "<f4")}
    parts["raw"] = np.empty(0, "<u4")
    tau, bound = change.pop("tau", 0.5), change.pop("bound", 0.5)
    parts.update(change)
    parameters = PARAMETERS.pack(values, shift if kind == 1 else 0, 0, 0, kept, tau, bound)
    return compose(b"SWTS", kind, 4 * count, parameters, [encode_section(part, 1) for part in parts.values()])


def test_frames_made_by_hand_are_read() -> None:
    for kind in (1, 2):
        decoded = ThresholdSparse().decode(sparse(kind=kind)).view(np.float32)
        assert np.flatnonzero(decoded).tolist() == [3, 10]


@pytest.mark.parametrize(
    "change",
    [
        {"kept": 3},
        {"kept": 1},
        {"kept": 101},
        {"kept": 1 << 60},
        {"shift": 9},
        {"values": 2},
        {"values": 1},
        {"tau": -1.0},
        {"tau": float("nan")},
        {"tau": 1.0},
        {"bound": float("inf")},
        {"count": 10},
        {"kind": 2, "count": 10},
        {"kind": 2, "index": np.zeros(12, np.uint8)},
        {"kind": 2, "index": np.full(13, 255, np.uint8)},
        {"kind": 2, "index": np.array([3, 6], "<u2")},
        {"index": np.array([3, 6, 1], "<u2")},
        {"index": np.array([3, 65535], "<u2")},
        {"index": np.array([3, 6], "<u4")},
        {"index": np.empty(0, "<u2")},
        {"shift": 2, "index": np.array([4, 1], "<u2")},
        {"values_": np.array([1], "<f4")},
        {"values_": np.array([1, 2], "<f8")},
        {"scales": np.array([1, 2], "<f4")},
        {"raw": np.array([1], "<u4")},
        {"values": 1, "values_": np.zeros(2, np.uint8)},
        {"values": 1, "values_": np.zeros(2, np.uint8), "scales": np.array([1, -1], "<f4")},
        {"values": 1, "values_": np.zeros(2, np.uint8), "scales": np.array([np.inf, 1], "<f4")},
        {"values": 1, "values_": np.zeros(2, np.uint8), "scales": np.array([np.nan, 1], "<f4")},
    ],
    ids=str,
)
def test_what_no_encoder_writes_is_refused(change: dict[str, Any]) -> None:
    numbers = change.pop("values_", None)
    frame = sparse(**change)
    if numbers is not None:
        kind = change.pop("values", 0)
        change.pop("kind", None)
        base = {"index": np.array([3, 6], "<u2"), "values": numbers, "scales": np.empty(0, "<f4")}
        base |= {"raw": np.empty(0, "<u4")} | change
        parameters = PARAMETERS.pack(kind, 8, 0, 0, 2, 0.5, 0.5)
        frame = compose(b"SWTS", 1, 400, parameters, [encode_section(part, 1) for part in base.values()])
    with pytest.raises(IntegrityError):
        ThresholdSparse().decode(frame)
    assert peak_bytes(lambda: ThresholdSparse().decode(frame)) < 300_000


def test_a_frame_of_another_format_or_version_is_named() -> None:
    frame = ThresholdSparse().encode(noise(1000)).tobytes()
    with pytest.raises(FormatError, match="version 2, this code reads version 1"):
        ThresholdSparse().decode(frame[:4] + b"\x02" + frame[5:])
    with pytest.raises(FormatError, match="not a frame"):
        ThresholdSparse().decode(b"SWTX" + frame[4:])
    with pytest.raises(FormatError, match="kind 7"):
        ThresholdSparse().decode(frame[:5] + b"\x07" + frame[6:])
    padded = ThresholdSparse().encode(np.zeros(1 << 24, np.float32))
    padded[-1] = 1
    with pytest.raises(IntegrityError, match="padding"):
        ThresholdSparse().decode(padded)


@pytest.mark.parametrize("rate", [0, -0.1, 0.51, 1, "0.1", None, True, float("nan")])
def test_a_wrong_rate_is_refused(rate: Any) -> None:
    with pytest.raises(ConfigError, match="rate"):
        ThresholdSparse(rate)


def test_other_wrong_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="values"):
        ThresholdSparse(values="int4")
    with pytest.raises(ConfigError, match="level"):
        ThresholdSparse(level=0)


def test_small_arrays_stay_exact() -> None:
    codec = ThresholdSparse()
    for count in range(20):
        assert codec.bound(noise(count)) == 0
        assert np.array_equal(codec.decode(codec.encode(noise(count))).view(np.float32), noise(count))


def test_the_bound_on_the_size_holds() -> None:
    for rate, values in ((0.001, "int8"), (0.5, "float32"), (0.5, "int8")):
        codec = ThresholdSparse(rate, values)
        for raw in (state_like(40_000), np.full(10_000, np.nan, np.float32), noise(5), noise(0)):
            assert codec.encode(raw).size <= codec.size_bytes_max(raw.nbytes)


@pytest.mark.parametrize(("kind", "ratio"), [("w", 190), ("m", 250), ("v", 270), ("g", 250)])
def test_real_differences_shrink(repository: Path, kind: str, ratio: float) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        names = [name for name in data.files if name.endswith(f"|{kind}")]
        steps = np.concatenate([data[name].reshape(12, -1) for name in names], axis=1)
    change = steps if kind == "g" else np.diff(steps, axis=0)
    codec = ThresholdSparse(0.01, "int8")
    frame = codec.encode(np.ascontiguousarray(change, np.float32))
    assert change.nbytes / frame.size > ratio
