"""Capture: what the trainer's thread does at a save. ``CaptureStage`` then reads what it took.

A save is described by the gradients of the updates since the last one (`stepwell.pipeline.gradients`)
and everything updates do not account for, or by the whole state. Which one is decided here, every
time, and why not gradients is said.

Just over 400 lines: what is decided at a save reads the same state in one go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal

import numpy as np
import torch

from stepwell.errors import DeadlineError, NoSpaceError, StepwellError
from stepwell.pipeline.capture_stage import CaptureStage
from stepwell.pipeline.captured import BaseCopy, CapturedSave, SaveKind, StateCopy, room_for_base
from stepwell.pipeline.collected import Collected
from stepwell.pipeline.copier import Copier
from stepwell.pipeline.gradients import GradientTap, Interval, TapTarget
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.overlap import Guard, OverlappedCopy, may_wait
from stepwell.pipeline.pack import HEADER_BYTES
from stepwell.pipeline.plan import CHUNK_BYTES, plan_layout
from stepwell.pipeline.slots import CopyPlan, LayoutMemory, Region, SlotPool
from stepwell.pipeline.tree import JsonValue
from stepwell.pipeline.watch import ParameterWatch

__all__ = ["Capture", "CaptureStage", "Mode", "room_for_base"]

Mode = Literal["gradient", "state"]

BREAKS_IN_A_ROW = 3
"""Saves in a row that had to fall back before gradients are given up: capturing them would only cost."""

AUX_KEPT = 4
"""Aux memories kept for reuse: one for each capture slot and one in the making."""

PLANS_KEPT = 4
"""Layouts kept: of the aux part and of the whole state, and the same before the last change."""

FIRST = "this is the first save"


class Capture:
    """Takes saves on the trainer's thread.

    Parameters
    ----------
    live : LiveState
    mode : "gradient" or "state"
        What to begin with; state capture is chosen by itself where gradients cannot do.
    reserve : callable
        ``size_bytes -> Region`` for capture slots.
    reserve_base : callable, optional
        The same for bases; may wait for a base in flight, within a deadline. Default `reserve`.
    recycle : callable, optional
        Takes back regions that `reserve` or `reserve_base` gave.
    slots : int
        Capture slots.
    stall_limit_s : float
        How long an update or a save may wait for a free slot; 0: not at all.
    chunk_bytes : int
    eager_digest : callable, optional
        Called at the end of every save, before the trainer goes on; its result is handed over.
    base_room : callable, optional
        ``(layout, tree) -> bytes`` of the region of a base; default `room_for_base`.
    clock : callable
        Monotonic seconds.

    Notes
    -----
    Everything but `CapturedSave` belongs to the thread that steps the optimizers.
    """

    def __init__(
        self,
        live: LiveState,
        *,
        reserve: Callable[[int], Region],
        mode: Mode = "gradient",
        reserve_base: Callable[[int], Region] | None = None,
        recycle: Callable[[Region], None] | None = None,
        slots: int = 3,
        stall_limit_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
        eager_digest: Callable[[], object] | None = None,
        base_room: Callable[[Layout, dict[str, JsonValue]], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.live = live
        self.stall_limit_s = stall_limit_s
        self._reserve, self._reserve_base, self._recycle = reserve, reserve_base or reserve, recycle
        self._slot_count, self._chunk_bytes, self._clock = slots, chunk_bytes, clock
        self._eager_digest, self._base_room = eager_digest, base_room or room_for_base
        self._copier = Copier()
        self._guard = Guard(max(stall_limit_s, 1.0))
        self._overlaps = True
        self._broken: str | None = FIRST
        self._breaks = 0
        self._state_pool: SlotPool | None = None
        self._plans: list[tuple[tuple[TensorSpec, ...], CopyPlan]] = []
        self._aux_free: list[LayoutMemory] = []
        self._frozen_changes = False
        self._watch_frozen()
        self.tap = self._new_tap(None if mode == "gradient" else "state capture was asked for")

    # What is asked of it.

    @property
    def mode(self) -> Mode:
        """How the next save is captured, as far as is known."""
        return "gradient" if self.tap.opaque is None else "state"

    @property
    def why_state(self) -> str | None:
        """Why state capture is used for good, or None."""
        return self.tap.opaque

    @property
    def why_base(self) -> str | None:
        """Why the next save must be a whole state, as far as is known; None if gradients will do."""
        return self._broken or self.tap.broken

    @property
    def updates_begun(self) -> int:
        """Updates begun so far; changes before anything of an update is read or written."""
        return self.tap.updates_begun

    @property
    def memory_bytes(self) -> int:
        """Bytes of all capture slots."""
        return self.tap.slot_bytes + (0 if self._state_pool is None else self._state_pool.size_bytes)

    def check_saveable(self) -> None:
        """Refuse a save in the middle of gradient accumulation; see `GradientTap.check_saveable`."""
        self.tap.check_saveable()

    def unwritten(self) -> Callable[[], bool]:
        """Return a test, for any thread, whether no weight was written since the last save.

        Right after `take`; it compares with versions that were read there anyway.
        """
        trained, frozen = self.tap.unwritten(), self._watch.mark()
        return lambda: trained() and frozen()

    def rebase(self) -> None:
        """Go on from the state of now, which an exact restore has loaded: no base is needed first."""
        self._refresh()
        self._forget_interval()
        self._broken = self.tap.broken

    def break_chain(self, reason: str) -> None:
        """Make the next save a whole state, for a reason found elsewhere (a save was lost, say)."""
        self._broken = self._broken or reason

    def use_state(self, reason: str) -> None:
        """Give gradients up for good: the proof failed, say."""
        self.tap.give_up(reason)

    def stop_overlapping(self) -> None:
        """Copy bases at the save from now on: this run writes into weights between updates."""
        self._overlaps = False

    def take(self, step: int, *, base: bool = False) -> CapturedSave:
        """Capture a save. When this returns, training may go on and write anywhere.

        Parameters
        ----------
        step : int
        base : bool
            Capture the whole state beside the differential.

        Raises
        ------
        UsageError
            Gradients are accumulated since the last update.
        UnsupportedValueError
            Something in the state cannot be saved. Nothing was taken.
        DeadlineError, NoSpaceError
            There was no room in time. Nothing was taken, and the next save must be a whole state.
        """
        self.check_saveable()
        self._refresh()
        interval = self.tap.take()
        releases: list[Callable[[], None]] = [slot.release for slot in interval.slots]
        region: list[Region] = []
        try:
            save = self._take(step, interval, base, releases, region)
        except BaseException:
            self.break_chain(f"step {step} could not be captured")
            for release in releases:
                release()
            # Memory that a copy still writes to is lost rather than given to somebody else.
            if region and self._recycle is not None and self._guard.wait():
                self._recycle(region[0])
            raise
        return save

    def close(self, timeout_s: float = 60.0) -> None:
        """Remove the hooks, end the background copies, give the slots back.

        Every `CapturedSave` must have been released before.

        Raises
        ------
        DeadlineError
            A copy does not end; its memory is left alone.
        """
        self._copier.close(timeout_s)
        self.tap.close()
        if self._state_pool is not None:
            self._state_pool.close()
            self._state_pool = None
        self._aux_free.clear()

    # Taking.

    def _take(
        self,
        step: int,
        interval: Interval,
        base: bool,
        releases: list[Callable[[], None]],
        region: list[Region],
    ) -> CapturedSave:
        reason = self._broken or interval.broken
        kind = SaveKind.GRADIENT if reason is None else SaveKind.BASE_ONLY
        if self.tap.opaque is not None:
            kind, reason = SaveKind.STATE, self.tap.opaque
        if kind is not SaveKind.GRADIENT:
            # Copies on their way hold references of their own.
            while releases:
                releases.pop()()
        frozen = self._frozen_changed()
        aux, extra_bytes = None, 0
        if kind is SaveKind.GRADIENT:
            aux, extra_bytes = self._copy_aux(frozen, releases)
        state: StateCopy | None = None
        base_copy: BaseCopy | None = None
        base_error: StepwellError | None = None
        if kind is not SaveKind.GRADIENT or base:
            collected = self.live.collect()
            extra_bytes = _extra_bytes(collected.specs)
            if kind is SaveKind.STATE:
                state = self._copy_state(collected, releases)
            try:
                if kind is SaveKind.BASE_ONLY or base:
                    beside = kind is SaveKind.GRADIENT
                    base_copy = self._copy_base(step, collected, state, region, releases, overlap=beside)
            except (DeadlineError, NoSpaceError) as error:
                if kind is SaveKind.BASE_ONLY:
                    raise
                # The differential is whole without it; the base can be taken later.
                base_error = error
        digest = None if self._eager_digest is None else self._eager_digest()
        self._count_break(kind, reason)
        if kind is not SaveKind.GRADIENT:
            self._forget_interval()
        self._broken = None
        self._watch.remember()
        return CapturedSave(
            step=step,
            kind=kind,
            reason=reason,
            updates=interval.updates if kind is SaveKind.GRADIENT else (),
            aux=aux,
            state=state,
            base=base_copy,
            base_error=base_error,
            updates_begun=self.tap.updates_begun,
            digest=digest,
            extra_bytes=extra_bytes,
            _releases=releases,
        )

    def _copy_aux(self, frozen: bool, releases: list[Callable[[], None]]) -> tuple[StateCopy, int]:
        collected = self.live.collect_aux(frozen=frozen)
        plan = self._plan(collected.specs)
        # Those of an older layout are let go of. What another thread releases meanwhile may be lost,
        # which costs no more than making it again.
        self._aux_free = [memory for memory in self._aux_free if memory.plan is plan]
        if self._aux_free:
            memory = self._aux_free.pop()
        else:
            size_bytes = max(plan.layout.size_bytes, 1)
            memory = LayoutMemory(torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)), plan)
        # list.append is atomic, so a release from another thread needs no lock.
        releases.append(partial(self._keep_aux, memory))
        memory.copy_from(collected.tensors)
        return StateCopy(memory, collected.tree), _extra_bytes(collected.specs)

    def _copy_state(self, collected: Collected, releases: list[Callable[[], None]]) -> StateCopy:
        plan = self._plan(collected.specs)
        size_bytes = plan.layout.size_bytes
        if self._state_pool is None:
            self._state_pool = SlotPool(
                self._reserve, size_bytes, self._slot_count, recycle=self._recycle, clock=self._clock
            )
        slot = self._state_pool.acquire(self._wait_s(), size_bytes=size_bytes)
        releases.append(slot.release)
        memory = slot.memory(plan)
        memory.copy_from(collected.tensors)
        return StateCopy(memory, collected.tree)

    def _copy_base(
        self,
        step: int,
        collected: Collected,
        state: StateCopy | None,
        region: list[Region],
        releases: list[Callable[[], None]],
        *,
        overlap: bool,
    ) -> BaseCopy:
        plan = self._plan(collected.specs)
        taken = self._reserve_base(self._base_room(plan.layout, collected.tree))
        region.append(taken)
        whole = torch.from_numpy(np.frombuffer(taken.payload, dtype=np.uint8))
        memory = LayoutMemory(whole[HEADER_BYTES:], plan)
        if state is None and overlap and self._overlaps:
            ready = self._copy_base_later(step, collected, memory)
            return BaseCopy(taken, memory, collected.tree, HEADER_BYTES, ready, overlapped=True)
        if state is None:
            memory.copy_from(collected.tensors)
            return BaseCopy(taken, memory, collected.tree, HEADER_BYTES)
        # The state lies still in its slot already, so the second copy costs the trainer nothing.
        ready = self._copier.submit(partial(np.copyto, memory.run, state.memory.run))
        releases.insert(0, partial(_wait_for, ready))
        return BaseCopy(taken, memory, collected.tree, HEADER_BYTES, ready)

    def _copy_base_later(self, step: int, collected: Collected, memory: LayoutMemory) -> Future[None]:
        """Copy at once what may change before the next update, and let that wait for the rest."""
        specs, tensors = collected.specs, collected.tensors
        pairs = memory.copy_from_now(tensors, lambda index: may_wait(specs[index], tensors[index]))
        begun = self.updates_begun
        copy = OverlappedCopy(step, pairs, lambda: self.updates_begun == begun, self.stop_overlapping)
        ready = self._copier.submit(copy)
        self._guard.hold(ready)
        return ready

    # Knowing when gradients will not do.

    def _refresh(self) -> None:
        """Follow parameters that were replaced, added or regrouped."""
        if self.live.refresh() or self.live.version != self._live_version:
            old = self.tap
            old.close()
            self._watch_frozen()
            self.tap = self._new_tap(old.opaque)
            self.tap.updates_begun = old.updates_begun + 1
            self.tap.waited_s, self.tap.blocked_s = old.waited_s, old.blocked_s
            self.break_chain("parameters were replaced, added or regrouped")

    def _new_tap(self, opaque: str | None) -> GradientTap:
        self._live_version = self.live.version
        if opaque is None:
            opaque = next(iter(self.live.obstacles()), None)
        return GradientTap(
            [TapTarget(ref.name, ref.optimizer, ref.parameters) for ref in self.live.optimizers],
            reserve=self._reserve,
            recycle=self._recycle,
            copier=self._copier,
            slots=self._slot_count,
            stall_limit_s=self.stall_limit_s,
            chunk_bytes=self._chunk_bytes,
            clock=self._clock,
            label=self.live.label,
            guard=self._guard,
            opaque=opaque,
        )

    def _watch_frozen(self) -> None:
        refs = [ref for ref in self.live.parameters if ref.optimizer < 0]
        self._watch = ParameterWatch([ref.name for ref in refs], [ref.tensor for ref in refs])

    def _frozen_changed(self) -> bool:
        """Whether parameters that no optimizer steps ever changed: then every save carries them."""
        if not self._frozen_changes and self._watch.changed():
            self._frozen_changes = True
        return self._frozen_changes

    def _count_break(self, kind: SaveKind, reason: str | None) -> None:
        self._breaks = self._breaks + 1 if kind is SaveKind.BASE_ONLY and reason != FIRST else 0
        if self._breaks >= BREAKS_IN_A_ROW:
            self.use_state(
                f"{self._breaks} saves in a row could not be captured as gradients; last: {reason}"
            )

    def _forget_interval(self) -> None:
        self.tap.rebase()
        self._watch.remember()

    # Memory.

    def _plan(self, specs: tuple[TensorSpec, ...]) -> CopyPlan:
        # Compared, not hashed: specs are mostly the same objects as last time, which costs nothing.
        for known, plan in self._plans:
            if known == specs:
                return plan
        plan = CopyPlan(plan_layout(specs, chunk_bytes=self._chunk_bytes))
        self._plans = [(specs, plan), *self._plans[: PLANS_KEPT - 1]]
        return plan

    def _keep_aux(self, memory: LayoutMemory) -> None:
        if len(self._aux_free) < AUX_KEPT:
            self._aux_free.append(memory)

    def _wait_s(self) -> float:
        return max(self.stall_limit_s, 0.0)


def _extra_bytes(specs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.size_bytes for spec in specs if spec.name.startswith("extra/"))


def _wait_for(future: Future[None]) -> None:
    """Hold a slot until the copy out of it has ended."""
    future.exception()
