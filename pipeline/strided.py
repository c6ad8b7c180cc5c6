"""Element ranges, counted in C order, of tensors of any strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stepwell.pipeline.bits import as_integers

__all__ = ["c_order_blocks", "flat_range"]


def c_order_blocks(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield views that hold, in C order, elements [start, stop) of a tensor of any strides."""
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    if tensor.ndim == 1:
        yield tensor[start:stop]
        return
    inner = tensor[0].numel()
    first, last = -(-start // inner), stop // inner
    if first > last:
        row = start // inner
        yield from c_order_blocks(tensor[row], start - row * inner, stop - row * inner)
        return
    if start < first * inner:
        yield from c_order_blocks(tensor[first - 1], start - (first - 1) * inner, inner)
    if first < last:
        yield tensor[first:last]
    if last * inner < stop:
        yield from c_order_blocks(tensor[last], 0, stop - last * inner)


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) as a flat tensor: a view if `tensor` is contiguous, else a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    flat = torch.empty(stop - start, dtype=tensor.dtype, device=tensor.device)
    place = 0
    for block in c_order_blocks(tensor, start, stop):
        target = flat[place : place + block.numel()].view(block.shape)
        as_integers(target).copy_(as_integers(block))
        place += block.numel()
    return flat
