"""Fault-tolerant, tiered checkpointing for PyTorch training: every step, bit for bit.

::

    with stepwell.open_sync("checkpoints/", model=model, optimizer=optimizer) as well:
        for step in well.steps(total_steps):
            train_step(step)

Everything public is named here. Importing this module imports neither torch nor zarr: what a name
needs is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.config import Config, load_config
    from stepwell.errors import (
        ConfigError,
        DeadlineError,
        FormatError,
        IntegrityError,
        LockedError,
        MissingObjectError,
        NoSpaceError,
        NotCommittedError,
        ObjectExistsError,
        PermanentStoreError,
        StateMismatchError,
        StepwellError,
        StoreError,
        TransientStoreError,
        UnsupportedValueError,
        UsageError,
    )
    from stepwell.pipeline.handle import SaveHandle as Handle
    from stepwell.pipeline.outcome import Metrics, Restored, SaveRecord
    from stepwell.sync import SyncWell, open_sync
    from stepwell.viewing import view
    from stepwell.well import AsyncHandle, Well, open

__all__ = [
    "AsyncHandle",
    "Config",
    "ConfigError",
    "DeadlineError",
    "FormatError",
    "Handle",
    "IntegrityError",
    "LockedError",
    "Metrics",
    "MissingObjectError",
    "NoSpaceError",
    "NotCommittedError",
    "ObjectExistsError",
    "PermanentStoreError",
    "Restored",
    "SaveRecord",
    "StateMismatchError",
    "StepwellError",
    "StoreError",
    "SyncWell",
    "TransientStoreError",
    "UnsupportedValueError",
    "UsageError",
    "Well",
    "load_config",
    "open",
    "open_sync",
    "view",
]

_HOMES = {
    "AsyncHandle": ("stepwell.well", "AsyncHandle"),
    "Config": ("stepwell.config", "Config"),
    "Handle": ("stepwell.pipeline.handle", "SaveHandle"),
    "Metrics": ("stepwell.pipeline.outcome", "Metrics"),
    "Restored": ("stepwell.pipeline.outcome", "Restored"),
    "SaveRecord": ("stepwell.pipeline.outcome", "SaveRecord"),
    "SyncWell": ("stepwell.sync", "SyncWell"),
    "Well": ("stepwell.well", "Well"),
    "load_config": ("stepwell.config", "load_config"),
    "open": ("stepwell.well", "open"),
    "open_sync": ("stepwell.sync", "open_sync"),
    "view": ("stepwell.viewing", "view"),
}


def __getattr__(name: str) -> object:
    """Import what `name` needs on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES.get(name, ("stepwell.errors", name))
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
