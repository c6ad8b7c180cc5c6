from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stepwell.errors import (
    FormatError,
    IntegrityError,
    LockedError,
    MissingObjectError,
    NoSpaceError,
    ObjectExistsError,
    PermanentStoreError,
    UsageError,
)
from stepwell.stores import region as region_module
from stepwell.stores.arena import Arena
from stepwell.stores.header import BLANK, PAGE_BYTES, Header
from stepwell.stores.region import Region
from stepwell.stores.space import capacity_for


@pytest.fixture
def directory(memory_directory: Path) -> Path:
    return memory_directory / "uid" / "arena"


@pytest.fixture
def arena(directory: Path) -> Iterator[Arena]:
    opened = Arena.open(directory, run="run")
    yield opened
    opened.close()


def put(arena: Arena, key: str, content: bytes, *, replace: bool = True) -> Region:
    region = arena.reserve(len(content))
    region.payload[: len(content)] = content
    arena.publish(region, key, len(content), replace=replace)
    return region


def get(arena: Arena, key: str) -> bytes | None:
    region = arena.find(key)
    return None if region is None else bytes(region.contents)


def state_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# -- header pages ---------------------------------------------------------------------------------


def test_header_comes_back() -> None:
    header = Header("rün", "a/é", 2**40, 2**64 - 1)
    page = header.encode()
    assert len(page) == PAGE_BYTES
    assert Header.decode(page, payload_bytes=2**40) == header
    assert Header.decode(BLANK, payload_bytes=0) is None


def test_every_flipped_byte_of_a_header_is_found() -> None:
    page = Header("run", "key", 10, 1).encode()
    for at in range(PAGE_BYTES):
        damaged = bytearray(page)
        damaged[at] ^= 1
        with pytest.raises(IntegrityError):
            Header.decode(bytes(damaged), payload_bytes=10)


def test_header_that_promises_more_than_the_file_is_refused() -> None:
    page = Header("run", "key", 11, 1).encode()
    with pytest.raises(IntegrityError, match="11"):
        Header.decode(page, payload_bytes=10)
    with pytest.raises(IntegrityError):
        Header.decode(page[:100], payload_bytes=100)


def test_header_of_a_newer_format_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.stores import header as header_module

    monkeypatch.setattr(header_module, "FORMAT", 7)
    page = Header("run", "key", 10, 1).encode()
    monkeypatch.undo()
    with pytest.raises(FormatError, match=r"format 7.*format 1"):
        Header.decode(page, payload_bytes=10)


def test_header_with_a_key_that_leaves_its_place_is_refused() -> None:
    with pytest.raises(PermanentStoreError):
        Header.decode(Header("run", "../key", 10, 1).encode(), payload_bytes=10)


# -- opening --------------------------------------------------------------------------------------


def test_modes_keep_others_out(arena: Arena, directory: Path) -> None:
    put(arena, "k", b"secret")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_second_opener_is_refused(arena: Arena, directory: Path) -> None:
    with pytest.raises(LockedError, match=str(os.getpid())):
        Arena.open(directory, run="run")
    put(arena, "k", b"still mine")
    assert get(arena, "k") == b"still mine"


def test_published_is_found_again_and_the_rest_is_free(arena: Arena, directory: Path) -> None:
    put(arena, "a/b", b"x" * 10_000)
    put(arena, "empty", b"")
    put(arena, "gone", b"z")
    arena.drop("gone")
    arena.reserve(50_000).payload[:3] = b"abc"
    arena.close()
    with Arena.open(directory, run="run", create=False) as again:
        assert again.keys() == ("a/b", "empty")
        assert get(again, "a/b") == b"x" * 10_000
        assert get(again, "empty") == b""
        assert get(again, "gone") is None
        total = again.used_bytes + again.free_bytes
        assert total == sum(len(each) for name, each in state_of(directory).items() if name[0] in "os")
        again.reserve(50_000)
        assert again.used_bytes + again.free_bytes == total  # the dead owner's reservation, used again


