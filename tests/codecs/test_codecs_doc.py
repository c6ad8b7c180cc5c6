"""The code in docs/codecs.md runs, in order, as it stands, and the page knows every codec and preset."""

from __future__ import annotations

import re
from pathlib import Path

from stepwell.codecs.registry import CODECS
from stepwell.config.presets import PRESETS


def test_the_examples_run(repository: Path) -> None:
    text = (repository / "docs/codecs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {"__name__": "codecs_page"}
    for block in blocks:
        exec(compile(block, "docs/codecs.md", "exec"), names)


def test_every_codec_and_preset_is_there(repository: Path) -> None:
    text = (repository / "docs/codecs.md").read_text(encoding="utf-8")
    for name in (*CODECS, *PRESETS):
        assert f"`{name.removeprefix('stepwell.')}`" in text, name
