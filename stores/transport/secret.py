"""The secret that the nodes of one run share."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.stores.oserrors import store_error

__all__ = ["SECRET_BYTES_MIN", "SECRET_VARIABLE", "RunSecret"]

SECRET_BYTES_MIN = 32
"""A short secret can be guessed offline by anyone who saw one handshake."""

SECRET_VARIABLE = "STEPWELL_RUN_SECRET"
_FILE_BYTES_MAX = 4096


class RunSecret:
    """Random bytes known to the nodes of one run and to nobody else.

    Never shown: neither by ``repr`` nor in errors, and it is not pickled.
    """

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"the run secret has {len(value)} bytes, at least {SECRET_BYTES_MIN} are needed; make one "
                "with: stepwell keeper --make-secret FILE"
            )
        self.value = value

    def __repr__(self) -> str:
        return "RunSecret(...)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a run secret is not pickled: read it from its file or the environment again")

    @classmethod
    def make(cls) -> RunSecret:
        """Return a fresh one."""
        return cls(secrets.token_hex(SECRET_BYTES_MIN).encode())

    @classmethod
    def from_environment(cls, variable: str = SECRET_VARIABLE) -> RunSecret | None:
        """Return the secret in an environment variable, None where it is not set.

        Raises
        ------
        ConfigError
            It is too short.
        """
        text = os.environ.get(variable)
        return None if text is None else cls(text.strip().encode())

    @classmethod
    def from_file(cls, path: Path | str) -> RunSecret:
        """Return the secret in a file that only its owner, this user, can read.

        Raises
        ------
        ConfigError
            Others may read it, it is no regular file, belongs to somebody else, or is too short.
        PermanentStoreError, TransientStoreError
            It cannot be read.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(fd)
                _check_private(str(path), status)
                content = os.read(fd, _FILE_BYTES_MAX)
            finally:
                os.close(fd)
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no run secret in {path}; make one with: stepwell keeper --make-secret {path}"
            ) from error
        except OSError as error:
            raise store_error(error, "read the run secret", where=str(path)) from error
        return cls(content.strip())

    def write(self, path: Path | str) -> None:
        """Write the secret to a new file with mode 0600.

        Raises
        ------
        PermanentStoreError, TransientStoreError
            The file is there already, or cannot be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(self.value + b"\n")
        except OSError as error:
            raise store_error(error, "write the run secret", where=str(path)) from error


def _check_private(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the run secret {path} is no regular file")
    if status.st_mode & 0o077:
        raise ConfigError(f"the run secret {path} can be read or changed by others; run: chmod 600 {path}")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"the run secret {path} belongs to user {status.st_uid}, not to {os.geteuid()}")
