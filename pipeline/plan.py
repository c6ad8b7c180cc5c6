"""Plans where tensors lie in one run of bytes and how the run is cut into chunks.

Cuts are counted in elements, never in bytes, so that the gradient, the weight and the moments of one
parameter get the same ranges whatever their dtypes. A cut tensor's pieces are the chunks of a regular
zarr grid: each a C-contiguous block ``(1, ..., 1, k, full, ...)``, all with the same number of
elements, a multiple of 64 (only the last may be shorter).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, isqrt, prod

from stepwell.pipeline.base import Kind
from stepwell.pipeline.layout import ITEM_BYTES, Layout, LayoutChunk, Piece, TensorSpec

__all__ = ["CHUNK_BYTES", "PartPiece", "gradient_layout", "grid_of", "pieces_by_tensor", "plan_layout"]

CHUNK_BYTES = 16 << 20
"""Default length of a full float32 chunk; design: 4-64 MiB."""

_ALIGN = 64
"""Alignment of tensors in bytes and of cuts in elements.

CPU ``fused=True`` kernels depend on an element's position; cuts at multiples of 8 were bit-equal (measured),
64 also keeps every piece of a cut tensor on a cache line.
"""


@dataclass(frozen=True, slots=True)
class PartPiece:
    """A piece and the index of the chunk it lies in."""

    part: int
    piece: Piece


@dataclass(slots=True)
class _Draft:
    """A chunk being filled."""

    kind: Kind
    dtype: str
    pieces: list[Piece] = field(default_factory=list)
    size_bytes: int = 0
    size_elements: int = 0


def plan_layout(specs: Sequence[TensorSpec], *, chunk_bytes: int = CHUNK_BYTES) -> Layout:
    """Lay out tensors and cut them into chunks.

    Tensors of one (kind, dtype, group, role) lie together, in the order given; the role is the last
    segment of the name of optimizer state (``exp_avg_sq`` and ``max_exp_avg_sq`` do not mix), so that
    every kind of state of a group is cut and shared exactly as its weights are.

    Parameters
    ----------
    specs : sequence of TensorSpec
        Names are distinct. ``Layout.tensors`` keeps this order.
    chunk_bytes : int
        Length of a full chunk of a 4-byte dtype; other dtypes have as many *elements*. At least 1024.

    Returns
    -------
    Layout
        Deterministic for equal arguments. A chunk's ``size_bytes`` ends with its last piece; chunks and
        tensors begin at multiples of 64. A tensor that has no regular cut stays whole in a chunk of
        its own, however large.
    """
    if chunk_bytes < 1024:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; cuts at multiples of 64 elements need at least 1024")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two tensors of one layout have the same name")
    limit = chunk_bytes // 4 // _ALIGN * _ALIGN
    buckets: dict[tuple[Kind, str, str, str], list[int]] = {}
    for index, spec in enumerate(specs):
        buckets.setdefault((spec.kind, spec.dtype, spec.group, _role(spec)), []).append(index)
    chunks: list[LayoutChunk] = []
    offset = 0
    for members in buckets.values():
        for draft in _cut_bucket(specs, members, limit):
            chunks.append(LayoutChunk(draft.kind, draft.dtype, offset, draft.size_bytes, tuple(draft.pieces)))
            offset += _aligned(draft.size_bytes)
    return Layout(tensors=tuple(specs), chunks=tuple(chunks), size_bytes=offset)


def gradient_layout(parameters: Sequence[TensorSpec], *, chunk_bytes: int = CHUNK_BYTES) -> Layout:
    """Layout of the gradients of parameters: same names, order, groups and cuts, kind GRADIENT."""
    return plan_layout([replace(spec, kind=Kind.GRADIENT) for spec in parameters], chunk_bytes=chunk_bytes)


def pieces_by_tensor(layout: Layout) -> tuple[tuple[PartPiece, ...], ...]:
    """For each tensor of the layout its pieces in order; computed once per layout object."""
    found: tuple[tuple[PartPiece, ...], ...] | None = vars(layout).get("_pieces_by_tensor")
    if found is None:
        lists: list[list[PartPiece]] = [[] for _ in layout.tensors]
        for part, chunk in enumerate(layout.chunks):
            for piece in chunk.pieces:
                lists[piece.tensor].append(PartPiece(part, piece))
        found = tuple(tuple(sorted(pieces, key=lambda p: p.piece.start)) for pieces in lists)
        vars(layout)["_pieces_by_tensor"] = found  # as functools.cached_property does on a frozen class
    return found


def grid_of(spec: TensorSpec, layout: Layout) -> tuple[int, ...]:
    """Zarr chunk shape of a tensor: its pieces are the chunks of that grid in C order.

    A tensor in one piece has its own shape as chunk shape, with 1 in place of 0 (zarr has no empty chunks).
    """
    pieces = pieces_by_tensor(layout)[layout.index_of[spec.name]]
    if len(pieces) == 1:
        return tuple(max(extent, 1) for extent in spec.shape)
    remaining = pieces[0].piece.stop - pieces[0].piece.start
    grid: list[int] = []
    for extent in reversed(spec.shape):
        grid.append(min(extent, remaining))
        remaining = max(remaining // grid[-1], 1)
    return tuple(reversed(grid))


def _role(spec: TensorSpec) -> str:
    """What tells apart tensors of one kind and group: the last segment of a state tensor's name."""
    if not spec.group or spec.kind in (Kind.WEIGHT, Kind.GRADIENT):
        return ""
    return spec.name.rsplit("/", 1)[-1]


