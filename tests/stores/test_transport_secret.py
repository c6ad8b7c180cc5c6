from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from stepwell.errors import ConfigError, StoreError
from stepwell.stores.transport.secret import SECRET_VARIABLE, RunSecret


def test_written_and_read_back(tmp_path: Path) -> None:
    secret = RunSecret.make()
    secret.write(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert RunSecret.from_file(tmp_path / "secret").value == secret.value
    with pytest.raises(StoreError, match="write the run secret"):
        secret.write(tmp_path / "secret")
    assert RunSecret.make().value != secret.value


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    RunSecret.make().write(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        RunSecret.from_file(path)


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run secret"):
        RunSecret.from_file(tmp_path / "absent")
    RunSecret.make().write(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError):
        RunSecret.from_file(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        RunSecret.from_file(tmp_path / "fifo")


def test_a_short_one_is_refused_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    with pytest.raises(ConfigError, match="7 bytes") as caught:
        RunSecret.from_environment()
    assert "hunter2" not in str(caught.value)


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert RunSecret.from_environment() is None
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 40 + "\n")
    secret = RunSecret.from_environment()
    assert secret is not None
    assert secret.value == b"s" * 40
    assert "s" * 40 not in repr(secret)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
