"""Recovery: choose the newest whole step, fetch and verify it, load it in place, replay, compare.

Candidates are tried newest first. Damage anywhere moves on: to the next tier for one object, to an
older base for a damaged one, to an older step where nothing whole leads to a newer. A replay whose
digest does not match, made in the environment the updates were made in, is damage as well.

Just over 400 lines: choosing, loading and judging go back and forth when something is damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch

from stepwell.errors import (
    FormatError,
    IntegrityError,
)
from stepwell.pipeline.base import Bytes, Chunk, ChunkStage, StageContext
from stepwell.pipeline.bits import bytes_to_tensor
from stepwell.pipeline.chain import Chain, resolve_chain
from stepwell.pipeline.collected import Collected, overlay
from stepwell.pipeline.digest import Digest, compare
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.keys import Series
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.pack import base_chunk_key
from stepwell.pipeline.records import Link
from stepwell.pipeline.replay import State
from stepwell.pipeline.replaying import Replayed, replay_updates
from stepwell.pipeline.source import DAMAGE, READ_AHEAD, BaseSource, SaveSource, StepSource
from stepwell.pipeline.state_ranges import state_order
from stepwell.pipeline.tree import JsonValue, TensorLookup
from stepwell.pipeline.update import environment_of
from stepwell.pipeline.values import is_lossy

__all__ = ["Outcome", "Recovery"]

Tree = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a recovery loaded."""

    chain: Chain
    tier: str
    exact: bool
    bound: float | None
    updates: int
    returned: Mapping[str, object]


class _DigestMismatch(IntegrityError):
    """The replayed weights are not those that were saved; `last_match` is the newest save that is."""

    def __init__(self, message: str, last_match: Link) -> None:
        super().__init__(message)
        self.last_match = last_match