def test_arena_of_another_run_is_refused_and_untouched(arena: Arena, directory: Path) -> None:
    put(arena, "k", b"x")
    arena.close()
    before = state_of(directory)
    with pytest.raises(UsageError, match=r"'run'.*'other'"):
        Arena.open(directory, run="other")
    assert state_of(directory) == before


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"format": 1, "run": "run"}', b"[" * 100_000, b"\x80\x04."],
)
def test_damaged_record_is_refused_and_untouched(arena: Arena, directory: Path, record: bytes) -> None:
    put(arena, "k", b"x")
    arena.close()
    (directory / "arena.json").write_bytes(record)
    before = state_of(directory)
    for opening in (lambda: Arena.open(directory, run="run"), lambda: Arena.inspect(directory)):
        with pytest.raises(FormatError, match=r"arena\.json"):
            opening()
    assert state_of(directory) == before


def test_record_of_a_newer_format_names_both_versions(arena: Arena, directory: Path) -> None:
    arena.close()
    record = json.loads((directory / "arena.json").read_bytes())
    (directory / "arena.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(FormatError, match=r"format 2.*format 1"):
        Arena.open(directory, run="run")


def test_objects_without_a_record_are_refused(arena: Arena, directory: Path) -> None:
    put(arena, "k", b"x")
    arena.close()
    (directory / "arena.json").unlink()
    before = state_of(directory)
    with pytest.raises(FormatError, match=r"arena\.json"):
        Arena.open(directory, run="run")
    assert state_of(directory) == before


def test_what_is_not_there_is_not_made(directory: Path) -> None:
    for opening in (lambda: Arena.open(directory, run="run", create=False), lambda: Arena.inspect(directory)):
        with pytest.raises(MissingObjectError):
            opening()
    assert not directory.exists()


def test_directory_that_others_may_write_is_refused(memory_directory: Path) -> None:
    shared = memory_directory / "shared"
    shared.mkdir()
    (shared / "somebody's").write_bytes(b"")
    shared.chmod(0o777)
    with pytest.raises(PermanentStoreError, match="other users"):
        Arena.open(shared, run="run")
    assert [path.name for path in shared.iterdir()] == ["somebody's"]
    assert shared.stat().st_mode & 0o777 == 0o777


def test_directory_of_somebody_else_is_refused(
    memory_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermanentStoreError, match="belongs to user"):
        Arena.open(memory_directory, run="run")


def test_file_in_the_place_of_the_directory(memory_directory: Path) -> None:
    (memory_directory / "file").write_bytes(b"")
    for place in ("file", "file/below"):
        with pytest.raises(PermanentStoreError):
            Arena.open(memory_directory / place, run="run")


def test_run_name_that_no_header_holds_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="run name"):
        Arena.open(directory, run="r" * 2000)
    assert not directory.exists()


def test_damaged_object_is_not_served(arena: Arena, directory: Path) -> None:
    path = Path(put(arena, "k", b"x" * 100).path)
    put(arena, "l", b"y")
    arena.close()
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(content)
    (directory / "object-with-a-wrong-name").write_bytes(Path(path).read_bytes())
    (directory / "notes.txt").write_bytes(b"a person's")
    with Arena.open(directory, run="run") as again:
        assert again.keys() == ("l",)
        assert again.free_bytes > 0
    assert (directory / "notes.txt").read_bytes() == b"a person's"


# -- reserve, publish, drop -----------------------------------------------------------------------


def test_region_is_aligned_and_large_enough(arena: Arena) -> None:
    for size_bytes in (0, 1, 4096, 4097, 65_537, 1_000_000):
        region = arena.reserve(size_bytes)
        assert len(region.payload) == region.size_bytes >= size_bytes
        assert not region.payload.readonly
        assert np.frombuffer(region.payload, np.uint8).ctypes.data % 4096 == 0
        assert os.stat(region.path).st_size == PAGE_BYTES + region.size_bytes
        assert os.stat(region.path).st_blocks * 512 >= region.size_bytes


def test_at_most_an_eighth_is_wasted() -> None:
    for size_bytes in [*range(64 << 10, 1 << 20, 997), 10**9, 2**31, 2**40 + 1]:
        assert size_bytes <= capacity_for(size_bytes) <= size_bytes * 1.125 + PAGE_BYTES


