"""The prover: while training goes on, another unit of the state is proven at each save.

At a save, one unit is copied out of the live state in the window before the next update. At the next
save the same unit is copied again, the updates in between are replayed on the first copy, and the two
must be equal. Copies are taken on the caller's thread, within the window; replay and comparison run
on a thread of their own with low priority, and a save that comes while that is busy is passed over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwell.errors import DeadlineError, StepwellError
from stepwell.pipeline.blocks import Slice
from stepwell.pipeline.digest import DigestWindow
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.pipeline.parts import Gradient, as_tensor
from stepwell.pipeline.proof import (
    Outcome,
    ProofUpdate,
    Subject,
    Unit,
    Verdict,
    cut_unit,
    difference,
    replay_unit,
    units_of,
)
from stepwell.pipeline.workers import become_background

__all__ = ["UNIT_BYTES_MAX", "Prover"]

UNIT_BYTES_MAX = 64 << 20
"""Weights of the largest unit that is rotated over: copying it twice must fit into a window."""

TASKS_MAX = 8

Task = Callable[[], Verdict]


@dataclass(slots=True)
class _Pending:
    """A unit as it was at the last save."""

    subject: Subject
    unit: Unit
    slices: list[Slice]


class Prover:
    """Proves units in rotation, and whole chains when asked.

    Parameters
    ----------
    subjects : sequence of Subject
        All optimizers. A new layout or optimizer needs a new prover.
    report : callable
        Given each verdict, on the prover's thread or on that of `observe`; must be quick.
    unit_bytes_max : int
        Units with larger weights are left out of the rotation.

    Attributes
    ----------
    rotation_s : float
        Processor time that the rotation has taken so far, for whoever bounds it.

    Notes
    -----
    The thread starts with the first task. `observe` and `reset` are called from one thread at a
    time, not necessarily the trainer's.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        report: Callable[[Verdict], None],
        *,
        unit_bytes_max: int = UNIT_BYTES_MAX,
    ) -> None:
        self._report = report
        self._turn = [
            (subject, unit)
            for subject in subjects
            for unit in units_of(subject)
            if unit.pieces and _unit_bytes(subject, unit) <= unit_bytes_max
        ]
        self._next = 0
        self.rotation_s = 0.0
        self._pending: _Pending | None = None
        self._tasks: queue.Queue[Task | None] = queue.Queue(TASKS_MAX)
        self._busy = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def unit_count(self) -> int:
        """How many units the rotation goes over; 0 if all are too large."""
        return len(self._turn)

    @property
    def pending(self) -> bool:
        """Whether a unit was copied at the last save and waits to be compared."""
        return self._pending is not None

    @property
    def stopping(self) -> bool:
        """Whether `close` was called; long tasks ask for it (``prove_chain(stop=...)``)."""
        return self._stop.is_set()

    def observe(self, window: DigestWindow, updates: Sequence[ProofUpdate]) -> None:
        """Take a save into account, as soon after it as possible.

        Parameters
        ----------
        window : DigestWindow
            Of this save, over the live state.
        updates : sequence of ProofUpdate
            All updates since the last save that was observed. Their gradients are copied as far
            as needed before this returns.
        """
        began = time.thread_time()
        try:
            self._observe(window, updates)
        finally:
            self.rotation_s += time.thread_time() - began

    def _observe(self, window: DigestWindow, updates: Sequence[ProofUpdate]) -> None:
        pending, self._pending = self._pending, None
        if not self._turn or self._stop.is_set() or self._busy.is_set():
            return
        if pending is not None:
            self._check(pending, window, updates)
        subject, unit = self._turn[self._next]
        copied = _copied(subject, unit, window)
        if copied is not None:
            self._next = (self._next + 1) % len(self._turn)
            self._pending = _Pending(subject, unit, copied)

    def reset(self) -> None:
        """Forget the copy of the last save: the chain broke, or a save went by unobserved."""
        self._pending = None

    def submit(self, task: Task) -> bool:
        """Have a longer proof (``prove_chain``) run on the prover's thread; False if it has too many.

        What the task reads must stay as it is until its verdict is reported.
        """
        if self._stop.is_set():
            return False
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        self._start()
        return True

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread after what it works on now; tasks that wait are dropped.

        Raises
        ------
        DeadlineError
            It did not end in time.
        """
        self._stop.set()
        self._pending = None
        if self._thread is None:
            return
        while True:
            try:
                self._tasks.get_nowait()
            except queue.Empty:
                break
        self._tasks.put_nowait(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"a proof did not end within {timeout_s} s")

    def _check(self, pending: _Pending, window: DigestWindow, updates: Sequence[ProofUpdate]) -> None:
        """Copy what the pending unit became, and have it compared."""
        subject, unit = pending.subject, pending.unit
        what = f"chunk {', '.join(map(str, unit.parts[:4]))} of optimizer {subject.index}"
        own = [_held(update, unit) for update in updates if update.record.optimizer == subject.index]
        became = _copied(subject, unit, window)
        if became is None:
            self._report(Verdict(Outcome.INCONCLUSIVE, what, "the next update began before it was copied"))
            return

        def prove() -> Verdict:
            began = time.thread_time()
            try:
                replay_unit(subject, unit, pending.slices, own)
                found = difference(subject, pending.slices, became)
            except StepwellError as error:
                found = f"replay failed: {error}"
            finally:
                self.rotation_s += time.thread_time() - began
                self._busy.clear()
            return Verdict(Outcome.PROVEN, what) if found is None else Verdict(Outcome.MISMATCH, what, found)

        self._busy.set()
        if not self.submit(prove):
            self._busy.clear()
            self._report(Verdict(Outcome.INCONCLUSIVE, what, "too many proofs wait"))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stepwell-prover", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        become_background()
        while (task := self._tasks.get()) is not None:
            try:
                verdict = task()
            except Exception as error:
                # A user's step may raise anything; what cannot be replayed cannot be recovered.
                reason = f"replay failed: {type(error).__name__}: {error}"
                verdict = Verdict(Outcome.MISMATCH, "recorded updates", reason)
            self._report(verdict)


def _unit_bytes(subject: Subject, unit: Unit) -> int:
    tensors = subject.layout.tensors
    return sum((piece.stop - piece.start) * ITEM_BYTES[tensors[piece.tensor].dtype] for piece in unit.pieces)


def _copied(subject: Subject, unit: Unit, window: DigestWindow) -> list[Slice] | None:
    """Copy a unit of the live state, or return None if the window closed before it was whole."""
    if not window.open:
        return None
    try:
        slices = cut_unit(subject, unit, subject.source)
    except (RuntimeError, KeyError):
        # The next update changes the state's dictionaries under our hands.
        if window.open:
            raise
        return None
    return slices if window.undisturbed else None


def _held(update: ProofUpdate, unit: Unit) -> ProofUpdate:
    """Copy the gradients that `unit` needs, which otherwise end with the save's slot."""
    held: dict[int, Gradient] = {}
    for part in unit.parts:
        gradient = update.gradients(part)
        held[part] = None if gradient is None else as_tensor(gradient).clone()
    return ProofUpdate(update.record, held.get)
