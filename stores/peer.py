"""Tier 2: bytes by key in another node's memory. Survives the loss of this node."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import count

from stepwell.errors import MissingObjectError, UsageError
from stepwell.stores.base import BytesLike, Failure, StoreProperties, WriteItem
from stepwell.stores.keys import check_directory, check_key, check_prefix
from stepwell.stores.loop_thread import LoopThread
from stepwell.stores.parts import flat_views
from stepwell.stores.transport.base import Place, Stat, Transport
from stepwell.stores.zarr_face import ZarrFace

__all__ = ["PeerStore"]

_LINKS: weakref.WeakValueDictionary[int, _Link] = weakref.WeakValueDictionary()
"""Links in use here by number: a copied or unpickled store finds its link again."""
_NUMBERS = count(1)


class _Link:
    """A transport and the loop it belongs to, shared by the copies of one store."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.loop = LoopThread("stepwell-peer", transport.close)
        self.number = next(_NUMBERS)
        self._users = 0
        self._mutex = threading.Lock()
        _LINKS[self.number] = self

    def take(self) -> None:
        """Count one more store."""
        with self._mutex:
            self._users += 1

    def give_back(self) -> None:
        """Count one store less; after the last one the connections end."""
        with self._mutex:
            self._users -= 1
            last = not self._users
        if last:
            self.loop.close()


_OF_TRANSPORT: weakref.WeakKeyDictionary[Transport, _Link] = weakref.WeakKeyDictionary()


def _link_of(transport: Transport) -> _Link:
    link = _OF_TRANSPORT.get(transport)
    if link is None:
        link = _OF_TRANSPORT[transport] = _Link(transport)
    return link


class PeerStore(ZarrFace):
    """Objects that a peer holds for us.

    Parameters
    ----------
    transport : Transport
        From here on it belongs to this store and its copies, and to their thread: nobody else calls
        it. Connections are made by the first call.
    read_only : bool

    Notes
    -----
    ``fetch`` returns memory of its own, which stays as it is. What a call costs and how long it may
    take is the transport's matter; every call ends within its deadline.
    """

    def __init__(self, transport: Transport, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._link = _link_of(transport)
        self._link.take()
        self._finalizer = weakref.finalize(self, self._link.give_back)
        self._finalizer.atexit = False

    @property
    def transport(self) -> Transport:
        """The way to the peer."""
        return self._link.transport

    @property
    def properties(self) -> StoreProperties:
        """Survives a node; the peer alone decides about racing creates."""
        return StoreProperties(
            survives=Failure.NODE, atomic_put=True, conditional_create=True, needs_commit_record=False
        )

    @property
    def url(self) -> str:
        """``peer:`` and who it is."""
        return f"peer:{self._link.transport.where}"

    def __repr__(self) -> str:
        return f"PeerStore({self._link.transport.where!r}, read_only={self.read_only})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PeerStore) and self._link is other._link and self.read_only == other.read_only
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return _find_again, (self._link.number, os.getpid(), self.read_only)

    def with_read_only(self, read_only: bool = False) -> PeerStore:
        """Return another store on the same connections."""
        return PeerStore(self._link.transport, read_only=read_only)

    def begin_life(self, incarnation: str) -> None:
        """Write as this incarnation; the peer refuses earlier ones from its first write on."""
        self._link.transport.begin_life(incarnation)

    @property
    def life(self) -> object:
        """The session of the peer that answered last."""
        return self._link.transport.session

    def fall_behind(self) -> None:
        """Run the thread of the connections behind the training from now on."""
        self._link.loop.fall_behind()

    def close(self) -> None:
        """End the connections, once no copy of this store is open; a later call makes new ones."""
        self._finalizer()
        super().close()

    # -- writing ------------------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store at the peer; verified there when this returns. See ``ObjectStore.put``."""
        await self._ready_to_write(key)
        await self._link.loop.run(partial(self._link.transport.put, key, parts))

    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Store many objects, one after the other; see ``ObjectStore.put_batch``."""
        taken = list(items)
        for key, parts in taken:
            await self._ready_to_write(key)
            flat_views(key, parts)
        transport = self._link.transport

        async def put_all() -> None:
            for key, parts in taken:
                await transport.put(key, parts)

        await self._link.loop.run(put_all)

    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object whose key is absent; see ``ObjectStore.create``."""
        await self._ready_to_write(key)
        await self._link.loop.run(partial(self._link.transport.put, key, parts, replace=False))

    async def put_share(self, key: str, size_bytes: int, share: str, start: int, part: BytesLike) -> None:
        """Bring a part of an object that several nodes bring; see ``Transport.put_share``."""
        await self._ready_to_write(key)
        bring = partial(self._link.transport.put_share, key, size_bytes, share, start, part)
        await self._link.loop.run(bring)

    async def finish_shares(self, key: str, size_bytes: int, share: str, *, replace: bool = True) -> None:
        """Publish what several nodes brought; see ``Transport.finish_shares``."""
        await self._ready_to_write(key)
        finish = partial(self._link.transport.finish_shares, key, size_bytes, share, replace=replace)
        await self._link.loop.run(finish)

    async def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""
        await self._ready_to_write(key)
        await self._link.loop.run(partial(self._link.transport.delete, key))

    async def delete_dir(self, prefix: str) -> None:
        """Remove every object below `prefix`, or all for an empty one."""
        self._check_writable()
        await self._ensure_open()
        check_directory(prefix)
        await self._link.loop.run(partial(self._link.transport.delete_below, prefix))

    # -- reading ------------------------------------------------------------------------------

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Read into fresh memory; see ``ObjectStore.fetch``."""
        return await self.fetch_into(key, start, length)

    async def fetch_into(
        self,
        key: str,
        start: int = 0,
        length: int | None = None,
        *,
        place: Place | None = None,
        expected: Stat | None = None,
    ) -> memoryview:
        """Read into memory that the caller gives, without a copy; see ``Transport.get``.

        `place` is called in the thread of the connections and must not take long.
        """
        await self._ensure_open()
        check_key(key)
        if start < 0 or (length is not None and length < 0):
            raise UsageError(f"cannot fetch {length} bytes from {start} of {key!r}")
        get = partial(self._link.transport.get, key, start, length, place=place, expected=expected)
        return await self._link.loop.run(get)

    async def stat(self, key: str, *, digest: bool = False) -> Stat:
        """Ask for length and generation, and for a digest of the contents; see ``Transport.stat``."""
        await self._ensure_open()
        return await self._link.loop.run(partial(self._link.transport.stat, check_key(key), digest=digest))

    async def exists(self, key: str) -> bool:
        """Say whether the peer has the key."""
        try:
            await self.stat(key)
        except MissingObjectError:
            return False
        return True

    async def getsize(self, key: str) -> int:
        """Return the length of an object in bytes."""
        return (await self.stat(key)).size_bytes

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with `prefix`."""
        check_prefix(prefix)
        for key in await self._link.loop.run(partial(self._link.transport.list, prefix)):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`."""
        check_directory(prefix)
        for name in await self._link.loop.run(partial(self._link.transport.list, prefix, direct=True)):
            yield name


def _find_again(number: int, pid: int, read_only: bool) -> PeerStore:
    """Undo ``__reduce__``: connections and secrets do not travel."""
    link = _LINKS.get(number)
    if link is None or pid != os.getpid():
        raise UsageError(
            "a PeerStore can be copied only within its own process; elsewhere connect again, with the "
            "secret from its file or the environment"
        )
    return PeerStore(link.transport, read_only=read_only)
