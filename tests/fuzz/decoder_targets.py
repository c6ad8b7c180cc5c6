"""Every decoder of the registry as a target, with valid frames, and how those are damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from dice import Dice, damage
from fuzzing import CORPUS, RAW_BYTES_MAX, bounded

from stepwell.codecs.codebook import Codebook
from stepwell.codecs.frame import read_frame
from stepwell.codecs.ordered_delta import decode_difference, encode_difference
from stepwell.codecs.registry import codec_from
from stepwell.codecs.sections import compose, encode_section, read_section
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.xor_delta import decode_xor, encode_xor
from stepwell.codecs.xxh3 import Xxh3
from stepwell.errors import IntegrityError

CONFIGS: dict[str, list[dict[str, Any]]] = {
    "stepwell.byteplane": [{"itemsize": 1}, {"itemsize": 4}, {"itemsize": 16}],
    "stepwell.codebook": [{"block": 64}, {"block": 256}],
    "stepwell.int4": [{"block": 16}, {"dtype": "bfloat16"}],
    "stepwell.int8": [{"block": 16}, {"dtype": "bfloat16"}],
    "stepwell.log_quant": [{"block": 16}, {"bits": 4}, {"dtype": "bfloat16"}],
    "stepwell.ordered_delta": [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "uint8"}],
    "stepwell.scaled_bf16": [{}],
    "stepwell.threshold_sparse": [
        {"rate": 0.03},
        {"rate": 0.03, "values": "int8"},
        {"rate": 0.3, "values": "int8"},
    ],
    "stepwell.xor_delta": [{"dtype": "float32"}, {"dtype": "bfloat16"}],
    "stepwell.xxh3": [{}],
}

Decode = Callable[[bytes, npt.NDArray[np.uint8] | None, int | None], npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class DecoderTarget:
    """A decoder and valid frames for it; `inspect` are other readers of the same frames."""

    name: str
    decode: Decode
    frames: tuple[bytes, ...]
    sizes: tuple[int, ...]
    inspect: tuple[Callable[[bytes], object], ...] = ()

    @property
    def corpus(self) -> Path:
        """All decoders share what was found."""
        return CORPUS

    def make(self, dice: Dice) -> bytes:
        """Change valid frames, or make bytes up behind a true beginning."""
        frame = self.frames[dice.number(0, len(self.frames) - 1)]
        if dice.number(0, 9) == 0:
            return frame[: dice.number(0, 24)] + dice.some(0, 300)
        for _ in range(dice.number(0, 4)):
            outside = dice.number(0, 1)
            frame = damage(dice, frame, self.frames) if outside else damage_inside(dice, frame)
        if self.name == "stepwell.xxh3" and dice.number(0, 1):
            frame = Xxh3().encode(frame).tobytes()
        return frame

    def check(self, case: bytes) -> None:
        """Assert that the decoder refuses a frame in the one way allowed, or decodes it wholly."""
        found: npt.NDArray[np.uint8] | None = None
        with bounded(), suppress(IntegrityError):
            found = self.decode(case, None, RAW_BYTES_MAX)
        for read in self.inspect:
            try:
                read(case)
            except IntegrityError:
                assert found is None or read is Codebook.bounds_of_frame
        if found is None:
            return
        assert found.dtype == np.uint8
        assert found.size <= RAW_BYTES_MAX
        for filler in (0x00, 0xFF):  # a byte that was not written shows
            out = np.full(found.size, filler, np.uint8)
            self.decode(case, out, None)
            assert np.array_equal(out, found), "the same frame gave two results"


def raws() -> list[npt.NDArray[np.float32]]:
    """Return small arrays that make the codecs use all they have."""
    generator = np.random.default_rng(5)
    plain = generator.standard_normal(700, np.float32)
    special = generator.standard_normal(1500, np.float32) ** 3
    special[[1, 700, 1400]] = [np.nan, np.inf, -0.0]
    sparse = np.zeros(5000, np.float32)
    sparse[generator.integers(0, 5000, 30)] = generator.standard_normal(30)
    halves = (plain.view(np.uint32) & 0xFFFF0000).view(np.float32) * np.float32(0.3)
    long = np.repeat(np.array([1.0, 2.5], np.float32), 3000)
    return [plain, special, sparse, halves, np.abs(plain) + 1e-9, long, plain[:5], plain[:0]]


def decoders() -> Iterator[DecoderTarget]:
    """Yield every decoder of the registry, and the two that need a reference."""
    arrays = raws()
    sizes = tuple(array.nbytes for array in arrays)
    readers: dict[str, tuple[Callable[[bytes], object], ...]] = {
        "stepwell.codebook": (Codebook.bound_of_frame, Codebook.bounds_of_frame),
        "stepwell.threshold_sparse": (ThresholdSparse.bound_of_frame, ThresholdSparse.threshold),
    }
    for codec_id, configs in CONFIGS.items():
        for config in configs:
            codec = codec_from({"id": codec_id, **config})
            frames = tuple(codec.encode(array).tobytes() for array in arrays)

            def decode(
                frame: bytes, out: npt.NDArray[np.uint8] | None, max_bytes: int | None, codec: Any = codec
            ) -> npt.NDArray[np.uint8]:
                found: npt.NDArray[np.uint8] = codec.decode(frame, out, max_bytes=max_bytes)
                return found

            name = "-".join([codec_id, *(f"{value}" for value in config.values())])
            yield DecoderTarget(name, decode, frames, sizes, readers.get(codec_id, ()))
    reference = np.abs(arrays[0])
    for name, encode, undo in (
        ("ordered_delta-reference", encode_difference, decode_difference),
        ("xor_delta-reference", encode_xor, decode_xor),
    ):

        def decode_against(
            frame: bytes, out: npt.NDArray[np.uint8] | None, max_bytes: int | None, undo: Any = undo
        ) -> npt.NDArray[np.uint8]:
            found: npt.NDArray[np.uint8] = undo(frame, reference, "float32", out, max_bytes=max_bytes)
            return found

        frames = (encode(arrays[0], reference, "float32").tobytes(),)
        yield DecoderTarget(f"stepwell.{name}", decode_against, frames, (reference.nbytes,))


DECODERS = {target.name: target for target in decoders()}


def take_apart(frame: bytes) -> tuple[bytes, int, int, bytes, list[bytes]] | None:
    """Return magic, kind, length, parameters and sections of a composed frame; None of any other."""
    if len(frame) < 16 or not frame.startswith(b"SW") or frame.startswith(b"SWPF"):
        return None
    magic, version, kind, count, zero, length = struct.unpack_from("<4sBBBBQ", frame)
    if version != 1 or zero or count > 8 or len(frame) < 16 + 8 * count:
        return None
    sizes = struct.unpack_from(f"<{count}Q", frame, 16)
    start = len(frame) - sum(sizes)
    if not 16 + 8 * count <= start <= 16 + 8 * count + 64:
        return None
    parameters, sections = frame[16 + 8 * count : start], []
    for size in sizes:
        sections.append(frame[start : start + size])
        start += size
    return magic, kind, length, parameters, sections


def damage_section(dice: Dice, section: bytes) -> bytes:
    """Change the elements that a section holds, or its bytes if it is none of byte planes."""
    data = np.frombuffer(section, np.uint8)
    try:
        header = read_frame(data, RAW_BYTES_MAX)
        raw = read_section(data, header.itemsize, header.length, "section").tobytes()
    except IntegrityError:
        return damage(dice, section, [section])
    raw = damage(dice, raw, [raw])
    values = np.frombuffer(raw[: len(raw) // header.itemsize * header.itemsize], f"<u{header.itemsize}")
    return encode_section(values, 1).tobytes()


def damage_inside(dice: Dice, frame: bytes) -> bytes:
    """Change the parameters or what a section holds, and put the frame together so that it fits."""
    parts = take_apart(frame)
    if parts is None or not parts[4]:
        return frame
    magic, kind, length, parameters, sections = parts
    which = dice.number(0, len(sections))
    if which < len(sections):
        sections[which] = damage_section(dice, sections[which])
    elif parameters:
        changed = damage(dice, parameters, [parameters])
        parameters = changed.ljust(len(parameters), b"\0")[: len(parameters)]
    if dice.number(0, 3) == 0:
        length += 4 * dice.number(-8, 8)
    length = max(0, min(length, 2 * RAW_BYTES_MAX))  # it may be damaged already
    arrays = [np.frombuffer(part, np.uint8) for part in sections]
    return compose(magic, kind, length, parameters, arrays).tobytes()
