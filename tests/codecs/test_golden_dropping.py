"""Frames of threshold_sparse and codebook that the first version wrote are read by every later one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell.codecs.registry import codec_from

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "dropping-1.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["what"])
def test_frames_of_version_1_are_read(row: dict[str, Any]) -> None:
    codec = codec_from(row["codec"])
    decoded = codec.decode(bytes.fromhex(row["frame"]))
    assert bytes(decoded).hex() == row["decoded"]
    assert codec.bound_of_frame(bytes.fromhex(row["frame"])) == row["bound"]  # type: ignore[attr-defined]
