"""Configuration files with the line of every key, and paths and URLs as a person writes them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from stepwell.config.faults import KeyPath, Place, did_you_mean
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    import yaml

__all__ = ["as_plain", "is_config_path", "is_remote_url", "local_path", "read_config_file"]

SUFFIXES = (".yaml", ".yml", ".toml")
FILE_BYTES_MAX = 1 << 20  # a configuration is a page; anything larger is another file by mistake
NODES_MAX = 10_000  # aliases may repeat a node without limit; a configuration has a few dozen

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://|(file):", re.IGNORECASE)  # "a:b" is a plain name


def local_path(source: str) -> Path:
    """Return the absolute path that a plain path or a ``file:`` URL names.

    Raises
    ------
    ValueError
        Another scheme, another host, or nothing at all.
    """
    if not source or "\0" in source:
        raise ValueError("a path must not be empty or contain NUL")
    scheme = _SCHEME.match(source)
    if scheme is None:
        return Path(os.path.abspath(os.path.expanduser(source)))
    name = (scheme[1] or scheme[2]).lower()
    if name != "file":
        raise ValueError(f"{source}: only plain paths and file: URLs name a directory, not {name}:")
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{source}: a file: URL names no other machine; write file:///path")
    return Path(os.path.abspath(unquote(parts.path)))


def is_remote_url(source: str) -> bool:
    """Tell whether a source names a place on object storage: a URL, and not of a file."""
    scheme = _SCHEME.match(source)
    return scheme is not None and scheme[1] is not None and scheme[1].lower() != "file"


def is_config_path(source: str) -> bool:
    """Tell whether a source is meant as a configuration file."""
    return source.lower().endswith(SUFFIXES) and not is_remote_url(source) and not Path(source).is_dir()


def as_plain(value: Mapping[str, object]) -> dict[str, object]:
    """Return a copy with paths as strings and tuples as lists, as a file would give them."""
    return {str(key): _plain(item) for key, item in value.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_config_file(path: Path) -> tuple[dict[str, object], Place]:
    """Read a YAML or TOML file.

    Returns
    -------
    tree : dict
        Relative paths of tiers are resolved against the file's directory.
    place : Place
        With the line of every key.

    Raises
    ------
    ConfigError
        The file is missing, unreadable, not UTF-8, not YAML or TOML, has a key twice, or is no mapping.
    """
    text = _read_text(path)
    if path.suffix.lower() == ".toml":
        tree, lines = _parse_toml(text, str(path))
    else:
        tree, lines = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys, not {type(tree).__name__}")
    _anchor_paths(tree, path.absolute().parent)
    return tree, Place(str(path), lines)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX} bytes, not a configuration")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES]
        raise ConfigError(f"{path}: no such configuration file{did_you_mean(path.name, beside)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _anchor_paths(tree: dict[str, object], directory: Path) -> None:
    """Take relative paths of tiers from the configuration file's own directory."""
    tiers = tree.get("tiers")
    for tier in tiers if isinstance(tiers, list) else ():
        for key in ("path", "directory"):
            value = tier.get(key) if isinstance(tier, dict) else None
            if isinstance(value, str) and value and not (_SCHEME.match(value) or value.startswith("~")):
                tier[key] = str(directory / value)


_YAML_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


def _parse_yaml(text: str, source: str) -> tuple[object, dict[KeyPath, int]]:
    """Load one YAML document with safe tags only, and find the line of every key."""
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, with YAML 1.2's floats: PyYAML alone reads ``1e3`` as a string."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789"))
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        lines: dict[KeyPath, int] = {}
        for count, (path, line) in enumerate(_yaml_lines(node, (), source)):
            if count > NODES_MAX:
                raise ConfigError(f"{source}: more than {NODES_MAX} keys (aliases that repeat each other?)")
            lines.setdefault(path, line)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    finally:
        loader.dispose()


def _yaml_lines(
    node: yaml.Node, path: KeyPath, source: str, above: tuple[int, ...] = ()
) -> Iterator[tuple[KeyPath, int]]:
    """Yield the line of every key and item; a key that comes twice is an error."""
    import yaml

    if id(node) in above:
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: an alias that contains itself")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in seen and name != "<<":
                shown = ".".join(str(part) for part in (*path, name))
                raise ConfigError(f"{source}:{line}: {shown}: this key is there already in line {seen[name]}")
            seen[name] = line
            yield (*path, name), line
            yield from _yaml_lines(value, (*path, name), source, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _yaml_lines(item, (*path, index), source, above)


_TOML_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_TOML_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_TOML_KEY = re.compile(rf"\s*({_TOML_PART}(?:\s*\.\s*{_TOML_PART})*)\s*=")


def _parse_toml(text: str, source: str) -> tuple[object, dict[KeyPath, int]]:
    """Load TOML; ``tomllib`` keeps no lines, so headers and keys are found by a scan of their own."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        where = f"{source}:{found[1]}" if found else source
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    lines: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    counts: dict[KeyPath, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TOML_HEADER.match(line):
            prefix = _toml_keys(header[2])
            if header[1] == "[[":
                index = counts.get(prefix, 0)
                counts[prefix] = index + 1
                lines.setdefault(prefix, number)
                prefix = (*prefix, index)
            lines.setdefault(prefix, number)
        elif key := _TOML_KEY.match(line):
            keys = _toml_keys(key[1])
            for length in range(1, len(keys) + 1):
                lines.setdefault((*prefix, *keys[:length]), number)
    return tree, lines


def _toml_keys(dotted: str) -> KeyPath:
    """Split a dotted key into its bare or quoted parts."""
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
