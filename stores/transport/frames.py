"""What travels between two peers after the handshake: frames.

Layout, little-endian::

    0     4  magic b"SWPF"
    4     2  protocol version
    6     1  kind (see `Kind`)
    7     1  flags (see `Flag`)
    8     8  incarnation of the sender: counter
    16    8  incarnation of the sender: random part
    24    8  session of the receiver: an answer meant for an earlier life of it is refused
    32    8  operation, random: a request that is repeated has the same one
    40    8  offset of the payload in the object
    48    8  length of the payload (of what is asked for, in a GET)
    56    8  total: size of the whole object
    64    8  generation of the object
    72    2  bytes of the key (K)
    74    2  status (see `Status`), 0 in a request
    76    4  zero
    80    K  key, UTF-8
    80+K  16 seal of all before

and, where a payload follows, the payload and behind it::

    0     8  xxh3-64 of the payload
    8     16 seal of the frame's own seal and the checksum

A seal is BLAKE2b keyed with a key of this connection and direction, over the number of the frame and
what it covers. So nobody without the run's secret can add, repeat, drop or change a request. The
payload itself is protected by the checksum, which finds every accident but no forger's work.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from stepwell.errors import ConfigError, TransientStoreError
from stepwell.stores.keys import KEY_BYTES_MAX

__all__ = [
    "HEAD_BYTES",
    "SEAL_BYTES",
    "TRAILER_BYTES",
    "VERSION",
    "WHOLE",
    "Flag",
    "Frame",
    "FrameError",
    "Incarnation",
    "Kind",
    "Sealer",
    "Status",
    "fresh_operation",
    "parse_incarnation",
]

VERSION = 1
SEAL_BYTES = 16
WHOLE = (1 << 64) - 1
"""Length in a GET that asks for everything to the end."""

_MAGIC = b"SWPF"
_HEAD = struct.Struct("<4sHBBQQQQQQQQHHI")
_TRAILER = struct.Struct("<Q")
_SEQUENCE = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size
TRAILER_BYTES = _TRAILER.size + SEAL_BYTES
_INCARNATION = re.compile(r"(\d{6,19})-([0-9a-f]{16})", re.ASCII)

Incarnation = tuple[int, int]
"""Counter and random part."""


class FrameError(TransientStoreError):
    """What came is no frame of this connection: it was damaged on its way, or somebody meddles."""


class Kind(IntEnum):
    """What a frame asks for, or that it is an answer."""

    ANSWER = 0
    PUT = 1
    """The whole object is the payload; with ``Flag.CREATE`` only if absent."""
    BEGIN = 2
    """Reserve `total` bytes for the upload `operation`; asked twice, it is one upload."""
    PART = 3
    """Payload for the upload at `offset`."""
    COMMIT = 4
    ABORT = 5
    GET = 6
    """Answered by frames of data, each with its offset, the last with ``Flag.LAST``."""
    STAT = 7
    LIST = 8
    """Payload: the last key of the page before. Answer: keys, joined by line feeds."""
    DELETE = 9
    DELETE_BELOW = 10


class Flag(IntFlag):
    """Details of a request or an answer."""

    NONE = 0
    CREATE = 1
    LAST = 2
    DIGEST = 4
    DIRECT = 8
    FIRST_PART = 16
    """A GET that takes less where the object is shorter; the answer has the size."""


class Status(IntEnum):
    """How a request ended; the payload of all but the first two is a message."""

    OK = 0
    WORKING = 1
    """Not yet: the request was understood and is being worked on."""
    TRANSIENT = 2
    PERMANENT = 3
    MISSING = 4
    EXISTS = 5
    NO_SPACE = 6
    INTEGRITY = 7
    DAMAGED = 8
    """The payload did not have its checksum."""
    STALE_SESSION = 9
    SEALED = 10
    """The incarnation of the sender is over."""
    UNKNOWN_UPLOAD = 11
    CHANGED = 12
    """The object has not the generation that was asked for."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One header; see the module for the meaning of the fields."""

    kind: Kind
    key: str = ""
    operation: int = 0
    offset: int = 0
    length: int = 0
    total: int = 0
    generation: int = 0
    flags: Flag = Flag.NONE
    status: Status = Status.OK
    incarnation: Incarnation = (0, 0)
    session: int = 0

    @property
    def payload_bytes(self) -> int:
        """How many bytes follow the header, without the trailer."""
        return 0 if self.kind is Kind.GET else self.length

    def encode(self) -> bytes:
        """Return header and key, without the seal."""
        key = self.key.encode()
        head = _HEAD.pack(
            _MAGIC,
            VERSION,
            self.kind,
            self.flags,
            *self.incarnation,
            self.session,
            self.operation,
            self.offset,
            self.length,
            self.total,
            self.generation,
            len(key),
            self.status,
            0,
        )
        return head + key


