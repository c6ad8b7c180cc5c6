"""A process that trains as it is told; see ``cluster_rig.Trainer``.

Orders are JSON lines on stdin, what happens is told as JSON lines on stdout. The first order says how the
run is opened; it may come late, so that a process can be there before it is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "face"))

import pytest
import torch
from failure_rig import PATIENCE_S, Job, break_tier

import stepwell
from stepwell.stores.fault import Fault, FaultKind
from stepwell.stores.transport.client import TcpTransport

Result = TypeVar("Result")
CALLS = ("put", "get", "stat", "list", "delete", "delete_below")


class Voice:
    """The way to the test; used by several threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()

    def tell(self, event: str, **facts: object) -> None:
        with self._mutex:
            print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


def hash_of(bits: dict[str, bytes]) -> str:
    """Return a digest of weights, optimizer state and random state."""
    hasher = hashlib.sha256()
    for name in sorted(bits):
        hasher.update(name.encode() + b"\0" + bits[name])
    return hasher.hexdigest()


def main() -> None:
    voice = Voice()
    _tell_everything(voice)
    _measure_calls(voice)
    torch.set_num_threads(1)
    Job()  # torch imports much more with the first optimizer
    stepwell.open_sync  # noqa: B018 - imports what it names
    first = sys.stdin.readline()
    if not first:
        os._exit(0)
    config, width = json.loads(first)["config"], json.loads(first)["width"]
    stall = config.pop("stall_directory_from", None)
    if stall is not None:
        key = f"*/step/{stall:012}/*.pack"
        break_tier(pytest.MonkeyPatch(), "directory", Fault(FaultKind.STALL, "put", key))
    job = Job(seed=7, width=width)
    try:
        with stepwell.open_sync(config, model=job.model, optimizer=job.optimizer) as well:
            back = well.restore()
            about = {} if back is None else _about(back)
            voice.tell("open", restored=about, bits=hash_of(job.bits()))
            _obey(voice, well, job, 0 if back is None else back.step + 1)
        voice.tell("closed")
    except BaseException:
        voice.tell("raised", what=traceback.format_exc())
        raise
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end takes seconds with torch in it


def _about(back: stepwell.Restored) -> dict[str, object]:
    names = ("step", "tier", "exact", "lost_steps", "faults")
    return {name: getattr(back, name) for name in names}


def _obey(voice: Voice, well: stepwell.SyncWell, job: Job, step: int) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "close":
            return
        if order["do"] == "finish":
            well.wait_until_finished(PATIENCE_S)
        if order["do"] in ("finish", "look"):
            tiers = [tier.name for tier in well._session.tiers]
            steps = {tier: well.all_steps(tier) for tier in tiers}
            voice.tell("state", steps=steps, lost=well.metrics().lost_tiers)
            continue
        for _ in range(order["steps"]):
            _train(voice, well, job, step, base=step in order["bases"])
            step += 1


def _train(voice: Voice, well: stepwell.SyncWell, job: Job, step: int, *, base: bool) -> None:
    job.step()
    bits = hash_of(job.bits())
    began = time.monotonic()
    handle = well.save(step, base=base)
    seconds = time.monotonic() - began
    for tier in handle.tiers:
        handle.future(tier).add_done_callback(_outcome(voice, step, tier))
    lost = well.metrics().lost_tiers
    voice.tell("saved", step=step, bits=bits, seconds=seconds, lost=lost, skipped=handle.skipped)


def _outcome(voice: Voice, step: int, tier: str) -> Callable[[Future[None]], None]:
    def done(future: Future[None]) -> None:
        error = future.exception()
        voice.tell("failed" if error else "ack", step=step, tier=tier, error=str(error))

    return done


def _tell_everything(voice: Voice) -> None:
    """Let the test know of each warning, and of what dies in a thread."""

    def warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        voice.tell("warning", what=str(message), category=category.__name__)

    warnings.simplefilter("always")
    warnings.showwarning = warn
    threading.excepthook = lambda told: voice.tell("raised", what=repr(told.exc_value))


def _measure_calls(voice: Voice) -> None:
    """Tell of each call to a peer that failed, or took longer than allowed."""
    for name in CALLS:
        method = getattr(TcpTransport, name)

        async def measured(
            self: TcpTransport,
            *arguments: object,
            _method: Callable[..., Awaitable[Result]] = method,
            _name: str = name,
            **keys: object,
        ) -> Result:
            parts = arguments[1] if _name == "put" else ()
            assert isinstance(parts, Sequence)
            size_bytes = sum(memoryview(part).nbytes for part in parts)
            allowed_s = self._limits.call_deadline_s(size_bytes)
            began, error = time.monotonic(), "cancelled"
            try:
                result = await _method(self, *arguments, **keys)
                error = ""
                return result
            except Exception as caught:
                error = type(caught).__name__
                raise
            finally:
                took_s = time.monotonic() - began
                if error or took_s > allowed_s:
                    about = {"name": _name, "allowed_s": allowed_s, "took_s": took_s, "error": error}
                    voice.tell("call", where=self.where, **about)

        setattr(TcpTransport, name, measured)


if __name__ == "__main__":
    main()
