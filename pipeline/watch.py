"""Cheap guards over live tensors: what changed behind the capture's back, and what was kept.

A guard is one flat pass that reads ``_version``. It is necessary, not sufficient: fused CPU kernels
and writes through ``.data`` never bump a version; digests and the proof find those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_

import torch
import xxhash

from stepwell.pipeline.bits import as_integers, tensor_bytes

__all__ = [
    "GradientWatch",
    "ParameterWatch",
    "all_none",
    "content_mark",
    "unused_gradient",
    "versions_of",
]

WITNESS_COUNT = 4
SPOT_CHECKS = 64
WITNESS_ELEMENTS = 1 << 14
"""Held beyond their copy only to recognise kept gradients, so few and small (the smallest ones)."""


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Read the version counters; -1 stands for None.

    Raises
    ------
    RuntimeError
        A tensor made in inference mode has no counter.
    """
    return [-1 if tensor is None else tensor._version for tensor in tensors]


def all_none(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Say whether there is no gradient at all; ends at the first one."""
    return all(map(is_, gradients, repeat(None)))


def content_mark(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits."""
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(tensor_bytes(tensor).data)
    # not tested: needs an accelerator. A weighted sum mod 2**64, so that moved values count too.
    flat = as_integers(tensor).reshape(-1).to(torch.int64)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device)
    return int((flat * weights).sum().item())


def unused_gradient(gradients: Sequence[torch.Tensor | None]) -> int | None:
    """Return the index of a gradient that holds something, or None.

    All zero is nothing (``zero_grad(set_to_none=False)``), and gradients that are not finite are
    what GradScaler leaves behind when it skips an update.
    """
    present = [
        (index, gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient)
        for index, gradient in enumerate(gradients)
        if gradient is not None
    ]
    # One by one, not summed up: the first gradient usually decides.
    used = next((index for index, values in present if bool(torch.count_nonzero(values.detach()))), None)
    if used is None or any(not bool(values.detach().isfinite().all()) for _, values in present):
        return None
    return used


class ParameterWatch:
    """Tells whether parameters changed since they were last remembered.

    Parameters
    ----------
    names : sequence of str
    tensors : sequence of Tensor
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.names = tuple(names)
        self.tensors = list(tensors)
        self._versions = versions_of(self.tensors)

    def remember(self) -> None:
        """Take the state of now as unchanged."""
        self._versions = versions_of(self.tensors)

    def mark(self) -> Callable[[], bool]:
        """Return a test, for any thread, whether nothing was written since what is remembered now."""
        tensors, versions = self.tensors, self._versions
        return lambda: versions_of(tensors) == versions

    def changed(self) -> list[int]:
        """Return the indices of the parameters written to since."""
        versions = versions_of(self.tensors)
        if versions == self._versions:
            return []
        return [i for i, (new, old) in enumerate(zip(versions, self._versions, strict=True)) if new != old]


class GradientWatch:
    """Remembers the gradients of an update without holding their memory.

    Objects are recognised by identity of a few small witnesses, which are held, and by ``id`` and
    version of all others.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._witnesses: list[tuple[int, torch.Tensor]] = []

    def remember(self, gradients: Sequence[torch.Tensor | None], versions: list[int] | None = None) -> None:
        """Take these gradients as those of the last update, as they are now.

        Parameters
        ----------
        gradients : sequence of Tensor or None
        versions : list of int, optional
            As they were before the update, for one that is known not to write into gradients. Some
            are looked at again, and all if one of those was written to.
        """
        self._ids = list(map(id, gradients))
        if versions is None or not self._still(gradients, versions):
            versions = versions_of(gradients)
        self._versions = versions
        places = [index for index, _ in self._witnesses]
        if not places or any(gradients[index] is None for index in places):
            places = self._choose(gradients)
        self._witnesses = [(i, g) for i in places if (g := gradients[i]) is not None]

    def forget(self) -> None:
        """Release the witnesses and know nothing."""
        self._ids, self._versions, self._witnesses = [], [], []

    def kept(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Say whether any witness is still in use as a gradient."""
        return any(gradients[index] is witness for index, witness in self._witnesses)

    def same(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Say whether all gradients that are there now are the remembered ones, not written to since.

        Parameters may have been added at the end meanwhile.
        """
        witnessed = all(gradients[index] is witness for index, witness in self._witnesses)
        if witnessed and [id(g) for g in gradients] == self._ids and versions_of(gradients) == self._versions:
            return True  # the usual case, in two passes that cost little
        known = len(self._ids)
        if any(gradient is not None for gradient in gradients[known:]):
            return False
        if not witnessed and any(gradient is not None for gradient in gradients):
            return False
        return all(
            gradient is None or (id(gradient) == old and gradient._version == version)
            for gradient, old, version in zip(gradients[:known], self._ids, self._versions, strict=True)
        )

    @staticmethod
    def _still(gradients: Sequence[torch.Tensor | None], versions: Sequence[int]) -> bool:
        apart = slice(None, None, max(1, len(gradients) // SPOT_CHECKS))
        return versions_of(gradients[apart]) == versions[apart]

    @staticmethod
    def _choose(gradients: Sequence[torch.Tensor | None]) -> list[int]:
        sizes = sorted((g.numel(), index) for index, g in enumerate(gradients) if g is not None)
        chosen = [index for size, index in sizes[:WITNESS_COUNT] if size <= WITNESS_ELEMENTS]
        # With no small gradient at all the smallest one has to do.
        return chosen or [index for _, index in sizes[:1]]
