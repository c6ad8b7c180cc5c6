"""The contracts codecs keep, as classes of tests to subclass. Imported by tests only.

Needs ``pytest`` and ``hypothesis``, which come with the extra ``test``.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numcodecs  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.codecs.base import LossyCodec, PlainCodec
from stepwell.codecs.buffers import BufferLike, Bytes
from stepwell.codecs.registry import codec_from
from stepwell.codecs.xxh3 import Xxh3
from stepwell.errors import IntegrityError, UnsupportedValueError, UsageError

__all__ = ["CodecContract", "LossyContract", "peak_bytes", "state_like"]

_PROPERTIES = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


def state_like(size_bytes: int, seed: int = 0) -> Bytes:
    """Return bytes of normally distributed float32, like weights, of any length."""
    values = np.random.default_rng(seed).standard_normal(-(-size_bytes // 4), np.float32) * np.float32(0.02)
    return values.view(np.uint8)[:size_bytes]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that `call` had allocated at once; an IntegrityError ends it quietly."""
    tracemalloc.start()
    try:
        call()
    except IntegrityError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


class CodecContract:
    """Subclass, override ``codec`` and the attributes, and the tests come along.

    Attributes
    ----------
    itemsize : int
        Raw lengths must be a multiple of it.
    lengths : tuple of int
        Raw lengths at which something changes inside the codec; 0 is always tried.
    finds_every_flip : bool
        The codec is a checksum.
    """

    itemsize: int = 1
    lengths: tuple[int, ...] = (1, 7, 4096, 100_003)
    finds_every_flip: bool = False

    def codec(self) -> PlainCodec:
        """Return the codec under test."""
        raise NotImplementedError

    def check_same(self, decoded: Bytes, raw: Bytes) -> None:
        """Assert that `decoded` is what `raw` must come back as: bit for bit, unless overridden."""
        assert np.array_equal(decoded, raw)

    def _whole(self, raw: bytes) -> bytes:
        return raw[: len(raw) // self.itemsize * self.itemsize]

    def test_every_length_comes_back_bit_for_bit(self) -> None:
        """Lengths around every internal boundary; the input stays as it was."""
        for length in (0, *self.lengths):
            raw = state_like(length)
            kept = raw.copy()
            decoded = self.codec().decode(self.codec().encode(raw))
            assert decoded.dtype == np.uint8
            self.check_same(decoded, kept)
            assert np.array_equal(raw, kept), length

    @_PROPERTIES
    @given(raw=st.binary(max_size=3000))
    def test_any_bytes_come_back(self, raw: bytes) -> None:
        """Whatever the bytes, read back also through xxh3."""
        raw = self._whole(raw)
        encoded = self.codec().encode(raw)
        self.check_same(self.codec().decode(encoded), np.frombuffer(raw, np.uint8))
        again = self.codec().decode(Xxh3().decode(Xxh3().encode(encoded)))
        assert np.array_equal(again, self.codec().decode(encoded))

    def test_any_contiguous_buffer_is_taken(self) -> None:
        """Bytes, memory views, read-only, unaligned, Fortran-ordered, multi-dimensional."""
        raw = state_like(4800)
        expected = self.codec().encode(raw)
        unaligned = np.empty(4801, np.uint8)[1:]
        unaligned[:] = raw
        read_only = raw.copy()
        read_only.flags.writeable = False
        fortran = raw.view(np.float32).reshape(30, 40).T
        assert fortran.flags.f_contiguous
        sources: list[BufferLike] = [
            raw.tobytes(),
            bytearray(raw),
            memoryview(raw.data),
            unaligned,
            read_only,
        ]
        sources += [fortran, raw.view(np.float32).reshape(2, 3, 200), memoryview(raw.view(np.float32).data)]
        for source in sources:
            assert np.array_equal(self.codec().encode(source), expected)
        shifted = np.empty(expected.size + 1, np.uint8)[1:]
        shifted[:] = expected
        for framed in (expected.tobytes(), bytearray(expected), memoryview(expected.data), shifted):
            self.check_same(self.codec().decode(framed), raw)

    @pytest.mark.parametrize(
        "wrong",
        [np.arange(100)[::2], np.array([{}, []], object), "text", 7, None, np.zeros((4, 6))[:, :3]],
        ids=["strided", "objects", "str", "int", "none", "slice"],
    )
    def test_what_is_no_contiguous_buffer_is_refused(self, wrong: object) -> None:
        """In either direction, by one error."""
        with pytest.raises(UnsupportedValueError, match="contiguous buffer"):
            self.codec().encode(cast("BufferLike", wrong))
        with pytest.raises(UnsupportedValueError, match="contiguous buffer"):
            self.codec().decode(cast("BufferLike", wrong))

    def test_out_is_honoured(self) -> None:
        """Decoded in place where asked; a buffer of another size or a read-only one is refused."""
        raw = state_like(5200)
        encoded = self.codec().encode(raw)
        out = np.zeros(1300, np.float32)
        decoded = self.codec().decode(encoded, out)
        assert np.shares_memory(decoded, out)
        self.check_same(out.view(np.uint8), raw)
        for size in (0, raw.size - 4, raw.size + 4):
            with pytest.raises(IntegrityError, match="buffer"):
                self.codec().decode(encoded, np.zeros(size, np.uint8))
        with pytest.raises(UsageError, match="read-only"):
            self.codec().decode(encoded, bytes(raw.size))

    def test_configuration_is_json_and_makes_an_equal_codec(self) -> None:
        """Through numcodecs' registry (entry points), ours, and copying."""
        codec = self.codec()
        config = json.loads(json.dumps(codec.get_config()))
        raw = state_like(4000)
        encoded = codec.encode(raw)
        for other in (numcodecs.get_codec(config), codec_from(config), copy.deepcopy(codec)):
            assert type(other) is type(codec)
            assert other == codec
            assert np.array_equal(other.decode(encoded), codec.decode(encoded))

    def test_more_than_expected_is_refused(self) -> None:
        """``max_bytes`` bounds what a decoder may be talked into."""
        encoded = self.codec().encode(state_like(4000))
        assert self.codec().decode(encoded, max_bytes=4000).size == 4000
        with pytest.raises(IntegrityError, match="4000"):
            self.codec().decode(encoded, max_bytes=3999)

    def test_cut_short_or_followed_by_something_is_refused(self) -> None:
        """At every length."""
        encoded = self.codec().encode(state_like(600)).tobytes()
        for length in range(len(encoded)):
            with pytest.raises(IntegrityError):
                self.codec().decode(encoded[:length])
        for rest in (b"\0", b"x" * 9, encoded):
            with pytest.raises(IntegrityError):
                self.codec().decode(encoded + rest)

    def test_every_flipped_bit_is_found_with_the_checksum_outermost(self) -> None:
        """And without it a flip gives IntegrityError or other bytes, never another error."""
        raw = np.concatenate([state_like(240), np.zeros(80, np.uint8)])
        inner = self.codec().encode(raw)
        outer = Xxh3().encode(inner)
        for bit in range(8 * outer.size):
            damaged = outer.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(IntegrityError):
                Xxh3().decode(damaged)
        for bit in range(8 * inner.size):
            damaged = inner.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                decoded = self.codec().decode(damaged, max_bytes=2 * raw.size)
            except IntegrityError:
                continue
            assert not self.finds_every_flip
            assert decoded.size <= 2 * raw.size

    @_PROPERTIES
    @given(garbage=st.binary(max_size=200), keep=st.integers(0, 40), raw=st.binary(max_size=100))
    def test_garbage_is_refused_or_decodes_within_bounds(self, garbage: bytes, keep: int, raw: bytes) -> None:
        """Random bytes, and random bytes behind a true beginning."""
        start = self.codec().encode(self._whole(raw)).tobytes()[:keep]
        try:
            decoded = self.codec().decode(start + garbage, max_bytes=1 << 16)
        except IntegrityError:
            return
        assert decoded.size <= 1 << 16

    def test_one_codec_serves_many_threads(self) -> None:
        """Nothing is shared between calls."""
        codec = self.codec()
        inputs = [state_like(160_000 + 16 * seed, seed) for seed in range(12)]
        with ThreadPoolExecutor(4) as pool:
            encoded = list(pool.map(codec.encode, inputs))
            decoded = list(pool.map(codec.decode, encoded))
        for raw, found in zip(inputs, decoded, strict=True):
            self.check_same(found, raw)

    def test_other_threads_run_meanwhile(self) -> None:
        """The interpreter lock is let go: with forced switching off, another thread still advances."""
        raw = state_like(8 << 20)
        ticks = 0
        seen: list[int] = []

        def work() -> None:
            codec = self.codec()
            out = np.empty(raw.size, np.uint8)
            encoded = codec.encode(raw)
            # A fast decoder is through before the other thread wakes. Again, then: between the
            # calls the lock is not let go.
            calls: tuple[Callable[[], object], ...]
            calls = (lambda: codec.encode(raw), lambda: codec.decode(encoded, out))
            for call in calls:
                seen.append(ticks)
                for _ in range(50):
                    call()
                    if ticks > seen[-1]:
                        break
            seen.append(ticks)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        try:
            worker = threading.Thread(target=work)
            worker.start()
            while worker.is_alive():
                ticks += 1
                worker.join(0.001)  # lets the lock go; taking it again needs the worker to do the same
        finally:
            sys.setswitchinterval(interval)
        assert seen[0] < seen[1] < seen[2]


class LossyContract(CodecContract):
    """The same for codecs that lose something: every value within the bound, of its class and sign.

    Attributes
    ----------
    dtype : str
        ``float32`` or ``bfloat16``.
    """

    itemsize = 4
    dtype: str = "float32"

    def codec(self) -> LossyCodec:
        """Return the codec under test."""
        raise NotImplementedError

    def values(self, raw: Bytes) -> npt.NDArray[np.float64]:
        """Return the values of raw bytes; a bfloat16 is the upper half of a float32."""
        raw = np.frombuffer(raw.tobytes(), np.uint8)
        if self.dtype == "bfloat16":
            raw = (raw.view("<u2").astype("<u4") << 16).view(np.uint8)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return raw.view("<f4").astype(np.float64)

    def error(self, found: npt.NDArray[np.float64], true: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the error of finite values in the unit of ``bound``."""
        return np.abs(found - true)

    def check_same(self, decoded: Bytes, raw: Bytes) -> None:
        """Assert the bound, the class and the sign; what is not finite comes back bit for bit."""
        assert decoded.size == raw.size
        found, true = self.values(decoded), self.values(raw)
        finite = np.isfinite(true)
        words = f"<u{self.itemsize}"
        bits, true_bits = (
            np.frombuffer(side.tobytes(), np.uint8).view(words)[~finite] for side in (decoded, raw)
        )
        assert np.array_equal(bits, true_bits)
        assert np.isfinite(found[finite]).all()
        assert np.array_equal(np.signbit(found[finite]), np.signbit(true[finite]))
        assert not found[true == 0].any()
        bound = self.codec().bound(raw)
        if bound is not None and finite.any():
            assert float(self.error(found[finite], true[finite]).max()) <= bound

    def test_a_bound_is_stated_for_every_input(self) -> None:
        """Also for none at all, where it is zero."""
        assert self.codec().bound(b"") in (0.0, None)
        typical = state_like(4000)
        if self.dtype == "bfloat16":
            typical = np.ascontiguousarray(typical.view("<u2")[1::2]).view(np.uint8)
        bound = self.codec().bound(typical)
        assert bound is None or bound > 0

    def test_what_comes_back_once_is_a_fixed_result(self) -> None:
        """Two decoders agree bit for bit: the writer can know what the reader will have."""
        encoded = self.codec().encode(state_like(40_000))
        assert np.array_equal(self.codec().decode(encoded), self.codec().decode(encoded.copy()))
