"""Any committed step as a read-only zarr store, rebuilt on demand.

::

    group = zarr.open_group(stepwell.view("checkpoints/", 1234), mode="r")
    group["model/h.0.attn.weight"][:16]

The group looks like a base (see ``docs/format.md``): arrays by name, bits of types that zarr lacks as
unsigned integers, and what is no tensor in the attribute ``stepwell``. Reading a slice decodes only
the chunks it needs, where the optimizers are elementwise.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from stepwell.config import Config, DirectoryTier, MemoryTier, PeerTier, RemoteTier, load_config
from stepwell.errors import (
    ConfigError,
    IntegrityError,
    MissingObjectError,
    NotCommittedError,
    TransientStoreError,
)
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import RUN_RECORD
from stepwell.pipeline.offline import OfflineState
from stepwell.pipeline.records import Link, RunRecord
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.sealed import FORMAT
from stepwell.pipeline.source import SaveSource
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.zarr_group import GroupPlan, PieceObject, piece_parts, root_document
from stepwell.stores.arena import Arena
from stepwell.stores.base import BytesLike, Failure, ObjectStore, StoreProperties, WriteItem
from stepwell.stores.file import FileStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.threads import wait_apart
from stepwell.stores.zarr_face import ZarrFace

__all__ = ["View", "view"]

Source = str | os.PathLike[str] | Mapping[str, object] | Config

STEPS_NAMED = 20


def view(source: Source, step: int | None = None, *, incarnation: str | None = None) -> View:
    """Open the state of a committed step for reading.

    Parameters
    ----------
    source : path, URL, mapping or Config
        As for `stepwell.open_sync`. Nothing is written or locked, so the run may go on.
    step : int, optional
        Default: the newest.
    incarnation : str, optional
        The life of the run to look at, where the step is not on the line of the newest one.

    Returns
    -------
    View
        A zarr store; give it to ``zarr.open_group(..., mode="r")``.

    Raises
    ------
    NotCommittedError
        There is no run, the step is not committed, or nothing whole leads to it.
    IntegrityError
        Something it needs is damaged in every tier.
    StateMismatchError
        The log was made by an optimizer that is not torch's; only the program can replay it.
    """
    with ExitStack() as opened:
        tiers = _open_tiers(load_config(source), opened)
        if not tiers:
            raise NotCommittedError(f"{source}: there is no run of stepwell here")
        state = wait_apart(_open_state(tiers, step, incarnation))
        return View(state, (source, step, incarnation), opened.pop_all())


class View(ZarrFace):
    """The state at one step as a zarr store. Made by `view`.

    Chunks are rebuilt one at a time, in a thread, whichever event loop asks.

    Attributes
    ----------
    step : int
    incarnation : str
    tree : dict
        JSON of everything that is no tensor, as in the header of a base.
    """

    def __init__(
        self, state: OfflineState, origin: tuple[Source, int | None, str | None], closing: ExitStack
    ):
        super().__init__(read_only=True)
        self._state = state
        self._origin = origin
        self._closing = closing
        self._mutex = threading.Lock()
        plan = GroupPlan(state.layout)
        self.step, self.incarnation = state.target.step, state.target.incarnation
        self.tree = state.tree
        self._documents = {**plan.documents, "zarr.json": root_document(plan, self._about())}
        self._objects = {item.key: item for row in plan.objects for item in row}

    def _about(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "kind": "view",
            "incarnation": self.incarnation,
            "step": self.step,
            "updates": self._state.updates,
            "header": {"tree": self.tree},
        }

    @property
    def decoded_chunks(self) -> int:
        """Chunks fetched and decoded so far."""
        return self._state.decoded_chunks

    @property
    def whole(self) -> str | None:
        """Why the state was rebuilt as a whole when it was opened; None if it is piece by piece."""
        return self._state.whole

    @property
    def properties(self) -> StoreProperties:
        """It reads what tiers keep; it keeps nothing itself."""
        return StoreProperties(
            Failure.PROCESS, atomic_put=True, conditional_create=False, needs_commit_record=False
        )

    @property
    def url(self) -> str:
        """What is viewed, for people."""
        return f"view of step {self.step} of {self._origin[0]}"

    def __repr__(self) -> str:
        return f"View({self._origin[0]!r}, {self.step})"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, self._origin

    def with_read_only(self, read_only: bool = False) -> View:
        """Return the view itself; it cannot be made writable."""
        if not read_only:
            self._check_writable()
        return self

    def close(self) -> None:
        """Close the tiers; nothing can be read afterwards."""
        self._closing.close()
        super().close()

    # -- reading ------------------------------------------------------------------------------

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Return bytes of a document, or of a chunk rebuilt now; see ``ObjectStore.fetch``."""
        document = self._documents.get(key)
        if document is None:
            item = self._object(key)
            document = await asyncio.to_thread(self._rebuild, item)
        data = memoryview(document)[start:]
        if length is not None and data.nbytes < length:
            raise IntegrityError(f"{key} has {len(document)} bytes, {length} at {start} were asked for")
        return data[:length]

    def _rebuild(self, item: PieceObject) -> bytes:
        # One at a time: what a replay reads and keeps is shared between chunks.
        with self._mutex:
            data = asyncio.run(self._state.piece(item.piece.tensor, item.piece.start, item.piece.stop))
        return b"".join(piece_parts(item, data.data, memoryview(bytes(item.padding_bytes))))

    def _object(self, key: str) -> PieceObject:
        item = self._objects.get(key)
        if item is None:
            raise MissingObjectError(f"there is no {key!r} in the {self.url}")
        return item

    async def exists(self, key: str) -> bool:
        """Say whether the group has this key; nothing is rebuilt."""
        return key in self._documents or key in self._objects

    async def getsize(self, key: str) -> int:
        """Return the length of an object; nothing is rebuilt."""
        document = self._documents.get(key)
        return len(document) if document is not None else self._object(key).stored_bytes

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield every key that starts with `prefix`."""
        for key in (*self._documents, *self._objects):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`, each once."""
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        names = {
            key[len(below) :].partition("/")[0]: None
            for key in (*self._documents, *self._objects)
            if key.startswith(below)
        }
        for name in names:
            yield name

    # -- writing is refused -------------------------------------------------------------------

    async def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Refuse."""
        self._check_writable()

    async def put_batch(self, items: Iterable[WriteItem]) -> None:
        """Refuse."""
        self._check_writable()

    async def create(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Refuse."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse."""
        self._check_writable()

    async def delete_dir(self, prefix: str) -> None:
        """Refuse."""
        self._check_writable()


