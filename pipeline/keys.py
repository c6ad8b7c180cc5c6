"""Which key every object of a run has, in every tier; written and read back by one set of functions.

::

    stepwell.json                                              run record
    incarnations/{incarnation}.json                            one life of the run
    layouts/{hash}.json                                        layout, named by its content
    {incarnation}/step/{step:012d}/rank-{rank:05d}.pack        differential
    {incarnation}/step/{step:012d}/rank-{rank:05d}.manifest.json
    {incarnation}/step/{step:012d}/commit.json                 only where a record commits
    {incarnation}/base/{step:012d}/rank-{rank:05d}.pack        base as one pack (memory tier)
    {incarnation}/base/{step:012d}/state/...                   base as a zarr v3 group (remote tier)
    {incarnation}/base/{step:012d}/rank-{rank:05d}.refs.json   the same packed: reference index
    {incarnation}/base/{step:012d}/rank-{rank:05d}.data-{number:05d}    and what it refers to
    {incarnation}/base/{step:012d}/rank-{rank:05d}.manifest.json
    {incarnation}/base/{step:012d}/commit.json                 only where a record commits

An incarnation is named ``{counter:06d}-{random64:016x}``. All numbers are zero-padded, so that the
order of the names is the order of the numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from stepwell.errors import FormatError, UsageError

__all__ = [
    "LAYOUT_PREFIX",
    "RUN_RECORD",
    "STEPS",
    "Area",
    "ParsedKey",
    "Series",
    "commit_key",
    "data_key",
    "incarnation_counter",
    "incarnation_key",
    "incarnation_name",
    "layout_key",
    "manifest_key",
    "pack_key",
    "parse_key",
    "references_key",
    "save_prefix",
    "state_prefix",
]

RUN_RECORD = "stepwell.json"
INCARNATION_PREFIX = "incarnations/"
LAYOUT_PREFIX = "layouts/"

# Twelve digits: a save every millisecond for thirty years.
STEPS = 10**12
_RANKS = 10**5
_COUNTERS = 10**6
_DATA_OBJECTS = 10**5

_INCARNATION = re.compile(r"[0-9]{6}-[0-9a-f]{16}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SAVE = re.compile(
    r"(?P<incarnation>[0-9]{6}-[0-9a-f]{16})/(?P<series>step|base)/(?P<step>[0-9]{12})/"
    r"(?:rank-(?P<rank>[0-9]{5})\.(?P<what>pack|manifest\.json|refs\.json|data-(?P<number>[0-9]{5}))|"
    r"(?P<commit>commit\.json)|state/(?P<rest>.+))",
    re.ASCII | re.DOTALL,
)


class Series(StrEnum):
    """The two rows of saves an incarnation writes."""

    STEP = "step"
    BASE = "base"


class Area(StrEnum):
    """What kind of object a key names."""

    RUN = "run"
    INCARNATION = "incarnation"
    LAYOUT = "layout"
    PACK = "pack"
    MANIFEST = "manifest"
    COMMIT = "commit"
    STATE = "state"
    REFERENCES = "references"
    DATA = "data"


_AREAS = {"pack": Area.PACK, "manifest.json": Area.MANIFEST, "refs.json": Area.REFERENCES}


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key of ours taken apart.

    Attributes
    ----------
    area : Area
    incarnation : str
        Empty for the run record and layouts.
    series : Series or None
        None for the run record, incarnation records and layouts.
    step, rank : int
        -1 where the key has none.
    rest : str
        Key below ``state/`` for ``Area.STATE``, the hash for ``Area.LAYOUT``, the number for
        ``Area.DATA``, else empty.
    """

    area: Area
    incarnation: str = ""
    series: Series | None = None
    step: int = -1
    rank: int = -1
    rest: str = ""


def incarnation_name(counter: int, random64: int) -> str:
    """Return the name of an incarnation; `random64` keeps two lives with one counter apart."""
    if not 0 <= counter < _COUNTERS or not 0 <= random64 < 2**64:
        raise UsageError(f"incarnation counter {counter} or random part {random64} is out of range")
    return f"{counter:06d}-{random64:016x}"


def incarnation_counter(name: str) -> int:
    """Return the counter of an incarnation.

    Raises
    ------
    FormatError
        `name` is not the name of an incarnation.
    """
    return int(_checked_incarnation(name)[:6])


