"""The ``shard`` stage: the last, lossless encoding of each chunk, and the pack of a rank.

Forward it encodes chunks with ``scaled_bf16`` or ``byteplane``, whichever serves, and lays them out as
one pack; back it opens packs, checks them and undoes the encoding. With one rank there is one shard;
cutting a pack for several peers comes with the peer tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.factor import find_factor
from stepwell.codecs.registry import codec_from
from stepwell.codecs.scaled_bf16 import ScaledBf16
from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, Encoding, Kind, StageContext
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.pipeline.pack import Packed, PackIdentity, pack_parts
from stepwell.pipeline.predictive import PREDICTIVE
from stepwell.pipeline.values import LOSSY

__all__ = ["Shard"]

ENCODED_ALREADY = LOSSY | {"stepwell.ordered_delta", PREDICTIVE}
"""Encodings that end in planes and zstd themselves; another pass gains nothing."""

LOSSLESS = frozenset({"stepwell.byteplane", "stepwell.scaled_bf16"})
"""What this stage pushes."""

_CLEARLY_SCALED = 0.55  # of the raw bytes; byteplane makes 0.84 of float32 gradients (measured)

# A search in vain costs 1 to 6 ms, beside 80 ms of byteplane for 16 MiB: after some, few are tried.
_MISSES_IN_A_ROW = 4
_CHUNKS_PER_TRY = 32


class Shard:
    """Encode, and put together; open, and decode.

    Parameters
    ----------
    codec : str
        ``byteplane`` (and ``scaled_bf16`` where gradients are that) or ``none``.
    level : int
        zstd level; levels above 1 gain nothing on training states.
    """

    name = "shard"

    def __init__(self, codec: str = "byteplane", level: int = 1) -> None:
        self.codec = codec
        self.level = level
        self._planes: dict[int, BytePlane] = {}
        self._scaled = ScaledBf16(level)
        self._factor: float | None = None
        self._misses = 0

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push the codec that serves, unless it would not make the chunk smaller."""
        if self.codec == "none" or not chunk.buffer.nbytes:
            return chunk
        if chunk.encodings and chunk.encodings[-1]["id"] in ENCODED_ALREADY:
            return chunk
        planes = self._planes_for(ITEM_BYTES[chunk.dtype])

        def encode() -> tuple[Bytes, Encoding]:
            scaled = self._scaled_frame(chunk)
            if scaled is not None and scaled.nbytes <= _CLEARLY_SCALED * chunk.raw_bytes:
                return scaled, self._scaled.get_config()
            frame = np.frombuffer(planes.encode(chunk.buffer), dtype=np.uint8)
            if scaled is not None and scaled.nbytes < frame.nbytes:
                return scaled, self._scaled.get_config()
            return frame, planes.get_config()

        encoded, config = await context.run(encode)
        if encoded.nbytes >= chunk.buffer.nbytes:
            return chunk
        return replace(chunk, buffer=encoded, encodings=(*chunk.encodings, config))

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop ``byteplane`` or ``scaled_bf16``, if one is on top.

        Raises
        ------
        IntegrityError
            The bytes do not decode to what the index says.
        """
        if not chunk.encodings or chunk.encodings[-1]["id"] not in LOSSLESS:
            return chunk
        return await context.run(lambda: decode_planes(chunk))

    def pack(self, identity: PackIdentity, header: Mapping[str, object], chunks: Sequence[Chunk]) -> Packed:
        """Put the chunks of one save together; hashes them, so call it in a worker."""
        return pack_parts(identity, header, chunks)

    def _scaled_frame(self, chunk: Chunk) -> Bytes | None:
        """Encode a gradient as bfloat16 values times one factor, if it is that; the search is remembered."""
        if chunk.kind is not Kind.GRADIENT or chunk.dtype != "float32" or chunk.encodings:
            return None
        if self._misses >= _MISSES_IN_A_ROW and self._misses % _CHUNKS_PER_TRY:
            self._misses += 1
            return None
        factor = find_factor(chunk.buffer.view(np.float32), self._factor)
        if factor is None:
            self._misses += 1
            return None
        self._factor, self._misses = float(factor), 0
        return self._scaled.encode(chunk.buffer, hint=self._factor)

    def _planes_for(self, item_bytes: int) -> BytePlane:
        planes = self._planes.get(item_bytes)
        if planes is None:
            planes = self._planes[item_bytes] = BytePlane(item_bytes, self.level)
        return planes


def decode_planes(chunk: Chunk) -> Chunk:
    """Undo a lossless codec on top of `chunk`; for callers that are in a worker already."""
    codec = codec_from(chunk.encodings[-1])
    rest = chunk.encodings[:-1]
    # Only an innermost encoding has to give the raw length back.
    out = np.empty(chunk.raw_bytes, dtype=np.uint8) if not rest else None
    decoded = codec.decode(chunk.buffer, out=out, max_bytes=chunk.raw_bytes)
    buffer = np.frombuffer(decoded, dtype=np.uint8) if out is None else out
    if not rest and buffer.nbytes != chunk.raw_bytes:
        raise IntegrityError(
            f"step {chunk.step}, chunk {chunk.key}: decodes to {buffer.nbytes} of {chunk.raw_bytes} bytes"
        )
    return replace(chunk, buffer=buffer, encodings=rest)
