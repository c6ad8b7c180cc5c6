"""Finishing what a trainer had captured when it died: its saves are encoded and committed by somebody else.

The work is done by the runner that the trainer would have used, over the slots that `stepwell.pipeline.marks`
left in the arena, and ends in the memory tier: the next restore finds the saves there.
"""

from __future__ import annotations

import concurrent.futures
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stepwell.errors import IntegrityError, LockedError, StepwellError
from stepwell.pipeline.capture_stage import CaptureStage
from stepwell.pipeline.captured import CapturedSave, SaveKind, StateCopy
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.jobs import StepJob
from stepwell.pipeline.keys import Series, incarnation_counter
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.marks import CAPTURES, RECORD
from stepwell.pipeline.pack import PackKind
from stepwell.pipeline.records import Link
from stepwell.pipeline.runner import Runner
from stepwell.pipeline.sealed import count, reading, typed, unseal
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.slots import CopyPlan, LayoutMemory
from stepwell.pipeline.tapped import TappedUpdate, finished
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.tree import JsonValue
from stepwell.pipeline.update import UpdateRecord
from stepwell.stores.arena import Arena
from stepwell.stores.arena_files import FINISH_LOCK_NAME
from stepwell.stores.lock import FileLock, owner_of
from stepwell.stores.memory import MemoryStore
from stepwell.stores.region import Region

__all__ = ["finish_captures", "finish_in", "open_arena"]

BUDGET_BYTES = 64 << 20
POLL_S = 0.02
DEADLINE_S = 300.0  # of one save; 1 GB takes about 2 s


def finish_captures(arena: Arena) -> list[Link]:
    """Commit, in the arena, what its last owner had captured there and not committed.

    Parameters
    ----------
    arena : Arena
        Open for writing. Nothing of the run is captured there yet.

    Returns
    -------
    list of Link
        The saves that are committed now and were not, oldest first. One that cannot be, because what it
        leads on from is missing, is let go of; a damaged one is told of in a warning.
    """
    regions = arena.left()
    if not regions:
        return []
    try:
        captures = _read(arena.run, regions)
        return _Finish(arena).run(captures) if captures else []
    finally:
        for region in regions:
            arena.recycle(region)


def finish_in(directory: Path) -> list[Link]:
    """Commit what is captured in an arena whose owner is dead, as `finish_captures` does.

    Raises
    ------
    LockedError
        It has another owner by now.
    StoreError
        It cannot be opened.
    """
    with Arena.inspect(directory) as inspected:
        run = inspected.run
    with FileLock(directory / FINISH_LOCK_NAME), Arena.open(directory, run=run, create=False) as arena:
        return finish_captures(arena)


def open_arena(directory: Path, run: str) -> Arena:
    """Open an arena as its owner, once what was captured in it is finished: by this process if need be.

    Raises
    ------
    LockedError
        It has another owner, and that is no keeper that is about to be done.
    StepwellError
        See ``Arena.open``.
    """
    deadline = time.monotonic() + DEADLINE_S
    busy = True
    while True:
        try:
            arena = Arena.open(directory, run=run)
            break
        except LockedError:
            was_busy, busy = busy, owner_of(directory / FINISH_LOCK_NAME) is not None
            if not (busy or was_busy) or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
    try:
        finish_captures(arena)
    except BaseException:
        arena.close()
        raise
    return arena


@dataclass(frozen=True, slots=True)
class _Place:
    of: str
    layout: str
    region: Region
    offset_bytes: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Capture:
    """A mark's record, read back."""

    what: str
    link: Link
    kind: PackKind
    previous: Link | None
    header: Mapping[str, object]
    digest: object
    environment: Mapping[str, object]
    layouts: tuple[str, ...]
    places: tuple[_Place, ...]

    @classmethod
    def read(cls, run: str, record: Region, marked: Mapping[int, Region]) -> _Capture | None:
        """Read a record; None where its slots are marked for something else by now.

        Raises
        ------
        IntegrityError
            It is damaged, or of another run.
        """
        assert record.header is not None
        what = record.header.key
        document = unseal(record.payload[: record.header.length], what, "capture")
        with reading(what):
            if document["run"] != run:
                raise IntegrityError(f"{what}: is of run {document['run']!r}, not {run!r}")
            serials = [count(serial) for serial in typed(document["regions"], list)]
            if any(serial not in marked for serial in serials):
                return None
            link = Link.from_json([document["incarnation"], document["step"]])
            assert link is not None
            places = []
            for place in typed(document["places"], list):
                region = marked[serials[count(place["region"])]]
                places.append(
                    _Place(
                        typed(place["of"], str),
                        typed(place["layout"], str),
                        region,
                        count(place["offset_bytes"]),
                        tuple(count(part) for part in typed(place["parts"], list)),
                    )
                )
            return cls(
                what,
                link,
                PackKind(typed(document["pack"], str)),
                Link.from_json(document["previous"]),
                typed(document["header"], dict),
                document["digest"],
                typed(document["environment"], dict),
                tuple(typed(layout, str) for layout in typed(document["layouts"], list)),
                tuple(places),
            )

    def captured(self, layouts: Mapping[str, Layout]) -> CapturedSave:
        """Return the save as its trainer had captured it, over the same memory.

        Raises
        ------
        FormatError
            The record does not describe what its slots can hold.
        """
        updates: dict[int, TappedUpdate] = {}
        aux: StateCopy | None = None
        state: StateCopy | None = None
        with reading(self.what):
            for place in self.places:
                whole = torch.from_numpy(np.frombuffer(place.region.payload, np.uint8))
                memory = LayoutMemory(whole[place.offset_bytes :], CopyPlan(layouts[place.layout]))
                if place.of == "aux":
                    aux = StateCopy(memory, _tree(typed(self.header["aux"], dict)))
                elif place.of == "state":
                    state = StateCopy(memory, _tree(self.header))
                else:
                    number = int(place.of.removeprefix("update/"))
                    described = typed(self.header["updates"], list)[number]
                    if any(part >= len(memory.layout.chunks) for part in place.parts):
                        raise ValueError(f"{place.of} has parts that its layout has not")
                    record = UpdateRecord.from_json(described["record"])
                    updates[number] = TappedUpdate(
                        record, memory, place.parts, finished(), by_reference=False
                    )
            gradient = self.kind is PackKind.GRADIENT
            expected = len(typed(self.header["updates"], list)) if gradient else 0
            if sorted(updates) != list(range(expected)) or (state is None) != gradient:
                raise ValueError("a part of the save is missing")
        return CapturedSave(
            step=self.link.step,
            kind=SaveKind.GRADIENT if gradient else SaveKind.STATE,
            reason=None,
            updates=tuple(updates[number] for number in range(expected)),
            aux=aux,
            state=state,
            base=None,
            updates_begun=0,
        )


