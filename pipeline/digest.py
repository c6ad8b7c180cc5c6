"""Digests of the weights, chunk by chunk: what a replayed state is compared with.

A digest belongs to a save. It is read either on the trainer's thread (small models) or by the runner in
the window between ``save`` and the next update; what could not be read in time is None, and a save
with such holes is never called exact by its digest alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stepwell.errors import FormatError
from stepwell.pipeline.digester import XXH3_64, Digester
from stepwell.pipeline.layout import Layout

__all__ = [
    "EAGER_BYTES_MAX",
    "Comparison",
    "Digest",
    "DigestWindow",
    "MomentDigest",
    "compare",
    "digest_layout",
    "parts_of_kind",
    "values_by_part",
]

EAGER_BYTES_MAX = 4 << 20
"""Weights up to this size are digested on the trainer's thread, whole: at 34 GB/s that is 0.1 ms."""

Comparison = Literal["match", "mismatch", "partial"]


@dataclass(frozen=True, slots=True)
class MomentDigest:
    """Digest of one chunk of optimizer state; another chunk each save.

    Attributes
    ----------
    layout : str
        Hash of the layout that `part` counts in (that of the whole state, as in a base).
    part : int
    value : str
    """

    layout: str
    part: int
    value: str


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of all weights at one save.

    Attributes
    ----------
    algorithm : str
        ``"xxh3-64"`` or ``"sum64"``, see `stepwell.pipeline.digester`.
    layout : str
        Hash of the layout whose chunks were digested.
    values : tuple of str or None
        One per chunk; None where the next update began before it was read.
    moment : MomentDigest or None
    states : str or None
        One hash of all optimizer states, see `stepwell.pipeline.state_digest`; None where they were
        not read.
    """

    algorithm: str
    layout: str
    values: tuple[str | None, ...]
    moment: MomentDigest | None = None
    states: str | None = None

    @property
    def complete(self) -> bool:
        """Whether every chunk was read."""
        return None not in self.values

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        moment = self.moment
        return {
            "algorithm": self.algorithm,
            "layout": self.layout,
            "complete": self.complete,
            "values": list(self.values),
            "moment": None
            if moment is None
            else {"layout": moment.layout, "part": moment.part, "value": moment.value},
            "states": self.states,
        }

    @classmethod
    def from_json(cls, document: object) -> Digest:
        """Read the JSON form back.

        Raises
        ------
        FormatError
            Not a digest.
        """
        try:
            assert isinstance(document, dict)
            row = document["moment"]
            moment = None
            if row is not None:
                moment = MomentDigest(_text(row["layout"]), int(row["part"]), _text(row["value"]))
            values = tuple(None if value is None else _text(value) for value in document["values"])
            states = None if document["states"] is None else _text(document["states"])
            return cls(_text(document["algorithm"]), _text(document["layout"]), values, moment, states)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"digest: not a digest ({type(error).__name__}: {error})") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where text belongs")
    return value


def compare(saved: Digest, found: Digest) -> Comparison:
    """Compare the digest of a save with that of the state restored for it.

    Returns
    -------
    str
        ``"match"``: every chunk was read on both sides and all agree. ``"mismatch"``: some chunk, or
        the moment chunk or the hash of the states that both have, differs. ``"partial"``: nothing
        differs, but not everything could be compared (holes, or another algorithm or layout).
    """
    if saved.states is not None and found.states is not None and saved.states != found.states:
        return "mismatch"
    if (saved.algorithm, saved.layout) != (found.algorithm, found.layout):
        return "partial"
    if len(saved.values) != len(found.values):
        return "partial"
    pairs = list(zip(saved.values, found.values, strict=True))
    if any(left is not None and right is not None and left != right for left, right in pairs):
        return "mismatch"
    left_moment, right_moment = saved.moment, found.moment
    if left_moment is not None and right_moment is not None and left_moment != right_moment:
        places = [(moment.layout, moment.part) for moment in (left_moment, right_moment)]
        if places[0] == places[1]:
            return "mismatch"
    return "match" if saved.complete and found.complete else "partial"


def digest_layout(
    layout: Layout, tensors: Mapping[str, torch.Tensor], scratch: torch.Tensor | None = None
) -> list[str]:
    """Digest every chunk of `layout`; see `Digester` for the parameters."""
    digester = Digester(layout, tensors, scratch)
    return [digester.digest(part) for part in range(len(layout.chunks))]


def values_by_part(layout: Layout, digested: Layout, digest: Digest) -> list[str | None]:
    """Return, for each chunk of `layout`, the digest of the chunk of `digested` with the same pieces.

    Layouts of gradients and of weights cut alike, but may number and share chunks differently; a
    chunk without counterpart has None.
    """
    known = {_pieces(digested, part): value for part, value in enumerate(digest.values)}
    if digest.layout != digested.hash or digest.algorithm != XXH3_64:
        known = {}
    return [known.get(_pieces(layout, part)) for part in range(len(layout.chunks))]


def _pieces(layout: Layout, part: int) -> tuple[tuple[str, int, int, int], ...]:
    return tuple(
        (layout.tensors[piece.tensor].name, piece.start, piece.stop, piece.offset_bytes)
        for piece in layout.chunks[part].pieces
    )


class DigestWindow:
    """The time between a save and the next update, in which the live weights are those of the save.

    Parameters
    ----------
    updates_begun : callable
        Count of updates begun, raised first thing in the pre-hook, before anything is written.
    expected : int
        The count at the save.
    unchanged : callable, optional
        Says that nothing else wrote into the weights since the save (in-place versions, storages);
        asked once, after reading.
    """

    def __init__(
        self,
        updates_begun: Callable[[], int],
        expected: int,
        unchanged: Callable[[], bool] | None = None,
    ) -> None:
        self._updates_begun = updates_begun
        self._expected = expected
        self._unchanged = unchanged

    @property
    def open(self) -> bool:
        """Whether no update began since the save.

        True *after* a read means that what was read is the state of the save: the count is raised
        before an update writes anything.
        """
        return self._updates_begun() == self._expected

    @property
    def undisturbed(self) -> bool:
        """Whether the window is open and nothing else wrote into the weights."""
        if self._unchanged is not None and not self._unchanged():
            return False
        return self.open

    def read(self, digester: Digester, part: int) -> str | None:
        """Digest one chunk, or return None if an update began before it was read whole."""
        if not self.open:
            return None
        value = digester.digest(part)
        return value if self.open else None

    def weights(self, digester: Digester, *, first: int = 0) -> Digest:
        """Digest as many chunks as the window lasts for.

        Parameters
        ----------
        digester : Digester
        first : int
            Where to begin; rotated by the caller, so that short windows cover all chunks in time.
        """
        count = len(digester.layout.chunks)
        values: list[str | None] = [None] * count
        for k in range(count):
            part = (first + k) % count
            values[part] = self.read(digester, part)
            if values[part] is None:
                break
        if self._unchanged is not None and not self._unchanged():
            values = [None] * count
        return Digest(digester.algorithm, digester.layout.hash, tuple(values))

    def moment(self, digester: Digester, part: int) -> MomentDigest | None:
        """Digest one chunk of optimizer state, or return None if the window closed."""
        value = self.read(digester, part)
        if value is None:
            return None
        return MomentDigest(digester.layout.hash, part, value)


def parts_of_kind(layout: Layout, kinds: Sequence[str]) -> list[int]:
    """Return the chunks of `layout` of these kinds (``"moment1"``, ...), to rotate over."""
    return [part for part, chunk in enumerate(layout.chunks) if str(chunk.kind) in kinds]
