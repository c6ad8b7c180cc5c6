"""Object storage that does not answer for 500 steps: training goes on, memory is bounded, all catches up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from s3_rig import CREDENTIALS


def test_500_steps_without_an_answer_of_the_remote_cost_no_step_and_all_of_it_catches_up(
    s3_port: int, memory_directory: Path
) -> None:
    worker = Path(__file__).with_name("away_worker.py")
    ended = subprocess.run(
        [sys.executable, str(worker), str(s3_port), str(memory_directory)],
        env={**os.environ, **CREDENTIALS, "PYTHONPATH": os.pathsep.join([str(worker.parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
