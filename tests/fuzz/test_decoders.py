"""Every decoder of the registry against damaged frames: an IntegrityError or a whole result, nothing else.

Valid frames are damaged (bits, words, cuts, splices, and the contents of sections put together
again, so that what lies behind the outer checks is reached too) and others made up: some by
hypothesis, which makes smaller what fails, many by a plain generator, which is faster. For each it
is checked that nothing but IntegrityError (FormatError is one) is raised, that no warning is, that
nothing is allocated beyond what the caller allowed plus the scratch of one chunk, and that every
byte of a result was written.

In the suite: `STEPWELL_FUZZ_SECONDS` in all (default 10), from `STEPWELL_FUZZ_SEED` (default 1).
By hand, ten minutes for each decoder and each reader of packs, manifests and predicted chunks, failures
are kept as files in ``tests/fuzz/corpus``::

    python -m tests.fuzz.test_decoders --seconds 600 [--target stepwell.codebook ...] [--seed 7]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

sys.path.append(str(Path(__file__).parent))  # by hand no conftest does that

from decoder_targets import CONFIGS, DECODERS, DecoderTarget
from fuzzing import RAW_BYTES_MAX, SCRATCH_BYTES, command, fuzz, known, suite
from targets import TARGETS

from stepwell.codecs.registry import CODECS
from stepwell.errors import IntegrityError


def test_every_decoder_of_the_registry_is_here() -> None:
    assert set(CONFIGS) == set(CODECS)


@pytest.mark.parametrize("target", DECODERS.values(), ids=list(DECODERS))
def test_valid_frames_are_decoded_within_the_same_limits(target: DecoderTarget) -> None:
    for frame, size in zip(target.frames, target.sizes, strict=True):
        found = target.decode(frame, None, RAW_BYTES_MAX)
        assert found.size == size
        target.check(frame)


@pytest.mark.parametrize("target", DECODERS.values(), ids=list(DECODERS))
def test_what_was_found_before(target: DecoderTarget) -> None:
    known(target)


@pytest.mark.parametrize("target", DECODERS.values(), ids=list(DECODERS))
def test_damaged_frames(target: DecoderTarget) -> None:
    assert suite(target, len(TARGETS))


def careless(wrong: str) -> DecoderTarget:
    """A decoder with a fault that some frames show."""
    kept: list[Any] = []

    def decode(
        frame: bytes, out: npt.NDArray[np.uint8] | None, max_bytes: int | None
    ) -> npt.NDArray[np.uint8]:
        if len(frame) < 20:
            raise IntegrityError("cut short")
        found = np.zeros(8, np.uint8) if out is None else out
        if frame[17] > 200:
            if wrong == "error":
                raise IndexError
            if wrong == "memory":
                kept.append(np.ones(RAW_BYTES_MAX + 2 * SCRATCH_BYTES, np.uint8))
            if wrong == "unwritten":
                return found
        found[:] = frame[17]
        return found

    return DecoderTarget("careless", decode, (bytes(100),), (8,))


@pytest.mark.parametrize(
    ("wrong", "error"), [("error", IndexError), ("memory", AssertionError), ("unwritten", AssertionError)]
)
def test_faults_are_found(wrong: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        fuzz(careless(wrong), 20, 1)
    case = caught.value.__dict__["case"]
    assert case.hex() in caught.value.__notes__[-1]
    with pytest.raises(error):
        careless(wrong).check(case)


if __name__ == "__main__":
    sys.exit(command(TARGETS, __doc__))
