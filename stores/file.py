"""A directory as a store: atomic, durable objects in plain files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path

from stepwell.errors import PermanentStoreError, UsageError
from stepwell.stores.base import BytesLike, Failure, StoreProperties, WriteItem
from stepwell.stores.durable import Temporary
from stepwell.stores.file_tree import FileTree, directory_of
from stepwell.stores.keys import OWN_PREFIX, check_directory, check_key, check_prefix
from stepwell.stores.lock import FileLock
from stepwell.stores.parts import flat_views
from stepwell.stores.threads import Workers
from stepwell.stores.zarr_face import ZarrFace

__all__ = ["FileStore"]

# Each has one write on its way; with writes of 2 MiB past the page cache the disk needs no more, and
# every thread more takes turns at the interpreter with the training.
_THREAD_COUNT = 4

# Files of a batch that stay open until their late fsync; the rest, the smallest ones, are made
# durable at once. 1,024 descriptors are a common limit of a process, and others need some too.
_OPEN_FILES_MAX = 256


class FileStore(ZarrFace):
    """Objects as files below a directory.

    Parameters
    ----------
    root : Path or str
        A path, or a ``file:`` URL. Made with the first write.
    read_only : bool
        Never writes, locks or makes a directory.

    Notes
    -----
    An object is written under a temporary name ``.stepwell-tmp-*``, made durable, and renamed;
    then its directory is made durable. So a crash at any moment leaves the old object, none, or
    the new one, and perhaps a temporary file: never listed, removed by `sweep_temps`. A failing
    last fsync (of the directory) leaves the new object visible but not acknowledged.

    Nothing is cached: what another process commits is seen by the next call. Symbolic links to
    files are followed, directories behind symbolic links are not listed.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._tree = FileTree(directory_of(root))
        self._workers = Workers("stepwell-file", _THREAD_COUNT)

    @property
    def root(self) -> Path:
        """The directory."""
        return Path(self._tree.root)

    @property
    def properties(self) -> StoreProperties:
        """Survives what its disk survives; ``create`` is atomic by link(2), also over NFS."""
        return StoreProperties(
            survives=Failure.EVERYTHING, atomic_put=True, conditional_create=True, needs_commit_record=True
        )

    @property
    def url(self) -> str:
        """``file://`` and the path."""
        return self._tree.url

    def __repr__(self) -> str:
        return f"FileStore({self._tree.root!r}, read_only={self.read_only})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FileStore)
            and self._tree.root == other._tree.root
            and self.read_only == other.read_only
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._tree.root, self.read_only)

    def with_read_only(self, read_only: bool = False) -> FileStore:
        """Return another store on the same directory."""
        return FileStore(self._tree.root, read_only=read_only)

    def fall_behind(self) -> None:
        """Run the threads behind the training from now on; see ``ObjectStore.fall_behind``."""
        self._workers.fall_behind()

    def close(self) -> None:
        """Let the threads end."""
        self._workers.close()
        super().close()

    def lock(self, name: str) -> FileLock:
        """Return the lock `name` of this directory, not yet acquired: ``with store.lock("run"):``.

        Raises
        ------
        PermanentStoreError
            The store is read-only, or the name is no plain file name.
        """
        self._check_writable()
        self._workers.check_process()
        if "/" in check_key(name):
            raise PermanentStoreError(f"lock name {name!r} must not contain '/'")
        self._tree.make_root()
        return FileLock(os.path.join(self._tree.root, f"{OWN_PREFIX}lock-{name}"))

    # -- writing ------------------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object; see ``ObjectStore.put``."""
        await self._ready_to_write(key)
        await self._workers.run(partial(self._tree.put, key, parts))

    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object whose key is absent; see ``ObjectStore.create``."""
        await self._ready_to_write(key)
        await self._workers.run(partial(self._tree.create, key, parts))

    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Store many objects; see ``ObjectStore.put_batch``.

        All bytes are written before the first fsync, all fsyncs come before the first rename, and
        the directories last: the disk has the most to do at once. With more than 256 objects the
        smallest ones do not wait for that.

        Raises
        ------
        UsageError
            A key is there twice.
        """
        taken = [(key, *flat_views(key, parts)) for key, parts in items]
        for key, _, _ in taken:
            await self._ready_to_write(key)
        if len({key for key, _, _ in taken}) != len(taken):
            raise UsageError("a batch holds one key twice")
        tree, run_all = self._tree, self._workers.run_all
        late: dict[str, Temporary] = {}

        def write_late(key: str, views: Sequence[memoryview]) -> None:
            late[key] = tree.write(key, views)

        def write_at_once(key: str, views: Sequence[memoryview]) -> None:
            temporary = tree.write(key, views)
            tree.finish(key, temporary, temporary.rename)

        by_size = sorted(taken, key=lambda item: item[2], reverse=True)
        try:
            await run_all(partial(write_late, key, views) for key, views, _ in by_size[:_OPEN_FILES_MAX])
            await run_all(partial(write_at_once, key, views) for key, views, _ in by_size[_OPEN_FILES_MAX:])
            await run_all(partial(tree.finish, key, temporary) for key, temporary in late.items())
            in_order = [(key, late[key]) for key, _, _ in taken if key in late]
            await run_all([partial(tree.rename_all, in_order)])
        finally:
            # Only what an error or a cancellation left; blocking, but a few unlinks.
            for temporary in late.values():
                temporary.discard()
        await self._sync_names({tree.directory(key) for key, _, _ in taken})

    async def _sync_names(self, directories: Iterable[str]) -> None:
        with self._tree.errors("make names durable"):
            names = self._tree.names
            needed, fresh = await self._workers.run(partial(names.plan, directories))
            await self._workers.run_all(partial(names.sync_one, directory) for directory in needed)
            names.learn(fresh)

    # -- removing -----------------------------------------------------------------------------

    async def delete(self, key: str) -> None:
        """Remove an object, durably, and directories that are empty then; a missing key is no error."""
        await self._ready_to_write(key)
        await self._workers.run(partial(self._tree.remove, [key]))

    async def delete_dir(self, prefix: str) -> None:
        """Remove every object below `prefix`, or all for an empty one; other files stay."""
        self._check_writable()
        await self._ensure_open()
        await self._workers.run(partial(self._tree.remove_below, check_directory(prefix)))

    async def sweep_temps(self) -> tuple[str, ...]:
        """Remove what writers left that died; return the names removed, relative to the root.

        Only files with our own temporary names are touched, and none whose writer lives.
        """
        self._check_writable()
        await self._ensure_open()
        removed: list[str] = []
        async for directory, _, temporaries in self._walk(""):
            if temporaries:
                removed += await self._workers.run(partial(self._tree.sweep, directory, temporaries))
        return tuple(removed)

    # -- reading ------------------------------------------------------------------------------

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Read into fresh memory; see ``ObjectStore.fetch``."""
        await self._ensure_open()
        if start < 0 or (length is not None and length < 0):
            raise UsageError(f"cannot fetch {length} bytes from {start} of {key!r}")
        return await self._workers.run(partial(self._tree.fetch, check_key(key), start, length))

    async def exists(self, key: str) -> bool:
        """Say whether the key is there."""
        return await self._workers.run(partial(self._tree.size, check_key(key))) is not None

    async def getsize(self, key: str) -> int:
        """Return the length of an object in bytes."""
        size_bytes = await self._workers.run(partial(self._tree.size, check_key(key)))
        if size_bytes is None:
            raise self._tree.missing(key)
        return size_bytes

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with `prefix`."""
        async for directory, objects, _ in self._walk(check_prefix(prefix)):
            for name in objects:
                key = directory + name
                if key.startswith(prefix):
                    yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`, of objects and of directories."""
        objects, directories, _ = await self._workers.run(
            partial(self._tree.scan, check_directory(prefix).removesuffix("/"))
        )
        for name in sorted((*objects, *directories)):
            yield name

    async def _walk(self, prefix: str) -> AsyncIterator[tuple[str, list[str], list[str]]]:
        """Yield directories with their objects and temporary files, where `prefix` may lead to.

        A directory is given as what its keys start with: empty, or with a final ``/``.
        """
        stack = [prefix[: prefix.rfind("/") + 1]]
        while stack:
            top = stack.pop()
            objects, directories, temporaries = await self._workers.run(
                partial(self._tree.scan, top.removesuffix("/"))
            )
            yield top, objects, temporaries
            below = (f"{top}{name}/" for name in reversed(directories))
            stack += [path for path in below if path.startswith(prefix) or prefix.startswith(path)]


def _reopen(root: str, read_only: bool) -> FileStore:
    """Undo ``__reduce__``."""
    return FileStore(root, read_only=read_only)
