"""Which elements are worth keeping: a threshold from a sample, and a cap that holds without sorting.

All comparisons are of the magnitude bits of float32 as integers, where infinities and NaNs stand
above every finite number, so they are kept by the same comparison and nothing warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
import numpy.typing as npt

from stepwell.codecs.sparse_index import Positions

__all__ = ["INFINITY_BITS", "MAGNITUDE", "Selection", "bits_of", "float_of", "select", "threshold_bits"]

Bits = npt.NDArray[np.uint32]

MAGNITUDE = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
_SAMPLE_ELEMENTS = 1 << 16  # at a rate of 0.1 % still 65 of them are above the threshold
_CHUNK_ELEMENTS = 1 << 16  # 256 KiB: stays in the second-level cache with its scratch


def bits_of(value: float) -> int:
    """Return the bits of a float32."""
    return int(np.array(value, "<f4").view("<u4"))


def float_of(bits: int) -> float:
    """Return the float32 that has these bits."""
    return float(np.array(bits, "<u4").view("<f4"))


@dataclass(frozen=True, slots=True)
class Selection:
    """What is kept.

    Attributes
    ----------
    positions : ndarray, (kept,), int64
        Ascending.
    bits : ndarray, (kept,), uint32
        The elements there.
    threshold : int
        Magnitude bits of a finite number that no dropped element exceeds.
    """

    positions: Positions
    bits: Bits
    threshold: int


def threshold_bits(bits: Bits, rate: float, hint: float | None) -> int:
    """Choose a threshold that about `rate` of the finite elements exceed.

    Parameters
    ----------
    bits : ndarray, (n,), uint32
        float32 bits.
    rate : float
    hint : float, optional
        The threshold of the last call on the same tensor. While between half and twice the rate
        of the sample exceeds it, the geometric mean of it and of the sample's own is taken, which
        averages the noise of samples over calls; else it is forgotten.

    Returns
    -------
    int
        Magnitude bits of a finite float32.

    Notes
    -----
    A threshold from a sample is Deep Gradient Compression's (Lin et al. 2018). Correcting a
    tracked one by a power of (share above it / rate), as is usual, swings on distributions with
    short tails: where a normal one is cut at 1 %, its share goes with the threshold to the -8th.
    The quantile of the sample is selected (introselect), nothing is sorted.
    """
    # An odd stride meets every column of a matrix, whose width is a power of two more often than not.
    stride = -(-bits.size // _SAMPLE_ELEMENTS) | 1
    sample = bits[::stride] & np.uint32(MAGNITUDE)
    sample = sample[sample < INFINITY_BITS]
    rank = sample.size - ceil(rate * sample.size)
    if rank < 1:
        return 0
    threshold = int(np.partition(sample, rank - 1)[rank - 1])
    if hint is not None and hint > 0:
        share = np.count_nonzero(sample > bits_of(hint)) / (rate * sample.size)
        if 0.5 <= share <= 2:
            threshold = bits_of(sqrt(hint * float_of(threshold)))
    # One step below, so that of many equal elements there are some above: select() caps them.
    return max(threshold - 1, 0)


def select(bits: Bits, threshold: int, kept_max: int) -> Selection:
    """Keep what exceeds a threshold, which rises where more than `kept_max` would be kept.

    Non-finite elements are always kept and do not count. Where more than twice `kept_max` finite
    elements have come together the threshold rises to leave `kept_max`, so the memory in use stays
    in proportion to it and the whole is one pass. Of elements equal to a risen threshold the first
    are kept until the cap is reached: a tensor of equal elements makes progress too.

    Parameters
    ----------
    bits : ndarray, (n,), uint32
        float32 bits; not changed.
    threshold : int
        Magnitude bits of a finite number.
    kept_max : int
        Most finite elements to keep.
    """
    size = min(bits.size, _CHUNK_ELEMENTS)
    magnitudes, mask = np.empty(size, np.uint32), np.empty(size, np.bool_)
    positions: list[Positions] = []
    kept: list[Bits] = []
    kept_count = infinite_count = 0
    for start in range(0, bits.size, _CHUNK_ELEMENTS):
        chunk = bits[start : start + _CHUNK_ELEMENTS]
        magnitude, above = magnitudes[: chunk.size], mask[: chunk.size]
        np.bitwise_and(chunk, np.uint32(MAGNITUDE), out=magnitude)
        np.greater(magnitude, np.uint32(threshold), out=above)
        found = np.flatnonzero(above)
        if not found.size:
            continue
        infinite_count += int(np.count_nonzero(magnitude[found] >= INFINITY_BITS))
        kept.append(chunk[found])
        found += start
        positions.append(found)
        kept_count += found.size
        if kept_count - infinite_count > 2 * kept_max:
            found, some, threshold = _lower(positions, kept, kept_max + infinite_count)
            positions, kept, kept_count = [found], [some], found.size
    if kept_count - infinite_count > kept_max:
        return Selection(*_lower(positions, kept, kept_max + infinite_count))
    if not positions:
        return Selection(np.empty(0, np.int64), np.empty(0, "<u4"), threshold)
    return Selection(np.concatenate(positions), np.concatenate(kept), threshold)


def _lower(positions: list[Positions], kept: list[Bits], count: int) -> tuple[Positions, Bits, int]:
    """Keep the `count` largest; the threshold is then the largest magnitude that goes."""
    position, bits = np.concatenate(positions), np.concatenate(kept)
    magnitudes = bits & np.uint32(MAGNITUDE)
    rank = bits.size - count - 1
    threshold = int(np.partition(magnitudes, rank)[rank])
    stays = magnitudes > threshold
    equal = np.flatnonzero(magnitudes == threshold)
    stays[equal[: count - int(np.count_nonzero(stays))]] = True
    return position[stays], bits[stays], threshold
