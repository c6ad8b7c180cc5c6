"""The bytes of a gradient chunk as tensors, and what a weight must be to be replayed."""

from __future__ import annotations

import torch

from stepwell.errors import IntegrityError, StateMismatchError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.bits import bytes_to_tensor, torch_dtype
from stepwell.pipeline.layout import ITEM_BYTES, Layout

__all__ = ["Gradient", "as_tensor", "checked_weight", "part_gradients"]

Gradient = Bytes | torch.Tensor | None
"""The bytes of one chunk of one update, or None where no tensor of the chunk had a gradient."""


def as_tensor(buffer: Bytes | torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 tensor over `buffer` without a copy; read-only memory must not be written into."""
    if isinstance(buffer, torch.Tensor):
        return buffer.detach().reshape(-1).view(torch.uint8)
    return bytes_to_tensor(buffer, "uint8", (buffer.size,))


def part_gradients(layout: Layout, part: int, buffer: Bytes | torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the flat gradient of each piece of a chunk by piece index, as views of `buffer`.

    Raises
    ------
    IntegrityError
        The buffer is not as long as the chunk.
    """
    chunk = layout.chunks[part]
    flat = as_tensor(buffer)
    if flat.numel() != chunk.size_bytes:
        raise IntegrityError(f"chunk {part} has {flat.numel()} bytes where {chunk.size_bytes} belong")
    dtype, item = torch_dtype(chunk.dtype), ITEM_BYTES[chunk.dtype]
    gradients = {}
    for index, piece in enumerate(chunk.pieces):
        stop = piece.offset_bytes + (piece.stop - piece.start) * item
        gradients[index] = flat[piece.offset_bytes : stop].view(dtype)
    return gradients


def checked_weight(layout: Layout, index: int, weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` without autograd, if it is what the layout says.

    Raises
    ------
    StateMismatchError
        Another shape or dtype.
    """
    spec = layout.tensors[index]
    if tuple(weight.shape) != spec.shape or weight.dtype != torch_dtype(spec.dtype):
        raise StateMismatchError(
            f"{spec.name}: recorded as {spec.dtype}{list(spec.shape)}, "
            f"but the weight is {str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
        )
    return weight.detach()
