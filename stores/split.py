"""Objects larger than a service takes in one piece: an index under the key, parts beside it.

::

    a/b/rank-00000.pack                                     the index, 4093 bytes
    a/b/.stepwell-parts/{nonce}-{00000...}/rank-00000.pack  the parts

The index is put last, so a crash leaves the old object or the new one, and parts that nobody refers
to. What is no index is never taken for one, since contents that begin like an index are always split:

========  ==============  ===================================
offset    bytes           what
========  ==============  ===================================
0         32              ``MAGIC``
32        8               length of the object, little-endian
40        8               length of a part; the last is shorter
48        16              nonce, in the names of the parts
64        16              xxh3-128 of the 64 bytes before
80        4013            zeros
========  ==============  ===================================
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from stepwell.errors import IntegrityError
from stepwell.stores.keys import OWN_PREFIX

__all__ = ["INDEX_BYTES", "MAGIC", "SplitIndex", "part_of"]

MAGIC = b"stepwell: object in parts, v. 1\n"
INDEX_BYTES = 4093
"""A length of its own: only objects of this length have to be looked at before their size is known."""

_HEAD = struct.Struct("<32sQQ16s")
_PARTS = f"{OWN_PREFIX}parts"
_PART = re.compile(
    rf"(?P<directory>.*/)?{re.escape(_PARTS)}/(?P<nonce>[0-9a-f]{{32}})-\d{{5,}}/(?P<name>[^/]+)"
)


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """How an object is cut.

    Attributes
    ----------
    size_bytes : int
        Of the whole object.
    part_bytes : int
        Of every part but the last.
    nonce : bytes, 16
        Drawn for each put: parts of two puts never mix.
    """

    size_bytes: int
    part_bytes: int
    nonce: bytes

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return -(-self.size_bytes // self.part_bytes)

    def part_key(self, key: str, part: int) -> str:
        """Key of one part."""
        directory, slash, name = key.rpartition("/")
        return f"{directory}{slash}{_PARTS}/{self.nonce.hex()}-{part:05d}/{name}"

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield part, first and last byte within it, for the bytes from `start` up to `stop`."""
        while start < stop:
            part, first = divmod(start, self.part_bytes)
            last = min(self.part_bytes, first + stop - start)
            yield part, first, last
            start += last - first

    def encode(self) -> bytes:
        """Return the bytes of the index."""
        head = _HEAD.pack(MAGIC, self.size_bytes, self.part_bytes, self.nonce)
        return (head + xxhash.xxh3_128_digest(head)).ljust(INDEX_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes, what: str) -> SplitIndex:
        """Read an index back.

        Raises
        ------
        IntegrityError
            It begins like an index and is damaged.
        """
        head, seal = data[: _HEAD.size], data[_HEAD.size : _HEAD.size + 16]
        if len(data) != INDEX_BYTES or xxhash.xxh3_128_digest(head) != seal or any(data[_HEAD.size + 16 :]):
            raise IntegrityError(f"{what}: the index of an object in parts is damaged")
        _, size_bytes, part_bytes, nonce = _HEAD.unpack(head)
        if not part_bytes:
            raise IntegrityError(f"{what}: an object in parts of no length")
        return cls(size_bytes, part_bytes, nonce)


def part_of(key: str) -> tuple[str, bytes] | None:
    """Return the key and the nonce of the object that a part belongs to; None for another key."""
    found = _PART.fullmatch(key)
    if found is None:
        return None
    return f"{found['directory'] or ''}{found['name']}", bytes.fromhex(found["nonce"])
