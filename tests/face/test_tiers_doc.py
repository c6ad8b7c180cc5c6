"""The configurations in the documents load, and the commands there are commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from stepwell.cli.app import build
from stepwell.config import Config, load_config


def blocks(repository: Path, language: str) -> list[tuple[str, str]]:
    found = []
    for path in sorted((repository / "docs").glob("*.md")):
        text = path.read_text()
        found += [(path.name, block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]
    return found


def test_configurations_load(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_NODE", "node-16")
    loaded = {}
    for name, block in blocks(repository, "yaml"):
        document = yaml.safe_load(block)
        if "tiers" in document:
            loaded[name] = load_config(document)
    assert {"tiers.md", "durability.md"} <= loaded.keys()
    assert all(isinstance(config, Config) for config in loaded.values())


def test_options_of_the_keeper_are_options(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        build()(["keeper", "--help"], prog_name="stepwell")
    told = capsys.readouterr().out
    used = set(re.findall(r"(--[a-z-]+)", "\n".join(block for _, block in blocks(repository, "console"))))
    assert {"--make-secret", "--listen"} <= used
    assert used <= set(re.findall(r"--[a-z-]+", told))
