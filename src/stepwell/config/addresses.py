"""Addresses of nodes as people write them: ``host:port``."""

from __future__ import annotations

import re

__all__ = ["parse_address"]

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``, with an IPv6 address in brackets.

    Raises
    ------
    ValueError
        It is something else, or there is no such port.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not int(found[3]) < 65536:
        raise ValueError(f"{text!r} is no address; one looks like 10.0.0.2:7070 or [fd00::2]:7070")
    return found[1] or found[2], int(found[3])
