"""A real SIGKILL in the middle of a step, with replicas (DDP) and fused kernels, two processes in all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("resume_worker.py")


def run(what: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(WORKER), what, str(root)]
    # One interface is named, so that gloo looks up no host name.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)


def test_killed_in_a_step_replicas_and_fused_kernels_resume_bit_for_bit(memory_directory: Path) -> None:
    killed = run("train", memory_directory)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = run("finish", memory_directory)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip().endswith("bit-equal")
