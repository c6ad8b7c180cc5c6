"""Bad input: one clear error each, naming what, where and what to do; nothing lost, nothing half-written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from failure_rig import PATIENCE_S, Job, Run, files_of, idle, uninterrupted
from torch import nn

import stepwell
from stepwell.errors import (
    ConfigError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


@pytest.fixture
def trained(run: Run) -> Run:
    """Three steps, as a kill leaves them."""
    run.train(range(3))
    return run


# Another model.


def other_shape() -> Job:
    return Job(width=9)


def other_names() -> Job:
    job = Job()
    job.model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    job.optimizer = torch.optim.AdamW(job.model.parameters())
    return job


def other_dtype() -> Job:
    job = Job()
    job.model.double()
    job.optimizer = torch.optim.AdamW(job.model.parameters())
    return job


def other_optimizer() -> Job:
    job = Job()
    job.optimizer = torch.optim.SGD(job.model.parameters())  # type: ignore[assignment]
    return job


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (other_shape, ["model/0.weight", "[9, 6]", "[8, 6]"]),
        (other_names, ["model/1.weight", "model/2.weight"]),
        (other_dtype, ["model/0.weight", "float32", "float64"]),
        (other_optimizer, ["AdamW", "SGD"]),
    ],
    ids=["shapes", "names", "dtypes", "optimizer"],
)
def test_checkpoint_of_another_model_lists_what_differs_and_loads_nothing(
    trained: Run, make: Callable[[], Job], told: list[str]
) -> None:
    job = make()
    before, stored = job.bits(), files_of(trained)
    with trained.open(job) as well:
        with pytest.raises(StateMismatchError) as raised:
            well.restore()
        for word in told:
            assert word.replace(", ", "x") in str(raised.value).replace(", ", "x"), raised.value
        assert job.bits() == before
        with pytest.raises(UsageError, match=r"restore\(\) first"):
            well.save(3)
    assert files_of(trained) == stored
    restored, bits = trained.restored()
    assert restored is not None
    assert bits == uninterrupted(3)[2]


# Configuration.


def test_unknown_keys_are_told_together_and_nothing_is_made(run: Run) -> None:
    config = run.config(base_evry=3)
    config["tiers"][1]["keeep"] = 2  # type: ignore[index]
    with pytest.raises(ConfigError) as raised:
        stepwell.open_sync(config, model=Job().model)
    assert 'did you mean "base_every"' in str(raised.value)
    assert 'did you mean "keep"' in str(raised.value)
    assert not run.directory.exists()
    assert not run.memory.exists()


def test_wrong_type_in_a_file_is_told_with_its_line(run: Run) -> None:
    path = run.root / "run.yaml"
    path.write_text("save_every: often\ntiers:\n  - kind: memory\n  - kind: directory\n    path: 3\n")
    with pytest.raises(ConfigError) as raised:
        stepwell.open_sync(path, model=Job().model)
    assert "run.yaml:1" in str(raised.value)
    assert "run.yaml:5" in str(raised.value)


@pytest.mark.parametrize("what", ["model", "optimizer", "extra"])
def test_what_is_no_model_or_optimizer_is_refused_before_anything_is_made(run: Run, what: str) -> None:
    job = Job()
    arguments: dict[str, object] = {"model": job.model, "optimizer": job.optimizer, what: 3}
    with pytest.raises(UsageError, match=what):
        stepwell.open_sync(run.config(), **arguments)  # type: ignore[arg-type]
    assert not run.directory.exists()


# Values that cannot be saved.


class Opaque:
    """Has no state_dict, and is no plain value."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Opaque(), "Opaque"),
        ({"deep": [1, {"er": Opaque()}]}, "deep"),
        (lambda: None, "function"),
        (threading.Lock(), "lock"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
    ids=["object", "nested", "function", "lock", "sparse", "meta"],
)
def test_object_that_cannot_be_saved_is_named_before_anything_is_written(
    run: Run, value: object, told: str
) -> None:
    job = Job()
    extra = {"thing": value}

    def life() -> None:
        with run.open(job, extra=extra) as well:
            job.step()
            well.save(0)

    with pytest.raises(UnsupportedValueError) as raised:
        life()
    assert "thing" in str(raised.value)
    assert told in str(raised.value)
    assert not run.objects("directory", "*.pack")
    assert not run.objects("directory", "commit.json")


def test_object_that_turns_up_later_costs_that_save_alone(run: Run) -> None:
    job = Job()
    extra: dict[str, object] = {"epoch": 0, "note": {"text": "fine"}}
    with run.open(job, extra=extra) as well:
        for step in range(2):
            job.step()
            well.save(step)
        extra["note"]["text"] = Opaque()  # type: ignore[index]
        job.step()
        with pytest.raises(UnsupportedValueError, match=r"note.*Opaque"):
            well.save(2)
        extra["note"]["text"] = "fine again"  # type: ignore[index]
        well.save(2).until(None, PATIENCE_S)
        idle(well)
        copy = run.copied("copy", memory=False)
    fresh: dict[str, object] = {"epoch": 9, "note": {}}
    job = Job(seed=99)
    with copy.open(job, extra=fresh) as well:
        restored = well.restore()
        assert restored is not None
        assert restored.step == 2
        assert job.bits() == uninterrupted(3)[2]
    assert fresh == {"epoch": 0, "note": {"text": "fine again"}}
