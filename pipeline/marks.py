"""What a captured save leaves in the arena for the time until it is committed there.

The slots it lies in are marked, and so is a record that says how to read them. If the trainer dies before its
runner has encoded the save, `stepwell.pipeline.finish` makes of them what the runner would have made.

Written in this order: layouts, marks of the slots, the record. Taken back in the opposite one, before anybody
may write into the slots again. A record therefore never speaks of bytes that are not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from stepwell.errors import StepwellError
from stepwell.pipeline.captured import CapturedSave
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.pack import PackKind
from stepwell.pipeline.records import Link
from stepwell.pipeline.sealed import FORMAT, seal
from stepwell.pipeline.slots import LayoutMemory
from stepwell.stores.arena import Arena
from stepwell.stores.region import Region

__all__ = ["CAPTURES", "RECORD", "CaptureMark"]

CAPTURES = "captures"
RECORD = "record"
AUX_BYTES_MAX = 64 << 20  # copied once more for the mark; a save with more beside its gradients has none


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one run of a layout lies in a region."""

    of: str
    memory: LayoutMemory
    region: Region
    offset_bytes: int
    parts: Sequence[int]


class CaptureMark:
    """The mark of one save; `set` and `release` may come from different threads.

    Parameters
    ----------
    arena : Arena
    run : str
    link : Link
    captured : CapturedSave
    kind : PackKind
    previous : Link or None
    header : callable
        Builds the header of the pack; see ``StepJob.header``.
    layouts : sequence of Layout
        All that the pack refers to; in the arena before `set` is called.
    environment : mapping
    """

    def __init__(
        self,
        arena: Arena,
        run: str,
        link: Link,
        captured: CapturedSave,
        *,
        kind: PackKind,
        previous: Link | None,
        header: Callable[[], dict[str, object]],
        layouts: Sequence[Layout],
        environment: Mapping[str, object],
    ) -> None:
        self._arena, self._run, self._link, self._captured = arena, run, link, captured
        self._kind, self._previous, self._header = kind, previous, header
        self._layouts, self._environment = layouts, environment
        self._lock = threading.Lock()
        self._released = False
        self._marked: list[Region] = []
        self._own: list[Region] = []

    def pending(self) -> list[Future[None]]:
        """Return the copies into the slots that have not ended yet."""
        return [update.ready for update in self._captured.updates if not update.ready.done()]

    def set(self, digest: object) -> bool:
        """Mark the save, all copies of which have ended; say whether it is marked now.

        Parameters
        ----------
        digest : JSON
            Of the weights, for the pack's header.

        Raises
        ------
        NoSpaceError, StoreError
            There is no room for the record; nothing is marked.
        """
        with self._lock:
            if self._released or self._captured.broken is not None:
                return False
            places = self._places()
            if places is None:
                return False
            try:
                self._write(places, digest)
            except StepwellError:
                self._lift()
                raise
            return True

    def release(self) -> None:
        """Take the mark back, then give the slots back; later calls do nothing."""
        with self._lock:
            self._released = True
            self._lift()
        self._captured.release()

    def _places(self) -> list[_Place] | None:
        """Say where all of the save lies; None where a part of it is not in the arena, nor small."""
        places = []
        for number, update in enumerate(self._captured.updates):
            region = update.memory.region
            if not isinstance(region, Region):
                return None
            places.append(
                _Place(f"update/{number}", update.memory, region, update.memory.offset_bytes, update.parts)
            )
        if self._captured.state is not None:
            memory = self._captured.state.memory
            if not isinstance(memory.region, Region):
                return None
            places.append(_Place("state", memory, memory.region, memory.offset_bytes, ()))
        aux = self._captured.aux
        if aux is not None and aux.layout.size_bytes > AUX_BYTES_MAX:
            return None
        return places

    def _write(self, places: list[_Place], digest: object) -> None:
        aux = self._captured.aux
        if aux is not None:
            region = self._reserve(aux.layout.size_bytes)
            np.copyto(np.frombuffer(region.payload, np.uint8)[: aux.memory.run.nbytes], aux.memory.run)
            places.append(_Place("aux", aux.memory, region, 0, ()))
        regions = list(dict.fromkeys(place.region for place in places))
        document = seal(
            {
                "kind": "capture",
                "format": FORMAT,
                "run": self._run,
                "incarnation": self._link.incarnation,
                "step": self._link.step,
                "pack": str(self._kind),
                "previous": None if self._previous is None else self._previous.as_json(),
                "header": self._header(),
                "digest": digest,
                "environment": dict(self._environment),
                "layouts": [layout.hash for layout in self._layouts],
                "regions": [self._mark(region, str(number)) for number, region in enumerate(regions)],
                "places": [
                    {
                        "of": place.of,
                        "layout": place.memory.layout.hash,
                        "region": regions.index(place.region),
                        "offset_bytes": place.offset_bytes,
                        "parts": list(place.parts),
                    }
                    for place in places
                ],
            }
        )
        record = self._reserve(len(document))
        record.payload[: len(document)] = document
        self._mark(record, RECORD, len(document))

    def _reserve(self, size_bytes: int) -> Region:
        region = self._arena.reserve(size_bytes)
        self._own.append(region)
        return region

    def _mark(self, region: Region, name: str, length: int | None = None) -> int:
        key = f"{CAPTURES}/{self._link.incarnation}/{self._link.step}/{name}"
        serial = self._arena.mark(region, key, region.size_bytes if length is None else length)
        self._marked.append(region)
        return serial

    def _lift(self) -> None:
        while self._marked:
            self._arena.unmark(self._marked.pop())
        while self._own:
            self._arena.recycle(self._own.pop())
