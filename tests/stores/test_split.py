"""The index of an object in parts: what it says comes back, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import IntegrityError
from stepwell.stores.split import INDEX_BYTES, MAGIC, SplitIndex, part_of

GOLDEN = bytes.fromhex(
    "7374657077656c6c3a206f626a65637420696e2070617274732c20762e20310a"
    "d2040000000000006400000000000000000102030405060708090a0b0c0d0e0f"
)


def test_the_bytes_are_those_of_every_version() -> None:
    data = SplitIndex(1234, 100, bytes(range(16))).encode()
    assert len(data) == INDEX_BYTES
    assert data.startswith(MAGIC)
    assert data[:64] == GOLDEN
    assert SplitIndex.decode(data, "k") == SplitIndex(1234, 100, bytes(range(16)))


@given(st.integers(0, 10_000), st.integers(1, 3000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_cuts_cover_a_range_once(size_bytes: int, part_bytes: int, one: int, other: int) -> None:
    index = SplitIndex(size_bytes, part_bytes, bytes(16))
    start, stop = sorted((min(one, size_bytes), min(other, size_bytes)))
    at = start
    for part, first, last in index.cuts(start, stop):
        assert part < index.part_count
        assert 0 <= first < last <= part_bytes
        assert part * part_bytes + first == at
        at += last - first
    assert at == stop


@given(st.integers(0, 8 * INDEX_BYTES - 1))
def test_every_flipped_bit_is_found(bit: int) -> None:
    data = bytearray(SplitIndex(1 << 40, 64 << 20, b"n" * 16).encode())
    data[bit // 8] ^= 1 << bit % 8
    if data.startswith(MAGIC):
        with pytest.raises(IntegrityError):
            SplitIndex.decode(bytes(data), "k")


@pytest.mark.parametrize("cut", [0, 31, 32, 63, 79, 80, INDEX_BYTES - 1])
def test_a_cut_index_is_damaged(cut: int) -> None:
    with pytest.raises(IntegrityError):
        SplitIndex.decode(SplitIndex(10, 5, bytes(16)).encode()[:cut], "k")


@given(st.binary(max_size=200))
def test_any_bytes_are_an_index_or_damaged(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        SplitIndex.decode(MAGIC + data, "k")


@pytest.mark.parametrize("key", ["a", "a/b/rank-00000.pack", "a/zarr.json"])
def test_a_part_leads_back_to_its_object(key: str) -> None:
    index = SplitIndex(10, 1, b"0123456789abcdef")
    assert part_of(index.part_key(key, 123_456)) == (key, index.nonce)
    assert part_of(key) is None
    assert part_of(index.part_key(key, 1).replace("-00001", "-x")) is None
