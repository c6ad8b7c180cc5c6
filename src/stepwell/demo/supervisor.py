"""Runs the demo: one life without stepwell for comparison, then lives that end by SIGKILL."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stepwell.config import load_config
from stepwell.config.models import SHARED_MEMORY
from stepwell.demo.child import Child, Event
from stepwell.demo.report import Report, Restore, differing, differing_from_group, read_sizes
from stepwell.demo.worker import Order
from stepwell.errors import StepwellError, UsageError

__all__ = ["Plan", "Watcher", "run_demo"]

# Three slots, two bases and the logs after them take about 150 MB for the 1.8 million parameters here.
MEMORY_BYTES_NEEDED = 256 << 20


class Watcher(Protocol):
    """Is told what happens, as it happens."""

    def phase(self, title: str, steps: int) -> None:
        """A run of `steps` steps begins."""

    def step(self, step: int, loss: float) -> None:
        """A step was trained, and saved where it is saved."""

    def note(self, text: str) -> None:
        """Something a person wants to know."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo is asked to do.

    Attributes
    ----------
    steps, kills : int
    directory : Path or None
        Takes the checkpoints and keeps them; must be empty or absent. None: a temporary directory.
    """

    steps: int = 40
    kills: int = 2
    directory: Path | None = None

    def checked(self) -> Plan:
        """Return this plan if it can be carried out.

        Raises
        ------
        UsageError
            Too few steps for that many kills, or the directory holds something.
        """
        least = 4 * (self.kills + 1)
        if self.steps < least:
            raise UsageError(f"{self.kills} kills need at least {least} steps, not {self.steps}")
        place = self.directory
        if place is not None and place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise UsageError(f"{place} is not an empty directory; the demo starts from nothing")
        return self

    def kill_steps(self) -> list[int]:
        """Return after which steps to kill: one at random in each equal part of the run."""
        part = self.steps // (self.kills + 1)
        return [random.randrange(part * i + part // 2, part * (i + 1) + part // 2) for i in range(self.kills)]


def run_demo(plan: Plan, watcher: Watcher) -> Report:
    """Carry out a plan and return what was measured.

    Raises
    ------
    UsageError
        The plan cannot be carried out.
    StepwellError
        A child failed in a way nobody planned.
    """
    plan = plan.checked()
    directory = plan.directory or Path(tempfile.mkdtemp(prefix="stepwell-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    arena = _arena_directory(watcher)
    with tempfile.TemporaryDirectory(prefix="stepwell-demo-work-") as scratch:
        work = Path(scratch)
        try:
            report = Report(plan.steps, 0, directory=str(directory))
            _plain_run(plan, work, report, watcher)
            _killed_run(plan, work, directory, arena, report, watcher)
        finally:
            shutil.rmtree(arena, ignore_errors=True)
        report.different = differing(work / "plain.npz", work / "killed.npz")
        report.sizes = read_sizes(directory)
        if report.sizes.base_step == plan.steps - 1:
            report.group_different = differing_from_group(work / "plain.npz", report.sizes.group)
    return report


def _arena_directory(watcher: Watcher) -> Path:
    """Return a fresh directory for the memory tier."""
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free >= MEMORY_BYTES_NEEDED:
            return Path(tempfile.mkdtemp(prefix="stepwell-demo-", dir=SHARED_MEMORY))
        watcher.note(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, {MEMORY_BYTES_NEEDED >> 20} are needed: "
            "the memory tier lies in the temporary directory"
        )
    return Path(tempfile.mkdtemp(prefix="stepwell-demo-memory-"))


def _plain_run(plan: Plan, work: Path, report: Report, watcher: Watcher) -> None:
    watcher.phase("without checkpoints, for comparison", plan.steps)
    order = Order(plan.steps, str(work / "plain.npz"), None)
    with Child(order, work, "plain") as child:
        for event in child.events():
            if event["event"] == "begin":
                report.params = int(_number(event, "params"))
            elif event["event"] == "step":
                report.plain_step_ms.append(_number(event, "step_ms"))
                watcher.step(int(_number(event, "step")), _number(event, "loss"))


def _killed_run(
    plan: Plan, work: Path, directory: Path, arena: Path, report: Report, watcher: Watcher
) -> None:
    """Train with a checkpoint at every step, killing the child again and again, to the end."""
    config = load_config(
        {
            "run": "demo",
            "tiers": [
                {"kind": "memory", "directory": arena},
                {"kind": "directory", "path": directory},
            ],
        }
    )
    order = Order(plan.steps, str(work / "killed.npz"), config.model_dump(mode="json"))
    watcher.phase("with a checkpoint at every step", plan.steps)
    kill_steps = plan.kill_steps()
    death: tuple[int, bool] | None = None
    for life in range(plan.kills + 1):
        kill_at = kill_steps[life] if life < plan.kills else None
        killed_in = _one_life(order, work, life, kill_at, death, report, watcher)
        if killed_in is None:
            return
        # The last death takes the machine's memory with it, so that the directory has to do.
        wipe = plan.kills > 1 and life == plan.kills - 1
        if wipe:
            shutil.rmtree(arena)
            watcher.note("removed the memory tier, as if the machine were gone")
        death = (killed_in, wipe)


def _one_life(
    order: Order,
    work: Path,
    life: int,
    kill_at: int | None,
    death: tuple[int, bool] | None,
    report: Report,
    watcher: Watcher,
) -> int | None:
    """Run one child to its end (None) or to its kill (the step it was killed in)."""
    restored = False
    with Child(order, work, f"life-{life}") as child:
        for event in child.events():
            if event["event"] == "restored" and death is not None:
                report.restores.append(_restore(event, death))
                restored = True
                watcher.note(_restored_text(report.restores[-1]))
            elif event["event"] == "step":
                step = int(_number(event, "step"))
                report.step_ms.append(_number(event, "step_ms"))
                report.blocked_ms.append(_number(event, "blocked_ms"))
                watcher.step(step, _number(event, "loss"))
                if kill_at is not None and step >= kill_at:
                    # Anywhere in the step that has begun: training, saving, or between.
                    time.sleep(random.random() * _number(event, "step_ms") / 1e3)
                    child.kill()
                    report.kills += 1
                    watcher.note(f"killed with SIGKILL in step {step + 1}")
                    return step + 1
    if death is not None and not restored:
        raise StepwellError(f"life {life} of the demo began anew instead of going on from a checkpoint")
    return None


def _restore(event: Event, death: tuple[int, bool]) -> Restore:
    return Restore(
        step=int(_number(event, "step")),
        tier=str(event["tier"]),
        seconds=_number(event, "seconds"),
        exact=event["exact"] is True,
        killed_in=death[0],
        memory_wiped=death[1],
    )


def _restored_text(restore: Restore) -> str:
    exact = "bit for bit" if restore.exact else "NOT exact"
    return f"restored step {restore.step} from {restore.tier} in {restore.seconds:.2f} s, {exact}"


def _number(event: Event, key: str) -> float:
    value = event[key]
    assert isinstance(value, int | float), (key, value)
    return value
