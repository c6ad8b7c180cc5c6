"""Decides whether an optimizer's gradients may be held by reference or must be copied in the hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stepwell.pipeline.tree import JsonValue
from stepwell.pipeline.watch import content_mark

__all__ = ["PROBATION_UPDATES", "Probation"]

PROBATION_UPDATES = 2
"""Updates copied eagerly and compared with what became of their gradients, before references are
allowed: at the start, and again after every change of the optimizer's flags."""


class Probation:
    """Watches what becomes of gradients after their update, by content.

    A version counter is not enough: fused CPU kernels never bump it.

    Parameters
    ----------
    names : sequence of str
        Of the parameters.

    Attributes
    ----------
    eager : str or None
        Why references are never allowed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.eager: str | None = None
        self._names = names
        self._left = PROBATION_UPDATES
        self._marks: list[tuple[int, torch.Tensor, int]] = []
        self._groups: object = None
        self._flags: object = None

    @property
    def passed(self) -> bool:
        """Whether references are allowed."""
        return self.eager is None and self._left == 0

    def always_eager(self, reason: str) -> None:
        """Never allow references again."""
        self.eager = self.eager or reason
        self.forget()

    def forget(self) -> None:
        """Let go of the gradients under watch."""
        self._marks = []

    def watch(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hold the gradients of an update, copied eagerly, to see what becomes of them."""
        if self.eager is None and self._left > 0:
            self._left -= 1
            self._marks = [(i, g, content_mark(g)) for i, g in enumerate(gradients) if g is not None]

    def judge(self) -> None:
        """Look what became of them; called before the next update's gradients are taken."""
        marks, self._marks = self._marks, []
        for index, gradient, mark in marks:
            if content_mark(gradient) != mark:
                self.always_eager(f"the gradient of {self._names[index]} was written to after its update")
                return

    def notice_flags(self, groups: tuple[Mapping[str, JsonValue], ...]) -> None:
        """Begin anew when a flag changes; a flag is whatever is True, False or None.

        Parameters
        ----------
        groups : tuple of mappings
            As recorded; the same object while nothing changed.
        """
        if groups is self._groups:
            return
        flags = [
            [(key, value) for key, value in group.items() if value is None or isinstance(value, bool)]
            for group in groups
        ]
        if flags != self._flags:
            self._left = PROBATION_UPDATES
        self._groups, self._flags = groups, flags
