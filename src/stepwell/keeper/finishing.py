"""Waiting for the death of this node's trainers, and committing what they had captured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.errors import LockedError, StepwellError
from stepwell.stores.arena_files import LOCK_NAME, has_captures
from stepwell.stores.lock import owner_of

if TYPE_CHECKING:
    from stepwell.pipeline.records import Link

__all__ = ["LOOK_EVERY_S", "finish_for"]

LOOK_EVERY_S = 0.5  # for an owner of the arena, while there is none


async def finish_for(
    directory: Path,
    finished: Callable[[list[Link]], None],
    failed: Callable[[StepwellError], None],
) -> None:
    """Commit what each trainer that has its arena in `directory` leaves captured; never returns.

    Parameters
    ----------
    directory : Path
        Of the arena; need not be there yet.
    finished, failed : callable
        Told what came of it.
    """
    told = ""
    while True:
        try:
            owner = owner_of(directory / LOCK_NAME)
            if owner:
                await _end_of(owner)
            elif owner is None and has_captures(directory):
                done = await asyncio.to_thread(_finish, directory)
                if done:
                    finished(done)
                continue
        except LockedError:
            pass  # the next trainer was faster, and does it itself
        except StepwellError as error:
            if str(error) != told:
                told = str(error)
                failed(error)
        await asyncio.sleep(LOOK_EVERY_S)


async def _end_of(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return  # it has, or cannot be waited for
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _finish(directory: Path) -> list[Link]:
    from stepwell.pipeline.finish import finish_in  # loads torch, of which a keeper has no other use

    return finish_in(directory)
