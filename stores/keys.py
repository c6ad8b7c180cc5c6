"""Which keys a store takes, and how a tensor name becomes part of a key.

A tensor name is data: any text, with ``/`` between its parts. `encode_name` turns it into key
segments that are safe on every store, also on those that fold case or normalise Unicode:

==========================  ======================================================================
in the name                 in the key
==========================  ======================================================================
``a-z 0-9 . _ -``           itself
an upper-case letter        ``=`` and the lower-case letter: ``SelfAttention`` is ``=self=attention``
a run of anything else      ``=_``, the UTF-8 bytes in hex, ``_``: ``a:b`` is ``a=_3a_b``
an empty part               ``=-``
a leading or last dot,      the first (for a last dot: the last) character as a run of its own:
``__`` in front,            ``zarr.json`` is ``=_7a_arr.json``
``zarr.json``, ``c``
more than 200 bytes         several segments: all but the last end in ``=``, all but the first
                            start with one more ``=``
==========================  ======================================================================

The result has no upper-case letter and no byte outside ASCII, so folding and normalising leave
it as it is, and two names never meet. A name and a longer one below it (``a`` and ``a/b``) get
keys below each other; that is sound for objects, but a zarr group does not list arrays below an
array: whoever lays out a group decides about those.
"""

from __future__ import annotations

import re

from stepwell.errors import FormatError, PermanentStoreError, UnsupportedValueError

__all__ = [
    "KEY_BYTES_MAX",
    "NAME_BYTES_MAX",
    "OWN_PREFIX",
    "SEGMENT_BYTES_MAX",
    "check_directory",
    "check_key",
    "check_prefix",
    "decode_name",
    "encode_name",
]

KEY_BYTES_MAX = 1024
"""The limit of S3 and GCS."""

SEGMENT_BYTES_MAX = 255
"""NAME_MAX of Linux file systems."""

NAME_BYTES_MAX = 900
"""Longest encoded name: leaves 124 bytes of a key for what stands before and after it."""

OWN_PREFIX = ".stepwell-"
"""First letters of files that belong to a store itself (temporary files, locks); never a key."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(?:/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*", re.ASCII)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")

_PIECE_BYTES_MAX = 198  # of 200, two are kept for the marks of a split
_PLAIN_PART = re.compile(r"(?!__)[a-z0-9_-](?:[a-z0-9._-]{0,198}[a-z0-9_-])?", re.ASCII)
_TOKEN = re.compile(r"[a-z0-9._-]+|[A-Z]|[^a-z0-9._A-Z-]+", re.ASCII | re.DOTALL)
_ENCODED_TOKEN = re.compile(r"([a-z0-9._-]+)|=([a-z])|=_((?:[0-9a-f]{2})+)_", re.ASCII)
_RESERVED_PARTS = frozenset({"zarr.json", "c"})
_EMPTY_PART = "=-"


def check_key(key: str) -> str:
    """Return `key` if a store may take it.

    Raises
    ------
    PermanentStoreError
        Not text, empty, absolute, with an empty, ``.`` or ``..`` segment, a backslash, a control
        character, text that is no UTF-8, more than 1024 bytes in all or 255 in a segment, or a
        segment that starts with ``.stepwell-``.
    """
    fault = _fault_of(key)
    if fault is not None:
        shown = repr(key) if len(repr(key)) <= 120 else repr(key)[:117] + "..."
        raise PermanentStoreError(f"key {shown} is refused: {fault}; use relative, '/'-separated keys")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys may start with it: empty, or a key with or without a final ``/``.

    Raises
    ------
    PermanentStoreError
        As `check_key`.
    """
    if prefix == "":
        return prefix
    check_key(prefix.removesuffix("/") if isinstance(prefix, str) else prefix)
    return prefix


def check_directory(prefix: str) -> str:
    """Return what every key below the directory `prefix` starts with: empty, or with a final ``/``.

    Raises
    ------
    PermanentStoreError
        As `check_key`.
    """
    check_prefix(prefix)
    return prefix if prefix == "" or prefix.endswith("/") else prefix + "/"


def _fault_of(key: object) -> str | None:
    """Say why `key` is refused, or None."""
    if not isinstance(key, str):
        return f"it is a {type(key).__name__}, not text"
    if not key:
        return "it is empty"
    segments = key.split("/")
    # The common case in one match; what it lets through is ASCII, so its length is its bytes.
    if len(key) <= SEGMENT_BYTES_MAX and _PLAIN_KEY.fullmatch(key):
        return None
    try:
        encoded_bytes = len(key.encode())
    except UnicodeEncodeError:
        return "it cannot be written as UTF-8"
    if encoded_bytes > KEY_BYTES_MAX:
        return f"it has {encoded_bytes} bytes, more than {KEY_BYTES_MAX}"
    if key.startswith("/"):
        return "it is absolute"
    if "\\" in key:
        return "it contains a backslash"
    if _CONTROL.search(key):
        return "it contains a control character"
    return next(filter(None, map(_segment_fault, segments)), None)