def _aligned(count: int) -> int:
    """The next multiple of 64."""
    return -(-count // _ALIGN) * _ALIGN


def _cut_bucket(specs: Sequence[TensorSpec], members: Sequence[int], limit: int) -> Iterator[_Draft]:
    """Chunks of one bucket: large tensors alone, small ones together up to `limit` elements."""
    kind, dtype = specs[members[0]].kind, specs[members[0]].dtype
    item_bytes = ITEM_BYTES[dtype]
    shared = _Draft(kind, dtype)
    for index in members:
        count = specs[index].element_count
        if count > limit:
            step = cut_elements(specs[index].shape, limit)
            for start in range(0, count, step):
                stop = min(start + step, count)
                yield _Draft(kind, dtype, [Piece(index, start, stop, 0)], (stop - start) * item_bytes)
            continue
        # Room is counted in whole 64-element units, not bytes: the grouping is then the same for all dtypes.
        if shared.pieces and shared.size_elements + count > limit:
            yield shared
            shared = _Draft(kind, dtype)
        begin = _aligned(shared.size_bytes)
        shared.pieces.append(Piece(index, 0, count, begin))
        shared.size_bytes = begin + count * item_bytes
        shared.size_elements = _aligned(shared.size_elements + count)
    if shared.pieces:
        yield shared


@lru_cache(maxsize=4096)
def cut_elements(shape: tuple[int, ...], limit: int) -> int:
    """Elements of each piece of a tensor larger than `limit`; the whole tensor if it has no regular cut.

    Of all regular cuts: the largest of [limit/16, limit], else the smallest of (limit, 4 limit], else the
    nearest below (not under limit/256: a chunk has a cost of its own), else the smallest above.
    """
    total = prod(shape)
    cuts = sorted({cut for axis in range(len(shape)) for cut in _cuts_at(shape, axis, limit)} - {total})
    good = [cut for cut in cuts if limit // 16 <= cut <= limit]
    if good:
        return good[-1]
    above = [cut for cut in cuts if cut > limit]
    if above and above[0] <= 4 * limit:
        return above[0]
    below = [cut for cut in cuts if limit // 256 <= cut < limit // 16]
    if below:
        return below[-1]
    return above[0] if above else total


def _cuts_at(shape: tuple[int, ...], axis: int, limit: int) -> list[int]:
    """The best cuts along one axis: the largest piece up to `limit` elements, and the smallest above it."""
    extent, inner, outer = shape[axis], prod(shape[axis + 1 :]), prod(shape[:axis])
    unit = _ALIGN // gcd(_ALIGN, inner)
    room = limit // inner
    if outer == 1:
        # Only here may the last piece be shorter: the grid has a single row of chunks.
        rows = [room // unit * unit, (room // unit + 1) * unit]
    else:
        regular = [rows for rows in _divisors(extent) if rows % unit == 0]
        rows = [
            max((r for r in regular if r <= room), default=0),
            min((r for r in regular if r > room), default=0),
        ]
    return [count * inner for count in rows if 0 < count <= extent]


def _divisors(number: int) -> set[int]:
    """All divisors of a positive integer."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return set(low) | {number // n for n in low}
