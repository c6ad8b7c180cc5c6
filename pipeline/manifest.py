"""The small documents that say what is there: run, incarnations, manifests, commit records.

The manifest, not today's configuration, drives reading: it names every object of one rank and one
save with length and checksum. All documents are sealed (``stepwell.pipeline.sealed``), so a
flipped byte is an error and never another value, and keys read from them are checked.

Checksums of objects are xxh3-128: of all bytes for plain objects; for packs (``*.pack``) of index +
trailer, which themselves hold the checksums of everything else in the pack; for the data of a packed
base of its ranges' checksums, which its reference index holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import xxhash

from stepwell.errors import IntegrityError
from stepwell.pipeline.keys import (
    Area,
    Series,
    commit_key,
    layout_key,
    manifest_key,
    parse_key,
    save_prefix,
)
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.sealed import FORMAT, count, reading, seal, typed, unseal
from stepwell.stores.base import BytesLike

__all__ = [
    "CommitRecord",
    "IncarnationRecord",
    "Link",
    "Manifest",
    "ObjectEntry",
    "RunRecord",
    "seal",
    "unseal",
]


_OBJECTS = (Area.PACK, Area.STATE, Area.REFERENCES, Area.DATA)


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One stored object: key from the tier's root, length, xxh3-128 as the module says."""

    key: str
    size_bytes: int
    xxh3: str

    def as_json(self) -> list[object]:
        """``[key, size_bytes, xxh3]``."""
        return [self.key, self.size_bytes, self.xxh3]

    @classmethod
    def from_json(cls, value: object) -> ObjectEntry:
        """Read ``as_json`` back; a key that is not ours, or leads out of the store, is refused."""
        key, size_bytes, xxh3 = typed(value, list)
        if parse_key(typed(key, str)) is None:
            raise ValueError(f"{key!r} is not the key of an object of ours")
        return cls(key, count(size_bytes), typed(xxh3, str))

    @classmethod
    def of(cls, key: str, data: BytesLike) -> ObjectEntry:
        """Entry of a plain object with these bytes."""
        return cls(key, memoryview(data).nbytes, xxhash.xxh3_128_hexdigest(data))

    def check(self, data: BytesLike) -> None:
        """Compare a plain object with this entry.

        Raises
        ------
        IntegrityError
            Another length or checksum.
        """
        size_bytes = memoryview(data).nbytes
        if size_bytes != self.size_bytes:
            raise IntegrityError(f"{self.key}: {size_bytes} bytes where {self.size_bytes} were written")
        if xxhash.xxh3_128_hexdigest(data) != self.xxh3:
            raise IntegrityError(f"{self.key}: damaged (its checksum does not match)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything one rank put for one save.

    Attributes
    ----------
    run, incarnation : str
    step, rank, world : int
    kind : str
        ``"gradient"``, ``"state"`` (differentials) or ``"base"``.
    previous : Link or None
        The save this differential leads on from; None where nothing before it is needed.
    self_contained : bool
        The save can be restored without any other (a base; a state capture without a delta).
    objects : tuple of ObjectEntry
        All below the prefix of this save.
    layouts : tuple of str
        Hashes of the layouts that are needed to read the objects.
    digest : object
        JSON of the digest of the weights at this save, or None.
    environment : mapping
        JSON: device kind, torch version and what else decides whether a replay is exact.
    """

    run: str
    incarnation: str
    step: int
    rank: int
    world: int
    kind: str
    previous: Link | None
    self_contained: bool
    objects: tuple[ObjectEntry, ...]
    layouts: tuple[str, ...] = ()
    digest: object = None
    environment: Mapping[str, object] = field(default_factory=dict)

    @property
    def series(self) -> Series:
        """Whether this is a save or a base."""
        return Series.BASE if self.kind == "base" else Series.STEP

    @property
    def key(self) -> str:
        """Where this manifest is stored."""
        return manifest_key(self.series, self.incarnation, self.step, self.rank)

    @property
    def link(self) -> Link:
        """The save this manifest describes."""
        return Link(self.incarnation, self.step)

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(entry.size_bytes for entry in self.objects)

    def encode(self) -> bytes:
        """Sealed document."""
        return seal(
            {
                "kind": "manifest",
                "format": FORMAT,
                "run": self.run,
                "incarnation": self.incarnation,
                "step": self.step,
                "rank": self.rank,
                "world": self.world,
                "save": self.kind,
                "previous": self.previous and self.previous.as_json(),
                "self_contained": self.self_contained,
                "objects": [entry.as_json() for entry in self.objects],
                "layouts": list(self.layouts),
                "digest": self.digest,
                "environment": self.environment,
            }
        )

    @classmethod
    def decode(cls, data: BytesLike, key: str) -> Manifest:
        """Read the manifest that is stored under `key`.

        Raises
        ------
        IntegrityError, FormatError
            Damaged, of a newer format, belonging under another key, or naming objects of others.
        """
        document = unseal(data, key, "manifest")
        with reading(key):
            kind = typed(document["save"], str)
            if kind not in ("gradient", "state", "base"):
                raise ValueError(f"a save of kind {kind!r}")
            manifest = cls(
                typed(document["run"], str),
                typed(document["incarnation"], str),
                count(document["step"]),
                count(document["rank"]),
                count(document["world"]),
                kind,
                Link.from_json(document["previous"]),
                typed(document["self_contained"], bool),
                tuple(ObjectEntry.from_json(value) for value in typed(document["objects"], list)),
                tuple(_layout_hash(value) for value in typed(document["layouts"], list)),
                document["digest"],
                typed(document["environment"], dict),
            )
            prefix = save_prefix(manifest.series, manifest.incarnation, manifest.step)
            for entry in manifest.objects:
                place = parse_key(entry.key)
                assert place is not None
                if not entry.key.startswith(prefix) or place.area not in _OBJECTS:
                    raise ValueError(f"object {entry.key!r} is none of this save")
            if manifest.key != key:
                raise IntegrityError(f"{key}: holds the manifest that belongs under {manifest.key}")
        return manifest


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A save is committed where this record is: it names the manifest of every rank.

    Attributes
    ----------
    run, incarnation : str
    series : Series
    step, world : int
    manifests : tuple of ObjectEntry
        One per rank, in rank order.
    """

    run: str
    incarnation: str
    series: Series
    step: int
    world: int
    manifests: tuple[ObjectEntry, ...]

    @property
    def key(self) -> str:
        """Where this record is stored."""
        return commit_key(self.series, self.incarnation, self.step)

    def encode(self) -> bytes:
        """Sealed document."""
        return seal(
            {
                "kind": "commit",
                "format": FORMAT,
                "run": self.run,
                "incarnation": self.incarnation,
                "series": str(self.series),
                "step": self.step,
                "world": self.world,
                "manifests": [entry.as_json() for entry in self.manifests],
            }
        )

    @classmethod
    def decode(cls, data: BytesLike, key: str) -> CommitRecord:
        """Read the record that is stored under `key`.

        Raises
        ------
        IntegrityError, FormatError
            Damaged, of a newer format, belonging under another key, or not naming every rank once.
        """
        document = unseal(data, key, "commit")
        with reading(key):
            record = cls(
                typed(document["run"], str),
                typed(document["incarnation"], str),
                Series(typed(document["series"], str)),
                count(document["step"]),
                count(document["world"]),
                tuple(ObjectEntry.from_json(value) for value in typed(document["manifests"], list)),
            )
            expected = [
                manifest_key(record.series, record.incarnation, record.step, rank)
                for rank in range(len(record.manifests))
            ]
            if record.world != len(expected) or [entry.key for entry in record.manifests] != expected:
                raise ValueError(f"does not name the manifests of {record.world} ranks")
            if record.key != key:
                raise IntegrityError(f"{key}: holds the commit record that belongs under {record.key}")
        return record


def _layout_hash(value: object) -> str:
    layout_key(typed(value, str))
    return typed(value, str)
