"""``arena.json``: whose arena a directory is, written once."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import xxhash

from stepwell.errors import FormatError, UsageError
from stepwell.stores.header import FORMAT

__all__ = ["RECORD_NAME", "TEMP_PREFIX", "check_record", "read_record", "write_record"]

RECORD_NAME = "arena.json"
TEMP_PREFIX = ".stepwell-tmp-"
_RECORD_BYTES_MAX = 64 << 10  # a run name has at most 1,024 bytes; anything longer is not ours


def write_record(directory: Path, run: str) -> None:
    """Write the record; there is the whole of it or none."""
    temporary = directory / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(_encode(FORMAT, run))
    os.rename(temporary, directory / RECORD_NAME)


def read_record(directory: Path) -> str | None:
    """Return the name of the run, None where there is no record.

    Raises
    ------
    FormatError
        Another format version, or damaged.
    """
    path = directory / RECORD_NAME
    try:
        with open(path, "rb") as file:
            text = file.read(_RECORD_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    advice = "remove the directory to start a new one"
    try:
        record = json.loads(text)
        version, run = record["format"], record["run"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{path} is damaged or not ours; {advice}") from error
    if version != FORMAT:
        raise FormatError(f"{path} has format {version!r}; this version reads format {FORMAT}; {advice}")
    if not isinstance(run, str) or text != _encode(FORMAT, run):
        raise FormatError(f"{path} is damaged: its checksum is wrong; {advice}")
    return run


def check_record(directory: Path, run: str) -> str | None:
    """Return `run` if the arena is that run's, None if it has no record yet.

    Raises
    ------
    UsageError
        It belongs to another run.
    FormatError
        As `read_record`.
    """
    found = read_record(directory)
    if found is not None and found != run:
        raise UsageError(
            f"the arena in {directory} belongs to run {found!r}, not {run!r}; "
            f"give this run a directory of its own"
        )
    return found


def _encode(version: int, run: str) -> bytes:
    body = {"format": version, "kind": "stepwell arena", "run": run}
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(body).encode())
    return json.dumps({**body, "xxh3": checksum}).encode() + b"\n"
