"""The parts of the demo; `make demo` runs the whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stepwell.config import load_config
from stepwell.demo import worker
from stepwell.demo.child import Child
from stepwell.demo.model import Batches, english_text
from stepwell.demo.report import differing, differing_from_group, percentile, read_sizes
from stepwell.demo.supervisor import Plan
from stepwell.demo.worker import Order
from stepwell.errors import StepwellError, UsageError

STEPS = 3


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """The worker sets seed and threads for its whole process."""
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(rng)


def obey(order: Order, path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """Carry out an order in this process and return what it told."""
    order.write(path)
    worker.main(str(path))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("torch_as_before")
def test_a_saved_and_a_plain_run_end_equal_and_zarr_reads_it(
    tmp_path: Path, memory_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, saved, again = (tmp_path / f"{name}.npz" for name in ("plain", "saved", "again"))
    run = tmp_path / "run"
    tiers = [{"kind": "memory", "directory": memory_directory}, {"kind": "directory", "path": run}]
    config = load_config({"run": "demo", "tiers": tiers}).model_dump(mode="json")

    events = obey(Order(STEPS, str(plain), None), tmp_path / "order", capsys)
    assert [event["event"] for event in events] == ["begin", *["step"] * STEPS, "done"]
    events = obey(Order(STEPS, str(saved), config), tmp_path / "order", capsys)
    assert [event["event"] for event in events] == ["begin", *["step"] * STEPS, "done"]
    assert differing(plain, saved) == []
    # A run that is through has nothing left to do, and comes back as it ended.
    events = obey(Order(STEPS, str(again), config), tmp_path / "order", capsys)
    assert [event["event"] for event in events] == ["begin", "restored", "done"]
    assert (events[1]["step"], events[1]["exact"]) == (STEPS - 1, True)
    assert differing(plain, again) == []

    sizes = read_sizes(run)
    assert sizes.base_step == STEPS - 1
    assert differing_from_group(plain, sizes.group) == []


def test_what_differs_is_named(tmp_path: Path) -> None:
    first = {"a": np.array([0.0, np.nan], np.float32), "b": np.arange(3), "gone": np.ones(1)}
    np.savez(tmp_path / "first.npz", **first)
    np.savez(tmp_path / "same.npz", **first)
    np.savez(tmp_path / "other.npz", a=np.array([-0.0, np.nan], np.float32), b=np.arange(3))
    assert differing(tmp_path / "first.npz", tmp_path / "same.npz") == []
    assert differing(tmp_path / "first.npz", tmp_path / "other.npz") == ["a", "gone"]


def test_batches_go_on_where_their_state_was() -> None:
    text = english_text()
    assert len(text) > 100_000
    first, second = Batches(text), Batches(text)
    first.next()
    state = first.state_dict()
    expected = first.next()
    second.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(second.next(), expected, strict=True))


def test_percentiles() -> None:
    assert percentile([], 50) == 0.0
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([float(n) for n in range(101)], 99) == 99.0


def test_kills_fall_into_different_parts_of_the_run(tmp_path: Path) -> None:
    plan = Plan(40, 3, tmp_path).checked()
    for _ in range(50):
        kills = plan.kill_steps()
        assert kills == sorted(set(kills))
        assert 0 < kills[0] <= kills[-1] < plan.steps - 1
    with pytest.raises(UsageError, match="at least 16 steps"):
        Plan(15, 3).checked()


@pytest.fixture
def as_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a shell script that runs in place of a worker."""
    script = tmp_path / "child"
    script.touch(mode=0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


ORDER = Order(1, "unused", None)


def test_a_child_that_is_killed_is_gone(as_child: Path, tmp_path: Path) -> None:
    as_child.write_text('#!/bin/sh\necho \'{"event": "begin"}\'\nexec sleep 60\n')
    with Child(ORDER, tmp_path, "life") as child:
        events = child.events()
        assert next(events) == {"event": "begin"}
        child.kill()
        assert child.returncode == -9


def test_a_child_that_fails_shows_why(as_child: Path, tmp_path: Path) -> None:
    as_child.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 3\n")
    with (
        Child(ORDER, tmp_path, "life") as child,
        pytest.raises(StepwellError, match=r"ended with 3:\nno such"),
    ):
        list(child.events())


def test_a_child_that_ends_without_a_word_has_failed(as_child: Path, tmp_path: Path) -> None:
    as_child.write_text('#!/bin/sh\necho \'{"event": "begin"}\'\n')
    with Child(ORDER, tmp_path, "life") as child, pytest.raises(StepwellError, match="ended with 0"):
        list(child.events())


def test_the_demo_refuses_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="not an empty directory"):
        Plan(directory=tmp_path).checked()
