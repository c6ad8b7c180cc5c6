"""Reading saves back through the tiers: the nearest whole copy of each object wins.

Damage in one tier is remembered and the next tier is asked; only what no tier has whole is an error. A
tier that does not answer, or refuses to be read, is no damage: if nobody else has what is asked for, that is
said, and nothing older is taken in its place.

Over 400 lines: a step and a base are opened by the source they then ask for every chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import numpy as np

from stepwell.errors import (
    DeadlineError,
    FormatError,
    IntegrityError,
    MissingObjectError,
    NotCommittedError,
    StoreError,
)
from stepwell.pipeline.base import Bytes, Chunk
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import Area, Series, parse_key
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.manifest import Manifest
from stepwell.pipeline.pack import PackReader, base_chunk_key
from stepwell.pipeline.records import Link
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.zarr_base import BaseReader, GroupPlan, read_base
from stepwell.pipeline.zarr_pack_reader import PackedReader

__all__ = ["READ_AHEAD", "BaseSource", "SaveSource", "StepSource"]

Result = TypeVar("Result")

# Small tensors share chunks. They are asked for parameter by parameter, which goes through the chunks of
# weights and of each optimizer state side by side: as many as that are kept.
RECENT_CHUNKS = 8

# Reading and checking take turns on different processors. Weights and each optimizer state are read side by
# side, so a few times what is read ahead in each of them.
READ_AHEAD = 2
AHEAD_MAX = 8

DAMAGE = (IntegrityError, MissingObjectError, NotCommittedError)
"""What was asked for is not there, or not whole."""

NO_ANSWER = (DeadlineError, StoreError)
"""Says nothing about what was asked for, unless it is one of `DAMAGE`."""

READ_DEADLINE_S = 120.0
"""Longest wait for one object, or one chunk of at most 64 MiB: 0.5 MB/s."""


class SaveSource:
    """Everything committed in a set of tiers, read with fall-through.

    Parameters
    ----------
    tiers : sequence of Tier
        Nearest first.
    inventory : Inventory
    commit : Commit
    deadline_s : float
        Longest wait for one read; a tier that once took longer is not asked again.

    Attributes
    ----------
    faults : list of str
        What was found damaged or missing on the way, in words.
    broken : set of (Series, Link)
        Saves that are whole in no tier.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        inventory: Inventory,
        commit: Commit,
        deadline_s: float = READ_DEADLINE_S,
    ) -> None:
        self._deadline_s = deadline_s
        self._silent: dict[str, DeadlineError] = {}
        self._left: set[asyncio.Future[object]] = set()
        self.tiers = list(tiers)
        self.inventory = inventory
        self.faults: list[str] = []
        self.broken: set[tuple[Series, Link]] = set()
        self._commit = commit
        self._layouts: dict[str, Layout] = {}
        self._plans: dict[str, GroupPlan] = {}
        self._manifests: dict[tuple[Series, Link, str], Manifest] = {}

    def narrowed(self, tiers: Sequence[Tier], inventory: Inventory) -> SaveSource:
        """Return a source of some of the tiers that knows what this one learned of them."""
        source = SaveSource(tiers, inventory, self._commit, self._deadline_s)
        source._silent, source._layouts, source._manifests = self._silent, self._layouts, self._manifests
        return source

    def holders(self, series: Series, link: Link) -> list[Tier]:
        """Tiers that have committed a save, nearest first."""
        found = self.inventory.steps if series is Series.STEP else self.inventory.bases
        names = found.get(link, set())
        return [tier for tier in self.tiers if tier.name in names]

    async def manifest(self, series: Series, link: Link, tier: Tier) -> Manifest:
        """Read the manifest one tier holds, once."""
        key = (series, link, tier.name)
        if key not in self._manifests:
            self._manifests[key] = await self._commit.recover(tier, series, link)
        return self._manifests[key]

    async def any_manifest(self, series: Series, link: Link) -> Manifest:
        """Read the manifest from the nearest tier that has it whole."""
        _, manifest = await self.first(
            self.holders(series, link),
            lambda tier: self.manifest(series, link, tier),
            f"manifest of {series} {link.step} of {link.incarnation}",
        )
        return manifest

    async def layout(self, layout_hash: str, holders: Sequence[Tier] = ()) -> Layout:
        """Read a layout, once, from the nearest of `holders` that has it whole, or of the other tiers.

        Not within another tier's read: that would answer for the silence of this one.
        """
        if layout_hash not in self._layouts:
            others = [tier for tier in self.tiers if tier not in holders]
            _, self._layouts[layout_hash] = await self.first(
                [*holders, *others],
                lambda tier: self._commit.layout(tier, layout_hash),
                f"layout {layout_hash}",
                may_lack=others,
            )
        return self._layouts[layout_hash]

    async def layouts_of(self, series: Series, link: Link) -> None:
        """Read what layouts a save refers to, so that they are at hand in its reads."""
        for layout_hash in (await self.any_manifest(series, link)).layouts:
            await self.layout(layout_hash, self.holders(series, link))

    def group_plan(self, layout: Layout) -> GroupPlan:
        """Return the names of a base group's objects, worked out once per layout."""
        if layout.hash not in self._plans:
            self._plans[layout.hash] = GroupPlan(layout)
        return self._plans[layout.hash]

    async def step(self, link: Link) -> StepSource:
        """Open a differential."""
        source = StepSource(self, link)
        with self.breaking(Series.STEP, link):
            await source.open()
        return source

    async def base(self, link: Link, *, ahead: int = 0) -> BaseSource:
        """Open a base.

        Parameters
        ----------
        link : Link
        ahead : int
            Chunks that are read before they are asked for, after each that is; for whoever reads all
            of it, and calls ``BaseSource.stop`` at the end.
        """
        source = BaseSource(self, link, ahead)
        with self.breaking(Series.BASE, link):
            await source.open()
        return source

    @contextmanager
    def breaking(self, series: Series, link: Link) -> Iterator[None]:
        """Remember a save as broken when it turns out to be whole in no tier."""
        try:
            yield
        except IntegrityError as error:
            if not (isinstance(error, FormatError) and error.newer):
                self.broken.add((series, link))
            raise

    async def first(
        self,
        tiers: Sequence[Tier],
        read: Callable[[Tier], Awaitable[Result]],
        what: str,
        *,
        may_lack: Collection[Tier] = (),
    ) -> tuple[Tier, Result]:
        """Return the first of `tiers` that `read` succeeds with, and what it gave.

        Parameters
        ----------
        tiers : sequence of Tier
        read : coroutine function
        what : str
            What is read, for messages.
        may_lack : collection of Tier
            It is no fault of these that they do not have it.

        Raises
        ------
        IntegrityError
            None did; every reason is in the message.
        DeadlineError, StoreError
            None did, and one that may have it does not answer, or does not let us read.
        """
        reasons = []
        unanswered: DeadlineError | StoreError | None = None
        for tier in tiers:
            try:
                return tier, await self._commit.replicate.attempt(tier, partial(self._in_time, tier, read))
            except DAMAGE as error:
                if isinstance(error, FormatError) and error.newer:
                    raise  # nothing is damaged: going around it would lose steps
                reasons.append(f"{tier.name}: {error}")
                if not (isinstance(error, MissingObjectError) and tier in may_lack):
                    self.note(f"{tier.name}: {error}")
            except NO_ANSWER as error:
                unanswered = error
                self.note(f"{tier.name}: {error}")
        if unanswered is not None:
            raise unanswered
        raise IntegrityError(f"{what}: cannot be read ({'; '.join(reasons) or 'no tier has it'})")

    async def _in_time(self, tier: Tier, read: Callable[[Tier], Awaitable[Result]]) -> Result:
        """Read from a tier within the deadline, if it did not miss that before."""
        if tier.name in self._silent:
            raise self._silent[tier.name]
        # Not a timeout around it: a read that hangs in a thread does not end when it is cancelled. What
        # it reads into is its own, so it may be left behind.
        task = asyncio.ensure_future(read(tier))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return task.result()
        task.cancel()
        left = cast("asyncio.Future[object]", task)
        self._left.add(left)
        left.add_done_callback(self._leave)
        self._silent[tier.name] = DeadlineError(
            f"tier {tier.name} did not answer a read within {self._deadline_s:g} s; nothing is known to "
            "be damaged there: try again when it does, or leave the tier out"
        )
        raise self._silent[tier.name]

    def _leave(self, task: asyncio.Future[object]) -> None:
        """Forget a read that was left behind and has ended; how does not matter any more."""
        self._left.discard(task)
        if not task.cancelled():
            task.exception()

    def note(self, fault: str) -> None:
        """Remember a fault, once."""
        if fault not in self.faults:
            self.faults.append(fault)

    async def pack(self, series: Series, link: Link, tier: Tier) -> PackReader:
        """Open the pack of one save in one tier and hold it against its manifest."""
        manifest = await self.manifest(series, link, tier)
        if len(manifest.objects) != 1:
            raise IntegrityError(
                f"{tier.name}: {manifest.key}: {len(manifest.objects)} objects where one pack belongs"
            )
        entry = manifest.objects[0]
        size_bytes = await tier.store.getsize(entry.key)
        if size_bytes != entry.size_bytes:
            raise IntegrityError(
                f"{tier.name}: {entry.key}: {size_bytes} bytes where {entry.size_bytes} were written"
            )
        reader = PackReader(partial(tier.store.fetch, entry.key), size_bytes, f"{tier.name}: {entry.key}")
        await reader.open()
        if reader.xxh3 != entry.xxh3:
            raise IntegrityError(f"{tier.name}: {entry.key}: is not the pack its manifest names")
        return reader


