"""The closed loop: what the reader will have is known here, and every error is sent with what follows.

For gradients the residual is carried per (layout, part)::

    g' = g + e        sent = D(Q(g'))        e <- g' - sent

for captured states the difference is taken against what the reader has::

    x^ <- x^ + D(Q(x - x^))

so that the error after any number of saves is that of one call (field.md 5.3, measured there; Karimireddy
2019 for the residual). A codec knows nothing of it. After a base, after a broken log and after a restore
the residual is zero; a state that a base goes along with is told exactly, so that the old base with its
log and the new base alone lead to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash

from stepwell.codecs.base import PlainCodec
from stepwell.codecs.ordered_delta import encode_difference
from stepwell.pipeline.base import Bytes, Chunk, Encoding, Kind
from stepwell.pipeline.choice import EXACT, Choice, Choices
from stepwell.pipeline.layout import ITEM_BYTES, Layout, TensorSpec
from stepwell.pipeline.values import (
    DIFFERENCE,
    Floats,
    add_difference,
    drop_what_is_not_finite,
    error_of,
    largest,
    narrowed,
    widened,
)

__all__ = ["Loop", "Looped", "Sender", "loop_of"]

ORDERED = "stepwell.ordered_delta"
_GAIN = 0.95  # of the raw bytes: an encoding that saves less is not worth an error
Place = tuple[str, int]


@runtime_checkable
class Looped(Protocol):
    """A stage that sends through a loop."""

    loop: Loop | None


def loop_of(stages: Iterable[object]) -> Loop | None:
    """Return the loop that stages share, None where nothing is lossy."""
    return next((stage.loop for stage in stages if isinstance(stage, Looped)), None)


@dataclass(frozen=True, slots=True)
class Sender:
    """How a stage encodes a chunk: its codec, and where its encoder takes more than a buffer, that.

    Attributes
    ----------
    codec : PlainCodec
    encode : callable
    eps : float or None
        The largest error of an element that may be left; beyond it the chunk is sent exactly.
    """

    codec: PlainCodec
    encode: Callable[[Bytes], Bytes]
    eps: float | None = None


class Loop:
    """What the reader of one pipeline has. Used by one save at a time, each chunk by one stage at a time.

    Parameters
    ----------
    choices : Choices
    """

    def __init__(self, choices: Choices) -> None:
        self.policy = choices
        self._layouts: dict[str, Layout] = {}
        self._chosen: dict[Place, Choice] = {}
        self._residuals: dict[Place, Floats] = {}
        self._references: dict[Place, Bytes] = {}
        self._originals: dict[str, Bytes] = {}
        self._told: dict[str, Choice] = {}
        self._errors: dict[str, float] = {}
        self._exactly: str | None = None
        self._offered: frozenset[str] = frozenset({EXACT})

    def offer(self, treatments: Iterable[str]) -> None:
        """A stage of the pipeline takes on these treatments; others cannot be chosen."""
        self._offered |= frozenset(treatments)

    # Told by the runner.

    def begin(self, layouts: Sequence[Layout], *, after_base: bool, with_base: bool) -> None:
        """Begin a save.

        Parameters
        ----------
        layouts : sequence of Layout
            Of everything in it.
        after_base : bool
            It leads on from a base or a restored save: residuals are zero.
        with_base : bool
            A base of the same step goes along: captured states are told exactly.
        """
        self._layouts = {layout.hash: layout for layout in layouts}
        if after_base:
            self._residuals.clear()
        for place in [place for place in self._references if place[0] not in self._layouts]:
            del self._references[place]
        self._chosen = {place: self._chosen[place] for place in self._chosen if place[0] in self._layouts}
        self._exactly = "a base goes along" if with_base else None
        if not self._references:
            self._exactly = "the log begins with it"
        self._originals.clear()
        self._told.clear()
        self._errors.clear()

    def abort(self) -> None:
        """The save will not be committed: what was sent of it reached nobody."""
        self._residuals.clear()
        self._references.clear()
        self._originals.clear()

    def header(self) -> dict[str, object]:
        """What the pack of the save says of it: choices with their reasons, and the bound."""
        choices: dict[str, list[str]] = {}
        for key, choice in self._told.items():
            choices.setdefault(str(choice), []).append(key)
        gradient = any(key.startswith("update/") for key in self._told)
        bound = None if gradient else max(self._errors.values(), default=0.0)
        return {"choices": choices, "bound": bound}

    # Memory.

    @property
    def memory_bytes(self) -> int:
        """Bytes of residuals and references held now."""
        held: list[Floats | Bytes] = [*self._residuals.values(), *self._references.values()]
        return sum(array.nbytes for array in held)

    def forecast_bytes(self, specs: Sequence[TensorSpec], *, gradient: bool) -> int:
        """Bytes that will be held for parameters: their residuals, or what states are told against."""
        total = 0
        for spec in specs:
            if gradient:
                lossy = self.policy.of(spec, Kind.GRADIENT).treatment != EXACT
                total += 4 * spec.element_count if lossy else 0
            else:
                kinds = (Kind.WEIGHT, Kind.MOMENT1, Kind.MOMENT2)
                total += sum(spec.size_bytes for kind in kinds if self.policy.of(spec, kind).told)
        return max(total, self.memory_bytes)

    # Asked by the stages.

    def choice(self, chunk: Chunk) -> Choice:
        """Decide for a chunk, and write it down."""
        choice = self._choice(chunk)
        if self._exactly is not None and chunk.kind is not Kind.GRADIENT and choice.treatment != EXACT:
            choice = Choice(EXACT, self._exactly)
        self._told.setdefault(chunk.key, choice)
        return self._told[chunk.key]

    def told(self, chunk: Chunk) -> bool:
        """Whether a chunk of a state is told as a difference in general, whatever this save does."""
        return chunk.kind is not Kind.GRADIENT and self._choice(chunk).told

    def difference(self, chunk: Chunk) -> Chunk:
        """Tell a chunk of a state against what the reader has, exactly or ready for a lossy stage."""
        choice, reference = self.choice(chunk), self._references.get(_place(chunk))
        if reference is None or reference.nbytes != chunk.buffer.nbytes:
            if choice.treatment != EXACT:
                self._told[chunk.key] = Choice(EXACT, "there is nothing to tell it against yet")
            self._refer(chunk, chunk.buffer)
            return chunk
        if choice.treatment != EXACT:
            with np.errstate(all="ignore"):
                difference = widened(chunk.buffer, chunk.dtype) - widened(reference, chunk.dtype)
            if np.isfinite(difference).all():
                self._originals[chunk.key] = chunk.buffer
                encoding: Encoding = {
                    "id": DIFFERENCE,
                    "dtype": "float32",
                    "reference": "previous",
                    "of": xxhash.xxh3_64_hexdigest(reference.data),
                }
                return replace(
                    chunk, buffer=difference.view(np.uint8), encodings=(*chunk.encodings, encoding)
                )
            self._told[chunk.key] = Choice(EXACT, "not everything in it is finite")
        return self._exact_state(chunk, chunk.buffer, chunk.encodings)

    def send(self, chunk: Chunk, sender: Sender) -> Chunk:
        """Encode a chunk with loss, and keep the books of it."""
        if chunk.encodings:
            # Else it is something already, a third party's.
            told = chunk.encodings[-1].get("id") == DIFFERENCE
            return self._send_difference(chunk, sender) if told else chunk
        if chunk.kind is Kind.GRADIENT:
            return self._send_gradient(chunk, sender)
        return chunk if self._choice(chunk).told else self._send_values(chunk, sender)

    # Inside.

    def _choice(self, chunk: Chunk) -> Choice:
        place = _place(chunk)
        found = self._chosen.get(place)
        if found is None:
            layout = self._layouts.get(chunk.layout)
            if layout is None:
                found = Choice(EXACT, "its layout is not known")
            elif chunk.kind is not Kind.GRADIENT and not chunk.key.startswith("state/"):
                found = Choice(EXACT, "it travels beside gradients")
            else:
                found = self.policy.of_chunk(layout, chunk.part)
            if found.treatment not in self._offered:
                found = Choice(EXACT, f"{found.reason}; but no stage makes it {found.treatment}")
            self._chosen[place] = found
        return found

    def _send_gradient(self, chunk: Chunk, sender: Sender) -> Chunk:
        place = _place(chunk)
        residual = self._residuals.get(place)
        with np.errstate(all="ignore"):
            total = widened(chunk.buffer, chunk.dtype)
            still = [] if residual is None else self._still(chunk, total)
            if residual is not None:
                total = total + residual
                for piece in still:
                    total[piece] = 0
            wire = narrowed(total, chunk.dtype)
            frame = sender.encode(wire)
            sent = widened(sender.codec.decode(frame, max_bytes=chunk.raw_bytes), chunk.dtype)
            left = total - sent
            drop_what_is_not_finite(left)
            over = _reason_to_refresh(frame, chunk, largest(left), sender.eps)
            if over is not None:
                self._told[chunk.key] = Choice(EXACT, over)
                left = total - widened(wire, chunk.dtype)
                drop_what_is_not_finite(left)
                chunk = replace(chunk, buffer=wire.copy())
            else:
                chunk = _encoded(chunk, frame, sender.codec)
        if residual is not None:
            for piece in still:
                left[piece] = residual[piece]
        self._residuals[place] = left
        return chunk

    def _still(self, chunk: Chunk, gradient: Floats) -> list[slice]:
        """Return the tensors without a gradient: what would be sent for them, no replay applies."""
        item_bytes = ITEM_BYTES[chunk.dtype]
        pieces = [
            slice(
                piece.offset_bytes // item_bytes, piece.offset_bytes // item_bytes + piece.stop - piece.start
            )
            for piece in self._layouts[chunk.layout].chunks[chunk.part].pieces
        ]
        return [piece for piece in pieces if not gradient[piece][:1].any() and not gradient[piece].any()]

    def _send_difference(self, chunk: Chunk, sender: Sender) -> Chunk:
        original, reference = self._originals.pop(chunk.key), self._references[_place(chunk)]
        with np.errstate(all="ignore"):
            frame = sender.encode(chunk.buffer)
            sent = sender.codec.decode(frame, max_bytes=chunk.buffer.nbytes)
            reached = add_difference(reference, sent, chunk.dtype)
            error = error_of(original, reached, chunk.dtype)
        over = _reason_to_refresh(frame, chunk, error, sender.eps)
        if over is not None:
            self._told[chunk.key] = Choice(EXACT, over)
            return self._exact_state(chunk, original, chunk.encodings[:-1])
        self._errors[chunk.key] = error
        self._references[_place(chunk)] = reached
        return _encoded(chunk, frame, sender.codec)

    def _send_values(self, chunk: Chunk, sender: Sender) -> Chunk:
        frame = sender.encode(chunk.buffer)
        with np.errstate(all="ignore"):
            sent = sender.codec.decode(frame, max_bytes=chunk.raw_bytes)
            error = error_of(chunk.buffer, sent, chunk.dtype)
        over = _reason_to_refresh(frame, chunk, error, sender.eps)
        if over is not None:
            self._told[chunk.key] = Choice(EXACT, over)
            return chunk
        self._errors[chunk.key] = error
        return _encoded(chunk, frame, sender.codec)

    def _exact_state(self, chunk: Chunk, raw: Bytes, encodings: tuple[Encoding, ...]) -> Chunk:
        reference = self._references[_place(chunk)]
        buffer = np.frombuffer(encode_difference(raw, reference, chunk.dtype), np.uint8)
        self._refer(chunk, raw)
        encoding: Encoding = {"id": ORDERED, "dtype": chunk.dtype, "reference": "previous"}
        return replace(chunk, buffer=buffer, encodings=(*encodings, encoding))

    def _refer(self, chunk: Chunk, raw: Bytes) -> None:
        kept = self._references.get(_place(chunk))
        if kept is not None and kept.nbytes == raw.nbytes and kept.flags.writeable:
            np.copyto(kept, raw)
        else:
            self._references[_place(chunk)] = raw.copy()


def _place(chunk: Chunk) -> Place:
    return chunk.layout, chunk.part


def _encoded(chunk: Chunk, frame: Bytes, codec: PlainCodec) -> Chunk:
    config: Mapping[str, object] = codec.get_config()
    return replace(chunk, buffer=frame, encodings=(*chunk.encodings, config))


def _reason_to_refresh(frame: Bytes, chunk: Chunk, error: float, eps: float | None) -> str | None:
    if not math.isfinite(error):
        return "not everything in it is finite"
    if eps is not None and error > eps:
        return f"dense refresh: the error would be {error:.3g}, more than eps = {eps:g}"
    if frame.nbytes > _GAIN * chunk.raw_bytes:
        return f"no gain: {frame.nbytes} of {chunk.raw_bytes} bytes"
    return None
