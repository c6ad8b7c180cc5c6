"""The blocking side of a file store: what happens in its threads."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from stepwell.errors import (
    IntegrityError,
    MissingObjectError,
    ObjectExistsError,
    PermanentStoreError,
    UsageError,
)
from stepwell.stores.base import BytesLike
from stepwell.stores.durable import (
    TEMP_PREFIX,
    DirectorySync,
    Temporary,
    make_directories,
    prune,
    remove_leftover,
    write_temporary,
)
from stepwell.stores.keys import check_key
from stepwell.stores.oserrors import store_error
from stepwell.stores.parts import flat_views

__all__ = ["FileTree", "directory_of"]

_READ_BYTES_MAX = 1 << 30  # Linux reads at most 0x7ffff000 bytes in one call


class FileTree:
    """Objects as files below `root`; every method may block.

    Attributes
    ----------
    root : str
    names : DirectorySync
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.url = Path(root).as_uri()
        self.names = DirectorySync(root)

    def path(self, key: str) -> str:
        """Return the file of an object."""
        return os.path.join(self.root, check_key(key))

    def directory(self, key: str) -> str:
        """Return the directory of an object."""
        return os.path.dirname(self.path(key))

    def make_root(self) -> None:
        """Make the directory itself."""
        with self.errors(f"make {self.root!r}"):
            make_directories(self.root, self.root)

    # -- writing ------------------------------------------------------------------------------

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object, durably."""
        temporary = self.write(key, parts)
        self.finish(key, temporary, temporary.rename)
        self._sync_name(key)

    def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object whose key is absent, durably."""
        if os.path.lexists(self.path(key)):  # only saves the write: the link decides
            raise self._exists_already(key)
        temporary = self.write(key, parts)
        self.finish(key, temporary, temporary.link)
        self._sync_name(key)

    def write(self, key: str, parts: Sequence[BytesLike]) -> Temporary:
        """Write the bytes of an object, not yet durable, not yet under its name."""
        views, size_bytes = flat_views(key, parts)
        with self.errors(f"put {key!r}", size_bytes):
            return write_temporary(self.root, self.directory(key), views)

    def finish(self, key: str, temporary: Temporary, name: Callable[[str], None] | None = None) -> None:
        """Make the bytes durable, then give them their name if `name` is there to do it."""
        try:
            with self.errors(f"put {key!r}"):
                temporary.sync()
                if name is not None:
                    name(self.path(key))
        except ObjectExistsError as error:
            raise self._exists_already(key) from error
        finally:
            if name is not None:
                temporary.discard()

    def rename_all(self, items: Sequence[tuple[str, Temporary]]) -> None:
        """Give durable files their names, in order."""
        for key, temporary in items:
            with self.errors(f"put {key!r}"):
                temporary.rename(self.path(key))

    def _sync_name(self, key: str) -> None:
        with self.errors(f"make the name of {key!r} durable"):
            self.names.sync([self.directory(key)])

    # -- removing -----------------------------------------------------------------------------

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, and directories that are empty then, durably."""
        directories: set[str] = set()
        for key in keys:
            path = self.path(key)
            with self.errors(f"delete {key!r}"):
                try:
                    os.unlink(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    if not os.path.isdir(path):
                        raise
                    continue  # a directory is no object
            directories.add(os.path.dirname(path))
        with self.errors("delete objects"):
            left: set[str] = set()
            for directory in directories:
                stays, removed = prune(self.root, directory)
                self.names.forget(removed)
                left.add(stays)
            # One may be gone by now: removed as the parent of another, or by another process.
            self.names.sync(directory for directory in left if os.path.isdir(directory))

    def remove_below(self, prefix: str) -> None:
        """Remove every object whose key starts with `prefix`, which is empty or ends with ``/``."""
        stack, keys = [prefix], []
        while stack:
            top = stack.pop()
            objects, directories, _ = self.scan(top.removesuffix("/"))
            keys += [top + name for name in objects]
            stack += [f"{top}{name}/" for name in directories]
        self.remove(keys)

    def sweep(self, directory: str, names: Sequence[str]) -> list[str]:
        """Remove temporary files whose writers died; return their paths relative to the root."""
        where = os.path.join(self.root, directory)
        with self.errors("remove temporary files"):
            gone = [name for name in names if remove_leftover(os.path.join(where, name))]
            if gone:
                self.names.forget(prune(self.root, where.rstrip("/"))[1])
        return [os.path.join(directory, name) for name in gone]

    # -- reading ------------------------------------------------------------------------------

    def fetch(self, key: str, start: int, length: int | None) -> memoryview:
        """Read a range into fresh memory.

        Not mapped: a mapped file that somebody cuts short kills the process with SIGBUS.
        """
        with self._opened(key) as fd:
            size_bytes = os.fstat(fd).st_size
            end = size_bytes if length is None else start + length
            # Checked before the memory is asked for: the request may come from a damaged manifest.
            if start > size_bytes or end > size_bytes:
                raise self._too_short(key, size_bytes, max(start, end))
            buffer = np.empty(end - start, np.uint8).data
            done = 0
            while done < buffer.nbytes:
                with self.errors(f"fetch {key!r}"):
                    count = os.preadv(fd, [buffer[done : done + _READ_BYTES_MAX]], start + done)
                if count == 0:
                    raise self._too_short(key, start + done, end)  # cut short while we read
                done += count
        return buffer.toreadonly()

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        with self.errors(f"fetch {key!r}"):
            try:
                # O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
                fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self.missing(key) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self.missing(key)
            yield fd
        finally:
            os.close(fd)

    def size(self, key: str) -> int | None:
        """Return the length of an object in bytes, None if there is none."""
        with self.errors(f"look for {key!r}"):
            try:
                status = os.stat(self.path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def scan(self, directory: str) -> tuple[list[str], list[str], list[str]]:
        """Return the names in a directory: of objects, of directories, of temporary files."""
        with self.errors(f"list {directory!r}"):
            try:
                with os.scandir(os.path.join(self.root, directory)) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                return [], [], []
        temporaries = [entry.name for entry in entries if entry.name.startswith(TEMP_PREFIX)]
        named = [entry for entry in entries if _is_key_segment(entry.name)]
        objects = [entry.name for entry in named if entry.is_file()]
        # Directories behind symbolic links are not followed: they may lead in circles.
        directories = [entry.name for entry in named if entry.is_dir(follow_symlinks=False)]
        return objects, directories, temporaries

    # -- errors -------------------------------------------------------------------------------

    @contextmanager
    def errors(self, what: str, size_bytes: int | None = None) -> Iterator[None]:
        """Translate errors of the operating system."""
        try:
            yield
        except MissingObjectError:
            raise
        except FileExistsError as error:
            raise ObjectExistsError(f"cannot {what} in {self.url}: it is there already") from error
        except OSError as error:
            raise store_error(error, what, where=self.url, size_bytes=size_bytes) from error

    def missing(self, key: str) -> MissingObjectError:
        """Say that there is no such object."""
        return MissingObjectError(f"there is no object {key!r} in {self.url}")

    def _exists_already(self, key: str) -> ObjectExistsError:
        return ObjectExistsError(f"{key!r} is there already in {self.url}; another writer was first")

    def _too_short(self, key: str, size_bytes: int, end: int) -> IntegrityError:
        return IntegrityError(
            f"{key!r} in {self.url} has {size_bytes} bytes, {end} were expected; it was cut short or is "
            f"not the object that was described"
        )


def _is_key_segment(name: str) -> bool:
    """Say whether a file name can be part of a key; others are not ours and cannot be asked for."""
    try:
        check_key(name)
    except PermanentStoreError:
        return False
    return True


def directory_of(root: Path | str) -> str:
    """Return an absolute path from a path or a ``file:`` URL."""
    text = os.fspath(root)
    if isinstance(text, str) and re.match(r"(?i)file:", text):
        url = urlsplit(text)
        if url.netloc not in {"", "localhost"} or not url.path.startswith("/"):
            raise UsageError(f"{text!r} must be file:///absolute/path")
        text = unquote(url.path)
    elif isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise UsageError(f"{text!r} is no directory: this store takes a path or a file: URL")
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{root!r} is no directory name")
    return os.path.abspath(text)