def test_dropped_file_is_used_again(arena: Arena) -> None:
    first = put(arena, "k", b"x" * 100_000)
    assert arena.drop("k")
    assert not arena.drop("k")
    assert get(arena, "k") is None
    assert arena.reserve(95_000) is first
    assert Path(first.path).read_bytes()[:PAGE_BYTES] == BLANK


def test_small_reservation_does_not_take_a_large_free_file(arena: Arena) -> None:
    put(arena, "base", b"x" * 1_000_000)
    arena.drop("base")
    assert arena.reserve(100).size_bytes == PAGE_BYTES
    assert arena.free_bytes > 1_000_000


def test_smaller_free_files_make_room_for_a_larger_one(arena: Arena) -> None:
    for at in range(5):
        put(arena, f"k{at}", b"x" * 100_000)
    for at in range(5):
        arena.drop(f"k{at}")
    total = arena.free_bytes
    arena.reserve(400_000)
    assert arena.free_bytes + arena.used_bytes <= total + 100_000


def test_trim_keeps_what_it_is_told(arena: Arena, directory: Path) -> None:
    for at in range(4):
        put(arena, f"k{at}", b"x" * 100_000)
    for at in range(3):
        arena.drop(f"k{at}")
    free = arena.free_bytes
    assert arena.trim(free // 2) > 0
    assert 0 < arena.free_bytes <= free // 2
    arena.trim()
    assert arena.free_bytes == 0
    assert get(arena, "k3") == b"x" * 100_000
    assert len([name for name in state_of(directory) if name.startswith("space-")]) == 0


def test_view_of_a_replaced_object_stays_whole(arena: Arena) -> None:
    view = put(arena, "k", b"old" * 1000).contents
    put(arena, "k", b"new" * 1000)
    arena.reserve(3000).payload[:] = bytes(PAGE_BYTES)
    assert bytes(view) == b"old" * 1000


def test_misuse_is_refused(arena: Arena, memory_directory: Path) -> None:
    region = arena.reserve(100)
    with pytest.raises(UsageError):
        arena.reserve(-1)
    with pytest.raises(UsageError):
        arena.publish(region, "k", region.size_bytes + 1)
    with pytest.raises(PermanentStoreError):
        arena.publish(region, "../k", 1)
    with pytest.raises(UsageError, match="nothing is published"):
        _ = region.contents
    with Arena.open(memory_directory / "other", run="run") as other, pytest.raises(UsageError):
        other.publish(region, "k", 1)
    arena.publish(region, "k", 1)
    for again in (
        lambda: arena.publish(region, "l", 1),
        lambda: arena.recycle(region),
        lambda: region.payload,
    ):
        with pytest.raises(UsageError):
            again()
    with pytest.raises(ObjectExistsError):
        put(arena, "k", b"x", replace=False)
    arena.close()
    for closed in (lambda: arena.reserve(1), lambda: arena.find("k"), arena.keys, arena.remove):
        with pytest.raises(UsageError, match="closed"):
            closed()


def test_more_objects_than_files_may_be_open(arena: Arena) -> None:
    for at in range(400):
        put(arena, f"k{at}", str(at).encode())
    assert len(os.listdir("/proc/self/fd")) < 400
    assert all(get(arena, f"k{at}") == str(at).encode() for at in range(400))


def test_older_kernel_without_populate(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_MADV_POPULATE_WRITE", 9999)
    put(arena, "k", b"x" * 100_000)
    assert get(arena, "k") == b"x" * 100_000


def test_remove_takes_only_what_is_ours(arena: Arena, directory: Path) -> None:
    put(arena, "k", b"x")
    arena.reserve(10)
    (directory / "notes.txt").write_bytes(b"a person's")
    arena.remove()
    assert list(state_of(directory)) == ["notes.txt"]
    with Arena.open(directory, run="another") as again:
        assert again.keys() == ()
        (directory / "notes.txt").unlink()
        again.remove()
    assert not directory.exists()


def test_use_in_a_forked_child_raises_and_harms_nothing(arena: Arena, directory: Path) -> None:
    put(arena, "k", b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
        child = os.fork()
    if child == 0:
        code = 1
        try:
            arena.close()
            try:
                arena.reserve(1)
            except UsageError:
                code = 0 if get(Arena.inspect(directory), "k") == b"x" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert get(arena, "k") == b"x"


# -- inspecting -----------------------------------------------------------------------------------


def test_inspecting_writes_nothing(arena: Arena, directory: Path) -> None:
    put(arena, "a/b", b"x" * 5000)
    before = state_of(directory)
    reader = Arena.inspect(directory)
    assert reader.run == "run"
    assert reader.keys() == ("a/b",)
    region = reader.find("a/b")
    assert region is not None
    assert region.header is not None
    assert bytes(region.contents) == b"x" * 5000
    assert reader.unchanged(region.header)
    for write in (
        lambda: reader.reserve(1),
        lambda: reader.drop("a/b"),
        reader.remove,
        reader.trim,
        lambda: reader.check_room(1),
    ):
        with pytest.raises(UsageError, match="only reads"):
            write()
    assert state_of(directory) == before
    put(arena, "a/b", b"x" * 5000)  # the same bytes, published again: another object
    assert not reader.unchanged(region.header)


def test_reader_that_ends_does_not_take_the_memory_along(arena: Arena, directory: Path) -> None:
    # Symptom: the resource tracker of a reader unlinks a segment others still use.
    import sys

    put(arena, "k", b"x")
    script = (
        "import sys; from stepwell.stores.arena import Arena\n"
        "print(bytes(Arena.inspect(sys.argv[1]).find('k').contents))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)], capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"b'x'\n"
    assert get(arena, "k") == b"x"


# -- no space -------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)


@pytest.mark.usefixtures("full")
def test_full_tier_says_what_is_needed_and_leaves_nothing(arena: Arena, directory: Path) -> None:
    needed = PAGE_BYTES + capacity_for(100_000)
    with pytest.raises(NoSpaceError, match=f"needs {needed} bytes") as caught:
        arena.reserve(100_000)
    assert str(directory) in str(caught.value)
    assert sorted(state_of(directory)) == ["arena.json", "lock"]


def test_full_tier_gives_what_is_free(arena: Arena, request: pytest.FixtureRequest) -> None:
    put(arena, "large", b"x" * 1_000_000)
    put(arena, "small", b"x")
    arena.drop("large")
    request.getfixturevalue("full")
    assert arena.reserve(10_000).size_bytes >= 1_000_000
    with pytest.raises(NoSpaceError):
        arena.reserve(10_000)
    assert get(arena, "small") == b"x"


def test_too_small_tier_is_known_before_anything_is_reserved(arena: Arena) -> None:
    arena.check_room(1 << 20)
    with pytest.raises(NoSpaceError, match=str(1 << 60)):
        arena.check_room(1 << 60)


@pytest.fixture
def tiny_tier(memory_directory: Path) -> Iterator[Path]:
    place = memory_directory / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a tmpfs of 1 MiB cannot be mounted here; the same with a patched call is tested above")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_real_full_tmpfs_is_an_error_and_no_bus_error(tiny_tier: Path) -> None:
    with Arena.open(tiny_tier / "arena", run="run") as arena:
        with pytest.raises(NoSpaceError):
            arena.check_room(2 << 20)
        with pytest.raises(NoSpaceError, match="needs"):
            arena.reserve(2 << 20)
        regions = [arena.reserve(100_000) for _ in range(7)]
        with pytest.raises(NoSpaceError):
            _ = [arena.reserve(100_000) for _ in range(100)]
        for region in regions:
            region.payload[:] = b"\xff" * region.size_bytes
        arena.recycle(regions.pop())
        put(arena, "k", b"goes on")
        assert get(arena, "k") == b"goes on"


def test_page_size_fits_the_header() -> None:
    assert PAGE_BYTES % mmap.PAGESIZE == 0 or mmap.PAGESIZE % PAGE_BYTES == 0
