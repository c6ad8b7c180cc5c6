from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

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
from stepwell.pipeline.keys import state_prefix
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.zarr_base import GroupPlan, export_base, read_base
from stepwell.pipeline.zarr_group import ZARR_DTYPES


def exported(layout: Layout, run: np.ndarray) -> tuple[dict[str, bytes], Manifest]:
    items: dict[str, bytes] = {}
    entries: list[ObjectEntry] = []
    for (key, parts), entry in export_base(GroupPlan(layout), IDENTITY, HEADER, memoryview(run)):
        assert key not in items
        items[key] = b"".join(bytes(part) for part in parts)
        assert entry == ObjectEntry.of(key, items[key])
        entries.append(entry)
    return items, Manifest("run-a", INC, 50, 0, 1, "base", None, True, tuple(entries), (layout.hash,))


@pytest.fixture(scope="module")
def base() -> tuple[np.ndarray, dict[str, bytes], Manifest]:
    run = random_run(LAYOUT)
    return run, *exported(LAYOUT, run)


def test_plain_zarr_reads_every_value(
    base: tuple[np.ndarray, dict[str, bytes], Manifest], tmp_path: Path
) -> None:
    run, items, _ = base
    group = zarr.open_group(str(written(items, tmp_path)), mode="r")
    assert group.metadata.consolidated_metadata is not None
    assert group.attrs["stepwell"]["header"] == HEADER
    for tensor in LAYOUT.tensors:
        array = group[tensor.name]
        assert isinstance(array, zarr.Array)
        assert array.attrs["stepwell_dtype"] == tensor.dtype
        assert (array.shape, str(array.dtype)) == (tensor.shape, ZARR_DTYPES[tensor.dtype])
        value = np.ascontiguousarray(array[...])
        assert value.tobytes() == bits_of(LAYOUT, run, tensor.name).tobytes(), tensor.name


def test_without_consolidated_metadata_it_is_the_same_group(
    base: tuple[np.ndarray, dict[str, bytes], Manifest], tmp_path: Path
) -> None:
    _, items, _ = base
    where = str(written(items, tmp_path))
    group = zarr.open_group(where, mode="r", use_consolidated=False)
    names = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert names == {tensor.name for tensor in LAYOUT.tensors}
    listed = {n for n, _ in zarr.open_group(where, mode="r").members(max_depth=None)}
    assert listed == {n for n, _ in group.members(max_depth=None)}


def test_tensorstore_reads_every_value(
    base: tuple[np.ndarray, dict[str, bytes], Manifest], tmp_path: Path
) -> None:
    import tensorstore

    run, items, _ = base
    where = written(items, tmp_path)
    for tensor in LAYOUT.tensors:
        array = tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(where / tensor.name) + "/"},
            },
            read=True,
        ).result()
        value = np.ascontiguousarray(array.read().result())
        assert value.tobytes() == bits_of(LAYOUT, run, tensor.name).tobytes(), tensor.name


def test_a_process_without_stepwell_reads_it(tmp_path: Path) -> None:
    layout = plan_layout([spec("model/w", (300, 64))], chunk_bytes=4096)
    run = random_run(layout)
    where = written(exported(layout, run)[0], tmp_path)
    script = (
        "import sys, warnings; warnings.simplefilter('error'); import zarr\n"
        f"z = zarr.open_group({str(where)!r}, mode='r')['model/w'][:]\n"
        "assert not any(name.startswith('stepwell') for name in sys.modules)\n"
        "sys.stdout.buffer.write(z.tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    assert done.stdout == run.tobytes()
    assert done.stderr == b""


async def test_our_reader_gives_back_the_run(base: tuple[np.ndarray, dict[str, bytes], Manifest]) -> None:
    run, items, manifest = base
    reader = await read_base(Objects(items), manifest, GroupPlan(LAYOUT))  # type: ignore[arg-type]
    assert reader.header == HEADER
    for part, chunk in enumerate(LAYOUT.chunks):
        expected = run[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]
        assert (await reader.read_chunk(part)).tobytes() == expected.tobytes()


def test_payloads_are_not_copied() -> None:
    layout = plan_layout([spec("model/w", (1000, 64))], chunk_bytes=64_000)
    run = random_run(layout)
    for (key, parts), _ in export_base(GroupPlan(layout), IDENTITY, HEADER, memoryview(run)):
        if "/c/" in key:
            assert np.shares_memory(np.frombuffer(parts[0], np.uint8), run)


async def test_every_flip_cut_and_loss_is_found() -> None:
    layout = plan_layout([spec("model/w", (10, 64)), spec("model/b", (3,))], chunk_bytes=1024)
    run = random_run(layout)
    items, manifest = exported(layout, run)
    plan = GroupPlan(layout)

    async def read_all(damaged: dict[str, bytes]) -> None:
        reader = await read_base(Objects(damaged), manifest, plan)  # type: ignore[arg-type]
        for part in range(len(layout.chunks)):
            await reader.read_chunk(part)

    await read_all(items)
    ours = [key for key in items if "/c/" in key or key == f"{state_prefix(INC, 50)}/zarr.json"]
    for key in ours:
        for position in range(0, len(items[key]), 7):
            data = bytearray(items[key])
            data[position] ^= 1 << position % 8
            with pytest.raises(IntegrityError, match="damaged"):
                await read_all(items | {key: bytes(data)})
        with pytest.raises(IntegrityError):
            await read_all(items | {key: items[key][:-1]})
        with pytest.raises(MissingObjectError):
            await read_all({name: data for name, data in items.items() if name != key})


async def test_a_manifest_that_does_not_fit_is_refused(
    base: tuple[np.ndarray, dict[str, bytes], Manifest],
) -> None:
    _, items, manifest = base
    plan = GroupPlan(LAYOUT)
    store = Objects(items)

    def changed(**fields: object) -> Manifest:
        values = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
        return Manifest(**{**values, **fields})

    first = manifest.objects[0]
    short = ObjectEntry(first.key, first.size_bytes - 1, first.xxh3)
    with pytest.raises(FormatError, match="its layout needs"):
        await read_base(store, changed(objects=(short, *manifest.objects[1:])), plan)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="does not name"):
        await read_base(store, changed(objects=manifest.objects[1:]), plan)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="another base"):
        await read_base(store, changed(run="run-b"), plan)  # type: ignore[arg-type]


