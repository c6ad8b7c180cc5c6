"""What a captured save hands to the runner: everything as values, buffers and callables."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from stepwell.pipeline.base import Chunk
from stepwell.pipeline.handle import SaveHandle
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.marks import CaptureMark
from stepwell.pipeline.pack import PackKind
from stepwell.pipeline.records import Link

__all__ = ["BaseJob", "Job", "StepJob"]


@dataclass(slots=True)
class StepJob:
    """A differential on its way.

    Attributes
    ----------
    link : Link
        Incarnation and step of the save.
    handle : SaveHandle
    kind : PackKind
        GRADIENT or STATE.
    previous : Link or None
        The save it leads on from.
    chunks : callable
        Returns the raw chunks, reading from capture slots; waits for background copies first.
    header : callable
        Builds the JSON header; runs in a worker.
    layouts : tuple of Layout
        All that the chunks refer to.
    release : callable
        Gives the capture slots back; called once, whatever happens.
    digest : future of JSON or None
        The digest of the weights; waited for before the pack is closed.
    environment : mapping
        JSON, for the manifest.
    after_base : bool
        The save before had a base beside it, or there is none in this life.
    with_base : bool
        A base of the same save goes along.
    mark : CaptureMark or None
        Set once the save is captured whole, for whoever comes after this process. `release` takes it
        back, so then that is called when the memory tier is done with the save.
    """

    link: Link
    handle: SaveHandle
    kind: PackKind
    previous: Link | None
    chunks: Callable[[], AsyncIterator[Chunk]]
    header: Callable[[], dict[str, object]]
    layouts: tuple[Layout, ...]
    release: Callable[[], None]
    digest: concurrent.futures.Future[object]
    environment: Mapping[str, object] = field(default_factory=dict)
    after_base: bool = True
    with_base: bool = False
    mark: CaptureMark | None = None


@dataclass(slots=True)
class BaseJob:
    """A base that lies captured in a region.

    Attributes
    ----------
    link : Link
    handle : SaveHandle
    alone : bool
        No differential of this step goes along, so the base is what the handle waits for.
    asked : bool
        Somebody asked for it or needs it; otherwise it is merely due.
    layout : Layout
        Of the whole state; its run begins 64 bytes into the region's payload.
    header : callable
        Builds the JSON header (tree and the like); runs in a worker.
    ready : future
        Done when all bytes are in the region.
    payload : memoryview, writable
        The region's payload.
    publish : callable or None
        ``publish(key, length)`` makes the region an object of the memory tier, in place; None
        where there is no memory tier.
    release : callable
        ``release(published)``: the region is no longer read by the runner.
    digest : future of JSON or None
    environment : mapping
        JSON, for the manifest.
    check : callable
        ``check(digest)`` raises IntegrityError where the region does not hold the state of the save;
        runs in a worker.
    """

    link: Link
    handle: SaveHandle
    alone: bool
    layout: Layout
    header: Callable[[], dict[str, object]]
    ready: concurrent.futures.Future[None]
    payload: memoryview
    publish: Callable[[str, int], None] | None
    release: Callable[[bool], None]
    digest: concurrent.futures.Future[object]
    environment: Mapping[str, object] = field(default_factory=dict)
    asked: bool = True
    check: Callable[[object], None] = lambda digest: None


Job = StepJob | BaseJob
