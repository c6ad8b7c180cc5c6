"""The whole configuration of a run. Frozen; nothing here touches a disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from stepwell.config.keeper import KeeperConfig
from stepwell.config.presets import PRESETS
from stepwell.config.stages import DEFAULT_PIPELINE, StageConfig, check_order
from stepwell.config.tiers import (
    NAME_PATTERN,
    DirectoryTier,
    MemoryTier,
    OnError,
    RemoteTier,
    Strict,
    TierConfig,
)
from stepwell.errors import ConfigError

__all__ = ["Config"]

SHARED_MEMORY = Path("/dev/shm")


class Config(Strict):
    """Everything a run can be told.

    Attributes
    ----------
    run : str
        Name of the run, for people; each run also draws a random one, so two are never mixed up.
    preset : "exact", "compact", "tiercheck" or "fastcheck"
        The pipeline where `pipeline` is not given; see ``stepwell.config.presets``.
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
    read_deadline_s : float
        Longest wait for one object or chunk while restoring; a tier that takes longer is not asked again.
    drain_deadline_s : float
        Time that SIGTERM leaves to bring the newest step to the last tier.
    close_deadline_s : float
        Longest wait for saves still on their way when the well is closed.
    threads : int
        Threads of the pipeline's own executor.
    handle_sigterm : bool
        Whether a SIGTERM handler is installed while the well is open.
    keeper : KeeperConfig or None
        This node's keeper, which is started along with the run.
    """

    run: str = Field(default="run", pattern=NAME_PATTERN)
    preset: Literal["exact", "compact", "tiercheck", "fastcheck"] = "exact"
    tiers: tuple[TierConfig, ...] = Field(strict=False, min_length=1)
    pipeline: tuple[StageConfig, ...] = Field(default=DEFAULT_PIPELINE, strict=False)
    save_every: PositiveInt = 1
    base_every: PositiveInt = 50
    log_budget: PositiveFloat = 1.0
    stall_limit_s: NonNegativeFloat = 60.0
    backpressure: Literal["wait", "skip"] = "wait"
    on_lost_steps: Literal["accept", "raise"] = "accept"
    inexact: Literal["accept", "base", "raise"] = "accept"
    on_error: OnError = "raise"
    rng: bool = True
    chunk_bytes: int = Field(default=16 << 20, ge=4096, le=1 << 30)
    memory_budget_bytes: int = Field(default=256 << 20, ge=1 << 20)
    read_deadline_s: PositiveFloat = 120.0
    drain_deadline_s: PositiveFloat = 30.0
    close_deadline_s: PositiveFloat = 600.0
    threads: int = Field(default=1, ge=1, le=64)
    handle_sigterm: bool = True
    keeper: KeeperConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, value: object) -> object:
        """Write the preset's pipeline out, where none is given."""
        if not isinstance(value, Mapping) or "pipeline" in value:
            return value
        preset = value.get("preset")
        stages = PRESETS.get(preset) if isinstance(preset, str) else None
        return value if stages is None else {**value, "pipeline": stages}

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        labels = [tier.label for tier in tiers]
        doubled = sorted({label for label in labels if labels.count(label) > 1})
        if doubled:
            raise ValueError(f"two tiers are called {doubled[0]!r}; give each its own `name`")
        if sum(isinstance(tier, MemoryTier) for tier in tiers) > 1:
            raise ValueError("a process has one memory tier at most")
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

    @cached_property
    def remote(self) -> RemoteTier | None:
        """The first tier on object storage."""
        return next((tier for tier in self.tiers if isinstance(tier, RemoteTier)), None)

    def arena_directory(self, tier: MemoryTier) -> Path:
        """Return where the arena of `tier` lies.

        The default is named by a hash of the run's name, of the first directory's path (without one,
        of the first remote tier's URL) and of the tier's name, so that runs which share nothing never
        share an arena, and a restarted run finds its own.

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
        place = "" if self.remote is None else self.remote.url
        if self.directory is not None:
            place = self.directory.path
        identity = "\0".join((self.run, place, tier.label)).encode("utf-8", "surrogateescape")
        return SHARED_MEMORY / f"stepwell-{os.getuid()}" / hashlib.sha256(identity).hexdigest()[:16]

    def error_policy(self, tier: TierConfig) -> OnError:
        """Return what a failure of `tier` does."""
        return tier.on_error or self.on_error