class Recovery:
    """Brings a committed save into the live state.

    Parameters
    ----------
    live : LiveState
    source : SaveSource
    stages : callable
        Makes fresh chunk stages, in saving order, for one attempt.
    digest : callable
        ``(layout, algorithm) -> Digest`` of the live weights as they are now.
    context : StageContext
    inexact : str
        ``accept``, ``base`` or ``raise``: what a replay in another environment does whose digest
        does not match.
    """

    def __init__(
        self,
        live: LiveState,
        source: SaveSource,
        *,
        stages: Callable[[], Sequence[ChunkStage]],
        digest: Callable[[Layout, str], Digest],
        context: StageContext,
        inexact: str = "accept",
    ) -> None:
        self.live = live
        self.source = source
        self.warnings: list[str] = []
        self._stages = stages
        self._digest = digest
        self._context = context
        self._inexact = inexact

    async def run(self) -> Outcome | None:
        """Load the newest save that is whole; None if nothing is committed.

        Raises
        ------
        StateMismatchError
            The save is of another model or optimizer; nothing was loaded.
        IntegrityError
            Saves are committed, but none is whole. Live tensors may hold parts of what was tried.
        DeadlineError, StoreError
            A tier that may have what is missing elsewhere does not answer, or does not let us read.
        """
        candidates = list(self.source.inventory.candidates())
        if not candidates:
            return None
        limit: Link | None = None
        for target in candidates:
            if limit is not None and target > limit:
                continue
            try:
                return await self._attempt(target)
            except _DigestMismatch as error:
                self.source.note(str(error))
                limit = error.last_match
            except DAMAGE as error:
                if isinstance(error, FormatError) and error.newer:
                    raise  # nothing is damaged: an older save in its place would lose steps
                self.source.note(str(error))
        listed = "\n  ".join(self.source.faults[-20:])
        raise IntegrityError(
            f"{len(candidates)} saves are committed, but none can be restored whole; the model may hold "
            f"parts of what was tried. What was found:\n  {listed}"
        )

    async def _attempt(self, target: Link) -> Outcome:
        """Load one save; a base on its chain that is damaged everywhere is gone around."""
        while True:
            chain = await resolve_chain(self.source, target, avoid=self.source.broken)
            try:
                return await self._load(chain)
            except _DigestMismatch:
                raise
            except IntegrityError:
                if chain.base is None or (Series.BASE, chain.base) not in self.source.broken:
                    raise

    async def _load(self, chain: Chain) -> Outcome:
        steps = [await self.source.step(link) for link in chain.steps]
        whole = _Whole(self, chain, steps)
        try:
            await whole.prepare()
            return await self._load_whole(chain, whole, steps)
        finally:
            await whole.stop()

    async def _load_whole(self, chain: Chain, whole: _Whole, steps: Sequence[StepSource]) -> Outcome:
        aux = await self._aux(steps[-1]) if steps and whole.follow else None
        tree, specs, lookup = whole.laid_over(aux)
        load = partial(self.live.load_by, tree, specs, self._bridged(lookup))
        returned = await self._context.run(load)
        replayed = await self._replay(whole.follow)
        tier = whole.tier
        if whole.lossy or any(_lost_something(step) for step in whole.follow):
            # Its weights are not those of the save and have no digest here; checksums were compared.
            bound = None if whole.follow else whole.bound
            return Outcome(chain, tier, False, bound, replayed.updates, returned)
        exact = await self._judge(chain, whole, steps, replayed)
        return Outcome(chain, tier, exact, 0.0 if exact else None, replayed.updates, returned)

    async def _replay(self, steps: Sequence[StepSource]) -> Replayed:
        if not steps:
            return Replayed(0, False)
        live = self.live
        weights = {ref.name: ref.tensor for ref in live.parameters}
        states: dict[str, State] = {}
        for ref in live.optimizers:
            states[ref.name] = {
                name: ref.optimizer.state[tensor]
                for group, names in zip(ref.optimizer.param_groups, ref.parameters, strict=True)
                for tensor, name in zip(group["params"], names, strict=True)
                if tensor in ref.optimizer.state
            }
        done = await replay_updates(
            self.source,
            steps,
            optimizers=[(ref.name, ref.optimizer) for ref in live.optimizers],
            weights=weights,
            states=states,
            stages=self._stages(),
            context=self._context,
            environment=environment_of,
        )
        for ref in live.optimizers:
            for name, state in states[ref.name].items():
                ref.optimizer.state[weights[name]] = state
        return done

    async def _judge(
        self, chain: Chain, whole: _Whole, steps: Sequence[StepSource], replayed: Replayed
    ) -> bool:
        """Compare the loaded weights with the digest of the save; True only for a full match."""
        if not whole.follow:
            return True
        verdict = await self._compare(steps[-1])
        if verdict == "match":
            return True
        if verdict == "none":
            self.warnings.append(f"step {chain.target.step} carries no digest: its bits are not proven")
            return False
        if verdict == "partial":
            self.warnings.append(
                f"step {chain.target.step} carries the digest of a part of its weights; that part matches"
            )
            return False
        if not replayed.environments_differ:
            last = await self._last_match(whole)
            raise _DigestMismatch(
                f"step {chain.target.step}: the replayed weights are not those that were saved; the log is "
                f"sound up to step {last.step}",
                last,
            )
        if self._inexact == "raise":
            raise IntegrityError(
                f"step {chain.target.step} was made in another environment and its replay rounds differently "
                f"here; set inexact to 'accept' to load it all the same, or to 'base'"
            )
        if self._inexact == "base" and chain.base is not None:
            raise _DigestMismatch(
                f"step {chain.target.step}: its replay rounds differently here; going back to the base",
                chain.base,
            )
        self.warnings.append(
            f"step {chain.target.step}: its replay rounds differently here; loaded all the same"
        )
        return False

    async def _last_match(self, whole: _Whole) -> Link:
        """Replay one save after the other and return the newest whose digest matches in full."""
        tree, specs, lookup = whole.laid_over(None)
        await self._context.run(partial(self.live.load_by, tree, specs, self._bridged(lookup)))
        last = whole.link
        for step in whole.follow:
            await self._replay([step])
            if await self._compare(step) == "match":
                last = step.link
        return last

    async def _compare(self, step: StepSource) -> str:
        """Compare the live weights with the digest of a save: match, mismatch, partial or none."""
        if step.manifest.digest is None:
            return "none"
        saved = Digest.from_json(step.manifest.digest)
        layout = await self.source.layout(saved.layout)
        found = await self._context.run(lambda: self._digest(layout, saved.algorithm))
        return compare(saved, found)

    async def _aux(self, step: StepSource) -> Collected:
        """Return what a gradient differential says beside its updates."""
        about = step.header.get("aux")
        if not isinstance(about, dict) or not isinstance(about.get("tree"), dict):
            raise FormatError(f"step {step.link.step}: the header of its pack has no aux tree")
        layout = await self.source.layout(str(about.get("layout")))
        run = np.zeros(layout.size_bytes, np.uint8)
        stages = self._stages()
        for part in range(len(layout.chunks)):
            raw = await recover_chunk(await step.chunk(f"aux/{part}"), stages, self._context)
            _place(run, layout, part, raw)
        tensors = tuple(
            bytes_to_tensor(run[offset : offset + spec.size_bytes], spec.dtype, spec.shape)
            for spec, offset in zip(layout.tensors, layout.tensor_offsets, strict=True)
        )
        return Collected(layout.tensors, tensors, cast(Tree, about["tree"]))

    def _bridged(self, lookup: Callable[[str], object]) -> TensorLookup:
        """Let a worker fetch a tensor through the loop it must not block."""
        loop = asyncio.get_running_loop()

        def fetch(name: str) -> torch.Tensor:
            found = lookup(name)
            if isinstance(found, torch.Tensor):
                return found
            return asyncio.run_coroutine_threadsafe(found, loop).result()  # type: ignore[arg-type]

        return fetch