def key_bytes_of(head: bytes) -> int:
    """Return how long the key behind `head` is.

    Raises
    ------
    FrameError
        It is no header, or of a version that was not agreed on.
    """
    magic, version = head[:4], int.from_bytes(head[4:6], "little")
    if magic != _MAGIC or version != VERSION:
        raise FrameError(f"a frame starts with {head[:6]!r}, not with {_MAGIC!r} and version {VERSION}")
    key_bytes: int = _HEAD.unpack(head)[12]
    if key_bytes > KEY_BYTES_MAX:
        raise FrameError(f"a frame has a key of {key_bytes} bytes, more than {KEY_BYTES_MAX}")
    return key_bytes


def decode(head: bytes, key: bytes) -> Frame:
    """Read what `Frame.encode` wrote, once its seal was checked.

    Raises
    ------
    FrameError
        A kind, flag or status that there is none of, or a key that is no text.
    """
    fields = _HEAD.unpack(head)
    try:
        return Frame(
            kind=Kind(fields[2]),
            flags=_flags(fields[3]),
            incarnation=(fields[4], fields[5]),
            session=fields[6],
            operation=fields[7],
            offset=fields[8],
            length=fields[9],
            total=fields[10],
            generation=fields[11],
            status=Status(fields[13]),
            key=key.decode(),
        )
    except ValueError as error:
        raise FrameError(f"a frame has a field that means nothing: {error}") from error


def _flags(value: int) -> Flag:
    if value & ~sum(Flag):
        raise ValueError(f"flags {value:#x}")
    return Flag(value)


class Sealer:
    """Seals the frames of one direction of one connection, or checks their seals.

    Parameters
    ----------
    key : bytes
        32 bytes; without a run secret it is made of public nonces and finds accidents only.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, covered: bytes) -> bytes:
        """Return the seal of the next frame."""
        number = _SEQUENCE.pack(self._count)
        self._count += 1
        return hashlib.blake2b(number + covered, digest_size=SEAL_BYTES, key=self._key).digest()

    def trailer(self, seal: bytes, checksum: int) -> bytes:
        """Return what follows the payload of the frame with this seal."""
        packed = _TRAILER.pack(checksum)
        return packed + hashlib.blake2b(seal + packed, digest_size=SEAL_BYTES, key=self._key).digest()

    def check(self, covered: bytes, seal: bytes) -> None:
        """Raise FrameError unless `seal` is that of the next frame."""
        if not hmac.compare_digest(self.seal(covered), seal):
            raise FrameError("a frame has a wrong seal: damaged, repeated, or not from the peer")

    def checksum_of(self, seal: bytes, trailer: bytes) -> int:
        """Return the checksum in a trailer, or raise FrameError."""
        checksum: int = _TRAILER.unpack(trailer[: _TRAILER.size])[0]
        if not hmac.compare_digest(self.trailer(seal, checksum), trailer):
            raise FrameError("the end of a frame has a wrong seal: damaged, or not from the peer")
        return checksum


def parse_incarnation(text: str) -> Incarnation:
    """Read ``000002-0123456789abcdef``; empty is none, before all others.

    Raises
    ------
    ConfigError
        It is something else.
    """
    if not text:
        return 0, 0
    found = _INCARNATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is no incarnation; one looks like 000002-0123456789abcdef")
    return int(found[1]), int(found[2], 16)


def fresh_operation() -> int:
    """Return a number that no other request has."""
    return secrets.randbits(63) + 1
