"""Small JSON documents that find every flipped byte of themselves.

A sealed document is one valid JSON object of exactly two lines::

    {"document":{...canonical JSON...},
    "xxh3_128":"<32 hexadecimal digits>"}

The checksum covers the canonical JSON; every byte around it is fixed and compared. This frame
never changes between versions; the version of what is inside is the document's ``"format"``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import xxhash

from stepwell.errors import FormatError, IntegrityError, UsageError
from stepwell.stores.base import BytesLike

__all__ = ["FORMAT", "canonical_json", "count", "number", "parse_json", "reading", "seal", "typed", "unseal"]

Value = TypeVar("Value")

FORMAT = 1
"""Newest version of documents and packs that this code writes and reads."""

# A manifest of 100,000 objects is about 20 MB; nothing we seal comes near this.
SEALED_BYTES_MAX = 256 << 20

_HEAD = b'{"document":'
_MIDDLE = b',\n"xxh3_128":"'
_TAIL = b'"}\n'
_DIGEST_LENGTH = 32


def canonical_json(value: object) -> bytes:
    """Encode a JSON value in the one form we hash: sorted keys, no spaces, ASCII only.

    Raises
    ------
    ValueError, TypeError
        NaN, infinity, or a value JSON does not have; callers encode those before.
    """
    return json.dumps(
        value, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False
    ).encode()


def parse_json(data: BytesLike, what: str) -> dict[str, object]:
    """Parse bytes that must be one JSON object.

    Raises
    ------
    FormatError
        Not JSON, not an object, a repeated key, NaN, infinity or beyond a double, or nested beyond reason.
    """
    try:
        value = json.loads(
            bytes(data), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not a JSON document ({error})") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what}: a JSON {type(value).__name__} where an object is needed")
    return value


def seal(document: Mapping[str, object]) -> bytes:
    """Encode a document with its checksum; the bytes are ready for ``store.put``."""
    body = canonical_json(document)
    return b"".join((_HEAD, body, _MIDDLE, xxhash.xxh3_128_hexdigest(body).encode(), _TAIL))


def unseal(data: BytesLike, what: str, kind: str) -> dict[str, object]:
    """Check a sealed document and return what is inside.

    Parameters
    ----------
    data : bytes-like
    what : str
        Name for messages: the key, and the tier where known.
    kind : str
        The document's ``"kind"`` that is needed here.

    Raises
    ------
    IntegrityError
        Any byte differs from what was sealed, or bytes are missing or too many.
    FormatError
        Written in a newer format (both versions are named), or a document of another kind.
    """
    raw = bytes(data)
    if len(raw) > SEALED_BYTES_MAX:
        raise FormatError(f"{what}: {len(raw)} bytes, more than the {SEALED_BYTES_MAX} a document may have")
    end = len(raw) - len(_TAIL) - _DIGEST_LENGTH - len(_MIDDLE)
    if (
        end < len(_HEAD)
        or not raw.startswith(_HEAD)
        or not raw.endswith(_TAIL)
        or raw[end : end + len(_MIDDLE)] != _MIDDLE
    ):
        raise IntegrityError(f"{what}: damaged or cut short (not framed as a sealed document)")
    body = raw[len(_HEAD) : end]
    digest = raw[end + len(_MIDDLE) : end + len(_MIDDLE) + _DIGEST_LENGTH]
    if xxhash.xxh3_128_hexdigest(body).encode() != digest:
        raise IntegrityError(f"{what}: damaged (its checksum does not match)")
    document = parse_json(body, what)
    version = document.get("format")
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: has no format version")
    if version > FORMAT:
        raise FormatError(
            f"{what}: written in format {version}, this stepwell reads up to format {FORMAT}; update it",
            newer=True,
        )
    if document.get("kind") != kind:
        raise FormatError(f"{what}: a {document.get('kind')!r} document where a {kind!r} is needed")
    return document


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what a wrong document does to its reader into one ``FormatError`` that names `what`."""
    try:
        yield
    except (KeyError, ValueError, TypeError, RecursionError, UsageError) as error:
        # RecursionError: a value nested about as deep as json goes, when a message shows it.
        raise FormatError(f"{what}: not a document of ours ({error!r})") from error


def typed(value: object, kind: type[Value]) -> Value:
    """Return `value` if it is of exactly this type, else raise TypeError."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.200} is not of type {kind.__name__}")
    return value


def count(value: object, bits: int = 63) -> int:
    """Return a whole number of at most `bits` bits and not below zero, else raise TypeError."""
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise TypeError(f"{value!r:.200} is not a count")
    return value


def number(value: object) -> float:
    """Return a number as a float, else raise TypeError; none that is not finite, or no double, is one."""
    largest = sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, int | float) or not -largest <= value <= largest:
        raise TypeError(f"{value!r:.200} is not a number")
    return float(value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.50} is no double")
    return value
