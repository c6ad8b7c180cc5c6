"""A process that trains while its object storage is away for 500 steps; see its test.

``away_worker.py PORT MEMORY`` exits with 0 if all that the test promises holds. A process of its own, since
how long tensorstore waits for an answer is settled once for each.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from failure_rig import PATIENCE_S, Job, idle
from s3_proxy import Trouble, Way
from s3_rig import Bucket, fresh_bucket

import stepwell

STEPS_BEFORE = 10
STEPS_AWAY = 500
WIDTH = 20_000
STALL_LIMIT_S = 10.0


def opened(s3: Bucket, memory: Path, job: Job) -> stepwell.SyncWell:
    remote = {"kind": "remote", "url": s3.url, "endpoint": s3.endpoint, "lease_s": 1.0, "on_error": "degrade"}
    config = {
        "tiers": [
            {"kind": "memory", "directory": str(memory)},
            {**remote, "timeout_s": 0.5, "retry_for_s": 0.5},
        ],
        "base_every": 20,
        "log_budget": 1000.0,
        "stall_limit_s": STALL_LIMIT_S,
        "handle_sigterm": False,
        "close_deadline_s": PATIENCE_S,
    }
    return stepwell.open_sync(config, model=job.model, optimizer=job.optimizer)


def allocated_bytes(directory: Path) -> int:
    size = 0
    for name in os.listdir(directory):
        with suppress(FileNotFoundError):  # reclaimed just now
            size += (directory / name).lstat().st_blocks * 512
    return size


class Training:
    """Trains and saves step after step."""

    def __init__(self) -> None:
        self.job = Job(width=WIDTH)
        self.step = -1

    def save(self, well: stepwell.SyncWell) -> stepwell.SaveHandle:
        self.step += 1
        self.job.step()
        return well.save(self.step)

    def with_remote(self, well: stepwell.SyncWell) -> None:
        for _ in range(STEPS_BEFORE):
            handle = self.save(well)
        handle.until("remote", PATIENCE_S)

    def without_remote(self, well: stepwell.SyncWell, memory: Path) -> None:
        largest = 0
        for _ in range(STEPS_AWAY):
            self.save(well).until("memory", PATIENCE_S)
            largest = max(largest, allocated_bytes(memory))
        metrics = well.metrics()
        assert list(metrics.lost_tiers) == ["remote"]
        assert metrics.last_committed_step == {"memory": self.step, "remote": STEPS_BEFORE - 1}
        assert metrics.unprotected_steps == 0, "memory has them all"
        assert max(save.waited_s for save in metrics.saves) <= STALL_LIMIT_S
        forecast = sum(metrics.forecast_bytes.values())
        assert largest <= forecast, f"{largest} bytes, forecast {forecast}"

    def with_remote_again(self, well: stepwell.SyncWell) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while well.latest_step("remote") != self.step:
            assert time.monotonic() < deadline, well.metrics().lost_tiers
            self.save(well).until("memory", PATIENCE_S)
            idle(well)
        assert well.metrics().lost_tiers == {}


def main() -> None:
    port, memory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    training = Training()
    with fresh_bucket(port) as s3:
        with warnings.catch_warnings(record=True) as told, opened(s3, memory / "first", training.job) as well:
            warnings.simplefilter("always")
            training.with_remote(well)
            s3.proxy.plan = [Trouble(Way.SILENT, times=1_000_000)]
            training.without_remote(well, memory / "first")
            s3.proxy.plan = []
            training.with_remote_again(well)
        messages = " ".join(str(one.message) for one in told)
        assert "tier remote is given up" in messages
        assert "tier remote answers again" in messages
        assert not (memory / "first").exists(), "closed in order: nothing is left in memory"
        again = Job(seed=99, width=WIDTH)
        with opened(s3, memory / "second", again) as well:
            back = well.restore()
            assert back is not None
            assert (back.step, back.tier, back.exact, back.lost_steps) == (training.step, "remote", True, 0)
            assert again.bits() == training.job.bits()


if __name__ == "__main__":
    main()
