"""A process that trains, and is killed when its last saves are captured and not encoded; see its test.

``captured_worker.py CONFIG STEPS HELD UPDATES`` saves each step, after UPDATES updates each, and waits for it
in memory up to step HELD; those from there on are kept from being encoded. It kills itself with SIGKILL when
all of them are marked, or, where the arguments end with ``unmarked``, when all of them are captured.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys

import torch
from failure_rig import PATIENCE_S, Job

import stepwell
from stepwell.pipeline.jobs import StepJob
from stepwell.pipeline.marks import CaptureMark
from stepwell.pipeline.runner import Runner


def main() -> None:
    config, steps, held, updates = (json.loads(text) for text in sys.argv[1:5])
    torch.set_num_threads(1)
    marked: queue.Queue[bool] = queue.Queue()
    encode, set_mark = Runner._encode, CaptureMark.set

    async def held_encode(runner: Runner, job: StepJob) -> object:
        if job.link.step >= held:
            await asyncio.Event().wait()
        return await encode(runner, job)

    def told_set(mark: CaptureMark, digest: object) -> bool:
        done = set_mark(mark, digest)
        if mark._link.step >= held:
            marked.put(done)
        return done

    Runner._encode, CaptureMark.set = held_encode, told_set  # type: ignore[assignment, method-assign]
    job = Job()
    well = stepwell.open_sync(config, model=job.model, optimizer=job.optimizer)
    for step in range(steps):
        for _ in range(updates):
            job.step()
        handle = well.save(step)
        if step < held:
            handle.until("memory", PATIENCE_S)
        elif sys.argv[-1] != "unmarked":
            assert marked.get(timeout=PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
