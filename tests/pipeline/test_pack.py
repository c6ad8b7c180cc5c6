from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stepwell.errors import FormatError, IntegrityError, NoSpaceError
from stepwell.pipeline.base import Chunk, Kind
from stepwell.pipeline.layout import Layout, LayoutChunk, Piece, TensorSpec
from stepwell.pipeline.pack import (
    HEADER_BYTES,
    Packed,
    PackIdentity,
    PackKind,
    PackReader,
    base_chunk_key,
    finish_region,
    pack_parts,
    region_size,
)

INC = "000002-0123456789abcdef"
IDENTITY = PackIdentity(PackKind.GRADIENT, "run-a", INC, 41)
GOLDEN = Path(__file__).parent.parent / "golden" / "format-1" / "gradient.pack"


def chunk(key: str, data: bytes, **changes: object) -> Chunk:
    fields: dict[str, object] = {
        "step": 41,
        "key": key,
        "kind": Kind.GRADIENT,
        "update": 0,
        "part": 0,
        "layout": "ab" * 16,
        "dtype": "uint8",
        "raw_bytes": len(data),
        "buffer": np.frombuffer(data, np.uint8),
    }
    return Chunk(**{**fields, **changes})  # type: ignore[arg-type]


def small_pack() -> tuple[bytes, Packed]:
    chunks = [
        chunk("update/0/chunk/0", bytes(range(100))),
        chunk("update/0/chunk/1", b"\x01" * 64, part=1),
        chunk("empty", b"", part=2),
        chunk("aux/0", b"abc", kind=Kind.AUX, update=-1, raw_bytes=9, encodings=({"id": "x", "level": 1},)),
    ]
    packed = pack_parts(IDENTITY, {"updates": [1, 2.5, None, "é"]}, chunks)
    return b"".join(bytes(part) for part in packed.parts), packed


async def faults_of(data: bytes) -> list[str]:
    """What opening and verifying a pack finds."""
    try:
        reader = await PackReader.over(data, "p").open()
    except IntegrityError as error:
        return [str(error)]
    return [fault async for fault in reader.verify_all()]


async def test_a_pack_is_read_back_whole() -> None:
    data, packed = small_pack()
    assert len(data) == packed.size_bytes
    reader = await PackReader.over(data, "p").open()
    assert reader.identity == IDENTITY
    assert reader.header == {"updates": [1, 2.5, None, "é"]}
    assert reader.xxh3 == packed.xxh3
    assert tuple(reader.rows.values()) == packed.rows
    assert all(row.offset % 64 == 0 for row in packed.rows)
    back = await reader.chunk("aux/0")
    assert (bytes(back.buffer), back.raw_bytes, back.update, back.kind) == (b"abc", 9, -1, Kind.AUX)
    assert back.encodings == ({"id": "x", "level": 1},)
    assert bytes((await reader.chunk("update/0/chunk/0")).buffer) == bytes(range(100))
    assert (await reader.chunk("empty")).buffer.size == 0
    assert await faults_of(data) == []


async def test_payloads_are_not_copied_into_the_parts() -> None:
    source = np.arange(1000, dtype=np.uint8)
    packed = pack_parts(IDENTITY, {}, [chunk("a", b"x" * 1000, buffer=source)])
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), source) for part in packed.parts if len(part))


async def test_an_empty_pack_is_a_pack() -> None:
    packed = pack_parts(IDENTITY, {}, [])
    data = b"".join(packed.parts)
    assert (await PackReader.over(data, "p").open()).rows == {}
    assert await faults_of(data) == []


async def test_a_flip_of_any_byte_is_found() -> None:
    data, packed = small_pack()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        assert await faults_of(bytes(damaged)), f"byte {position} of {packed.size_bytes}"


async def test_a_cut_at_any_length_is_found() -> None:
    data, _ = small_pack()
    for length in range(len(data)):
        assert await faults_of(data[:length]), length
    assert await faults_of(data + b"\0")


async def test_a_damaged_chunk_is_never_returned() -> None:
    data, packed = small_pack()
    damaged = bytearray(data)
    damaged[packed.rows[1].offset] ^= 1
    reader = await PackReader.over(damaged, "tier/p").open()
    assert (await reader.chunk("update/0/chunk/0")).buffer.size == 100
    with pytest.raises(IntegrityError, match=r"tier/p: chunk 'update/0/chunk/1' is damaged"):
        await reader.chunk("update/0/chunk/1")
    with pytest.raises(IntegrityError, match="no chunk"):
        await reader.chunk("update/9/chunk/9")


