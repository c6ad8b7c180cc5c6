"""Huffman coding without a search for matches: what zstd can do and Python's bindings cannot ask for.

zstd codes literals and matches. On planes of noisy floats its matches are spurious: looking for them
takes most of the time, and taking them makes planes that lean to a few values larger (measured on the
third plane of a difference of weights: 0.259 of its size with the shortest search there is, 0.195
without). The library has settings for that, "fast" with steps as long as a block (which by itself
means no compression of literals either) and "compress literals"; the second is among its advanced
parameters, which neither ``zstandard`` nor ``numcodecs`` passes on. But the compiled module of
numcodecs holds the library, or is linked to it, and where the platform lets its functions be seen they
are called here through ctypes, which lets the interpreter lock go.

What comes out is a standard zstd frame. Where the functions are not to be had, or do not do what they
should when they are first tried, there is no coder, and ``stepwell.codecs.coders`` goes without.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Protocol, cast

import numpy as np
import zstandard

from stepwell.codecs.buffers import Bytes

__all__ = ["HuffmanCoder", "huffman_coder"]

# ZSTD_cParameter of zstd.h; literalCompressionMode is ZSTD_c_experimentalParam5, where 1 is Huffman
# coding whatever the strategy. The same since 1.4.0, the first version that has them all.
_VERSION_MIN = 10400
_LEVEL, _WINDOW_LOG, _HASH_LOG, _TARGET_LENGTH, _STRATEGY, _LITERALS = 100, 101, 102, 106, 107, 1002
_SETTINGS = {
    _LEVEL: 1,
    _HASH_LOG: 6,
    _TARGET_LENGTH: 1 << 17,  # the step of the search: past the end of any block
    _STRATEGY: 1,
    _LITERALS: 1,
}
# A block, and with it a Huffman table, is as long as the window. Rows of a tensor differ in scale, and a
# table of one's own for every 32 KiB is worth more than its bytes (high plane of gradients: 0.374 of its
# size against 0.381); of a small array it is not.
_WINDOW_LOGS = (16, 15)
_ONE_BLOCK_BYTES_MAX = 1 << 16
_TRIAL_BYTES = 1 << 15


class _Function(Protocol):
    argtypes: list[object]
    restype: object

    def __call__(self, *arguments: object) -> int | None: ...


class _Library:
    """The few functions of libzstd, with their types declared."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def function(name: str, result: object, *arguments: object) -> _Function:
            found = cast(_Function, getattr(library, name))
            found.restype, found.argtypes = result, list(arguments)
            return found

        self.version = function("ZSTD_versionNumber", ctypes.c_uint)
        self.create = function("ZSTD_createCCtx", pointer)
        self.free = function("ZSTD_freeCCtx", size, pointer)
        self.set = function("ZSTD_CCtx_setParameter", size, pointer, number, number)
        self.is_error = function("ZSTD_isError", ctypes.c_uint, size)
        self.compress = function("ZSTD_compress2", size, pointer, pointer, size, pointer, size)


class HuffmanCoder:
    """Contexts of the library, of one thread.

    Raises
    ------
    OSError
        The library refuses the context or its settings.
    """

    def __init__(self, library: _Library) -> None:
        self._free = library.free
        self._compress = library.compress
        self._contexts: list[int] = []
        for window_log in _WINDOW_LOGS:
            context = library.create()
            if not context:
                raise OSError("zstd has no memory for a context")
            self._contexts.append(context)
            for parameter, value in (*_SETTINGS.items(), (_WINDOW_LOG, window_log)):
                if library.is_error(library.set(context, parameter, value)):
                    raise OSError(f"zstd refuses {value} for its parameter {parameter}")

    def __del__(self) -> None:
        for context in getattr(self, "_contexts", ()):
            self._free(context)

    def encode_into(self, data: Bytes, into: Bytes) -> int:
        """Write a zstd frame of `data` and return its size; 0 if it does not fit.

        Parameters
        ----------
        data, into : ndarray, (n,), uint8
            Contiguous, apart from each other.
        """
        size = self._compress(
            self._contexts[data.size > _ONE_BLOCK_BYTES_MAX],
            into.__array_interface__["data"][0],
            into.size,
            data.__array_interface__["data"][0],
            data.size,
        )
        # Errors are the numbers below zero of a size_t; that it does not fit is the one there can be.
        return size if size is not None and size <= into.size else 0


def huffman_coder() -> HuffmanCoder | None:
    """Return a coder for the calling thread, or None where there is none."""
    library = _library()
    return None if library is None else HuffmanCoder(library)


@cache
def _library() -> _Library | None:
    """Find the library and try it once: the settings must have the effect they are for."""
    try:
        import numcodecs.zstd as holder  # type: ignore[import-untyped]

        library = _Library(str(holder.__file__))
        version = library.version()
        if version is None or version < _VERSION_MIN:
            return None
        coder = HuffmanCoder(library)
    except (ImportError, OSError, AttributeError):
        return None
    return library if _does_as_meant(coder) else None


def _does_as_meant(coder: HuffmanCoder) -> bool:
    """Tell whether a plane that leans to one value is coded as Huffman codes it, and comes back."""
    noise = np.arange(1, 1 + _TRIAL_BYTES, dtype=np.uint32)
    for factor in (0x9E3779B1, 0x85EBCA77):  # the odd factors of xxh32: any that mix well would do
        noise ^= noise >> np.uint32(15)
        noise *= np.uint32(factor)
    noise >>= np.uint32(24)
    trial = np.where(noise < 128, 0, noise >> 5).astype(np.uint8)  # 0, or one of 4 to 7: 2 bits of entropy
    frame = np.empty(_TRIAL_BYTES, np.uint8)
    size = coder.encode_into(trial, frame)
    if not 0 < size < 0.26 * _TRIAL_BYTES:
        return False
    try:
        decoded = zstandard.ZstdDecompressor().decompress(frame[:size].data, max_output_size=_TRIAL_BYTES)
    except zstandard.ZstdError:
        return False
    return decoded == trial.tobytes()
