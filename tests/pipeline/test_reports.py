"""Faults that people reported of neighbouring projects, tried on the parts of the pipeline alone.

Each test is named for its symptom. ``docs/reports.md`` lists them all, also those that other files hold.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard

from stepwell.codecs.frame import HEADER
from stepwell.errors import IntegrityError, ObjectExistsError
from stepwell.pipeline.base import Chunk, Kind
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.inventory import Inventory, Lineage
from stepwell.pipeline.keys import Series, manifest_key
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.plan import grid_of, plan_layout
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.retention import plan_retention
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.tier import Tier
from stepwell.stores.fault import FaultStore
from stepwell.stores.file import FileStore

INC = "000001-00000000000000ff"
LAYOUT = plan_layout([TensorSpec("model/w", (4,), "float32", Kind.WEIGHT)])


class Here:
    """Runs work at once."""

    async def run(self, work):  # type: ignore[no-untyped-def]
        return work()


# Retention.


@pytest.mark.parametrize("base_every", [1, 2, 3, 11])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_limit_of_one_deleted_every_checkpoint(keep: int, base_every: int) -> None:
    """transformers 25136: whatever was saved, what leads to the latest is there."""
    lineage = Lineage(((INC, None),))
    steps: set[Link] = set()
    bases: set[Link] = set()
    for step in range(1, 11):
        link = Link(INC, step)
        if (step - 1) % base_every == 0:
            bases.add(link)
        steps.add(link)
        for removal in plan_retention(lineage, steps, bases, keep=keep):
            (steps if removal.series is Series.STEP else bases).discard(removal.link)
        # The newest base, and every differential from there to the newest save.
        oldest = max(base.step for base in bases)
        assert {one.step for one in steps} >= set(range(oldest + 1, step + 1))
        assert len(bases) == min(keep, 1 + (step - 1) // base_every)


# Asking for the newest step.


class Counting(FaultStore):
    """Counts what is read."""

    def __init__(self, inner: FileStore) -> None:
        super().__init__(inner)
        self.fetched: list[int] = []

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        view = await super().fetch(key, start, length)
        self.fetched.append(view.nbytes)
        return view


async def test_metadata_of_megabytes_was_read_for_one_yes_or_no(tmp_path: Path) -> None:
    """Paddle 79804: manifests of 50,000 entries say nothing that the newest step needs."""
    store = Counting(FileStore(tmp_path))
    tier, commit = Tier("directory", store), Commit(Replicate())
    await commit.save_run(tier, RunRecord("run-a"))
    await commit.save_incarnation(tier, IncarnationRecord("run-a", INC))
    entry = "00" * 16
    for step, count in enumerate((50_000, 1, 1)):
        prefix = f"{INC}/base/{step:012d}/state/c"
        entries = tuple(ObjectEntry(f"{prefix}/{place}", 10, entry) for place in range(count))
        manifest = Manifest("run-a", INC, step, 0, 1, "base", None, True, entries, (LAYOUT.hash,))
        await commit.save(tier, manifest)
    store.fetched.clear()
    assert await store.getsize(manifest_key(Series.BASE, INC, 0, 0)) > 3 << 20
    inventory = await Inventory.read([tier])
    assert inventory.newest() == Link(INC, 2)
    assert len(store.fetched) == 1, "the record of the incarnation"
    assert sum(store.fetched) < 1000


async def test_second_put_if_absent_lost_the_first(tmp_path: Path) -> None:
    """zarr-python 3682: of two lives with one name the second never gets to write a step."""
    tier, commit = Tier("directory", FileStore(tmp_path)), Commit(Replicate())
    await commit.save_incarnation(tier, IncarnationRecord("run-a", INC, created_unix_s=1.0))
    with pytest.raises(ObjectExistsError):
        await commit.save_incarnation(tier, IncarnationRecord("run-a", INC, created_unix_s=2.0))


def test_partial_writes_to_one_shard_were_possible() -> None:
    """zarr-python 3682: no element is in two chunks, and a chunk of the plan is whole objects."""
    specs = [TensorSpec(f"model/{n}", (n, 33), "float32", Kind.WEIGHT) for n in (0, 1, 7, 500)]
    layout = plan_layout(specs, chunk_bytes=4096)
    pieces = [piece for chunk in layout.chunks for piece in chunk.pieces]
    spans = sorted((piece.tensor, piece.start, piece.stop) for piece in pieces)
    for (tensor, _, stop), (other, start, _) in pairwise(spans):
        assert tensor != other or stop == start
    for tensor, start, stop in spans:
        per_object = int(np.prod(grid_of(specs[tensor], layout)))
        assert start % per_object == 0
        assert stop - start <= per_object


# Memory.


@pytest.fixture
def no_memory_to_waste() -> Iterator[None]:
    """Let this process have 256 MB of addresses more than it has, at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("claimed_bytes", [1000, 1 << 30, 1 << 40])
async def test_frame_of_a_few_bytes_asked_for_a_huge_allocation(
    no_memory_to_waste: None, claimed_bytes: int
) -> None:
    """python-zstandard 332: what expands past the size the index has is stopped at that size."""
    plane = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    honest = await Shard().save(raw_chunk(bytes(4000)), Here())  # type: ignore[arg-type]
    header = bytearray(bytes(honest.buffer)[:-1])
    frames = [
        bytes(header),
        plane[:13],
        plane,
        rewritten(bytes(honest.buffer), claimed_bytes),
        rewritten(bytes(honest.buffer), claimed_bytes) + plane,
    ]
    for frame in frames:
        chunk = Chunk(
            1, "state/0", Kind.WEIGHT, -1, 0, LAYOUT.hash, "float32", 4000,
            np.frombuffer(frame, np.uint8), honest.encodings,
        )  # fmt: skip
        with pytest.raises(IntegrityError):
            await recover_chunk(chunk, [Shard()], Here())  # type: ignore[arg-type]


def raw_chunk(data: bytes) -> Chunk:
    buffer = np.frombuffer(data, np.uint8)
    return Chunk(1, "state/0", Kind.WEIGHT, -1, 0, LAYOUT.hash, "float32", len(data), buffer)


def rewritten(frame: bytes, length: int) -> bytes:
    """Let the header of a frame claim another raw length."""
    fields = list(HEADER.unpack_from(frame))
    fields[-1] = length
    return HEADER.pack(*fields) + frame[HEADER.size :]
