"""Every decoder of the registry against damaged frames: an IntegrityError or a whole result, nothing else.

Valid frames are damaged (bits, words, cuts, splices, and the contents of sections put together
again, so that what lies behind the outer checks is reached too) and others made up: some by
hypothesis, which makes smaller what fails, many by a plain generator, which is faster. For each it
is checked that nothing but IntegrityError (FormatError is one) is raised, that no warning is, that
nothing is allocated beyond what the caller allowed plus the scratch of one chunk, and that every
byte of a result was written.

In the suite: `STEPWELL_FUZZ_SECONDS` in all (default 10), from `STEPWELL_FUZZ_SEED` (default 1).
By hand, ten minutes for each decoder, failures are kept as files in ``tests/fuzz/corpus``::

    python -m tests.fuzz.test_decoders --seconds 600 [--target stepwell.codebook ...] [--seed 7]
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import struct
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepwell.codecs.codebook import Codebook
from stepwell.codecs.frame import read_frame
from stepwell.codecs.ordered_delta import decode_difference, encode_difference
from stepwell.codecs.registry import CODECS, codec_from
from stepwell.codecs.sections import compose, encode_section, read_section
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.xor_delta import decode_xor, encode_xor
from stepwell.codecs.xxh3 import Xxh3
from stepwell.errors import IntegrityError

CORPUS = Path(__file__).parent / "corpus"
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "stepwell.byteplane": [{"itemsize": 1}, {"itemsize": 4}, {"itemsize": 16}],
    "stepwell.codebook": [{"block": 64}, {"block": 256}],
    "stepwell.int4": [{"block": 16}, {"dtype": "bfloat16"}],
    "stepwell.int8": [{"block": 16}, {"dtype": "bfloat16"}],
    "stepwell.log_quant": [{"block": 16}, {"bits": 4}, {"dtype": "bfloat16"}],
    "stepwell.ordered_delta": [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "uint8"}],
    "stepwell.scaled_bf16": [{}],
    "stepwell.threshold_sparse": [
        {"rate": 0.03},
        {"rate": 0.03, "values": "int8"},
        {"rate": 0.3, "values": "int8"},
    ],
    "stepwell.xor_delta": [{"dtype": "float32"}, {"dtype": "bfloat16"}],
    "stepwell.xxh3": [{}],
}
RAW_BYTES_MAX = 1 << 15  # what every call allows
SCRATCH_BYTES = 1 << 20  # what it may need besides: chunks, positions, tables
EXAMPLES = 20
FAST_PER_SHRINKING = 50
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    0xFFFF,
    1 << 16,
    1 << 30,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
]
NUMBERS += [1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

Decode = Callable[[bytes, npt.NDArray[np.uint8] | None, int | None], npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class Target:
    """A decoder and valid frames for it; `inspect` are other readers of the same frames."""

    name: str
    decode: Decode
    frames: tuple[bytes, ...]
    sizes: tuple[int, ...]
    inspect: tuple[Callable[[bytes], object], ...] = ()


def raws() -> list[npt.NDArray[np.float32]]:
    """Return small arrays that make the codecs use all they have."""
    generator = np.random.default_rng(5)
    plain = generator.standard_normal(700, np.float32)
    special = generator.standard_normal(1500, np.float32) ** 3
    special[[1, 700, 1400]] = [np.nan, np.inf, -0.0]
    sparse = np.zeros(5000, np.float32)
    sparse[generator.integers(0, 5000, 30)] = generator.standard_normal(30)
    halves = (plain.view(np.uint32) & 0xFFFF0000).view(np.float32) * np.float32(0.3)
    long = np.repeat(np.float32([1.0, 2.5]), 3000)
    return [plain, special, sparse, halves, np.abs(plain) + 1e-9, long, plain[:5], plain[:0]]


def targets() -> Iterator[Target]:
    """Yield every decoder of the registry, and the two that need a reference."""
    arrays = raws()
    sizes = tuple(array.nbytes for array in arrays)
    readers: dict[str, tuple[Callable[[bytes], object], ...]] = {
        "stepwell.codebook": (Codebook.bound_of_frame, Codebook.bounds_of_frame),
        "stepwell.threshold_sparse": (ThresholdSparse.bound_of_frame, ThresholdSparse.threshold),
    }
    for codec_id, configs in CONFIGS.items():
        for config in configs:
            codec = codec_from({"id": codec_id, **config})
            frames = tuple(codec.encode(array).tobytes() for array in arrays)

            def decode(
                frame: bytes, out: npt.NDArray[np.uint8] | None, max_bytes: int | None, codec: Any = codec
            ) -> npt.NDArray[np.uint8]:
                found: npt.NDArray[np.uint8] = codec.decode(frame, out, max_bytes=max_bytes)
                return found

            name = "-".join([codec_id, *(f"{value}" for value in config.values())])
            yield Target(name, decode, frames, sizes, readers.get(codec_id, ()))
    reference = np.abs(arrays[0])
    for name, encode, undo in (
        ("ordered_delta-reference", encode_difference, decode_difference),
        ("xor_delta-reference", encode_xor, decode_xor),
    ):

        def decode_against(
            frame: bytes, out: npt.NDArray[np.uint8] | None, max_bytes: int | None, undo: Any = undo
        ) -> npt.NDArray[np.uint8]:
            found: npt.NDArray[np.uint8] = undo(frame, reference, "float32", out, max_bytes=max_bytes)
            return found

        frames = (encode(arrays[0], reference, "float32").tobytes(),)
        yield Target(f"stepwell.{name}", decode_against, frames, (reference.nbytes,))


TARGETS = {target.name: target for target in targets()}


def check(target: Target, frame: bytes) -> None:
    """Assert that `target` refuses `frame` in the one way allowed, or decodes it wholly."""
    found: npt.NDArray[np.uint8] | None = None
    tracemalloc.start()  # only here: it makes everything else slow
    try:
        found = target.decode(frame, None, RAW_BYTES_MAX)
    except IntegrityError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= RAW_BYTES_MAX + SCRATCH_BYTES, f"{peak} bytes were allocated"
    for read in target.inspect:
        try:
            read(frame)
        except IntegrityError:
            assert found is None or read is Codebook.bounds_of_frame
    if found is None:
        return
    assert found.dtype == np.uint8
    assert found.size <= RAW_BYTES_MAX
    for filler in (0x00, 0xFF):  # a byte that was not written shows
        out = np.full(found.size, filler, np.uint8)
        target.decode(frame, out, None)
        assert np.array_equal(out, found), "the same frame gave two results"


class Dice(Protocol):
    """Where the choices come from."""

    def number(self, low: int, high: int) -> int:
        """Return one of ``low`` to ``high``, both included."""
        ...

    def some(self, low: int, high: int) -> bytes:
        """Return so many bytes."""
        ...


class ShrinkingDice:
    """Hypothesis chooses, and can make what fails smaller; about a hundred frames a second."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def some(self, low: int, high: int) -> bytes:
        return bytes(self.draw(st.binary(min_size=low, max_size=high)))


