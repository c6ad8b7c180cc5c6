"""The ``commit`` stage: evidence that a save is whole, written last; and what that evidence says.

Order within one tier: layouts, objects, manifest, and where the tier has commit records the record,
created only if absent. A crash between any two leaves a save that is not committed and is never read.
"""

from __future__ import annotations

from stepwell.errors import (
    FormatError,
    IntegrityError,
    MissingObjectError,
    NotCommittedError,
    ObjectExistsError,
)
from stepwell.pipeline.keys import RUN_RECORD, Series, commit_key, layout_key, manifest_key
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.manifest import CommitRecord, Manifest, ObjectEntry
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.tier import Tier

__all__ = ["Commit"]


class Commit:
    """Writes and reads manifests, commit records and the records of runs and incarnations."""

    name = "commit"

    def __init__(self, replicate: Replicate) -> None:
        self.replicate = replicate
        self._layouts: dict[str, tuple[object, set[str]]] = {}  # by tier: its store's life, and what it has

    async def save_layout(self, tier: Tier, layout: Layout) -> None:
        """Bring a layout into a tier, once: it is named by its content."""
        life = tier.store.life
        known_in, known = self._layouts.get(tier.name, (life, set()))
        if known_in != life:
            known = set()
        self._layouts[tier.name] = life, known
        if layout.hash in known:
            return
        await self.replicate.attempt(tier, lambda: tier.store.put(layout_key(layout.hash), (layout.encoded,)))
        if tier.store.life == life:
            known.add(layout.hash)

    def forget_layouts(self, tier: Tier) -> None:
        """A tier may lack what was written there before."""
        self._layouts.pop(tier.name, None)

    async def save(self, tier: Tier, manifest: Manifest) -> None:
        """Commit one save of one rank (world 1): the manifest, then the record where there is one.

        Raises
        ------
        ObjectExistsError
            Another process has committed this very save.
        """
        encoded = manifest.encode()
        await self.replicate.save(tier, manifest.key, (encoded,))
        if not tier.has_commit_records:
            return
        record = CommitRecord(
            manifest.run,
            manifest.incarnation,
            manifest.series,
            manifest.step,
            manifest.world,
            (ObjectEntry.of(manifest.key, encoded),),
        )
        await self._create_once(tier, record.key, record.encode())

    async def recover(self, tier: Tier, series: Series, link: Link, rank: int = 0) -> Manifest:
        """Read the manifest of a committed save, checked against the commit record.

        Raises
        ------
        NotCommittedError
            The evidence is not there.
        IntegrityError
            It is damaged.
        """
        key = manifest_key(series, link.incarnation, link.step, rank)
        entry = None
        if tier.has_commit_records:
            where = commit_key(series, link.incarnation, link.step)
            try:
                record = CommitRecord.decode(await tier.store.fetch(where), where)
            except MissingObjectError as error:
                raise NotCommittedError(
                    f"step {link.step} of {link.incarnation} is not committed in tier {tier.name}: "
                    f"there is no {where}"
                ) from error
            if rank >= len(record.manifests):
                raise IntegrityError(f"{tier.name}: {where}: has {record.world} ranks, rank {rank} is needed")
            entry = record.manifests[rank]
        try:
            data = await tier.store.fetch(key)
        except MissingObjectError as error:
            if entry is None:
                raise NotCommittedError(
                    f"step {link.step} of {link.incarnation} is not committed in tier {tier.name}: no {key}"
                ) from error
            raise IntegrityError(f"{tier.name}: {key} is committed but missing") from error
        if entry is not None:
            entry.check(data)
        return Manifest.decode(data, key)

    async def layout(self, tier: Tier, layout_hash: str) -> Layout:
        """Read a layout.

        Raises
        ------
        MissingObjectError, IntegrityError
            It is not there, or not whole.
        """
        return Layout.decode(bytes(await tier.store.fetch(layout_key(layout_hash))), layout_hash)

    async def save_run(self, tier: Tier, record: RunRecord) -> None:
        """Mark a tier as one of this run; an equal mark is kept, a damaged one replaced.

        Raises
        ------
        ObjectExistsError
            The tier belongs to another run.
        """
        try:
            await self.replicate.attempt(tier, lambda: tier.store.create(RUN_RECORD, (record.encode(),)))
        except ObjectExistsError:
            try:
                there = RunRecord.decode(await tier.store.fetch(RUN_RECORD), f"{tier.name}: {RUN_RECORD}")
            except IntegrityError as error:
                if isinstance(error, FormatError) and error.newer:
                    raise
                # Whoever opened the run has learned its name from what else is there.
                await self.replicate.save(tier, RUN_RECORD, (record.encode(),))
                return
            _check_same(tier, there, record)

    async def check_run(self, tier: Tier, record: RunRecord) -> None:
        """Refuse a tier that says it is of another run; one without a mark, or a damaged one, may be ours.

        Raises
        ------
        ObjectExistsError
            The tier belongs to another run.
        """
        try:
            data = await self.replicate.attempt(tier, lambda: tier.store.fetch(RUN_RECORD))
            there = RunRecord.decode(data, f"{tier.name}: {RUN_RECORD}")
        except MissingObjectError:
            return
        except IntegrityError as error:
            if isinstance(error, FormatError) and error.newer:
                raise
            return
        _check_same(tier, there, record)

    async def save_incarnation(self, tier: Tier, record: IncarnationRecord) -> None:
        """Begin an incarnation in a tier; of two with one name only the first succeeds."""
        await self._create_once(tier, record.key, record.encode())

    async def end_incarnation(self, tier: Tier, record: IncarnationRecord) -> None:
        """Replace the record of an incarnation by one that says how it ended."""
        await self.replicate.save(tier, record.key, (record.encode(),))

    async def _create_once(self, tier: Tier, key: str, data: bytes) -> None:
        """Create an object; one with the same bytes that is there already (a lost reply) counts."""
        try:
            await self.replicate.attempt(tier, lambda: tier.store.create(key, (data,)))
        except ObjectExistsError:
            if bytes(await tier.store.fetch(key)) != data:
                raise


def _check_same(tier: Tier, there: RunRecord, record: RunRecord) -> None:
    if there.run != record.run:
        raise ObjectExistsError(
            f"tier {tier.name} ({tier.store.url}) belongs to run {there.run}, not {record.run}"
        )
