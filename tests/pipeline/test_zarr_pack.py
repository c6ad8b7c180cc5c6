from __future__ import annotations

import asyncio
import copy
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr_base_rig import (
    GOLDEN,
    GOLDEN_LAYOUT,
    HEADER,
    IDENTITY,
    INC,
    LAYOUT,
    NASTY,
    Objects,
    bits_of,
    golden_run,
    random_run,
    spec,
    written,
)

from stepwell.errors import FormatError, IntegrityError, MissingObjectError
from stepwell.pipeline.keys import data_key, references_key
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.zarr_base import GroupPlan, export_base, read_base
from stepwell.pipeline.zarr_group import ZARR_DTYPES
from stepwell.pipeline.zarr_pack import PackedPlan, export_packed
from stepwell.pipeline.zarr_pack_reader import PackedReader, is_packed

INDEX = references_key(INC, 50, 0)
DATA = data_key(INC, 50, 0, 0)
CUT_BYTES = 4096

Base = tuple[np.ndarray, dict[str, bytes], Manifest]


def packed(
    layout: Layout, run: np.ndarray, data_bytes_max: int | None = None
) -> tuple[dict[str, bytes], Manifest]:
    items: dict[str, bytes] = {}
    entries: list[ObjectEntry] = []
    plan = PackedPlan(GroupPlan(layout), 0, data_bytes_max)
    for (key, parts), entry in export_packed(plan, IDENTITY, HEADER, memoryview(run)):
        items[key] = b"".join(bytes(part) for part in parts)
        assert (entry.key, entry.size_bytes) == (key, len(items[key]))
        entries.append(entry)
    return items, Manifest("run-a", INC, 50, 0, 1, "base", None, True, tuple(entries), (layout.hash,))


def opened_by_zarr(index: Path) -> zarr.Group:
    """Open a base as somebody would who knows zarr and fsspec alone."""
    options = {"fo": str(index), "template_overrides": {"here": f"{index.parent}/"}}
    return zarr.open_group("reference://", mode="r", storage_options=options)


async def read_all(items: Mapping[str, bytes], manifest: Manifest, layout: Layout) -> list[bytes]:
    reader = await read_base(Objects(dict(items)), manifest, GroupPlan(layout))  # type: ignore[arg-type]
    assert isinstance(reader, PackedReader)
    assert reader.header == HEADER
    return [(await reader.read_chunk(part)).tobytes() for part in range(len(layout.chunks))]


def chunks_of(layout: Layout, run: np.ndarray) -> list[bytes]:
    return [run[c.offset_bytes : c.offset_bytes + c.size_bytes].tobytes() for c in layout.chunks]


@pytest.fixture(scope="module", params=[None, CUT_BYTES], ids=["whole", "cut"])
def base(request: pytest.FixtureRequest) -> Base:
    run = random_run(LAYOUT)
    return run, *packed(LAYOUT, run, request.param)


def test_a_base_is_one_object_and_its_index() -> None:
    items, manifest = packed(LAYOUT, random_run(LAYOUT))
    assert list(items) == [DATA, INDEX]
    assert is_packed(manifest)


def test_where_objects_have_a_largest_size_there_are_several() -> None:
    run = random_run(LAYOUT)
    items, _ = packed(LAYOUT, run, CUT_BYTES)
    sizes = [len(data) for key, data in items.items() if key != INDEX]
    assert len(sizes) > 3
    assert max(sizes) <= CUT_BYTES
    # Filled in order: no two neighbours would have fitted into one, but for the cut between chunks.
    assert all(a + b > CUT_BYTES - 1100 for a, b in itertools.pairwise(sizes))
    joined = b"".join(data for key, data in items.items() if key != INDEX)
    assert joined == packed(LAYOUT, run)[0][DATA]


def test_the_data_is_the_chunk_objects_of_the_group() -> None:
    run = random_run(LAYOUT)
    group = [
        b"".join(bytes(part) for part in parts)
        for (key, parts), _ in export_base(GroupPlan(LAYOUT), IDENTITY, HEADER, memoryview(run))
        if "/c" in key.rpartition("/state/")[2] and not key.endswith("zarr.json")
    ]
    assert b"".join(group) == packed(LAYOUT, run)[0][DATA]


def test_payloads_are_not_copied() -> None:
    layout = plan_layout([spec("model/w", (1000, 64))], chunk_bytes=64_000)
    run = random_run(layout)
    (_, parts), _ = next(export_packed(PackedPlan(GroupPlan(layout), 0), IDENTITY, HEADER, memoryview(run)))
    large = [part for part in parts if memoryview(part).nbytes > 4]
    assert len(large) == len(layout.chunks)
    assert all(np.shares_memory(np.frombuffer(part, np.uint8), run) for part in large)


