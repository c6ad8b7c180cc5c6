"""Capture slots: warm memory that one save's raw tensors are copied into, used again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import torch

from stepwell.errors import DeadlineError, UsageError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.bits import as_integers, torch_dtype
from stepwell.pipeline.layout import ITEM_BYTES, Layout

__all__ = ["CopyPlan", "LayoutMemory", "Region", "Slot", "SlotPool"]

COPIED_AS_VALUES = frozenset(
    {"float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"}
)
"""dtypes whose own copy in torch is bitwise; all others are copied as integers of the same width."""


class Region(Protocol):
    """Memory with a place in a tier (``stepwell.stores.arena.Region``)."""

    @property
    def payload(self) -> memoryview:
        """Writable bytes, 64-byte aligned."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the payload."""
        ...


class CopyPlan:
    """How the tensors of a layout are copied: one call for each shared chunk or large tensor.

    Attributes
    ----------
    layout : Layout
    groups : tuple of tuples of int
        Indices of the tensors that begin in the same chunk. Empty tensors are in none.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        groups = []
        for chunk in layout.chunks:
            begun = tuple(
                piece.tensor
                for piece in chunk.pieces
                if piece.start == 0 and layout.tensors[piece.tensor].element_count
            )
            if begun:
                groups.append(begun)
        self.groups: tuple[tuple[int, ...], ...] = tuple(groups)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of the run that no tensor covers."""
        position = 0
        for chunk in self.layout.chunks:
            item_bytes = ITEM_BYTES[chunk.dtype]
            for piece in chunk.pieces:
                start = chunk.offset_bytes + piece.offset_bytes
                if start > position:
                    yield position, start
                position = start + (piece.stop - piece.start) * item_bytes
        if self.layout.size_bytes > position:
            yield position, self.layout.size_bytes


