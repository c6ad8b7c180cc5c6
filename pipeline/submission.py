"""From a captured save to the runner's jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import cache

from stepwell.errors import IntegrityError
from stepwell.pipeline.capture import Capture, CaptureStage
from stepwell.pipeline.captured import BaseCopy, CapturedSave, SaveKind
from stepwell.pipeline.digest import Digest, DigestWindow
from stepwell.pipeline.digesting import WeightDigests
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.jobs import BaseJob, StepJob
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.marks import CaptureMark
from stepwell.pipeline.overlap import check_weights
from stepwell.pipeline.pack import PackKind
from stepwell.pipeline.proving import Proving
from stepwell.pipeline.records import Link
from stepwell.pipeline.regions import BaseRegions, Regions
from stepwell.pipeline.runner import Runner
from stepwell.pipeline.update import environment_of
from stepwell.stores.region import Region as ArenaRegion

__all__ = ["Submission"]

COPY_LIMIT_S = 60.0  # 400 MB take 60 ms; one that takes this long will not end


class Submission:
    """Builds jobs out of captured saves and hands them to the runner; trainer's thread only.

    Parameters
    ----------
    runner, capture, digests, bases, regions, proving
    ready_timeout_s : float
        How long a background copy may take.
    marks : bool
        Mark what is captured, so that it is finished if this process dies. Not where the pipeline loses
        something: what the reader will have is known in this process alone.
    """

    def __init__(
        self,
        runner: Runner,
        capture: Capture,
        digests: WeightDigests,
        bases: BaseRegions,
        regions: Regions,
        proving: Proving,
        *,
        ready_timeout_s: float,
        marks: bool,
    ) -> None:
        self._runner = runner
        self._capture = capture
        self._digests = digests
        self._bases = bases
        self._regions = regions
        self._stage = CaptureStage(ready_timeout_s)
        self._marks = marks
        self._proving = proving
        self._environment: dict[str, object] = dict(environment_of("cpu"))
        self._after_base = True

    def submit(
        self,
        link: Link,
        handle: SaveHandle,
        captured: CapturedSave,
        previous: Link | None,
        *,
        base_asked: bool,
    ) -> None:
        """Hand a save over; its slots and region are given back by the runner, whatever happens.

        Parameters
        ----------
        previous : Link or None
            The save a differential leads on from.
        base_asked : bool
            A base, if there is one, is more than due; see ``BaseJob.asked``.
        """
        digest = self._digest(captured)
        self._proving.follow(link, handle, captured, digest)
        base = captured.base
        alone = captured.kind is SaveKind.BASE_ONLY
        if base is not None:
            # Before the differential, so that the tiers know what is coming when that arrives.
            release = captured.release if alone else _nothing
            self._runner.submit(self._base_job(link, handle, base, digest, alone, base_asked, release))
        if not alone:
            self._runner.submit(self._step_job(link, handle, captured, previous, digest))
        self._after_base = base is not None

    def _step_job(
        self,
        link: Link,
        handle: SaveHandle,
        captured: CapturedSave,
        previous: Link | None,
        digest: Future[object],
    ) -> StepJob:
        gradient = captured.kind is SaveKind.GRADIENT
        kind = PackKind.GRADIENT if gradient else PackKind.STATE
        layouts = captured.layouts
        if gradient:
            layouts = (*layouts, self._digests.layout)
        header = cache(lambda: _step_header(captured))
        arena = self._regions.arena
        mark = None
        if arena is not None and self._marks:
            mark = CaptureMark(
                arena,
                self._runner.run_name,
                link,
                captured,
                kind=kind,
                previous=previous,
                header=header,
                layouts=layouts,
                environment=self._environment,
            )
        return StepJob(
            link=link,
            handle=handle,
            kind=kind,
            previous=previous,
            chunks=lambda: self._stage.chunks(captured),
            header=header,
            layouts=layouts,
            release=captured.release if mark is None else mark.release,
            digest=digest,
            environment=self._environment,
            after_base=self._after_base,
            with_base=captured.base is not None,
            mark=mark,
        )

    def _base_job(
        self,
        link: Link,
        handle: SaveHandle,
        base: BaseCopy,
        digest: Future[object],
        alone: bool,
        asked: bool,
        release: Callable[[], None],
    ) -> BaseJob:
        region, size_bytes = base.region, base.region.size_bytes
        arena = self._regions.arena
        publish = None
        if arena is not None and isinstance(region, ArenaRegion):
            owner, published_region = arena, region

            def publish(key: str, length: int) -> None:
                owner.publish(published_region, key, length)

        def give_back(published: bool) -> None:
            release()
            # Memory that a copy still writes to is lost rather than given to somebody else.
            if not published and _ended(base.ready):
                self._bases.recycle(region)
            self._bases.done(size_bytes)

        weights = self._digests.layout if base.overlapped else None

        def check(document: object) -> None:
            if weights is not None:
                self._check(link.step, base, weights, document)

        return BaseJob(
            link=link,
            handle=handle,
            alone=alone,
            layout=base.layout,
            header=lambda: {"tree": base.tree, "layout": base.layout.hash},
            ready=base.ready,
            payload=region.payload,
            publish=publish,
            release=give_back,
            digest=digest if not alone else _done(None),
            environment=self._environment,
            asked=asked,
            check=check,
        )

    def _check(self, step: int, base: BaseCopy, weights: Layout, document: object) -> None:
        try:
            check_weights(step, base.memory, weights, Digest.from_json(document))
        except IntegrityError:
            self._capture.stop_overlapping()
            raise

    def _digest(self, captured: CapturedSave) -> Future[object]:
        """Return the future of the digest's JSON; captured states prove themselves by checksum."""
        capture, proving = self._capture, self._proving
        if captured.kind is not SaveKind.GRADIENT:
            # In the order of the saves: what was copied before it must not be compared after it.
            self._digests.run(proving.interrupt)
            return _done(None)
        eager = captured.digest if isinstance(captured.digest, Digest) else None
        window = DigestWindow(lambda: capture.updates_begun, captured.updates_begun, capture.unwritten())
        return self._digests.submit(window, eager, lambda window: proving.observe(captured, window))


def _step_header(captured: CapturedSave) -> dict[str, object]:
    """Describe a differential: its updates and what goes with them, or the tree of a whole state."""
    if captured.state is not None:
        return {
            "tree": captured.state.tree,
            "layout": captured.state.layout.hash,
            "reason": captured.reason,
        }
    assert captured.aux is not None
    return {
        "updates": [
            {"layout": update.layout.hash, "record": update.record.to_json()} for update in captured.updates
        ],
        "aux": {"layout": captured.aux.layout.hash, "tree": captured.aux.tree},
    }


def _done(value: object) -> Future[object]:
    future: Future[object] = Future()
    future.set_result(value)
    return future


def _ended(copy: Future[None]) -> bool:
    """Wait for a copy; False where it takes too long."""
    try:
        copy.exception(COPY_LIMIT_S)
    except CancelledError:
        return True  # before it began
    except TimeoutError:
        return False
    return True


def _nothing() -> None:
    return None
