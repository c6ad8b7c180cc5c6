"""The state at any committed save, rebuilt on demand without the program that made it.

Where every optimizer of the log is elementwise, a piece of a tensor is rebuilt from the chunks that
hold it alone: those of the entry and one gradient chunk per update. Otherwise the whole state is
loaded and replayed once, when it is opened. Digests of the save are compared wherever a digested
chunk was rebuilt as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch.optim import Optimizer

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.bits import bytes_to_tensor, tensor_bytes
from stepwell.pipeline.chain import resolve_chain
from stepwell.pipeline.collected import Collected, optimizer_states, overlay, with_optimizer_states
from stepwell.pipeline.digest import Digest
from stepwell.pipeline.digester import XXH3_64, Digester
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.layout import ITEM_BYTES, Layout, LayoutChunk, Piece, TensorSpec
from stepwell.pipeline.offline_entry import Entry, Here, Recent, Tally, tree_of
from stepwell.pipeline.offline_replay import OptimizerLog, named_states, optimizer_name, why_whole
from stepwell.pipeline.plan import pieces_by_tensor
from stepwell.pipeline.reading import reading_stages
from stepwell.pipeline.records import Link
from stepwell.pipeline.replaying import RecordedUpdate, replay_updates, updates_of
from stepwell.pipeline.source import SaveSource, StepSource
from stepwell.pipeline.tree import JsonValue
from stepwell.pipeline.update import environment_of
from stepwell.pipeline.values import is_lossy

__all__ = ["OfflineState"]


class OfflineState:
    """Made by `open`. Used by one task at a time; any event loop.

    Attributes
    ----------
    target : Link
    tree : dict
        The state's tree, as at the target.
    layout : Layout
        Of the whole state; each chunk is one piece of one tensor, cut as it is stored.
    whole : str or None
        Why the state was rebuilt as a whole, or None where it is rebuilt piece by piece.
    updates : int
        Updates between entry and target.
    environments_differ : bool
        At least one of them was made in another environment, whose rounding may differ.
    """

    def __init__(self, source: SaveSource, target: Link) -> None:
        self.target = target
        self.tree: dict[str, JsonValue] = {}
        self.layout: Layout
        self.whole: str | None = None
        self.updates = 0
        self.environments_differ = False
        self._source = source
        self._tally = Tally()
        self._entry: Entry
        self._aux: _Aux | None = None
        self._logs: dict[str, OptimizerLog] = {}
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._digest: Digest | None = None
        self._digested: Layout | None = None
        self._digested_by: dict[str, list[int]] = {}

    @classmethod
    async def open(cls, source: SaveSource, target: Link) -> OfflineState:
        """Resolve the chain of a save and read what describes it.

        Raises
        ------
        NotCommittedError
            Nothing whole leads to the save.
        IntegrityError
            Something on the way is damaged in every tier.
        StateMismatchError
            Its updates are of an optimizer that is not torch's.
        """
        state = cls(source, target)
        chain = await resolve_chain(source, target)
        state._entry = entry = await Entry.open(source, chain, state._tally)
        about = Collected(entry.layout.tensors, (_NOTHING,) * len(entry.layout.tensors), entry.tree)
        if entry.follow:
            await state._read_digest(entry.follow[-1])
            state._aux = await _Aux.open(source, entry.follow[-1], state._tally)
            await state._plan_replay()
            if state.whole is not None:
                about = await state._replay_whole()
            about = overlay(about, state._aux.collected)
        if state.whole is not None:
            state._tensors = about.by_name
        state.tree = about.tree
        state.layout = _joined([(spec, state._cuts_of(spec)) for spec in about.specs])
        return state

    @property
    def decoded_chunks(self) -> int:
        """Chunks fetched and decoded so far."""
        return self._tally.chunks

    async def piece(self, tensor: int, start: int, stop: int) -> Bytes:
        """Return the bytes of elements [start, stop) of a tensor of ``layout``.

        Raises
        ------
        IntegrityError
            Damaged in every tier, or rebuilt weights are not those that were saved.
        """
        name = self.layout.tensors[tensor].name
        if self._aux is not None and name in self._aux.layout.index_of:
            return await self._aux.piece(name, start, stop)
        if self._tensors is not None:
            item_bytes = ITEM_BYTES[self.layout.tensors[tensor].dtype]
            return tensor_bytes(self._tensors[name])[start * item_bytes : stop * item_bytes]
        if name in self._logs:
            return await self._logs[name].piece(name, start, stop)
        return await self._entry.piece(self._entry.layout.index_of[name], start, stop)

    def _cuts_of(self, spec: TensorSpec) -> Sequence[tuple[int, int]]:
        """Where a tensor is cut in the save it comes from."""
        layout = self._entry.layout
        if self._aux is not None and spec.name in self._aux.layout.index_of:
            layout = self._aux.layout
        index = layout.index_of.get(spec.name)
        if index is None:
            return ((0, spec.element_count),)
        return [(place.piece.start, place.piece.stop) for place in pieces_by_tensor(layout)[index]]

    # -- replay -------------------------------------------------------------------------------

    async def _plan_replay(self) -> None:
        """Decide for the whole log: piece by piece, or everything at once."""
        by_optimizer: dict[int, list[RecordedUpdate]] = {}
        for step in self._entry.follow:
            for update in updates_of(step):
                by_optimizer.setdefault(update.record.optimizer, []).append(update)
                device = str(update.record.environment.get("device", "cpu"))
                if dict(update.record.environment) != environment_of(device):
                    self.environments_differ = True
                self.updates += 1
        for updates in by_optimizer.values():
            layout = await self._source.layout(updates[0].layout)
            if not layout.tensors:
                continue
            states = named_states(self._entry.tree, optimizer_name(layout), self._entry.layout)
            self.whole = self.whole or why_whole(updates, layout, self._entry, states)
            if self.whole is None:
                log = OptimizerLog(self._entry, layout, updates, states, self._tally, self._compare)
                self._logs.update(dict.fromkeys(log.names, log))

    async def _replay_whole(self) -> Collected:
        entry = self._entry
        tensors = []
        for index, spec in enumerate(entry.layout.tensors):
            data = await entry.piece(index, 0, spec.element_count)
            tensors.append(bytes_to_tensor(data, spec.dtype, spec.shape))
        collected = Collected(entry.layout.tensors, tuple(tensors), entry.tree)
        optimizers: dict[int, str] = {}
        for step in entry.follow:
            for update in updates_of(step):
                layout = await self._source.layout(update.layout)
                if layout.tensors:
                    optimizers[update.record.optimizer] = optimizer_name(layout)
        states = {name: optimizer_states(entry.tree, name, collected.lookup) for name in optimizers.values()}
        # By the index that records use; those without a name have no updates and are not asked for.
        ordered: list[tuple[str, Optimizer | None]] = [
            (optimizers.get(index, ""), None) for index in range(max(optimizers, default=-1) + 1)
        ]
        await replay_updates(
            self._source,
            entry.follow,
            optimizers=ordered,
            weights=collected.by_name,
            states={"": {}, **states},
            stages=reading_stages([self._tally]),
            context=Here(),
            environment=environment_of,
        )
        self._compare_all(collected.by_name)
        return with_optimizer_states(collected, states)

    # -- digests ------------------------------------------------------------------------------

    async def _read_digest(self, step: StepSource) -> None:
        if step.manifest.digest is None:
            return
        if any(is_lossy(row.encodings) for each in self._entry.follow for row in each.rows.values()):
            return  # rebuilt weights are not those that were saved
        digest = Digest.from_json(step.manifest.digest)
        try:
            self._digested = await self._source.layout(digest.layout)
        except IntegrityError:
            # Digested in terms of a layout that was not stored: there is nothing to compare with.
            return
        if len(self._digested.chunks) != len(digest.values):
            raise FormatError(f"step {step.link.step}: its digest does not fit the layout it names")
        self._digest = digest
        for part, chunk in enumerate(self._digested.chunks):
            for piece in chunk.pieces:
                self._digested_by.setdefault(self._digested.tensors[piece.tensor].name, []).append(part)

    def _compare(self, results: Mapping[tuple[str, int], Bytes]) -> None:
        """Compare every digested chunk that lies wholly within one replayed chunk."""
        digest, layout = self._digest, self._digested
        if digest is None or layout is None or digest.algorithm != XXH3_64:
            return
        parts = sorted({part for name, _ in results for part in self._digested_by.get(name, ())})
        for part in parts:
            value, data = digest.values[part], _gathered(layout, part, results)
            if value is not None and data is not None and xxhash.xxh3_64_hexdigest(data.data) != value:
                self._mismatch(part)

    def _compare_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        digest, layout = self._digest, self._digested
        if digest is None or layout is None or any(spec.name not in tensors for spec in layout.tensors):
            return
        digester = Digester(layout, tensors, algorithm=digest.algorithm)
        for part, value in enumerate(digest.values):
            if value is not None and digester.digest(part) != value:
                self._mismatch(part)

    def _mismatch(self, part: int) -> None:
        what = f"step {self.target.step}: rebuilt weights (digest chunk {part}) are not those that were saved"
        if not self.environments_differ:
            raise IntegrityError(what)
        warnings.warn(f"{what}: the updates round differently in this environment", stacklevel=2)


_NOTHING = torch.empty(0, device="meta")


@dataclass(slots=True)
class _Aux:
    """What a differential says beside its updates: buffers, extra, RNG; read chunk by chunk."""

    step: StepSource
    layout: Layout
    collected: Collected
    tally: Tally
    recent: Recent[Bytes]

    @classmethod
    async def open(cls, source: SaveSource, step: StepSource, tally: Tally) -> _Aux:
        about = step.header.get("aux")
        if not isinstance(about, dict):
            raise FormatError(f"step {step.link.step}: the header of its pack has no aux part")
        layout = await source.layout(str(about.get("layout")))
        tree = tree_of(about, f"aux of step {step.link.step}")
        collected = Collected(layout.tensors, (_NOTHING,) * len(layout.tensors), tree)
        return cls(step, layout, collected, tally, Recent())

    async def piece(self, name: str, start: int, stop: int) -> Bytes:
        index = self.layout.index_of[name]
        item_bytes = ITEM_BYTES[self.layout.tensors[index].dtype]
        out = np.empty((stop - start) * item_bytes, np.uint8)
        for place in pieces_by_tensor(self.layout)[index]:
            low, high = max(start, place.piece.start), min(stop, place.piece.stop)
            if low < high:
                data = await self._chunk(place.part)
                first = place.piece.offset_bytes + (low - place.piece.start) * item_bytes
                cut = data[first : first + (high - low) * item_bytes]
                out[(low - start) * item_bytes : (high - start) * item_bytes] = cut
        return out

    async def _chunk(self, part: int) -> Bytes:
        found = self.recent.find(part)
        if found is None:
            stages = reading_stages([self.tally])
            chunk = await recover_chunk(await self.step.chunk(f"aux/{part}"), stages, Here())
            if chunk.layout != self.layout.hash or chunk.raw_bytes != self.layout.chunks[part].size_bytes:
                raise IntegrityError(f"step {self.step.link.step}: aux chunk {part} is of another layout")
            found = self.recent.keep(part, chunk.buffer, chunk.buffer.nbytes)
        return found


def _gathered(layout: Layout, part: int, results: Mapping[tuple[str, int], Bytes]) -> Bytes | None:
    """Lay a digested chunk out of replayed pieces; None if a piece is missing or cut otherwise."""
    chunk = layout.chunks[part]
    out = np.zeros(chunk.size_bytes, np.uint8)
    for piece in chunk.pieces:
        data = results.get((layout.tensors[piece.tensor].name, piece.start))
        size_bytes = (piece.stop - piece.start) * ITEM_BYTES[chunk.dtype]
        if data is None or data.nbytes != size_bytes:
            return None
        out[piece.offset_bytes : piece.offset_bytes + size_bytes] = data
    return out


def _joined(tensors: Sequence[tuple[TensorSpec, Sequence[tuple[int, int]]]]) -> Layout:
    """One layout over tensors that come from several saves: a chunk for each piece."""
    chunks: list[LayoutChunk] = []
    offset = 0
    for index, (spec, cuts) in enumerate(tensors):
        for start, stop in cuts:
            size_bytes = (stop - start) * ITEM_BYTES[spec.dtype]
            pieces = (Piece(index, start, stop, 0),)
            chunks.append(LayoutChunk(spec.kind, spec.dtype, offset, size_bytes, pieces))
            offset += -(-size_bytes // 64) * 64
    return Layout(tuple(spec for spec, _ in tensors), tuple(chunks), offset)
