"""What the capture tests share: regions of anonymous memory, and a replay of its own making."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from stepwell.errors import NoSpaceError
from stepwell.pipeline.bits import bit_equal, bytes_to_tensor
from stepwell.pipeline.copier import Copier
from stepwell.pipeline.gradients import GradientTap, TapTarget
from stepwell.pipeline.private import private_optimizer, raw_step
from stepwell.pipeline.tapped import TappedUpdate


class MemoryRegion:
    """Anonymous memory full of rubbish, as recycled memory is."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self._map.write(b"\xa5" * size_bytes)
        self.payload = memoryview(self._map)
        self.size_bytes = size_bytes


@dataclass
class Memory:
    """Counts regions, and refuses more than `limit`."""

    limit: int = 1000
    reserved: list[MemoryRegion] = field(default_factory=list)
    recycled: list[object] = field(default_factory=list)

    def reserve(self, size_bytes: int) -> MemoryRegion:
        if len(self.reserved) - len(self.recycled) >= self.limit:
            raise NoSpaceError(f"{size_bytes} bytes needed")
        self.reserved.append(MemoryRegion(size_bytes))
        return self.reserved[-1]

    def recycle(self, region: object) -> None:
        assert region not in self.recycled
        assert region in self.reserved
        self.recycled.append(region)


class HeldCopier(Copier):
    """A copier that copies only when told, so that tests decide who is first."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[tuple[Callable[[], None], object]] = []

    def submit(self, work):
        from concurrent.futures import Future

        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self.works.append((work, future))
        return future

    def run(self) -> None:
        works, self.works = self.works, []
        for work, future in works:
            work()
            future.set_result(None)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 13, bias=False), nn.Linear(13, 3))


@dataclass
class Snapshot:
    """Parameters and optimizer states by value, in the taps' order."""

    parameters: list[list[torch.Tensor]]
    states: list[list[dict[str, object]]]


class Rig:
    """A model in training, tapped."""

    def __init__(self, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], **options) -> None:
        self.model = model
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self.memory = Memory()
        self.copier = options.pop("copier", None) or Copier()
        names = {id(p): f"model/{n}" for n, p in model.named_parameters()}
        targets = [
            TapTarget(
                f"optim.{i}", o, tuple(tuple(names[id(p)] for p in g["params"]) for g in o.param_groups)
            )
            for i, o in enumerate(self.optimizers)
        ]
        options.setdefault("stall_limit_s", 0.0)
        options.setdefault("chunk_bytes", 1024)
        self.tap = GradientTap(
            targets, reserve=self.memory.reserve, recycle=self.memory.recycle, copier=self.copier, **options
        )
        self.base = self.snapshot()
        self.generator = torch.Generator().manual_seed(1)

    def close(self) -> None:
        self.copier.close(10)
        self.tap.close()
        assert len(self.memory.recycled) == len(self.memory.reserved), "every region goes back"

    def backward(self) -> None:
        x = torch.randn(5, 9, generator=self.generator)
        self.model(x).square().sum().backward()

    def update(self, which: int = 0, *, set_to_none: bool = True) -> None:
        self.optimizers[which].zero_grad(set_to_none=set_to_none)
        self.backward()
        self.optimizers[which].step()

    def snapshot(self) -> Snapshot:
        parameters = [[p.detach().clone() for p in tap.parameters] for tap in self.tap.taps]
        states = [
            [copy.deepcopy(dict(tap.optimizer.state.get(p, {}))) for p in tap.parameters]
            for tap in self.tap.taps
        ]
        return Snapshot(parameters, states)

    def save(self):
        """End the interval, replay it over the last save, and compare with the live state."""
        interval = self.tap.take()
        assert interval.broken is None, interval.broken
        replayed = replay(self.base, interval.updates, self.optimizers)
        for slot in interval.slots:
            slot.release()
        self.base = self.snapshot()
        assert_same(replayed, self.base)
        return interval


def gradients_of(update: TappedUpdate) -> list[torch.Tensor | None]:
    update.wait(10)
    assert update.torn is None, update.torn
    layout, found = update.layout, []
    for index, (spec, offset) in enumerate(zip(layout.tensors, layout.tensor_offsets, strict=True)):
        data = update.memory.run[offset : offset + spec.size_bytes]
        if index in update.record.missing:
            assert not data.any(), "what is missing is zero"
            found.append(None)
        else:
            found.append(bytes_to_tensor(data, spec.dtype, spec.shape).clone())
    return found


def replay(base: Snapshot, updates: Sequence[TappedUpdate], optimizers: Sequence[Optimizer]) -> Snapshot:
    parameters = [[p.clone() for p in ps] for ps in base.parameters]
    states = [
        {p: copy.deepcopy(s) for p, s in zip(ps, ss, strict=True) if s}
        for ps, ss in zip(parameters, base.states, strict=True)
    ]
    for update in updates:
        record = type(update.record).from_json(update.record.to_json())
        assert record == update.record
        which = record.optimizer
        groups = record.decoded_groups()
        for group in groups:
            group["params"] = [parameters[which][i] for i in group["params"]]
        for p, gradient in zip(parameters[which], gradients_of(update), strict=True):
            p.grad = gradient
        cls = type(optimizers[which])
        private = private_optimizer(cls, groups, states[which])
        for key in ("grad_scale", "found_inf"):
            value = getattr(record, f"decoded_{key}")()
            if value is not None:
                setattr(private, key, value)
        raw_step(cls)(private)
        states[which] = dict(private.state)
    return Snapshot(
        parameters, [[s.get(p, {}) for p in ps] for ps, s in zip(parameters, states, strict=True)]
    )


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    for a, b in zip(found.parameters, wanted.parameters, strict=True):
        assert all(bit_equal(x, y) for x, y in zip(a, b, strict=True))
    for a, b in zip(found.states, wanted.states, strict=True):
        for x, y in zip(a, b, strict=True):
            assert list(x) == list(y)
            for key in x:
                if isinstance(x[key], torch.Tensor):
                    assert bit_equal(x[key], y[key]), key
                else:
                    assert x[key] == y[key]
