"""A tier that does not answer while a run is restored: another one serves, or it is said; nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from failure_rig import Run, break_tier, uninterrupted, within

from stepwell.errors import DeadlineError, TransientStoreError
from stepwell.stores.fault import Fault, FaultKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NEWEST = "*/step/000000000004/*.pack"
EVERYTHING = "*.pack"


@pytest.fixture
def run(memory_directory: Path) -> Run:
    run = Run(memory_directory)
    run.train(range(5))
    return run


@pytest.mark.parametrize("key", [NEWEST, EVERYTHING])
def test_one_503_while_reading_cost_a_step(run: Run, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    copy = run.copied("copy", memory=False)
    store = break_tier(monkeypatch, "directory", Fault(FaultKind.UNAVAILABLE, "fetch", key, times=2))
    restored, bits = copy.restored()
    assert len(store().events) == 2
    assert restored is not None
    assert (restored.step, restored.exact, restored.lost_steps) == (4, True, 0)
    assert bits == uninterrupted(5)[4]


def test_store_that_stays_away_is_an_error_not_an_older_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = run.copied("copy", memory=False)
    with monkeypatch.context() as patch:
        break_tier(patch, "directory", Fault(FaultKind.UNAVAILABLE, "fetch", NEWEST, times=None))
        with pytest.raises(TransientStoreError, match="503"):
            copy.restored()
    restored, bits = copy.restored()
    assert restored is not None
    assert (restored.step, restored.lost_steps) == (4, 0)
    assert bits == uninterrupted(5)[4]


@pytest.mark.parametrize("key", [NEWEST, EVERYTHING])
def test_restore_hung_for_good_on_a_store_that_never_answered(
    run: Run, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    copy = run.copied("copy", memory=False)
    store = break_tier(monkeypatch, "directory", Fault(FaultKind.STALL, "fetch", key, times=None))
    with (
        within(20.0),
        pytest.raises(DeadlineError, match=r"tier directory did not answer a read within 0\.3 s"),
    ):
        copy.restored(read_deadline_s=0.3)
    store().release()


@pytest.mark.parametrize("kind", [FaultKind.UNAVAILABLE, FaultKind.STALL])
def test_another_tier_serves_in_its_place(run: Run, monkeypatch: pytest.MonkeyPatch, kind: FaultKind) -> None:
    store = break_tier(monkeypatch, "memory", Fault(kind, "fetch", EVERYTHING, times=None))
    with within(30.0):
        restored, bits = run.restored(read_deadline_s=0.3)
    store().release()
    assert restored is not None
    assert (restored.step, restored.tier, restored.lost_steps) == (4, "directory", 0)
    assert any("memory" in fault for fault in restored.faults)
    assert bits == uninterrupted(5)[4]
    if kind is FaultKind.STALL:
        assert len(store().events) == 1, "what did not answer once is not waited for again"
