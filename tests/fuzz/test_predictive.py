"""Damaged packs, predicted chunks and documents: an IntegrityError or a whole result, nothing else.

As ``test_decoders`` does it for frames: saves told by prediction (``stepwell.pipeline.predictive``), packs
of every kind with all they hold, and the documents that name them are damaged, mostly behind checksums that
are right, and read as a restore reads them. Who knows the checksums could write these; damage by chance
meets the checksums first.
"""

from __future__ import annotations

import numpy as np
import pytest
from dice import FastDice
from fuzzing import RAW_BYTES_MAX, SCRATCH_BYTES, Target, known, suite
from pack_targets import PACKS, PackTarget, opened, read, verify, waited
from saves import AFTER, BEFORE, Here, chunk_of
from targets import READERS, TARGETS

from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.predictive import PREDICTIVE, WeightRule
from stepwell.pipeline.reading import reading_stages


@pytest.mark.parametrize("target", PACKS.values(), ids=list(PACKS))
def test_valid_packs_are_read_within_the_same_limits(target: PackTarget) -> None:
    told: set[str] = set()
    for pack in target.packs:
        index, _ = opened(pack)
        assert verify(pack) == []
        assert list(read(pack)) == [row[0] for row in index["chunks"]]
        target.check(pack)
        told |= {encoding["id"] for row in index["chunks"] for encoding in row[10]}
    assert PREDICTIVE in told
    if target.anywhere:
        assert read(target.packs[0]) == {chunk.key: chunk.buffer.tobytes() for chunk in AFTER}
        assert len(told) == 11, "a pack holds every encoding that a save can have"


@pytest.mark.parametrize("target", READERS.values(), ids=list(READERS))
def test_what_was_found_before(target: Target) -> None:
    assert list(target.corpus.glob("*.bin"))
    known(target)


@pytest.mark.parametrize("target", READERS.values(), ids=list(READERS))
def test_damaged_saves(target: Target) -> None:
    assert suite(target, len(TARGETS))


@pytest.mark.parametrize("size_bytes", [0, 6])
def test_a_prediction_of_no_whole_elements_is_an_error(size_bytes: int) -> None:
    stages = reading_stages()
    moments = BEFORE[:2]
    for step in (40, 41):
        for chunk in moments:
            waited(recover_chunk(chunk_of(chunk.part, chunk.buffer, step), stages, Here()))
        if step == 40:
            bare = chunk_of(2, np.zeros(size_bytes, np.uint8), step)
            waited(recover_chunk(bare, stages, Here()))
    encoding = {"id": PREDICTIVE, "predicts": "weight", "moments": [[0, 1, 0, 0, 4]], "xxh3": "00" * 8}
    numbers = {"decay": 1.0, "step": 1.0, "root": 1.0, "eps": 1.0}
    told = chunk_of(2, bare.buffer, 41, encodings=({**encoding, **numbers},))
    with pytest.raises(IntegrityError, match="step 41, chunk state/2"):
        waited(recover_chunk(told, stages, Here()))


@pytest.mark.parametrize("wrong", ["error", "memory", "unwritten"])
def test_faults_of_readers_are_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, dice, predict = PACKS["predictive"], FastDice(1), WeightRule.predict
    rules: set[WeightRule] = set()
    learning = True

    def careless(self: WeightRule, before: Bytes, momentum: Bytes, variance: Bytes) -> Bytes:
        if learning:
            rules.add(self)
        elif self not in rules and wrong == "error":
            raise IndexError
        elif self not in rules and wrong == "memory":
            np.ones(RAW_BYTES_MAX + 2 * SCRATCH_BYTES, np.uint8)
        return predict(self, before, momentum, variance)

    def search() -> None:
        for _ in range(3000):
            target.check(target.make(dice))

    monkeypatch.setattr(WeightRule, "predict", careless)
    for pack in target.packs:
        target.check(pack)
    learning = False
    if wrong == "unwritten":
        # Momentum has no checksum of its own.
        fresh = lambda *_, **__: np.empty(1200, np.uint8)  # noqa: E731
        monkeypatch.setattr("stepwell.pipeline.delta.decode_difference", fresh)
    with pytest.raises(IndexError if wrong == "error" else AssertionError):
        search()
