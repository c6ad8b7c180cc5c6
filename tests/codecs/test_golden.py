"""Frames that the first version wrote are read by every later one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.registry import codec_from

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "format-1.json").read_text())


@pytest.mark.parametrize("row", GOLDEN["frames"], ids=lambda row: f"{row['codec']['id']}-{len(row['frame'])}")
def test_frames_of_format_1_are_read(row: dict[str, Any]) -> None:
    raw = bytes(row["zeros"]) if "zeros" in row else bytes.fromhex(GOLDEN["raw"])[: row.get("length")]
    codec = codec_from(row["codec"])
    frame = bytes.fromhex(row["frame"])
    if isinstance(codec, OrderedDelta) and codec.reference is not None:
        decoded = codec.decode(frame, reference=bytes.fromhex(GOLDEN["reference"]))
    else:
        decoded = codec.decode(frame)
    assert bytes(decoded) == raw
