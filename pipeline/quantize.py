"""The ``quantize`` stage: values with fewer bits, through the closed loop.

Forward it pushes ``int8``, ``int4``, ``log_quant`` or ``codebook``, as the choice for a chunk says; back
it pops any of them, whatever today's configuration is.
"""

from __future__ import annotations

from collections.abc import Callable

from stepwell.codecs.codebook import Codebook
from stepwell.codecs.int4 import Int4
from stepwell.codecs.int8 import Int8
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.registry import codec_from
from stepwell.pipeline.base import Chunk, StageContext
from stepwell.pipeline.choice import LINEAR, OF_VALUES
from stepwell.pipeline.loop import Loop, Sender
from stepwell.pipeline.values import undo

__all__ = ["Quantize"]

_IDS = frozenset({"stepwell.codebook", "stepwell.int4", "stepwell.int8", "stepwell.log_quant"})
_HERE = LINEAR | OF_VALUES

_BLOCK = 256  # elements to a scale; 8.125 bits per element (field.md 5.3)


class Quantize:
    """Quantize what the choices say.

    Parameters
    ----------
    loop : Loop or None
        None: for reading only.
    eps : float, optional
        Largest error of an element that may be left; see ``Sender``.
    block : int
        Elements that share a scale of ``int8`` and ``int4``.
    """

    name = "quantize"

    def __init__(self, loop: Loop | None = None, *, eps: float | None = None, block: int = _BLOCK) -> None:
        self.loop = loop
        if loop is not None:
            loop.offer(_HERE)
        self._eps = eps
        self._block = block
        self._senders: dict[tuple[str, str], Sender] = {}

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push a codec, where the choice is one of quantization."""
        loop = self.loop
        if loop is None:
            return chunk

        def encode() -> Chunk:
            treatment = loop.choice(chunk).treatment
            if treatment not in _HERE:
                return chunk
            # A difference is one of float32, whatever the state is.
            return loop.send(chunk, self._sender(treatment, "float32" if chunk.encodings else chunk.dtype))

        return await context.run(encode)

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop a codec of quantization, if one is on top.

        Raises
        ------
        IntegrityError
            The bytes do not decode to what the index says.
        """
        if not chunk.encodings or chunk.encodings[-1].get("id") not in _IDS:
            return chunk
        return await context.run(lambda: undo(chunk, _IDS, codec_from))

    def _sender(self, treatment: str, dtype: str) -> Sender:
        sender = self._senders.get((treatment, dtype))
        if sender is None:
            codec = _CODECS[treatment](dtype, self._block)
            sender = self._senders[treatment, dtype] = Sender(codec, codec.encode, self._eps)
        return sender


_CODECS: dict[str, Callable[[str, int], Int8 | Int4 | LogQuant | Codebook]] = {
    "int8": lambda dtype, block: Int8(dtype, block),
    "int4": lambda dtype, block: Int4(dtype, block),
    "log_quant": lambda dtype, block: LogQuant(dtype, 8),
    "log_quant4": lambda dtype, block: LogQuant(dtype, 4),
    "codebook": lambda dtype, block: Codebook(),
}
