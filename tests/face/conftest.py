"""Lets the tests of this folder import the modules beside them (importlib mode adds no path)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from resume_rig import Place
    from zygote import Zygote

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.append(HERE)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """A parallel region per tiny update costs milliseconds on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def place(memory_directory: Path, one_torch_thread: None) -> Place:
    """Two tiers of a run, both in memory, gone after the test."""
    from resume_rig import Place

    return Place(memory_directory)


@pytest.fixture(scope="session")
def one_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that forks children, so that they need not import torch first."""
    from zygote import Zygote

    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.close()


@pytest.fixture
def zygote(one_zygote: Zygote) -> Iterator[Zygote]:
    """The same; its children end with the test."""
    yield one_zygote
    one_zygote.clean()
