"""The ``sparsify`` stage: of a difference or gradient only what exceeds a threshold, through the closed loop.

What is dropped is not lost: it stays in the residual, or in the difference from what the reader has, until
it has grown enough to be sent. For gradients this is sound only where the trainer trains on them.
"""

from __future__ import annotations

from stepwell.codecs.registry import codec_from
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.pipeline.base import Bytes, Chunk, StageContext
from stepwell.pipeline.choice import SPARSE
from stepwell.pipeline.loop import Loop, Sender
from stepwell.pipeline.values import undo

__all__ = ["RATE", "Sparsify"]

_IDS = frozenset({"stepwell.threshold_sparse"})

RATE = 0.1
"""Differences of Adam's weights need a tenth at least (measured: facts.md, lossy schemes)."""


class Sparsify:
    """Sparsify what the choices say.

    Parameters
    ----------
    loop : Loop or None
        None: for reading only.
    rate : float
        Share of the elements that is kept.
    values : str
        How they are stored: ``int8`` or ``float32``.
    eps : float, optional
        Largest error of an element that may be left; see ``Sender``.
    """

    name = "sparsify"

    def __init__(
        self,
        loop: Loop | None = None,
        *,
        rate: float = RATE,
        values: str = "int8",
        eps: float | None = None,
    ) -> None:
        self.loop = loop
        if loop is not None:
            loop.offer({SPARSE})
        self._eps = eps
        self._codec = ThresholdSparse(rate, values)
        self._thresholds: dict[tuple[str, int], float] = {}

    async def save(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Push ``threshold_sparse``, where the choice is that."""
        loop = self.loop
        if loop is None:
            return chunk
        place = chunk.layout, chunk.part

        def encode(values: Bytes) -> Bytes:
            frame = self._codec.encode(values, hint=self._thresholds.get(place))
            self._thresholds[place] = self._codec.threshold(frame)
            return frame

        def send() -> Chunk:
            if loop.choice(chunk).treatment != SPARSE:
                return chunk
            return loop.send(chunk, Sender(self._codec, encode, self._eps))

        return await context.run(send)

    async def recover(self, chunk: Chunk, context: StageContext) -> Chunk:
        """Pop ``threshold_sparse``, if it is on top.

        Raises
        ------
        IntegrityError
            The bytes do not decode to what the index says.
        """
        if not chunk.encodings or chunk.encodings[-1].get("id") not in _IDS:
            return chunk
        return await context.run(lambda: undo(chunk, _IDS, codec_from))
