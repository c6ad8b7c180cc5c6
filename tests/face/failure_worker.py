"""Processes for the failure tests: a zygote that has torch imported already, and what its children do.

Run as a script it reads one order a line (JSON), forks a child for it, waits for its end, and
answers with its wait status. The child connects to the order's socket, tells what happens as JSON
lines, and waits for lines where the order says so.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest
import torch
from failure_rig import Job, break_tier

import stepwell
from stepwell.pipeline.capture import Capture
from stepwell.pipeline.shard import Shard
from stepwell.stores.arena import Arena
from stepwell.stores.fault import Fault, FaultKind

Order = dict[str, object]
PATIENCE_S = 60


class Line:
    """The line to the test."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reader = self._socket.makefile("r")
        self._mutex = threading.Lock()

    def tell(self, event: str, **facts: object) -> None:
        with self._mutex:
            self._socket.sendall(json.dumps({"event": event, **facts}).encode() + b"\n")

    def wait(self) -> str:
        """Block until the test sends a line."""
        return self._reader.readline().strip()


def main() -> None:
    torch.set_num_threads(1)
    Job()  # torch imports much more with the first optimizer
    stepwell.open_sync  # noqa: B018 - imports what it names
    print("ready", flush=True)
    for text in sys.stdin:
        pid = os.fork()
        if not pid:
            child(json.loads(text))
        print(os.waitpid(pid, 0)[1], flush=True)
    os._exit(0)  # the interpreter's own end takes seconds with torch in it


