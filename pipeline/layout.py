"""Where every tensor of a state lies in one flat run of bytes, and how that run is cut into chunks.

A layout is content-addressed: its hash is the xxh3-128 of its canonical JSON. It is planned once
(``stepwell.pipeline.plan``) and reused while names, shapes and dtypes stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import xxhash

from stepwell.errors import FormatError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.sealed import count, parse_json, reading, typed

__all__ = ["ITEM_BYTES", "Layout", "LayoutChunk", "Piece", "TensorSpec"]

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes per element of every dtype that can be saved, by torch name; all others are refused."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state.

    Attributes
    ----------
    name : str
        ``/``-separated place in the state, e.g. ``model/h.0.weight`` or
        ``optim/state/h.0.weight/exp_avg``. Data, never a path: see ``stepwell.stores.keys``.
    shape : tuple of int
    dtype : str
        torch name without the prefix, a key of ``ITEM_BYTES``.
    kind : Kind
    group : str
        Tensors of different groups never share a chunk (``"optim:0"`` = optimizer optim,
        parameter group 0; ``""`` for none).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    group: str = ""

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense, contiguous tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of one tensor, `offset_bytes` into its chunk."""

    tensor: int
    start: int
    stop: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class LayoutChunk:
    """A contiguous run of the layout: pieces of one kind, dtype and group."""

    kind: Kind
    dtype: str
    offset_bytes: int
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """Tensors, chunks, and the total length in bytes.

    A tensor's bytes are contiguous in the run: ``tensor_offsets[i]`` is where tensor i begins,
    a multiple of 64. Gaps are padding and hold zeros.
    """

    tensors: tuple[TensorSpec, ...]
    chunks: tuple[LayoutChunk, ...]
    size_bytes: int

    @cached_property
    def tensor_offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor from the start of the run."""
        offsets = [0] * len(self.tensors)
        for chunk in self.chunks:
            for piece in chunk.pieces:
                if piece.start == 0:
                    offsets[piece.tensor] = chunk.offset_bytes + piece.offset_bytes
        return tuple(offsets)

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """Tensor index by name."""
        return {spec.name: i for i, spec in enumerate(self.tensors)}

    @cached_property
    def encoded(self) -> bytes:
        """Canonical JSON, what is stored and hashed."""
        document = {
            "format": 1,
            "tensors": [[t.name, list(t.shape), t.dtype, str(t.kind), t.group] for t in self.tensors],
            "chunks": [
                [
                    str(c.kind),
                    c.dtype,
                    c.offset_bytes,
                    c.size_bytes,
                    [[p.tensor, p.start, p.stop, p.offset_bytes] for p in c.pieces],
                ]
                for c in self.chunks
            ],
            "size_bytes": self.size_bytes,
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=True).encode()

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of ``encoded``, hexadecimal."""
        return xxhash.xxh3_128_hexdigest(self.encoded)

    @classmethod
    def decode(cls, data: bytes, expected_hash: str) -> Layout:
        """Read a stored layout back.

        Raises
        ------
        FormatError
            The bytes do not have the hash that names them, or are not a layout.
        """
        what = f"layout {expected_hash}"
        if xxhash.xxh3_128_hexdigest(data) != expected_hash:
            raise FormatError(f"{what}: the stored bytes have another checksum")
        document = parse_json(data, what)
        with reading(what):
            version = count(document["format"])
            if version != 1:
                raise FormatError(f"{what}: format {version}, this code reads 1", newer=version > 1)
            layout = cls(
                tensors=tuple(_tensor(*typed(row, list)) for row in typed(document["tensors"], list)),
                chunks=tuple(_chunk(*typed(row, list)) for row in typed(document["chunks"], list)),
                size_bytes=count(document["size_bytes"]),
            )
            layout._check()
        return layout

    def _check(self) -> None:
        """Believe nothing a stored layout says about places: every piece lies in its tensor and chunk.

        Raises
        ------
        ValueError
            Something lies outside, or tensors are not covered exactly once and in order.
        """
        covered = [0] * len(self.tensors)
        begins = [0] * len(self.tensors)
        end = 0
        for chunk in self.chunks:
            if chunk.offset_bytes < end or chunk.size_bytes < 0:
                raise ValueError("chunks overlap")
            end = chunk.offset_bytes + chunk.size_bytes
            item_bytes, place = ITEM_BYTES[chunk.dtype], 0
            for piece in chunk.pieces:
                if not 0 <= piece.tensor < len(self.tensors) or piece.start != covered[piece.tensor]:
                    raise ValueError(f"a piece of tensor {piece.tensor} is out of order")
                if piece.stop < piece.start or piece.offset_bytes < place:
                    raise ValueError(f"a piece of tensor {piece.tensor} overlaps the one before")
                begin = chunk.offset_bytes + piece.offset_bytes - piece.start * item_bytes
                if piece.start == 0:
                    begins[piece.tensor] = begin
                if begin != begins[piece.tensor] or self.tensors[piece.tensor].dtype != chunk.dtype:
                    raise ValueError(f"a piece of tensor {piece.tensor} lies apart or has another dtype")
                place = piece.offset_bytes + (piece.stop - piece.start) * item_bytes
                covered[piece.tensor] = piece.stop
            if place > chunk.size_bytes or chunk.size_bytes % item_bytes:
                raise ValueError("a piece reaches beyond its chunk, or the chunk ends within an element")
        if end > self.size_bytes or covered != [spec.element_count for spec in self.tensors]:
            raise ValueError("the chunks do not cover the tensors")


def _tensor(name: object, shape: object, dtype: object, kind: object, group: object) -> TensorSpec:
    lengths = tuple(count(length) for length in typed(shape, list))
    return TensorSpec(typed(name, str), lengths, _dtype(dtype), Kind(typed(kind, str)), typed(group, str))


def _chunk(kind: object, dtype: object, offset: object, size: object, pieces: object) -> LayoutChunk:
    found = (Piece(*(count(number) for number in typed(piece, list))) for piece in typed(pieces, list))
    return LayoutChunk(Kind(typed(kind, str)), _dtype(dtype), count(offset), count(size), tuple(found))


def _dtype(value: object) -> str:
    dtype = typed(value, str)
    if dtype not in ITEM_BYTES:
        raise ValueError(f"the unknown dtype {dtype!r}")
    return dtype
