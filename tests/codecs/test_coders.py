"""The coders of a thread, and planes made without the one that may be missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from stepwell.codecs import coders, planes
from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.coders import CODERS
from stepwell.codecs.frame import BLOCK_LOG2, Mode, read_frame
from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.testing import CodecContract, state_like


@pytest.fixture
def without_huffman(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode as a platform does that has no Huffman coder."""
    monkeypatch.setattr(coders, "huffman_coder", lambda: None)
    monkeypatch.setattr(planes, "CODERS", coders._Coders())


@pytest.mark.usefixtures("without_huffman")
class TestBytePlaneWithoutHuffman(CodecContract):
    lengths = (1, 5, 8192 * 4, 8192 * 4 + 4, 4 << BLOCK_LOG2, (4 << BLOCK_LOG2) + 5)

    def codec(self) -> BytePlane:
        return BytePlane(4)


def _weights(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.random.default_rng(5).standard_normal(count) * 0.02).astype(np.float32)


def test_without_huffman_planes_are_nearly_as_small(request: pytest.FixtureRequest) -> None:
    weights = _weights(3 << BLOCK_LOG2)
    before = BytePlane(4).encode(weights)
    request.getfixturevalue("without_huffman")
    after = BytePlane(4).encode(weights)
    assert read_frame(after).modes.tolist() == read_frame(before).modes.tolist()
    assert Mode.ZSTD in read_frame(after).modes
    assert after.size < 1.01 * before.size


def test_frames_made_with_huffman_and_without_are_read_alike(request: pytest.FixtureRequest) -> None:
    reference = _weights(2 << BLOCK_LOG2)
    current = reference * np.float32(1 + 2e-6)
    codec = OrderedDelta("float32")
    frames = [codec.encode(current, reference)]
    request.getfixturevalue("without_huffman")
    frames.append(codec.encode(current, reference))
    for frame in frames:
        assert np.array_equal(codec.decode(frame, reference=reference).view(np.float32), current)


@pytest.mark.parametrize("level", [1, 3])
def test_a_coder_says_so_if_it_has_no_room(level: int) -> None:
    data, coder = state_like(4096) & np.uint8(7), CODERS.match_of(level)
    frame = np.zeros(4096, np.uint8)
    length = coder.encode_into(data, frame)
    assert zstandard.ZstdDecompressor().decompress(frame[:length].data) == data.tobytes()
    again = np.zeros(4096, np.uint8)
    assert coder.encode_into(data, again[: length - 1]) == 0
    assert coder.encode_into(data, again[:length]) == length
    assert np.array_equal(again, frame)


def test_coders_are_of_one_thread_each() -> None:
    def mine() -> tuple[object, object, object]:
        return CODERS.match_of(1), CODERS.entropy(), CODERS.decompressor()

    here = mine()
    assert all(one is two for one, two in zip(mine(), here, strict=True))
    with ThreadPoolExecutor(1) as executor:
        there = executor.submit(mine).result()
    assert all(one is not two for one, two in zip(there, here, strict=True))