class StepSource:
    """One differential, chunk by chunk, from the nearest tier that has each chunk whole."""

    def __init__(self, source: SaveSource, link: Link) -> None:
        self.link = link
        self.manifest: Manifest
        self.header: Mapping[str, object] = {}
        self.tier = ""
        self._source = source
        self._packs: dict[str, PackReader] = {}

    async def open(self) -> None:
        """Read manifest, layouts, header and index."""
        source = self._source
        await source.layouts_of(Series.STEP, self.link)
        tier, pack = await source.first(
            source.holders(Series.STEP, self.link),
            self._pack,
            f"step {self.link.step} of {self.link.incarnation}",
        )
        self.manifest = await source.manifest(Series.STEP, self.link, tier)
        self.header, self.tier = pack.header, tier.name
        self.keys = tuple(pack.rows)
        self.rows = pack.rows

    async def chunk(self, key: str) -> Chunk:
        """Fetch one chunk, verified, still encoded."""
        with self._source.breaking(Series.STEP, self.link):
            _, chunk = await self._source.first(
                self._source.holders(Series.STEP, self.link),
                lambda tier: self._chunk(tier, key),
                f"chunk {key} of step {self.link.step}",
            )
        return chunk

    async def _pack(self, tier: Tier) -> PackReader:
        if tier.name not in self._packs:
            self._packs[tier.name] = await self._source.pack(Series.STEP, self.link, tier)
        return self._packs[tier.name]

    async def _chunk(self, tier: Tier, key: str) -> Chunk:
        pack = await self._pack(tier)
        row = pack.rows.get(key)
        layout = None if row is None else await self._source.layout(row.layout)
        return await pack.chunk(key, layout)


