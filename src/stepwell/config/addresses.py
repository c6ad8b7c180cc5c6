"""Addresses of nodes as people write them: ``host:port``, one or several."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

__all__ = ["Addresses", "parse_address"]

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


def _one_or_several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _checked(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        parse_address(text)
    return value


Addresses = Annotated[
    tuple[str, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_one_or_several),
    AfterValidator(_checked),
]
"""Field of a model: a string, or a list of at least one."""
