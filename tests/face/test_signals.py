"""SIGTERM: within the deadline the newest step is in the directory, then the process ends by the signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, uninterrupted
from zygote import Zygote

from stepwell.pipeline.gate import Gate
from stepwell.signals import TermHandler

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory, {"handle_sigterm": True})


@pytest.fixture
def handler_before() -> Iterator[None]:
    """Put back what handled SIGTERM before the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def check_directory_alone(run: Run, step: int, *, untold: int = 0) -> None:
    """A preemption wipes the memory: the directory must have the step, and count no lost one.

    `untold` more may be there: the end can come between a save and the child's telling of it.
    """
    restored, bits = run.copied("alone", memory=False).restored()
    assert restored is not None
    assert (restored.lost_steps, restored.exact) == (0, True)
    assert step <= restored.step <= step + untold
    assert bits == uninterrupted(restored.step + 1)[restored.step]


@pytest.mark.parametrize("moment", ["capture", "encode"])
def test_sigterm_flag_was_looked_at_only_at_step_ends(run: Run, zygote: Zygote, moment: str) -> None:
    """spd 741: in the middle of a capture or an encode, that very step arrives."""
    child = zygote.start("train", run.config(), total=100_000, moment=moment)
    child.until(moment)
    child.signal(signal.SIGTERM)
    child.send()
    child.rest()
    assert child.status() == -signal.SIGTERM
    newest = child.newest("saved")
    assert newest >= 3
    check_directory_alone(run, newest, untold=1)


def test_sigterm_while_the_put_is_stalled(run: Run, zygote: Zygote) -> None:
    child = zygote.start("train", run.config(), total=4, moment="put", linger=True)
    child.until("idle")
    child.signal(signal.SIGTERM)
    assert child.newest("ack", "directory") < 3
    child.send()
    child.rest()
    assert child.status() == -signal.SIGTERM
    check_directory_alone(run, 3)


def test_sigterm_while_idle(run: Run, zygote: Zygote) -> None:
    child = zygote.start("train", run.config(), total=3, linger=True, wait=True)
    child.until("idle")
    child.signal(signal.SIGTERM)
    child.rest()
    assert child.status() == -signal.SIGTERM
    check_directory_alone(run, 2)


def test_sigterm_in_full_training_saves_every_step_that_returned(run: Run, zygote: Zygote) -> None:
    child = zygote.start("train", run.config(), total=100_000)
    child.until("saved", step=7)
    child.signal(signal.SIGTERM)
    child.rest()
    assert child.status() == -signal.SIGTERM
    check_directory_alone(run, child.newest("saved"), untold=1)


def test_a_store_that_never_answers_delays_the_end_by_the_deadline_alone(run: Run, zygote: Zygote) -> None:
    config = run.config(drain_deadline_s=0.4)
    child = zygote.start("train", config, total=4, moment="stuck", linger=True)
    child.until("idle")
    child.until("ack", step=3, tier="memory") if child.newest("ack", "memory") < 3 else None
    began = time.monotonic()
    child.signal(signal.SIGTERM)
    child.rest()
    assert child.status() == -signal.SIGTERM
    assert time.monotonic() - began < 10
    restored, bits = run.restored()
    assert restored is not None
    assert (restored.step, restored.tier) == (3, "memory")
    assert bits == uninterrupted(4)[3]


def test_second_sigterm_does_not_cut_the_first_one_short(run: Run, zygote: Zygote) -> None:
    child = zygote.start("train", run.config(), total=4, moment="put", linger=True)
    child.until("idle")
    child.signal(signal.SIGTERM)
    child.signal(signal.SIGTERM)
    child.send()
    child.rest()
    assert child.status() == -signal.SIGTERM
    check_directory_alone(run, 3)


def test_handler_of_the_script_is_called_after_the_drain_and_put_back(run: Run, handler_before: None) -> None:
    """A script's own handler (a flag, say) works as before; training can go on after it."""
    called: list[tuple[int, int | None]] = []
    came = threading.Event()

    def own(number: int, frame: object) -> None:
        called.append((number, well.latest_step("directory")))
        came.set()

    signal.signal(signal.SIGTERM, own)
    job = Job()
    with run.open(job) as well:
        job.step()
        well.save(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert came.wait(PATIENCE_S)
        assert called == [(signal.SIGTERM, 0)]
        job.step()
        well.save(1).until("directory", PATIENCE_S)
        came.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert came.wait(PATIENCE_S)
    assert [number for number, _ in called] == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_handler_that_raises_ends_training_through_the_block(run: Run, handler_before: None) -> None:
    class Preempted(Exception):
        pass

    def own(number: int, frame: object) -> None:
        raise Preempted

    def life() -> None:
        with run.open(job) as well:
            for step in range(100_000):
                job.step()
                well.save(step)
                saved.append(step)
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, own)
    job, saved = Job(), list[int]()
    with pytest.raises(Preempted):
        life()
    check_directory_alone(run, saved[-1])


def test_ignored_sigterm_stays_ignored(run: Run, handler_before: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = Job()
    with run.open(job) as well:
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(5):
            job.step()
            well.save(step)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    check_directory_alone(run, 4)


def test_handler_is_not_installed_where_it_was_not_wanted_or_cannot_be(run: Run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with run.open(Job(), handle_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == before
    failures: list[BaseException] = []

    def other_thread() -> None:
        try:
            with run.open(Job()):
                assert signal.getsignal(signal.SIGTERM) == before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(PATIENCE_S)
    assert not failures
    assert signal.getsignal(signal.SIGTERM) == before


def test_handler_that_somebody_replaced_is_left_alone(run: Run, handler_before: None) -> None:
    with run.open(Job()):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_the_handler_itself_waits_for_nothing(handler_before: None) -> None:
    """It may interrupt a save that holds the very lock which the drain needs."""
    gate, draining, drained = Gate(PATIENCE_S), threading.Event(), threading.Event()

    class Busy:
        hold, go_on = gate.hold, gate.go_on

        def drain(self) -> None:
            draining.set()
            assert gate.wait_idle(PATIENCE_S)
            drained.set()

    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: came.set())
    handler = TermHandler(Busy())
    assert handler.install()
    with gate:
        os.kill(os.getpid(), signal.SIGTERM)
        assert draining.wait(PATIENCE_S), "the handler returned although a save is inside"
        assert not drained.is_set()
    assert came.wait(PATIENCE_S)
    assert drained.is_set()
    handler.remove()
