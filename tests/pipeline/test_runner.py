"""The runner: every save has an outcome, every slot comes back, and faults go where they belong."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from runner_rig import LIFE, PATIENCE_S, Rig, state_chunks

from stepwell.errors import (
    DeadlineError,
    IntegrityError,
    PermanentStoreError,
    StepwellError,
    StoreError,
    UsageError,
)
from stepwell.pipeline.base import Chunk, StageContext
from stepwell.pipeline.keys import Series
from stepwell.pipeline.records import Link
from stepwell.stores.fault import Fault, FaultKind

STALLED = Fault(FaultKind.STALL, "put", "*.pack", times=None)


def outcome(handle: object, tier: str) -> BaseException | None:
    return handle.future(tier).exception(PATIENCE_S)  # type: ignore[attr-defined, no-any-return]


def test_saves_are_committed_in_order_in_every_tier(memory_directory: Path) -> None:
    with Rig(memory_directory) as rig:
        handles = [rig.submit(step) for step in range(1, 6)]
        for handle in handles:
            handle.until("near", PATIENCE_S)
            handle.until("far", PATIENCE_S)
        rig.quiet()
        for tier in ("near", "far"):
            told = [event for event in rig.told.events if event[0] == "committed" and event[2] == tier]
            assert [event[1] for event in told] == [1, 2, 3, 4, 5]
        assert sorted(rig.released) == [1, 2, 3, 4, 5]
        assert rig.runner._handles == set()
        for handle in handles:
            manifest = rig.runner.call(
                rig.commit().recover(rig.tiers[1], Series.STEP, Link(LIFE, handle.step))
            ).result(PATIENCE_S)
            assert manifest.self_contained
            assert manifest.previous == Link(LIFE, handle.step - 1)
        assert len(list((memory_directory / "far" / "layouts").iterdir())) == 1


@pytest.mark.parametrize("tier", ["near", "far"])
def test_whoever_waits_for_a_handle_finds_everything_told(memory_directory: Path, tier: str) -> None:
    """check_for_errors right after a handle raised must raise as well."""
    denied = Fault(FaultKind.DENIED, "put", "*2/*.pack")
    with Rig(memory_directory, denied) as rig:
        seen: dict[int, list[object]] = {}
        for step in (1, 2):
            job = rig.job(step)
            job.handle.future(tier).add_done_callback(
                lambda _, step=step: seen.setdefault(step, rig.told.kinds(step))  # type: ignore[misc]
            )
            rig.runner.submit(job)
            outcome(job.handle, tier)
        assert "committed" in seen[1]
        assert ("failed" if tier == "far" else "committed") in seen[2]


def test_failure_in_one_tier_is_that_tier_s_alone(memory_directory: Path) -> None:
    with Rig(memory_directory, Fault(FaultKind.DENIED, "create", "*2/commit.json")) as rig:
        handles = [rig.submit(step) for step in range(1, 4)]
        assert isinstance(outcome(handles[1], "far"), PermanentStoreError)
        assert outcome(handles[1], "near") is None
        # A captured state stands for itself: the next one counts without a base.
        assert outcome(handles[2], "far") is None
        assert "unprotected" not in rig.told.kinds(2)
        assert rig.tiers[1].reaches(3)


def test_tier_that_was_given_up_is_not_written_any_more(memory_directory: Path) -> None:
    with Rig(memory_directory) as rig:
        rig.tiers[1].lost = "it burns"
        handle = rig.submit(1)
        with pytest.raises(StoreError, match="tier far was given up: it burns"):
            handle.until("far", PATIENCE_S)
        handle.until("near", PATIENCE_S)
        assert not rig.store.boundary_count


def torn(after: int) -> Callable[[], AsyncIterator[Chunk]]:
    async def chunks() -> AsyncIterator[Chunk]:
        count = 0
        async for chunk in state_chunks(1):
            if count == after:
                raise IntegrityError("step 1, update 0: written to while it was held; it is not saved")
            count += 1
            yield chunk

    return chunks


@pytest.mark.parametrize("after", [0, 1])
def test_save_that_cannot_be_encoded_fails_everywhere_and_the_next_goes_on(
    memory_directory: Path, after: int
) -> None:
    with Rig(memory_directory) as rig:
        failed, following = rig.submit(1, chunks=torn(after)), rig.submit(2)
        for tier in ("near", "far"):
            with pytest.raises(IntegrityError, match="written to while"):
                failed.until(tier, PATIENCE_S)
            following.until(tier, PATIENCE_S)
        rig.quiet()
        assert rig.told.kinds(1) == ["failed", "unprotected"]
        assert sorted(rig.released) == [1, 2], "its slot comes back, once"
        assert rig.runner._handles == set()
        assert not list((memory_directory / "far").glob("*/step/000000000001"))


def test_stage_that_refuses_a_chunk(memory_directory: Path) -> None:
    class Refusing:
        name = "refusing"

        async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
            if chunk.step == 1:
                raise StepwellError(f"{chunk.key} cannot be told")
            return chunk

        async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
            return chunk

    with Rig(memory_directory, stages=(Refusing(),)) as rig:
        failed, following = rig.submit(1), rig.submit(2)
        with pytest.raises(StepwellError, match="state/0 cannot be told"):
            failed.until("near", PATIENCE_S)
        following.until("far", PATIENCE_S)
        assert sorted(rig.released) == [1, 2]


def test_fault_of_the_runner_itself_is_heard_by_everyone_who_waits(memory_directory: Path) -> None:
    def broken() -> dict[str, object]:
        raise ZeroDivisionError("a bug")

    stalled = Fault(FaultKind.STALL, "put", "*1/*.pack")
    with Rig(memory_directory, stalled) as rig:
        waiting, failed, later = rig.submit(1), rig.submit(2, header=broken), rig.submit(3)
        for handle in (waiting, failed, later):
            with pytest.raises(StepwellError, match="the background runner ended"):
                handle.until("far", PATIENCE_S)
        rig.runner.ended.result(PATIENCE_S)
        assert rig.runner.dead is not None
        with pytest.raises(UsageError, match="background runner has ended"):
            rig.submit(4)
        with pytest.raises(UsageError, match="not running"):
            rig.runner.call(rig.store.exists("a"))


def test_stalled_tier_holds_no_more_than_its_queue(memory_directory: Path) -> None:
    """Each encoded save is about a slot of bytes; beyond the bound the slots themselves wait."""
    with Rig(memory_directory, STALLED) as rig:
        handles = [rig.submit(step) for step in range(1, 21)]
        # One is being written, two wait, one waits for its place; the near tier has them all.
        handles[3].until("near", PATIENCE_S)
        assert len(rig.released) <= 6
        assert not handles[0].done("far")
        with pytest.raises(DeadlineError, match=r"step 1 was not committed in tier far within 0.01 s"):
            handles[0].until("far", 0.01)
        rig.store.release()
        for handle in handles:
            handle.until("far", PATIENCE_S)
        assert sorted(rig.released) == list(range(1, 21))


def test_stop_finishes_what_was_handed_over(memory_directory: Path) -> None:
    with Rig(memory_directory) as rig:
        handles = [rig.submit(step) for step in range(1, 6)]
        assert rig.runner.stop(PATIENCE_S)
        assert all(handle.done("near") and handle.done("far") for handle in handles)
        assert rig.runner.stop(PATIENCE_S), "twice is no fault"


def test_stop_ends_at_its_deadline_and_tells_when_it_is_over(memory_directory: Path) -> None:
    with Rig(memory_directory, STALLED) as rig:
        handle = rig.submit(1)
        assert not rig.runner.stop(0.05)
        assert not rig.runner.ended.done()
        rig.store.release()
        rig.runner.ended.result(PATIENCE_S)
        assert handle.done("far")


def test_slot_is_given_back_only_when_the_digest_has_read_it(memory_directory: Path) -> None:
    digest: concurrent.futures.Future[object] = concurrent.futures.Future()
    encoded = threading.Event()

    async def chunks() -> AsyncIterator[Chunk]:
        async for chunk in state_chunks(1):
            yield chunk
        encoded.set()

    with Rig(memory_directory) as rig:
        handle = rig.submit(1, chunks=chunks, digest=digest)
        assert encoded.wait(PATIENCE_S)
        assert rig.released == []
        digest.set_result(None)
        handle.until("far", PATIENCE_S)
        assert rig.released == [1]
