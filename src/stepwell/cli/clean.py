"""``stepwell clean``: what runs and keepers left in this machine's memory, and how to let go of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stepwell.cli.output import JsonOption, bytes_text, print_json, table
from stepwell.errors import IntegrityError, LockedError, StoreError, UsageError

__all__ = ["clean"]

DEPTH_MAX = 2  # an arena, or one in the directory of a keeper


@dataclass(frozen=True, slots=True)
class Left:
    """One arena.

    Attributes
    ----------
    path : Path
    run : str
        Identity of the run, or the name of a keeper's run; empty where the arena's record is damaged.
    owner : int or None
        The living process that has it.
    size_bytes : int
        Memory that its files take.
    newest_step : int or None
        The newest save whose manifest lies there.
    """

    path: Path
    run: str
    owner: int | None
    size_bytes: int
    newest_step: int | None

    def as_json(self, *, removed: bool) -> dict[str, object]:
        """Return the fields by name."""
        return {
            "path": str(self.path),
            "run": self.run,
            "owner": self.owner,
            "size_bytes": self.size_bytes,
            "newest_step": self.newest_step,
            "removed": removed,
        }


def clean(
    directory: Annotated[
        list[Path] | None,
        typer.Argument(help="Arenas, or directories they lie in. [default: /dev/shm/stepwell-<uid>]"),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove those that no living process has; they may hold saves.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """List the arenas in this machine's memory, and with --remove let go of those of dead runs.

    An arena of a run that was killed holds its newest saves, perhaps the only ones: restart the run
    first if it is to go on. One that a living process has is never touched. Exit code 3 if there is none.
    """
    roots = directory or [Path(f"/dev/shm/stepwell-{os.getuid()}")]
    found = [left for root in roots for left in _arenas(root, DEPTH_MAX)]
    removed = {left.path for left in found if remove and left.owner is None and _remove(left)}
    if as_json:
        print_json({"arenas": [left.as_json(removed=left.path in removed) for left in found]})
    elif not found:
        typer.echo(f"nothing in {', '.join(map(str, roots))}")
    else:
        table(
            f"{len(found)} in memory",
            ("arena", "run", "process", "memory ", "newest step ", ""),
            (
                (
                    left.path,
                    left.run or "unknown",
                    _owner_text(left.owner),
                    bytes_text(left.size_bytes),
                    "none" if left.newest_step is None else left.newest_step,
                    "removed" if left.path in removed else "",
                )
                for left in found
            ),
        )
    return 0 if found else 3


def _owner_text(owner: int | None) -> str:
    if owner is None:
        return "none"
    return str(owner) if owner else "of another container"


def _arenas(root: Path, depth: int) -> Iterator[Left]:
    """Find the arenas in and below a directory, without writing or locking anything."""
    from stepwell.stores.arena_files import LOCK_NAME
    from stepwell.stores.arena_record import RECORD_NAME
    from stepwell.stores.lock import owner_of

    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{root}: cannot be read ({error.strerror})") from error
    if RECORD_NAME in names:
        owner = owner_of(root / LOCK_NAME)
        run, newest = _told(root)
        yield Left(root, run, owner, _size_bytes(root, names), newest)
        return
    for name in names if depth else []:
        if (root / name).is_dir() and not (root / name).is_symlink():
            yield from _arenas(root / name, depth - 1)


def _told(path: Path) -> tuple[str, int | None]:
    """Return the run of an arena and its newest step, as far as its headers tell."""
    from stepwell.pipeline.keys import Area, parse_key
    from stepwell.stores.arena import Arena

    try:
        with Arena.inspect(path) as arena:
            parsed = list(map(parse_key, arena.keys()))
            steps = [key.step for key in parsed if key is not None and key.area is Area.MANIFEST]
            return arena.run, max((step for step in steps if step is not None), default=None)
    except (IntegrityError, StoreError):
        return "", None


def _size_bytes(path: Path, names: list[str]) -> int:
    size = 0
    for name in names:
        with suppress(FileNotFoundError):
            size += os.lstat(path / name).st_blocks * 512
    return size


def _remove(left: Left) -> bool:
    """Remove an arena as its owner; False where a process took it just now, or its record is damaged."""
    from stepwell.keeper.record import forget_keeper
    from stepwell.stores.arena import Arena

    if not left.run:
        return False
    try:
        with Arena.open(left.path, run=left.run, create=False) as arena:
            keepers = forget_keeper(left.path.parent)
            arena.remove()
    except (LockedError, StoreError):
        return False
    if keepers:
        with suppress(OSError):
            os.rmdir(left.path.parent)
    return True
