"""Huffman coding through the library of numcodecs: standard frames, no matches, or no coder at all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numcodecs.lz4
import numcodecs.zstd
import numpy as np
import pytest
import zstandard

from stepwell.codecs import huffman
from stepwell.codecs.buffers import Bytes
from stepwell.codecs.huffman import HuffmanCoder, huffman_coder
from stepwell.codecs.testing import state_like

needs_library = pytest.mark.skipif(
    huffman_coder() is None, reason="the platform does not let the functions of libzstd be seen"
)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Look for the library anew, before and after."""
    huffman._library.cache_clear()
    yield
    huffman._library.cache_clear()


def made() -> HuffmanCoder:
    coder = huffman_coder()
    assert coder is not None
    return coder


def skewed(size: int, seed: int = 0) -> Bytes:
    """Return a plane that leans to a few values, as differences of weights do."""
    values = np.random.default_rng(seed).exponential(2.0, size)
    return np.minimum(values, 255).astype(np.uint8)


def entropy_of(data: Bytes) -> float:
    counts = np.bincount(data)
    counts = counts[counts > 0]
    return float((counts * np.log2(data.size / counts)).sum() / 8)


@needs_library
@pytest.mark.parametrize("size", [64, 4096, (1 << 15) + 1, 1 << 16, (1 << 16) + 1, 1 << 17])
def test_frames_are_standard_ones(size: int) -> None:
    data, frame = skewed(size), np.zeros(size, np.uint8)
    length = made().encode_into(data, frame)
    assert 0 < length < size
    assert zstandard.get_frame_parameters(frame[:length].data).content_size == size
    assert zstandard.ZstdDecompressor().decompress(frame[:length].data) == data.tobytes()


@needs_library
def test_what_leans_to_a_few_values_is_coded_by_its_entropy_and_not_by_matches() -> None:
    data, frame = skewed(1 << 17), np.empty(1 << 17, np.uint8)
    length = made().encode_into(data, frame)
    assert length < 1.05 * entropy_of(data)  # of Huffman codes and their tables
    assert length < 0.9 * len(zstandard.ZstdCompressor(level=1).compress(data))


@needs_library
def test_a_table_of_its_own_for_each_part_of_a_large_plane() -> None:
    data = np.concatenate([skewed(1 << 15, seed) + np.uint8(16 * seed) for seed in range(4)])
    frame = np.empty(data.size, np.uint8)
    assert made().encode_into(data, frame) < 0.9 * entropy_of(data)


@needs_library
@pytest.mark.parametrize("room", [0, 1, 17, 1000])
def test_nothing_is_written_past_the_room_there_is(room: int) -> None:
    data, memory = skewed(1 << 16), np.full(2000, 0xA5, np.uint8)
    assert made().encode_into(data, memory[:room]) == 0
    assert (memory[room:] == 0xA5).all()


@needs_library
def test_noise_does_not_fit_in_less_than_itself() -> None:
    noise = np.random.default_rng(3).integers(0, 256, 1 << 17, np.uint8)
    coder = made()
    assert coder.encode_into(noise, np.empty(noise.size, np.uint8)) == 0
    data, frame = skewed(1 << 12), np.empty(1 << 12, np.uint8)  # and the coder serves on
    length = coder.encode_into(data, frame)
    assert zstandard.ZstdDecompressor().decompress(frame[:length].data) == data.tobytes()


@needs_library
def test_the_same_bytes_make_the_same_frame_whatever_came_before() -> None:
    one, two = np.empty(1 << 17, np.uint8), np.empty(1 << 17, np.uint8)
    data, coder = skewed(1 << 17), made()
    length = coder.encode_into(data, one)
    coder.encode_into(state_like(1 << 17), two)
    assert coder.encode_into(data, two) == length
    assert np.array_equal(one[:length], two[:length])


@needs_library
def test_a_coder_for_each_thread() -> None:
    def encode(seed: int) -> bool:
        coder, decompressor = made(), zstandard.ZstdDecompressor()
        for turn in range(20):
            data = skewed(1 << 14, 100 * seed + turn)
            frame = np.empty(data.size, np.uint8)
            length = coder.encode_into(data, frame)
            if decompressor.decompress(frame[:length].data) != data.tobytes():
                return False
        return True

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(encode, range(4)))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("path", [numcodecs.lz4.__file__, __file__, "/nowhere/libzstd.so"])
def test_a_library_without_the_functions_means_no_coder(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(numcodecs.zstd, "__file__", path)
    assert huffman_coder() is None


@needs_library
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "change",
    [
        {huffman._LITERALS: 2},  # never compress them
        {huffman._TARGET_LENGTH: 0},  # look for matches at every other byte
        {huffman._STRATEGY: 99},  # refused
    ],
)
def test_settings_without_their_effect_mean_no_coder(
    monkeypatch: pytest.MonkeyPatch, change: dict[int, int]
) -> None:
    monkeypatch.setattr(huffman, "_SETTINGS", {**huffman._SETTINGS, **change})
    assert huffman_coder() is None


@pytest.mark.usefixtures("fresh")
def test_too_old_a_library_means_no_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huffman, "_VERSION_MIN", 1 << 30)
    assert huffman_coder() is None
