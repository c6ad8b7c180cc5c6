"""What the demo measured, and how its two outcomes are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stepwell.errors import NotCommittedError
from stepwell.pipeline.keys import Area, Series, parse_key, state_prefix
from stepwell.pipeline.manifest import Manifest

__all__ = ["Report", "Restore", "Sizes", "differing", "differing_from_group", "percentile", "read_sizes"]

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Restore:
    """One return from death.

    Attributes
    ----------
    step : int
        Step that came back.
    tier : str
        Tier it came from.
    seconds : float
    exact : bool
        Whether every digest matched.
    killed_in : int
        Step the child was in, or had just saved, when it was killed.
    memory_wiped : bool
        Whether the memory tier was removed before the restart, as by the loss of the machine.
    """

    step: int
    tier: str
    seconds: float
    exact: bool
    killed_in: int
    memory_wiped: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What lies in the directory when all is done.

    Attributes
    ----------
    step_bytes : float
        Mean over the differentials that retention left.
    base_bytes, base_step : int
        Of the newest base.
    group : Path
        Its zarr group.
    """

    step_bytes: float
    base_bytes: int
    base_step: int
    group: Path


@dataclass(slots=True)
class Report:
    """Everything the demo tells in the end; times in milliseconds unless the name says otherwise."""

    steps: int
    params: int
    kills: int = 0
    restores: list[Restore] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    plain_step_ms: list[float] = field(default_factory=list)
    blocked_ms: list[float] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    group_different: list[str] | None = None
    sizes: Sizes | None = None
    directory: str = ""

    @property
    def bit_equal(self) -> bool:
        """Whether both runs ended the same to the last bit."""
        return not self.different and not self.group_different

    def as_json(self) -> dict[str, object]:
        """Return the one object that ``--json`` prints."""
        sizes = self.sizes
        assert sizes is not None
        return {
            "steps": self.steps,
            "params": self.params,
            "kills": self.kills,
            "restores": [
                {
                    "step": restore.step,
                    "tier": restore.tier,
                    "seconds": restore.seconds,
                    "exact": restore.exact,
                    "killed_in": restore.killed_in,
                    "memory_wiped": restore.memory_wiped,
                }
                for restore in self.restores
            ],
            "bit_equal": self.bit_equal,
            "different": [*self.different, *(self.group_different or [])],
            "step_ms_p50": percentile(self.step_ms, 50),
            "plain_step_ms_p50": percentile(self.plain_step_ms, 50),
            "blocked_ms_p50": percentile(self.blocked_ms, 50),
            "blocked_ms_p99": percentile(self.blocked_ms, 99),
            "bytes_per_param_step": sizes.step_bytes / self.params,
            "state_bytes_per_param": sizes.base_bytes / self.params,
            "url": str(sizes.group),
            "base_step": sizes.base_step,
            "directory": self.directory,
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile between its two neighbours; of one value, that value."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def differing(first: Path, second: Path) -> list[str]:
    """Return the names of arrays that two ``.npz`` files do not have alike, to the last bit."""
    with np.load(first) as a, np.load(second) as b:
        unequal = [name for name in a.files if name in b.files and not same_bits(a[name], b[name])]
        return sorted([*unequal, *(set(a.files) ^ set(b.files))])


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays agree in type, shape and every bit, so that NaN equals itself and -0 is not 0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def differing_from_group(outcome: Path, group: Path) -> list[str]:
    """Return the names of arrays that plain zarr does not read from a base as they were in the end."""
    import zarr

    members = zarr.open_group(str(group), mode="r").members(max_depth=None)
    stored = {
        str(array.attrs["stepwell_name"]): array for _, array in members if isinstance(array, zarr.Array)
    }
    with np.load(outcome) as arrays:
        common = [name for name in arrays.files if name in stored]
        return sorted(name for name in common if not same_bits(np.asarray(stored[name][...]), arrays[name]))


def read_sizes(directory: Path) -> Sizes:
    """Read from the manifests in a run's directory what its saves cost.

    Raises
    ------
    NotCommittedError
        There is no base, or no differential.
    """
    steps: list[int] = []
    bases: list[Manifest] = []
    for path in sorted(directory.glob("*/*/*/*.manifest.json")):
        key = path.relative_to(directory).as_posix()
        parsed = parse_key(key)
        if parsed is None or parsed.area is not Area.MANIFEST:
            continue
        manifest = Manifest.decode(path.read_bytes(), key)
        if manifest.series is Series.STEP:
            steps.append(manifest.size_bytes)
        else:
            bases.append(manifest)
    if not steps or not bases:
        raise NotCommittedError(f"{directory}: {len(steps)} differentials and {len(bases)} bases were left")
    newest = max(bases, key=lambda manifest: manifest.link)
    return Sizes(
        step_bytes=statistics.fmean(steps),
        base_bytes=newest.size_bytes,
        base_step=newest.step,
        group=directory / state_prefix(newest.incarnation, newest.step),
    )
