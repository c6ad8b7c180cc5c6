"""A process that trains, saves every step, and is killed; see its test.

``remote_worker.py CONFIG STEPS BASES`` prints ``until STEP`` for each save that is in the last tier, and
kills itself with SIGKILL while the last step is on its way. ``CONFIG`` and ``BASES`` are JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
from failure_rig import PATIENCE_S, Job

import stepwell


def main() -> None:
    config, steps, bases = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    job = Job()
    well = stepwell.open_sync(config, model=job.model, optimizer=job.optimizer)
    well.restore()
    for step in range(steps):
        job.step()
        handle = well.save(step, base=step in bases)
        if step < steps - 1:
            handle.until(None, PATIENCE_S)
            print(f"until {step}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