def test_names_that_collide_elsewhere_stay_apart(tmp_path: Path) -> None:
    layout = plan_layout([spec(name, (2, 3)) for name in NASTY], chunk_bytes=1024)
    run = random_run(layout)
    items, _ = exported(layout, run)
    keys = list(items)
    assert len({key.lower() for key in keys}) == len(keys), "keys meet on a store that folds case"
    group = zarr.open_group(str(written(items, tmp_path)), mode="r", use_consolidated=False)
    found = {
        node.attrs["stepwell_name"]: node
        for _, node in group.members(max_depth=None)
        if isinstance(node, zarr.Array)
    }
    assert set(found) == set(NASTY)
    for name, array in found.items():
        assert np.asarray(array[:]).tobytes() == bits_of(layout, run, str(name)).tobytes()


def test_negative_zeros_are_stored_not_dropped_as_fill(tmp_path: Path) -> None:
    layout = plan_layout([spec("model/all", (64,)), spec("model/one", (64,))], chunk_bytes=1024)
    values = np.zeros((2, 64), np.float32)
    values[0] = -0.0
    values[1, 5] = -0.0
    run = values.reshape(-1).view(np.uint8)
    assert len(run) == layout.size_bytes
    group = zarr.open_group(str(written(exported(layout, run)[0], tmp_path)), mode="r")
    assert np.signbit(np.asarray(group["model/all"][:])).all()  # type: ignore[index]
    assert np.signbit(np.asarray(group["model/one"][:])).nonzero()[0].tolist() == [5]  # type: ignore[index]


def test_types_zarr_lacks_are_bits() -> None:
    assert ZARR_DTYPES["bfloat16"] == "uint16"
    assert ZARR_DTYPES["float8_e4m3fn"] == ZARR_DTYPES["float4_e2m1fn_x2"] == "uint8"
    assert ZARR_DTYPES["complex32"] == "uint32"
    assert {d: z for d, z in ZARR_DTYPES.items() if d == z}.keys() == {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }


def test_metadata_of_many_arrays_is_planned_once_and_fast_to_list(tmp_path: Path) -> None:
    layout = plan_layout([spec(f"model/t{i}", (4,)) for i in range(2000)])
    plan = GroupPlan(layout)
    run = np.zeros(layout.size_bytes, np.uint8)
    items = {key: b"".join(parts) for (key, parts), _ in export_base(plan, IDENTITY, {}, memoryview(run))}
    assert len(items) == 2000 * 2 + 2
    root = json.loads(items[f"{state_prefix(INC, 50)}/zarr.json"])
    assert len(root["consolidated_metadata"]["metadata"]) == 2001


def test_the_golden_base_of_format_1_is_still_read() -> None:
    items, manifest = exported(GOLDEN_LAYOUT, golden_run())
    stored = {
        str(path.relative_to(GOLDEN)): path.read_bytes()
        for path in (GOLDEN / state_prefix(INC, 50)).rglob("*")
        if path.is_file()
    }
    assert stored == items, "the format changed: bump the version and keep these files"

    async def read() -> bytes:
        reader = await read_base(Objects(stored), manifest, GroupPlan(GOLDEN_LAYOUT))  # type: ignore[arg-type]
        return b"".join(
            [(await reader.read_chunk(part)).tobytes() for part in range(len(GOLDEN_LAYOUT.chunks))]
        )

    expected = golden_run()
    chunks = [expected[c.offset_bytes : c.offset_bytes + c.size_bytes] for c in GOLDEN_LAYOUT.chunks]
    assert asyncio.run(read()) == b"".join(chunk.tobytes() for chunk in chunks)
