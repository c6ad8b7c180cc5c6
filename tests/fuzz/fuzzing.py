"""Tries made-up cases on a target until a time is over, in the suite or by hand, and keeps what failed.

In the suite: `STEPWELL_FUZZ_SECONDS` in all (default 10), from `STEPWELL_FUZZ_SEED` (default 1).
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
import tracemalloc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import xxhash
from dice import Dice, FastDice, ShrinkingDice
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
RAW_BYTES_MAX = 1 << 15  # what every call allows
SCRATCH_BYTES = 1 << 20  # what it may need besides: chunks, positions, tables
EXAMPLES = 20
FAST_PER_SHRINKING = 50


class Target(Protocol):
    """Something that reads what is not trusted."""

    @property
    def name(self) -> str: ...

    @property
    def corpus(self) -> Path:
        """Where cases that once failed are kept, one a file."""
        ...

    def make(self, dice: Dice) -> bytes:
        """Make a case."""
        ...

    def check(self, case: bytes) -> None:
        """Assert that `case` is refused in the one way allowed, or read wholly."""
        ...


@contextmanager
def bounded() -> Iterator[None]:
    """Assert that nothing inside allocates more than was allowed, plus scratch."""
    tracemalloc.start()  # only here: it makes everything else slow
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= RAW_BYTES_MAX + SCRATCH_BYTES, f"{peak} bytes were allocated"


@st.composite
def cases_of(draw: Any, target: Target) -> bytes:
    """Cases that hypothesis can make smaller."""
    return target.make(ShrinkingDice(draw))


@dataclass
class Attempts:
    """Cases tried on a target until a time; remembers the last that failed."""

    target: Target
    deadline: float
    tried: int = 0
    failed: bytes | None = None

    def __call__(self, case: bytes) -> None:
        """Try one. After the time is over only what has failed is still made smaller."""
        if self.tried and time.monotonic() > self.deadline and self.failed is None:
            return
        self.tried += 1
        try:
            self.target.check(case)
        except BaseException:
            self.failed = case
            raise


def fuzz(target: Target, seconds: float, seed: int) -> int:
    """Try cases until the time is over; return how many. The case that failed is a note of the error."""
    attempts = Attempts(target, time.monotonic() + seconds)

    def attempt(case: bytes) -> None:
        attempts(case)

    run = settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(given(case=cases_of(target))(attempt))
    try:
        while time.monotonic() < attempts.deadline:
            hypothesis.seed(seed)(run)()
            dice = FastDice(seed)
            for _ in range(FAST_PER_SHRINKING * EXAMPLES):
                attempt(target.make(dice))
            seed += 1
    except BaseException as error:
        if attempts.failed is not None:
            error.add_note(f"target {target.name}, seed {seed}, case {attempts.failed.hex()}")
            error.__dict__["case"] = attempts.failed
        raise
    return attempts.tried


def suite(target: Target, count: int) -> int:
    """Fuzz for the share that one of `count` targets has of the suite's time; return the cases tried."""
    seconds = float(os.environ.get("STEPWELL_FUZZ_SECONDS", "10")) / count
    seed = int(os.environ.get("STEPWELL_FUZZ_SEED", "1"))
    tried = fuzz(target, seconds, seed)
    print(f"{target.name}: {tried} cases from seed {seed}")
    return tried


def known(target: Target) -> None:
    """Check what was found before, and made up."""
    for path in sorted(target.corpus.glob("*.bin")):
        target.check(path.read_bytes())


def command(targets: Mapping[str, Target], description: str | None) -> int:
    """Fuzz by hand; the number of targets that failed is the exit status."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--target", action="append", choices=list(targets), help="only these targets")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    failures = 0
    for name in arguments.target or targets:
        target = targets[name]
        print(f"{name}: seed {arguments.seed}", flush=True)
        try:
            tried = fuzz(target, arguments.seconds, arguments.seed)
        except BaseException as error:
            case = error.__dict__.get("case")
            if case is None:
                raise
            failures += 1
            target.corpus.mkdir(exist_ok=True)
            path = target.corpus / f"{name}-{xxhash.xxh3_64_hexdigest(case)}.bin"
            path.write_bytes(case)
            print(f"{name}: FAILED, kept as {path}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: {tried} cases, nothing found", flush=True)
    return failures
