"""Object storage as a store: a bucket's objects below a prefix, through any service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

from stepwell.errors import ObjectExistsError, PermanentStoreError, UsageError
from stepwell.stores.base import BytesLike, StoreProperties, WriteItem
from stepwell.stores.blobs import Blobs
from stepwell.stores.keys import OWN_PREFIX, check_directory, check_key, check_prefix
from stepwell.stores.limit import LimitedBlobs, Limits
from stepwell.stores.opener import OpenerLock
from stepwell.stores.parted import PartedBlobs
from stepwell.stores.parts import flat_views
from stepwell.stores.remote_options import RemoteOptions
from stepwell.stores.remote_url import blobs_of
from stepwell.stores.retry import RetriedBlobs
from stepwell.stores.split import part_of
from stepwell.stores.threads import Workers
from stepwell.stores.zarr_face import ZarrFace

__all__ = ["RemoteStore"]

_THREAD_COUNT = 2  # they only copy what is about to be sent


class RemoteStore(ZarrFace):
    """Objects of a service below a URL.

    Parameters
    ----------
    options : RemoteOptions or str
        A URL alone takes the default of everything else.
    read_only : bool
        Never writes anything and takes no lock.

    Notes
    -----
    A put copies the object once, off the event loop and without the interpreter; a batch has at most
    ``requests_max`` objects in memory at one time. An object larger than ``put_bytes_max`` is
    stored as an index and parts (``stepwell.stores.split``) and read back whole; other tools see
    these as what they are.

    While a lock of `lock` is held, ``create`` and every deletion first ask whether the run still is
    this process's, and ``create`` asks again afterwards (``stepwell.stores.opener``).
    """

    def __init__(self, options: RemoteOptions | str, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._options = RemoteOptions(options) if isinstance(options, str) else options
        chosen = self._options
        tried = RetriedBlobs(blobs_of(chosen), chosen.timeout_s, chosen.retry_for_s)
        # Outside, so that waiting for a turn is no part of a request's deadline.
        self._blobs: Blobs = LimitedBlobs(tried, Limits(chosen.requests_max, chosen.bytes_per_s_max))
        self._unlimited = tried  # signs of life and fences do not wait behind an upload
        self._workers = Workers("stepwell-remote", _THREAD_COUNT)
        self._objects = PartedBlobs(self._blobs, chosen.put_bytes_max, chosen.requests_max, self._workers)
        self._lock: OpenerLock | None = None

    @property
    def properties(self) -> StoreProperties:
        """Survives what the service survives; objects of any size are cut where needed."""
        blobs = self._blobs
        return StoreProperties(
            survives=blobs.survives,
            atomic_put=True,
            conditional_create=blobs.unconditional is None,
            needs_commit_record=True,
        )

    @property
    def url(self) -> str:
        """The URL of the options."""
        return self._blobs.url

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r}, read_only={self.read_only})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RemoteStore)
            and self._options == other._options
            and self.read_only == other.read_only
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._options, self.read_only)

    def with_read_only(self, read_only: bool = False) -> RemoteStore:
        """Return another store on the same URL."""
        return RemoteStore(self._options, read_only=read_only)

    def fall_behind(self) -> None:
        """Run the threads behind the training from now on; see ``ObjectStore.fall_behind``."""
        self._workers.fall_behind()

    def close(self) -> None:
        """Let threads and connections end."""
        self._workers.close()
        self._blobs.close()
        super().close()

    def lock(self, name: str) -> OpenerLock:
        """Return the lock `name` of this URL, not yet acquired; one at a time guards this store.

        Raises
        ------
        PermanentStoreError
            The store is read-only, the name is no plain name, or the service has no atomic create.
        """
        self._check_writable()
        if "/" in check_key(name):
            raise PermanentStoreError(f"lock name {name!r} must not contain '/'")
        if self._blobs.unconditional is not None:
            raise PermanentStoreError(f"{self.url}: {self._blobs.unconditional}")
        self._lock = OpenerLock(self._unlimited, name, self._options.lease_s)
        return self._lock

    async def _check_fence(self) -> None:
        if self._lock is not None and self._lock.number:
            await self._lock.check()

    # -- writing ------------------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object; see ``ObjectStore.put``."""
        await self._ready_to_write(key)
        await self._objects.write(key, *flat_views(key, parts))

    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object whose key is absent; see ``ObjectStore.create``."""
        await self._ready_to_write(key)
        views, size_bytes = flat_views(key, parts)
        await self._check_fence()
        if not await self._objects.create(key, views, size_bytes):
            raise ObjectExistsError(f"there is an object {key!r} in {self.url} already")
        # Only what was there before another opener looked may be acknowledged.
        await self._check_fence()

    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Store many objects, several at a time; see ``ObjectStore.put_batch``."""
        taken = [(key, *flat_views(key, parts)) for key, parts in items]
        for key, _, _ in taken:
            await self._ready_to_write(key)
        if len({key for key, _, _ in taken}) != len(taken):
            raise UsageError("a batch holds one key twice")
        await self._objects.several(partial(self._objects.write, *item) for item in taken)

    # -- removing -----------------------------------------------------------------------------

    async def delete(self, key: str) -> None:
        """Remove an object and its parts; a missing key is no error."""
        await self._ready_to_write(key)
        await self._check_fence()
        await self._objects.delete(key)

    async def delete_dir(self, prefix: str) -> None:
        """Remove every object below `prefix`, or all for an empty one; locks stay."""
        self._check_writable()
        await self._ensure_open()
        below = check_directory(prefix)
        await self._check_fence()
        keys = await self._blobs.list(below)
        # First what may be an index, then the parts it names.
        await self._objects.delete_all(key for key in keys if _visible(key))
        await self._objects.delete_all(key for key in keys if part_of(key) is not None)

    async def sweep_temps(self) -> tuple[str, ...]:
        """Remove parts that no object names: what writers left that died, or replaced an object."""
        self._check_writable()
        await self._ensure_open()
        await self._check_fence()
        strays = await self._objects.strays()
        await self._objects.delete_all(strays)
        return tuple(strays)

    # -- reading ------------------------------------------------------------------------------

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Read into fresh memory; see ``ObjectStore.fetch``."""
        await self._ensure_open()
        check_key(key)
        if start < 0 or (length is not None and length < 0):
            raise UsageError(f"cannot fetch {length} bytes from {start} of {key!r}")
        return await self._objects.read(key, start, None if length is None else start + length)

    async def exists(self, key: str) -> bool:
        """Say whether the key is there."""
        await self._ensure_open()
        return await self._blobs.read(check_key(key), 0, 0) is not None

    async def getsize(self, key: str) -> int:
        """Return the length of an object in bytes."""
        await self._ensure_open()
        size_bytes = await self._objects.size(check_key(key))
        if size_bytes is None:
            raise self._objects.missing(key)
        return size_bytes

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with `prefix`."""
        await self._ensure_open()
        for key in await self._blobs.list(check_prefix(prefix)):
            if _visible(key):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`."""
        await self._ensure_open()
        below = check_directory(prefix)
        keys = [key[len(below) :] for key in await self._blobs.list(below) if _visible(key)]
        for name in sorted({key.partition("/")[0] for key in keys}):
            yield name


def _visible(key: str) -> bool:
    """Whether a key is one of an object, not of the store itself or a console's mark for a directory."""
    return bool(key) and not key.endswith("/") and f"/{OWN_PREFIX}" not in f"/{key}"


def _reopen(options: RemoteOptions, read_only: bool) -> RemoteStore:
    """Undo ``__reduce__``."""
    return RemoteStore(options, read_only=read_only)
