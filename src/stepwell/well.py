"""The asynchronous face: the same run for trainers that live in an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

from stepwell.assembly import assemble
from stepwell.config import Config
from stepwell.errors import DeadlineError, UsageError
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.outcome import Metrics, Restored
from stepwell.pipeline.session import Session
from stepwell.signals import TermHandler

__all__ = ["AsyncHandle", "Well", "open"]

Result = TypeVar("Result")


def open(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    *,
    model: object = None,
    optimizer: object = None,
    extra: Mapping[str, object] | None = None,
    fresh: bool = False,
    **overrides: object,
) -> Well:
    """Open a run for saving and restoring; see `stepwell.open_sync` for everything but the ``await``.

    Returns
    -------
    Well
        An asynchronous context manager; entering it opens the tiers.
    """

    def opened() -> Session:
        return assemble(
            source, model=model, optimizer=optimizer, extra=extra, fresh=fresh, overrides=overrides
        )

    return Well(opened)


class AsyncHandle:
    """One save on its way, awaited."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    @property
    def step(self) -> int:
        """Label of the save."""
        return self._handle.step

    @property
    def skipped(self) -> str | None:
        """Why nothing was saved (backpressure ``skip``), else None."""
        return self._handle.skipped

    def done(self, tier: str | None = None) -> bool:
        """Whether the save is committed in `tier` (None: the farthest)."""
        return self._handle.done(tier)

    async def until(self, tier: str | None = None, timeout_s: float | None = None) -> None:
        """Wait until the save is committed in `tier` (None: the farthest).

        Cancelling the wait leaves the save on its way.

        Raises
        ------
        DeadlineError
            `timeout_s` passed first.
        StepwellError
            Whatever made the save fail there.
        """
        future = asyncio.shield(_quiet(self._handle.future(tier)))
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"step {self.step} was not committed in tier "
                f"{tier or self._handle.tiers[-1]} within {timeout_s} s"
            ) from None

    async def committed(self) -> None:
        """Wait until the save is committed in the farthest tier."""
        await self.until()


class Well:
    """An open run. Made by `stepwell.open`; used by one task, the trainer's.

    Captures run in a thread while the trainer's task waits, so other tasks of the loop go on.
    """

    def __init__(self, opened: Callable[[], Session]) -> None:
        self._opened = opened
        self._session_or_none: Session | None = None

    @property
    def _session(self) -> Session:
        if self._session_or_none is None:
            raise UsageError("the run is not open: use it inside 'async with stepwell.open(...) as well:'")
        return self._session_or_none

    async def __aenter__(self) -> Self:
        """Open the tiers."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._opened))
        try:
            session = self._session_or_none = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: what it opens is closed again, or its lock would stay.
            if await _outcome(opening):
                await _outcome(asyncio.ensure_future(asyncio.to_thread(opening.result().close)))
            raise
        self._term = TermHandler(session)
        if session.options.handle_sigterm:
            self._term.install()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish what is on its way and close; a fault there never hides the body's own error."""
        if error is None:
            await self.close()
            return
        try:
            await self.close()
        except Exception as second:
            error.add_note(f"stepwell: closing the run failed too: {second}")

    @property
    def restored(self) -> Restored | None:
        """What `restore` gave, or None."""
        return self._session.restored

    async def restore(self) -> Restored | None:
        """Load the newest whole step in place; None if the run has none."""
        return await self._off_loop(self._session.restore)

    async def steps(self, total: int) -> AsyncIterator[int]:
        """Restore, then yield the steps that are left, saving after the body of each."""
        first = self._session.next_step
        if first is None:
            restored = await self.restore()
            first = 0 if restored is None else restored.step + 1
        for step in range(first, total):
            yield step
            if self.should_save(step) or step == total - 1:
                await self.save(step)

    async def save(self, step: int, *, base: bool = False) -> AsyncHandle:
        """Capture the state and return as soon as training may go on; see `SyncWell.save`."""
        return AsyncHandle(await self._off_loop(lambda: self._session.save(step, base=base)))

    def paused(self) -> AbstractContextManager[None]:
        """Capture nothing while the block runs; the next save after it is a base."""
        return self._session.paused()

    def should_save(self, step: int) -> bool:
        """Whether the schedule (``save_every``) asks for a save of this step."""
        return self._session.should_save(step)

    def latest_step(self, tier: str | None = None) -> int | None:
        """Newest committed step, in any tier or in one; None if there is none."""
        return self._session.latest_step(tier)

    def all_steps(self, tier: str | None = None) -> list[int]:
        """Committed steps of the live lineage, oldest first, in any tier or in one."""
        return self._session.all_steps(tier)

    async def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Wait until every save so far is committed in every tier, or raise what made it fail."""
        handles = self._session.on_their_way()
        waits = [_quiet(handle.future(tier)) for handle in handles for tier in handle.tiers]
        if waits and (await asyncio.wait(waits, timeout=timeout_s))[1]:
            first = handles[0].step
            raise DeadlineError(f"step {first} or one after it is still on its way after {timeout_s} s")
        self._session.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise the first background failure not yet raised, if there is one."""
        self._session.check_for_errors()

    def metrics(self) -> Metrics:
        """Figures since the run was opened."""
        return self._session.metrics()

    async def close(self) -> None:
        """Bring everything to the farthest tier, then release memory and locks. Idempotent."""
        session = self._session_or_none
        if session is not None:
            try:
                await self._off_loop(session.close)
            finally:
                self._term.remove()

    async def _off_loop(self, function: Callable[[], Result]) -> Result:
        """Run `function` in a thread and outwait it, even if cancelled: it touches the live state."""
        task = asyncio.ensure_future(asyncio.to_thread(function))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _outcome(task)
            raise


async def _outcome(task: asyncio.Future[Result]) -> bool:
    """Wait for a thread whatever cancels us meanwhile; return whether it succeeded."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
    return not task.cancelled() and task.exception() is None


def _quiet(future: concurrent.futures.Future[None]) -> asyncio.Future[None]:
    """Await a future of another thread; it may fail after nobody waits for it any more."""
    waited = asyncio.wrap_future(future)
    waited.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waited
