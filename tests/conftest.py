"""What every test stands on: a memory file system of its own, and a hang that shows its stacks.

A hung test fails after ``timeout`` seconds (pytest-timeout, pyproject.toml), and
``faulthandler_timeout`` prints the stacks of all threads before that.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from s3_rig import Bucket

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY / "tests") not in sys.path:
    sys.path.append(str(REPOSITORY / "tests"))


def _memory_root() -> str | None:
    """Return /dev/shm where it can be written, else None for the ordinary temporary directory."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """A fresh directory in a memory file system, for an arena; gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir=_memory_root()))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def shared_memory_of_tests() -> Iterator[Path]:
    """Let arenas in default places lie in a directory that goes when the tests end.

    It reaches only this process: a test that starts another one names the tier's `directory`.
    """
    from stepwell.config import models

    patch = pytest.MonkeyPatch()
    path = Path(tempfile.mkdtemp(prefix="stepwell-tests-", dir=_memory_root()))
    patch.setattr(models, "SHARED_MEMORY", path)
    yield path
    patch.undo()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an S3 server that lives as long as the tests."""
    from s3_rig import s3_service

    with s3_service(tmp_path_factory.mktemp("s3") / "server.log") as port:
        yield port


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A fresh bucket; credentials are in the environment, the endpoint is not."""
    from s3_rig import CREDENTIALS, fresh_bucket

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with fresh_bucket(s3_port) as bucket:
        yield bucket
