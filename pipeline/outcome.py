"""What a restore, and each save, tells the caller."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Metrics", "Restored", "SaveRecord"]


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, from where, and how sure it is.

    Attributes
    ----------
    step : int
        Label of the save the live state now is at.
    tier : str
        Tier the base (or the self-contained save) came from.
    exact : bool
        True only where every weight is known to have the bits it had: the digest of the save
        matched in full, or nothing was replayed and every checksum matched.
    bound : float or None
        Largest error of an element; 0.0 for lossless saves, None where no bound is known.
    seconds : float
    lost_steps : int
        Distance to the newest step that was known to be committed; 0 where nothing was lost.
    incarnation : str
        The life of the run that wrote the save.
    base_step : int
        Step of the base the replay began from.
    replayed : int
        Updates replayed on top of it.
    faults : tuple of str
        Damage that was met and gone around, in words.
    """

    step: int
    tier: str
    exact: bool
    bound: float | None
    seconds: float
    lost_steps: int
    incarnation: str
    base_step: int
    replayed: int
    faults: tuple[str, ...] = ()


@dataclass(slots=True)
class SaveRecord:
    """Figures of one save.

    Attributes
    ----------
    step : int
    kind : str
        ``"gradient"``, ``"state"``, ``"base"`` (no differential went along) or ``"skipped"``.
    base : bool
        A base was captured.
    reason : str or None
        Why the save was not captured as configured.
    blocked_s : float
        Time taken from the trainer since the last save: optimizer hooks and ``save`` itself,
        without waits for room.
    waited_s : float
        Waits for room (backpressure), which happen where tiers are slower than training.
    differential_bytes, base_bytes : int
        As stored; 0 until known.
    durable_s : dict of str to float
        Tier to the time from ``save`` to its acknowledgement.
    """

    step: int
    kind: str
    base: bool
    reason: str | None
    blocked_s: float
    waited_s: float
    differential_bytes: int = 0
    base_bytes: int = 0
    durable_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of a run since it was opened.

    Attributes
    ----------
    saves : tuple of SaveRecord
        The newest 10,000.
    last_committed_step : dict of str to int
        By tier.
    bytes_total, errors_total : dict of str to int
        By tier.
    unprotected_steps : int
        Saves that were skipped or failed in every tier.
    lost_tiers : dict of str to str
        Tiers given up by policy ``degrade``, with the reason.
    restored : Restored or None
    forecast_bytes : dict of str to int
        Memory the arena takes, by part.
    """

    saves: tuple[SaveRecord, ...]
    last_committed_step: dict[str, int]
    bytes_total: dict[str, int]
    errors_total: dict[str, int]
    unprotected_steps: int
    lost_tiers: dict[str, str]
    restored: Restored | None
    forecast_bytes: dict[str, int]
