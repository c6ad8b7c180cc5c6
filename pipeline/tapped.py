"""One tapped update: its record, and its gradients on their way into a capture slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stepwell.errors import DeadlineError
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.replayable import why_not_gradients
from stepwell.pipeline.slots import LayoutMemory, Slot
from stepwell.pipeline.update import UpdateRecord
from stepwell.pipeline.watch import versions_of

__all__ = ["Fence", "HeldCopy", "TappedUpdate", "fence_of", "finished"]


@dataclass(slots=True)
class TappedUpdate:
    """One update, recorded; its gradients are in a slot once ``ready``.

    Attributes
    ----------
    record : UpdateRecord
    memory : LayoutMemory
        The optimizer's gradient layout in the slot. Belongs to the save until it is released.
    parts : tuple of int
        Chunks of the layout that hold at least one gradient; in the others all are None.
    ready : Future
        Done when the copy has ended; cannot be cancelled.
    by_reference : bool
        Copied in the background, from the live tensors.
    torn : str or None
        Why the copy cannot be trusted; final once ``ready``.
    """

    record: UpdateRecord
    memory: LayoutMemory
    parts: tuple[int, ...]
    ready: Future[None]
    by_reference: bool
    torn: str | None = None

    @property
    def layout(self) -> Layout:
        """Gradient layout of the update's optimizer."""
        return self.memory.layout

    def wait(self, timeout_s: float) -> None:
        """Block until the copy has ended, well or not (see ``torn``).

        Raises
        ------
        DeadlineError
            It did not end in time.
        """
        try:
            self.ready.exception(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"the copy of a gradient did not end within {timeout_s} s") from None


def finished() -> Future[None]:
    """Return a future that is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class HeldCopy:
    """The copy of gradients held by reference; called once, in the copier's thread.

    Parameters
    ----------
    update : TappedUpdate
    slot : Slot
        Comes with a reference, which is released at the end.
    gradients : list of Tensor or None
        Live; let go of at the end.
    versions : list of int
        As they were when the gradients were taken.
    dtypes : sequence of dtype
        Of the parameters.
    names : sequence of str
    tear : callable
        Told why, if the gradients were written to before the copy had ended.
    fence : Fence or None
        What the copy has to wait for on an accelerator.
    """

    def __init__(
        self,
        update: TappedUpdate,
        slot: Slot,
        gradients: Sequence[torch.Tensor | None],
        versions: list[int],
        dtypes: Sequence[torch.dtype],
        names: Sequence[str],
        tear: Callable[[str], None],
        fence: Fence | None,
    ) -> None:
        self._update, self._slot, self._gradients, self._versions = update, slot, gradients, versions
        self._dtypes, self._names, self._tear, self._fence = dtypes, names, tear, fence

    def __call__(self) -> None:
        """Copy, then look whether anything was written meanwhile."""
        update = self._update
        missing = update.record.missing
        try:
            update.torn = why_not_gradients(self._gradients, missing, self._dtypes)
            if update.torn is None:
                with _behind(self._fence):
                    update.memory.copy_from(self._gradients, missing)
                # Read after the last byte: a write that came later than this harms nothing.
                update.torn = self._written_to()
        except Exception as error:
            update.torn = f"a gradient could not be copied: {type(error).__name__}: {error}"
            raise
        finally:
            self._gradients = ()
            if update.torn is not None:
                self._tear(update.torn)
            self._slot.release()

    def _written_to(self) -> str | None:
        for name, old, new in zip(self._names, self._versions, versions_of(self._gradients), strict=True):
            if old != new:
                return f"torn: the gradient of {name} was written to while it was being copied"
        return None


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in an accelerator's stream."""

    device: int
    event: torch.cuda.Event


def fence_of(device_type: str) -> Fence | None:
    """Mark how far the current stream is; None on the CPU."""
    if device_type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # not tested: needs an accelerator
    event.record()
    return Fence(torch.cuda.current_device(), event)


@contextmanager
def _behind(fence: Fence | None) -> Iterator[None]:
    """Run what copies from an accelerator in a stream of its own, behind the fence."""
    if fence is None:
        yield
        return
    stream = torch.cuda.Stream(fence.device)  # type: ignore[no-untyped-call]  # not tested: needs an accelerator
    with torch.cuda.stream(stream):
        stream.wait_event(fence.event)
        yield
        stream.synchronize()
