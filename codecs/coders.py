"""The zstd coders of a thread: two that write, one that reads.

- *match*, level 1 as it is meant, for planes that repeat;
- *entropy*, Huffman coding and no matches (``stepwell.codecs.huffman``); where that cannot be had,
  level 1 with the smallest hash table zstd allows and the longest minimal match, which comes near it.

All write standard zstd frames.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zstandard

from stepwell.codecs.buffers import Bytes
from stepwell.codecs.huffman import huffman_coder

__all__ = ["CODERS", "Coder"]

_WINDOW_BYTES_MAX = 1 << 20  # our planes are one segment of at most 128 KiB


class Coder(Protocol):
    """Something that compresses."""

    def encode_into(self, data: Bytes, into: Bytes) -> int:
        """Write a zstd frame of `data` and return its size; 0 if it does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class _Stock:
    """A compressor of ``zstandard``."""

    compressor: zstandard.ZstdCompressor

    def encode_into(self, data: Bytes, into: Bytes) -> int:
        packed = self.compressor.compress(data.data)
        if len(packed) > into.size:
            return 0
        np.copyto(into[: len(packed)], np.frombuffer(packed, np.uint8))
        return len(packed)


class _Coders(threading.local):
    """Contexts are costly to make, and not to be shared between threads."""

    def __init__(self) -> None:
        self._match: dict[int, Coder] = {}
        self._entropy: Coder | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def match_of(self, level: int) -> Coder:
        """Return the coder for planes that repeat."""
        coder = self._match.get(level)
        if coder is None:
            # Of level 1, measured on planes: as small as the stock one and faster.
            coder = _with_hash_of(12) if level == 1 else _Stock(zstandard.ZstdCompressor(level=level))
            self._match[level] = coder
        return coder

    def entropy(self) -> Coder:
        """Return the coder for planes that do not."""
        if self._entropy is None:
            self._entropy = huffman_coder() or _with_hash_of(6)
        return self._entropy

    def decompressor(self) -> zstandard.ZstdDecompressor:
        """Return what reads the frames of all of them."""
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
        return self._decompressor


def _with_hash_of(log2: int) -> Coder:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=log2, chain_log=6)
    return _Stock(zstandard.ZstdCompressor(compression_params=parameters))


CODERS = _Coders()