class BaseSource:
    """One base in terms of its layout, from the nearest tier that has each chunk whole."""

    def __init__(self, source: SaveSource, link: Link, ahead: int = 0) -> None:
        self.link = link
        self.manifest: Manifest
        self.layout: Layout
        self.header: Mapping[str, object] = {}
        self.tier = ""
        self._source = source
        self._packs: dict[str, PackReader] = {}
        self._groups: dict[str, BaseReader | PackedReader] = {}
        self._recent: dict[int, Bytes] = {}
        self._parts_of: list[list[int]] = []
        self._ahead_count = ahead
        self._ahead: dict[int, asyncio.Task[Bytes]] = {}
        self._asked: set[int] = set()

    async def open(self) -> None:
        """Read manifest, layout and header."""
        source = self._source
        await source.layouts_of(Series.BASE, self.link)
        tier, header = await source.first(
            source.holders(Series.BASE, self.link),
            self._header,
            f"base {self.link.step} of {self.link.incarnation}",
        )
        self.manifest = await source.manifest(Series.BASE, self.link, tier)
        self.header, self.tier = header, tier.name
        self._parts_of = [[] for _ in self.layout.tensors]
        for part, chunk in enumerate(self.layout.chunks):
            for piece in chunk.pieces:
                self._parts_of[piece.tensor].append(part)

    async def chunk(self, part: int) -> Bytes:
        """Return the bytes of one layout chunk, (size_bytes,), uint8, verified; may alias the tier."""
        task = self._ahead.pop(part, None)
        self._asked.add(part)
        for later in range(part + 1, min(part + 1 + self._ahead_count, len(self.layout.chunks))):
            if later not in self._asked and later not in self._ahead and len(self._ahead) < AHEAD_MAX:
                self._ahead[later] = asyncio.create_task(self._read(later))
        return await (self._read(part) if task is None else task)

    async def stop(self) -> None:
        """Read no further; what was read ahead is forgotten, and how that went."""
        tasks = list(self._ahead.values())
        self._ahead.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, part: int) -> Bytes:
        with self._source.breaking(Series.BASE, self.link):
            _, data = await self._source.first(
                self._source.holders(Series.BASE, self.link),
                lambda tier: self._chunk(tier, part),
                f"chunk {part} of base {self.link.step}",
            )
        return data

    async def tensor(self, index: int) -> Bytes:
        """Return the bytes of one tensor of the layout, (size_bytes,), uint8, verified.

        They alias the tier where it has bases in memory, else they are fresh.
        """
        at_hand = self.tensor_at_hand(index)
        if at_hand is not None:
            return at_hand
        tensor_bytes = self.layout.tensors[index].size_bytes
        whole: Bytes | None = None
        start = self.layout.tensor_offsets[index]
        for part in self._parts_of[index]:
            chunk = self.layout.chunks[part]
            if part not in self._recent:
                if len(self._recent) >= RECENT_CHUNKS:
                    self._recent.pop(next(iter(self._recent)))
                self._recent[part] = await self.chunk(part)
            data = self._recent[part]
            low, high = (
                max(start, chunk.offset_bytes),
                min(start + tensor_bytes, chunk.offset_bytes + chunk.size_bytes),
            )
            cut = data[low - chunk.offset_bytes : high - chunk.offset_bytes]
            if high - low == tensor_bytes:
                return cut
            if whole is None:
                whole = np.empty(tensor_bytes, np.uint8)
            whole[low - start : high - start] = cut
        return np.empty(0, np.uint8) if whole is None else whole

    def tensor_at_hand(self, index: int) -> Bytes | None:
        """Return a tensor whose one chunk was fetched a moment ago, else None; touches no store.

        Thousands of small tensors share a chunk. A reader in another thread takes them from here
        instead of going through the event loop for each.
        """
        parts = self._parts_of[index]
        data = self._recent.get(parts[0]) if len(parts) == 1 else None
        if data is None:
            return None
        low = self.layout.tensor_offsets[index] - self.layout.chunks[parts[0]].offset_bytes
        return data[low : low + self.layout.tensors[index].size_bytes]

    async def _header(self, tier: Tier) -> Mapping[str, object]:
        manifest = await self._source.manifest(Series.BASE, self.link, tier)
        if len(manifest.layouts) != 1:
            raise IntegrityError(
                f"{tier.name}: {manifest.key}: {len(manifest.layouts)} layouts where one belongs"
            )
        self.layout = await self._source.layout(manifest.layouts[0])
        if not _is_pack(manifest):
            return (await self._group(tier)).header
        return (await self._pack(tier)).header

    async def _pack(self, tier: Tier) -> PackReader:
        if tier.name not in self._packs:
            self._packs[tier.name] = await self._source.pack(Series.BASE, self.link, tier)
        return self._packs[tier.name]

    async def _group(self, tier: Tier) -> BaseReader | PackedReader:
        if tier.name not in self._groups:
            manifest = await self._source.manifest(Series.BASE, self.link, tier)
            plan = self._source.group_plan(self.layout)
            self._groups[tier.name] = await read_base(tier.store, manifest, plan)
        return self._groups[tier.name]

    async def _chunk(self, tier: Tier, part: int) -> Bytes:
        if not _is_pack(await self._source.manifest(Series.BASE, self.link, tier)):
            return await (await self._group(tier)).read_chunk(part)
        chunk = await (await self._pack(tier)).chunk(base_chunk_key(part), self.layout)
        if chunk.encodings:
            raise IntegrityError(f"{tier.name}: chunk {part} of base {self.link.step} is encoded")
        return chunk.buffer


def _is_pack(manifest: Manifest) -> bool:
    """Whether a base is one pack, as in memory, not a zarr group of either form."""
    place = parse_key(manifest.objects[0].key) if manifest.objects else None
    return place is None or place.area is Area.PACK