def incarnation_key(incarnation: str) -> str:
    """Key of the record of one incarnation."""
    return f"{INCARNATION_PREFIX}{_checked_incarnation(incarnation)}.json"


def layout_key(layout_hash: str) -> str:
    """Key of a stored layout."""
    if not _HASH.fullmatch(layout_hash):
        raise FormatError(f"{layout_hash!r} is not the hash of a layout (32 hexadecimal digits)")
    return f"{LAYOUT_PREFIX}{layout_hash}.json"


def save_prefix(series: Series, incarnation: str, step: int) -> str:
    """Prefix, with its last slash, of everything that one save or one base put."""
    if not 0 <= step < STEPS:
        raise UsageError(f"step {step} is out of range: steps are 0 to {STEPS - 1}")
    return f"{_checked_incarnation(incarnation)}/{Series(series)}/{step:012d}/"


def pack_key(series: Series, incarnation: str, step: int, rank: int) -> str:
    """Key of the pack of one rank."""
    return f"{save_prefix(series, incarnation, step)}{_rank_name(rank)}.pack"


def manifest_key(series: Series, incarnation: str, step: int, rank: int) -> str:
    """Key of the manifest of one rank."""
    return f"{save_prefix(series, incarnation, step)}{_rank_name(rank)}.manifest.json"


def commit_key(series: Series, incarnation: str, step: int) -> str:
    """Key of the commit record of one save, all ranks."""
    return f"{save_prefix(series, incarnation, step)}commit.json"


def state_prefix(incarnation: str, step: int) -> str:
    """Prefix, without a last slash, of the zarr group of one base."""
    return f"{save_prefix(Series.BASE, incarnation, step)}state"


def references_key(incarnation: str, step: int, rank: int) -> str:
    """Key of the reference index of one rank's packed base."""
    return f"{save_prefix(Series.BASE, incarnation, step)}{_rank_name(rank)}.refs.json"


def data_key(incarnation: str, step: int, rank: int, number: int) -> str:
    """Key of one data object of one rank's packed base; most have one."""
    if not 0 <= number < _DATA_OBJECTS:
        raise UsageError(f"data object {number} is out of range: they are 0 to {_DATA_OBJECTS - 1}")
    return f"{save_prefix(Series.BASE, incarnation, step)}{_rank_name(rank)}.data-{number:05d}"


def parse_key(key: str) -> ParsedKey | None:
    """Take a key apart; None for a key that is not ours, or that would lead out of its prefix."""
    if key == RUN_RECORD:
        return ParsedKey(Area.RUN)
    for prefix, pattern, area in (
        (INCARNATION_PREFIX, _INCARNATION, Area.INCARNATION),
        (LAYOUT_PREFIX, _HASH, Area.LAYOUT),
    ):
        if key.startswith(prefix) and key.endswith(".json"):
            name = key[len(prefix) : -len(".json")]
            if not pattern.fullmatch(name):
                return None
            return (
                ParsedKey(area, incarnation=name) if area is Area.INCARNATION else ParsedKey(area, rest=name)
            )
    found = _SAVE.fullmatch(key)
    if found is None:
        return None
    series, step = Series(found["series"]), int(found["step"])
    if found["rank"] is not None:
        area = _AREAS.get(found["what"], Area.DATA)
        if area in (Area.REFERENCES, Area.DATA) and series is not Series.BASE:
            return None
        rest = found["number"] or ""
        return ParsedKey(area, found["incarnation"], series, step, int(found["rank"]), rest)
    if found["commit"] is not None:
        return ParsedKey(Area.COMMIT, found["incarnation"], series, step)
    if series is not Series.BASE or not _safe(found["rest"]):
        return None
    return ParsedKey(Area.STATE, found["incarnation"], series, step, rest=found["rest"])


def _safe(rest: str) -> bool:
    """Whether a key below ``state/`` stays there on every store; the rest of our keys is fixed."""
    segments = rest.split("/")
    return "\\" not in rest and rest.isprintable() and not any(s in ("", ".", "..") for s in segments)


def _checked_incarnation(name: str) -> str:
    if not _INCARNATION.fullmatch(name):
        raise FormatError(f"{name!r} is not the name of an incarnation (like 000001-0123456789abcdef)")
    return name


def _rank_name(rank: int) -> str:
    if not 0 <= rank < _RANKS:
        raise UsageError(f"rank {rank} is out of range: ranks are 0 to {_RANKS - 1}")
    return f"rank-{rank:05d}"