class FastDice:
    """A seeded generator chooses; thousands of frames a second."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def some(self, low: int, high: int) -> bytes:
        return self.random.randbytes(self.random.randint(low, high))


def damage(dice: Dice, frame: bytes, others: Sequence[bytes]) -> bytes:
    """Change a frame in one way."""
    size = len(frame)
    # Half of the changes meet the first bytes, where what is declared stands.
    start = dice.number(0, min(size, 64) if dice.number(0, 1) else size)
    stop = min(size, start + dice.number(1, 40))
    way = dice.number(0, 8)
    if way == 0 and start < size:
        return frame[:start] + bytes([frame[start] ^ 1 << dice.number(0, 7)]) + frame[start + 1 :]
    if way == 1:
        return frame[:start]
    if way == 2:
        return frame[:start] + dice.some(0, 40) + frame[start:]
    if way == 3:
        return frame[:start] + frame[stop:]
    if way == 4:
        return frame[:start] + dice.some(stop - start, stop - start) + frame[stop:]
    if way == 5:
        return frame[:stop] + frame[start:]
    if way == 6:
        return frame[:start] + others[dice.number(0, len(others) - 1)][start:]
    width, letter = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))[dice.number(0, 3)]
    number = NUMBERS[dice.number(0, len(NUMBERS) - 1)] + dice.number(-1, 1)
    return frame[:start] + struct.pack(f"<{letter}", number & (1 << 8 * width) - 1) + frame[start + width :]


def take_apart(frame: bytes) -> tuple[bytes, int, int, bytes, list[bytes]] | None:
    """Return magic, kind, length, parameters and sections of a composed frame; None of any other."""
    if len(frame) < 16 or not frame.startswith(b"SW") or frame.startswith(b"SWPF"):
        return None
    magic, version, kind, count, zero, length = struct.unpack_from("<4sBBBBQ", frame)
    if version != 1 or zero or count > 8 or len(frame) < 16 + 8 * count:
        return None
    sizes = struct.unpack_from(f"<{count}Q", frame, 16)
    start = len(frame) - sum(sizes)
    if not 16 + 8 * count <= start <= 16 + 8 * count + 64:
        return None
    parameters, sections = frame[16 + 8 * count : start], []
    for size in sizes:
        sections.append(frame[start : start + size])
        start += size
    return magic, kind, length, parameters, sections


def damage_section(dice: Dice, section: bytes) -> bytes:
    """Change the elements that a section holds, or its bytes if it is none of byte planes."""
    data = np.frombuffer(section, np.uint8)
    try:
        header = read_frame(data, RAW_BYTES_MAX)
        raw = read_section(data, header.itemsize, header.length, "section").tobytes()
    except IntegrityError:
        return damage(dice, section, [section])
    raw = damage(dice, raw, [raw])
    values = np.frombuffer(raw[: len(raw) // header.itemsize * header.itemsize], f"<u{header.itemsize}")
    return encode_section(values, 1).tobytes()


def damage_inside(dice: Dice, frame: bytes) -> bytes:
    """Change the parameters or what a section holds, and put the frame together so that it fits."""
    parts = take_apart(frame)
    if parts is None or not parts[4]:
        return frame
    magic, kind, length, parameters, sections = parts
    which = dice.number(0, len(sections))
    if which < len(sections):
        sections[which] = damage_section(dice, sections[which])
    elif parameters:
        changed = damage(dice, parameters, [parameters])
        parameters = changed.ljust(len(parameters), b"\0")[: len(parameters)]
    if dice.number(0, 3) == 0:
        length += 4 * dice.number(-8, 8)
    length = max(0, min(length, 2 * RAW_BYTES_MAX))  # it may be damaged already
    arrays = [np.frombuffer(part, np.uint8) for part in sections]
    return compose(magic, kind, length, parameters, arrays).tobytes()


def make_frame(dice: Dice, target: Target) -> bytes:
    """Make a frame for `target`: valid ones changed, or bytes made up behind a true beginning."""
    frame = target.frames[dice.number(0, len(target.frames) - 1)]
    if dice.number(0, 9) == 0:
        return frame[: dice.number(0, 24)] + dice.some(0, 300)
    for _ in range(dice.number(0, 4)):
        outside = dice.number(0, 1)
        frame = damage(dice, frame, target.frames) if outside else damage_inside(dice, frame)
    if target.name == "stepwell.xxh3" and dice.number(0, 1):
        frame = Xxh3().encode(frame).tobytes()
    return frame


@st.composite
def frames_of(draw: Any, target: Target) -> bytes:
    """Frames that hypothesis can make smaller."""
    return make_frame(ShrinkingDice(draw), target)


@dataclass
class Attempts:
    """Frames tried on a target until a time; remembers the last that failed."""

    target: Target
    deadline: float
    tried: int = 0
    failed: bytes | None = None

    def __call__(self, frame: bytes) -> None:
        """Try one. After the time is over only what has failed is still made smaller."""
        if time.monotonic() > self.deadline and self.failed is None:
            return
        self.tried += 1
        try:
            check(self.target, frame)
        except BaseException:
            self.failed = frame
            raise


def fuzz(target: Target, seconds: float, seed: int) -> int:
    """Try frames until the time is over; return how many. The frame that failed is a note of the error."""
    attempts = Attempts(target, time.monotonic() + seconds)

    def attempt(frame: bytes) -> None:
        attempts(frame)

    run = settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(given(frame=frames_of(target))(attempt))
    try:
        while time.monotonic() < attempts.deadline:
            hypothesis.seed(seed)(run)()
            dice = FastDice(seed)
            for _ in range(FAST_PER_SHRINKING * EXAMPLES):
                attempt(make_frame(dice, target))
            seed += 1
    except BaseException as error:
        if attempts.failed is not None:
            error.add_note(f"target {target.name}, seed {seed}, frame {attempts.failed.hex()}")
            error.__dict__["frame"] = attempts.failed
        raise
    return attempts.tried


def test_every_decoder_of_the_registry_is_here() -> None:
    assert set(CONFIGS) == set(CODECS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_valid_frames_are_decoded_within_the_same_limits(target: Target) -> None:
    for frame, size in zip(target.frames, target.sizes, strict=True):
        found = target.decode(frame, None, RAW_BYTES_MAX)
        assert found.size == size
        check(target, frame)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_what_was_found_before(target: Target) -> None:
    for path in sorted(CORPUS.glob("*.bin")):
        check(target, path.read_bytes())


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_damaged_frames(target: Target) -> None:
    seconds = float(os.environ.get("STEPWELL_FUZZ_SECONDS", "10")) / len(TARGETS)
    seed = int(os.environ.get("STEPWELL_FUZZ_SEED", "1"))
    tried = fuzz(target, seconds, seed)
    print(f"{target.name}: {tried} frames from seed {seed}")
    assert tried


def careless(wrong: str) -> Target:
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

    return Target("careless", decode, (bytes(100),), (8,))


@pytest.mark.parametrize(
    ("wrong", "error"), [("error", IndexError), ("memory", AssertionError), ("unwritten", AssertionError)]
)
def test_faults_are_found(wrong: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        fuzz(careless(wrong), 20, 1)
    frame = caught.value.__dict__["frame"]
    assert frame.hex() in caught.value.__notes__[-1]
    with pytest.raises(error):
        check(careless(wrong), frame)


def main() -> int:
    """Fuzz by hand; the number of decoders that failed is the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for each decoder")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only these decoders")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    failures = 0
    for name in arguments.target or TARGETS:
        print(f"{name}: seed {arguments.seed}", flush=True)
        try:
            tried = fuzz(TARGETS[name], arguments.seconds, arguments.seed)
        except BaseException as error:
            frame = error.__dict__.get("frame")
            if frame is None:
                raise
            failures += 1
            path = CORPUS / f"{name}-{xxhash.xxh3_64_hexdigest(frame)}.bin"
            path.write_bytes(frame)
            print(f"{name}: FAILED, kept as {path}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: {tried} frames, nothing found", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
