"""Bases copied while training goes on: the bits of the save, or no base and a reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from capture_rig import Memory, one_torch_thread
from torch import nn

from stepwell.errors import IntegrityError
from stepwell.pipeline import overlap
from stepwell.pipeline.bits import bit_equal, bytes_to_tensor
from stepwell.pipeline.capture import Capture
from stepwell.pipeline.captured import CapturedSave, SaveKind
from stepwell.pipeline.copier import Copier
from stepwell.pipeline.digest import Digest, digest_layout
from stepwell.pipeline.layout import Layout
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.overlap import check_weights
from stepwell.pipeline.plan import plan_layout

__all__ = ["one_torch_thread"]  # used by pytest


class GatedCopier(Copier):
    """Copies as usual, but nothing before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        def gated() -> None:
            self.waiting.set()
            assert self.gate.wait(30)
            work()

        return super().submit(gated)


class Run:
    """A run in which every tensor is large enough to be copied later."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.live = LiveState(self.model, self.optimizer, {"ema": torch.ones(500)})
        memory = Memory()
        self.capture = Capture(self.live, reserve=memory.reserve, recycle=memory.recycle, stall_limit_s=5.0)
        self.copier = self.capture._copier = self.capture.tap.copier = GatedCopier()
        self.step = 0
        self.saves: list[CapturedSave] = []
        self.take()
        for _ in range(3):  # probation
            self.update()
            self.take().wait(10)

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 40)).square().sum().backward()
        self.optimizer.step()

    def take(self, **options) -> CapturedSave:
        self.step += 1
        for save in self.saves:
            save.wait(10)
            save.release()
        self.saves.append(self.capture.take(self.step, **options))
        return self.saves[-1]

    def state(self) -> dict[str, torch.Tensor]:
        collected = self.live.collect()
        pairs = zip(collected.specs, collected.tensors, strict=True)
        return {spec.name: tensor.detach().clone() for spec, tensor in pairs}

    def close(self) -> None:
        self.copier.gate.set()
        for save in self.saves:
            save.release()
        self.capture.close(10)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "OVERLAP_BYTES_MIN", 1)
    made = Run()
    yield made
    made.close()


def held(save: CapturedSave) -> dict[str, torch.Tensor]:
    memory = save.base.memory
    layout = memory.layout
    return {
        spec.name: bytes_to_tensor(memory.run[start : start + spec.size_bytes], spec.dtype, spec.shape)
        for spec, start in zip(layout.tensors, layout.tensor_offsets, strict=True)
    }


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert bit_equal(found[name], tensor.contiguous()), name


def overlapped(run: Run) -> CapturedSave:
    """Take a base beside a differential, and let its copy begin only when told."""
    run.update()
    run.copier.gate.clear()
    run.copier.waiting.clear()
    save = run.take(base=True)
    assert save.kind is SaveKind.GRADIENT
    assert save.base.overlapped
    assert not save.base.ready.done()
    return save


def test_next_update_waits_for_the_copy_and_the_base_is_that_of_the_save(run: Run):
    save = overlapped(run)
    wanted = run.state()
    updating = threading.Thread(target=run.update)
    before_s = run.capture.tap.blocked_s
    updating.start()
    assert run.copier.waiting.wait(10)
    updating.join(0.05)
    assert updating.is_alive(), "the update must not begin before the copy has ended"
    run.copier.gate.set()
    updating.join(30)
    save.base.ready.result(10)
    assert_same(held(save), wanted)
    assert not bit_equal(run.model[0].weight.detach(), wanted["model/0.weight"]), "it did go on"
    assert run.capture.tap.blocked_s > before_s, "that wait counts as blocked"


def test_what_forward_changes_is_copied_at_the_save(run: Run):
    save = overlapped(run)
    wanted = run.state()
    run.model(torch.randn(5, 40))  # moves BatchNorm's statistics
    assert not bit_equal(run.model[1].running_mean, wanted["model/1.running_mean"])
    run.copier.gate.set()
    save.base.ready.result(10)
    assert_same(held(save), wanted)


def write_in_place(run: Run) -> None:
    with torch.no_grad():
        run.model[0].weight[3].zero_()


def write_past_the_version(run: Run) -> None:
    run.model[0].weight.data.mul_(2)


def write_moments_past_the_version(run: Run) -> None:
    run.optimizer.state[run.model[0].weight]["exp_avg"].data.fill_(1.0)


@pytest.mark.parametrize("write", [write_in_place, write_past_the_version, write_moments_past_the_version])
def test_base_that_somebody_wrote_into_is_given_up_and_later_ones_are_copied_at_once(run: Run, write):
    save = overlapped(run)
    write(run)
    run.copier.gate.set()
    with pytest.raises(IntegrityError, match=rf"base of step {save.step} was given up"):
        save.base.ready.result(10)
    assert all(update.torn is None for update in save.updates), "the differential stays"
    run.update()
    later = run.take(base=True)
    assert not later.base.overlapped
    wanted = run.state()
    assert_same(held(later), wanted)


def test_parameter_given_other_memory_leaves_the_base_as_it_was_at_the_save(run: Run):
    save = overlapped(run)
    wanted = run.state()
    weight = run.model[0].weight
    weight.data = torch.zeros_like(weight)
    run.copier.gate.set()
    save.base.ready.result(10)
    assert_same(held(save), wanted)


def digest_of(run: Run) -> tuple[Layout, Digest]:
    layout = plan_layout(run.live.parameter_specs)
    weights = {ref.name: ref.tensor for ref in run.live.parameters}
    return layout, Digest("xxh3-64", layout.hash, tuple(digest_layout(layout, weights)))


@pytest.mark.parametrize("place", [701, -1])
def test_one_element_written_past_the_version_shows_in_the_digest(run: Run, place: int):
    save = overlapped(run)
    layout, digest = digest_of(run)
    run.model[0].weight.data.view(-1)[place] += 1
    run.copier.gate.set()
    save.base.ready.result(10)  # none of the remembered elements
    with pytest.raises(IntegrityError, match="given up"):
        check_weights(save.step, save.base.memory, layout, digest)


def test_untouched_base_matches_the_digest_also_in_part(run: Run):
    save = overlapped(run)
    layout, digest = digest_of(run)
    run.copier.gate.set()
    save.base.ready.result(10)
    check_weights(save.step, save.base.memory, layout, digest)
    run.update()
    _, later = digest_of(run)
    holes = Digest("xxh3-64", layout.hash, tuple(None for _ in later.values))
    check_weights(save.step, save.base.memory, layout, holes)
    with pytest.raises(IntegrityError, match="given up"):
        check_weights(save.step, save.base.memory, layout, later)


def test_base_alone_and_small_tensors_are_copied_at_the_save(monkeypatch: pytest.MonkeyPatch):
    made = Run()
    try:
        made.update()
        made.copier.gate.set()
        save = made.take(base=True)
        save.wait(10)
        assert_same(held(save), made.state())
        made.capture.break_chain("told so")
        made.update()
        made.copier.gate.clear()
        alone = made.take()
        assert alone.kind is SaveKind.BASE_ONLY
        assert not alone.base.overlapped
        assert_same(held(alone), made.state())
    finally:
        made.close()
