"""Reading a whole tier and naming every object that is damaged, cut short or missing.

Everything that is committed is read to the last byte. A save without its evidence (commit record,
or manifest where no records are kept) is what a crash leaves, is never restored, and is swept by
the next start; so it is a fault only where it cannot come from a crash: when the run ended orderly,
or when the save lies between others that are committed.

Nothing is written. A run that goes on meanwhile may commit and reclaim saves: what has gone with
its evidence, or has come since, is no fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from stepwell.errors import IntegrityError, StepwellError, StoreError
from stepwell.pipeline.keys import (
    RUN_RECORD,
    Area,
    ParsedKey,
    Series,
    commit_key,
    incarnation_key,
    layout_key,
    manifest_key,
    parse_key,
    references_key,
)
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.manifest import CommitRecord, Manifest, ObjectEntry
from stepwell.pipeline.pack import PackIdentity, PackKind, PackReader
from stepwell.pipeline.pack_reader import off_loop
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.zarr_base import BaseReader, GroupPlan, read_base
from stepwell.pipeline.zarr_pack_reader import PackedReader
from stepwell.stores.base import ObjectStore

__all__ = ["Fault", "Progress", "verify_tier"]

Progress = Callable[[int, int | None], None]
"""Told how many objects are done, and of how many."""

Save = tuple[Series, Link]


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One object that is not as it was written: its key, and what is wrong with it."""

    key: str
    what: str


@dataclass(slots=True)
class _Found:
    """What lies below the prefix of one save."""

    commit: bool = False
    manifests: set[int] = field(default_factory=set)
    packs: set[int] = field(default_factory=set)


async def verify_tier(store: ObjectStore, *, progress: Progress | None = None) -> list[Fault]:
    """Check every object of a run in one store.

    Parameters
    ----------
    store : ObjectStore
        May be read-only.
    progress : callable, optional
        ``progress(done, total)``, in objects.

    Returns
    -------
    list of Fault
        Sorted by key; empty where all is whole.
    """
    return await _Verification(store, progress).run()


