"""From a file, a directory, a URL or a mapping to a checked `Config`, and back to text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from stepwell.config.faults import Place, config_error
from stepwell.config.file import as_plain, is_config_path, is_remote_url, local_path, read_config_file
from stepwell.config.models import Config
from stepwell.config.tiers import TierConfig
from stepwell.errors import ConfigError

__all__ = ["load_config", "show_config"]


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
        directory of a run with the default tiers, memory and that directory; another URL is a
        place on object storage with memory before it. A mapping is the configuration itself.
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
        if isinstance(source, Config) and "preset" in overrides:
            tree.pop("pipeline")  # that of the preset before
        tree.update(as_plain(overrides))
        place = place.without(overrides)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, Config, tree, place) from None


def _default_tiers(source: str) -> list[dict[str, object]]:
    """Return the tiers of a run that was given only its directory or URL."""
    if is_remote_url(source):
        return [{"kind": "memory"}, {"kind": "remote", "url": source}]
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
    kind = fields.pop("kind")
    return {"kind": kind, **{key: value for key, value in fields.items() if value != ""}}