def _reopen(source: Source, step: int | None, incarnation: str | None) -> View:
    return view(source, step, incarnation=incarnation)


async def _open_state(tiers: Sequence[Tier], step: int | None, incarnation: str | None) -> OfflineState:
    inventory = await Inventory.read(tiers)
    target = _target(inventory, step, incarnation)
    return await OfflineState.open(SaveSource(tiers, inventory, Commit(Replicate())), target)


def _target(inventory: Inventory, step: int | None, incarnation: str | None) -> Link:
    if incarnation is None:
        links = list(inventory.candidates())
    else:
        links = sorted((link for link in inventory.links() if link.incarnation == incarnation), reverse=True)
    for link in links:
        if step is None or link.step == step:
            return link
    have = ", ".join(str(link.step) for link in links[:STEPS_NAMED]) or "none"
    more = f" and {len(links) - STEPS_NAMED} older" if len(links) > STEPS_NAMED else ""
    raise NotCommittedError(f"step {step} is not committed in any tier; committed are: {have}{more}")


def _open_tiers(config: Config, opened: ExitStack) -> list[Tier]:
    """Open what can be read of a run without a lock, nearest first."""
    directories: list[Tier] = []
    for tier in config.tiers:
        if isinstance(tier, DirectoryTier) and (Path(tier.path) / RUN_RECORD).is_file():
            store = FileStore(Path(tier.path), read_only=True)
            opened.callback(store.close)
            directories.append(Tier(tier.label, store))
        elif isinstance(tier, RemoteTier):
            from stepwell.stores.remote import RemoteStore  # loads tensorstore

            remote = RemoteStore(tier.options, read_only=True)
            opened.callback(remote.close)
            if wait_apart(remote.exists(RUN_RECORD)):
                directories.append(Tier(tier.label, remote))
        elif isinstance(tier, PeerTier):
            from stepwell.peers import open_peer

            peer = open_peer(tier, config.run, read_only=True)
            opened.callback(peer.close)
            # One that is away is left out: what is asked for may be elsewhere, or is said to be nowhere.
            with suppress(TransientStoreError):
                if wait_apart(peer.exists(RUN_RECORD)):
                    directories.append(Tier(tier.label, peer))
    if directories:
        # The arena's place depends on the run's name; who looks at a directory gives only that.
        first = directories[0].store
        data = bytes(wait_apart(_fetched(first)))
        name = RunRecord.decode(data, f"{first.url}/{RUN_RECORD}").name
        config = load_config(config, {"run": name}) if name and name != config.run else config
    arenas: list[Tier] = []
    for tier in config.tiers:
        if not isinstance(tier, MemoryTier):
            continue
        # No arena, or one that its run removes just now: the directories have what is committed there.
        with suppress(ConfigError, MissingObjectError):
            memory = MemoryStore(opened.enter_context(Arena.inspect(config.arena_directory(tier))))
            opened.callback(memory.close)
            arenas.append(Tier(tier.label, memory))
    return [*arenas, *directories]


async def _fetched(store: ObjectStore) -> memoryview:
    return await store.fetch(RUN_RECORD)
