"""The synchronous face: for plain training scripts and notebooks.

It uses no event loop of the caller: background work runs in the pipeline's own threads, so it works
inside a running loop too and cannot deadlock with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from stepwell.assembly import assemble
from stepwell.config import Config
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.outcome import Metrics, Restored
from stepwell.pipeline.session import Session
from stepwell.signals import TermHandler

__all__ = ["SyncWell", "open_sync"]


def open_sync(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    *,
    model: object = None,
    optimizer: object = None,
    extra: Mapping[str, object] | None = None,
    fresh: bool = False,
    **overrides: object,
) -> SyncWell:
    """Open a run for saving and restoring.

    Parameters
    ----------
    source : path, URL, mapping or Config
        A directory or a URL (``file:``, ``s3://bucket/prefix``, ``gs://`` and others), or a configuration
        (a ``.yaml``, ``.yml`` or ``.toml`` file, or a mapping).
    model : nn.Module, mapping of modules, or object with state_dict and load_state_dict
    optimizer : Optimizer, sequence or mapping of optimizers
    extra : mapping of str to object, optional
        Schedulers, loaders, generators, EMA models, plain values: whatever else makes up the state.
    fresh : bool
        Begin anew although the run has checkpoints already; those stay until newer bases of this
        new beginning have replaced them.
    **overrides
        Keys of the configuration, e.g. ``base_every=20``.

    Returns
    -------
    SyncWell
        A context manager; leaving it finishes what is on its way.

    Raises
    ------
    ConfigError
        Every fault of the configuration at once.
    LockedError
        Another living process has this run open.
    NoSpaceError
        The memory tier is too small; says how much is needed.
    PermanentStoreError
        The directory or the place on object storage cannot be made or written.
    TransientStoreError
        Object storage does not answer, although it was tried again.
    """
    return SyncWell(
        assemble(source, model=model, optimizer=optimizer, extra=extra, fresh=fresh, overrides=overrides)
    )


class SyncWell:
    """An open run. Made by `open_sync`; used by one thread, the trainer's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._term = TermHandler(session)
        if session.options.handle_sigterm:
            self._term.install()

    def __enter__(self) -> Self:
        """Return the run itself; it is open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish what is on its way and close; a fault there never hides the body's own error."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:
            error.add_note(f"stepwell: closing the run failed too: {second}")

    @property
    def restored(self) -> Restored | None:
        """What `restore` gave, or None."""
        return self._session.restored

    def restore(self) -> Restored | None:
        """Load the newest whole step in place; None if the run has none.

        Raises
        ------
        StateMismatchError
            The checkpoint is of another model or optimizer; nothing was loaded.
        IntegrityError
            Steps are committed, but none can be restored; the message lists the damage.
        """
        return self._session.restore()

    def steps(self, total: int) -> Iterator[int]:
        """Restore, then yield the steps that are left, saving after the body of each.

        Parameters
        ----------
        total : int
            Steps 0 to ``total - 1`` are the whole run.

        Notes
        -----
        Leaving the loop early, or by an error, does not save the unfinished step. Where something
        was restored or saved before, the steps after that are yielded.
        """
        first = self._session.next_step
        if first is None:
            restored = self.restore()
            first = 0 if restored is None else restored.step + 1
        for step in range(first, total):
            yield step
            if self.should_save(step) or step == total - 1:
                self.save(step)

    def save(self, step: int, *, base: bool = False) -> SaveHandle:
        """Capture the state and return as soon as training may go on.

        Parameters
        ----------
        step : int
            Larger than that of the save before.
        base : bool
            Capture a whole base as well, whatever the schedule says.

        Raises
        ------
        UsageError
            Gradients are accumulated, the step is not larger, the run has checkpoints that were
            not restored, or the process was forked.
        UnsupportedValueError
            Something cannot be saved bit for bit; named. Nothing was written.
        StepwellError
            An earlier save failed in the background (policy ``raise``).
        """
        return self._session.save(step, base=base)

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

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Block until every save so far is committed in every tier, or raise what made it fail."""
        self._session.wait_until_finished(timeout_s)

    def check_for_errors(self) -> None:
        """Raise the first background failure not yet raised, if there is one."""
        self._session.check_for_errors()

    def metrics(self) -> Metrics:
        """Figures since the run was opened."""
        return self._session.metrics()

    def close(self) -> None:
        """Bring everything to the farthest tier, then release memory and locks. Idempotent.

        Raises
        ------
        DeadlineError
            It did not arrive within ``close_deadline_s``; memory is then kept for the next start.
        StepwellError
            A background failure not yet raised.
        """
        try:
            self._session.close()
        finally:
            self._term.remove()