def _read(run: str, regions: Collection[Region]) -> list[_Capture]:
    """Return what can be finished, oldest first; the marks of slots without a record say nothing."""
    marked = {region.header.serial: region for region in regions if region.header is not None}
    captures = []
    for region in regions:
        key = "" if region.header is None else region.header.key
        if not key.startswith(f"{CAPTURES}/") or not key.endswith(f"/{RECORD}"):
            continue
        try:
            capture = _Capture.read(run, region, marked)
        except IntegrityError as error:
            warnings.warn(f"stepwell: {error}", stacklevel=3)
            continue
        if capture is not None:
            captures.append(capture)
    return sorted(captures, key=lambda capture: capture.link)


class _Finish:
    """Brings captures into the memory tier of one arena."""

    def __init__(self, arena: Arena) -> None:
        self._store = MemoryStore(arena)
        self._tier = Tier("memory", self._store)
        self._tier.begin_whole()
        self._runner = Runner(
            run=arena.run,
            tiers=[self._tier],
            chunk_stages=[],
            shard=Shard(),
            inventory=Inventory(),
            events=_Nobody(),
            budget_bytes=BUDGET_BYTES,
        )

    def run(self, captures: list[_Capture]) -> list[Link]:
        """Commit them in order, as far as each leads on from one that is committed."""
        runner = self._runner
        runner.start()
        done: list[Link] = []
        try:
            runner.inventory = inventory = runner.call(Inventory.read([self._tier])).result(DEADLINE_S)
            newest = max(map(incarnation_counter, inventory.named_incarnations()), default=0)
            for capture in captures:
                # What another life goes on from is decided; an older one adds nothing to it.
                if incarnation_counter(capture.link.incarnation) == newest and self._is_next(capture):
                    self._commit(capture)
                    done.append(capture.link)
        except StepwellError as error:
            warnings.warn(f"stepwell: what was captured last cannot be committed: {error}", stacklevel=4)
        finally:
            runner.stop(DEADLINE_S)
            self._store.close()
        return done

    def _is_next(self, capture: _Capture) -> bool:
        inventory = self._runner.inventory
        if capture.link in inventory.steps:
            return False  # its mark was yet to be taken back
        known = capture.previous in inventory.steps or capture.previous in inventory.bases
        return known or capture.kind is PackKind.STATE

    def _commit(self, capture: _Capture) -> None:
        runner, tier = self._runner, self._tier
        layouts = {
            name: runner.call(runner.commit.layout(tier, name)).result(DEADLINE_S) for name in capture.layouts
        }
        captured = capture.captured(layouts)
        stage = CaptureStage()
        handle = SaveHandle(capture.link.step, [tier.name])
        digest: concurrent.futures.Future[object] = concurrent.futures.Future()
        digest.set_result(capture.digest)
        runner.submit(
            StepJob(
                link=capture.link,
                handle=handle,
                kind=capture.kind,
                previous=capture.previous,
                chunks=lambda: stage.chunks(captured),
                header=lambda: dict(capture.header),
                layouts=tuple(layouts.values()),
                release=lambda: None,
                digest=digest,
                environment=capture.environment,
            )
        )
        handle.until(timeout_s=DEADLINE_S)


class _Nobody:
    """Hears what the runner tells; every outcome is in the handle, too."""

    def committed(self, series: Series, link: Link, tier: Tier, size_bytes: int) -> None:
        return None

    def failed(self, series: Series, link: Link, tier: Tier | None, error: BaseException) -> None:
        return None

    def encoded(self, link: Link, size_bytes: int) -> None:
        return None

    def unprotected(self, step: int) -> None:
        return None

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        return False

    def back(self, tier: Tier, reason: str) -> None:
        return None

    def refused(self, tier: Tier, error: BaseException) -> None:
        return None

    def not_removed(self, tier: Tier, error: BaseException) -> None:
        return None


def _tree(header: Mapping[str, object]) -> dict[str, JsonValue]:
    tree: dict[str, JsonValue] = typed(header["tree"], dict)
    return tree
