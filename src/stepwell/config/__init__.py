"""What a run is configured with: pydantic models, and `load_config`, which makes one from anything.

A configuration comes from a YAML or TOML file, from a mapping, or from nothing but a directory.
Every fault is reported at once in one `ConfigError`, each with its place (``file:line: key.path``).
"""

from __future__ import annotations

from stepwell.config.keeper import KeeperConfig
from stepwell.config.load import load_config, show_config
from stepwell.config.models import Config
from stepwell.config.stages import StageConfig
from stepwell.config.tiers import (
    DirectoryTier,
    MemoryTier,
    OnError,
    PeerTier,
    PluginTier,
    RemoteTier,
    TierConfig,
)

__all__ = [
    "Config",
    "DirectoryTier",
    "KeeperConfig",
    "MemoryTier",
    "OnError",
    "PeerTier",
    "PluginTier",
    "RemoteTier",
    "StageConfig",
    "TierConfig",
    "load_config",
    "show_config",
]
