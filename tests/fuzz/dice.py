"""Where damage comes from: choices of hypothesis or of a seed, and the ways in which bytes are changed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hypothesis import strategies as st

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
