"""How a base is laid out as a zarr v3 group: node names, metadata documents, chunk objects.

One array per tensor, named by ``stepwell.stores.keys.encode_name``; its chunk grid is the cut of the
layout, so each piece of the layout is one chunk object::

    bytes of the piece | zeros up to the full chunk (last chunk of a cut tensor) | crc32c, 4 bytes

which is what the codecs ``bytes`` (little endian) and ``crc32c`` make. Every ``zarr.json`` is made
directly, once per plan, and the root has all of them inline as consolidated metadata.

Types zarr does not have are stored as unsigned integers of the same width; the attribute
``stepwell_dtype`` of every array says what they are: the only form that plain zarr and tensorstore
both open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import crc32c
import numpy as np

from stepwell.pipeline.layout import ITEM_BYTES, Layout, Piece, TensorSpec
from stepwell.pipeline.plan import grid_of
from stepwell.pipeline.sealed import canonical_json
from stepwell.stores.base import BytesLike
from stepwell.stores.keys import encode_name

__all__ = [
    "CRC_BYTES",
    "ZARR_DTYPES",
    "GroupPlan",
    "PieceObject",
    "piece_fault",
    "piece_parts",
    "root_document",
]

CRC_BYTES = 4
# `encode_name` never gives this segment, so it cannot meet a name of a tensor.
_VALUE_SEGMENT = "="

_FOREIGN = ("bfloat16", "complex32")
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32"}
ZARR_DTYPES: Mapping[str, str] = {
    dtype: (_UNSIGNED[item_bytes] if dtype in _FOREIGN or dtype.startswith(("float8", "float4")) else dtype)
    for dtype, item_bytes in ITEM_BYTES.items()
}
"""zarr v3 data type that holds the bits of each torch dtype."""


@dataclass(frozen=True, slots=True)
class PieceObject:
    """One chunk object of the group.

    Attributes
    ----------
    key : str
        Below the group.
    part : int
        Chunk of the layout the piece belongs to.
    piece : Piece
    offset_bytes : int
        Where the piece begins in the run of the layout.
    size_bytes, padding_bytes : int
        Bytes of the piece, and zeros that fill it up to a full zarr chunk.
    """

    key: str
    part: int
    piece: Piece
    offset_bytes: int
    size_bytes: int
    padding_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Length of the object."""
        return self.size_bytes + self.padding_bytes + CRC_BYTES


class GroupPlan:
    """All that follows from a layout alone: node names, metadata documents, chunk objects.

    Make it once per layout and keep it; it costs some tens of microseconds per tensor.

    Attributes
    ----------
    layout : Layout
    paths : tuple of str
        Node of each tensor, below the group.
    documents : dict of str to bytes
        ``zarr.json`` of every node but the root, by its key below the group.
    consolidated : bytes
        JSON of the root's ``consolidated_metadata``.
    objects : tuple of tuple of PieceObject
        Per chunk of the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.paths = _node_paths(layout)
        groups = {parent for path in self.paths for parent in _parents(path)}
        nodes = {path: _GROUP for path in groups}
        grids = [grid_of(spec, layout) for spec in layout.tensors]
        for spec, path, grid in zip(layout.tensors, self.paths, grids, strict=True):
            nodes[path] = _array_document(spec, grid)
        ordered = sorted(nodes.items())
        self.documents = {f"{path}/zarr.json": document for path, document in ordered}
        self.consolidated = b"".join(
            (
                b'{"kind":"inline","metadata":{',
                b",".join(canonical_json(path) + b":" + document for path, document in ordered),
                b'},"must_understand":false}',
            )
        )
        self.objects = tuple(
            tuple(
                _piece_object(layout, part, piece, self.paths[piece.tensor], grids[piece.tensor])
                for piece in chunk.pieces
                if piece.stop > piece.start
            )
            for part, chunk in enumerate(layout.chunks)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunk objects."""
        return sum(item.stored_bytes for row in self.objects for item in row)


