"""Pipelines by name: each a plain list of stages, as a person could write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["PRESETS"]

_END = ("shard", "replicate", "commit")

PRESETS: Mapping[str, Sequence[object]] = {
    # Gradients as they are: 3.3 bytes per parameter and save, 1.4 where they are bfloat16 values; exact.
    "exact": ({"capture": "gradient"}, {"delta": "none"}, {"quantize": "none"}, {"sparsify": "none"}, *_END),
    # Gradients in 8 bits, the residual carried: about 1 byte; no bound is known through Adam.
    "compact": (
        {"capture": "gradient"},
        {"delta": "none"},
        {"quantize": "int8"},
        {"sparsify": "none"},
        *_END,
    ),
    # TierCheck: differences of states, small tensors in 8 bits, of large weights what exceeds a threshold.
    "tiercheck": (
        {"capture": "state"},
        {"delta": "difference"},
        {"quantize": "adaptive"},
        {"sparsify": "adaptive"},
        *_END,
    ),
    # FastCheck: differences of weights, momentum as indices into codebooks, variances by their logarithm.
    "fastcheck": (
        {"capture": "state"},
        {"delta": "difference"},
        {"quantize": {"weight": "int8", "momentum": "codebook", "variance": "log_quant"}},
        {"sparsify": "none"},
        *_END,
    ),
}
