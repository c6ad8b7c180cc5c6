"""Contract of a store: bytes by key. No implementation here.

Every store is also a ``zarr.abc.store.Store``, so ``zarr.open_group(store)`` works on it. The
methods below are what the pipeline calls; zarr's own methods are derived from them by
``stepwell.stores.zarr_face``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zarr.abc.store import Store

__all__ = ["BytesLike", "Failure", "ObjectStore", "StoreProperties", "WriteItem"]

BytesLike = bytes | bytearray | memoryview


class Failure(StrEnum):
    """What may break; a tier survives its own kind and every kind before it."""

    PROCESS = "process"
    NODE = "node"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class StoreProperties:
    """What a store promises.

    Attributes
    ----------
    survives : Failure
        The worst failure after which an acknowledged object is still there.
    atomic_put : bool
        A reader sees the old object, no object, or the whole new one.
    conditional_create : bool
        ``create`` is atomic among all processes that share the store.
    needs_commit_record : bool
        Evidence of completeness is a record (remote); otherwise the manifests are (memory).
    put_size_bytes_max : int or None
        Largest object a single put may have.
    """

    survives: Failure
    atomic_put: bool
    conditional_create: bool
    needs_commit_record: bool
    put_size_bytes_max: int | None = None


WriteItem = tuple[str, Sequence[BytesLike]]


class ObjectStore(Store):
    """Bytes by key. Keys are relative, ``/``-separated, checked by ``stepwell.stores.keys.check_key``.

    All methods are coroutines, may be awaited from any event loop, and never block the loop for
    longer than a few milliseconds. The caller keeps every buffer it passes unchanged until the
    call returns; the store never keeps a reference afterwards.

    Inherited from zarr and kept with zarr's meaning: ``exists``, ``delete`` (a missing key is no
    error), ``list``, ``list_prefix``, ``list_dir``, ``delete_dir``, ``close``, and
    ``getsize`` (raises ``MissingObjectError``).
    """

    @property
    @abstractmethod
    def properties(self) -> StoreProperties:
        """What this store promises."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where this store is, for people and error messages."""

    @abstractmethod
    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store the concatenation of `parts` under `key`, replacing what is there.

        Atomic, and as durable as ``properties.survives`` says once it returns.

        Raises
        ------
        NoSpaceError, TransientStoreError, PermanentStoreError
            The old object, if any, is untouched and nothing half-written is listed.
        """

    @abstractmethod
    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Store many objects; each is atomic, and all are durable once this returns.

        Cheaper than many ``put`` calls where durability is paid per call. After an error some
        of the objects may be there; none is half-written.
        """

    @abstractmethod
    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object only if `key` is absent; of racing callers exactly one succeeds.

        Raises
        ------
        ObjectExistsError
            The key was there already.
        """

    @property
    def life(self) -> object:
        """Changes when what was acknowledged before may be gone, with the process that held it, say.

        Compared for equality only; most stores have one life.
        """
        return None

    def begin_life(self, incarnation: str) -> None:
        """Write as this incarnation of the run from now on; stores that are shared refuse older ones."""

    def fall_behind(self) -> None:
        """Run this store's own threads behind the training from now on; most stores have none.

        For good: a thread that gave up its priority may not take it back.
        """

    async def sweep_temps(self) -> tuple[str, ...]:
        """Remove temporary files of writers that died; return their names. Most stores have none."""
        return ()

    @abstractmethod
    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Return ``length`` bytes from `start` (to the end if None).

        The view may alias the store's own memory (read-only) and stays valid until the object
        is deleted or replaced, or the store is closed.

        Raises
        ------
        MissingObjectError
            No such object.
        IntegrityError
            The object is shorter than asked for.
        """
