"""How a request ended, as a status on its way back and as an error at the caller."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from stepwell.errors import (
    IntegrityError,
    MissingObjectError,
    NoSpaceError,
    ObjectExistsError,
    PermanentStoreError,
    StepwellError,
    TransientStoreError,
)
from stepwell.stores.oserrors import store_error
from stepwell.stores.transport.channel import DamagedError
from stepwell.stores.transport.frames import Status

__all__ = ["ERROR_TEXT_BYTES_MAX", "GoneError", "Outcome", "error_of", "outcome_of", "settle"]

ERROR_TEXT_BYTES_MAX = 16 << 10


class GoneError(TransientStoreError):
    """What the request builds on is not there any more: begin the whole call again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status and message."""

    status: Status = Status.OK
    text: str = ""


# In order: the first class that fits.
_STATUS_OF: tuple[tuple[type[StepwellError], Status], ...] = (
    (DamagedError, Status.DAMAGED),
    (TransientStoreError, Status.TRANSIENT),
    (MissingObjectError, Status.MISSING),
    (ObjectExistsError, Status.EXISTS),
    (NoSpaceError, Status.NO_SPACE),
    (IntegrityError, Status.INTEGRITY),
    (StepwellError, Status.PERMANENT),
)
_ERROR_OF: dict[Status, type[StepwellError]] = {
    Status.TRANSIENT: TransientStoreError,
    Status.DAMAGED: DamagedError,
    Status.MISSING: MissingObjectError,
    Status.EXISTS: ObjectExistsError,
    Status.NO_SPACE: NoSpaceError,
    Status.INTEGRITY: IntegrityError,
    Status.UNKNOWN_UPLOAD: GoneError,
    Status.STALE_SESSION: GoneError,
    Status.CHANGED: GoneError,
    Status.SEALED: PermanentStoreError,
    Status.PERMANENT: PermanentStoreError,
}


def outcome_of(error: Exception, where: str) -> Outcome:
    """Translate what a store raised."""
    if isinstance(error, OSError) and not isinstance(error, StepwellError):
        error = store_error(error, "do what was asked", where=where)
    for kind, status in _STATUS_OF:
        if isinstance(error, kind):
            return Outcome(status, str(error))
    # A fault of our own: the peer hears of it, and the others are served on.
    return Outcome(Status.PERMANENT, f"{where} failed with {type(error).__name__}: {error}")


def error_of(status: Status, text: str, where: str) -> StepwellError:
    """Return the error that a caller gets for an answer."""
    return _ERROR_OF.get(status, PermanentStoreError)(f"{text} (said the peer {where})")


async def settle(work: Awaitable[object], where: str) -> Outcome:
    """Await `work` and return how it ended."""
    try:
        await work
    except Exception as error:  # whatever it was, the peer is told and the server goes on
        return outcome_of(error, where)
    return Outcome()
