"""The checksum: every flipped bit found, nothing believed before it is verified."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from stepwell.codecs.testing import CodecContract, state_like
from stepwell.codecs.xxh3 import Xxh3
from stepwell.errors import IntegrityError


class TestXxh3(CodecContract):
    finds_every_flip = True

    def codec(self) -> Xxh3:
        return Xxh3()


def test_the_digest_is_what_any_xxh3_makes() -> None:
    framed = Xxh3().encode(b"state").tobytes()
    assert framed == b"state" + xxhash.xxh3_64_intdigest(b"state").to_bytes(8, "big")


def test_decoding_makes_no_copy() -> None:
    framed = Xxh3().encode(state_like(1000))
    assert np.shares_memory(Xxh3().decode(framed), framed)


def test_out_is_written_only_after_verification() -> None:
    framed = Xxh3().encode(state_like(1000))
    framed[5] ^= 1
    out = np.full(1000, 9, np.uint8)
    with pytest.raises(IntegrityError, match="checksum mismatch over 1000 bytes: stored"):
        Xxh3().decode(framed, out)
    assert (out == 9).all()


def test_every_byte_of_a_large_buffer_is_covered() -> None:
    framed = Xxh3().encode(state_like(300_000))
    for position in np.random.default_rng(0).integers(0, framed.size, 200):
        framed[position] ^= 0x10
        with pytest.raises(IntegrityError):
            Xxh3().decode(framed)
        framed[position] ^= 0x10
    Xxh3().decode(framed)