def _segment_fault(segment: str) -> str | None:
    if not segment:
        return "a segment is empty"
    if segment in {".", ".."}:
        return f"{segment!r} is no name"
    if len(segment.encode()) > SEGMENT_BYTES_MAX:
        return f"a segment has more than {SEGMENT_BYTES_MAX} bytes"
    if segment.startswith(OWN_PREFIX):
        return f"names that start with {OWN_PREFIX!r} belong to the store itself"
    return None


def encode_name(name: str) -> str:
    """Turn a tensor name into key segments; the only way from a name to a key.

    Parameters
    ----------
    name : str
        Any text, ``/`` between parts, e.g. ``"model/h.0.attn.weight"``.

    Returns
    -------
    str
        One or more segments with ``/`` between them, each at most 200 bytes of lower-case ASCII.
        Common names come out as they went in. Different names never give the same result.

    Raises
    ------
    UnsupportedValueError
        The result would have more than 900 bytes.

    Examples
    --------
    >>> encode_name("model/h.0.attn.weight"), encode_name("a//B"), encode_name("zarr.json")
    ('model/h.0.attn.weight', 'a/=-/=b', '=_7a_arr.json')
    """
    encoded = "/".join(map(_encode_part, name.split("/")))
    if len(encoded) > NAME_BYTES_MAX:
        raise UnsupportedValueError(
            f"tensor name {name[:60]!r}... ({len(name)} characters) needs {len(encoded)} bytes in a key, "
            f"more than {NAME_BYTES_MAX}; give it a shorter name"
        )
    return encoded


def _encode_part(part: str) -> str:
    if part not in _RESERVED_PARTS and _PLAIN_PART.fullmatch(part):
        return part
    if not part:
        return _EMPTY_PART
    encoded = _encode_text(part)
    if len(encoded) <= _PIECE_BYTES_MAX + 2:
        return encoded
    pieces = [encoded[at : at + _PIECE_BYTES_MAX] for at in range(0, len(encoded), _PIECE_BYTES_MAX)]
    last = len(pieces) - 1
    return "/".join(
        ("=" if at else "") + piece + ("=" if at < last else "") for at, piece in enumerate(pieces)
    )


def _encode_text(part: str) -> str:
    """Encode one non-empty part, not yet cut to length."""
    guard_first = part[0] == "." or part.startswith("__") or part in _RESERVED_PARTS
    guard_last = part[-1] == "." and len(part) > 1
    head, part = (part[:1], part[1:]) if guard_first else ("", part)
    part, tail = (part[:-1], part[-1:]) if guard_last else (part, "")
    return _hex_run(head) + "".join(map(_encode_token, _TOKEN.findall(part))) + _hex_run(tail)


def _encode_token(token: str) -> str:
    if "A" <= token <= "Z":
        return "=" + token.lower()
    return token if re.fullmatch(r"[a-z0-9._-]+", token) else _hex_run(token)


def _hex_run(text: str) -> str:
    # Lone surrogates are legal in a Python name and come back as they were.
    return f"=_{text.encode('utf-8', 'surrogatepass').hex()}_" if text else ""


def decode_name(encoded: str) -> str:
    """Undo `encode_name`.

    Raises
    ------
    FormatError
        `encode_name` never made this text.
    """
    try:
        name = "/".join(map(_decode_part, _join_pieces(encoded)))
        if encode_name(name) == encoded:
            return name
    except (ValueError, UnsupportedValueError) as error:
        raise FormatError(f"{encoded[:120]!r} is no encoded tensor name") from error
    # One name, one key: a second spelling of the same name is as wrong as no name at all.
    raise FormatError(f"{encoded[:120]!r} is no encoded tensor name: {name!r} is written otherwise")


def _join_pieces(encoded: str) -> list[str]:
    """Undo the cutting of long parts."""
    parts: list[str] = []
    open_part: str | None = None
    for segment in encoded.split("/"):
        if open_part is not None:
            if not segment.startswith("="):
                raise ValueError("a piece of a long part is missing")
            segment = open_part + segment[1:]
            open_part = None
        if segment.endswith("="):
            open_part = segment[:-1]
        else:
            parts.append(segment)
    if open_part is not None:
        raise ValueError("the last piece of a long part is missing")
    return parts


def _decode_part(part: str) -> str:
    if part == _EMPTY_PART:
        return ""
    texts: list[str] = []
    at = 0
    while at < len(part):
        found = _ENCODED_TOKEN.match(part, at)
        if found is None:
            raise ValueError(f"unknown escape at {at}")
        plain, upper, run = found.groups()
        texts.append(plain or (upper.upper() if upper else _text_of(run)))
        at = found.end()
    if not texts:
        raise ValueError("an empty segment")
    return "".join(texts)


def _text_of(run: str) -> str:
    return bytes.fromhex(run).decode("utf-8", "surrogatepass")
