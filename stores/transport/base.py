"""Contract of a transport: objects between this node and one peer. No implementation here.

A transport moves bytes and says who is at the other end. It knows nothing of tiers, steps or
placement; ``stepwell.stores.peer`` makes a store of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwell.stores.base import BytesLike

__all__ = ["Place", "Stat", "Transport"]

Place = Callable[[int], memoryview]
"""Gives the memory for so many bytes, once their number is known. It belongs to the caller again
when the call that took it ends, with or without an error; after an error its contents mean nothing."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a peer has under one key.

    Attributes
    ----------
    size_bytes : int
    generation : int
        Changes whenever the object is replaced; 0 where the far store cannot tell.
    digest : bytes
        xxh3-128 of the contents where it was asked for, else empty.
    """

    size_bytes: int
    generation: int
    digest: bytes = b""


class Transport(ABC):
    """A way to one peer. All calls belong to the event loop that made the first of them.

    Every call ends within its deadline, also where the peer was stopped, cut off or answers slowly.
    It is tried again by itself while the error may pass, and a write that was tried again happens
    once. An acknowledged write was verified by checksum at the receiver, before the acknowledgement.

    Raises
    ------
    TransientStoreError
        The peer is away, silent or busy, and still was in the last attempt.
    PermanentStoreError
        It is no peer of this run, does not know the secret, or refuses for good. Its subclasses
        MissingObjectError, ObjectExistsError and NoSpaceError mean what they mean for a store.
    IntegrityError
        The far object is shorter than asked for, or damaged.
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """Address of the peer, for people and error messages."""

    @property
    @abstractmethod
    def session(self) -> int | None:
        """Which life of the peer answered last; None before the first answer."""

    @abstractmethod
    def begin_life(self, incarnation: str) -> None:
        """Send what follows as this incarnation of the run; from any thread."""

    @abstractmethod
    async def put(self, key: str, parts: Sequence[BytesLike], *, replace: bool = True) -> None:
        """Store the concatenation of `parts`; with ``replace=False`` only if `key` is absent.

        What the peer has no room for is refused before a large object's first byte is sent.
        """

    @abstractmethod
    async def put_share(self, key: str, size_bytes: int, share: str, start: int, part: BytesLike) -> None:
        """Bring a part of an object of `size_bytes` that several senders bring together.

        Nothing is visible before ``finish_shares``. `share` is a name that all senders agreed on, new
        for each object; parts may overlap and come in any order.
        """

    @abstractmethod
    async def finish_shares(self, key: str, size_bytes: int, share: str, *, replace: bool = True) -> None:
        """Publish what ``put_share`` brought.

        Raises
        ------
        IntegrityError
            A byte is missing; the message says which. What is there is kept for a while.
        """

    @abstractmethod
    async def get(
        self,
        key: str,
        start: int = 0,
        length: int | None = None,
        *,
        place: Place | None = None,
        expected: Stat | None = None,
    ) -> memoryview:
        """Fetch a range (to the end where `length` is None) into memory that `place` gives.

        The bytes are those of one object, never of two that replaced each other. With `expected` they
        are those of that object, or it is a TransientStoreError.
        """

    @abstractmethod
    async def stat(self, key: str, *, digest: bool = False) -> Stat:
        """Ask for the length, and for a digest of the contents, which makes the peer read them."""

    @abstractmethod
    async def list(self, prefix: str, *, direct: bool = False) -> Sequence[str]:
        """Return the keys that start with `prefix`; with `direct`, the names directly below it."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""

    @abstractmethod
    async def delete_below(self, prefix: str) -> None:
        """Remove every object below the directory `prefix`, or all for an empty one."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of all connections; a later call opens new ones."""
