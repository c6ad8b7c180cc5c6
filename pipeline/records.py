"""The records of a run and of its incarnations, and links between saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepwell.pipeline.keys import incarnation_counter, incarnation_key
from stepwell.pipeline.sealed import FORMAT, count, number, reading, seal, typed, unseal
from stepwell.stores.base import BytesLike

__all__ = ["IncarnationRecord", "Link", "RunRecord"]


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """A save of an incarnation, to go on from."""

    incarnation: str
    step: int

    def as_json(self) -> list[object]:
        """``[incarnation, step]``."""
        return [self.incarnation, self.step]

    @classmethod
    def from_json(cls, value: object) -> Link | None:
        """Read ``as_json`` back; None stays None."""
        if value is None:
            return None
        incarnation, step = typed(value, list)
        incarnation_counter(incarnation)
        return cls(incarnation, count(step))


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What makes a store the store of one run.

    Attributes
    ----------
    run : str
        Random name, equal in all tiers of the run; a tier of another run is refused.
    name : str
        The configured name, for people.
    created_unix_s : float
        Wall time, for people only.
    """

    run: str
    name: str = ""
    created_unix_s: float = 0.0

    def encode(self) -> bytes:
        """Sealed document."""
        return seal(
            {
                "kind": "run",
                "format": FORMAT,
                "run": self.run,
                "name": self.name,
                "created_unix_s": self.created_unix_s,
            }
        )

    @classmethod
    def decode(cls, data: BytesLike, what: str) -> RunRecord:
        """Read a sealed document back; raises IntegrityError or FormatError."""
        document = unseal(data, what, "run")
        with reading(what):
            return cls(
                typed(document["run"], str),
                typed(document["name"], str),
                number(document["created_unix_s"]),
            )


@dataclass(frozen=True, slots=True)
class IncarnationRecord:
    """One life of the run between recoveries.

    Attributes
    ----------
    run, incarnation : str
    parent : Link or None
        The save this life began from; None for a fresh start.
    world : int
    layout : str
        Hash of the layout of the whole state at the start, empty where not known yet.
    attempt : int
        How many times recovery was tried before it succeeded.
    created_unix_s : float
        Wall time, for people only.
    environment : mapping
        JSON: device kind, versions and the like.
    ended : Link or None
        Newest save committed in this tier, written when the life ended orderly; its commit must
        be there ever after, until reclaimed.
    """

    run: str
    incarnation: str
    parent: Link | None = None
    world: int = 1
    layout: str = ""
    attempt: int = 0
    created_unix_s: float = 0.0
    environment: Mapping[str, object] = field(default_factory=dict)
    ended: Link | None = None

    @property
    def counter(self) -> int:
        """First part of the name."""
        return incarnation_counter(self.incarnation)

    @property
    def key(self) -> str:
        """Where this record is stored."""
        return incarnation_key(self.incarnation)

    def encode(self) -> bytes:
        """Sealed document."""
        return seal(
            {
                "kind": "incarnation",
                "format": FORMAT,
                "run": self.run,
                "incarnation": self.incarnation,
                "parent": self.parent and self.parent.as_json(),
                "world": self.world,
                "layout": self.layout,
                "attempt": self.attempt,
                "created_unix_s": self.created_unix_s,
                "environment": self.environment,
                "ended": self.ended and self.ended.as_json(),
            }
        )

    @classmethod
    def decode(cls, data: BytesLike, what: str) -> IncarnationRecord:
        """Read a sealed document back; raises IntegrityError or FormatError."""
        document = unseal(data, what, "incarnation")
        with reading(what):
            incarnation = typed(document["incarnation"], str)
            incarnation_counter(incarnation)
            return cls(
                typed(document["run"], str),
                incarnation,
                Link.from_json(document["parent"]),
                count(document["world"]),
                typed(document["layout"], str),
                count(document["attempt"]),
                number(document["created_unix_s"]),
                typed(document["environment"], dict),
                Link.from_json(document["ended"]),
            )
