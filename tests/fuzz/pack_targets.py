"""Whole packs as targets: opened, verified, and every chunk undone as a reader of saves does it.

A case is the pack of a save; what it is told against is fixed. ``predictive`` damages what is told by
prediction and the momentum it leans on, ``pack`` everything; both mostly put the pack together again with
checksums that are right, so that what lies behind those is reached.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from decoder_targets import damage_inside, damage_section
from dice import Dice, damage
from fuzzing import CORPUS, RAW_BYTES_MAX, SCRATCH_BYTES, bounded
from json_damage import damage_json, dumped
from saves import BEFORE, LAYOUT, Here, packs, predicted_packs

from stepwell.codecs.ordered_delta import encode_difference
from stepwell.errors import IntegrityError
from stepwell.pipeline.casts import DERIVED
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.pack import PackReader
from stepwell.pipeline.predictive import PREDICTIVE
from stepwell.pipeline.reading import reading_stages

Result = TypeVar("Result")
Row = list[Any]
KEY, RAW, OFFSET, SIZE, XXH3, ENCODINGS = 0, 6, 7, 8, 9, 10


def waited(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run what never really waits, without a loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise AssertionError("a pack in memory made its reader wait")


@contextmanager
def filling(filler: int) -> Iterator[None]:
    """Let fresh memory hold `filler`: what is not written shows."""
    empty = np.empty

    def filled(*arguments: Any, **options: Any) -> npt.NDArray[Any]:
        array = empty(*arguments, **options)
        assert array.nbytes <= RAW_BYTES_MAX + SCRATCH_BYTES, f"{array.nbytes} bytes at once were allocated"
        array.reshape(-1).view(np.uint8)[:] = filler
        return array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", filled)
        yield


def verify(case: bytes) -> list[str]:
    """Return what is found wrong with the bytes of a pack, in words."""
    found: list[str] = []
    try:
        faults = waited(PackReader.over(case, "pack").open()).verify_all()
        while fault := waited(anext(faults, "")):
            found.append(fault)
    except IntegrityError as error:
        found.append(str(error))
    return found


def read(case: bytes) -> dict[str, bytes]:
    """Read a pack as far as it can be read: raw bytes by key."""
    found: dict[str, bytes] = {}
    stages = reading_stages()
    for chunk in BEFORE:
        waited(recover_chunk(chunk, stages, Here()))
    try:
        pack = waited(PackReader.over(case, "pack").open())
        for key, row in pack.rows.items():
            chunk = waited(pack.chunk(key, LAYOUT))
            raw = waited(recover_chunk(chunk, stages, Here()))
            assert raw.buffer.dtype == np.uint8
            assert raw.buffer.nbytes == row.raw_bytes
            if row.encodings and row.encodings[0].get("id") in (DERIVED, PREDICTIVE):
                assert xxhash.xxh3_64_hexdigest(raw.buffer.data) == row.encodings[0]["xxh3"]
            found[key] = raw.buffer.tobytes()
    except IntegrityError:
        pass
    return found


@dataclass(frozen=True)
class PackTarget:
    """Readers of packs, and valid packs for them; not `anywhere`: only in encodings and payloads."""

    name: str
    packs: tuple[bytes, ...]
    anywhere: bool
    corpus: Path = field(default=CORPUS / "packs")

    def check(self, case: bytes) -> None:
        """Assert that a pack is refused in the one way allowed, or read wholly."""
        with bounded(), filling(0x00):
            found = read(case)
        if found:
            with filling(0xFF):
                assert read(case) == found, "the same pack gave two results"
        if self.anywhere:
            with bounded():
                verify(case)

    def make(self, dice: Dice) -> bytes:
        """Change a valid pack."""
        pack = self.packs[dice.number(0, len(self.packs) - 1)]
        index, payloads = opened(pack)
        rows: list[Row] = index["chunks"]
        for _ in range(dice.number(0, 3)):
            place = dice.number(0, len(rows) - 1)
            if dice.number(0, 2) and payloads[place]:
                payloads[place] = damage_payload(dice, payloads[place], rows[place])
            else:
                damage_json(dice, rows[place][ENCODINGS])
        body = laid_out(rows, payloads)
        if self.anywhere:
            for _ in range(dice.number(0, 2)):
                damage_json(dice, index)
        encoded = dumped(index)
        if self.anywhere and dice.number(0, 7) == 0:
            encoded = damage(dice, encoded, [encoded])
        case = sealed(pack[:64] + body, encoded)
        if self.anywhere and dice.number(0, 3) == 0:
            case = damage(dice, case, self.packs)
        return case


def opened(pack: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Take a valid pack apart: its index, and the payload of every row."""
    offset, length = struct.unpack_from("<QQ", pack, len(pack) - 64)
    index = json.loads(pack[offset : offset + length])
    return index, [pack[row[OFFSET] : row[OFFSET] + row[SIZE]] for row in index["chunks"]]


def laid_out(rows: Sequence[Row], payloads: Sequence[bytes]) -> bytes:
    """Put payloads in a row and say in the index where they are; return what comes after the header."""
    body = b""
    for row, payload in zip(rows, payloads, strict=True):
        row[OFFSET], row[SIZE], row[XXH3] = 64 + len(body), len(payload), xxhash.xxh3_64_hexdigest(payload)
        body += payload + bytes(-len(payload) % 64)
    return body


def sealed(before: bytes, index: bytes) -> bytes:
    """Put an index, with the trailer that fits it, after everything else of a pack."""
    total = len(before) + len(index) + 64
    digest = xxhash.xxh3_128_digest(index)
    trailer = struct.pack("<QQ16sQ8sII", len(before), len(index), digest, total, b"LLEWPETS", 1, 0)
    return before + index + trailer + struct.pack("<Q", xxhash.xxh3_64_intdigest(trailer))


def damage_payload(dice: Dice, payload: bytes, row: Row) -> bytes:
    """Change a frame in its bytes or in what it holds; or make one that is right, of something else."""
    way = dice.number(0, 3)
    if way == 0:
        return damage_inside(dice, payload)
    if way == 1:
        return damage_section(dice, payload)
    if way == 2 and row[ENCODINGS]:
        size = max(0, row[RAW] // 4 + dice.number(-1, 1)) * 4
        raw = np.frombuffer(dice.some(64, 64) * (size // 64 + 1), np.uint8)[:size]
        return encode_difference(raw, np.zeros(size, np.uint8), "float32").tobytes()
    return damage(dice, payload, [payload])


def _targets() -> Mapping[str, PackTarget]:
    assert LAYOUT.size_bytes <= RAW_BYTES_MAX
    return {
        "predictive": PackTarget("predictive", predicted_packs(), anywhere=False),
        "pack": PackTarget("pack", packs(), anywhere=True),
    }


PACKS = _targets()
