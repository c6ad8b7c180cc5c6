"""The ``shard`` stage: the last, lossless encoding of each chunk, and the pack of a rank.

Forward it encodes chunks with ``byteplane`` and lays them out as one pack; back it opens packs,
checks them and undoes the encoding. With one rank there is one shard; cutting a pack for several
peers comes with the peer tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.registry import codec_from
from stepwell.errors import IntegrityError
from stepwell.pipeline.base import Bytes, Chunk, StageContext
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.pipeline.pack import Packed, PackIdentity, pack_parts

__all__ = ["Shard"]

ENCODED_ALREADY = frozenset({"stepwell.ordered_delta"})
"""Encodings that end in planes and zstd themselves; another pass gains nothing."""


class Shard:
    """Encode, and put together; open, and decode.

    Parameters
    ----------
    codec : str
        ``byteplane`` or ``none``.
    level : int
        zstd level of ``byteplane``; levels above 1 gain nothing on training states.
    """

    name = "shard"

    def __init__(self, codec: str = "byteplane", level: int = 1) -> None:
        self.codec = codec
        self.level = level
        self._planes: dict[int, BytePlane] = {}

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push ``byteplane``, unless it would not make the chunk smaller."""
        if self.codec == "none" or not chunk.raw_bytes:
            return chunk
        if chunk.encodings and chunk.encodings[-1]["id"] in ENCODED_ALREADY:
            return chunk
        planes = self._planes_for(ITEM_BYTES[chunk.dtype])

        def encode() -> Bytes:
            return np.frombuffer(planes.encode(chunk.buffer), dtype=np.uint8)

        encoded = await context.run(encode)
        if encoded.nbytes >= chunk.buffer.nbytes:
            return chunk
        return replace(chunk, buffer=encoded, encodings=(*chunk.encodings, planes.get_config()))

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop ``byteplane``, if it is on top.

        Raises
        ------
        IntegrityError
            The bytes do not decode to what the index says.
        """
        if not chunk.encodings or chunk.encodings[-1]["id"] != "stepwell.byteplane":
            return chunk
        return await context.run(lambda: decode_planes(chunk))

    def pack(self, identity: PackIdentity, header: Mapping[str, object], chunks: Sequence[Chunk]) -> Packed:
        """Put the chunks of one save together; hashes them, so call it in a worker."""
        return pack_parts(identity, header, chunks)

    def _planes_for(self, item_bytes: int) -> BytePlane:
        planes = self._planes.get(item_bytes)
        if planes is None:
            planes = self._planes[item_bytes] = BytePlane(item_bytes, self.level)
        return planes


def decode_planes(chunk: Chunk) -> Chunk:
    """Undo a ``byteplane`` on top of `chunk`; for callers that are in a worker already."""
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
