"""Ways into and out of a store that spare a copy, for stores whose objects lie in memory.

Any other store is served too: bytes then land in memory of their own and are put from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from stepwell.stores.base import ObjectStore

__all__ = ["Landing", "LandingStore", "Sight", "begin_put", "look"]


class Landing(Protocol):
    """Memory for an object that is on its way.

    Attributes
    ----------
    buffer : memoryview
        Writable, exactly as long as the object; the caller's until `publish` or `discard`.
    """

    buffer: memoryview

    async def publish(self, key: str, *, replace: bool) -> None:
        """Make what is in the buffer the object `key`: ``put``, or ``create`` without `replace`.

        After an error the landing is still the caller's.
        """

    def discard(self) -> None:
        """Give the memory back; nothing was stored. Harmless after `publish`."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A view of an object, or of a part of it.

    Attributes
    ----------
    view : memoryview
        Read-only.
    size_bytes : int
        Length of the whole object.
    generation : int
        Changes whenever the object is replaced; 0 where the store cannot tell.
    valid : callable
        Whether the object is still the one that was looked at. What was read from the view before
        is right if this says so afterwards.
    """

    view: memoryview
    size_bytes: int
    generation: int
    valid: Callable[[], bool]


@runtime_checkable
class LandingStore(Protocol):
    """A store with both ways."""

    async def begin_put(self, size_bytes: int) -> Landing:
        """Return memory for an object of `size_bytes`, or raise NoSpaceError."""

    async def look(self, key: str, start: int = 0, length: int | None = None) -> Sight:
        """Return a view as ``fetch`` does, and with it what tells whether it is still right."""


async def begin_put(store: ObjectStore, size_bytes: int) -> Landing:
    """Return memory for an object of `store`: its own where it lets us, else a buffer."""
    if isinstance(store, LandingStore):
        return await store.begin_put(size_bytes)
    return _Buffer(store, size_bytes)


async def look(store: ObjectStore, key: str, start: int = 0, length: int | None = None) -> Sight:
    """Return a view of an object of `store`.

    Without `length` the view reaches to the end of the same object. Where the store cannot tell
    generations apart, `size_bytes` is only known then, and otherwise asked for apart.
    """
    if isinstance(store, LandingStore):
        return await store.look(key, start, length)
    view = await store.fetch(key, start, length)
    size_bytes = start + view.nbytes if length is None else await store.getsize(key)
    return Sight(view, size_bytes, 0, lambda: True)


class _Buffer:
    """A landing in memory of its own."""

    def __init__(self, store: ObjectStore, size_bytes: int) -> None:
        self._store = store
        self.buffer = np.empty(size_bytes, np.uint8).data

    async def publish(self, key: str, *, replace: bool) -> None:
        write = self._store.put if replace else self._store.create
        await write(key, [self.buffer])

    def discard(self) -> None:
        self.buffer = memoryview(b"")