def test_plain_zarr_and_fsspec_read_every_value(base: Base, tmp_path: Path) -> None:
    run, items, _ = base
    written(items, tmp_path)
    group = opened_by_zarr(tmp_path / INDEX)
    assert group.attrs["stepwell"]["header"] == HEADER
    names = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert names == {tensor.name for tensor in LAYOUT.tensors}
    for tensor in LAYOUT.tensors:
        array = group[tensor.name]
        assert isinstance(array, zarr.Array)
        assert array.attrs["stepwell_dtype"] == tensor.dtype
        assert (array.shape, str(array.dtype)) == (tensor.shape, ZARR_DTYPES[tensor.dtype])
        value = np.ascontiguousarray(array[...])
        assert value.tobytes() == bits_of(LAYOUT, run, tensor.name).tobytes(), tensor.name


def test_an_array_opens_by_itself(base: Base, tmp_path: Path) -> None:
    run, items, _ = base
    written(items, tmp_path)
    options = {"fo": str(tmp_path / INDEX), "template_overrides": {"here": f"{(tmp_path / INDEX).parent}/"}}
    array = zarr.open_array("reference://", path="model/conv", mode="r", storage_options=options)
    assert np.ascontiguousarray(array[...]).tobytes() == bits_of(LAYOUT, run, "model/conv").tobytes()


