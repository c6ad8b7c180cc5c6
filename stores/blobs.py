"""Contract of object storage as `RemoteStore` uses it: one request at a time. No implementation here.

What an object is made of, which keys are taken, retries, limits and deadlines are decided above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from stepwell.stores.base import Failure

__all__ = ["Blob", "Blobs"]

Blob = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""Bytes to store; whoever hands them over never writes to them again, so they may be referenced."""


class Blobs(ABC):
    """Whole objects by key below one URL.

    Safe to call from any event loop and from several at once. A call that is cancelled may still be
    carried out by the service.

    Every method raises ``TransientStoreError`` where another try may succeed (503, a reset, a
    timeout) and ``PermanentStoreError`` where none will (403, a bucket that is not there).
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the objects are, for people; holds no credentials."""

    @property
    @abstractmethod
    def survives(self) -> Failure:
        """The worst failure after which an acknowledged object is still there."""

    @property
    @abstractmethod
    def unconditional(self) -> str | None:
        """Why ``create`` is not atomic among all clients here; None where it is."""

    @abstractmethod
    async def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return the bytes from `start` up to `stop` as far as the object reaches; None if absent."""

    @abstractmethod
    async def size(self, key: str) -> int | None:
        """Return the length of an object in bytes; None if absent."""

    @abstractmethod
    async def write(self, key: str, data: Blob) -> None:
        """Store an object, replacing what is there; whole or not at all."""

    @abstractmethod
    async def create(self, key: str, data: Blob) -> bool:
        """Store an object if there is none; False if there is one.

        Of racing callers exactly one gets True.
        """

    @abstractmethod
    async def keeps_conditions(self, key: str) -> bool:
        """Whether the service itself lets only one of several writers create an object.

        Tried with objects whose keys start with `key`, gone afterwards: services that ignore the
        condition store every write without a word.
        """

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""

    @abstractmethod
    async def list(self, prefix: str) -> list[str]:
        """Return every key that starts with `prefix`, in any order."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and connections; a later call takes new ones."""