class _Verification:
    def __init__(self, store: ObjectStore, progress: Progress | None) -> None:
        self._store = store
        self._progress = progress
        self._records = store.properties.needs_commit_record
        self._saves: dict[Save, _Found] = {}
        self._incarnations: dict[str, IncarnationRecord | None] = {}
        self._layouts: dict[str, Layout | None] = {}
        self._manifests: dict[Save, Manifest] = {}
        self._run: str | None = None
        self._done = 0
        self._total = 0
        # Fault, and what must still be so for it to count: this save committed, this key absent.
        self._findings: list[tuple[Fault, Save | None, str | None]] = []

    async def run(self) -> list[Fault]:
        keys = await self._list()
        if not keys:
            return []
        self._total = len(keys)
        await self._check_run()
        for name in self._incarnations:
            await self._check_incarnation(name)
        for layout_hash in list(self._layouts):
            await self._check_layout(layout_hash)
        for save in sorted(self._saves):
            if self._committed(save):
                await self._check_save(save)
        self._check_evidence()
        self._check_links()
        return await self._confirmed()

    async def _list(self) -> list[ParsedKey]:
        keys = []
        async for key in self._store.list():
            place = parse_key(key)
            if place is None:
                continue
            keys.append(place)
            if place.area is Area.INCARNATION:
                self._incarnations[place.incarnation] = None
            elif place.area is Area.LAYOUT:
                self._layouts[place.rest] = None
            elif place.series is not None:
                self._note_place(place)
        return keys

    def _note_place(self, place: ParsedKey) -> None:
        assert place.series is not None
        found = self._saves.setdefault((place.series, Link(place.incarnation, place.step)), _Found())
        self._incarnations.setdefault(place.incarnation, None)
        if place.area is Area.COMMIT:
            found.commit = True
        elif place.area is Area.MANIFEST:
            found.manifests.add(place.rank)
        elif place.area is Area.PACK:
            found.packs.add(place.rank)

    def _committed(self, save: Save) -> bool:
        found = self._saves.get(save)
        return found is not None and (found.commit if self._records else bool(found.manifests))

    # -- records ------------------------------------------------------------------------------

    async def _check_run(self) -> None:
        async def check() -> None:
            record = RunRecord.decode(await self._store.fetch(RUN_RECORD), RUN_RECORD)
            self._run = record.run

        await self._guard(RUN_RECORD, None, check)

    async def _check_incarnation(self, name: str) -> None:
        key = incarnation_key(name)

        async def check() -> None:
            record = IncarnationRecord.decode(await self._store.fetch(key), key)
            self._same_run(record.run, key)
            if record.incarnation != name:
                raise IntegrityError(f"holds the record of incarnation {record.incarnation}")
            self._incarnations[name] = record

        await self._guard(key, None, check)

    async def _check_layout(self, layout_hash: str) -> None:
        key = layout_key(layout_hash)

        async def check() -> None:
            data = bytes(await self._store.fetch(key))
            # Parsing is about a hundred times slower than the hashing `off_loop` reckons with.
            self._layouts[layout_hash] = await off_loop(
                100 * len(data), partial(Layout.decode, data, layout_hash)
            )

        await self._guard(key, None, check)

    # -- saves --------------------------------------------------------------------------------

    async def _check_save(self, save: Save) -> None:
        series, link = save
        found = self._saves[save]
        entries: dict[str, ObjectEntry | None] = {
            manifest_key(series, link.incarnation, link.step, rank): None for rank in sorted(found.manifests)
        }
        if self._records:
            key = commit_key(series, link.incarnation, link.step)
            record: list[CommitRecord] = []

            async def check_commit() -> None:
                record.append(CommitRecord.decode(await self._store.fetch(key), key))
                self._same_run(record[0].run, key)

            await self._guard(key, save, check_commit)
            if record:
                entries = {entry.key: entry for entry in record[0].manifests}
        for manifest_name, entry in entries.items():
            await self._check_manifest(save, manifest_name, entry)

    async def _check_manifest(self, save: Save, key: str, entry: ObjectEntry | None) -> None:
        manifests: list[Manifest] = []

        async def check() -> None:
            data = await self._store.fetch(key)
            if entry is not None:
                entry.check(data)
            manifest = Manifest.decode(data, key)
            self._same_run(manifest.run, key)
            manifests.append(manifest)

        await self._guard(key, save, check)
        if not manifests:
            return
        manifest = manifests[0]
        self._manifests.setdefault(save, manifest)
        for layout_hash in manifest.layouts:
            if layout_hash not in self._layouts:
                self._layouts[layout_hash] = None
                await self._check_layout(layout_hash)
        for item in manifest.objects:
            place = parse_key(item.key)
            if place is not None and place.area is Area.PACK:
                await self._guard(item.key, save, partial(self._check_pack, save, manifest, item))
            elif place is not None and place.area is Area.DATA:
                await self._guard(item.key, save, partial(self._check_size, item))
            else:
                await self._guard(item.key, save, partial(self._check_object, item))
        await self._check_group(save, manifest)

    async def _check_pack(self, save: Save, manifest: Manifest, entry: ObjectEntry) -> None:
        await self._check_size(entry)
        reader = PackReader(partial(self._store.fetch, entry.key), entry.size_bytes, entry.key)
        await reader.open()
        identity = PackIdentity(
            PackKind(manifest.kind),
            manifest.run,
            manifest.incarnation,
            manifest.step,
            manifest.rank,
            manifest.world,
        )
        if reader.xxh3 != entry.xxh3 or reader.identity != identity:
            raise IntegrityError("is not the pack its manifest names")
        async for fault in reader.verify_all():
            self._note(entry.key, fault, save)

    async def _check_object(self, entry: ObjectEntry) -> None:
        await self._check_size(entry)
        view = await self._store.fetch(entry.key, 0, entry.size_bytes)
        await off_loop(view.nbytes, partial(entry.check, view))

    async def _check_size(self, entry: ObjectEntry) -> None:
        size_bytes = await self._store.getsize(entry.key)
        if size_bytes != entry.size_bytes:
            raise IntegrityError(f"{size_bytes} bytes where {entry.size_bytes} were written")

    async def _check_group(self, save: Save, manifest: Manifest) -> None:
        """A base as a group must name all that its layout needs; the data of a packed one is read here."""
        place = parse_key(manifest.objects[0].key) if manifest.objects else None
        layout = self._layouts.get(manifest.layouts[0]) if manifest.layouts else None
        if manifest.kind != "base" or layout is None or place is None or place.area is Area.PACK:
            return
        faulty = {fault.key for fault, _, _ in self._findings}
        prefix, _, _ = manifest.key.rpartition("/")
        index = references_key(manifest.incarnation, manifest.step, manifest.rank)
        if f"{prefix}/state/zarr.json" in faulty or index in faulty:
            return
        plan = await off_loop(100 * len(layout.encoded), partial(GroupPlan, layout))
        readers: list[BaseReader | PackedReader] = []

        async def check() -> None:
            readers.append(await read_base(self._store, manifest, plan))

        await self._guard(manifest.key, save, check, counts=False)
        for reader in readers:
            if isinstance(reader, PackedReader):
                for entry in manifest.objects:
                    if entry.key not in faulty:
                        await self._guard(
                            entry.key, save, partial(self._check_data, save, reader, entry), counts=False
                        )

    async def _check_data(self, save: Save, reader: PackedReader, entry: ObjectEntry) -> None:
        async for fault in reader.faults(entry):
            self._note(entry.key, fault, save)

    # -- what is not there --------------------------------------------------------------------

    def _check_evidence(self) -> None:
        """Saves that have objects but no evidence; see the module for when that is a fault."""
        committed = [save for save in self._saves if self._committed(save)]
        floor = self._floor
        newest: dict[tuple[Series, str], Link] = {}
        for series, link in sorted(committed):
            newest[series, link.incarnation] = link
        for save, found in self._saves.items():
            series, link = save
            if self._committed(save):
                continue
            last = newest.get((series, link.incarnation))
            between = floor is not None and last is not None and floor < link < last
            if self._ended is None and not between:
                continue
            key = self._evidence_key(save)
            if self._records and not found.manifests:
                key = manifest_key(series, link.incarnation, link.step, 0)
            self._note(key, "is missing, though other objects of this save are there", absent=key)

    def _check_links(self) -> None:
        """Saves that others build on, and the save an orderly end was at, must be there."""
        floor = self._floor
        wanted: dict[Link, str] = {}
        if self._ended is not None:
            wanted[self._ended] = f"the run ended with step {self._ended.step} committed here"
        for (series, link), manifest in self._manifests.items():
            previous = manifest.previous
            if (
                series is Series.STEP
                and not manifest.self_contained
                and previous is not None
                # A life that began from another tier may build on what was never here.
                and previous.incarnation == link.incarnation
                and floor is not None
                and previous > floor
            ):
                wanted.setdefault(previous, f"step {link.step} builds on it")
        for link, why in wanted.items():
            if not any(self._committed((series, link)) for series in Series):
                key = self._evidence_key((Series.STEP, link))
                self._note(key, f"is missing: {why}", absent=key)

    @property
    def _floor(self) -> Link | None:
        """Oldest committed base: what is older may be half-way reclaimed."""
        bases = (save[1] for save in self._saves if save[0] is Series.BASE and self._committed(save))
        return min(bases, default=None)

    @property
    def _ended(self) -> Link | None:
        """Newest save that the newest life committed before its orderly end."""
        record = self._incarnations.get(max(self._incarnations, default=""))
        return record.ended if record is not None else None

    def _evidence_key(self, save: Save) -> str:
        series, link = save
        if self._records:
            return commit_key(series, link.incarnation, link.step)
        return manifest_key(series, link.incarnation, link.step, 0)

    # -- findings -----------------------------------------------------------------------------

    async def _guard(
        self, key: str, save: Save | None, check: Callable[[], Awaitable[None]], *, counts: bool = True
    ) -> None:
        """Run one check and note what it raises as a fault of `key`."""
        try:
            await check()
        except (IntegrityError, StoreError) as error:
            self._note(key, str(error), save)
        if counts:
            self._done += 1
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)

    def _note(self, key: str, what: str, save: Save | None = None, *, absent: str | None = None) -> None:
        self._findings.append((Fault(key, what.removeprefix(f"{key}: ")), save, absent))

    def _same_run(self, run: str, key: str) -> None:
        if self._run is not None and run != self._run:
            raise IntegrityError(f"{key}: belongs to run {run}, the store to run {self._run}")

    async def _confirmed(self) -> list[Fault]:
        """Drop what a living run has reclaimed or completed since it was listed."""
        there: dict[str, bool] = {}

        async def exists(key: str) -> bool:
            if key not in there:
                try:
                    there[key] = await self._store.exists(key)
                except StepwellError:
                    there[key] = False
            return there[key]

        faults = set()
        for fault, save, absent in self._findings:
            if save is not None and not await exists(self._evidence_key(save)):
                continue
            if absent is not None and await exists(absent):
                continue
            faults.add(fault)
        return sorted(faults)