class LayoutMemory:
    """The run of one layout in one piece of memory, with a view for each tensor and chunk.

    Made once for each (memory, layout) and used again: making views costs O(tensors), copying
    O(chunks) calls.

    Parameters
    ----------
    memory : Tensor, (n,), uint8
        Warm memory of at least the layout's size; what it holds is of no account. Gaps are
        zeroed here.
    plan : CopyPlan

    Attributes
    ----------
    region : Region or None
        Of the slot that the memory is a part of, if it is.
    offset_bytes : int
        Where in the region's payload the run begins.
    """

    def __init__(self, memory: torch.Tensor, plan: CopyPlan) -> None:
        layout = plan.layout
        if memory.numel() < layout.size_bytes:
            raise UsageError(f"a layout of {layout.size_bytes} bytes does not fit into {memory.numel()}")
        self.layout = layout
        self.plan = plan
        self.region: Region | None = None
        self.offset_bytes = 0
        self.run: Bytes = memory.numpy()[: layout.size_bytes]
        self._zero: set[int] = set()
        self._targets: list[torch.Tensor] = []
        self._as_integers: list[bool] = []
        for spec, offset in zip(layout.tensors, layout.tensor_offsets, strict=True):
            whole = memory[offset : offset + spec.size_bytes].view(torch_dtype(spec.dtype)).view(spec.shape)
            converted = spec.dtype not in COPIED_AS_VALUES
            self._targets.append(as_integers(whole) if converted else whole)
            self._as_integers.append(converted)
        # All tensors of a chunk have one dtype, so the first speaks for them.
        self._groups = [
            (group, [self._targets[index] for index in group], self._as_integers[group[0]])
            for group in plan.groups
        ]
        self.zero_gaps()

    def zero_gaps(self) -> None:
        """Write zeros between the tensors; needed again after the memory served another layout."""
        for start, stop in self.plan.gaps():
            self.run[start:stop] = 0
        self._zero.clear()

    def chunk(self, part: int) -> Bytes:
        """Bytes of one chunk, a view."""
        chunk = self.layout.chunks[part]
        return self.run[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]

    def copy_from(self, sources: Sequence[torch.Tensor | None], missing: Collection[int] = ()) -> None:
        """Copy tensors, in the layout's order, bit for bit.

        Parameters
        ----------
        sources : sequence of Tensor or None
            Shapes and dtypes of the layout (the caller has checked), any strides, any device.
        missing : collection of int
            Where `sources` is None; zeros are left there.
        """
        absent = frozenset(missing)
        with torch.no_grad():
            for group, targets, converted in self._groups:
                if absent and not absent.isdisjoint(group):
                    self._copy_some(group, sources)
                    continue
                values = cast("list[torch.Tensor]", [sources[index] for index in group])
                _copy_group(targets, values, converted)
        self._zero &= absent

    def copy_from_now(
        self, sources: Sequence[torch.Tensor], may_wait: Callable[[int], bool]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy like `copy_from`, but leave out the tensors that `may_wait` names by their index.

        Returns
        -------
        list of (Tensor, Tensor)
            Targets and sources that are left to copy. A source goes on showing the memory it has now.
        """
        left: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for group, targets, converted in self._groups:
                now: list[int] = []
                for place, index in enumerate(group):
                    if may_wait(index):
                        source = sources[index]
                        left.append((targets[place], as_integers(source) if converted else source.detach()))
                    else:
                        now.append(place)
                if now:
                    values = [sources[group[place]] for place in now]
                    _copy_group([targets[place] for place in now], values, converted)
        self._zero.clear()
        return left

    def _copy_some(self, group: Sequence[int], sources: Sequence[torch.Tensor | None]) -> None:
        """Copy the tensors of a chunk that are there, and zero the others unless they are zero already."""
        for index in group:
            source = sources[index]
            if source is not None:
                self._targets[index].copy_(as_integers(source) if self._as_integers[index] else source)
            elif index not in self._zero:
                self._targets[index].zero_()
                self._zero.add(index)


def _copy_group(targets: list[torch.Tensor], values: list[torch.Tensor], converted: bool) -> None:
    """Copy the tensors of one chunk, in one call."""
    if converted:
        values = [as_integers(value) for value in values]
    if len(targets) == 1:
        targets[0].copy_(values[0])
    else:
        torch._foreach_copy_(targets, values)


class Slot:
    """One region of a pool, held by counted references; the last one gone gives it back.

    Attributes
    ----------
    claimed : set of int
        Places of the slot in use, by the owner's own numbering.
    """

    def __init__(self, pool: SlotPool, region: Region) -> None:
        self._pool = pool
        self.claimed: set[int] = set()
        self.references = 0
        self.adopt(region)

    def adopt(self, region: Region) -> None:
        """Use another region from now on."""
        self.region = region
        self._memory = torch.from_numpy(np.frombuffer(region.payload, dtype=np.uint8))
        self._made: dict[tuple[str, int], LayoutMemory] = {}
        self._latest: dict[int, str] = {}

    def memory(self, plan: CopyPlan, offset_bytes: int = 0) -> LayoutMemory:
        """Views of a layout at an offset (a multiple of 64) of the region, made once."""
        key = (plan.layout.hash, offset_bytes)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = LayoutMemory(self._memory[offset_bytes:], plan)
            made.region, made.offset_bytes = self.region, offset_bytes
        elif self._latest.get(offset_bytes) != plan.layout.hash:
            made.zero_gaps()
        self._latest[offset_bytes] = plan.layout.hash
        return made

    def retain(self) -> None:
        """Add a reference."""
        self._pool._retain(self)

    def release(self) -> None:
        """Drop a reference; thread-safe."""
        self._pool._release(self)

    def forget(self) -> None:
        """Drop every view, so that the region can be unmapped."""
        self._made.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)


class SlotPool:
    """A fixed number of slots.

    Parameters
    ----------
    reserve : callable
        ``size_bytes -> Region``; called for every slot at once, so that a lack of memory shows
        at start. Raises ``NoSpaceError``.
    size_bytes : int
    count : int
    recycle : callable, optional
        Takes back a region that became too small, and each of them after ``close``.
    clock : callable
        Monotonic seconds.

    Notes
    -----
    All methods may be called from any thread.
    """

    def __init__(
        self,
        reserve: Callable[[int], Region],
        size_bytes: int,
        count: int = 3,
        *,
        recycle: Callable[[Region], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if count < 1:
            raise UsageError(f"a pool of {count} capture slots cannot hold anything")
        self._reserve = reserve
        self._recycle = recycle
        self._clock = clock
        self._condition = threading.Condition()
        self._closed = False
        self.count = count
        self._slots = [Slot(self, reserve(max(size_bytes, 64))) for _ in range(count)]
        self._free = list(self._slots)

    @property
    def free_count(self) -> int:
        """Slots nobody holds."""
        with self._condition:
            return len(self._free)

    @property
    def size_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(slot.region.size_bytes for slot in self._slots)

    def acquire(self, timeout_s: float, *, size_bytes: int = 0) -> Slot:
        """Take a free slot with one reference and nothing claimed, waiting for one if need be.

        Parameters
        ----------
        timeout_s : float
            0 takes one only if it is free now.
        size_bytes : int
            The slot gets a larger region first if its own is smaller.

        Raises
        ------
        DeadlineError
            None came free in time.
        NoSpaceError
            A larger region was needed and there is no room for it; the slot stays free.
        """
        deadline = self._clock() + timeout_s
        with self._condition:
            while not self._free:
                left = deadline - self._clock()
                if self._closed or left <= 0:
                    raise DeadlineError(f"none of {self.count} capture slots came free within {timeout_s} s")
                self._condition.wait(left)
            if self._closed:
                raise UsageError("the capture slots are closed")
            slot = self._free.pop()
            slot.references = 1
            slot.claimed = set()
        if slot.region.size_bytes < size_bytes:
            try:
                self._grow(slot, size_bytes)
            except BaseException:
                slot.release()
                raise
        return slot

    def close(self) -> None:
        """Give the regions back: free ones now, those in use when their last reference goes."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            idle, self._free = self._free, []
            self._condition.notify_all()
        for slot in idle:
            self._retire(slot)

    def _grow(self, slot: Slot, size_bytes: int) -> None:
        # The new one first: if there is no room the slot keeps what it has.
        region, old = self._reserve(size_bytes), slot.region
        slot.adopt(region)
        if self._recycle is not None:
            self._recycle(old)

    def _retain(self, slot: Slot) -> None:
        with self._condition:
            assert slot.references > 0, "a free slot cannot be retained"
            slot.references += 1

    def _release(self, slot: Slot) -> None:
        with self._condition:
            assert slot.references > 0, "a slot was released more often than taken"
            slot.references -= 1
            if slot.references:
                return
            if not self._closed:
                self._free.append(slot)
                self._condition.notify()
                return
        self._retire(slot)

    def _retire(self, slot: Slot) -> None:
        region = slot.region
        slot.forget()
        if self._recycle is not None:
            self._recycle(region)
