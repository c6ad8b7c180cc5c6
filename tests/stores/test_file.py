from __future__ import annotations

import asyncio
import errno
import os
import pickle
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests

from stepwell.errors import (
    IntegrityError,
    LockedError,
    MissingObjectError,
    NoSpaceError,
    PermanentStoreError,
    TransientStoreError,
    UsageError,
)
from stepwell.stores.base import Failure, ObjectStore
from stepwell.stores.file import FileStore
from stepwell.stores.testing import StoreContract, fetched

WRITE_CALLS = (
    "writev",
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "ftruncate",
    "pwrite",
    "chmod",
)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "new" / "root")


class TestContract(StoreContract):
    async def stored(self, store: ObjectStore, key: str) -> bytes | None:
        assert isinstance(store, FileStore)
        path = store.root / key
        return path.read_bytes() if path.is_file() else None


class TestZarr(StoreTests[FileStore, cpu.Buffer]):
    store_cls = FileStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, object]:
        return {"root": str(tmp_path / "root")}

    @pytest.fixture
    async def store(self, open_kwargs: dict[str, Any]) -> FileStore:
        return await FileStore.open(**open_kwargs)

    async def set(self, store: FileStore, key: str, value: Buffer) -> None:
        path = store.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.to_bytes())

    async def get(self, store: FileStore, key: str) -> Buffer:
        return cpu.Buffer.from_bytes((store.root / key).read_bytes())

    def test_store_repr(self, store: FileStore) -> None:
        assert repr(store) == f"FileStore({str(store.root)!r}, read_only=False)"

    def test_store_supports_writes(self, store: FileStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: FileStore) -> None:
        assert store.supports_listing


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def fail(patch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def broken(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, call, broken)


def test_promises(store: FileStore) -> None:
    assert store.properties.survives is Failure.EVERYTHING
    assert store.properties.needs_commit_record


@pytest.mark.parametrize(
    "text", ["s3://bucket/x", "https://x/y", "", "a\0b", "file://host/x", "file:relative"]
)
def test_what_is_no_directory_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        FileStore(text)


async def test_url_opens_the_same_directory(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "with space é")
    await store.put("k", [b"x"])
    again = FileStore(store.url)
    assert again == store
    assert await fetched(again, "k") == b"x"
    assert pickle.loads(pickle.dumps(again)) == store


async def test_another_process_commits_and_an_open_store_sees_it(store: FileStore) -> None:
    # Symptom: listing cache out of date, existing object not seen.
    await store.put("a/k", [b"x"])
    assert [key async for key in store.list_prefix("a/")] == ["a/k"]
    (store.root / "a" / "new").write_bytes(b"y")
    assert sorted([key async for key in store.list_prefix("a/")]) == ["a/k", "a/new"]
    assert await fetched(store, "a/new") == b"y"


async def test_leftover_temporary_files_are_invisible_and_swept(store: FileStore) -> None:
    # Symptom: job preempted after the temporary write, before the rename; it was taken for the newest.
    await store.put("inc/step/8/commit.json", [b"8"])
    leftover = store.root / "inc" / "step" / "9" / ".stepwell-tmp-0123"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half of 9")
    foreign = store.root / "inc" / ".other-tmp"
    foreign.write_bytes(b"not ours")
    assert [key async for key in store.list_prefix("inc/step/")] == ["inc/step/8/commit.json"]
    assert await store.sweep_temps() == ("inc/step/9/.stepwell-tmp-0123",)
    assert files_below(store.root) == ["inc/.other-tmp", "inc/step/8/commit.json"]
    assert not leftover.parent.exists()
    assert await store.sweep_temps() == ()


async def test_sweep_leaves_the_files_of_living_writers(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    swept: list[tuple[str, ...]] = []
    real = os.fsync

    def sweep_in_the_middle(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            swept.append(
                asyncio.run_coroutine_threadsafe(FileStore(store.root).sweep_temps(), loop).result(30)
            )
        real(fd)

    monkeypatch.setattr(os, "fsync", sweep_in_the_middle)
    await store.put("k", [b"x"])
    await store.put_batch([("l", [b"y"]), ("m", [b"z"])])
    assert swept == [(), (), ()]
    assert await fetched(store, "k") == b"x"


async def test_copied_checkpoint_is_whole_and_never_taken_for_temporary(
    store: FileStore, tmp_path: Path
) -> None:
    # Symptom: a copied checkpoint lacked the success mark and was cleaned as temporary.
    await store.put_batch([("inc/step/1/pack", [b"p"]), ("inc/step/1/commit.json", [b"c"])])
    shutil.copytree(store.root, tmp_path / "copy")
    copy = FileStore(tmp_path / "copy")
    assert await copy.sweep_temps() == ()
    assert sorted([key async for key in copy.list()]) == ["inc/step/1/commit.json", "inc/step/1/pack"]


@pytest.mark.parametrize("call", ["open", "writev", "fsync", "rename"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, PermanentStoreError),
        (errno.EROFS, PermanentStoreError),
        (errno.EIO, TransientStoreError),
        (errno.ETIMEDOUT, TransientStoreError),
    ],
)
async def test_failure_at_each_call_keeps_the_old_object(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[Exception]
) -> None:
    # Symptoms: disk full at the last save ended the run; PermissionError reported as success.
    await store.put("a/k", [b"old"])
    for write in (
        lambda: store.put("a/k", [b"n" * 4321]),
        lambda: store.put_batch([("a/k", [b"n" * 4321]), ("a/l", [b"n"])]),
    ):
        with monkeypatch.context() as patch:
            fail(patch, call, number)
            with pytest.raises(kind, match=r"a/[kl]") as caught:
                await write()
        assert type(caught.value) is kind
        assert store.url in str(caught.value)
        assert files_below(store.root) == ["a/k"]
        assert await fetched(store, "a/k") == b"old"
    await store.put("a/k", [b"new"])  # once there is room again
    assert await fetched(store, "a/k") == b"new"


async def test_disk_full_says_how_many_bytes(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "writev", errno.ENOSPC)
    with pytest.raises(NoSpaceError, match="4321 bytes") as caught:
        await store.put("k", [b"n" * 4000, b"m" * 321])
    assert str(store.root) in str(caught.value)


async def test_last_fsync_of_the_directory_is_not_optional(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def broken(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "directory lost")
        real(fd)

    await store.put("a/b", [b"x"])
    monkeypatch.setattr(os, "fsync", broken)
    for write in (store.put("a/k", [b"x"]), store.create("a/l", [b"x"]), store.put_batch([("a/m", [b"x"])])):
        with pytest.raises(TransientStoreError):
            await write


async def test_order_of_durability(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    real_fsync, real_rename, real_link, real_writev = os.fsync, os.rename, os.link, os.writev

    def fsync(fd: int) -> None:
        log.append("sync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        real_fsync(fd)

    def writev(fd: int, parts: Any) -> int:
        log.append("write")
        return real_writev(fd, parts)

    def rename(source: str, target: str) -> None:
        log.append("rename")
        real_rename(source, target)

    def link(source: str, target: str) -> None:
        log.append("link")
        real_link(source, target)

    await store.put("a/first", [b"x"])  # from here on the directories are known
    for name, call in {"fsync": fsync, "writev": writev, "rename": rename, "link": link}.items():
        monkeypatch.setattr(os, name, call)
    await store.put("a/k", [b"x"])
    assert log == ["write", "sync file", "rename", "sync directory"]
    log.clear()
    await store.create("a/l", [b"x"])
    assert log == ["write", "sync file", "link", "sync directory"]
    log.clear()
    await store.put_batch((f"a/{at}", [b"x"]) for at in range(5))
    assert log == ["write"] * 5 + ["sync file"] * 5 + ["rename"] * 5 + ["sync directory"]
    log.clear()
    await store.put("a/b/c/k", [b"x"])  # two new directories: their names too
    assert log == ["write", "sync file", "rename"] + ["sync directory"] * 3


async def test_short_writes_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def short(fd: int, parts: Any) -> int:
        first = next(part for part in parts if part.nbytes)
        return real(fd, [first[:3]])

    monkeypatch.setattr(os, "writev", short)
    await store.put("k", [b"0123456789", b"ab", b"cdef"])
    assert await fetched(store, "k") == b"0123456789abcdef"


async def test_short_reads_are_continued_and_a_cut_is_found(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("k", [b"0123456789"])
    real = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:3]], at))
        assert await fetched(store, "k", 1, 8) == b"12345678"
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, at: 0)
        with pytest.raises(IntegrityError, match="cut short"):
            await store.fetch("k")


async def test_create_whose_answer_was_lost_knows_its_own_work(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def repeated(source: str, target: str) -> None:
        real(source, target)
        real(source, target)  # as a network file system does: "it exists"

    monkeypatch.setattr(os, "link", repeated)
    await store.create("k", [b"x"])
    assert files_below(store.root) == ["k"]


async def test_read_only_tree_is_read_without_a_write_a_lock_or_a_directory(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Symptom: check needs to write a lock on a read-only mount.
    await store.put_batch([("a/k", [b"x"]), ("b", [b"y"])])
    real_open = os.open

    def only_reading(path: str, flags: int, *args: Any, **options: Any) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC), f"{path} opened for writing"
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", only_reading)
    for call in WRITE_CALLS:
        fail(monkeypatch, call, errno.EROFS)
    reader = FileStore(store.root, read_only=True)
    assert sorted([key async for key in reader.list()]) == ["a/k", "b"]
    assert [name async for name in reader.list_dir("a")] == ["k"]
    assert await fetched(reader, "a/k") == b"x"
    assert await reader.exists("b")
    assert await reader.getsize("b") == 1
    for refused in (reader.put("k", [b""]), reader.sweep_temps(), reader.delete("b")):
        with pytest.raises(PermanentStoreError, match="read-only"):
            await refused
    with pytest.raises(PermanentStoreError, match="read-only"):
        reader.lock("run")
    absent = FileStore(tmp_path / "absent", read_only=True)
    assert [key async for key in absent.list()] == []
    assert not await absent.exists("k")
    assert not absent.root.exists()


async def test_directory_in_the_place_of_an_object_and_the_other_way_round(store: FileStore) -> None:
    await store.put("a/b", [b"x"])
    with pytest.raises(PermanentStoreError):
        await store.put("a", [b"y"])
    with pytest.raises(PermanentStoreError):
        await store.put("a/b/c", [b"y"])
    await store.delete("a")
    assert files_below(store.root) == ["a/b"]


async def test_pipe_in_the_place_of_an_object_does_not_hang(store: FileStore) -> None:
    await store.put("k", [b"x"])
    os.mkfifo(store.root / "pipe")
    with pytest.raises(MissingObjectError):
        await store.fetch("pipe")
    assert [key async for key in store.list()] == ["k"]


async def test_circle_of_symbolic_links_ends(store: FileStore) -> None:
    await store.put("a/k", [b"x"])
    (store.root / "a" / "up").symlink_to(store.root)
    assert [key async for key in store.list()] == ["a/k"]


async def test_deleting_leaves_no_empty_directories_and_writing_beside_it_works(store: FileStore) -> None:
    async def write(name: str) -> None:
        for at in range(15):
            await store.put(f"shared/deep/{name}", [bytes([at])])
            await store.delete(f"shared/deep/{name}")

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(_with_retry(write, name))
    assert list(store.root.iterdir()) == []


async def _with_retry(write: Any, name: str) -> None:
    # A neighbour may take the directory away just between rename and fsync: transient, and said so.
    for _ in range(50):
        try:
            await write(name)
        except TransientStoreError:
            continue
        return
    raise AssertionError("never got through")


async def test_more_objects_than_files_may_be_open(store: FileStore) -> None:
    await store.put_batch((f"many/{at % 10}/{at}", [b"x"]) for at in range(600))
    assert len([key async for key in store.list()]) == 600
    await store.delete_dir("many")
    assert files_below(store.root) == []


async def test_batch_with_a_key_twice_is_refused(store: FileStore) -> None:
    with pytest.raises(UsageError, match="twice"):
        await store.put_batch([("k", [b"a"]), ("k", [b"b"])])
    assert not store.root.exists()


def test_lock_is_for_one(store: FileStore) -> None:
    with store.lock("run"):
        with pytest.raises(LockedError, match=str(os.getpid())):
            FileStore(store.root).lock("run").acquire()
        with store.lock("other"):
            pass
    with store.lock("run"):
        assert asyncio.run(_keys(store)) == []
    with pytest.raises(PermanentStoreError):
        store.lock("../run")
    with pytest.raises(PermanentStoreError):
        store.lock("a/b")


async def _keys(store: FileStore) -> list[str]:
    return [key async for key in store.list()]


def test_use_in_a_forked_child_raises_at_once(store: FileStore) -> None:
    # Symptom: hangs under forked process pools.
    asyncio.run(store.put("k", [b"x"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
        child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(store.put("k", [b"y"]))
        except UsageError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(fetched(store, "k")) == b"x"
