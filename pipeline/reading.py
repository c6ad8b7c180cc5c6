"""The chunk stages that read: whatever a save was written with, today's configuration does not matter."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.pipeline.base import ChunkStage
from stepwell.pipeline.delta import DifferenceStage, NoDelta, OrderedDeltaStage, PredictiveStage
from stepwell.pipeline.derive import Derive
from stepwell.pipeline.quantize import Quantize
from stepwell.pipeline.shard import Shard
from stepwell.pipeline.sparsify import Sparsify

__all__ = ["reading_stages"]


class DeltaReader(DifferenceStage, PredictiveStage):
    """Undoes every kind of difference; one set of references serves them all."""

    name = "delta"


_ORDER = ((Derive,), (NoDelta, OrderedDeltaStage, DifferenceStage), (Quantize,), (Sparsify,))


def reading_stages(configured: Sequence[ChunkStage] = ()) -> list[ChunkStage]:
    """Return fresh stages of ours, all of them, with those of third parties in the places they have.

    Parameters
    ----------
    configured : sequence of ChunkStage
        Fresh stages of today's pipeline, in saving order; ours among them only give places.
    """
    delta = DeltaReader()
    readers: list[ChunkStage] = [Derive(delta.fresh), delta, Quantize(), Sparsify()]
    stages: list[ChunkStage] = []
    placed = 0
    for stage in configured:
        rank = next((rank for rank, kinds in enumerate(_ORDER) if isinstance(stage, kinds)), None)
        if rank is None:
            stages.append(stage)
        elif rank >= placed:
            stages += readers[placed : rank + 1]
            placed = rank + 1
    return [*stages, *readers[placed:], Shard()]
