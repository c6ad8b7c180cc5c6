"""Every error stepwell raises, one class for each different reaction.

::

    StepwellError
    |-- ConfigError             fix the configuration (also a ValueError)
    |-- UsageError              fix the calling code
    |   `-- LockedError         another living process has this run open
    |-- UnsupportedValueError   a value that cannot be saved, refused at capture (also a TypeError)
    |-- StateMismatchError      the checkpoint belongs to another model or optimizer
    |-- StoreError
    |   |-- TransientStoreError     try again
    |   `-- PermanentStoreError     stop, a person must act
    |       |-- MissingObjectError  no object under this key (also a FileNotFoundError)
    |       |-- ObjectExistsError   create-if-absent lost (also a FileExistsError)
    |       `-- NoSpaceError        the tier is full; says the bytes that were needed
    |-- IntegrityError          bytes are damaged: fall back to another tier or step
    |   `-- FormatError         not our format, or a newer version of it
    |-- NotCommittedError       the step is not, or not completely, there
    `-- DeadlineError           a wait with a deadline ended (also a TimeoutError)
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DeadlineError",
    "FormatError",
    "IntegrityError",
    "LockedError",
    "MissingObjectError",
    "NoSpaceError",
    "NotCommittedError",
    "ObjectExistsError",
    "PermanentStoreError",
    "StateMismatchError",
    "StepwellError",
    "StoreError",
    "TransientStoreError",
    "UnsupportedValueError",
    "UsageError",
]


class StepwellError(Exception):
    """Base of all errors raised on purpose by stepwell."""


class ConfigError(StepwellError, ValueError):
    """The configuration is wrong; the message lists every fault with its place."""


class UsageError(StepwellError, RuntimeError):
    """A call that is not allowed in this situation; the message says what to do instead."""


class LockedError(UsageError):
    """Another living process has the arena or the directory of this run open."""


class UnsupportedValueError(StepwellError, TypeError):
    """A value that cannot be saved bit for bit; refused before anything is written."""


class StateMismatchError(StepwellError, ValueError):
    """The checkpoint does not fit the live model or optimizer; names, shapes and dtypes are listed."""


class StoreError(StepwellError):
    """A store could not do what was asked of it."""


class TransientStoreError(StoreError):
    """Worth another try after a pause."""


class PermanentStoreError(StoreError):
    """Another try would fail likewise."""


class MissingObjectError(PermanentStoreError, FileNotFoundError):
    """No object is stored under this key."""


class ObjectExistsError(PermanentStoreError, FileExistsError):
    """An object is already stored under this key, and create-if-absent was asked for."""


class NoSpaceError(PermanentStoreError):
    """The tier has no room; the message says how many bytes were needed and where."""


class IntegrityError(StepwellError):
    """Stored bytes are damaged, cut short or do not belong together."""


class FormatError(IntegrityError):
    """The object is not in our format, or in a version newer than this code reads.

    Attributes
    ----------
    newer : bool
        It is whole, and a newer version wrote it: update stepwell. Recovery never goes around it.
    """

    def __init__(self, *args: object, newer: bool = False) -> None:
        super().__init__(*args)
        self.newer = newer


class NotCommittedError(StepwellError, LookupError):
    """The step is not committed in any tier that was asked."""


class DeadlineError(StepwellError, TimeoutError):
    """Something did not happen within its deadline."""