def root_document(plan: GroupPlan, about: Mapping[str, object]) -> bytes:
    """Return the root's ``zarr.json``: `about` as the attribute ``stepwell``, and all nodes' metadata."""
    return b"".join(
        (
            b'{"attributes":',
            canonical_json({"stepwell": about}),
            b',"consolidated_metadata":',
            plan.consolidated,
            b',"node_type":"group","zarr_format":3}',
        )
    )


def piece_parts(item: PieceObject, data: memoryview, zeros: memoryview) -> list[BytesLike]:
    """Return the parts of one chunk object; the first aliases `data`, the piece's bytes."""
    checksum = crc32c.crc32c(data)
    parts: list[BytesLike] = [data]
    if item.padding_bytes:
        padding = zeros[: item.padding_bytes]
        checksum = crc32c.crc32c(padding, checksum)
        parts.append(padding)
    parts.append(checksum.to_bytes(CRC_BYTES, "little"))
    return parts


def piece_fault(stored: memoryview, item: PieceObject) -> str | None:
    """Say what is wrong with the bytes of a chunk object, None where nothing is."""
    if crc32c.crc32c(stored[:-CRC_BYTES]) != int.from_bytes(stored[-CRC_BYTES:], "little"):
        return "damaged (its crc32c does not match)"
    if np.frombuffer(stored, np.uint8)[item.size_bytes : -CRC_BYTES].any():
        return "the padding is not zero"
    return None


def _node_paths(layout: Layout) -> tuple[str, ...]:
    """Node of each tensor. A tensor above another one (``a`` and ``a/b``) moves below itself (``a/=``).

    zarr keeps no nodes below an array, and an array's chunks live under ``a/c``.
    """
    paths = [encode_name(spec.name) for spec in layout.tensors]
    above = {parent for path in paths for parent in _parents(path)}
    return tuple(f"{path}/{_VALUE_SEGMENT}" if path in above else path for path in paths)


def _parents(path: str) -> Iterator[str]:
    segments = path.split("/")
    for end in range(1, len(segments)):
        yield "/".join(segments[:end])


_GROUP = canonical_json({"attributes": {}, "node_type": "group", "zarr_format": 3})


def _array_document(spec: TensorSpec, grid: tuple[int, ...]) -> bytes:
    zarr_dtype = ZARR_DTYPES[spec.dtype]
    fill: object = 0
    if zarr_dtype == "bool":
        fill = False
    elif zarr_dtype.startswith("complex"):
        fill = [0.0, 0.0]
    elif zarr_dtype.startswith("float"):
        fill = 0.0
    order = {} if ITEM_BYTES[spec.dtype] == 1 else {"configuration": {"endian": "little"}}
    return canonical_json(
        {
            "attributes": {"stepwell_dtype": spec.dtype, "stepwell_name": spec.name},
            "chunk_grid": {"configuration": {"chunk_shape": list(grid)}, "name": "regular"},
            "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
            "codecs": [{"name": "bytes", **order}, {"name": "crc32c"}],
            "data_type": zarr_dtype,
            "fill_value": fill,
            "node_type": "array",
            "shape": list(spec.shape),
            "storage_transformers": [],
            "zarr_format": 3,
        }
    )


def _piece_object(layout: Layout, part: int, piece: Piece, path: str, grid: tuple[int, ...]) -> PieceObject:
    spec = layout.tensors[piece.tensor]
    item_bytes = ITEM_BYTES[spec.dtype]
    # Coordinates of the piece's first element, slowest axis first, divided by the grid.
    coordinates: list[int] = []
    rest = piece.start
    for extent, step in zip(reversed(spec.shape), reversed(grid), strict=True):
        coordinates.append(rest % extent // step)
        rest //= extent
    full = item_bytes
    for step in grid:
        full *= step
    size_bytes = (piece.stop - piece.start) * item_bytes
    return PieceObject(
        key="/".join([path, "c", *map(str, reversed(coordinates))]),
        part=part,
        piece=piece,
        offset_bytes=layout.chunks[part].offset_bytes + piece.offset_bytes,
        size_bytes=size_bytes,
        padding_bytes=full - size_bytes,
    )
