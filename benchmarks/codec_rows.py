"""The rows of ``benchmarks.codecs``: every codec and every peer on the same bytes, side by side.

All that is compared runs in turn within each repeat, so that a machine that slows down slows all of
it. What counts is processor time, of all threads of the process: whatever else the machine does leaves
it alone. Whatever claims to be lossless is compared with what went in before it is timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.trajectory import Floats, Phase
from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.codebook import Codebook
from stepwell.codecs.int4 import Int4
from stepwell.codecs.int8 import Int8
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.scaled_bf16 import ScaledBf16
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.xor_delta import XorDelta

__all__ = ["BASELINE", "LOSSLESS", "Peer", "Row", "find_peers", "measure_phase"]

Array = npt.NDArray[np.generic]
Row = dict[str, object]

BASELINE = "zstd-1"
LOSSLESS = ("byteplane", "ordered_delta", "xor_delta", "scaled_bf16")
_TIMED_BYTES = 4 << 20  # smaller inputs are encoded several times for one timing


@dataclass(frozen=True, slots=True)
class Peer:
    """A compressor of somebody else, lossless.

    Attributes
    ----------
    encode : callable
        From an array to something with a buffer.
    decode : callable
        From that and an array to write into, to the decoded bytes.
    """

    encode: Callable[[Array], object]
    decode: Callable[[object, Array], object]


@dataclass(frozen=True, slots=True)
class _Case:
    codec: str
    lossless: bool
    encode: Callable[[], object]
    decode: Callable[[object, Array], object]


@dataclass(frozen=True, slots=True)
class _Group:
    """What is measured side by side: codecs on one and the same array."""

    tensor: str
    dtype: str
    gap: int
    raw: Array
    cases: list[_Case]


def find_peers() -> tuple[dict[str, Peer], list[str]]:
    """Return the peers that can be imported, by name, and the names of the others."""
    makers: dict[str, Callable[[], Peer]] = {
        BASELINE: _zstd,
        "blosc-lz4": lambda: _blosc("lz4", 5),
        "blosc-zstd": lambda: _blosc("zstd", 1),
        "pcodec": _pcodec,
        "zipnn": _zipnn,
    }
    peers: dict[str, Peer] = {}
    absent: list[str] = []
    for name, make in makers.items():
        try:
            peers[name] = make()
        except ImportError:
            absent.append(name)
    return peers, absent


def _zstd() -> Peer:
    from numcodecs.zstd import Zstd

    codec = Zstd(level=1)
    return Peer(codec.encode, lambda encoded, out: codec.decode(encoded, out=out))


def _blosc(name: str, level: int) -> Peer:
    from numcodecs import blosc

    blosc.set_nthreads(1)
    codec = blosc.Blosc(cname=name, clevel=level, shuffle=blosc.Blosc.SHUFFLE)
    return Peer(codec.encode, lambda encoded, out: codec.decode(encoded, out=out))


def _pcodec() -> Peer:
    from pcodec import ChunkConfig, standalone

    def decode(encoded: object, out: Array) -> object:
        standalone.simple_decompress_into(encoded, out)
        return out

    return Peer(lambda raw: standalone.simple_compress(raw, ChunkConfig()), decode)


def _zipnn() -> Peer:
    from zipnn import ZipNN

    # It works on bytes of a type it is told, and may write into what it is given.
    codecs = {
        itemsize: ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
        for itemsize, dtype in ((4, "float32"), (2, "bfloat16"))
    }

    def encode(raw: Array) -> object:
        return raw.dtype.itemsize, codecs[raw.dtype.itemsize].compress(bytearray(raw.data))

    def decode(encoded: object, out: Array) -> object:
        itemsize, data = encoded  # type: ignore[misc]
        return codecs[itemsize].decompress(data)

    return Peer(encode, decode)


def measure_phase(phase: Phase, peers: Mapping[str, Peer], repeats: int) -> tuple[list[Row], list[float]]:
    """Measure all codecs on one phase.

    Returns
    -------
    list of dict
        One row a codec and tensor.
    list of float
        GB/s of a plain copy of the same arrays, timed among them.
    """
    rows: list[Row] = []
    copies: list[float] = []
    for group in _groups(phase, peers):
        found, copied = _measure(group, repeats)
        rows.extend({**row, "phase": phase.name} for row in found)
        copies.extend(copied)
    return rows, copies


def _groups(phase: Phase, peers: Mapping[str, Peer]) -> Iterator[_Group]:
    second = phase.second
    for tensor in "wmvg":
        raw: Floats = getattr(second, tensor)
        cases = [_ours("byteplane", BytePlane(4), raw), *_lossy(tensor, raw), *_theirs(peers, raw)]
        yield _Group(tensor, "float32", 0, raw, cases)
    raw = second.g_bf16
    cases = [_ours("scaled_bf16", ScaledBf16(), raw), _ours("byteplane", BytePlane(4), raw)]
    yield _Group("g", "float32, bfloat16 values", 0, raw, [*cases, *_theirs(peers, raw)])
    half = _halves(second.w)
    yield _Group("w", "bfloat16", 0, half, [_ours("byteplane", BytePlane(2), half), *_theirs(peers, half)])

    baseline = {BASELINE: peers[BASELINE]}
    for gap, current in ((1, second), (phase.wide.step - phase.first.step, phase.wide)):
        for tensor in "wmv":
            raw, reference = getattr(current, tensor), getattr(phase.first, tensor)
            yield _Group(tensor, "float32", gap, raw, _differences("float32", raw, reference, baseline))
        half, reference = _halves(current.w), _halves(phase.first.w)
        yield _Group("w", "bfloat16", gap, half, _differences("bfloat16", half, reference, baseline))


def _lossy(tensor: str, raw: Floats) -> list[_Case]:
    made: dict[str, list[tuple[str, object]]] = {
        "w": [],
        "m": [("int8", Int8()), ("codebook", Codebook())],
        "v": [("log_quant-8", LogQuant(bits=8)), ("log_quant-4", LogQuant(bits=4))],
        "g": [
            ("int8", Int8()),
            ("int4", Int4()),
            ("threshold_sparse-10%", ThresholdSparse(0.1, "int8")),
            ("threshold_sparse-1%", ThresholdSparse(0.01, "int8")),
        ],
    }
    return [_ours(name, codec, raw, lossless=False) for name, codec in made[tensor]]


def _ours(name: str, codec: object, raw: Array, *, lossless: bool = True) -> _Case:
    return _Case(
        name,
        lossless,
        lambda: codec.encode(raw),  # type: ignore[attr-defined]
        lambda encoded, out: codec.decode(encoded, out),  # type: ignore[attr-defined]
    )


def _against(name: str, dtype: str, raw: Array, reference: Array) -> _Case:
    codec = OrderedDelta(dtype) if name == "ordered_delta" else XorDelta(dtype)
    return _Case(
        name,
        True,
        lambda: codec.encode(raw, reference),
        lambda encoded, out: codec.decode(encoded, out, reference=reference),  # type: ignore[arg-type]
    )


def _differences(dtype: str, raw: Array, reference: Array, baseline: Mapping[str, Peer]) -> list[_Case]:
    ours = [_against(name, dtype, raw, reference) for name in ("ordered_delta", "xor_delta")]
    return [*ours, *_theirs(baseline, raw), _plain_difference(raw, reference, baseline[BASELINE])]


def _plain_difference(raw: Array, reference: Array, peer: Peer) -> _Case:
    """Make what one would write without us: bitwise differences, compressed as they are."""
    words = f"<u{raw.dtype.itemsize}"
    current, before = raw.view(words), reference.view(words)
    difference = np.empty_like(current)

    def encode() -> object:
        return peer.encode(np.bitwise_xor(current, before, out=difference))

    def decode(encoded: object, out: Array) -> object:
        peer.decode(encoded, difference)
        return np.bitwise_xor(difference, before, out=out.view(words))

    return _Case(f"xor, {BASELINE}", True, encode, decode)


def _theirs(peers: Mapping[str, Peer], raw: Array) -> list[_Case]:
    # A default binds the peer of this turn.
    return [
        _Case(name, True, lambda peer=peer: peer.encode(raw), peer.decode)  # type: ignore[misc]
        for name, peer in peers.items()
    ]


def _halves(values: Floats) -> Array:
    """Return the bits of the nearest bfloat16 values, uint16."""
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def _measure(group: _Group, repeats: int) -> tuple[list[Row], list[float]]:
    """Time all cases of a group in turn, `repeats` times after one untimed round."""
    raw, out = group.raw, np.zeros_like(group.raw)
    inner = max(1, math.ceil(_TIMED_BYTES / raw.nbytes))
    encoded = [case.encode() for case in group.cases]
    for case, data in zip(group.cases, encoded, strict=True):
        decoded = np.frombuffer(case.decode(data, out), np.uint8)  # type: ignore[call-overload]
        if case.lossless and not np.array_equal(decoded, raw.reshape(-1).view(np.uint8)):
            raise AssertionError(f"{case.codec} of {group.tensor} ({group.dtype}) came back otherwise")
    np.copyto(out, raw)
    copies: list[float] = []
    encodes: list[list[float]] = [[] for _ in encoded]
    decodes: list[list[float]] = [[] for _ in encoded]
    for _ in range(repeats):
        copies.append(raw.nbytes / _seconds(lambda: np.copyto(out, raw), inner) / 1e9)
        for index, case in enumerate(group.cases):
            data = encoded[index]
            encodes[index].append(_seconds(case.encode, inner))
            decodes[index].append(_seconds(lambda case=case, data=data: case.decode(data, out), inner))
    return [
        {
            "codec": case.codec,
            "tensor": group.tensor,
            "dtype": group.dtype,
            "gap": group.gap,
            "lossless": case.lossless,
            "ratio": raw.nbytes / _size_bytes(data),
            "encode_gbps": raw.nbytes / statistics.median(encode) / 1e9,
            "decode_gbps": raw.nbytes / statistics.median(decode) / 1e9,
        }
        for case, data, encode, decode in zip(group.cases, encoded, encodes, decodes, strict=True)
    ], copies


def _seconds(call: Callable[[], object], inner: int) -> float:
    began = time.process_time()
    for _ in range(inner):
        call()
    return (time.process_time() - began) / inner


def _size_bytes(encoded: object) -> int:
    data = encoded[1] if isinstance(encoded, tuple) else encoded
    return memoryview(data).nbytes  # type: ignore[arg-type]
