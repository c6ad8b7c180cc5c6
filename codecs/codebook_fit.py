"""Codebooks for normalised blocks: 16 entries each, fitted on histograms without sorting elements.

Blocks are divided by their largest magnitude, so that a codebook describes the shape of a
distribution and one serves many blocks. Blocks are told apart by their mean magnitude (how much
their largest element stands out); each class has a codebook of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ENTRIES", "GRID_HALF", "GRID_POINTS", "SHAPES_MAX", "Shapes", "fit_shapes"]

Floats = npt.NDArray[np.float32]

ENTRIES = 16
GRID_HALF = 1023  # steps from 0 to 1; a step is then a fiftieth of what lies between entries
GRID_POINTS = 2 * GRID_HALF + 1
SHAPES_MAX = 8
_BLOCKS_PER_SHAPE = 256  # in the sample; with fewer a codebook fits its sample, not the tensor
_ROUNDS = 12  # Lloyd's iterations; from this start they change little after six
_ROUNDING = 0.5001 / GRID_HALF + 2.0**-20  # from an element to its grid point, and float32 arithmetic


@dataclass(frozen=True, slots=True)
class Shapes:
    """Codebooks and how to choose among them.

    Attributes
    ----------
    limits : ndarray, (shapes - 1,), float32
        Of the mean magnitude of a normalised block, between the classes; ascending.
    entries : ndarray, (shapes, 16), float32
        Ascending within [-1, 1]; one of each row is 0.
    codes : ndarray, (shapes * GRID_POINTS,), uint8
        The nearest entry of every grid point from -1 to 1, per shape.
    distances : ndarray, (shapes, GRID_POINTS), float64
        The most that an element rounded to this grid point lies from its entry.
    """

    limits: Floats
    entries: Floats
    codes: npt.NDArray[np.uint8]
    distances: npt.NDArray[np.float64]


def fit_shapes(rows: Floats) -> Shapes:
    """Fit codebooks to a sample of normalised blocks.

    Parameters
    ----------
    rows : ndarray, (blocks, elements), float32
        Each divided by its largest magnitude. May be none.

    Notes
    -----
    Lloyd's algorithm (least squares) on the histogram of each class: with prefix sums an iteration
    costs 16 lookups. It starts from Panter and Dite's density, the cube root of the histogram,
    which is the optimum for many entries. The entry nearest to 0 is kept at 0.
    """
    shape_count = min(max(len(rows) // _BLOCKS_PER_SHAPE, 1), SHAPES_MAX)
    means = np.abs(rows).mean(axis=1) if len(rows) else np.zeros(0, np.float32)
    limits = np.empty(0, np.float32)
    if shape_count > 1:
        limits = np.sort(means)[len(means) * np.arange(1, shape_count) // shape_count]  # one per block
    classes = np.searchsorted(limits, means, side="right")
    places = np.rint(rows * np.float32(GRID_HALF)).astype(np.int64) + GRID_HALF
    places += GRID_POINTS * classes[:, None]
    counts = np.bincount(places.reshape(-1), minlength=shape_count * GRID_POINTS)
    histograms = counts.reshape(shape_count, GRID_POINTS).astype(np.float64)
    # A class that the sample missed gets the shape of all.
    histograms += 1e-4 * histograms.sum(axis=0)
    entries = np.stack([_fit(histogram) for histogram in histograms])
    grid = np.arange(-GRID_HALF, GRID_HALF + 1) / GRID_HALF
    apart = np.abs(grid[None, :, None] - entries[:, None, :].astype(np.float64))
    codes = apart.argmin(axis=2).astype(np.uint8).reshape(-1)
    return Shapes(limits, entries, codes, apart.min(axis=2) + _ROUNDING)


def _fit(histogram: npt.NDArray[np.float64]) -> Floats:
    """Fit the entries of one codebook."""
    grid = np.arange(-GRID_HALF, GRID_HALF + 1) / GRID_HALF
    # The smallest weight keeps entries apart where the sample is empty.
    density = np.cumsum(np.cbrt(histogram + 1e-9))
    quantiles = (np.arange(ENTRIES) + 0.5) / ENTRIES * density[-1]
    entries = grid[np.minimum(np.searchsorted(density, quantiles), GRID_POINTS - 1)]
    weight = np.concatenate([[0.0], np.cumsum(histogram)])
    moment = np.concatenate([[0.0], np.cumsum(histogram * grid)])
    for _ in range(_ROUNDS):
        entries[np.abs(entries).argmin()] = 0.0
        borders = np.searchsorted(grid, (entries[1:] + entries[:-1]) / 2)
        borders = np.concatenate([[0], borders, [GRID_POINTS]])
        cell = np.diff(weight[borders])
        entries = np.where(cell > 0, np.diff(moment[borders]) / np.where(cell > 0, cell, 1.0), entries)
    entries[np.abs(entries).argmin()] = 0.0
    fitted: Floats = np.clip(np.sort(entries), -1.0, 1.0).astype(np.float32)
    return fitted
