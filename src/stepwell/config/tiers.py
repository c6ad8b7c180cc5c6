"""The `tiers` list of a configuration: one model for each kind of tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from stepwell.config.faults import plugin_names
from stepwell.config.file import local_path

__all__ = ["NAME_PATTERN", "DirectoryTier", "MemoryTier", "OnError", "PluginTier", "Strict", "TierConfig"]

OnError = Literal["raise", "degrade", "retry"]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Strict(BaseModel):
    """No unknown keys, no silent conversions (``true`` is not 1), no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Tier(Strict):
    """What every tier has.

    Attributes
    ----------
    name : str
        What `handle.until`, `Restored.tier` and messages call the tier; the kind where not given.
    keep : int
        How many of the newest committed chains (a base and its log) stay.
    on_error : "raise", "degrade", "retry" or None
        What a failure of this tier does; None takes the run's own `on_error`.
    log_budget : float
        A base that is merely due is left out here while the log is not this many times as large as the
        base before it. The first tier takes every base, and so does any where saves are lossy.
    """

    name: str = Field(default="", pattern=rf"^$|{NAME_PATTERN}")
    keep: int = Field(default=2, ge=1)
    on_error: OnError | None = None
    log_budget: float = Field(default=2.0, ge=0)
    kind: str

    @property
    def label(self) -> str:
        """The tier's name, or its kind where it has none."""
        return self.name or self.kind


class MemoryTier(_Tier):
    """Files in a memory file system on this machine; survives the death of the process.

    Attributes
    ----------
    directory : str or None
        Where the arena lies. None: ``/dev/shm/stepwell-<uid>/<hash of the run>``.
    slots : int
        Capture slots, one captured save each. One makes no progress, two are safe, three stall less.
    """

    kind: Literal["memory"] = "memory"
    directory: str | None = None
    slots: int = Field(default=3, ge=2, le=64)

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(local_path(value))


class DirectoryTier(_Tier):
    """A directory on a disk or a network file system; survives what that disk survives.

    Attributes
    ----------
    path : str
        A plain path or a ``file:`` URL; made absolute when the configuration is loaded.
    """

    kind: Literal["directory"] = "directory"
    path: str

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return str(local_path(value))


class PluginTier(_Tier):
    """A tier whose store a third party registered in the entry-point group ``stepwell.stores``.

    Attributes
    ----------
    options : dict
        Handed to the class as ``from_config(options)``.
    """

    kind: str
    options: dict[str, object] = Field(default_factory=dict)


def _tier_tag(value: object) -> str | None:
    """Decide which model a tier is read by; None where the kind is missing or unknown."""
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    if kind in ("memory", "directory"):
        return str(kind)
    return "plugin" if kind in plugin_names("stepwell.stores") else None


TierConfig = Annotated[
    Annotated[MemoryTier, Tag("memory")]
    | Annotated[DirectoryTier, Tag("directory")]
    | Annotated[PluginTier, Tag("plugin")],
    Discriminator(_tier_tag),
]
