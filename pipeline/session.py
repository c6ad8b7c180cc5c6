"""One open run in one process: what the faces call, and what decides for them.

Everything public here belongs to the trainer's thread, except ``drain`` (signal handlers) and what
`RunnerEvents` calls from the runner's thread; what both touch is guarded by one lock.

Over 400 lines: one object owns the order in which threads, locks and tiers begin and end, and that order is
easier to keep right in one place than across files.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from stepwell.errors import (
    DeadlineError,
    IntegrityError,
    NoSpaceError,
    NotCommittedError,
    StepwellError,
    UsageError,
)
from stepwell.pipeline.base import ChunkStage
from stepwell.pipeline.capture import Capture
from stepwell.pipeline.digesting import WeightDigests
from stepwell.pipeline.forks import at_fork
from stepwell.pipeline.gate import Gate
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import STEPS, Series
from stepwell.pipeline.ledger import Ledger, log_limit_bytes
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.lives import Lives
from stepwell.pipeline.loop import loop_of
from stepwell.pipeline.outcome import Metrics, Restored, SaveRecord
from stepwell.pipeline.proving import Proving
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.records import Link, RunRecord
from stepwell.pipeline.recovery import Outcome, Recovery
from stepwell.pipeline.regions import BaseRegions, Regions
from stepwell.pipeline.runner import Runner
from stepwell.pipeline.session_options import SessionOptions
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.source import SaveSource
from stepwell.pipeline.submission import Submission
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.update import environment_of
from stepwell.pipeline.workers import Workers
from stepwell.stores.arena import Arena
from stepwell.stores.base import Failure

__all__ = ["Session"]

Result = TypeVar("Result")

OPEN_DEADLINE_S = 300.0  # listing a run, even on a slow network file system


class Session:
    """An open run.

    Parameters
    ----------
    live : LiveState
    tiers : sequence of Tier
        Nearest first.
    record : RunRecord
    options : SessionOptions
    stages : callable
        Makes fresh chunk stages.
    arena : Arena or None
        Where the memory tier is.
    fresh : bool
        Begin anew although something is committed.
    closing : ExitStack
        Run at the end: locks and stores.
    """

    def __init__(
        self,
        live: LiveState,
        tiers: Sequence[Tier],
        record: RunRecord,
        options: SessionOptions,
        *,
        stages: Callable[[], list[ChunkStage]],
        arena: Arena | None,
        fresh: bool,
        closing: ExitStack,
    ) -> None:
        self.live = live
        self.tiers = list(tiers)
        self.options = options
        self.restored: Restored | None = None
        self._stages = stages
        self._arena = arena
        self._fresh = fresh
        self._closing = closing
        self._pid = os.getpid()
        self._closed = False
        self._base_late = self._log_late = False
        self._previous: Link | None = None
        self._last_step: int | None = None
        self._hooks_s = 0.0
        self._non_empty = False
        self._handles: deque[SaveHandle] = deque()
        self.ledger = Ledger([tier.name for tier in tiers])
        self._regions = Regions(arena)
        self._background = Workers(1, "stepwell-reserve")
        stall_limit_s = 0.0 if options.skip else options.stall_limit_s
        self._bases = BaseRegions(self._regions, stall_limit_s, self._background.submit)
        self._digests = WeightDigests(live, options.chunk_bytes)
        chunk_stages = stages()
        self._closed_loop = loop_of(chunk_stages)
        self._runner = Runner(
            run=record.run,
            tiers=self.tiers,
            chunk_stages=chunk_stages,
            shard=Shard(),
            inventory=Inventory(),
            events=self.ledger,
            budget_bytes=options.budget_bytes,
            threads=options.threads,
            retry_for_s=options.stall_limit_s,
        )
        self._environment: dict[str, object] = dict(environment_of("cpu"))
        self._lives = Lives(self._runner, record, self._environment)
        self._capture: Capture | None = None
        self._submission: Submission | None = None
        self._proving: Proving | None = None
        self.gate = Gate(options.drain_deadline_s)

    # Opening and closing.

    def open(self) -> None:
        """Start the background threads, read what is committed, reserve the capture slots."""
        options = self.options
        at_fork(self)
        self._runner.start()
        self._wait(self._lives.check())
        inventory = self._wait(Inventory.read(self.tiers, self._runner.replicate, self.ledger.give_up))
        self._runner.inventory = inventory
        self._non_empty = not inventory.is_empty
        self._capture = Capture(
            self.live,
            mode=options.capture,
            reserve=self._regions.reserve,
            reserve_base=self._bases.take,
            recycle=self._bases.recycle,
            slots=options.slots,
            stall_limit_s=0.0 if options.skip else options.stall_limit_s,
            chunk_bytes=options.chunk_bytes,
            eager_digest=self._digests.eager,
        )
        self._proving = Proving(
            self.live,
            self._capture,
            self._runner,
            self._digests,
            self._reading_stages,
            self.ledger.distrust,
            exact=self._closed_loop is None,
        )
        self._submission = Submission(
            self._runner,
            self._capture,
            self._digests,
            self._bases,
            self._regions,
            self._proving,
            ready_timeout_s=options.stall_limit_s,
            marks=self._closed_loop is None,
        )

    def abandon(self) -> None:
        """Give everything back after ``open`` failed."""
        self._closed = True
        self._runner.stop(OPEN_DEADLINE_S)
        self._digests.close()
        self._background.close()
        if self._arena is not None and not self._arena.keys():
            self._arena.remove()  # nothing is in it but what was being reserved
        self._closing.close()

    def leave_to_parent(self) -> None:
        """In a forked child: remove the hooks; takes no lock."""
        if self._capture is not None:
            self._capture.tap.leave_to_parent()

    def close(self) -> None:
        """Bring everything to the farthest tier, then release memory and locks. Idempotent.

        Raises
        ------
        DeadlineError
            Something did not arrive within ``close_deadline_s``; the arena is kept.
        StepwellError
            A background failure not yet raised.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        deadline = time.monotonic() + self.options.close_deadline_s
        late = self._outwait(deadline)
        safe = False
        try:
            safe = not late and self._end_life(deadline)
            if self._proving is not None:
                self._proving.close()
        finally:
            if self._runner.stop(max(1.0, deadline - time.monotonic())):
                try:
                    self._release_memory(remove=safe)
                finally:
                    self._closing.close()
            else:
                # Something may still be written: the locks go when that has ended, or the process.
                if self._capture is not None:
                    self._capture.tap.leave_to_parent()
                self._runner.ended.add_done_callback(lambda _: self._closing.close())
        self._warn(stacklevel=4)
        error = self.ledger.take_error()
        if late:
            missing = DeadlineError(
                f"step {late[-1].step} did not arrive in every tier within "
                f"{self.options.close_deadline_s} s; what is in memory is kept for the next start"
            )
            raise missing from error
        if error is not None:
            raise error

    def drain(self) -> None:
        """Wait, within ``drain_deadline_s``, until what was saved is in every tier.

        For a thread of its own: it also waits for a save that is being captured.
        """
        if not self._closed and os.getpid() == self._pid:
            deadline = time.monotonic() + self.options.drain_deadline_s
            self.gate.wait_idle(self.options.drain_deadline_s)
            self._outwait(deadline)

    def hold(self) -> None:
        """Begin no further save: the process is about to end. For signal handlers."""
        self.gate.hold()

    def go_on(self) -> None:
        """Take `hold` back. For signal handlers."""
        self.gate.go_on()

    # Saving and restoring.

    @property
    def next_step(self) -> int | None:
        """First step that is left; None as long as nothing was restored or saved."""
        self._check_usable()
        if self._lives.current is None:
            return None
        return 0 if self._last_step is None else self._last_step + 1

    def restore(self) -> Restored | None:
        """Load the newest whole save in place; see `SyncWell.restore`."""
        self._check_usable()
        if self._lives.current is not None:
            raise UsageError("restore comes first: this run has saved or restored already")
        self._warn(stacklevel=4)
        if self._fresh:
            self._wait(self._lives.begin(None))
            return None
        began = time.monotonic()
        newest = self._runner.inventory.newest_known()
        workers = Workers(max(1, self.options.threads), "stepwell-restore", background=False)
        try:
            source = SaveSource(
                self.tiers, self._runner.inventory, self._runner.commit, self.options.read_deadline_s
            )
            outcome, recovery = self._wait(self._recover(source, workers), None)
        finally:
            workers.close()
        for warning in recovery.warnings:
            warnings.warn(f"stepwell: {warning}", stacklevel=3)
        if outcome is None or newest is None:
            if newest is not None:
                self._tell_lost(f"nothing was restored: the run ended at step {newest.step}, which is gone")
            self._wait(self._lives.begin(None))
            return None
        target = outcome.chain.target
        lost = max(0, newest.step - target.step)
        restored = Restored(
            step=target.step,
            tier=outcome.tier,
            exact=outcome.exact,
            bound=outcome.bound,
            seconds=time.monotonic() - began,
            lost_steps=lost,
            incarnation=target.incarnation,
            base_step=(outcome.chain.base or outcome.chain.steps[0]).step,
            replayed=outcome.updates,
            faults=tuple(source.faults),
        )
        if lost:
            why = "; ".join(restored.faults[-5:]) or "newer ones are not whole"
            self._tell_lost(
                f"step {restored.step} was restored, {lost} steps before the newest that was committed: {why}"
            )
        self._wait(self._lives.begin(target))
        self._go_on_from(outcome, source)
        self.restored = restored
        return restored

    def save(self, step: int, *, base: bool = False) -> SaveHandle:
        """Capture the state; see `SyncWell.save`."""
        self._check_usable()
        with self.gate:
            return self._save(step, base=base)

    def _save(self, step: int, *, base: bool) -> SaveHandle:
        began = time.perf_counter()
        capture, submission = self._ready_to_save(step)
        incarnation = self._lives.current or self._wait(self._lives.begin(None))
        link = Link(incarnation.incarnation, step)
        handle = SaveHandle(step, [tier.name for tier in self.tiers])
        waited = self._waited_s
        distrust = self.ledger.take_distrust()
        if distrust is not None:
            warnings.warn(f"stepwell: {distrust}; the state is captured from now on", stacklevel=3)
            capture.use_state(distrust)
        must = self.ledger.must_base() is not None or distrust is not None
        if not self._bases.busy:
            self._log_late = False
        elif not self._log_late and self.ledger.base_is_overdue(self.options):
            # Bases fall behind: without this the log, and memory, would grow as long as they do. But a
            # base that does not come through at all is waited for once, not at every save.
            self._log_late = not self._bases.outwait()
        # While a base travels, the old base and the log hold: a scheduled one can wait for its region.
        # One that must be is waited for, but once: in vain, and the next free region will do.
        if self._bases.busy and (self._base_late or not must):
            due = False
        else:
            due = must or self.ledger.base_is_due(self.options)
        try:
            captured = capture.take(step, base=base or due)
        except (DeadlineError, NoSpaceError) as error:
            self._last_step = step
            return self._skipped(handle, error)
        if base or due:
            self._base_late = captured.base is None
        waited = self._waited_s - waited
        hooks, self._hooks_s = capture.tap.blocked_s - self._hooks_s, capture.tap.blocked_s
        blocked = time.perf_counter() - began - waited + hooks
        record = SaveRecord(
            step,
            str(captured.kind),
            captured.base is not None,
            captured.reason or (str(captured.base_error) if captured.base_error else None),
            blocked,
            waited,
        )
        base_bytes = 0 if captured.base is None else captured.base.layout.size_bytes
        # Before the runner has it, so that what happens there comes after it here.
        self.ledger.saved(record, link, base_bytes)
        self._track(handle)
        submission.submit(link, handle, captured, self._previous, base_asked=base or must)
        self._previous, self._last_step = link, step
        return handle

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing while the block runs; the next save is a base."""
        self._check_usable()
        if self._capture is not None:
            self._capture.tap.break_interval("capture was paused")
        yield

    def should_save(self, step: int) -> bool:
        """Whether the schedule asks for a save of this step."""
        return step % self.options.save_every == 0

    def latest_step(self, tier: str | None = None) -> int | None:
        """Newest committed step, in any tier or in one."""
        self._check_usable()
        steps = self.all_steps(tier)
        return steps[-1] if steps else None

    def all_steps(self, tier: str | None = None) -> list[int]:
        """Committed steps of the live lineage, oldest first, in any tier or in one."""
        self._check_usable()
        names = [one.name for one in self.tiers]
        name = names[-1] if tier == "remote" else tier
        if name is not None and name not in names:
            raise UsageError(f"there is no tier {tier!r} here; the tiers are {', '.join(names)}")
        return self._wait(self._lives.committed_steps(name))

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Block until every save so far is committed everywhere, or raise what made it fail.

        Raises
        ------
        DeadlineError
            `timeout_s` passed first.
        """
        self._check_usable()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        late = self._outwait(deadline)
        if late:
            raise DeadlineError(f"step {late[0].step} is still on its way after {timeout_s} s")
        self._tell(stacklevel=5)

    def on_their_way(self) -> list[SaveHandle]:
        """Saves that may have no outcome yet, oldest first."""
        self._check_usable()
        return list(self._handles)

    def check_for_errors(self) -> None:
        """Raise the first background failure not yet raised."""
        self._check_owner()
        self._tell(stacklevel=5)

    def metrics(self) -> Metrics:
        """Figures since the run was opened."""
        self._check_owner()
        lost = {tier.name: tier.lost for tier in self.tiers if tier.lost is not None}
        return self.ledger.metrics(self.restored, lost, self._forecast_bytes())

    # Inside.

    @property
    def _waited_s(self) -> float:
        """Time the trainer waited for room so far."""
        capture = self._capture
        return self._bases.waited_s + (0.0 if capture is None else capture.tap.waited_s)

    def _warn(self, stacklevel: int) -> None:
        """Tell what went on in the background that is no error."""
        for warning in self.ledger.take_warnings():
            warnings.warn(f"stepwell: {warning}", stacklevel=stacklevel)

    def _tell(self, stacklevel: int) -> None:
        """Warn, and raise the first failure not yet raised."""
        self._warn(stacklevel)
        error = self.ledger.take_error()
        if error is not None:
            raise error

    def _ready_to_save(self, step: int) -> tuple[Capture, Submission]:
        """Check everything that forbids a save, and raise what failed in the background."""
        self._check_usable()
        self._tell(stacklevel=6)
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < STEPS:
            raise UsageError(f"step must be an int from 0 to {STEPS - 1}, not {step!r}")
        if self._lives.current is None and self._non_empty and not self._fresh:
            newest = self._runner.inventory.newest()
            raise UsageError(
                f"this run has checkpoints up to step {newest.step if newest else '?'} that were not "
                "restored; call restore() first, or open with fresh=True to begin anew"
            )
        if self._last_step is not None and step <= self._last_step:
            raise UsageError(
                f"step {step} was asked to be saved after step {self._last_step}; steps only grow"
            )
        assert self._capture is not None
        assert self._submission is not None
        return self._capture, self._submission

    def _reading_stages(self) -> list[ChunkStage]:
        """Make fresh stages for reading: what was saved decides, so everything of ours can be undone."""
        return reading_stages(self._stages())

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed:
            raise UsageError("this run is closed; open it again")

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this run was opened by process {self._pid} and is used in its forked child {os.getpid()}, "
                "where its threads do not exist; start processes with 'spawn', and save in the parent"
            )

    def _skipped(self, handle: SaveHandle, error: StepwellError) -> SaveHandle:
        """Give a save up for want of room: training goes on, the step is not protected."""
        skipped = SaveHandle(handle.step, handle.tiers, skipped=str(error))
        skipped.fail(NotCommittedError(f"step {handle.step} was not saved: {error}"))
        self.ledger.skipped(SaveRecord(handle.step, "skipped", False, str(error), 0.0, 0.0))
        warnings.warn(
            f"stepwell: step {handle.step} is not protected: {error}; the next save is a base", stacklevel=4
        )
        return skipped

    def _track(self, handle: SaveHandle) -> None:
        while self._handles and all(self._handles[0].future(name).done() for name in self._handles[0].tiers):
            self._handles.popleft()
        self._handles.append(handle)

    def _outwait(self, deadline: float | None) -> list[SaveHandle]:
        """Wait for every save on its way; return those that have no outcome by `deadline`."""
        late = []
        for handle in tuple(self._handles):
            futures = [handle.future(name) for name in handle.tiers]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if concurrent.futures.wait(futures, left).not_done:
                late.append(handle)
        return late

    def _wait(
        self, work: Coroutine[object, object, Result], timeout_s: float | None = OPEN_DEADLINE_S
    ) -> Result:
        """Run a coroutine on the runner's loop and wait for it."""
        future = self._runner.call(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the work's own deadline
            future.cancel()
            raise DeadlineError(f"the stores did not answer within {timeout_s} s") from None

    async def _recover(self, source: SaveSource, workers: Workers) -> tuple[Outcome | None, Recovery]:
        recovery = Recovery(
            self.live,
            source,
            stages=self._reading_stages,
            digest=self._digests.whole,
            context=workers,
            inexact=self.options.inexact,
        )
        return await recovery.run(), recovery

    def _end_life(self, deadline: float) -> bool:
        """End the life in every tier; True if nothing would be lost with the arena."""
        left_s = max(1.0, deadline - time.monotonic())
        if self._runner.dead is not None:
            return False
        far = self.tiers[-1]
        if self._previous is not None:
            for name, error in self._wait(self._lives.end(), left_s).items():
                tier = next(tier for tier in self.tiers if tier.name == name)
                self.ledger.failed(Series.BASE, self._previous, tier, error)
        if far.survives is Failure.PROCESS:
            return False
        if not self._wait(self._lives.newest_is_whole_in(far), left_s):
            return False
        if far.survives is Failure.EVERYTHING:
            self._wait(self._lives.free(), left_s)
        return True

    def _go_on_from(self, outcome: Outcome, source: SaveSource) -> None:
        """Lead the log on from a restored save, if that is sound; else the next save is a base."""
        self._last_step = outcome.chain.target.step
        if not outcome.exact:
            self.ledger.want_base("what was restored is not exactly what was saved")
            return
        chain = outcome.chain
        base_bytes, log_bytes = self._wait(self._lives.adopt(chain, source))
        if chain.base is None:
            return  # a captured state leads on by the next capture alone
        assert self._capture is not None
        self._previous = chain.target
        self._capture.rebase()
        self.ledger.went_on_from(chain.base, base_bytes, log_bytes, len(chain.steps))
        if any(tier.needs_base is not None for tier in self.tiers):
            self.ledger.want_base("a tier lacks a part of the restored chain")

    def _tell_lost(self, message: str) -> None:
        if self.options.on_lost_steps == "raise":
            raise IntegrityError(message)
        warnings.warn(f"stepwell: {message}", stacklevel=4)

    def _release_memory(self, *, remove: bool) -> None:
        if self._capture is not None:
            self._capture.close()
        self._bases.close()
        self._digests.close()
        self._background.close()
        self._submission = self._capture = None
        if remove and self._arena is not None:
            self._arena.remove()

    def _forecast_bytes(self) -> dict[str, int]:
        """Memory of the arena (slots, bases kept and one in the making, log), and of a closed loop."""
        base = self.ledger.base_bytes
        keep = max((tier.keep for tier in self.tiers if tier.memory is not None), default=0)
        capture = 0 if self._capture is None else self._capture.memory_bytes
        forecast = {
            "capture_slots": capture,
            "bases": (keep + 1) * base,
            "log": int(keep * log_limit_bytes(self.options, base)) + capture,
        }
        if self._closed_loop is not None:
            gradient = self._capture is not None and self._capture.mode == "gradient"
            forecast["closed_loop"] = self._closed_loop.forecast_bytes(
                self.live.trained_specs, gradient=gradient
            )
        return forecast
