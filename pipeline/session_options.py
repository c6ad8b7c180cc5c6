"""Settings of a session, as plain values; the configuration's models are a floor higher."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.pipeline.capture import Mode
from stepwell.pipeline.source import READ_DEADLINE_S

__all__ = ["SessionOptions"]


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Settings of a run; named and explained in ``stepwell.config.Config``."""

    capture: Mode = "gradient"
    save_every: int = 1
    base_every: int = 50
    log_budget: float = 1.0
    stall_limit_s: float = 60.0
    skip: bool = False
    on_lost_steps: str = "accept"
    inexact: str = "accept"
    chunk_bytes: int = 16 << 20
    budget_bytes: int = 256 << 20
    read_deadline_s: float = READ_DEADLINE_S
    drain_deadline_s: float = 30.0
    close_deadline_s: float = 600.0
    threads: int = 1
    slots: int = 3
    handle_sigterm: bool = True
