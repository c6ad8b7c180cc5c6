"""The README's Python runs as it stands, and twice: the second time there is nothing left to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def blocks(repository: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)


def test_the_ten_lines_run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(repository)
    first: dict[str, object] = {}
    exec(code, first)
    assert first["step"] == 99
    again: dict[str, object] = {}
    exec(code, again)
    assert "step" not in again
    assert (tmp_path / "checkpoints").is_dir()


def test_every_file_the_readme_names_is_there(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    for name in re.findall(r"\]\(([^):]+)\)", text):
        assert (repository / name).is_file(), name
