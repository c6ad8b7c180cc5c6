"""Lets the tests of this folder import what lies beside them and in ``tests/face``; gives clusters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster_rig import Cluster

HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent / "face")):
    if folder not in sys.path:
        sys.path.append(folder)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip, with the reason, where this machine makes no network namespaces; asked once."""
    from network import why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")


@pytest.fixture
def cluster(namespaces: None, memory_directory: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes with a keeper each, and a spare host; all ended afterwards."""
    from cluster_rig import Cluster

    made = Cluster(memory_directory, tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.end()
