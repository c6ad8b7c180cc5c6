"""Copying a base while training goes on: what only an update changes can wait until the next one.

Weights and optimizer states stay as they are in forward and backward, so the large ones of a base are
copied in the background, and only the next update waits for that. Everything else is copied at the save.

That nothing else wrote into them is checked as for digests: no update begun, no version moved. Writes
through ``.data`` move none, so of each tensor elements spread over its whole length are remembered at the
save and must be found in the copy, and the copied weights must have the digests that were read beside. A
base that fails this is dropped; the log beside it stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import starmap

import numpy as np
import numpy.typing as npt
import torch

from stepwell.errors import IntegrityError
from stepwell.pipeline.bits import as_integers, bytes_to_tensor
from stepwell.pipeline.digest import Digest
from stepwell.pipeline.digester import Digester
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.slots import LayoutMemory
from stepwell.pipeline.watch import versions_of

__all__ = ["OVERLAP_BYTES_MIN", "Guard", "OverlappedCopy", "check_weights", "may_wait"]

OVERLAP_BYTES_MIN = 1 << 20
"""Smaller tensors are copied at the save: remembering what they were would cost as much."""

WITNESS_COUNT = 32
"""Elements of each tensor that are remembered: enough for whatever writes into a whole tensor or a tenth
of its rows; smaller writes into weights show in the digest."""


def may_wait(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    """Say whether only an update changes a tensor, and it is large enough to be worth waiting with.

    What is stepped, weights and state of their shape, has a group; buffers and extra have none.
    """
    large = bool(spec.group) and spec.size_bytes >= OVERLAP_BYTES_MIN
    # Others than plain ones are rare, and a view of their integers may be a copy.
    return (
        large and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_complex() and not tensor.is_neg()
    )


class OverlappedCopy:
    """The copies of one base that wait; made on the trainer's thread, run once on another.

    Parameters
    ----------
    step : int
    pairs : sequence of (Tensor, Tensor)
        Target and live source. The sources must show what they show now even if a parameter is given
        other memory (``.data = x``): detached.
    undisturbed : callable
        Whether no update has begun since the save; asked after the copy.
    disturbed : callable
        Told, on the copying thread, that this run writes between updates.
    """

    def __init__(
        self,
        step: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        undisturbed: Callable[[], bool],
        disturbed: Callable[[], None],
    ) -> None:
        self._step = step
        self._pairs = pairs
        self._undisturbed = undisturbed
        self._disturbed = disturbed
        sources = [source for _, source in pairs]
        self._versions = versions_of(sources)
        self._witnesses = [_spread(source).copy() for source in sources]

    def __call__(self) -> None:
        """Copy, then check.

        Raises
        ------
        IntegrityError
            What was copied may be of another moment than the save.
        """
        pairs, self._pairs = self._pairs, ()
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        same = all(
            starmap(np.array_equal, zip(map(_spread, (t for t, _ in pairs)), self._witnesses, strict=True))
        )
        if same and self._undisturbed() and versions_of([source for _, source in pairs]) == self._versions:
            return
        self._disturbed()
        raise _given_up(self._step)


class Guard:
    """What the next update has to wait for; belongs to the trainer's thread.

    Parameters
    ----------
    limit_s : float
        Longest wait.
    """

    def __init__(self, limit_s: float = 60.0) -> None:
        self._limit_s = limit_s
        self._copy: Future[None] | None = None

    def hold(self, copy: Future[None]) -> None:
        """Let the next update wait for a copy."""
        self._copy = copy

    def wait(self) -> bool:
        """Wait until what is held has ended, well or not; False where it takes too long.

        A copy that an update did not wait for finds that out itself.
        """
        copy, self._copy = self._copy, None
        if copy is not None:
            try:
                copy.exception(self._limit_s)
            except TimeoutError:
                return False
        return True


def check_weights(step: int, base: LayoutMemory, weights: Layout, digest: Digest) -> None:
    """Compare the weights of an overlapped base with what was read of the live ones in its window.

    Parameters
    ----------
    step : int
    base : LayoutMemory
        The whole state, copied.
    weights : Layout
        That the digest counts in.
    digest : Digest
        What is None in it was not read and is not compared.

    Raises
    ------
    IntegrityError
        They differ: something wrote into weights between save and update.
    """
    if digest.layout != weights.hash:
        return
    layout, tensors = base.layout, {}
    for spec in weights.tensors:
        index = layout.index_of[spec.name]
        start = layout.tensor_offsets[index]
        tensors[spec.name] = bytes_to_tensor(
            base.run[start : start + spec.size_bytes], spec.dtype, spec.shape
        )
    digester = Digester(weights, tensors, algorithm=digest.algorithm)
    for part, value in enumerate(digest.values):
        if value is not None and digester.digest(part) != value:
            raise _given_up(step)


def _given_up(step: int) -> IntegrityError:
    return IntegrityError(
        f"the base of step {step} was given up: weights or optimizer state were written to while "
        "it was copied, before the next update; bases are copied at the save from now on"
    )


def _spread(tensor: torch.Tensor) -> npt.NDArray[np.integer[npt.NBitBase]]:
    """View elements spread over a contiguous tensor, as integers."""
    flat = as_integers(tensor).reshape(-1).numpy()
    return flat[:: max(1, flat.size // WITNESS_COUNT)]