class _Whole:
    """The save a replay begins from: a base, or the last captured state of the chain.

    Attributes
    ----------
    follow : list of StepSource
        Gradient differentials to replay on top.
    link : Link
    tier : str
    lossy : bool
        Something in it does not come back as it was saved.
    bound : float or None
        How far an element may then be from the one saved.
    """

    def __init__(self, recovery: Recovery, chain: Chain, steps: Sequence[StepSource]) -> None:
        self._recovery = recovery
        self._chain = chain
        states = [place for place, step in enumerate(steps) if step.manifest.kind == "state"]
        last = states[-1] if states else -1
        if any(step.manifest.kind != "state" for step in steps[: last + 1]):
            raise IntegrityError(
                f"step {chain.target.step}: captured states follow gradients without a base between them"
            )
        self._states = list(steps[: last + 1])
        self.follow = list(steps[last + 1 :])
        self._base: BaseSource | None = None
        self._run: Bytes | None = None
        self.layout: Layout
        self.tree: Tree = {}
        self.tier = ""
        self.link = steps[last].link if states else cast(Link, chain.base)
        self.lossy = bool(states) and _lost_something(steps[last])
        self.bound = _bound_of(steps[last].header) if self.lossy else None

    async def prepare(self) -> None:
        """Open the base, or decode the captured states up to the last."""
        if self._chain.base is not None:
            self._base = await self._recovery.source.base(self._chain.base, ahead=READ_AHEAD)
            self.layout, self.tier = self._base.layout, self._base.tier
            self.tree = _tree_of(self._base.header, f"base {self._chain.base.step}")
        if self._states:
            await self._decode_states()

    async def stop(self) -> None:
        """Read no further."""
        if self._base is not None:
            await self._base.stop()

    def laid_over(self, aux: Collected | None) -> tuple[Tree, tuple, Callable[[str], object]]:  # type: ignore[type-arg]
        """Return tree, specs and lookup of the whole state, with `aux` laid over it."""
        own = self.layout.index_of
        nothing = torch.empty(0, device="meta")
        collected = Collected(self.layout.tensors, (nothing,) * len(self.layout.tensors), self.tree)
        if aux is not None:
            collected = overlay(collected, aux)

        def lookup(name: str) -> object:
            if aux is not None and name in aux.by_name:
                return aux.by_name[name]
            if name not in own:
                raise IntegrityError(
                    f"the saved state refers to the tensor {name!r}, which is not part of it"
                )
            return self._tensor(own[name])

        return collected.tree, collected.specs, lookup

    def _tensor(self, index: int) -> object:
        spec = self.layout.tensors[index]
        if self._run is not None:
            offset = self.layout.tensor_offsets[index]
            return bytes_to_tensor(self._run[offset : offset + spec.size_bytes], spec.dtype, spec.shape)
        assert self._base is not None
        at_hand = self._base.tensor_at_hand(index)
        if at_hand is not None:
            return bytes_to_tensor(at_hand, spec.dtype, spec.shape)
        return self._fetched(index)

    async def _fetched(self, index: int) -> torch.Tensor:
        assert self._base is not None
        spec = self.layout.tensors[index]
        data = await self._base.tensor(index)
        return bytes_to_tensor(data, spec.dtype, spec.shape)

    async def _decode_states(self) -> None:
        recovery = self._recovery
        stages = recovery._stages()
        first = self._states[0]
        layout_hash = str(first.header.get("layout"))
        if self._base is not None and not first.manifest.self_contained:
            # The first difference is told against the base: let the stages see it.
            for part, chunk in enumerate(self._base.layout.chunks):
                data = await self._base.chunk(part)
                raw = Chunk(
                    self._base.link.step,
                    base_chunk_key(part),
                    chunk.kind,
                    -1,
                    part,
                    self._base.layout.hash,
                    chunk.dtype,
                    chunk.size_bytes,
                    data,
                )
                await recover_chunk(raw, stages, recovery._context)
        for step in self._states:
            layout_hash = str(step.header.get("layout"))
            layout = await recovery.source.layout(layout_hash)
            if self._run is None or self.layout.hash != layout.hash:
                self._run = np.zeros(layout.size_bytes, np.uint8)
            self.layout = layout
            for part in state_order(layout):
                raw = await recover_chunk(await step.chunk(base_chunk_key(part)), stages, recovery._context)
                _place(self._run, layout, part, raw)
        last = self._states[-1]
        self.tree, self.tier = _tree_of(last.header, f"step {last.link.step}"), last.tier


def _lost_something(step: StepSource) -> bool:
    return any(is_lossy(row.encodings) for row in step.rows.values())


def _bound_of(header: Mapping[str, object]) -> float | None:
    bound = header.get("bound")
    return float(bound) if isinstance(bound, int | float) and not isinstance(bound, bool) else None


def _tree_of(header: Mapping[str, object], what: str) -> Tree:
    tree = header.get("tree")
    if not isinstance(tree, dict):
        raise FormatError(f"{what}: its header has no tree")
    return cast(Tree, tree)


def _place(run: Bytes, layout: Layout, part: int, chunk: Chunk) -> None:
    """Put a raw chunk where its layout has it."""
    place = layout.chunks[part]
    if chunk.layout != layout.hash or chunk.part != part or chunk.raw_bytes != place.size_bytes:
        raise IntegrityError(f"step {chunk.step}: chunk {chunk.key} is not the one its layout needs")
    run[place.offset_bytes : place.offset_bytes + place.size_bytes] = chunk.buffer
