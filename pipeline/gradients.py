"""The gradients of every update, tapped where the optimizer reads them.

`GradientTap` keeps what happened between two saves: an *interval* of updates in order, or the reason
why the updates of that interval cannot be replayed. `stepwell.pipeline.hooks` taps one optimizer.

All of it runs on the thread that calls ``optimizer.step``, except the background copies, which touch
only their own `TappedUpdate` and report a torn gradient by one attribute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepwell.errors import DeadlineError, NoSpaceError, UsageError
from stepwell.pipeline.copier import Copier
from stepwell.pipeline.hooks import OptimizerTap
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.overlap import Guard
from stepwell.pipeline.plan import CHUNK_BYTES
from stepwell.pipeline.replayable import hidden_from_compilers
from stepwell.pipeline.slots import Region, Slot, SlotPool
from stepwell.pipeline.tapped import TappedUpdate

__all__ = ["GradientTap", "Interval", "TapTarget"]


@dataclass(frozen=True, slots=True)
class TapTarget:
    """One optimizer to tap: its name, and the names of its parameters by group."""

    name: str
    optimizer: Optimizer
    parameter_names: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two saves.

    Attributes
    ----------
    updates : tuple of TappedUpdate
        In order; empty if `broken`.
    slots : tuple of Slot
        One reference each, now the caller's.
    broken : str or None
        Why replaying the updates would not lead to the state of now.
    """

    updates: tuple[TappedUpdate, ...]
    slots: tuple[Slot, ...]
    broken: str | None


@dataclass(slots=True)
class _Open:
    """The interval in the making."""

    updates: list[TappedUpdate] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    broken: str | None = None


