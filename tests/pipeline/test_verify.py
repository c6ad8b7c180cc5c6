from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import IntegrityError, MissingObjectError
from stepwell.pipeline.base import Chunk, Kind
from stepwell.pipeline.keys import RUN_RECORD, Series, commit_key, layout_key, manifest_key, pack_key
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.manifest import (
    CommitRecord,
    IncarnationRecord,
    Link,
    Manifest,
    ObjectEntry,
    RunRecord,
)
from stepwell.pipeline.pack import (
    HEADER_BYTES,
    PackIdentity,
    PackKind,
    finish_region,
    pack_parts,
    region_size,
)
from stepwell.pipeline.plan import gradient_layout, plan_layout
from stepwell.pipeline.verify import Fault, verify_tier
from stepwell.pipeline.zarr_base import GroupPlan, export_base
from stepwell.pipeline.zarr_pack import PackedPlan, export_packed
from stepwell.stores.arena import Arena
from stepwell.stores.base import Failure, StoreProperties
from stepwell.stores.file import FileStore
from stepwell.stores.memory import MemoryStore

INC = "000001-00000000000000ff"
SPECS = [
    TensorSpec("model/w", (6, 64), "float32", Kind.WEIGHT, "optim:0"),
    TensorSpec("model/b", (3,), "bfloat16", Kind.WEIGHT, "optim:0"),
]
LAYOUT = plan_layout(SPECS, chunk_bytes=1024)
GRADIENTS = gradient_layout(SPECS, chunk_bytes=1024)


class Objects:
    """Objects in a dict, with just what verifying needs of a store."""

    def __init__(self, items: dict[str, bytes], *, records: bool) -> None:
        self.items = items
        self.properties = StoreProperties(Failure.NODE, True, True, records)

    async def list(self) -> AsyncIterator[str]:
        for key in [*self.items, "lost+found/x"]:
            yield key

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        data = memoryview(await self._get(key))[start:]
        if length is not None and len(data) < length:
            raise IntegrityError(f"{key}: cut short")
        return data[:length]

    async def getsize(self, key: str) -> int:
        return len(await self._get(key))

    async def exists(self, key: str) -> bool:
        return key in self.items

    async def _get(self, key: str) -> bytes:
        if key not in self.items:
            raise MissingObjectError(f"there is no {key}")
        return self.items[key]


class Run:
    """A small run written the way the pipeline does: bases 0 and 3, differentials 1 to 5."""

    def __init__(self, *, records: bool, ended: bool = True, data_bytes_max: int | None = None) -> None:
        self.records = records
        self.data_bytes_max = data_bytes_max
        self.items: dict[str, bytes] = {RUN_RECORD: RunRecord("run-a").encode()}
        for layout in (LAYOUT, GRADIENTS):
            self.items[layout_key(layout.hash)] = layout.encoded
        for step in range(6):
            if step in (0, 3):
                self.add_base(step)
            if step:
                self.add_step(step)
        record = IncarnationRecord("run-a", INC, ended=Link(INC, 5) if ended else None)
        self.items[record.key] = record.encode()

    def add_base(self, step: int) -> None:
        identity = PackIdentity(PackKind.BASE, "run-a", INC, step)
        data = np.random.default_rng(step).integers(0, 256, LAYOUT.size_bytes, np.uint8)
        if self.records:
            entries = []
            group = GroupPlan(LAYOUT)
            written = (
                export_base(group, identity, {}, data.data)
                if self.data_bytes_max is None
                else export_packed(PackedPlan(group, 0, self.data_bytes_max), identity, {}, data.data)
            )
            for (key, parts), entry in written:
                self.items[key] = b"".join(bytes(part) for part in parts)
                entries.append(entry)
        else:
            region = bytearray(region_size(identity, {}, LAYOUT))
            region[HEADER_BYTES : HEADER_BYTES + data.size] = data.tobytes()
            packed = finish_region(memoryview(region), identity, {}, LAYOUT)
            key = pack_key(Series.BASE, INC, step, 0)
            self.items[key] = bytes(region[: packed.size_bytes])
            entries = [ObjectEntry(key, packed.size_bytes, packed.xxh3)]
        manifest = Manifest("run-a", INC, step, 0, 1, "base", None, True, tuple(entries), (LAYOUT.hash,))
        self.commit(manifest)

    def add_step(self, step: int) -> None:
        identity = PackIdentity(PackKind.GRADIENT, "run-a", INC, step)
        rng = np.random.default_rng(step)
        chunks = [
            Chunk(
                step,
                f"update/0/{part}",
                Kind.GRADIENT,
                0,
                part,
                GRADIENTS.hash,
                chunk.dtype,
                chunk.size_bytes,
                rng.integers(0, 256, chunk.size_bytes, np.uint8),
            )
            for part, chunk in enumerate(GRADIENTS.chunks)
        ]
        packed = pack_parts(identity, {"updates": []}, chunks)
        key = pack_key(Series.STEP, INC, step, 0)
        self.items[key] = b"".join(bytes(part) for part in packed.parts)
        entry = ObjectEntry(key, packed.size_bytes, packed.xxh3)
        self.commit(
            Manifest(
                "run-a",
                INC,
                step,
                0,
                1,
                "gradient",
                Link(INC, step - 1),
                False,
                (entry,),
                (GRADIENTS.hash,),
            )
        )

    def commit(self, manifest: Manifest) -> None:
        self.items[manifest.key] = manifest.encode()
        if self.records:
            entry = ObjectEntry.of(manifest.key, manifest.encode())
            record = CommitRecord("run-a", INC, manifest.series, manifest.step, 1, (entry,))
            self.items[record.key] = record.encode()

    async def faults(self, **changed: bytes | None) -> list[Fault]:
        items = {key: data for key, data in (self.items | changed).items() if data is not None}
        return await verify_tier(Objects(items, records=self.records))  # type: ignore[arg-type]


