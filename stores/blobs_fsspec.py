"""Object storage through fsspec: every scheme that tensorstore does not speak.

Writing needs an atomic create-if-absent, which fsspec's interface offers everywhere and only some
services have; with the others two runs could commit over each other, so they are only read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from stepwell.errors import ConfigError, PermanentStoreError, StoreError, TransientStoreError, UsageError
from stepwell.stores.base import Failure
from stepwell.stores.blobs import Blob, Blobs
from stepwell.stores.condition import created_by_us
from stepwell.stores.oserrors import store_error
from stepwell.stores.threads import Workers

__all__ = ["FsspecBlobs"]

Result = TypeVar("Result")

CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Schemes whose ``mode="create"`` is a condition that the service itself checks."""

_THREAD_COUNT = 8  # for file systems without a coroutine interface, which are only read
_MODULES_OF_TIMEOUTS = ("aiohttp", "botocore", "azure", "requests", "urllib3")


class FsspecBlobs(Blobs):
    """Objects below a path of an fsspec file system.

    Parameters
    ----------
    url : str
        With its scheme, without a final ``/``.
    options : mapping
        For the file system. Credentials come from where it looks for them itself: the environment,
        the instance, or fsspec's own configuration.

    Raises
    ------
    ConfigError
        No file system for this scheme is installed.
    """

    def __init__(self, url: str, options: Mapping[str, object] | None = None) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._url = url
        self._pid = os.getpid()
        self._scheme = url.partition("://")[0]
        self._workers = Workers("stepwell-fsspec", _THREAD_COUNT)
        try:
            self._files: Any = fsspec.filesystem(self._scheme, use_listings_cache=False, **(options or {}))
        except ImportError as error:
            raise ConfigError(
                f"{url}: {error}; for s3, gs and abfs: pip install 'stepwell[remote]'"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{url}: there is no store for {self._scheme}: ({error})") from error
        self._root = str(self._files._strip_protocol(url)).rstrip("/")

    @property
    def url(self) -> str:
        """As given."""
        return self._url

    @property
    def survives(self) -> Failure:
        """Everything: what lies on another machine."""
        return Failure.EVERYTHING

    @property
    def unconditional(self) -> str | None:
        """Why objects cannot be created safely here, where that is so."""
        if self._scheme in CONDITIONAL and self._files.async_impl:
            return None
        return (
            f"{self._scheme}: has no atomic create-if-absent, so two runs could commit over each other; "
            "use s3, gs, abfs or a directory tier (it can still be read)"
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    async def _call(self, name: str, *args: object, **options: object) -> Any:
        """Call a method of the file system, on its own loop or in a thread."""
        if os.getpid() != self._pid:
            raise UsageError(f"{self._url} was opened by process {self._pid}, not by its forked child")
        if not self._files.async_impl:
            return await self._workers.run(partial(getattr(self._files, name), *args, **options))
        # The file system's sessions belong to fsspec's loop, which runs in a thread of its own.
        work = getattr(self._files, f"_{name}")(*args, **options)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._files.loop))

    async def _tried(self, what: str, call: Callable[[], Awaitable[Result]], absent: Result) -> Result:
        """Run a call; a missing object gives `absent`, other errors say how to react."""
        try:
            return await call()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return absent
        except StoreError:
            raise
        except Exception as error:
            raise self._meaning(error, what) from error

    async def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read a range; see ``Blobs.read``."""

        async def read() -> bytes | None:
            info = await self._call("info", self._path(key))
            if info["type"] != "file":
                return None
            # Asked first: what these file systems do about a range beyond the end differs.
            size_bytes = int(info["size"])
            low, high = min(start, size_bytes), size_bytes if stop is None else min(stop, size_bytes)
            if low >= high:
                return b""
            return bytes(await self._call("cat_file", self._path(key), start=low, end=high))

        return await self._tried(f"read {key!r}", read, None)

    async def size(self, key: str) -> int | None:
        """Return the length of an object."""

        async def size() -> int | None:
            info = await self._call("info", self._path(key))
            return int(info["size"]) if info["type"] == "file" else None

        return await self._tried(f"ask for the size of {key!r}", size, None)

    async def write(self, key: str, data: Blob) -> None:
        """Write an object."""
        self._check_conditional()
        await self._pipe(key, data, mode="overwrite")

    async def create(self, key: str, data: Blob) -> bool:
        """Write with the condition that the key is absent."""
        self._check_conditional()
        if await self.size(key) is not None:
            return False
        return await self._pipe(key, data, mode="create") or await created_by_us(self, key, data)

    async def keeps_conditions(self, key: str) -> bool:
        """Create an object twice without looking first; see ``Blobs.keeps_conditions``."""
        self._check_conditional()
        probe = f"{key}{secrets.token_hex(8)}"
        created = [await self._pipe(probe, np.full(1, at, np.uint8), mode="create") for at in range(2)]
        await self.delete(probe)
        return sum(created) <= 1

    async def _pipe(self, key: str, data: Blob, *, mode: str) -> bool:
        async def pipe() -> bool:
            try:
                # An HTTP client wants bytes; this copies.
                await self._call("pipe_file", self._path(key), data.tobytes(), mode=mode)
            except FileExistsError:
                return False
            return True

        what = f"{'create' if mode == 'create' else 'put'} {key!r} of {data.nbytes} bytes"
        try:
            return await pipe()
        except FileNotFoundError as error:
            raise PermanentStoreError(f"cannot {what} in {self._url}: there is no such bucket") from error
        except StoreError:
            raise
        except Exception as error:
            if mode == "create" and _is_failed_condition(error):
                return False
            raise self._meaning(error, what) from error

    def _check_conditional(self) -> None:
        if self.unconditional is not None:
            raise PermanentStoreError(f"{self._url}: {self.unconditional}")

    async def delete(self, key: str) -> None:
        """Remove an object."""

        async def delete() -> None:
            await self._call("rm_file", self._path(key))

        await self._tried(f"delete {key!r}", delete, None)

    async def list(self, prefix: str) -> list[str]:
        """List the keys with a prefix."""
        directory = prefix.rpartition("/")[0]

        async def find() -> list[str]:
            found = await self._call("find", self._path(directory))
            cut = len(self._root) + 1
            return [str(path)[cut:] for path in found]

        nothing: list[str] = []
        keys = await self._tried(f"list {prefix!r}", find, nothing)
        return [key for key in keys if key.startswith(prefix)]

    def close(self) -> None:
        """Let the threads end; sessions end with the file system."""
        self._workers.close()

    def _meaning(self, error: Exception, what: str) -> StoreError:
        """Say how to react to an error of a file system."""
        text = f"cannot {what} in {self._url}: {type(error).__name__}: {error}"
        if isinstance(error, PermissionError):
            return PermanentStoreError(f"{text}; check the credentials and the permissions of the bucket")
        module = type(error).__module__.partition(".")[0]
        if isinstance(error, TimeoutError | ConnectionError) or module in _MODULES_OF_TIMEOUTS:
            return TransientStoreError(f"{text}; worth another try")
        if isinstance(error, OSError):
            return store_error(error, what, where=self._url)
        return PermanentStoreError(text)


def _is_failed_condition(error: Exception) -> bool:
    """Whether a service said 412 in a form that its file system did not translate."""
    with suppress(AttributeError, KeyError, TypeError):
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]  # type: ignore[attr-defined]
        return bool(status == 412)
    return getattr(error, "status", None) == 412 or "PreconditionFailed" in str(error)