class GradientTap:
    """Taps all optimizers of a run.

    Parameters
    ----------
    targets : sequence of TapTarget
    reserve, recycle : callables
        Memory for the capture slots, see `SlotPool`.
    copier : Copier
        Shared with the owner, who closes it.
    slots : int
        Capture slots. Each holds one update of every optimizer.
    stall_limit_s : float
        How long an update may wait for a free slot. 0: it never waits.
    chunk_bytes : int
    clock : callable
        Monotonic seconds.
    label : callable, optional
        What to add to the group of a gradient, so that a chunk holds one class only.
    guard : Guard, optional
        What each update waits for before anything of it is read or written.
    opaque : str, optional
        Begin without gradients, for this reason: only count updates. No memory is reserved.

    Attributes
    ----------
    updates_begun : int
        Counted first thing in the pre-hook, before anything is read or written.
    opaque : str or None
        Why gradients can never describe this run's updates; state capture is needed for good.
    waited_s : float
        Time updates waited for slots, in all (backpressure, reported apart).
    blocked_s : float
        Time spent in hooks, in all, without those waits.
    """

    def __init__(
        self,
        targets: Sequence[TapTarget],
        *,
        reserve: Callable[[int], Region],
        copier: Copier,
        recycle: Callable[[Region], None] | None = None,
        slots: int = 3,
        stall_limit_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], float] = time.monotonic,
        label: Callable[[TensorSpec], str] | None = None,
        guard: Guard | None = None,
        opaque: str | None = None,
    ) -> None:
        self.updates_begun = 0
        self._guard = guard or Guard()
        self.label = label
        self.opaque = opaque
        self.waited_s = 0.0
        self.blocked_s = 0.0
        self.stall_limit_s = stall_limit_s
        self.copier = copier
        self._clock = clock
        self._interval = _Open()
        self._torn: str | None = None
        self._last_updated: OptimizerTap | None = None
        self._pool: SlotPool | None = None
        offset = 0
        self.taps: list[OptimizerTap] = []
        for index, target in enumerate(targets):
            tap = OptimizerTap(
                self, index, target.name, target.optimizer, target.parameter_names, chunk_bytes
            )
            tap.offset_bytes = offset
            offset += tap.plan.layout.size_bytes
            self.taps.append(tap)
        self._find_shared_parameters()
        if self.opaque is None:
            self._pool = SlotPool(reserve, offset, slots, recycle=recycle, clock=clock)
        self._by_optimizer = {id(tap.optimizer): tap for tap in self.taps}
        self._begin = hidden_from_compilers(self._move_hooks)
        self._handle = register_optimizer_step_pre_hook(self._before_hooks)
        for tap in self.taps:
            tap.install()

    @property
    def slot_bytes(self) -> int:
        """Bytes of all capture slots."""
        return 0 if self._pool is None else self._pool.size_bytes

    @property
    def broken(self) -> str | None:
        """Why the interval in the making cannot be replayed, as far as is known by now."""
        return self._interval.broken or self._torn or self.opaque

    @property
    def capturing(self) -> bool:
        """Whether updates are captured at present."""
        return self.broken is None

    def close(self) -> None:
        """Remove all hooks and give the slots back. Copies and saves must have ended before."""
        self._handle.remove()
        for tap in self.taps:
            tap.remove()
        self._drop()
        if self._pool is not None:
            self._pool.close()

    def leave_to_parent(self) -> None:
        """Remove all hooks in a forked child: its updates must not be written into the parent's slots.

        Takes no lock, since any may have been held at the fork.
        """
        self._handle.remove()
        for tap in self.taps:
            tap.remove_hooks()

    def rebase(self) -> None:
        """Begin a new interval at the state of now, which a base or a restore describes."""
        self._heed_torn()
        self._drop()
        self._interval = _Open()
        self._torn = None
        for tap in self.taps:
            tap.rebase()

    def take(self) -> Interval:
        """End the interval and begin the next one.

        After a broken interval nothing is captured until `rebase`.
        """
        for tap in self.taps:
            if self.capturing:
                tap.check_unchanged("at the save")
        self.notice_torn()
        if self.broken is not None:
            self._free_slots_for_good()
            return Interval((), (), self.broken)
        interval, self._interval = self._interval, _Open()
        return Interval(tuple(interval.updates), tuple(interval.slots), None)

    def unwritten(self) -> Callable[[], bool]:
        """Return a test, for any thread, whether no parameter was written since the last look."""
        tests = [tap.unwritten() for tap in self.taps]
        return lambda: all(test() for test in tests)

    def check_saveable(self) -> None:
        """Refuse a save between backward and update.

        With several optimizers only the one that updated last is looked at: the others may hold
        stale gradients from a backward pass that was not theirs (the two halves of a GAN).

        Raises
        ------
        UsageError
            Gradients are accumulated since the last update.
        """
        for tap in self.taps if self._last_updated is None else [self._last_updated]:
            name = tap.accumulated()
            if name is not None:
                raise UsageError(
                    f"save in the middle of gradient accumulation: {name} has gradients that no update of "
                    f"{tap.name} has used, and a checkpoint does not hold gradients. "
                    "Save after optimizer.step(), or after zero_grad()."
                )

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time spent inside as blocked."""
        begun, waited = self._clock(), self.waited_s
        try:
            yield
        finally:
            self.blocked_s += self._clock() - begun - (self.waited_s - waited)

    # What the taps report.

    def break_interval(self, reason: str) -> None:
        """Give up the interval in the making; the first reason stays."""
        if self._interval.broken is None:
            self._drop()
            self._interval.broken = reason

    def give_up(self, reason: str) -> None:
        """Give up gradients for good."""
        if self.opaque is None:
            self.opaque = reason
        self.break_interval(reason)

    def tear(self, reason: str) -> None:
        """Report a torn gradient; called by the copier's thread, so it only leaves a note."""
        self._torn = self._torn or reason

    def notice_torn(self) -> None:
        """Break the interval if the copier has left a note; eager from then on."""
        if self._torn is not None and self._interval.broken is None:
            self._heed_torn()
            self.break_interval(self._torn)

    def _heed_torn(self) -> None:
        if self._torn is not None:
            for tap in self.taps:
                tap.probation.always_eager(self._torn)

    def claim(self, tap: OptimizerTap) -> Slot | None:
        """Find room for one more update of `tap`; None breaks the interval."""
        assert self._pool is not None
        for slot in self._interval.slots:
            if tap.index not in slot.claimed:
                slot.claimed.add(tap.index)
                return slot
        if len(self._interval.slots) >= self._pool.count:
            self.break_interval(f"more updates between saves than the {self._pool.count} capture slots hold")
            return None
        try:
            slot = self._acquire()
        except (DeadlineError, NoSpaceError) as error:
            self.break_interval(f"no room to capture an update: {error}")
            return None
        slot.claimed.add(tap.index)
        self._interval.slots.append(slot)
        return slot

    def captured(self, update: TappedUpdate) -> None:
        """Add an update to the interval."""
        self._interval.updates.append(update)

    def updated(self, tap: OptimizerTap) -> None:
        """Note that an update of `tap` has ended."""
        self._last_updated = tap

    def _acquire(self) -> Slot:
        assert self._pool is not None
        try:
            return self._pool.acquire(0)
        except DeadlineError:
            if self.stall_limit_s <= 0:
                raise
        begun = self._clock()
        try:
            return self._pool.acquire(self.stall_limit_s)
        finally:
            self.waited_s += self._clock() - begun

    def _drop(self) -> None:
        """Release the interval's slots; copies on their way hold references of their own."""
        slots, self._interval.slots = self._interval.slots, []
        self._interval.updates.clear()
        for slot in slots:
            slot.release()

    def _free_slots_for_good(self) -> None:
        """Where gradients were given up for good, their memory is better used otherwise."""
        pool = self._pool
        if self.opaque is not None and pool is not None and pool.free_count == pool.count:
            pool.close()
            self._pool = None

    def _find_shared_parameters(self) -> None:
        seen: dict[int, str] = {}
        for tap in self.taps:
            for name, parameter in zip(tap.names, tap.parameters, strict=True):
                other = seen.setdefault(id(parameter), tap.name)
                if other != tap.name:
                    self.give_up(f"{name} belongs to two optimizers, {other} and {tap.name}")

    def _before_hooks(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._begin(optimizer)

    def _move_hooks(self, optimizer: Optimizer) -> None:
        """Make our pre-hook the last and our post-hook the first of an optimizer about to step.

        torch runs global hooks before it begins to walk an optimizer's own ones, so this holds for
        the update at hand, whatever hooks were added since the last.
        """
        tap = self._by_optimizer.get(id(optimizer))
        if tap is not None and tap.optimizer is optimizer:
            # Before any hook of the user's, which may change parameters.
            with self.blocked():
                self._guard.wait()
            tap.take_places()
