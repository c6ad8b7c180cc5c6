"""The first page of every file of an arena: what the payload behind it is.

A page of zeros says that the payload means nothing. Layout, little-endian::

    0    8  magic b"STEPWELA"
    8    4  format version
    12   4  bytes of the run name (R)
    16   4  bytes of the key (K)
    20   4  zero
    24   8  bytes of the payload that count
    32   8  serial, random: tells two publications of the same key apart
    40   R  run name, UTF-8
    40+R K  key, UTF-8
    ...     zeros
    4088 8  xxh3-64 of bytes 0 to 4087
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from stepwell.errors import FormatError, IntegrityError, UsageError
from stepwell.stores.keys import check_key

__all__ = ["BLANK", "FORMAT", "PAGE_BYTES", "RUN_BYTES_MAX", "Header"]

PAGE_BYTES = 4096
FORMAT = 1
RUN_BYTES_MAX = 1024
BLANK = bytes(PAGE_BYTES)

_MAGIC = b"STEPWELA"
_FIXED = struct.Struct("<8sIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = PAGE_BYTES - _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """What is published in one file.

    Attributes
    ----------
    run : str
        Name of the run the arena belongs to.
    key : str
    length : int
        Bytes of the payload that count.
    serial : int
        Random 64 bits, new for each publication.
    """

    run: str
    key: str
    length: int
    serial: int

    def encode(self) -> bytes:
        """Return the page, exactly 4096 bytes.

        Raises
        ------
        UsageError
            The run name is too long.
        """
        run, key = self.run.encode(), self.key.encode()
        if len(run) > RUN_BYTES_MAX:
            raise UsageError(f"run name {self.run[:60]!r}... has more than {RUN_BYTES_MAX} bytes")
        page = _FIXED.pack(_MAGIC, FORMAT, len(run), len(key), 0, self.length, self.serial) + run + key
        page = page.ljust(_CHECKED_BYTES, b"\0")
        return page + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(page))

    @classmethod
    def decode(cls, page: bytes, *, payload_bytes: int) -> Header | None:
        """Read a page; None where it is blank.

        Parameters
        ----------
        page : bytes
            The first 4096 bytes of the file, fewer if it is shorter.
        payload_bytes : int
            How many bytes the file has behind its first page.

        Raises
        ------
        FormatError
            The page was written by a newer version.
        IntegrityError
            The page is damaged, or promises more than the file has.
        """
        if page == BLANK:
            return None
        if len(page) != PAGE_BYTES:
            raise IntegrityError(f"header page has {len(page)} bytes instead of {PAGE_BYTES}")
        checked = page[:_CHECKED_BYTES]
        if _CHECKSUM.unpack(page[_CHECKED_BYTES:])[0] != xxhash.xxh3_64_intdigest(checked):
            raise IntegrityError("header page is damaged or half written: its checksum is wrong")
        magic, version, run_bytes, key_bytes, _, length, serial = _FIXED.unpack_from(page)
        if magic != _MAGIC:
            raise FormatError(f"header page starts with {magic!r}, not {_MAGIC!r}")
        if version != FORMAT:
            raise FormatError(f"header page has format {version}; this version reads format {FORMAT}")
        key_end = _FIXED.size + run_bytes + key_bytes
        if key_end > _CHECKED_BYTES or length > payload_bytes:
            raise IntegrityError(f"header page promises {length} bytes, the file has {payload_bytes}")
        try:
            run = page[_FIXED.size : _FIXED.size + run_bytes].decode()
            key = check_key(page[_FIXED.size + run_bytes : key_end].decode())
        except UnicodeDecodeError as error:
            raise IntegrityError("header page holds a name that is no UTF-8") from error
        return cls(run=run, key=key, length=length, serial=serial)
