"""From pydantic's errors to lines a person can act on: place, key, what, and a near name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, get_args

from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["KeyPath", "Place", "config_error", "did_you_mean", "plugin_names"]

KeyPath = tuple[str | int, ...]

TAGS = ("memory", "directory", "peer", "peers", "remote", "plugin")
"""Names by which pydantic tells the models of a tier apart; it puts them into its paths."""

SHOWN_FAULTS_MAX = 50


@dataclass(frozen=True, slots=True)
class Place:
    """Where a configuration was read from.

    Attributes
    ----------
    source : str
        Path of the file as given, or what stands for it.
    lines : mapping of key path to line number
        Lines count from 1. Empty where there is no file.
    """

    source: str = "config"
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def of(self, path: KeyPath) -> str:
        """Return ``file:line`` of the nearest key that has a line."""
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.source}:{line}"
        return self.source

    def without(self, keys: Iterable[str]) -> Place:
        """Return a place that no longer knows lines below these top-level keys."""
        replaced = set(keys)
        kept = {path: n for path, n in self.lines.items() if not replaced.intersection(path[:1])}
        return Place(self.source, kept)


@cache
def plugin_names(group: str) -> frozenset[str]:
    """Return the names that installed packages registered in an entry-point group."""
    return frozenset(point.name for point in entry_points(group=group))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean "..."?`` for the nearest known word, or nothing."""
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower().replace("-", "_"), list(by_lower), n=1, cutoff=0.6)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def config_error(
    error: ValidationError, model: type[BaseModel], tree: Mapping[str, object], place: Place
) -> ConfigError:
    """Turn every fault pydantic found into one line of one `ConfigError`."""
    faults: list[tuple[int, str]] = []
    details = error.errors(include_url=False)
    for detail in details:
        below = [other for other in details if other["loc"][:1] == detail["loc"] != other["loc"]]
        if detail["type"] == "too_short" and below:
            continue  # the items are there but faulty, and are reported themselves
        path, fields = _located(detail["loc"], model)
        path, what = _explained(detail, path, fields)
        shown = ".".join(str(part) for part in path) or "configuration"
        faults.append((place.lines.get(path[:1], 0), f"{place.of(path)}: {shown}: {what}"))
    lines = [line for _, line in sorted(faults, key=lambda fault: fault[0])]
    more = len(lines) - SHOWN_FAULTS_MAX
    if more > 0:
        lines = [*lines[:SHOWN_FAULTS_MAX], f"and {more} more"]
    head = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return ConfigError("\n  ".join([f"{head} in the configuration:", *lines]))


def _located(loc: KeyPath, model: type[BaseModel]) -> tuple[KeyPath, tuple[str, ...]]:
    """Return the path as a person wrote it and the fields of the model it leads into."""
    below = 0
    if len(loc) >= 3 and loc[0] == "tiers" and loc[2] in TAGS:
        from stepwell.config import tiers

        models: dict[str | int, type[BaseModel]] = {
            "memory": tiers.MemoryTier,
            "directory": tiers.DirectoryTier,
            "peer": tiers.PeerTier,
            "peers": tiers.PeersTier,
            "remote": tiers.RemoteTier,
            "plugin": tiers.PluginTier,
        }
        model, below = models[loc[2]], 2
        loc = (*loc[:2], *loc[3:])
    for name in loc[below:-1]:
        field = model.model_fields.get(str(name))
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            break
        model = inner
    return loc, tuple(model.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the model that a field holds, also where it may be None."""
    from pydantic import BaseModel

    candidates = (annotation, *get_args(annotation))
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _explained(detail: ErrorDetails, path: KeyPath, fields: tuple[str, ...]) -> tuple[KeyPath, str]:
    """Return where and what, in our words where pydantic's would not help."""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return path, f"no such key{did_you_mean(str(path[-1]), fields)}"
    if kind == "missing" and path == ("tiers",):
        return path, "missing; for example  tiers: [{kind: memory}, {kind: directory, path: checkpoints}]"
    if kind == "missing":
        return path, "missing"
    if kind == "union_tag_not_found":
        return _unknown_kind(given, path)
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        hint = did_you_mean(given, expected) if isinstance(given, str) else ""
        return path, f"{given!r} is not one of {', '.join(expected)}{hint}"
    if kind == "value_error":
        return path, str(context.get("error", detail["msg"]))
    if kind == "string_pattern_mismatch":
        return path, f"{given!r}: up to 64 letters, digits, '.', '_', '-', beginning with a letter or digit"
    shown = repr(given)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return path, f"{detail['msg'].removeprefix('Input ')}, got {shown}"


def _unknown_kind(given: object, path: KeyPath) -> tuple[KeyPath, str]:
    """Explain a tier whose kind is missing or not known."""
    known = ["memory", "directory", "peer", "peers", "remote", *sorted(plugin_names("stepwell.stores"))]
    if not isinstance(given, Mapping):
        return path, f"a tier is a mapping with a `kind` ({', '.join(known)}), got {given!r}"
    if "kind" not in given:
        return (*path, "kind"), f"missing; one of {', '.join(known)}"
    word = str(given["kind"])
    hint = did_you_mean(word, known)
    return (*path, "kind"), f'no tier kind is called "{word}" (there are {", ".join(known)}){hint}'