async def test_an_object_shorter_than_the_store_said_is_found() -> None:
    data, _ = small_pack()
    view = memoryview(data)

    async def fetch(start: int, length: int) -> memoryview:
        return view[start : start + length][:-1]

    with pytest.raises(IntegrityError, match="where 64 were asked for"):
        await PackReader(fetch, len(data), "p").open()


async def test_a_large_pack_is_opened_with_few_small_reads() -> None:
    data = b"".join(bytes(p) for p in pack_parts(IDENTITY, {}, [chunk("big", bytes(1 << 20))]).parts)
    view, reads = memoryview(data), []

    async def fetch(start: int, length: int) -> memoryview:
        reads.append(length)
        return view[start : start + length]

    await PackReader(fetch, len(data), "p").open()
    assert len(reads) == 2
    assert sum(reads) < 70_000


def reseal(data: bytes, index: bytes) -> bytes:
    """Put another index, with right checksums, into a pack: what a hostile writer could do."""
    offset = struct.unpack_from("<Q", data, len(data) - 64)[0]
    total = offset + len(index) + 64
    trailer = struct.pack(
        "<QQ16sQ8sII", offset, len(index), xxhash.xxh3_128_digest(index), total, b"LLEWPETS", 1, 0
    )
    return data[:offset] + index + trailer + struct.pack("<Q", xxhash.xxh3_64_intdigest(trailer))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"uint8",9,', b'"uint8",99999999999999,', "more than"),
        (b'"uint8",9,', b'"uint8",-9,', "not a count"),
        (b'"uint8",9,', b'"uint8",true,', "not a count"),
        (b'"uint8",100,64,100,', b'"uint8",100,64,9999999,', "holds"),
        (b'"uint8",100,64,100,', b'"uint8",9999999,64,9999999,', "overlap"),
        (b'"uint8",9,256,3,', b'"uint8",9,256,300000000,', "beyond the object"),
        (b'"uint8",64,192,64,', b'"uint8",64,193,64,', "unaligned"),
        (b'"uint8",64,192,64,', b'"uint8",64,0,64,', "overlaps"),
        (b'"aux/0"', b'"empty"', "one key"),
        (b'"uint8"', b'"uint9"', "uint9"),
        (b'"gradient"', b'"nonsense"', "nonsense"),
        (b'"step":41', b'"step":42', "different packs"),
        (b'"world":1', b'"world":99999999999', "not a count"),
        (b'"chunks":[', b'"chunks":[[],', "not one of ours"),
        (b'"format":1', b'"format":2', "index of format"),
        (b'{"chunks"', b'{"step":NaN,"chunks"', "not a JSON"),
    ],
)
async def test_an_index_that_lies_is_refused_before_any_allocation(
    old: bytes, new: bytes, message: str
) -> None:
    data, _ = small_pack()
    offset, length = struct.unpack_from("<QQ", data, len(data) - 64)
    index = data[offset : offset + length]
    assert old in index
    with pytest.raises(IntegrityError, match=message):
        await PackReader.over(reseal(data, index.replace(old, new)), "p").open()


@pytest.mark.parametrize("length", [1 << 40, 1 << 62])
async def test_a_trailer_that_claims_a_terabyte_index_is_refused(length: int) -> None:
    data, _ = small_pack()
    trailer = struct.pack("<QQ16sQ8sII", 64, length, b"\0" * 16, len(data), b"LLEWPETS", 1, 0)
    lying = data[:-64] + trailer + struct.pack("<Q", xxhash.xxh3_64_intdigest(trailer))
    with pytest.raises(FormatError, match="more than"):
        await PackReader.over(lying, "p").open()


async def test_a_newer_format_is_named_and_another_file_is_refused() -> None:
    data, _ = small_pack()
    head = bytearray(data[:56])
    head[8] = 7
    newer = bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))) + data[64:]
    with pytest.raises(FormatError, match="format 7, this stepwell reads up to format 1"):
        await PackReader.over(newer, "p").open()
    with pytest.raises(FormatError, match="not a stepwell pack"):
        await PackReader.over(b"PK\x03\x04" + bytes(200), "p").open()


def test_a_pickle_in_place_of_a_pack_is_not_run(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "made",)

    import asyncio

    for data in (pickle.dumps(Bomb()), pickle.dumps(Bomb()) + bytes(300)):
        with pytest.raises(IntegrityError):
            asyncio.run(PackReader.over(data, "p").open())
    assert not (tmp_path / "made").exists()


