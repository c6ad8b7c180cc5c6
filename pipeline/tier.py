"""A tier: a store with a policy, and what the runner remembers about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stepwell.errors import NotCommittedError
from stepwell.pipeline.base_share import BaseShare
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.manifest import Manifest
from stepwell.stores.base import Failure, ObjectStore
from stepwell.stores.memory import MemoryStore

__all__ = ["RETRIES", "Hold", "OnError", "Tier"]

RETRIES = 5
"""Further tries of a transient fault where nothing else is said: 1.5 s in all."""

CLOSED_MAX = 16  # holes that are told apart; a save that comes later than so many may count as lost


class OnError(StrEnum):
    """What a tier that fails does to the run."""

    RAISE = "raise"
    DEGRADE = "degrade"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Hold:
    """Which life of a tier's store it is, and which beginning of the tier."""

    life: object
    beginnings: int


@dataclass(eq=False)
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
    bases : BaseShare
        Which bases are written here that are merely due.
    packed : bool
        Bases are written here as a few objects each, not one for each chunk and array; for tiers with
        commit records. How they are read follows from their manifests.
    data_bytes_max : int or None
        Largest data object of such a base; None: it has one.
    newest : int
        The newest step that was submitted.
    lost : str or None
        Why the tier is not written (policy ``degrade``), until it answers again.
    life : object
        The store's life in which all was written that counts.
    beginnings : int
        How often it began anew; what was begun before the last time does not count.
    needs_base : int or None
        The log has a hole here, or has not begun: saves from this step on count only once a base
        of at least this step is committed. None: the log is whole.
    hole_from : int
        First step of the hole, where there is one: saves before it count as ever, those between
        it and `needs_base` never will.
    closed : list of tuple of int
        The holes before, oldest first: the first step of each, and the base that closed it. Saves in
        between may still be waited for by nobody but a queue.
    hole : bool
        No base that would close the hole is on its way.
    stranded : list of Manifest
        Saves whose packs lie here for nothing, until somebody removes them.
    """

    name: str
    store: ObjectStore
    keep: int = 2
    on_error: OnError = OnError.RAISE
    retries: int = RETRIES
    bases: BaseShare = field(default_factory=BaseShare)
    packed: bool = False
    data_bytes_max: int | None = None
    newest: int = -1
    lost: str | None = None
    life: object = None
    beginnings: int = 0
    needs_base: int | None = 0
    hole_from: int = 0
    closed: list[tuple[int, int]] = field(default_factory=list)
    hole: bool = True
    stranded: list[Manifest] = field(default_factory=list)
    _parked: list[tuple[SaveHandle, Manifest]] = field(default_factory=list)

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

    @property
    def waiting(self) -> bool:
        """Whether saves are written here that wait for a base."""
        return bool(self._parked)

    @property
    def hold(self) -> Hold:
        """What a save relies on from its first byte until its evidence is there."""
        return Hold(self.store.life, self.beginnings)

    def reaches(self, step: int) -> bool:
        """Whether every save that one of `step` builds on is committed here."""
        if any(first <= step < base for first, base in self.closed):
            return False  # it is late: a base that is newer closed the hole it lies in
        return self.needs_base is None or step < self.hole_from

    def hopeless(self, handle: SaveHandle) -> bool:
        """Tell a save that is yet to be written, and can never count here, so; say whether it does."""
        if self.reaches(handle.step) or self._may_come(handle.step):
            return False
        self._needs(handle.step)
        handle.resolve(self.name, self._hole_error(handle.step))
        return True

    def _may_come(self, step: int) -> bool:
        """Whether the base that a save of `step` waits for is on its way."""
        return not self.hole and self.needs_base is not None and step >= self.needs_base

    def written(self, handle: SaveHandle, manifest: Manifest) -> bool:
        """A differential is written, without evidence yet; say whether it may be committed now.

        Otherwise it waits for the base that is on its way, or is stranded: what it builds on will
        never be here.
        """
        if self.reaches(handle.step):
            return True
        if self._may_come(handle.step):
            self._parked.append((handle, manifest))
        else:
            self._strand(handle, manifest)
        return False

    def next_parked(self, base_step: int) -> tuple[SaveHandle, Manifest] | None:
        """Take the oldest save that waited for the base of `base_step`, which is committed; or None."""
        while self._parked and self._closed_by(base_step):
            handle, manifest = self._parked.pop(0)
            if handle.step >= base_step:
                return handle, manifest
            self._strand(handle, manifest)
        return None

    def base_written(self, step: int) -> None:
        """A base of `step`, or a save that stands for itself, is committed, and so is what waited."""
        if self._closed_by(step):
            assert not self._parked, "saves that wait are committed before the hole is closed"
            self.needs_base = None
            self.hole = False
            self._close(self.hole_from, step)

    def base_lost(self, step: int) -> None:
        """A base of `step` did not arrive; if saves waited for it, they wait in vain."""
        self.bases.lost()
        if self.needs_base == step:
            self._open_hole(step)

    def broken_at(self, step: int) -> None:
        """A differential of `step` did not arrive: what follows counts from the next base on."""
        for index, (first, base) in enumerate(self.closed):
            if step < base:
                self.closed[index] = min(first, step), base
                return
        self.hole_from = step if self.needs_base is None else min(self.hole_from, step)
        if self.hole or self.needs_base is None or self.needs_base < step:
            self._open_hole(step)
        # Otherwise the base that is on its way stands for this step, too.

    def begin_whole(self) -> None:
        """Everything that was restored is here: what comes next counts at once."""
        self.needs_base = None
        self.hole = False

    def begin_later(self, step: int) -> None:
        """Nothing is whole here yet; saves from `step` on will count after a base."""
        self.hole_from = step
        self._open_hole(step)

    def begin_anew(self) -> None:
        """What was written here is gone, or was never written: what follows counts from a base on."""
        self.beginnings += 1
        self.closed.clear()
        self.bases.lost()
        self.hole_from = 0
        self._open_hole(self.newest + 1)

    def base_expected(self, step: int, *, alone: bool) -> None:
        """A base of `step` was captured and travels: saves from there on may wait for it.

        Parameters
        ----------
        alone : bool
            No differential of this step goes along: saves after it build on the base alone, and
            have to wait for it.
        """
        if alone and self.needs_base is None:
            self.hole_from = step
        if alone or self.hole or (self.needs_base is not None and self.needs_base <= step):
            self.hole = False
            self.needs_base = step

    def _open_hole(self, step: int) -> None:
        self.hole = True
        self._needs(step)
        parked, self._parked = self._parked, []
        for handle, manifest in parked:
            self._strand(handle, manifest)

    def _close(self, first: int, base: int) -> None:
        """Remember the hole from `first` on that the base closed; the oldest two of many become one."""
        self.closed.append((first, base))
        if len(self.closed) > CLOSED_MAX:
            self.closed[:2] = [(self.closed[0][0], self.closed[1][1])]

    def _needs(self, step: int) -> None:
        """No base older than `step` closes the hole; what was asked for before still holds."""
        if not self.closed or step >= self.closed[-1][1]:
            self.needs_base = step if self.needs_base is None else max(self.needs_base, step)

    def _closed_by(self, step: int) -> bool:
        """Whether a base of `step` closes the hole there is."""
        return self.needs_base is not None and step >= self.needs_base

    def _strand(self, handle: SaveHandle, manifest: Manifest) -> None:
        """Give a save up that was written: it will never have evidence, and what follows builds on it."""
        self._needs(handle.step)
        self.stranded.append(manifest)
        handle.resolve(self.name, self._hole_error(handle.step))

    def _hole_error(self, step: int) -> NotCommittedError:
        return NotCommittedError(
            f"step {step} is not committed in tier {self.name}: an earlier save is missing there, "
            f"and the next base has not arrived"
        )
