"""Proving the chain while training: wires captured saves, digests and the memory tier to the prover.

Per save, on the digest thread: the digest of the weights, then one unit of the state for the rotating
proof. On the prover's own thread: the first two updates wholly, and every base against the replay of the
chain before it, both read back from the memory tier, so that what is proven is what a recovery would use.
The first such chain is proven whole; of later ones as many chunks in turn as their share of time allows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from stepwell.errors import StepwellError
from stepwell.pipeline.base import ChunkStage
from stepwell.pipeline.bits import bytes_to_tensor
from stepwell.pipeline.capture import Capture
from stepwell.pipeline.captured import CapturedSave, SaveKind
from stepwell.pipeline.collected import optimizer_states
from stepwell.pipeline.digest import Digest, DigestWindow, values_by_part
from stepwell.pipeline.digesting import WeightDigests
from stepwell.pipeline.flow import recover_chunk
from stepwell.pipeline.gradients import GradientTap
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.pack import HEADER_BYTES
from stepwell.pipeline.parts import Gradient
from stepwell.pipeline.proof import (
    Outcome,
    ProofUpdate,
    StateSource,
    Subject,
    Turn,
    Verdict,
    live_subject,
    prove_chain,
)
from stepwell.pipeline.prover import Prover
from stepwell.pipeline.records import Link
from stepwell.pipeline.replaying import RecordedUpdate, updates_of
from stepwell.pipeline.runner import Runner
from stepwell.pipeline.source import SaveSource
from stepwell.pipeline.tapped import TappedUpdate
from stepwell.pipeline.tier import Tier

__all__ = ["Proving"]

Result = TypeVar("Result")

FIRST_UPDATES = 2  # proven wholly, from the first base on
ROTATION_SHARE = 0.005  # of a processor: where steps take milliseconds, not every save is rotated over
BASE_SHARE = 0.01  # of a processor: bases may come every few steps, and a whole proof costs several updates
READY_TIMEOUT_S = 60.0
COMMIT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Saved:
    link: Link
    handle: SaveHandle
    digest: Future[object]
    at_s: float


class Proving:
    """Follows the saves of one session; ``follow`` belongs to the trainer's thread.

    Parameters
    ----------
    live : LiveState
    capture : Capture
    runner : Runner
    digests : WeightDigests
    stages : callable
        Makes fresh chunk stages, in saving order, to read packs back.
    distrust : callable
        Told, from any thread, why gradients must not be relied on any more.
    exact : bool
        Packs hold what was captured. If they do not, reading them back proves nothing, and only the
        rotation goes on, which compares with what capture itself holds.
    """

    def __init__(
        self,
        live: LiveState,
        capture: Capture,
        runner: Runner,
        digests: WeightDigests,
        stages: Callable[[], Sequence[ChunkStage]],
        distrust: Callable[[str], None],
        *,
        exact: bool = True,
    ) -> None:
        self._exact = exact
        self._live = live
        self._capture = capture
        self._runner = runner
        self._digests = digests
        self._stages = stages
        self._distrust = distrust
        self._tier = next((tier for tier in runner.tiers if tier.memory is not None), None)
        self._tap: GradientTap | None = None
        self._prover: Prover | None = None
        self._subjects: list[Subject] = []
        self._base: _Saved | None = None
        self._chain: list[_Saved] = []
        self._began = time.monotonic()
        self._updates = 0
        self._first_done = False
        self._turns: list[Turn] = []
        self._whole_chain_proven = False
        self._bases_s = 0.0
        self._cut = threading.Event()
        self.verdicts: list[Verdict] = []

    def follow(self, link: Link, handle: SaveHandle, captured: CapturedSave, digest: Future[object]) -> None:
        """Take a save into account that was just captured, and begin what it makes provable."""
        self._renew()
        saved = _Saved(link, handle, digest, time.monotonic())
        if captured.kind is SaveKind.GRADIENT:
            self._chain.append(saved)
            self._updates += len(captured.updates)
        else:
            self._base, self._chain = None, []
        if not self._first_done and self._base is not None and self._updates >= FIRST_UPDATES:
            self._first_done = True
            self._prove(self._base, list(self._chain), None)
        if captured.base is not None:
            # A proof holds a chain back from retention: no longer than until the next base but one.
            self._cut.set()
            if self._base is not None and self._chain:
                self._prove(self._base, list(self._chain), saved)
            self._base, self._chain = saved, []

    def observe(self, captured: CapturedSave, window: DigestWindow) -> None:
        """Prove one more unit; runs on the digest thread, while the save still has its slots."""
        prover = self._prover
        if prover is None:
            return
        for update in captured.updates:
            update.wait(READY_TIMEOUT_S)
            if update.torn is not None:
                prover.reset()
                return
        elapsed_s = time.monotonic() - self._began
        if prover.pending or prover.rotation_s <= ROTATION_SHARE * elapsed_s:
            prover.observe(window, [_tapped(update) for update in captured.updates])

    def interrupt(self) -> None:
        """Forget what was copied at the last save; runs on the digest thread, where the log is broken."""
        if self._prover is not None:
            self._prover.reset()

    def close(self) -> None:
        """End the prover's thread; nothing reads the memory tier or the live state afterwards."""
        if self._prover is not None:
            self._prover.close(COMMIT_TIMEOUT_S)
            self._prover = None

    def _renew(self) -> None:
        """Make a prover for the taps as they are now."""
        tap = self._capture.tap
        if tap is self._tap:
            return
        self.close()
        self._tap, self._base, self._chain = tap, None, []
        if tap.opaque is not None:
            return
        parameters = {ref.name: ref.tensor for ref in self._live.parameters}
        self._subjects = [
            live_subject(one.index, one.optimizer, one.plan.layout, parameters) for one in tap.taps
        ]
        self._prover = Prover(self._subjects, self._report)
        self._turns = [Turn() for _ in self._subjects]
        self._whole_chain_proven = False

    def _report(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        del self.verdicts[:-1000]
        if verdict.outcome is Outcome.MISMATCH:
            self._distrust(
                f"replaying the recorded gradients does not give the live state: {verdict.what}: "
                f"{verdict.reason}"
            )

    def _prove(self, base: _Saved, chain: list[_Saved], target: _Saved | None) -> None:
        """Have a chain proven: against a new base, or against the digest of its last save."""
        tier, prover = self._tier, self._prover
        if tier is None or prover is None or not self._exact:
            return
        # What a proof costs beside its units, reading manifests and layouts, counts too.
        late = self._bases_s > BASE_SHARE * (time.monotonic() - self._began)
        if target is not None and self._whole_chain_proven and late:
            return
        held = self._runner.held
        if held:
            # Where bases come faster than proofs, some go unproven, and none is proven whole: chains
            # kept for the prover would fill the memory beyond the forecast.
            what = f"steps {chain[0].link.step} to {chain[-1].link.step} from base {base.link.step}"
            self._report(Verdict(Outcome.INCONCLUSIVE, what, "the proof before it is not done yet"))
            return
        subjects = self._subjects
        self._cut = cut = threading.Event()

        def task() -> Verdict:
            began = time.thread_time()
            try:
                return self._proof(
                    tier, lambda: prover.stopping or cut.is_set(), subjects, base, chain, target
                )
            finally:
                self._bases_s += time.thread_time() - began
                held.remove(base.link)

        # Retention leaves the base and all after it alone until the proof has read them.
        held.append(base.link)
        if not prover.submit(task):
            held.remove(base.link)

    def _proof(
        self,
        tier: Tier,
        stop: Callable[[], bool],
        subjects: Sequence[Subject],
        base: _Saved,
        chain: Sequence[_Saved],
        target: _Saved | None,
    ) -> Verdict:
        what = f"steps {chain[0].link.step} to {chain[-1].link.step} from base {base.link.step}"
        try:
            for saved in (base, *chain, *(() if target is None else (target,))):
                saved.handle.future(tier.name).result(COMMIT_TIMEOUT_S)
            source = SaveSource([tier], self._runner.inventory, self._runner.commit)
            start = self._call(self._state(tier, source, base.link))
            goal = None if target is None else self._call(self._state(tier, source, target.link))
            steps = [self._call(source.step(saved.link)) for saved in chain]
            updates = [update for step in steps for update in updates_of(step)]
        except (StepwellError, TimeoutError) as error:
            # What is not there cannot be proven; that it is not there is told by its own handle.
            return Verdict(Outcome.INCONCLUSIVE, what, str(error))
        stages = self._stages()
        weights = self._digests.layout
        proofs = [ProofUpdate(update.record, partial(self._gradient, update, stages)) for update in updates]
        turns = self._turns
        for turn in turns:
            turn.budget_s = float("inf")
            if target is not None and self._whole_chain_proven:
                turn.budget_s = BASE_SHARE * (target.at_s - base.at_s) / len(turns)
        names = [ref.name for ref in self._live.optimizers]
        for subject, name, turn in zip(subjects, names, turns, strict=True):
            wanted: StateSource | Callable[[int], str | None]
            if goal is not None:
                wanted = goal(name)
            else:
                wanted = _digests(subject.layout, weights, chain[-1].digest.result())
            verdict = prove_chain(subject, what, start(name), proofs, wanted, stop, turn)
            if verdict.outcome is not Outcome.PROVEN:
                return verdict
        if target is not None:
            self._whole_chain_proven = True
        return Verdict(Outcome.PROVEN, what)

    async def _state(self, tier: Tier, source: SaveSource, link: Link) -> Callable[[str], StateSource]:
        """Open a base of the memory tier in place, as the state of one optimizer by name."""
        base = await source.base(link)
        (entry,) = base.manifest.objects
        layout, tree = base.layout, base.header["tree"]
        assert isinstance(tree, dict)
        pack = await tier.store.fetch(entry.key)
        run = np.frombuffer(pack, np.uint8)[HEADER_BYTES : HEADER_BYTES + layout.size_bytes]

        def lookup(name: str) -> torch.Tensor:
            index = layout.index_of[name]
            spec, offset = layout.tensors[index], layout.tensor_offsets[index]
            return bytes_to_tensor(run[offset : offset + spec.size_bytes], spec.dtype, spec.shape)

        weights = {ref.name: lookup(ref.name) for ref in self._live.parameters}

        def of(optimizer: str) -> StateSource:
            states = optimizer_states(tree, optimizer, lookup)
            return StateSource(weights, lambda name: states.get(name, {}))

        return of

    def _gradient(self, update: RecordedUpdate, stages: Sequence[ChunkStage], part: int) -> Gradient:
        """Read one gradient chunk back, decoding it on the prover's own thread."""
        key = update.key(part)
        if key not in update.step.rows:
            return None
        chunk = self._call(update.step.chunk(key))
        return asyncio.run(recover_chunk(chunk, stages, _Inline())).buffer

    def _call(self, work: Coroutine[object, object, Result]) -> Result:
        """Run a coroutine on the runner's loop and wait for it here."""
        return self._runner.call(work).result(READY_TIMEOUT_S)


def _tapped(update: TappedUpdate) -> ProofUpdate:
    parts = frozenset(update.parts)
    return ProofUpdate(update.record, lambda part: update.memory.chunk(part) if part in parts else None)


def _digests(gradients: Layout, weights: Layout, document: object) -> Callable[[int], str | None]:
    """Return the saved digest of each chunk of a gradient layout whose pieces make one digested chunk."""
    return values_by_part(gradients, weights, Digest.from_json(document)).__getitem__


class _Inline:
    """Runs stages' work in the calling thread."""

    async def run(self, function: Callable[[], Result]) -> Result:
        return function()
