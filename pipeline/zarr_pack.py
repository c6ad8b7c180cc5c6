"""A base as one data object and an index of references, for tiers where many objects are dear.

The data is the chunk objects of the group (``stepwell.pipeline.zarr_group``), one after the other with
nothing between. The index is JSON in version 1 of kerchunk's reference format, which fsspec's
``reference://`` file system and so plain zarr open::

    {"refs":{"zarr.json":"...","model/w/zarr.json":"...",
             "model/w/c/0/0":["{{here}}rank-00000.data-00000",offset,length],...},
     "stepwell":{"xxh3_64":["<16 hexadecimal digits>",...]},
     "templates":{"here":""},
     "version":1}

Places are told relative to the index; who reads puts what is before them in place of ``here``. The
checksums are those of the ranges, in the order of the data. Where objects have a largest size there are
several, cut between chunks of the layout.

Nothing is copied: the parts of an object alias the captured run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import xxhash

from stepwell.pipeline.keys import data_key, references_key
from stepwell.pipeline.manifest import ObjectEntry
from stepwell.pipeline.pack_format import PackIdentity
from stepwell.pipeline.sealed import canonical_json
from stepwell.pipeline.zarr_group import GroupPlan, PieceObject, piece_parts, root_document
from stepwell.pipeline.zarr_root import root_about
from stepwell.stores.base import BytesLike, WriteItem

__all__ = ["HERE", "PackedPlan", "export_packed", "ranges_hash", "reference_url"]

HERE = "here"
"""Template in every reference: what stands before the names of the objects beside the index."""

_ROOT = "zarr.json"


class PackedPlan:
    """All that follows from a layout, a rank and the largest size of an object.

    Attributes
    ----------
    group : GroupPlan
    rank : int
    objects : tuple of tuple of PieceObject
        Per data object, in order.
    """

    def __init__(self, group: GroupPlan, rank: int, object_bytes_max: int | None = None) -> None:
        self.group = group
        self.rank = rank
        self.objects = _cut(group, object_bytes_max)
        refs: dict[str, object] = {key: document.decode() for key, document in group.documents.items()}
        for number, items in enumerate(self.objects):
            url, offset_bytes = reference_url(rank, number), 0
            for item in items:
                refs[item.key] = [url, offset_bytes, item.stored_bytes]
                offset_bytes += item.stored_bytes
        before = {key: value for key, value in refs.items() if key < _ROOT}
        after = {key: value for key, value in refs.items() if key > _ROOT}
        self._before = canonical_json(before)[1:-1]
        self._after = canonical_json(after)[1:-1]

    def index(self, root: bytes, checksums: Sequence[str]) -> bytes:
        """Return the index; only the root and the checksums differ from base to base."""
        rows = (self._before, canonical_json(_ROOT) + b":" + canonical_json(root.decode()), self._after)
        return b"".join(
            (
                b'{"refs":{',
                b",".join(row for row in rows if row),
                b'},"stepwell":',
                canonical_json({"xxh3_64": list(checksums)}),
                b',"templates":',
                canonical_json({HERE: ""}),
                b',"version":1}',
            )
        )


def export_packed(
    plan: PackedPlan, identity: PackIdentity, header: Mapping[str, object], run: memoryview
) -> Iterator[tuple[WriteItem, ObjectEntry]]:
    """Yield the data objects and then the index of a base, with their manifest entries.

    Parameters and ownership are those of ``stepwell.pipeline.zarr_base.export_base``.
    """
    longest = max((item.padding_bytes for items in plan.objects for item in items), default=0)
    zeros = memoryview(bytes(longest))
    checksums: list[str] = []
    for number, items in enumerate(plan.objects):
        parts: list[BytesLike] = []
        own: list[str] = []
        for item in items:
            stored = piece_parts(item, run[item.offset_bytes : item.offset_bytes + item.size_bytes], zeros)
            state = xxhash.xxh3_64()
            for part in stored:
                state.update(part)
            own.append(state.hexdigest())
            parts += stored
        key = data_key(identity.incarnation, identity.step, plan.rank, number)
        size_bytes = sum(item.stored_bytes for item in items)
        yield (key, parts), ObjectEntry(key, size_bytes, ranges_hash(own))
        checksums += own
    about = root_about(plan.group.layout.hash, identity, header)
    index = plan.index(root_document(plan.group, about), checksums)
    key = references_key(identity.incarnation, identity.step, plan.rank)
    yield (key, [index]), ObjectEntry.of(key, index)


def ranges_hash(checksums: Sequence[str]) -> str:
    """Return what the manifest has for a data object: xxh3-128 of its ranges' checksums, in order."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(checksums)))


def reference_url(rank: int, number: int) -> str:
    """Return how the index calls a data object."""
    # Any incarnation and step do: the name of the object is the end of its key.
    name = data_key("000000-0000000000000000", 0, rank, number).rpartition("/")[2]
    return f"{{{{{HERE}}}}}{name}"


def _cut(group: GroupPlan, object_bytes_max: int | None) -> tuple[tuple[PieceObject, ...], ...]:
    """Fill one data object after the other; a chunk of the layout stays in one."""
    objects: list[list[PieceObject]] = []
    filled = 0
    for row in group.objects:
        size_bytes = sum(item.stored_bytes for item in row)
        if not row:
            continue
        if not objects or (object_bytes_max is not None and filled + size_bytes > object_bytes_max):
            objects.append([])
            filled = 0
        objects[-1] += row
        filled += size_bytes
    return tuple(map(tuple, objects))