def test_a_process_without_stepwell_reads_it_where_it_was_moved_to(tmp_path: Path) -> None:
    layout = plan_layout([spec("model/w", (300, 64))], chunk_bytes=4096)
    run = random_run(layout)
    written(packed(layout, run)[0], tmp_path / "first")
    shutil.move(tmp_path / "first", tmp_path / "moved")
    index = tmp_path / "moved" / INDEX
    script = (
        "import sys, warnings; warnings.simplefilter('error'); import zarr\n"
        f"options = {{'fo': {str(index)!r}, 'template_overrides': {{'here': {str(index.parent) + '/'!r}}}}}\n"
        "z = zarr.open_group('reference://', mode='r', storage_options=options)['model/w'][:]\n"
        "assert not any(name.startswith('stepwell') for name in sys.modules)\n"
        "sys.stdout.buffer.write(z.tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    assert done.stdout == run.tobytes()
    assert done.stderr == b""


def test_names_that_collide_elsewhere_stay_apart(tmp_path: Path) -> None:
    layout = plan_layout([spec(name, (2, 3)) for name in NASTY], chunk_bytes=1024)
    run = random_run(layout)
    written(packed(layout, run)[0], tmp_path)
    found = {
        node.attrs["stepwell_name"]: node
        for _, node in opened_by_zarr(tmp_path / INDEX).members(max_depth=None)
        if isinstance(node, zarr.Array)
    }
    assert set(found) == set(NASTY)
    for name, array in found.items():
        assert np.asarray(array[:]).tobytes() == bits_of(layout, run, str(name)).tobytes()


def test_data_that_is_gone_cut_or_damaged_is_an_error_in_plain_zarr(tmp_path: Path) -> None:
    layout = plan_layout([spec("model/w", (300, 64))], chunk_bytes=4096)
    items, _ = packed(layout, random_run(layout))
    damaged = bytearray(items[DATA])
    damaged[5000] ^= 4
    for data in (None, items[DATA][:-1], bytes(damaged)):
        written(items, tmp_path)
        (tmp_path / DATA).unlink()
        if data is not None:
            (tmp_path / DATA).write_bytes(data)
        with pytest.raises((RuntimeError, ValueError)):
            opened_by_zarr(tmp_path / INDEX)["model/w"][...]


async def test_our_reader_gives_back_the_run(base: Base) -> None:
    run, items, manifest = base
    assert await read_all(items, manifest, LAYOUT) == chunks_of(LAYOUT, run)


async def test_a_state_without_a_byte_is_a_base_too() -> None:
    layout = plan_layout([spec("model/empty", (0, 3))], chunk_bytes=1024)
    items, manifest = packed(layout, random_run(layout))
    assert list(items) == [INDEX]
    assert await read_all(items, manifest, layout) == chunks_of(layout, random_run(layout))


async def test_every_flip_cut_and_loss_is_found() -> None:
    layout = plan_layout([spec("model/w", (10, 64)), spec("model/b", (3,))], chunk_bytes=1024)
    items, manifest = packed(layout, random_run(layout), 1500)
    assert len(items) == 4
    for key, data in items.items():
        for position in range(len(data)) if key != INDEX else range(0, len(data), 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            with pytest.raises(IntegrityError, match="damaged"):
                await read_all(items | {key: bytes(flipped)}, manifest, layout)
        with pytest.raises(IntegrityError):
            await read_all(items | {key: data[:-1]}, manifest, layout)
        with pytest.raises(MissingObjectError):
            await read_all({name: kept for name, kept in items.items() if name != key}, manifest, layout)


def with_index(
    items: dict[str, bytes], manifest: Manifest, index: object
) -> tuple[dict[str, bytes], Manifest]:
    """A base with another index, which its manifest names."""
    data = json.dumps(index).encode()
    entries = tuple(e if e.key != INDEX else ObjectEntry.of(INDEX, data) for e in manifest.objects)
    return items | {INDEX: data}, replace(manifest, objects=entries)


def at(*path: str | int) -> Callable[[Any], tuple[Any, str | int]]:
    def walk(index: Any) -> tuple[Any, str | int]:
        for step in path[:-1]:
            index = index[step]
        return index, path[-1]

    return walk


CHUNK = "model/w/c/1/0"
WRONG: list[tuple[tuple[str | int, ...], object]] = [
    *((("version",), value) for value in (0, 2, True, "1", None)),
    *((("templates",), value) for value in ({}, {"here": "/elsewhere/"}, {"here": "", "there": ""}, [])),
    *((("refs",), value) for value in ({}, [], None, "x")),
    *((("refs", "zarr.json"), value) for value in (None, "", "{}", [], '{"attributes":{"stepwell":1}}')),
    *((("refs", CHUNK), value) for value in (None, [], "x", ["{{here}}rank-00000.data-00000"])),
    *((("refs", CHUNK, 0), value) for value in ("/etc/passwd", "{{here}}../x", None, "{{here}}other")),
    *((("refs", CHUNK, 1), value) for value in (0, -1, 10**30, 1.5, "0", None)),
    *((("refs", CHUNK, 2), value) for value in (0, -1, 10**30, 1.5, None)),
    *((("stepwell", "xxh3_64"), value) for value in ([], None, {}, ["0" * 16])),
    *((("stepwell", "xxh3_64", 1), value) for value in ("0" * 16, "0" * 15, "\ud800" * 16, 7, None)),
    (("stepwell",), None),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=str)
async def test_an_index_that_is_not_true_is_refused(path: tuple[str | int, ...], value: object) -> None:
    layout = plan_layout([spec("model/w", (10, 64)), spec("model/b", (3,))], chunk_bytes=1024)
    items, manifest = packed(layout, random_run(layout))
    index = json.loads(items[INDEX])
    same = with_index(items, manifest, copy.deepcopy(index))
    assert await read_all(*same, layout) == chunks_of(layout, random_run(layout))
    place, last = at(*path)(index)
    place[last] = value
    with pytest.raises(IntegrityError, match=r"refs\.json|data-00000"):
        await read_all(*with_index(items, manifest, index), layout)


async def test_a_manifest_that_does_not_fit_is_refused(base: Base) -> None:
    _, items, manifest = base
    *data, index = manifest.objects
    short = ObjectEntry(data[0].key, data[0].size_bytes - 1, data[0].xxh3)
    other = ObjectEntry(data[0].key, data[0].size_bytes, "0" * 32)
    stray = ObjectEntry(data_key(INC, 50, 0, len(data) + 1), 5, "0" * 32)
    for wrong in (
        [short, *data[1:], index],
        data,
        [*data[1:], index],
        [*data, stray, index],
        [*data, index, index],
    ):
        with pytest.raises(FormatError):
            await read_all(items, replace(manifest, objects=tuple(wrong)), LAYOUT)
    with pytest.raises(IntegrityError, match="other checksums"):
        await read_all(items, replace(manifest, objects=(other, *data[1:], index)), LAYOUT)
    with pytest.raises(IntegrityError, match="another base"):
        await read_all(items, replace(manifest, run="run-b"), LAYOUT)


async def test_a_base_of_another_layout_is_refused() -> None:
    layout = plan_layout([spec("model/w", (10, 64))], chunk_bytes=1024)
    other = plan_layout([spec("model/v", (10, 64))], chunk_bytes=1024)
    items, manifest = packed(layout, random_run(layout))
    with pytest.raises(IntegrityError):
        await read_all(items, manifest, other)


async def test_many_small_arrays_are_read_with_one_request_a_chunk() -> None:
    layout = plan_layout([spec(f"model/t{i}", (4,)) for i in range(500)], chunk_bytes=4096)
    run = random_run(layout)
    items, manifest = packed(layout, run)
    store = Objects(items)
    asked: list[str] = []
    fetch = store.fetch

    async def counted(key: str, start: int = 0, length: int | None = None) -> memoryview:
        asked.append(key)
        return await fetch(key, start, length)

    store.fetch = counted  # type: ignore[method-assign]
    reader = await read_base(store, manifest, GroupPlan(layout))  # type: ignore[arg-type]
    assert [(await reader.read_chunk(p)).tobytes() for p in range(len(layout.chunks))] == chunks_of(
        layout, run
    )
    assert asked == [INDEX, *[DATA] * len(layout.chunks)]


def test_the_golden_packed_base_of_format_1_is_still_read(tmp_path: Path) -> None:
    items, manifest = packed(GOLDEN_LAYOUT, golden_run())
    stored = {key: (GOLDEN / key).read_bytes() for key in (DATA, INDEX)}
    assert stored == items, "the format changed: bump the version and keep these files"
    assert asyncio.run(read_all(stored, manifest, GOLDEN_LAYOUT)) == chunks_of(GOLDEN_LAYOUT, golden_run())
    array = opened_by_zarr(GOLDEN / INDEX)["model/w"]
    assert isinstance(array, zarr.Array)
    assert (
        np.ascontiguousarray(array[...]).tobytes()
        == bits_of(GOLDEN_LAYOUT, golden_run(), "model/w").tobytes()
    )
