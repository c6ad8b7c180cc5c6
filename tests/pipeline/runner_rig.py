"""Jobs for a runner, and an owner that writes down what it is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from stepwell.pipeline.base import Chunk, ChunkStage, Kind
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.delta import NoDelta
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.jobs import StepJob
from stepwell.pipeline.keys import Series, incarnation_name
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.pack import PackKind
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.records import Link
from stepwell.pipeline.runner import Runner
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.tier import Tier
from stepwell.stores.fault import Fault, FaultStore
from stepwell.stores.file import FileStore

PATIENCE_S = 30.0
LIFE = incarnation_name(1, 1)
LAYOUT = plan_layout(
    [TensorSpec(f"w{index}", (64,), "float32", Kind.WEIGHT) for index in range(8)], chunk_bytes=1024
)


class Told:
    """An owner of a runner: keeps what it hears, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.done: Callable[[], bool] | None = None

    def committed(self, series: Series, link: Link, tier: Tier, size_bytes: int) -> None:
        assert size_bytes > 0
        self.events.append(("committed", link.step, tier.name))

    def failed(self, series: Series, link: Link, tier: Tier | None, error: BaseException) -> None:
        self.events.append(("failed", link.step, tier and tier.name, str(error)))

    def not_removed(self, tier: Tier, error: BaseException) -> None:
        self.events.append(("not removed", -1, tier.name, str(error)))

    def encoded(self, link: Link, size_bytes: int) -> None:
        self.events.append(("encoded", link.step))

    def unprotected(self, step: int) -> None:
        self.events.append(("unprotected", step))

    def give_up(self, tier: Tier, error: BaseException) -> bool:
        self.events.append(("give up", -1, tier.name, str(error)))
        return False

    def back(self, tier: Tier, reason: str) -> None:
        self.events.append(("back", -1, tier.name, reason))

    def refused(self, tier: Tier, error: BaseException) -> None:
        self.events.append(("refused", -1, tier.name, str(error)))

    def kinds(self, step: int) -> list[object]:
        return [event[0] for event in self.events if event[1] == step]


class Rig:
    """A runner over two directories, of which one can fail by plan."""

    def __init__(self, root: Path, *plan: Fault, stages: tuple[ChunkStage, ...] = (NoDelta(),)) -> None:
        self.told = Told()
        self.store = FaultStore(FileStore(root / "far"), 1, plan)
        self.tiers = [Tier("near", FileStore(root / "near")), Tier("far", self.store)]
        for tier in self.tiers:
            tier.begin_whole()
        self.runner = Runner(
            run="0" * 32,
            tiers=self.tiers,
            chunk_stages=stages,
            shard=Shard(),
            inventory=Inventory(),
            events=self.told,
            budget_bytes=4096,
        )
        self.released: list[int] = []
        self._mutex = threading.Lock()

    def __enter__(self) -> Rig:
        self.runner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.release()
        assert self.runner.stop(PATIENCE_S)
        for tier in self.tiers:
            tier.store.close()

    def handle(self, step: int) -> SaveHandle:
        return SaveHandle(step, ["near", "far"])

    def job(
        self,
        step: int,
        *,
        chunks: Callable[[], AsyncIterator[Chunk]] | None = None,
        header: Callable[[], dict[str, object]] = lambda: {"tree": {}},
        digest: concurrent.futures.Future[object] | None = None,
    ) -> StepJob:
        if digest is None:
            digest = concurrent.futures.Future()
            digest.set_result(None)

        def release() -> None:
            with self._mutex:
                self.released.append(step)

        return StepJob(
            link=Link(LIFE, step),
            handle=self.handle(step),
            kind=PackKind.STATE,
            previous=Link(LIFE, step - 1),
            chunks=chunks or (lambda: state_chunks(step)),
            header=header,
            layouts=(LAYOUT,),
            release=release,
            digest=digest,
        )

    def submit(self, step: int, **keys: object) -> SaveHandle:
        job = self.job(step, **keys)  # type: ignore[arg-type]
        self.runner.submit(job)
        return job.handle

    def quiet(self) -> None:
        """Wait until the runner's loop has done what it was about to do."""
        self.runner.call(asyncio.sleep(0)).result(PATIENCE_S)

    def commit(self) -> Commit:
        return self.runner.commit


async def state_chunks(step: int) -> AsyncIterator[Chunk]:
    """Chunks of a state whose bytes tell the step."""
    for part, planned in enumerate(LAYOUT.chunks):
        data = np.full(planned.size_bytes, step % 256, np.uint8)
        size_bytes, key = planned.size_bytes, f"state/{part}"
        yield Chunk(step, key, planned.kind, -1, part, LAYOUT.hash, planned.dtype, size_bytes, data)
