"""Byte planes: any bytes, bounded claims, planes stored the way they pay."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.frame import BLOCK_LOG2, HEADER, LENGTH_BITS, MAGIC, Mode, read_frame
from stepwell.codecs.testing import CodecContract, peak_bytes, state_like
from stepwell.errors import ConfigError, FormatError, IntegrityError, UsageError

BLOCK = 1 << BLOCK_LOG2


class TestBytePlaneOf4(CodecContract):
    lengths = (1, 3, 4, 5, 8192 * 4, 8192 * 4 + 4, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 5, 16 * BLOCK + 4)

    def codec(self) -> BytePlane:
        return BytePlane(4)


class TestBytePlaneOf2AtLevel3(CodecContract):
    lengths = (1, 2, 3, 8192 * 2 + 1, 2 * BLOCK, 2 * BLOCK + 3)

    def codec(self) -> BytePlane:
        return BytePlane(2, level=3)


class TestBytePlaneOf1(CodecContract):
    lengths = (1, 8192, 8193, BLOCK, BLOCK + 1)

    def codec(self) -> BytePlane:
        return BytePlane(1)


class TestBytePlaneOf16(CodecContract):
    lengths = (1, 15, 16, 17, 16 * 8193, 16 * BLOCK + 7)

    def codec(self) -> BytePlane:
        return BytePlane(16)


@pytest.mark.parametrize("itemsize", range(1, 17))
def test_every_itemsize(itemsize: int) -> None:
    raw = state_like(itemsize * 9000 + itemsize - 1)
    codec = BytePlane(itemsize)
    assert np.array_equal(codec.decode(codec.encode(raw)), raw)


@pytest.mark.parametrize("itemsize", [0, -1, 17, 4.0, "4", True, None])
def test_wrong_itemsize_is_refused(itemsize: object) -> None:
    with pytest.raises(ConfigError, match="itemsize"):
        BytePlane(itemsize)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0, -1, 20, 1.5, "1", True, None])
def test_wrong_level_is_refused(level: object) -> None:
    with pytest.raises(ConfigError, match="level"):
        BytePlane(4, level)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 40_000), itemsize=st.integers(1, 16), noise=st.booleans())
def test_the_bound_on_the_size_holds(length: int, itemsize: int, noise: bool) -> None:
    raw = np.random.default_rng(length).integers(0, 256 if noise else 2, length, np.uint8)
    codec = BytePlane(itemsize)
    out = np.empty(codec.size_bytes_max(length), np.uint8)
    frame = codec.encode(raw, out=out)
    assert np.shares_memory(frame, out)
    assert np.array_equal(codec.encode(raw), frame)
    with pytest.raises(UsageError, match="may need"):
        codec.encode(raw, out=out[1:])


def test_a_buffer_that_overlaps_the_input_is_refused() -> None:
    memory = np.zeros(10_000, np.uint8)
    with pytest.raises(UsageError, match="overlaps"):
        BytePlane(4).encode(memory[:400], out=memory[100:])
    frame = BytePlane(4).encode(memory[:400])
    memory[: frame.size] = frame
    with pytest.raises(UsageError, match="overlaps"):
        BytePlane(4).decode(memory[: frame.size], memory[4:404])


def test_each_plane_is_stored_the_way_it_pays() -> None:
    generator = np.random.default_rng(1)
    count = BLOCK + 1000
    elements = np.empty((count, 4), np.uint8)
    elements[:, 0] = generator.integers(0, 256, count)  # noise
    elements[:, 1] = 7  # constant
    elements[:, 2] = generator.integers(0, 4, count)  # two bits each
    elements[:, 3] = np.arange(count) // 4096  # long runs
    frame = read_frame(BytePlane(4).encode(elements))
    for block in range(2):
        assert frame.modes[block].tolist() == [Mode.RAW, Mode.CONSTANT, Mode.ZSTD, Mode.ZSTD]
    assert frame.lengths[0, 2] < BLOCK * 0.27
    assert frame.lengths[0, 3] < BLOCK * 0.01


def test_a_plane_constant_only_in_the_sample_comes_back() -> None:
    elements = np.zeros(BLOCK, np.uint32)
    elements[3000] = 0x01020304  # between the pieces of the sample
    codec = BytePlane(4)
    assert np.array_equal(codec.decode(codec.encode(elements)).view(np.uint32), elements)


def test_a_small_frame_keeps_no_large_memory_alive() -> None:
    frame = BytePlane(4).encode(np.zeros(8 << 20, np.uint8))
    assert frame.size < 1000
    assert frame.base is None


def test_another_itemsize_is_refused() -> None:
    frame = BytePlane(4).encode(state_like(400))
    with pytest.raises(IntegrityError, match="does not belong"):
        BytePlane(2).decode(frame)


def test_a_frame_of_another_format_or_version_is_named() -> None:
    frame = BytePlane(4).encode(state_like(400))
    newer = frame.copy()
    newer[4] = 2
    with pytest.raises(FormatError, match="version 2, this code reads version 1"):
        BytePlane(4).decode(newer)
    with pytest.raises(FormatError, match="not a frame"):
        BytePlane(4).decode(b"SWPX" + frame.tobytes()[4:])
    with pytest.raises(FormatError, match="transform 9"):
        BytePlane(4).decode(frame.tobytes()[:5] + b"\x09" + frame.tobytes()[6:])


@pytest.mark.parametrize("claim", [1 << 40, (1 << 64) - 1, 1 << 26])
def test_a_frame_that_claims_a_terabyte_is_refused_before_allocation(claim: int) -> None:
    header = HEADER.pack(MAGIC, 1, 0, 4, BLOCK_LOG2, claim)
    for frame in (header, header + bytes(3000)):
        with pytest.raises(IntegrityError):
            BytePlane(4).decode(frame)
        assert peak_bytes(lambda frame=frame: BytePlane(4).decode(frame)) < 100_000  # type: ignore[misc]


def test_a_large_but_consistent_claim_is_refused_by_its_bound() -> None:
    blocks = 1 << 10  # 512 MiB of zeros in 20 KiB: a true frame, but nobody expects it
    header = HEADER.pack(MAGIC, 1, 0, 4, BLOCK_LOG2, blocks * BLOCK * 4)
    table = np.full(blocks * 4, Mode.CONSTANT << LENGTH_BITS | 1, "<u4").tobytes()
    frame = header + table + bytes(blocks * 4)
    assert read_frame(np.frombuffer(frame, np.uint8)).length == 512 << 20
    with pytest.raises(IntegrityError, match="at most"):
        BytePlane(4).decode(frame, max_bytes=1 << 20)
    with pytest.raises(IntegrityError, match="buffer"):
        BytePlane(4).decode(frame, np.empty(1 << 20, np.uint8))
    assert peak_bytes(lambda: BytePlane(4).decode(frame, max_bytes=1 << 20)) < 100_000


def _frame_with_plane(plane: bytes, count: int) -> bytes:
    header = HEADER.pack(MAGIC, 1, 0, 1, BLOCK_LOG2, count)
    return header + struct.pack("<I", Mode.ZSTD << LENGTH_BITS | len(plane)) + plane


def test_a_compressed_plane_that_expands_beyond_its_size_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(100_000))
    short = zstandard.ZstdCompressor(level=1).compress(bytes(99_999))
    good = zstandard.ZstdCompressor(level=1).compress(bytes(100_000))
    for plane in (bomb, unsized, short, good[:-1], good + b"\0", good + good, b"\x28\xb5\x2f\xfd", b"zzzz"):
        frame = _frame_with_plane(plane, 100_000)
        with pytest.raises(IntegrityError, match="block 0, plane 0 is damaged"):
            BytePlane(1).decode(frame)
        assert peak_bytes(lambda frame=frame: BytePlane(1).decode(frame)) < 1 << 20  # type: ignore[misc]
    assert not BytePlane(1).decode(_frame_with_plane(good, 100_000)).any()


@pytest.mark.parametrize(
    "entry", [3 << LENGTH_BITS | 100, 99, 101, 2 << LENGTH_BITS | 2, 1 << LENGTH_BITS | 100]
)
def test_an_impossible_table_entry_is_refused(entry: int) -> None:
    frame = HEADER.pack(MAGIC, 1, 0, 1, BLOCK_LOG2, 100) + struct.pack("<I", entry) + bytes(100)
    with pytest.raises(IntegrityError, match="impossible"):
        BytePlane(1).decode(frame)


@pytest.mark.parametrize(("kind", "ratio"), [("w", 1.18), ("m", 1.16), ("v", 1.22)])
def test_real_state_shrinks(repository: Path, kind: str, ratio: float) -> None:
    path = repository.parent / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    with np.load(path) as data:
        names = [name for name in data.files if name.endswith(f"|{kind}")]
        state = np.concatenate([np.ascontiguousarray(data[name][5]).reshape(-1) for name in names])
    codec = BytePlane(4)
    frame = codec.encode(state)
    assert np.array_equal(codec.decode(frame), state.view(np.uint8))
    assert state.nbytes / frame.size > ratio
    assert frame.size < len(zstandard.ZstdCompressor(level=1).compress(state))