RUNS: dict[str, dict[str, Any]] = {
    "records": {"records": True},
    "packed": {"records": True, "data_bytes_max": 1 << 20},
    "packed-cut": {"records": True, "data_bytes_max": 1100},
    "manifests": {"records": False},
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(**RUNS[request.param])


async def test_a_whole_run_has_no_fault(run: Run) -> None:
    assert await run.faults() == []
    assert await verify_tier(Objects({}, records=True)) == []  # type: ignore[arg-type]


async def test_a_flip_in_any_byte_of_any_object_is_found_and_named(run: Run) -> None:
    for number, (key, data) in enumerate(run.items.items()):
        # Every object; of its bytes a different sample in each, first and last always.
        positions = {0, len(data) - 1, *range(number % 61, len(data), 61)}
        for position in positions:
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            faults = await run.faults(**{key: bytes(damaged)})
            assert key in {fault.key for fault in faults}, f"{key}, byte {position}"


async def test_a_flip_in_every_single_byte_of_packed_data_is_blamed_on_it_alone() -> None:
    run = Run(**RUNS["packed-cut"])
    (first, second) = (key for key in run.items if f"/base/{3:012d}/" in key and ".data-" in key)
    for key in (first, second):
        data = run.items[key]
        for position in range(0, len(data), 3):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            faults = await run.faults(**{key: bytes(damaged)})
            assert {fault.key for fault in faults} == {key}, position


async def test_damage_in_two_chunks_of_packed_data_is_told_twice() -> None:
    run = Run(**RUNS["packed"])
    (key,) = (key for key in run.items if f"/base/{3:012d}/" in key and ".data-" in key)
    damaged = bytearray(run.items[key])
    damaged[0] ^= 1
    damaged[-1] ^= 1
    faults = await run.faults(**{key: bytes(damaged)})
    assert [fault.key for fault in faults] == [key, key]


async def test_a_flip_is_blamed_on_its_object_alone(run: Run) -> None:
    # That every single byte is covered is shown for packs and documents by their own tests.
    for key in (pack_key(Series.STEP, INC, 4, 0), manifest_key(Series.BASE, INC, 3, 0)):
        data = run.items[key]
        for position in range(0, len(data), 41):
            damaged = bytearray(data)
            damaged[position] ^= 1
            assert {fault.key for fault in await run.faults(**{key: bytes(damaged)})} == {key}, position


async def test_a_deleted_object_is_found_and_named(run: Run) -> None:
    for key in run.items:
        faults = await run.faults(**{key: None})
        assert key in {fault.key for fault in faults}, key


async def test_a_truncated_or_lengthened_object_is_found_and_named(run: Run) -> None:
    for key, data in run.items.items():
        for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            faults = await run.faults(**{key: changed})
            assert key in {fault.key for fault in faults}, key


async def test_objects_that_took_each_others_place_are_found(run: Run) -> None:
    first, second = pack_key(Series.STEP, INC, 1, 0), pack_key(Series.STEP, INC, 2, 0)
    faults = await run.faults(**{first: run.items[second], second: run.items[first]})
    assert {fault.key for fault in faults} == {first, second}
    other = Run(records=run.records, data_bytes_max=run.data_bytes_max)
    stranger = RunRecord("run-b").encode()
    assert {fault.key for fault in await other.faults(**{RUN_RECORD: stranger})} >= {
        manifest_key(Series.STEP, INC, 1, 0)
    }


async def test_what_a_crash_leaves_is_no_fault(run: Run) -> None:
    crashed = Run(records=run.records, ended=False, data_bytes_max=run.data_bytes_max)
    for key in (pack_key(Series.STEP, INC, 6, 0), pack_key(Series.BASE, INC, 6, 0)):
        assert await crashed.faults(**{key: b"never committed"}) == []
    if run.records:
        leftover = manifest_key(Series.STEP, INC, 6, 0)
        assert await crashed.faults(**{leftover: b"no commit record yet"}) == []
        # Half-way through reclaiming the older chain: evidence goes first.
        assert await crashed.faults(**{commit_key(Series.BASE, INC, 0): None}) == []


async def test_after_a_crash_a_save_in_the_middle_still_needs_its_evidence(run: Run) -> None:
    crashed = Run(records=run.records, ended=False, data_bytes_max=run.data_bytes_max)
    evidence = commit_key if run.records else lambda *place: manifest_key(*place, 0)
    gone = evidence(Series.STEP, INC, 4)
    assert {fault.key for fault in await crashed.faults(**{gone: None})} == {gone}


async def test_a_save_that_vanished_without_a_trace_is_missed_by_what_builds_on_it(run: Run) -> None:
    prefix = pack_key(Series.STEP, INC, 4, 0).rsplit("/", 1)[0]
    gone = {key: None for key in run.items if key.startswith(prefix)}
    faults = await run.faults(**gone)
    assert len(faults) == 1
    assert faults[0].key.startswith(prefix)
    assert "step 5 builds on it" in faults[0].what


async def test_a_step_reclaimed_meanwhile_is_no_fault(run: Run) -> None:
    items = dict(run.items)
    store = Objects(items, records=run.records)
    prefix = pack_key(Series.STEP, INC, 1, 0).rsplit("/", 1)[0]
    listed = [key async for key in store.list()]
    for key in [key for key in items if key.startswith(prefix)]:
        del items[key]

    async def stale() -> AsyncIterator[str]:
        for key in listed:
            yield key

    store.list = stale  # type: ignore[method-assign]
    assert await verify_tier(store) == []  # type: ignore[arg-type]


async def test_progress_counts_up_to_the_end(run: Run) -> None:
    seen: list[tuple[int, int | None]] = []
    store = Objects(run.items, records=run.records)
    await verify_tier(store, progress=lambda done, total: seen.append((done, total)))  # type: ignore[arg-type]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] >= seen[-1][1] - 15  # type: ignore[operator]


def times_below(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


async def test_a_directory_is_verified_read_only(tmp_path: Path) -> None:
    run = Run(records=True)
    for key, data in run.items.items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(data)
    before = times_below(tmp_path)
    store = FileStore(tmp_path, read_only=True)
    assert await verify_tier(store) == []
    assert times_below(tmp_path) == before
    victim = next(key for key in run.items if key.endswith("/c/0/0"))
    (tmp_path / victim).write_bytes(run.items[victim][:-1])
    assert [fault.key for fault in await verify_tier(store)] == [victim]
    (tmp_path / victim).unlink()
    assert [fault.key for fault in await verify_tier(store)] == [victim]
    store.close()


async def test_the_memory_tier_is_verified_too(tmp_path: Path) -> None:
    run = Run(records=False)
    victim = pack_key(Series.STEP, INC, 4, 0)
    with Arena.open(tmp_path / "arena", run="run-a") as arena:
        store = MemoryStore(arena)
        for key, data in run.items.items():
            await store.put(key, [data])
        assert await verify_tier(store) == []
        damaged = bytearray(run.items[victim])
        damaged[100] ^= 1
        await store.put(victim, [bytes(damaged)])
        assert [fault.key for fault in await verify_tier(store)] == [victim]
        store.close()


async def test_a_layout_of_another_content_is_found(run: Run) -> None:
    other = Layout(LAYOUT.tensors, LAYOUT.chunks, LAYOUT.size_bytes + 64)
    key = layout_key(LAYOUT.hash)
    assert {fault.key for fault in await run.faults(**{key: other.encoded})} == {key}


async def test_a_manifest_that_leaves_out_a_chunk_of_its_layout_is_found() -> None:
    run = Run(records=True)
    key = manifest_key(Series.BASE, INC, 3, 0)
    manifest = Manifest.decode(run.items[key], key)
    run.commit(replace(manifest, objects=manifest.objects[1:]))
    faults = await run.faults()
    assert [fault.key for fault in faults] == [key]
    assert "does not name" in faults[0].what
