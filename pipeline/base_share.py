"""Which of the bases that the schedule asks for a tier takes, beside those it must have."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BaseShare"]


@dataclass(slots=True)
class BaseShare:
    """Counts what a tier was given since its newest base.

    Memory is scarce and bases there are made in place, so its log is kept short; on a disk a longer log
    is cheaper than another base.

    Attributes
    ----------
    log_budget : float
        A base is left out while the log is smaller than this times the base before it. 0: none is.
    base_every : int
        After so many saves none is left out.
    """

    log_budget: float = 0.0
    base_every: int = 1
    _newest: int | None = None  # step of the newest base; None: not known, so the next one is taken
    _base_bytes: int = 0
    _log_bytes: int = 0
    _saves: int = 0

    def takes(self, step: int, size_bytes: int, *, needed: bool) -> bool:
        """Decide on a base that was captured; called before the differential of the same step.

        Parameters
        ----------
        step : int
        size_bytes : int
        needed : bool
            It is more than due: asked for, or what follows cannot do without.
        """
        if not (needed or self._newest is None or self._due()):
            return False
        self._newest, self._base_bytes = step, size_bytes
        self._log_bytes = self._saves = 0
        return True

    def saved(self, step: int) -> None:
        """A differential was captured."""
        if self._newest is not None and step > self._newest:
            self._saves += 1

    def encoded(self, step: int, size_bytes: int) -> None:
        """A differential came to so many bytes."""
        if self._newest is not None and step > self._newest:
            self._log_bytes += size_bytes

    def lost(self) -> None:
        """A base that was taken did not arrive."""
        self._newest = None

    def _due(self) -> bool:
        return self._saves + 1 >= self.base_every or self._log_bytes >= self.log_budget * self._base_bytes
