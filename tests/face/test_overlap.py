"""Bases that are copied while training goes on: the run is that without, also where one is spoiled."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, uninterrupted

from stepwell.pipeline import overlap
from stepwell.pipeline.overlap import OverlappedCopy

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(overlap, "OVERLAP_BYTES_MIN", 1)
    return Run(memory_directory)


def on_disk(run: Run) -> list[int]:
    return sorted(int(path.parent.name) for path in run.directory.glob("*/base/*/commit.json"))


def test_restores_from_overlapped_bases_are_exact(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    whole = OverlappedCopy.__call__

    def counted(self: OverlappedCopy) -> None:
        whole(self)
        copied.append(self._step)

    monkeypatch.setattr(OverlappedCopy, "__call__", counted)
    run.train(range(10), base_at=(4, 7))
    assert copied == [4, 7]
    assert on_disk(run) == [4, 7]
    shutil.rmtree(run.memory)
    for path in run.directory.glob("*/step/*/commit.json"):
        path.unlink()  # only the base itself leads to step 7
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier) == (7, "directory")
    assert bits == uninterrupted(10)[7]


@pytest.mark.parametrize("element", [0, 3], ids=["remembered element", "seen by the digest alone"])
def test_spoiled_base_is_dropped_with_a_warning_and_costs_no_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, element: int
) -> None:
    """Something writes through ``.data`` for a moment, so no version tells."""
    job = Job(width=32)  # more elements than are remembered
    weight = job.model[0].weight
    whole = OverlappedCopy.__call__
    spoiled: list[int] = []

    def spoil(self: OverlappedCopy) -> None:
        kept = weight.detach().clone()
        weight.data.view(-1)[element] += 1
        try:
            whole(self)
        finally:
            weight.data.copy_(kept)
            spoiled.append(self._step)

    monkeypatch.setattr(OverlappedCopy, "__call__", spoil)
    with run.crashing(job) as well, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(10):
            job.step()
            well.save(step, base=step in (4, 7))
            well.wait_until_finished(PATIENCE_S)
        well.check_for_errors()
    assert spoiled == [4], "the base of step 7 is copied at the save"
    said = [str(one.message) for one in told]
    assert len([one for one in said if "the base of step 4 was given up" in one]) == 1, said
    assert 4 not in on_disk(run)
    for memory in (True, False):
        again = Job(seed=99, width=32)
        with run.copied(f"copy-{memory}", memory=memory).open(again) as well:
            restored = well.restore()
            bits = again.bits()
        assert restored is not None
        assert (restored.step, restored.exact) == (9, True)
        assert bits == uninterrupted(10, 32)[9]
