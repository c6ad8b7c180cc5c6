"""The factor that makes bfloat16 values of float32 ones, recovered from a few of them.

A gradient computed in bfloat16 and then clipped is x = fl(q * c): q has 8 significant bits, c is one
float32 for all. With M in 128..255 the significand of q, c is x / M up to a power of two. So one
value leaves 128 candidates, every further one confirms the right candidate and no other (a wrong
one by chance in one of 2**12 cases), and the few candidates for c's last bits are tried bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["find_factor"]

_Values = npt.NDArray[np.float32]
_Significands = npt.NDArray[np.float64]

_SAMPLES = (512, 8192)  # the second only where the first holds mostly zeros
_SAMPLE_MIN = 32
_SAMPLE_MAX = 256
_ANCHORS = 6
_CHOOSING = 24  # samples among which the candidates are judged; 768 candidates each
_ENOUGH = 0.95  # of the samples: nothing better is looked for
_MATCHES = 0.25  # of the samples: tensors summed in float32 may share a chunk with others
# x and c are off by 2**-24 of themselves each and M is below 2**8: 2**-15, with a factor to spare.
_TOLERANCE = 2.0**-13


def find_factor(values: _Values, hint: float | None = None) -> np.float32 | None:
    """Return a factor c such that many of the values are bfloat16 values times c, or None.

    Parameters
    ----------
    values : ndarray, (n,), float32
    hint : float, optional
        The factor of the chunk before: all chunks of an update share one, so it is tried first. If
        the factor is another one, it is given the hint's exponent, which no sample can tell.

    Returns
    -------
    float32 or None
        Positive, normal, finite. Nothing is promised about values that were not sampled.
    """
    samples = _sample(values)
    if not samples.size:
        return None
    usable = hint is not None and math.isfinite(hint) and 2.0**-100 < hint < 2.0**100
    exponent = math.frexp(hint)[1] if usable and hint is not None else 0
    tried = [np.float32(hint)] if usable and hint is not None else []
    best, best_share = None, 0.0
    for factor in (*tried, np.float32(1)):
        share = _matches(samples, factor)
        if share >= _ENOUGH:
            return factor
        if share > best_share:
            best, best_share = factor, share
    # Values that fit by chance or by a common divisor do not end the search: the factor of the
    # others may fit them all.
    found = _search(samples)
    if found is not None:
        factor = np.float32(math.ldexp(float(found) / 2, exponent))
        share = _matches(samples, factor)
        if share > best_share:
            best, best_share = factor, share
    return best if best_share >= _MATCHES else None


def _sample(values: _Values) -> _Values:
    """Take normal nonzero values, evenly spread; fewer than asked for if there are no more."""
    samples = values[:0]
    for count in _SAMPLES:
        spread = np.array(values[:: max(1, values.size // count)])
        magnitudes = np.abs(spread)
        samples = spread[(magnitudes >= 2.0**-100) & (magnitudes <= 2.0**100)]
        if samples.size >= _SAMPLE_MIN:
            break
    return samples[:: max(1, samples.size // _SAMPLE_MAX)][:_SAMPLE_MAX]


def _matches(samples: _Values, factor: np.float32) -> float:
    """Return which part of the samples are bfloat16 values times `factor`, bit for bit."""
    quotients = samples / factor
    bits = (quotients.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return int(np.count_nonzero(bits.view(np.float32) * factor == samples)) / samples.size


def _search(samples: _Values) -> np.float32 | None:
    """Return the significand of the factor, in [1, 2)."""
    significands = 2 * np.frexp(np.abs(samples))[0].astype(np.float64)
    anchors = np.unique(significands)
    anchors = anchors[:: max(1, anchors.size // _ANCHORS)][:_ANCHORS]
    candidates = _normal(anchors[:, None] * 128 / np.arange(128, 256)).reshape(-1)
    few = significands[:: max(1, significands.size // _CHOOSING)][:_CHOOSING]  # all of them decide below
    scores = _near(_multiples(few, candidates)).sum(axis=1, dtype=np.int64)
    # Where all samples are multiples of some k, c * k explains them as well: the candidate that
    # leaves most of them odd is c itself.
    first = np.flatnonzero(scores == scores.max())
    wholes = np.rint(_multiples(few, candidates[first]))
    best = first[np.argmax((wholes % 2 == 1).sum(axis=1))]
    if scores[best] < _MATCHES * few.size:
        return None
    return _refine(samples, significands, candidates[best])


def _normal(values: _Significands) -> _Significands:
    """Bring values in (1/2, 2) to [1, 2), in place."""
    return np.multiply(values, np.where(values < 1, 2.0, 1.0), out=values)


def _multiples(significands: _Significands, candidates: _Significands) -> _Significands:
    """Return M of each candidate and value, (candidates, values): whole numbers where it explains it."""
    multiples = _normal(significands[None, :] / candidates[:, None])
    return np.multiply(multiples, 128, out=multiples)


def _near(multiples: _Significands) -> npt.NDArray[np.bool_]:
    distances = np.rint(multiples)
    np.subtract(distances, multiples, out=distances)
    return np.abs(distances, out=distances) < _TOLERANCE


def _refine(samples: _Values, significands: _Significands, candidate: float) -> np.float32 | None:
    """Find the last bits of the factor: every sample bounds it, and the few left are tried."""
    found = _multiples(significands, np.array([candidate]))[0]
    near = _near(found)
    multiples, bounded = np.rint(found[near]) / 128, significands[near]
    # candidate * multiple is the value or, where it passed 2, twice the value.
    bounded = np.where(candidate * multiples > 1.5 * bounded, 2 * bounded, bounded)
    half = 2.0**-24 * np.where(bounded >= 2, 2, 1)  # half a unit in the last place
    lowest = float(((bounded - half) / multiples).max())
    highest = float(((bounded + half) / multiples).min())
    middle = np.float32((lowest + highest) / 2)
    choices = [middle]
    for direction in (np.float32(0), np.float32(4)):
        choice = middle
        for _ in range(2):
            choice = np.nextafter(choice, direction)
            choices.append(choice)
    # Any exponent serves for the trial; 1 keeps quotients and products normal.
    shares = [_matches(samples, choice) for choice in choices]
    best = int(np.argmax(shares))
    return choices[best] if shares[best] >= _MATCHES else None
