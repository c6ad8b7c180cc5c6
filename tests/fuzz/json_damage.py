"""JSON documents changed in one place at a time: another value or type, more, less, too deep, too large."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy

from dice import NUMBERS, Dice, damage

HUGE = "@huge@"
DEEP = re.compile(r'"@deep:([0-9]{1,4})@"')
"""Strings that ``dumped`` writes as what Python's json has no value for, or no stack."""

WORDS = [
    *("", "0", "state/0", "update/0/0", "aux/0", "\ud800", "a/../b", HUGE, "stepwell.predictive"),
    *("stepwell.difference", "stepwell.ordered_delta", "stepwell.byteplane", "stepwell.int8", "previous"),
    *("weight", "variance", "moment1", "moment2", "gradient", "state", "base", "aux", "optim:0"),
    *("float32", "bfloat16", "uint8", "complex128", "bool", "step", "00" * 8, "00" * 16),
]

Place = tuple[dict[str, object] | list[object], str | int]


def dumped(value: object) -> bytes:
    """Encode as the writers do, with what only bytes can say put in."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    text = text.replace(f'"{HUGE}"', "1e999")
    return DEEP.sub(lambda found: "[" * int(found[1]) + "]" * int(found[1]), text).encode()


def places(value: object) -> Iterator[Place]:
    """Yield every place in a document, as (what holds it, key or index)."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from places(value[key])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value, index
            yield from places(item)


def damage_json(dice: Dice, document: object) -> None:
    """Change one place of a document, in place."""
    found = list(places(document))
    if not found:
        return
    holder, key = found[dice.number(0, len(found) - 1)]
    way = dice.number(0, 7)
    if way == 0:
        if isinstance(holder, list):
            holder.insert(int(key), _value(dice, found, holder[int(key)]))
        else:
            holder[WORDS[dice.number(0, len(WORDS) - 1)]] = _value(dice, found, holder[str(key)])
    elif way == 1:
        del holder[key]  # type: ignore[arg-type]
    elif way == 2 and isinstance(holder, list):
        other = dice.number(0, len(holder) - 1)
        holder[int(key)], holder[other] = holder[other], holder[int(key)]
    else:
        old = holder[key]  # type: ignore[index]
        holder[key] = _value(dice, found, old)  # type: ignore[index]


def _value(dice: Dice, found: list[Place], old: object) -> object:
    """Return another value, most often one like the old."""
    way = dice.number(0, 9)
    if way <= 3 and type(old) is int:
        near = (old + 4 * dice.number(-2, 2), old + dice.number(-1, 1), old * 2, -old)
        return near[dice.number(0, 3)] if way else NUMBERS[dice.number(0, len(NUMBERS) - 1)]
    if way <= 3 and isinstance(old, str):
        return damage(dice, old.encode(errors="replace"), [b"-"]).decode("latin-1")
    if way <= 3 and type(old) is float:
        return (old * 2, -old, 1 - old, 0.0, -0.0, 1e308, 5e-324, 1e-45, 1e39, HUGE)[dice.number(0, 9)]
    if way <= 5:
        holder, key = found[dice.number(0, len(found) - 1)]
        return deepcopy(holder[key])  # type: ignore[index]
    if way == 6:
        return WORDS[dice.number(0, len(WORDS) - 1)]
    if way == 7:
        return NUMBERS[dice.number(0, len(NUMBERS) - 1)] + dice.number(-1, 1)
    if way == 8 and dice.number(0, 3) == 0:
        return f"@deep:{dice.number(1, 1100)}@"
    plain: list[object] = [None, True, False, [], {}, [[]], {"id": []}, 0.5, -1, 10**400, HUGE, -0.0]
    return plain[dice.number(0, len(plain) - 1)]