LAYOUT = Layout(
    tensors=(
        TensorSpec("model/a", (3,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/b", (5,), "float32", Kind.WEIGHT, "optim:0"),
        TensorSpec("model/n", (), "int64", Kind.AUX),
    ),
    chunks=(
        LayoutChunk(Kind.WEIGHT, "float32", 0, 84, (Piece(0, 0, 3, 0), Piece(1, 0, 5, 64))),
        LayoutChunk(Kind.AUX, "int64", 128, 8, (Piece(2, 0, 1, 0),)),
    ),
    size_bytes=136,
)
BASE = PackIdentity(PackKind.BASE, "run-a", INC, 40)


def filled_region(extra: int = 0) -> bytearray:
    """A recycled region full of garbage with the three tensors of LAYOUT in place."""
    region = bytearray(b"\xee" * (region_size(BASE, {"tree": {}}, LAYOUT) + extra))
    for offset, array in (
        (0, np.array([1, 2, 3], np.float32)),
        (64, np.arange(5, dtype=np.float32)),
        (128, np.array([7], np.int64)),
    ):
        at = HEADER_BYTES + offset
        region[at : at + array.nbytes] = array.tobytes()
    return region


@pytest.mark.parametrize("extra", [0, 4096])
async def test_a_base_is_finished_in_place(extra: int) -> None:
    region = filled_region(extra)
    packed = finish_region(memoryview(region), BASE, {"tree": {}}, LAYOUT)
    assert packed.size_bytes == region_size(BASE, {"tree": {}}, LAYOUT)
    data = bytes(region[: packed.size_bytes])
    assert await faults_of(data) == []
    reader = await PackReader.over(data, "p").open()
    assert (reader.identity, reader.header, reader.xxh3) == (BASE, {"tree": {}}, packed.xxh3)
    first = await reader.chunk(base_chunk_key(0))
    values = first.buffer.view(np.float32)
    assert values[:3].tolist() == [1, 2, 3]
    assert values[3:16].tolist() == [0] * 13
    assert values[16:].tolist() == [0, 1, 2, 3, 4]
    assert (await reader.chunk(base_chunk_key(1))).buffer.view(np.int64).tolist() == [7]


async def test_every_byte_of_a_base_in_place_is_covered() -> None:
    region = filled_region()
    data = bytes(region[: finish_region(memoryview(region), BASE, {"tree": {}}, LAYOUT).size_bytes])
    for position in range(0, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x80
        assert await faults_of(bytes(damaged)), position


def test_a_region_that_is_too_small_says_what_is_needed() -> None:
    region = filled_region()
    with pytest.raises(NoSpaceError, match=str(len(region))):
        finish_region(memoryview(region)[:-1], BASE, {"tree": {}}, LAYOUT)
    with pytest.raises(NoSpaceError, match="256"):
        finish_region(memoryview(region)[:100], BASE, {"tree": {}}, LAYOUT)


async def test_large_chunks_are_hashed_off_the_loop() -> None:
    big = np.zeros(20 << 20, np.uint8)
    packed = pack_parts(IDENTITY, {}, [chunk("big", b"", buffer=big, raw_bytes=big.size)])
    reader = await PackReader.over(b"".join(bytes(p) for p in packed.parts), "p").open()
    assert (await reader.chunk("big")).buffer.size == big.size


async def test_the_golden_pack_of_format_1_is_still_read() -> None:
    data = GOLDEN.read_bytes()
    assert await faults_of(data) == []
    assert data == small_pack()[0], "the format changed: bump the version and keep this file"


async def test_equal_chunks_are_stored_once() -> None:
    one = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    other = one.copy()
    other[4999] ^= 1
    contents = [one, other, one.copy(), one[:0], one.copy(), other.copy(), one[:0]]
    chunks = [chunk(f"aux/{k}", data.tobytes(), part=k) for k, data in enumerate(contents)]
    packed = pack_parts(IDENTITY, {}, chunks)
    assert packed.size_bytes < 2 * 5056 + 4096
    data = b"".join(bytes(part) for part in packed.parts)
    reader = await PackReader.over(data, "p").open()
    for k, content in enumerate(contents):
        assert np.array_equal((await reader.chunk(f"aux/{k}")).buffer, content)
    assert await faults_of(data) == []
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 4
        assert await faults_of(bytes(damaged)), position
