"""A process that trains bfloat16 models with masters and is killed in the middle of a step; see its test.

``derived_worker.py ROOT`` kills itself with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from derived_rig import MASTERS, capturing, masters
from resume_rig import TOTAL, Place, seed_everything

KILLED_IN = 5
ACKNOWLEDGED = 4


def main(root: Path) -> None:
    torch.set_num_threads(1)
    lines = []
    for where in MASTERS:
        seed_everything(1)
        training = masters(where)()
        lines.append((training, capturing(Place(root / where), "ordered_delta").open(training)))
    for step in range(TOTAL):
        for training, well in lines:
            if step == KILLED_IN and training is lines[-1][0]:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step(step)
            handle = well.save(step)
            if step == ACKNOWLEDGED:
                handle.until("memory", timeout_s=60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