def child(order: Order) -> None:
    """Do what is ordered, then end without the zygote's own clean-up."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    code = 0
    try:
        MODES[str(order["mode"])](Line(str(order["socket"])), order)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def open_run(order: Order, job: Job) -> stepwell.SyncWell:
    config = order["config"]
    assert isinstance(config, dict)
    return stepwell.open_sync(config, model=job.model, optimizer=job.optimizer)


def train(line: Line, order: Order) -> None:
    """Train and save, telling each save as it returns and each acknowledgement as it comes."""
    job = Job()
    _arm(line, order)
    total, base_at = order["total"], order.get("base_at", [])
    assert isinstance(total, int)
    assert isinstance(base_at, list)
    with open_run(order, job) as well:
        restored = well.restore()
        first = 0 if restored is None else restored.step + 1
        line.tell("restored", step=first - 1, exact=restored is None or restored.exact)
        for step in range(first, total):
            job.step()
            handle = well.save(step, base=step in base_at)
            line.tell("saved", step=step)
            for tier in handle.tiers:
                handle.future(tier).add_done_callback(_acknowledge(line, step, tier))
            if order.get("wait"):
                handle.until()
        if order.get("linger"):
            line.tell("idle")
            idle = threading.Event()
            while True:
                # Not signal.pause: a signal that comes just before it would be slept over for ever.
                idle.wait(0.05)
    line.tell("done")


def _acknowledge(line: Line, step: int, tier: str) -> Callable[[object], None]:
    def done(future: object) -> None:
        error = future.exception()  # type: ignore[attr-defined]
        line.tell("failed" if error else "ack", step=step, tier=tier, error=str(error))

    return done


def _arm(line: Line, order: Order) -> None:
    """Set what the order wants to go wrong."""
    patch = pytest.MonkeyPatch()
    kill_at = order.get("kill_at")
    if kill_at is not None:
        assert isinstance(kill_at, int)
        if order["tier"] == "directory":
            _kill_in_directory(patch, kill_at)
        else:
            _kill_in_arena(patch, kill_at)
    moment = order.get("moment")
    if moment == "capture":
        _stop_in_capture(line, patch)
    elif moment == "encode":
        _stop_in_encode(line, patch)
    elif moment == "put":
        store = break_tier(patch, "directory", Fault(FaultKind.STALL, "put", "*/step/000000000003/*.pack"))
        _release_when_told(line, lambda: store().release())
    elif moment == "stuck":
        break_tier(patch, "directory", Fault(FaultKind.STALL, "put", "*/step/000000000003/*.pack"))


def _release_when_told(line: Line, release: Callable[[], None]) -> None:
    def wait() -> None:
        line.wait()
        release()

    threading.Thread(target=wait, daemon=True).start()


def _stop_in_capture(line: Line, patch: pytest.MonkeyPatch) -> None:
    take, go = Capture.take, threading.Event()
    _release_when_told(line, go.set)

    def stopped(self: Capture, step: int, *, base: bool = False) -> object:
        if step == 3:
            line.tell("capture")
            go.wait()
        return take(self, step, base=base)

    patch.setattr(Capture, "take", stopped)


def _stop_in_encode(line: Line, patch: pytest.MonkeyPatch) -> None:
    pack, go = Shard.pack, threading.Event()
    _release_when_told(line, go.set)

    def stopped(self: Shard, identity: object, header: object, chunks: object) -> object:
        if identity.step == 3:  # type: ignore[attr-defined]
            line.tell("encode")
            go.wait()
        return pack(self, identity, header, chunks)  # type: ignore[arg-type]

    patch.setattr(Shard, "pack", stopped)


def _kill_in_directory(patch: pytest.MonkeyPatch, kill_at: int) -> None:
    from failure_rig import assembly

    from stepwell.pipeline.tier import Tier
    from stepwell.stores.fault import FaultStore

    def tier(label: str, store: object, **settings: object) -> Tier:
        if label == "directory":
            store = FaultStore(store, kill_at=kill_at)  # type: ignore[arg-type]
        return Tier(label, store, **settings)  # type: ignore[arg-type]

    patch.setattr(assembly, "Tier", tier)


def _kill_in_arena(patch: pytest.MonkeyPatch, kill_at: int) -> None:
    passed = 0

    def boundary() -> None:
        nonlocal passed
        if passed == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    for name in ("publish", "drop"):
        method = getattr(Arena, name)

        def counted(*args: object, _method: Callable[..., object] = method, **keys: object) -> object:
            boundary()
            result = _method(*args, **keys)
            boundary()
            return result

        patch.setattr(Arena, name, counted)


def hold(line: Line, order: Order) -> None:
    """Open, tell, and keep it open until told."""
    try:
        with open_run(order, Job()):
            line.tell("open")
            line.wait()
    except stepwell.StepwellError as error:
        line.tell("refused", kind=type(error).__name__, message=str(error))


def fork(line: Line, order: Order) -> None:
    """Open, save, fork, and use the run in the child."""
    job = Job()
    with open_run(order, job) as well:
        job.step()
        handle = well.save(0)
        job.step()
        forked_in_s = time.monotonic()
        pid = os.fork()
        if not pid:
            _in_forked_child(line, job, well, handle)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        line.tell("waited", status=status, seconds=time.monotonic() - forked_in_s)
        well.save(1)
        for step in (2, 3):
            job.step()
            well.save(step)
        well.wait_until_finished(30)
        line.tell("exact")
    line.tell("done")


def _in_forked_child(line: Line, job: Job, well: stepwell.SyncWell, handle: stepwell.Handle) -> None:
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: well.save(1),
        "restore": well.restore,
        "latest_step": well.latest_step,
        "wait_until_finished": well.wait_until_finished,
        "check_for_errors": well.check_for_errors,
        "metrics": well.metrics,
        "until": handle.until,
        "steps": lambda: next(iter(well.steps(5))),
    }
    for name, call in calls.items():
        began = time.monotonic()
        try:
            call()
            kind, message = "nothing", ""
        except Exception as error:
            kind, message = type(error).__name__, str(error)
        line.tell("call", name=name, kind=kind, message=message, seconds=time.monotonic() - began)
    began = time.monotonic()
    for _ in range(6):
        job.step()  # into nobody's slots
    well.close()
    line.tell("trained", seconds=time.monotonic() - began)


MODES: dict[str, Callable[[Line, Order], None]] = {"train": train, "hold": hold, "fork": fork}

if __name__ == "__main__":
    main()
