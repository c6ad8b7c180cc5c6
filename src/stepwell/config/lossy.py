"""Settings of ``quantize`` and ``sparsify``: checked here, and turned into what the stages take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stepwell.config.faults import did_you_mean

__all__ = [
    "QUANTIZE",
    "SPARSIFY",
    "Quantization",
    "Sparsity",
    "check_quantize",
    "check_sparsify",
    "check_together",
    "kinds_of_rule",
]

QUANTIZE = ("none", "int8", "int4", "adaptive")
SPARSIFY = ("none", "adaptive")

_LINEAR = ("none", "int8", "int4")
_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "gradient": _LINEAR,
    "weight": _LINEAR,
    "momentum": (*_LINEAR, "codebook", "log_quant", "log_quant4"),
    "variance": ("none", "log_quant", "log_quant4"),
}
"""Kinds of tensors and what each may be kept as."""

_OF_RULE = ("exact", "int8", "int4", "log_quant", "log_quant4", "codebook", "sparse")
_SHORT: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "int8": {"gradient": "int8", "weight": "int8", "momentum": "int8", "variance": "log_quant"},
    "int4": {"gradient": "int4", "weight": "int4", "momentum": "int4", "variance": "log_quant"},
    "adaptive": {"gradient": "int8", "weight": "int8", "momentum": "int8", "variance": "log_quant"},
}

_RATE_MAX = 0.5
_BLOCKS = tuple(1 << n for n in range(4, 13))


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the stage ``quantize`` was told; kinds as the configuration calls them."""

    kinds: Mapping[str, str]
    eps: float | None = None
    block: int = 256
    small: int | None = None
    rules: Mapping[str, str | Mapping[str, str]] | None = None

    @classmethod
    def of(cls, setting: object) -> Quantization:
        """Read a setting that was checked."""
        if not isinstance(setting, Mapping):
            return cls(_SHORT[str(setting)])
        kinds = {kind: str(setting[kind]) for kind in _OF_KIND if kind in setting}
        rest = {key: setting[key] for key in ("eps", "block", "small", "rules") if key in setting}
        return cls(kinds, **rest)


@dataclass(frozen=True, slots=True)
class Sparsity:
    """What the stage ``sparsify`` was told."""

    on: bool = False
    adaptive: bool = False
    rate: float = 0.1
    values: str = "int8"
    eps: float | None = None

    @classmethod
    def of(cls, setting: object) -> Sparsity:
        """Read a setting that was checked."""
        if isinstance(setting, Mapping):
            return cls(on=True, **setting)
        return cls(on=setting == "adaptive", adaptive=setting == "adaptive")


def kinds_of_rule(treatment: str) -> tuple[str, ...]:
    """Return the kinds that a rule means which names none: those the treatment can be meant for."""
    if treatment in ("exact", "int8", "int4", "sparse"):
        return tuple(kind for kind in _OF_KIND if treatment == "exact" or kind != "variance")
    return tuple(kind for kind, treatments in _OF_KIND.items() if treatment in treatments)


def check_quantize(setting: object) -> object:
    """Return a setting of ``quantize`` as it is, if it can be meant.

    Raises
    ------
    ValueError
        With what it takes.
    """
    if not isinstance(setting, Mapping):
        return _one_of("quantize", setting, QUANTIZE, " or a mapping of kinds")
    checks: dict[str, Callable[[object], bool]] = {"eps": _positive, "small": _count, "block": _is_block}
    for key, value in setting.items():
        if key in _OF_KIND:
            _one_of(f"quantize: {key}", value, _OF_KIND[key])
        elif key == "rules":
            _check_rules(value)
        elif key not in checks:
            known = (*_OF_KIND, *checks, "rules")
            raise ValueError(f'"quantize" has no key "{key}"{did_you_mean(str(key), known)}')
        elif not checks[key](value):
            raise ValueError(f'"quantize": {key} cannot be {value!r}')
    return dict(setting)


def check_sparsify(setting: object) -> object:
    """Return a setting of ``sparsify`` as it is, if it can be meant.

    Raises
    ------
    ValueError
        With what it takes.
    """
    if not isinstance(setting, Mapping):
        return _one_of("sparsify", setting, SPARSIFY, " or a mapping such as {rate: 0.1}")
    checks: dict[str, Callable[[object], bool]] = {
        "rate": lambda value: _positive(value) and _at_most_half(value),
        "values": lambda value: value in ("int8", "float32"),
        "eps": _positive,
    }
    for key, value in setting.items():
        if key not in checks:
            raise ValueError(f'"sparsify" has no key "{key}"{did_you_mean(str(key), checks)}')
        if not checks[key](value):
            raise ValueError(f'"sparsify": {key} cannot be {value!r}')
    return dict(setting)


def check_together(settings: Mapping[str, object]) -> None:
    """Check the settings of all stages together, by stage name.

    Raises
    ------
    ValueError
        States would lose something without a closed loop, or a rule asks for a stage that is not there.
    """
    quantize, sparsify = settings.get("quantize", "none"), settings.get("sparsify", "none")
    delta = settings.get("delta", "none")
    lossy = quantize != "none" or sparsify != "none"
    if lossy and settings["capture"] == "state" and delta != "difference":
        raise ValueError(
            "quantize and sparsify need delta: difference with capture: state, so that errors do not add up"
        )
    rules = Quantization.of(quantize).rules or {}
    wanted = {
        value
        for rule in rules.values()
        for value in (rule.values() if isinstance(rule, Mapping) else (rule,))
    }
    if "sparse" in wanted and sparsify == "none":
        raise ValueError("a rule of quantize says sparse, but sparsify is none")


def _check_rules(rules: object) -> None:
    if not isinstance(rules, Mapping):
        raise ValueError(f'"quantize": rules map patterns of names to treatments, not {rules!r}')
    for pattern, rule in rules.items():
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f'"quantize": a rule has the pattern {pattern!r}')
        if not isinstance(rule, Mapping):
            _one_of(f"quantize: rule {pattern!r}", rule, _OF_RULE)
            continue
        for kind, treatment in rule.items():
            _one_of(f"quantize: a kind in rule {pattern!r}", kind, tuple(_OF_KIND))
            _one_of(f"quantize: rule {pattern!r}: {kind}", treatment, _OF_RULE)


def _one_of(what: str, value: object, allowed: tuple[str, ...], or_else: str = "") -> object:
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ValueError(f'"{what}" takes {" or ".join(allowed)}{or_else}, not {value!r}{hint}')
    return value


def _at_most_half(value: object) -> bool:
    return isinstance(value, int | float) and value <= _RATE_MAX


def _positive(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_block(value: object) -> bool:
    return type(value) is int and value in _BLOCKS
