"""Values of chunks in the lossy half of the pipeline: as float32 and back, their errors, and decoding.

Both ends of a pipeline compute what the reader has by these functions, so it is the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stepwell.codecs.base import PlainCodec
from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, Encoding
from stepwell.pipeline.layout import ITEM_BYTES

__all__ = [
    "DIFFERENCE",
    "LOSSY",
    "Floats",
    "add_difference",
    "drop_what_is_not_finite",
    "error_of",
    "is_lossy",
    "largest",
    "narrowed",
    "undo",
    "widened",
]

DIFFERENCE = "stepwell.difference"
"""Encoding of a chunk that is x - x^, in float32 whatever the chunk's dtype is."""

LOSSY = frozenset(
    {
        "stepwell.codebook",
        "stepwell.int4",
        "stepwell.int8",
        "stepwell.log_quant",
        "stepwell.threshold_sparse",
    }
)
"""Encodings after which a chunk is no longer what it was."""

Floats = npt.NDArray[np.float32]

_ROUNDING = 1 + 2.0**-20  # errors are measured in float32


def is_lossy(encodings: Sequence[Encoding]) -> bool:
    """Whether a chunk with these encodings does not come back as it was."""
    return any(encoding.get("id") in LOSSY for encoding in encodings)


def undo(chunk: Chunk, ids: frozenset[str], decoder: Callable[[Encoding], PlainCodec]) -> Chunk:
    """Pop a codec of one of these ids from the top of a chunk.

    Raises
    ------
    IntegrityError
        It does not decode, or to another length than the index says.
    """
    if not chunk.encodings or chunk.encodings[-1].get("id") not in ids:
        return chunk
    rest = chunk.encodings[:-1]
    expected = chunk.raw_bytes
    if rest and rest[-1].get("id") == DIFFERENCE:
        expected = chunk.raw_bytes // ITEM_BYTES[chunk.dtype] * 4
    buffer = decoder(chunk.encodings[-1]).decode(chunk.buffer, max_bytes=expected)
    if buffer.nbytes != expected:
        raise IntegrityError(
            f"step {chunk.step}, chunk {chunk.key}: decodes to {buffer.nbytes} of {expected} bytes"
        )
    return replace(chunk, buffer=buffer, encodings=rest)


def add_difference(reference: Bytes, difference: Bytes, dtype: str) -> Bytes:
    """Return what the reader has after a difference, (n,), uint8: the same bits at both ends."""
    with np.errstate(all="ignore"):
        return narrowed(widened(reference, dtype) + difference.view(np.float32), dtype)


def widened(buffer: Bytes, dtype: str) -> Floats:
    """Return the values of a float32 or bfloat16 buffer as float32; a view where they are that."""
    if dtype == "float32":
        return buffer.view(np.float32)
    return (buffer.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrowed(values: Floats, dtype: str) -> Bytes:
    """Return float32 values as bytes of a dtype, rounded to the nearest, ties to even."""
    if dtype == "float32":
        return values.view(np.uint8)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # A NaN whose payload lies below would round to infinity; it stays one, quiet.
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16).view(np.uint8)


def largest(values: Floats) -> float:
    """Return the largest magnitude; not finite if one of them is not."""
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def error_of(wanted: Bytes, found: Bytes, dtype: str) -> float:
    """Return the largest error; where one of the two is not finite, equal bits are no error."""
    left = widened(wanted, dtype) - widened(found, dtype)
    error = largest(left)
    if not math.isfinite(error):
        item = ITEM_BYTES[dtype]
        equal = wanted.view(f"u{item}") == found.view(f"u{item}")
        left[equal] = 0
        error = largest(left)
    return error * _ROUNDING if math.isfinite(error) else math.inf


def drop_what_is_not_finite(values: Floats) -> None:
    """What overflowed or is no number is sent as it is; there is nothing to carry."""
    if not math.isfinite(largest(values)):
        values[~np.isfinite(values)] = 0
