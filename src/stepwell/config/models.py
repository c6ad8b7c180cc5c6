"""The whole configuration of a run. Frozen; nothing here touches a disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stepwell.config.keeper import KeeperConfig
from stepwell.config.nodes import NODES_VARIABLE, NodeConfig, nodes_of_environment, own_node
from stepwell.config.presets import PRESETS
from stepwell.config.stages import DEFAULT_PIPELINE, StageConfig, check_order
from stepwell.config.strict import NAME_PATTERN, Strict
from stepwell.config.tiers import (
    DeclaredTier,
    DirectoryTier,
    MemoryTier,
    OnError,
    PeersTier,
    RemoteTier,
    TierConfig,
)
from stepwell.errors import ConfigError

__all__ = ["Config"]

SHARED_MEMORY = Path("/dev/shm")

if TYPE_CHECKING:
    _Tiers = tuple[TierConfig, ...]  # `Config._placed` leaves no other kind
else:
    _Tiers = tuple[DeclaredTier, ...]


class Config(Strict):
    """Everything a run can be told.

    Attributes
    ----------
    run : str
        Name of the run, for people; each run also draws a random one, so two are never mixed up.
    preset : "exact", "compact", "tiercheck" or "fastcheck"
        The pipeline where `pipeline` is not given; see ``stepwell.config.presets``.
    nodes : tuple of NodeConfig
        Of the cluster, where tiers of the kind ``peers`` are to be placed; else from ``STEPWELL_NODES``.
    node : str
        Which of them this is; empty: ``STEPWELL_NODE``, else the name of the host.
    tiers : tuple of tiers
        Fastest first. Recovery asks them in this order for the newest step. In place of one of the kind
        ``peers`` stand those at the chosen nodes.
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
        This node's keeper, which is started along with the run. With ``peers`` there is one unless this
        is None; it listens where `nodes` says.
    """

    run: str = Field(default="run", pattern=NAME_PATTERN)
    preset: Literal["exact", "compact", "tiercheck", "fastcheck"] = "exact"
    nodes: tuple[NodeConfig, ...] = Field(default=(), strict=False)
    node: str = Field(default="", validate_default=True)
    tiers: _Tiers = Field(strict=False, min_length=1)
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

    @model_validator(mode="before")
    @classmethod
    def _with_nodes(cls, value: object) -> object:
        """Where copies are placed, take nodes from the environment and add a keeper, unless they are told."""
        tiers = value.get("tiers") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(tiers, Sequence):
            return value
        if not any(isinstance(tier, Mapping) and tier.get("kind") == "peers" for tier in tiers):
            return value
        return {"nodes": nodes_of_environment(), "keeper": {}, **value}

    @field_validator("nodes")
    @classmethod
    def _one_name_each(cls, nodes: tuple[NodeConfig, ...]) -> tuple[NodeConfig, ...]:
        if doubled := _doubled([node.name for node in nodes]):
            raise ValueError(f"two nodes are called {doubled!r}")
        return nodes

    @field_validator("node")
    @classmethod
    def _known(cls, node: str, info: ValidationInfo) -> str:
        nodes = info.data.get("nodes")
        return own_node(nodes, node).name if nodes else node

    @field_validator("tiers")
    @classmethod
    def _placed(
        cls, tiers: tuple[TierConfig | PeersTier, ...], info: ValidationInfo
    ) -> tuple[TierConfig, ...]:
        """Put the tiers at the chosen nodes in the place of ``peers``."""
        nodes, name = info.data.get("nodes"), info.data.get("node")
        placed: list[TierConfig] = []
        for tier in tiers:
            if not isinstance(tier, PeersTier):
                placed.append(tier)
            elif nodes and name is not None:
                placed += tier.peers(nodes, own_node(nodes, name))
            elif nodes == ():
                raise ValueError(
                    f"the kind 'peers' needs `nodes`, or {NODES_VARIABLE} in the environment; one node "
                    "alone is of the kind 'peer'"
                )
        return tuple(placed)

    @field_validator("keeper")
    @classmethod
    def _at_its_node(cls, keeper: KeeperConfig | None, info: ValidationInfo) -> KeeperConfig | None:
        nodes, name = info.data.get("nodes"), info.data.get("node")
        if keeper is None or not nodes or name is None:
            return keeper
        own = own_node(nodes, name)
        told = keeper.model_fields_set
        update = {"listen": own.address, "name": own.name}
        return keeper.model_copy(update={key: value for key, value in update.items() if key not in told})

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        if doubled := _doubled([tier.label for tier in tiers]):
            raise ValueError(f"two tiers are called {doubled!r}; give each its own `name`")
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


def _doubled(names: Sequence[str]) -> str | None:
    """Return a name that is there twice, the first by the alphabet."""
    return min((name for name in names if names.count(name) > 1), default=None)
