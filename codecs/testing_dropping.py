"""The contract of lossy codecs of float32 that turn small elements into zero. Imported by tests only."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.codecs.base import LossyCodec
from stepwell.codecs.buffers import BufferLike, Bytes
from stepwell.codecs.testing import LossyContract, state_like
from stepwell.errors import IntegrityError, UnsupportedValueError

__all__ = ["DroppingCodec", "DroppingContract"]

Floats = npt.NDArray[np.float32]

_EXTREMES: Floats = np.array(
    [0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4028235e38, -3.4028235e38, 1.0, -1.0, 1e-30], "<f4"
)
_NOT_FINITE: Floats = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345], "<u4").view(
    "<f4"
)
_PROPERTIES = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class DroppingCodec(LossyCodec, Protocol):
    """A lossy codec whose frames carry their bound."""

    def bound_of_frame(self, buf: BufferLike) -> float:
        """Return the largest error of any finite element of a frame."""
        ...


class DroppingContract(LossyContract):
    """Subclass, override ``codec`` and the attributes, and the tests come along.

    An element may come back as +0.0, whatever its sign, within the bound; any other keeps its sign.
    """

    def codec(self) -> DroppingCodec:
        """Return the codec under test."""
        raise NotImplementedError

    def check_same(self, decoded: Bytes, raw: Bytes) -> None:
        """Assert the bound and the signs; what is not finite comes back bit for bit."""
        self.check(raw.view(np.uint8), decoded)

    def check(self, raw: Bytes | Floats, decoded: Bytes | None = None) -> Floats:
        """Encode, decode unless that was done, assert; return what came back."""
        frame = self.codec().encode(raw)
        if decoded is None:
            decoded = self.codec().decode(frame)
        true, found = (np.frombuffer(side.tobytes(), "<f4") for side in (raw, decoded))
        finite = np.isfinite(true)
        assert found[~finite].tobytes() == true[~finite].tobytes()
        assert np.isfinite(found[finite]).all()
        assert (np.sign(found[finite]) * np.sign(true[finite]) >= 0).all()
        error = np.abs(found[finite].astype(np.float64) - true[finite])
        assert error.max(initial=0.0) <= self.codec().bound_of_frame(frame)
        return found

    def test_the_bound_of_an_input_is_that_of_its_frame(self) -> None:
        """``bound`` says before what the frame says after."""
        for size in (0, 4, 40_000):
            raw = state_like(size)
            assert self.codec().bound(raw) == self.codec().bound_of_frame(self.codec().encode(raw))

    @_PROPERTIES
    @given(seed=st.integers(0, 1 << 32), size=st.integers(1, 1500), spread=st.floats(0.1, 30))
    def test_numbers_of_any_spread_keep_the_bound(self, seed: int, size: int, spread: float) -> None:
        """Magnitudes over many decades, with extremes and non-finite numbers among them."""
        generator = np.random.default_rng(seed)
        wide = np.exp(generator.normal(0, spread, size)) * generator.choice([-1, 0, 1], size)
        values = np.clip(wide, -3e38, 3e38).astype("<f4")
        special = np.concatenate([_EXTREMES, _NOT_FINITE])
        places = generator.integers(0, size, generator.integers(0, 20))
        values[places] = generator.choice(special, places.size)
        self.check(values)

    def test_extremes_and_payloads(self) -> None:
        """Arrays of one value each, of all, of nothing finite; NaN payloads stay bit for bit."""
        for value in (*_EXTREMES, *_NOT_FINITE):
            self.check(np.full(3000, value, "<f4"))
        self.check(np.repeat(_EXTREMES, 307))
        self.check(np.repeat(np.concatenate([_EXTREMES, _NOT_FINITE]), 307))
        values = state_like(400_000).view("<f4").copy()
        values[[5, 700, 9999, 99_999]] = _NOT_FINITE[[0, 1, 3, 4]]
        self.check(values)

    @pytest.mark.parametrize("size", [1, 2, 3, 1001])
    def test_parts_of_elements_are_refused(self, size: int) -> None:
        """float32 only."""
        with pytest.raises(UnsupportedValueError, match="not whole elements"):
            self.codec().encode(bytes(size))

    def test_input_that_does_not_shrink_costs_half_a_percent(self) -> None:
        """Noise of NaNs is kept whole."""
        noise = np.random.default_rng(0).integers(0, 1 << 32, 50_000, np.uint32) | 0x7F800000
        frame = self.codec().encode(noise.astype("<u4"))
        assert frame.size <= 1.005 * noise.nbytes
        assert self.codec().bound_of_frame(frame) == 0
        assert self.codec().decode(frame).tobytes() == noise.astype("<u4").tobytes()

    def test_the_bound_of_a_damaged_frame_is_not_believed(self) -> None:
        """It is checked as decoding would."""
        encoded = self.codec().encode(state_like(40_000)).tobytes()
        for length in range(0, len(encoded), 97):
            with pytest.raises(IntegrityError):
                self.codec().bound_of_frame(encoded[:length])
        for wrong in (b"", b"x" * 100, encoded + b"\0"):
            with pytest.raises(IntegrityError):
                self.codec().bound_of_frame(wrong)
