"""The code in docs/extending.md runs, in order, as it stands."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_examples_run(repository: Path) -> None:
    text = (repository / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {"__name__": "extending"}
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), names)
