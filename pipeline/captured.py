"""What capture hands over at a save: everything it took, in memory that training does not touch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from stepwell.errors import DeadlineError, StepwellError
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.pack import HEADER_BYTES
from stepwell.pipeline.slots import LayoutMemory, Region
from stepwell.pipeline.tapped import TappedUpdate, finished
from stepwell.pipeline.tree import JsonValue

__all__ = ["BaseCopy", "CapturedSave", "SaveKind", "StateCopy", "room_for_base"]


class SaveKind(StrEnum):
    """What a captured save consists of, a base beside it aside."""

    GRADIENT = "gradient"
    STATE = "state"
    BASE_ONLY = "base only"


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Tensors copied into memory of ours, and the tree that refers to them by name.

    Attributes
    ----------
    memory : LayoutMemory
    tree : JSON
    """

    memory: LayoutMemory
    tree: dict[str, JsonValue]

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in the memory."""
        return self.memory.layout


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """The whole state in a region of its own, `head_bytes` into its payload.

    Attributes
    ----------
    region : Region
        Belongs to whoever takes the save over, who publishes or recycles it once ``ready``.
    memory : LayoutMemory
        Drop it, and the base, before the region is unmapped.
    ready : Future
        Done when all bytes are there.
    overlapped : bool
        The live state is copied while training goes on, see `stepwell.pipeline.overlap`.
    """

    region: Region
    memory: LayoutMemory
    tree: dict[str, JsonValue]
    head_bytes: int
    ready: Future[None] = field(default_factory=finished)
    overlapped: bool = False

    @property
    def layout(self) -> Layout:
        """Layout of the whole state."""
        return self.memory.layout


@dataclass(slots=True)
class CapturedSave:
    """One save, captured.

    Attributes
    ----------
    step : int
    kind : SaveKind
        GRADIENT: `updates` and `aux` lead on from the previous save. STATE: `state` is the whole
        state and needs no other save. BASE_ONLY: there is no differential, `base` is the save.
    reason : str or None
        Why it is not a gradient save.
    updates : tuple of TappedUpdate
        In order. Record and layout of each speak of its optimizer.
    aux : StateCopy or None
        What updates do not account for, as at the save; GRADIENT only.
    state : StateCopy or None
        STATE only.
    base : BaseCopy or None
        Always with BASE_ONLY, with the others if it was asked for.
    base_error : StepwellError or None
        Why there is no base although one was asked for (no room); the differential is whole.
    updates_begun : int
        The count at the save. While it is unchanged, live weights are those of the save.
    digest : object
        What the eager digest gave, or None.
    extra_bytes : int
        Bytes of tensors in ``extra``, which every save copies anew.
    """

    step: int
    kind: SaveKind
    reason: str | None
    updates: tuple[TappedUpdate, ...]
    aux: StateCopy | None
    state: StateCopy | None
    base: BaseCopy | None
    updates_begun: int
    base_error: StepwellError | None = None
    digest: object = None
    extra_bytes: int = 0
    _releases: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout that the chunks refer to, once."""
        copies = [update.layout for update in self.updates]
        copies += [copy.layout for copy in (self.aux, self.state) if copy is not None]
        return tuple({layout.hash: layout for layout in copies}.values())

    @property
    def broken(self) -> str | None:
        """Why this save must not be committed: a gradient is torn. Final once all is ready."""
        return next((update.torn for update in self.updates if update.torn is not None), None)

    def pending(self) -> list[Future[None]]:
        """Return the copies that have not ended yet."""
        futures = [update.ready for update in self.updates]
        if self.base is not None:
            futures.append(self.base.ready)
        return [future for future in futures if not future.done()]

    def wait(self, timeout_s: float) -> None:
        """Block until every copy has ended, each within `timeout_s`.

        Raises
        ------
        DeadlineError
            One did not.
        """
        for future in self.pending():
            try:
                future.exception(timeout_s)
            except TimeoutError:
                raise DeadlineError(
                    f"step {self.step}: a background copy did not end within {timeout_s} s"
                ) from None

    def release(self) -> None:
        """Give slots and memory back, except a base's region; thread-safe, later calls do nothing."""
        with self._lock:
            releases, self._releases = self._releases, []
        for release in releases:
            release()


def room_for_base(layout: Layout, tree: dict[str, JsonValue]) -> int:
    """Bytes a base's region needs: header, run, and an index with room for what grows in it.

    A row of the index is some 250 bytes; the tree is written once and may come to contain longer
    numbers. Rounded up to 64 KiB, so that the next base finds a region that fits.
    """
    index = 1024 * len(layout.chunks) + 2 * len(json.dumps(tree)) + (64 << 10)
    return -(-(HEADER_BYTES + layout.size_bytes + index) // (64 << 10)) * (64 << 10)
