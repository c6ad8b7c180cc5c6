"""Reading the chunks of a layout out of live tensors and hashing them.

Two algorithms. ``xxh3-64``: the chunk's bytes as they would lie in a pack, padding included; tensors on
the CPU. ``sum64``: two sums of the elements' bits, by column and by row of a 4096-wide table, modulo
2^64 each; computed where the tensors are, so that nothing crosses the bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import xxhash

from stepwell.errors import StateMismatchError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.bits import as_integers, torch_dtype
from stepwell.pipeline.layout import ITEM_BYTES, Layout, LayoutChunk
from stepwell.pipeline.strided import c_order_blocks

__all__ = ["SUM64", "XXH3_64", "Digester"]

XXH3_64 = "xxh3-64"
SUM64 = "sum64"

IN_PLACE_BYTES = 64 << 10
"""Pieces from this size on are hashed where they lie; below, one call per piece costs more than a copy."""

SUM64_COLUMNS = 4096


class Digester:
    """Hashes chunks of `layout` out of `tensors`; made once, used for every save.

    Parameters
    ----------
    layout : Layout
        Over weights, or over a whole state.
    tensors : mapping of name to Tensor
        Live tensors; all of `layout`, any strides. Held, read, never written.
    scratch : Tensor, (n,), uint8, optional
        Memory for small pieces, as large as the largest chunk that has any; made if it is not.
    algorithm : str, optional
        Chosen by the tensors' device if not given. To check a ``sum64`` digest of an accelerator,
        ask for it.

    Notes
    -----
    One thread at a time. Nothing is copied on construction.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        scratch: torch.Tensor | None = None,
        algorithm: str | None = None,
    ) -> None:
        self.layout = layout
        self._tensors = [_checked(layout, index, tensors) for index in range(len(layout.tensors))]
        on_cpu = all(tensor.device.type == "cpu" for tensor in self._tensors)
        self.algorithm = algorithm or (XXH3_64 if on_cpu else SUM64)
        if self.algorithm not in (XXH3_64, SUM64):
            raise StateMismatchError(f"the digest algorithm {self.algorithm!r} is not known to this version")
        self._scratch = scratch
        self._plans: list[_ChunkPlan | None] = [None] * len(layout.chunks)

    def digest(self, part: int) -> str:
        """Return the digest of one chunk as it is now, hexadecimal."""
        if self.algorithm == SUM64:
            return self._sum64(self.layout.chunks[part])
        plan = self._plans[part]
        if plan is None or not plan.fresh:
            plan = self._plan(part)
            self._plans[part] = plan
        return plan.digest()

    def _plan(self, part: int) -> _ChunkPlan:
        """Divide a chunk into runs: large contiguous pieces, and stretches gathered in scratch."""
        chunk = self.layout.chunks[part]
        plan = _ChunkPlan()
        item = ITEM_BYTES[chunk.dtype]
        done = 0
        for piece in chunk.pieces:
            tensor = self._tensors[piece.tensor]
            plan.watch(tensor)
            stop = piece.offset_bytes + (piece.stop - piece.start) * item
            if stop - piece.offset_bytes >= IN_PLACE_BYTES and _plain(tensor):
                self._stretch(plan, chunk, done, piece.offset_bytes)
                flat = tensor.detach().view(-1)[piece.start : piece.stop]
                plan.runs.append(flat.view(torch.uint8).numpy())
                done = stop
                continue
            target = self._memory(chunk)[piece.offset_bytes : stop].view(torch_dtype(chunk.dtype))
            place = 0
            for block in c_order_blocks(tensor.detach(), piece.start, piece.stop):
                count = block.numel()
                plan.targets.append(as_integers(target[place : place + count].view(block.shape)))
                plan.sources.append(as_integers(block.cpu()))
                place += count
        self._stretch(plan, chunk, done, chunk.size_bytes)
        return plan

    def _stretch(self, plan: _ChunkPlan, chunk: LayoutChunk, start: int, stop: int) -> None:
        """Add bytes [start, stop) of the chunk, which lie in scratch: small pieces and padding."""
        if start < stop:
            gathered = self._memory(chunk)[start:stop]
            plan.stretches.append(gathered)
            plan.runs.append(gathered.numpy())

    def _memory(self, chunk: LayoutChunk) -> torch.Tensor:
        # For the whole chunk at once: a plan in the making must not see it replaced halfway.
        if self._scratch is None or self._scratch.numel() < chunk.size_bytes:
            self._scratch = torch.empty(chunk.size_bytes, dtype=torch.uint8)
        return self._scratch

    def _sum64(self, chunk: LayoutChunk) -> str:
        columns, rows = 0, 0
        for piece in chunk.pieces:
            blocks = c_order_blocks(self._tensors[piece.tensor].detach(), piece.start, piece.stop)
            bits = [as_integers(block).reshape(-1) for block in blocks]
            if not bits:
                continue
            by_column, by_row = _sums(bits[0] if len(bits) == 1 else torch.cat(bits))
            # The piece's place counts, or swapped tensors of one size would not show.
            columns += by_column * (2 * piece.offset_bytes + 1)
            rows += by_row * (2 * piece.offset_bytes + 1)
        return f"{columns % 2**64:016x}{rows % 2**64:016x}"


@dataclass(slots=True)
class _ChunkPlan:
    """How the bytes of a chunk are reached; valid while the tensors keep their storage."""

    runs: list[Bytes] = field(default_factory=list)
    stretches: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    cacheable: bool = True

    def watch(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        self.addresses.append(tensor.data_ptr())
        # Conjugate and negative views, and copies from elsewhere, are taken anew each time.
        self.cacheable = self.cacheable and not (tensor.is_conj() or tensor.is_neg()) and tensor.is_cpu

    @property
    def fresh(self) -> bool:
        """Whether the views still show the live tensors: ``p.data = x`` gives them other storage."""
        return self.cacheable and self.addresses == [tensor.data_ptr() for tensor in self.tensors]

    def digest(self) -> str:
        for stretch in self.stretches:
            # Padding is zeros, and other chunks gather in the same scratch.
            stretch.zero_()
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        if len(self.runs) == 1:
            return xxhash.xxh3_64_hexdigest(self.runs[0].data)
        state = xxhash.xxh3_64()
        for run in self.runs:
            state.update(run.data)
        return state.hexdigest()


def _checked(layout: Layout, index: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    spec = layout.tensors[index]
    tensor = tensors.get(spec.name)
    if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
        have = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise StateMismatchError(f"{spec.name}: {spec.dtype} {list(spec.shape)} in the layout, live {have}")
    return tensor


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _sums(bits: torch.Tensor) -> tuple[int, int]:
    """Return the position-weighted sums of 1-D integers, by column and by row of a wide table."""
    count = bits.numel()
    whole = count // SUM64_COLUMNS * SUM64_COLUMNS
    odd = torch.arange(1, 2 * SUM64_COLUMNS, 2, device=bits.device)
    tail = bits[whole:].to(torch.int64)
    by_column = (tail * odd[: count - whole]).sum()
    by_row = tail.sum()
    if whole:
        table = bits[:whole].view(-1, SUM64_COLUMNS)
        by_column = by_column + (table.sum(0, dtype=torch.int64) * odd).sum()
        height = torch.arange(3, 2 * table.shape[0] + 3, 2, device=bits.device)
        by_row = by_row + (table.sum(1, dtype=torch.int64) * height).sum()
    columns, rows = torch.stack([by_column, by_row]).tolist()
    return columns, rows
