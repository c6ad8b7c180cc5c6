"""Replay of twelve real steps of a GPT, recorded while it trained."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import bit_equal
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import gradient_layout
from stepwell.pipeline.replay import BlockedReplay
from stepwell.pipeline.update import GroupEncoder, UpdateRecord, class_name_of, environment_of


def gradient_bytes(layout: Layout, gradients: dict[int, Tensor]) -> list[np.ndarray]:
    """Chunk buffers, read-only as a mapped pack is."""
    buffers = []
    for chunk in layout.chunks:
        buffer = np.zeros(chunk.size_bytes, dtype=np.uint8)
        for piece in chunk.pieces:
            gradient = gradients.get(piece.tensor)
            if gradient is not None:
                raw = gradient.contiguous().reshape(-1)[piece.start : piece.stop].view(torch.uint8).numpy()
                buffer[piece.offset_bytes : piece.offset_bytes + raw.size] = raw
        buffer.flags.writeable = False
        buffers.append(buffer)
    return buffers


def test_real_trajectory() -> None:
    """Twelve real steps of a GPT: clipped gradients, a schedule, weight decay on matrices only."""
    path = Path(__file__).resolve().parents[3] / "shared" / "data" / "trajectory_small.npz"
    if not path.exists():
        pytest.skip("the recorded trajectory is not here")
    data = np.load(path)
    names = sorted({key.split("|")[0] for key in data.files if "|" in key})
    steps = data["steps"]
    parameters = {name: nn.Parameter(torch.from_numpy(data[f"{name}|w"][0].copy())) for name in names}
    groups = [
        {"params": [parameters[n] for n in names if parameters[n].ndim >= 2], "weight_decay": 0.1},
        {"params": [parameters[n] for n in names if parameters[n].ndim < 2], "weight_decay": 0.0},
    ]
    order = [names.index(n) for n in names if parameters[n].ndim >= 2]
    rest = [names.index(n) for n in names if parameters[n].ndim < 2]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=1e-3, betas=(0.9, 0.95), foreach=False
    )
    for name in names:
        optimizer.state[parameters[name]] = {
            "step": torch.tensor(float(steps[0])),
            "exp_avg": torch.from_numpy(data[f"{name}|m"][0].copy()),
            "exp_avg_sq": torch.from_numpy(data[f"{name}|v"][0].copy()),
        }
    specs = [TensorSpec(n, tuple(parameters[n].shape), "float32", Kind.WEIGHT, "o:0") for n in names]
    layout = gradient_layout(specs, chunk_bytes=1 << 20)
    encoder = GroupEncoder("o", [rows for rows in (order, rest) if rows])
    weights = {name: parameters[name].detach().clone() for name in names}
    state = {name: copy.deepcopy(optimizer.state[parameters[name]]) for name in names}
    records, buffers = [], []
    for k in range(1, len(steps)):
        norm = torch.tensor(data["grad_norm_before_step"][k])
        factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        for group in optimizer.param_groups:
            group["lr"] = float(data["lr_of_step"][k])
        for name in names:
            parameters[name].grad = torch.from_numpy(data[f"{name}|g"][k].copy()).mul_(factor)
        records.append(
            UpdateRecord(
                0,
                class_name_of(torch.optim.AdamW),
                encoder.encode(optimizer.param_groups),
                (),
                None,
                None,
                environment_of("cpu"),
            )
        )
        buffers.append(gradient_bytes(layout, {i: parameters[n].grad for i, n in enumerate(names)}))
        optimizer.step()
    blocked = BlockedReplay(torch.optim.AdamW, weights, state, layout, records, block_elements=65536)
    for part in range(len(layout.chunks)):
        blocked.run_chunk(part, [update[part] for update in buffers])
    blocked.finish()
    for name in names:
        assert bit_equal(weights[name], parameters[name].detach())
        for key, value in optimizer.state[parameters[name]].items():
            assert bit_equal(state[name][key], value), f"{name} {key}"
