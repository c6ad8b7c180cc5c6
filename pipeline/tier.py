"""A tier: a store with a policy, and what the runner remembers about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stepwell.errors import NotCommittedError, StepwellError
from stepwell.pipeline.handle import SaveHandle
from stepwell.stores.base import Failure, ObjectStore
from stepwell.stores.memory import MemoryStore

__all__ = ["OnError", "Tier"]


class OnError(StrEnum):
    """What a tier that fails does to the run."""

    RAISE = "raise"
    DEGRADE = "degrade"
    RETRY = "retry"


@dataclass
class Tier:
    """One store with its policy.

    Attributes
    ----------
    name : str
        How configuration, messages and handles call it.
    store : ObjectStore
    keep : int
        Newest committed chains (a base and the log after it) that are never reclaimed; >= 1.
    on_error : OnError
    retries : int
        Further tries of a transient fault, each after a doubled pause.
    lost : str or None
        Why the tier is no longer written (policy ``degrade``).
    needs_base : int or None
        The log has a hole here, or has not begun: later saves count only once a base of at
        least this step is committed. None: the log is whole.
    """

    name: str
    store: ObjectStore
    keep: int = 2
    on_error: OnError = OnError.RAISE
    retries: int = 5
    lost: str | None = None
    needs_base: int | None = 0
    hole: bool = False
    _parked: list[SaveHandle] = field(default_factory=list)

    @property
    def memory(self) -> MemoryStore | None:
        """The store, where bases are published in place instead of written."""
        return self.store if isinstance(self.store, MemoryStore) else None

    @property
    def has_commit_records(self) -> bool:
        """Whether a record, not the manifests, is the evidence."""
        return self.store.properties.needs_commit_record

    @property
    def survives(self) -> Failure:
        """The worst failure after which what is committed here is still there."""
        return self.store.properties.survives

    def step_written(self, handle: SaveHandle) -> None:
        """Acknowledge a differential, or hold the word back until the base it needs is committed."""
        if self.needs_base is None:
            handle.resolve(self.name)
        elif handle.step >= self.needs_base and not self.hole:
            self._parked.append(handle)
        else:
            handle.resolve(self.name, self._hole_error(handle.step))

    def base_written(self, step: int) -> None:
        """A base of `step` is committed: everything from there on counts."""
        if self.needs_base is None or step < self.needs_base:
            return
        self.needs_base = None
        self.hole = False
        parked, self._parked = self._parked, []
        for handle in parked:
            if handle.step >= step:
                handle.resolve(self.name)
            else:
                handle.resolve(self.name, self._hole_error(handle.step))

    def broken_at(self, step: int) -> None:
        """A save of `step` did not arrive: what follows counts only from a later base on."""
        self.hole = True
        self.needs_base = step + 1
        parked, self._parked = self._parked, []
        for handle in parked:
            handle.resolve(self.name, self._hole_error(handle.step))

    def base_expected(self, step: int) -> None:
        """A base of `step` was captured and travels: saves from there on may wait for it."""
        if self.hole or (self.needs_base is not None and self.needs_base <= step):
            self.hole = False
            self.needs_base = step

    def give_up(self, error: StepwellError) -> None:
        """Nothing more will arrive here; whoever waits is told so."""
        parked, self._parked = self._parked, []
        for handle in parked:
            handle.resolve(self.name, error)

    def _hole_error(self, step: int) -> NotCommittedError:
        return NotCommittedError(
            f"step {step} is not committed in tier {self.name}: an earlier save is missing there, "
            f"and the next base has not arrived"
        )
