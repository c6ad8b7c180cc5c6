"""What a running keeper says about itself, for ``stepwell keeper --status`` and whoever starts it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.errors import FormatError, MissingObjectError
from stepwell.stores.oserrors import store_error

__all__ = ["LOG_NAME", "RECORD_NAME", "KeeperRecord", "forget_keeper"]

RECORD_NAME = "keeper.json"
LOG_NAME = "keeper.log"


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """One life of a keeper.

    Attributes
    ----------
    run, name : str
    session : str
        16 hexadecimal digits, new for each life.
    pid : int
    addresses : tuple of str
        ``host:port``, where it listens.
    budget_bytes : int or None
    """

    run: str
    name: str
    session: str
    pid: int
    addresses: tuple[str, ...]
    budget_bytes: int | None

    def as_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {**asdict(self), "addresses": list(self.addresses)}

    def write(self, directory: Path) -> None:
        """Write the record, replacing that of an earlier life."""
        path = directory / RECORD_NAME
        temporary = directory / f".{RECORD_NAME}-{secrets.token_hex(8)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(self.as_json(), file)
            os.replace(temporary, path)
        except OSError as error:
            raise store_error(error, "write the keeper's record", where=str(path)) from error

    @classmethod
    def read(cls, directory: Path) -> KeeperRecord:
        """Read the record of the newest life.

        Raises
        ------
        MissingObjectError
            No keeper was ever started there.
        FormatError
            It is no record of a keeper.
        """
        path = directory / RECORD_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise MissingObjectError(f"no keeper was started in {directory}") from error
        except OSError as error:
            raise store_error(error, "read the keeper's record", where=str(path)) from error
        except ValueError as error:
            raise FormatError(f"{path}: not the record of a keeper ({error})") from error
        return cls._of(document, path)

    @classmethod
    def _of(cls, document: object, path: Path) -> KeeperRecord:
        fields = document if isinstance(document, Mapping) else {}
        kinds = {"run": str, "name": str, "session": str, "pid": int, "addresses": list}
        budget = fields.get("budget_bytes")
        if not all(isinstance(fields.get(name), kind) for name, kind in kinds.items()) or not (
            budget is None or isinstance(budget, int)
        ):
            raise FormatError(f"{path}: not the record of a keeper")
        return cls(
            run=fields["run"],
            name=fields["name"],
            session=fields["session"],
            pid=fields["pid"],
            addresses=tuple(map(str, fields["addresses"])),
            budget_bytes=budget,
        )


def forget_keeper(directory: Path) -> bool:
    """Remove what a keeper wrote beside its arena; say whether there was a keeper.

    The arena's lock is held meanwhile: a keeper that starts afterwards writes its own.
    """
    found = False
    for name in (RECORD_NAME, LOG_NAME):
        with suppress(FileNotFoundError):
            os.unlink(directory / name)
            found = True
    return found
