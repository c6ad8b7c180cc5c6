"""What a run is configured with: pydantic models, and `load_config`, which makes one from anything.

A configuration comes from a YAML or TOML file, from a mapping, or from nothing but a directory.
Every fault is reported at once in one `ConfigError`, each with its place (``file:line: key.path``).
The models are frozen; nothing here touches a disk except to read the configuration file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    field_validator,
)

from stepwell.config_faults import Place, config_error, plugin_names
from stepwell.config_file import as_plain, is_config_path, local_path, read_config_file
from stepwell.config_stages import DEFAULT_PIPELINE, StageConfig, check_order
from stepwell.errors import ConfigError

__all__ = [
    "Config",
    "DirectoryTier",
    "MemoryTier",
    "OnError",
    "PluginTier",
    "StageConfig",
    "TierConfig",
    "load_config",
    "show_config",
]

OnError = Literal["raise", "degrade", "retry"]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SHARED_MEMORY = Path("/dev/shm")


class _Strict(BaseModel):
    """No unknown keys, no silent conversions (``true`` is not 1), no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Tier(_Strict):
    """What every tier has.

    Attributes
    ----------
    name : str
        What `handle.until`, `Restored.tier` and messages call the tier; the kind where not given.
    keep : int
        How many of the newest committed chains (a base and its log) stay.
    on_error : "raise", "degrade", "retry" or None
        What a failure of this tier does; None takes the run's own `on_error`.
    """

    name: str = Field(default="", pattern=rf"^$|{NAME_PATTERN}")
    keep: int = Field(default=2, ge=1)
    on_error: OnError | None = None
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
    keep_every : int or None
        Bases whose step is a multiple of this stay for good.
    pinned : tuple of int
        Steps whose base stays for good; a base is taken at each of them.
    """

    kind: Literal["directory"] = "directory"
    path: str
    keep_every: PositiveInt | None = None
    pinned: tuple[int, ...] = Field(default=(), strict=False)

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


class Config(_Strict):
    """Everything a run can be told.

    Attributes
    ----------
    run : str
        Name of the run; part of every object, so two runs are never mixed up.
    preset : "exact"
        The pipeline where `pipeline` is not given.
    tiers : tuple of tiers
        Fastest first. Recovery asks them in this order for the newest step.
    pipeline : tuple of StageConfig
        Names and settings of the stages in order, ``capture`` first, ``commit`` last.
    save_every : int
        `steps()` and `should_save` save each step that is a multiple of this (and the last).
    base_every : int
        A base at the latest after this many saves.
    log_budget : float
        A base when the log is this many times as large as the base before it.
    stall_limit_s : float
        Longest wait of the trainer in one save; after it the save is skipped with a warning.
    backpressure : "wait" or "skip"
        What a save does while every slot is busy.
    recover_wait_s : float
        How long a recovery waits for tiers that should hold a newer step.
    on_lost_steps : "accept" or "raise"
        What a restore to an older step than the newest acknowledged one does.
    inexact : "accept", "base" or "raise"
        What a restore does whose digests do not match: load and warn, go back to the base, refuse.
    on_error : "raise", "degrade" or "retry"
        What a failed background save does: raise in the trainer; drop that tier and go on; try again.
    rng : bool
        Save and restore the random states of torch, CUDA, numpy and python.
    chunk_bytes : int
        Largest run of a tensor that flows as one piece.
    memory_budget_bytes : int
        Bytes of chunks in work at one time, beyond the arena.
    drain_deadline_s : float
        Time that SIGTERM leaves to bring the newest step to the last tier.
    close_deadline_s : float
        Longest wait for saves still on their way when the well is closed.
    threads : int
        Threads of the pipeline's own executor.
    handle_sigterm : bool
        Whether a SIGTERM handler is installed while the well is open.
    """

    run: str = Field(default="run", pattern=NAME_PATTERN)
    preset: Literal["exact"] = "exact"
    tiers: tuple[TierConfig, ...] = Field(strict=False, min_length=1)
    pipeline: tuple[StageConfig, ...] = Field(default=DEFAULT_PIPELINE, strict=False)
    save_every: PositiveInt = 1
    base_every: PositiveInt = 50
    log_budget: PositiveFloat = 1.0
    stall_limit_s: NonNegativeFloat = 60.0
    backpressure: Literal["wait", "skip"] = "wait"
    recover_wait_s: NonNegativeFloat = 0.0
    on_lost_steps: Literal["accept", "raise"] = "accept"
    inexact: Literal["accept", "base", "raise"] = "accept"
    on_error: OnError = "raise"
    rng: bool = True
    chunk_bytes: int = Field(default=16 << 20, ge=4096, le=1 << 30)
    memory_budget_bytes: int = Field(default=256 << 20, ge=1 << 20)
    drain_deadline_s: PositiveFloat = 30.0
    close_deadline_s: PositiveFloat = 600.0
    threads: int = Field(default=1, ge=1, le=64)
    handle_sigterm: bool = True

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        labels = [tier.label for tier in tiers]
        doubled = sorted({label for label in labels if labels.count(label) > 1})
        if doubled:
            raise ValueError(f"two tiers are called {doubled[0]!r}; give each its own `name`")
        return tiers

    @field_validator("pipeline")
    @classmethod
    def _in_order(cls, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        check_order(stages)
        return stages

    def stage(self, name: str) -> StageConfig | None:
        """Return the stage of that name, or None where the pipeline has none."""
        return next((stage for stage in self.pipeline if stage.name == name), None)

    @property
    def capture(self) -> Literal["gradient", "state"]:
        """How saves are captured; ``gradient`` still falls back to the state where it must."""
        stage = self.stage("capture")
        return "state" if stage is not None and stage.setting == "state" else "gradient"

    @property
    def delta(self) -> str:
        """Name of the difference taken between captured states, ``"none"`` for none."""
        stage = self.stage("delta")
        return "none" if stage is None else str(stage.setting)

    @cached_property
    def memory(self) -> MemoryTier | None:
        """The first memory tier."""
        return next((tier for tier in self.tiers if isinstance(tier, MemoryTier)), None)

    @cached_property
    def directory(self) -> DirectoryTier | None:
        """The first directory tier."""
        return next((tier for tier in self.tiers if isinstance(tier, DirectoryTier)), None)

    def arena_directory(self, tier: MemoryTier) -> Path:
        """Return where the arena of `tier` lies.

        The default is named by a hash of the run's name, of the first directory's path and of the
        tier's name, so that runs which share nothing never share an arena, and a restarted run
        finds its own.

        Raises
        ------
        ConfigError
            There is no ``/dev/shm`` and the tier names no directory.
        """
        if tier.directory is not None:
            return Path(tier.directory)
        if not SHARED_MEMORY.is_dir():
            raise ConfigError(
                f"tier {tier.label!r}: this machine has no {SHARED_MEMORY}; "
                "set the tier's `directory` to a memory file system, or leave the tier out"
            )
        place = self.directory.path if self.directory is not None else ""
        identity = "\0".join((self.run, place, tier.label)).encode("utf-8", "surrogateescape")
        return SHARED_MEMORY / f"stepwell-{os.getuid()}" / hashlib.sha256(identity).hexdigest()[:16]

    def error_policy(self, tier: TierConfig) -> OnError:
        """Return what a failure of `tier` does."""
        return tier.on_error or self.on_error


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Make a `Config` from a file, a directory, a URL or a mapping.

    Parameters
    ----------
    source : str, path, mapping or Config
        A path ending in ``.yaml``, ``.yml`` or ``.toml`` is a configuration file, in which relative
        paths are taken from the file's own directory. Any other path or ``file:`` URL is the
        directory of a run with the default tiers, memory and that directory. A mapping is the
        configuration itself.
    overrides : mapping, optional
        Top-level keys that replace those of `source`.

    Raises
    ------
    ConfigError
        With every fault, one a line: ``file:line: key.path: what; did you mean "..."``.
    """
    place = Place()
    if isinstance(source, Config):
        if not overrides:
            return source
        tree: dict[str, object] = source.model_dump(mode="python")
    elif isinstance(source, Mapping):
        tree = as_plain(source)
    elif is_config_path(os.fspath(source)):
        tree, place = read_config_file(Path(os.fspath(source)))
    else:
        tree = {"tiers": _default_tiers(os.fspath(source))}
    if overrides:
        tree.update(as_plain(overrides))
        place = place.without(overrides)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, Config, tree, place) from None


def _default_tiers(source: str) -> list[dict[str, object]]:
    """Return the tiers of a run that was given only its directory."""
    try:
        path = local_path(source)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if path.is_file():
        raise ConfigError(
            f"{source} is a file, not the directory of a run; configuration files end in .yaml, .yml or .toml"
        )
    return [{"kind": "memory"}, {"kind": "directory", "path": str(path)}]


def show_config(config: Config) -> str:
    """Return the whole configuration, defaults included, as YAML that loads to an equal one."""
    import yaml

    document = config.model_dump(mode="json", exclude_none=True)
    document["pipeline"] = [stage.written for stage in config.pipeline]
    document["tiers"] = [_tier_written(tier) for tier in config.tiers]
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _tier_written(tier: TierConfig) -> dict[str, object]:
    """Return a tier as a person would write it, its kind first."""
    fields: dict[str, object] = tier.model_dump(mode="json", exclude_none=True)
    return {
        "kind": fields.pop("kind"),
        **{key: value for key, value in fields.items() if value not in ("", [])},
    }
