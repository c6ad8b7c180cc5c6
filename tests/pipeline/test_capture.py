"""Capture at a save: gradients where they do, the state where they do not, and always why."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from capture_rig import HeldCopier, Memory, Snapshot, assert_same, one_torch_thread, replay, small_model
from torch import nn

from stepwell.errors import DeadlineError, IntegrityError, NoSpaceError, UnsupportedValueError, UsageError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import bit_equal, bytes_to_tensor
from stepwell.pipeline.capture import BREAKS_IN_A_ROW, Capture, CaptureStage
from stepwell.pipeline.captured import CapturedSave, SaveKind, StateCopy, room_for_base
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.pack import HEADER_BYTES, PackIdentity, PackKind, finish_region
from stepwell.pipeline.state_ranges import state_order

__all__ = ["one_torch_thread"]  # used by pytest


class Net(nn.Module):
    """A bit of everything: shared weights, buffers, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.target = nn.Linear(6, 2)
        self.target.requires_grad_(False)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.tied(self.norm(self.first(x)).tanh())) + self.target(x)


class Run:
    """A training run with a capture; replays every gradient save over what it knows."""

    def __init__(self, model=None, optimizer=None, extra=None, **options) -> None:
        self.model = model or Net()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer or torch.optim.AdamW(trained, lr=0.01)
        self.live = LiveState(self.model, self.optimizer, extra)
        self.memory = Memory()
        options.setdefault("stall_limit_s", 0.0)
        self.capture = Capture(
            self.live, reserve=self.memory.reserve, recycle=self.memory.recycle, chunk_bytes=1024, **options
        )
        self.base: Snapshot | None = None
        self.step = 0

    @property
    def optimizers(self):
        return [ref.optimizer for ref in self.live.optimizers]

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(torch.randn(5, 6)).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def take(self, **options) -> CapturedSave:
        self.step += 1
        save = self.capture.take(self.step, **options)
        save.wait(10)
        self.check(save)
        return save

    def check(self, save: CapturedSave) -> None:
        """Compare everything the save says with the live state."""
        now = self.snapshot()
        whole = self.live.collect()
        for copy in (save.state, save.base):
            if copy is not None:
                assert_holds(copy, whole)
                assert copy.tree == whole.tree
        if save.kind is SaveKind.GRADIENT:
            assert_same(replay(self.base, save.updates, self.optimizers), now)
            assert_holds(save.aux, self.live.collect_aux())
        self.base = now

    def snapshot(self) -> Snapshot:
        import copy

        parameters = [[p for g in o.param_groups for p in g["params"]] for o in self.optimizers]
        return Snapshot(
            [[p.detach().clone() for p in ps] for ps in parameters],
            [
                [copy.deepcopy(dict(o.state.get(p, {}))) for p in ps]
                for o, ps in zip(self.optimizers, parameters, strict=True)
            ],
        )

    def close(self) -> None:
        self.capture.close(10)


def tensor_of(copy: StateCopy, name: str) -> torch.Tensor:
    layout = copy.memory.layout
    index = layout.index_of[name]
    spec, offset = layout.tensors[index], layout.tensor_offsets[index]
    return bytes_to_tensor(copy.memory.run[offset : offset + spec.size_bytes], spec.dtype, spec.shape)


def assert_holds(copy: StateCopy, collected) -> None:
    for spec, tensor in zip(collected.specs, collected.tensors, strict=True):
        assert bit_equal(tensor_of(copy, spec.name), tensor.detach().contiguous()), spec.name


@pytest.fixture
def runs():
    made, saves = [], []

    def make(*args, **options) -> Run:
        made.append(Run(*args, **options))
        take = made[-1].capture.take

        def taken(*args, **options):
            saves.append(take(*args, **options))
            return saves[-1]

        made[-1].capture.take = taken
        return made[-1]

    yield make
    for save in saves:
        save.release()
    for run in made:
        run.close()


async def chunks_of(save, **options):
    return [chunk async for chunk in CaptureStage(**options).chunks(save)]


def test_first_save_is_a_base_and_the_following_are_gradients(runs):
    run = runs()
    save = run.take()
    assert (save.kind, save.reason) == (SaveKind.BASE_ONLY, "this is the first save")
    assert save.updates == ()
    for _ in range(5):
        save.release()
        run.update()
        save = run.take()
        assert (save.kind, save.reason, save.base) == (SaveKind.GRADIENT, None, None)
        assert len(save.updates) == 1
        assert save.updates_begun == run.capture.updates_begun


def test_base_comes_beside_the_differential_never_in_its_place(runs):
    run = runs()
    run.take()
    for _ in range(3):
        run.update()
        save = run.take(base=True)
        assert save.kind is SaveKind.GRADIENT
        assert save.base is not None
        save.release()


def test_saves_without_any_update_between_them(runs):
    run = runs()
    run.take()
    save = run.take()
    assert save.kind is SaveKind.GRADIENT
    assert save.updates == ()


def test_what_was_captured_stays_when_training_writes_everywhere(runs):
    run = runs(extra={"ema": torch.ones(50)})
    run.take()
    run.update()
    save = run.take(base=True)
    kept = [copy.memory.run.copy() for copy in (save.aux, save.base)]
    gradients = save.updates[0].memory.run.copy()
    with torch.no_grad():
        for tensor in run.live.collect().tensors:
            tensor.copy_(torch.zeros_like(tensor))
    run.live.extra["ema"].add_(1)
    run.update()
    assert np.array_equal(save.aux.memory.run, kept[0])
    assert np.array_equal(save.base.memory.run, kept[1])
    assert np.array_equal(save.updates[0].memory.run, gradients)


def test_base_in_its_region_becomes_a_pack_in_place(runs):
    run = runs()
    run.update()
    save = run.take()
    identity = PackIdentity(PackKind.BASE, "run", "000001-0000000000000000", 1, 0, 1)
    header = {"tree": save.base.tree}
    packed = finish_region(save.base.region.payload, identity, header, save.base.layout)
    assert save.base.head_bytes == HEADER_BYTES
    assert packed.size_bytes <= save.base.region.size_bytes == room_for_base(save.base.layout, save.base.tree)


def test_memory_is_reused_save_after_save(runs):
    run = runs()
    run.take().release()
    for _ in range(8):
        run.update()
        run.take().release()
    assert len(run.memory.reserved) == 3 + 1, "three slots and one base"
    assert len(run.capture._aux_free) == 1


async def test_stage_yields_updates_then_aux_over_slot_memory(runs):
    run = runs()
    run.take()
    run.update()
    run.update()
    save = run.take()
    chunks = await chunks_of(save)
    layout = save.updates[0].layout
    parts = len(layout.chunks)
    keys = [f"update/{u}/{p}" for u in range(2) for p in range(parts)]
    keys += [f"aux/{p}" for p in range(len(save.aux.layout.chunks))]
    assert [chunk.key for chunk in chunks] == keys
    first = chunks[0]
    assert (first.kind, first.update, first.part, first.layout) == (Kind.GRADIENT, 0, 0, layout.hash)
    assert first.raw_bytes == first.buffer.nbytes
    assert np.shares_memory(first.buffer, save.updates[0].memory.run)
    assert chunks[-1].update == -1
    assert {c.layout for c in chunks} == {one.hash for one in save.layouts}
    assert CaptureStage.name == "capture"
    with pytest.raises(UsageError):
        await chunks_of(object())


async def test_chunks_without_any_gradient_are_left_out(runs):
    model = nn.ModuleDict({"used": nn.Linear(6, 2), "spare": nn.Linear(300, 3)})
    model.forward = lambda x: model["used"](x)
    run = runs(model)
    run.take()
    run.update()
    save = run.take()
    chunks = [c for c in await chunks_of(save) if c.update == 0]
    assert 0 < len(chunks) < len(save.updates[0].layout.chunks)
    assert save.updates[0].record.missing == (2, 3)


async def test_stage_waits_for_background_copies_without_blocking_the_loop(runs):
    run = runs()
    run.capture._copier = run.capture.tap.copier = copier = HeldCopier()
    run.capture.take(0)
    for step in range(1, 3):
        run.update()
        run.capture.take(step).release()
    run.update()
    save = run.capture.take(3)
    assert save.pending()
    with pytest.raises(DeadlineError):
        await chunks_of(save, ready_timeout_s=0.01)
    with pytest.raises(DeadlineError):
        save.wait(0.01)
    reading = asyncio.ensure_future(chunks_of(save))
    await asyncio.sleep(0)
    assert not reading.done()
    thread = threading.Thread(target=copier.run)
    thread.start()
    assert await reading
    thread.join()


async def test_torn_gradient_is_not_saved_and_the_next_save_is_a_base(runs):
    run = runs()
    run.capture._copier = run.capture.tap.copier = copier = HeldCopier()
    run.capture.take(0)
    for step in range(1, 3):
        run.update()
        run.capture.take(step).release()
    run.update()
    save = run.capture.take(3)
    run.model.last.weight.grad.zero_()
    copier.run()
    assert "model/last.weight" in save.broken
    with pytest.raises(IntegrityError, match=r"step 3, update 0: torn.*not saved"):
        await chunks_of(save)
    run.update()
    assert "torn" in run.capture.why_base
    late = run.take()
    assert late.kind is SaveKind.BASE_ONLY
    assert "torn" in late.reason
    run.update()
    after = run.take()
    assert after.kind is SaveKind.GRADIENT
    assert not after.updates[0].by_reference


def test_parameters_changed_outside_lead_to_a_base(runs):
    run = runs()
    run.take()
    run.update()
    with torch.no_grad():
        run.model.last.weight.mul_(2)
    save = run.take()
    assert save.kind is SaveKind.BASE_ONLY
    assert "model/last.weight changed without an update" in save.reason
    run.update()
    assert run.take().kind is SaveKind.GRADIENT


def test_ema_swap_before_every_save_ends_in_state_capture(runs):
    run = runs()
    run.take().release()
    for n in range(BREAKS_IN_A_ROW + 2):
        run.update()
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(1.0)
        save = run.take()
        save.release()
        assert save.kind is (SaveKind.BASE_ONLY if n < BREAKS_IN_A_ROW else SaveKind.STATE)
    assert "3 saves in a row" in run.capture.why_state
    assert run.capture.mode == "state"


def test_more_updates_than_slots_lead_to_a_base_then_to_state_capture(runs):
    run = runs(stall_limit_s=30.0)  # slots come back when the copier has let go of them
    run.take().release()
    kinds = []
    for _ in range(BREAKS_IN_A_ROW + 2):
        for _ in range(5):
            run.update()
        save = run.take()
        kinds.append(save.kind)
        assert "more updates between saves" in save.reason
        save.release()
    assert kinds == [SaveKind.BASE_ONLY] * BREAKS_IN_A_ROW + [SaveKind.STATE] * 2


def test_frozen_parameters_are_saved_from_the_first_change_on(runs):
    run = runs()
    run.take()
    run.update()
    assert "model/target.weight" not in run.take().aux.layout.index_of
    for n in range(3):
        run.update()
        if n == 0:
            with torch.no_grad():
                run.model.target.weight.lerp_(run.model.last.weight, 0.1)
        save = run.take()
        assert save.kind is SaveKind.GRADIENT
        assert bit_equal(tensor_of(save.aux, "model/target.weight"), run.model.target.weight.detach())
        save.release()


def test_lbfgs_is_saved_as_state(runs):
    model = small_model()
    model.forward = lambda x: nn.Sequential.forward(model, torch.cat([x, x[:, :3]], 1))
    run = runs(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def closure():
        run.optimizer.zero_grad()
        loss = run.model(torch.ones(5, 6)).square().sum()
        loss.backward()
        return loss

    for n in range(4):
        run.optimizer.step(closure)
        save = run.take(base=n == 2)
        assert save.kind is SaveKind.STATE
        assert "LBFGS" in save.reason
        assert (save.base is not None) == (n == 2)
        save.release()


async def test_state_mode_and_its_base(runs):
    run = runs(mode="state")
    assert run.capture.mode == "state"
    assert run.memory.reserved == []
    for n in range(5):
        run.update()
        save = run.take(base=n % 2 == 0)
        assert save.kind is SaveKind.STATE
        assert save.updates == ()
        assert save.aux is None
        chunks = await chunks_of(save)
        assert [c.key for c in chunks] == [f"state/{p}" for p in state_order(save.state.layout)]
        if save.base is not None:
            assert np.array_equal(save.base.memory.run, save.state.memory.run)
        save.release()


def test_state_slots_grow_with_the_state(runs):
    run = runs(mode="state")
    run.take().release()
    small = run.capture.memory_bytes
    run.update()
    for _ in range(4):
        run.take().release()
    assert run.capture.memory_bytes > small


def test_compiled_step_is_saved_as_state(runs):
    run = runs()
    run.take()
    run.capture.tap.taps[0]._begin((run.optimizer,), {}, True)
    run.capture.tap.taps[0]._end()
    save = run.take()
    assert save.kind is SaveKind.STATE
    assert "compiled" in save.reason


def test_save_in_the_middle_of_accumulation_is_refused_and_costs_nothing(runs):
    run = runs()
    run.take()
    run.update()
    run.model(torch.randn(5, 6)).sum().backward()
    with pytest.raises(UsageError, match="accumulation"):
        run.take()
    run.optimizer.step()
    save = run.take()
    assert save.kind is SaveKind.GRADIENT
    assert len(save.updates) == 2


def test_value_that_cannot_be_saved_is_named_and_nothing_is_kept(runs):
    extra = {"note": 1}
    run = runs(extra=extra)
    run.take()
    run.update()
    extra["note"] = object()
    with pytest.raises(UnsupportedValueError, match="note"):
        run.take()
    extra["note"] = 2
    assert run.capture.tap._pool.free_count == 3
    run.update()
    save = run.take()
    assert save.kind is SaveKind.BASE_ONLY
    assert "could not be captured" in save.reason


def test_no_room_for_a_base_does_not_cost_the_differential(runs):
    run = runs()
    run.take()
    run.update()
    run.memory.limit = 0
    save = run.take(base=True)
    assert save.kind is SaveKind.GRADIENT
    assert save.base is None
    assert isinstance(save.base_error, NoSpaceError)
    with torch.no_grad():
        run.model.last.bias.add_(1)
    with pytest.raises(NoSpaceError):
        run.take()
    run.memory.limit = 100
    run.update()
    assert run.take().kind is SaveKind.BASE_ONLY


def test_state_slots_all_in_use_is_a_deadline_not_a_hang(runs):
    run = runs(mode="state", slots=2)
    held = [run.take(), run.take()]
    with pytest.raises(DeadlineError, match="none of 2 capture slots"):
        run.take()
    held[0].release()
    held[0].release()
    assert run.take().kind is SaveKind.STATE


def test_restored_run_goes_on_without_a_base(runs):
    run = runs()
    collected = run.live.collect()
    run.live.load(collected)
    run.capture.rebase()
    run.base = run.snapshot()
    run.update()
    save = run.take()
    assert (save.kind, save.reason) == (SaveKind.GRADIENT, None)


def test_chain_broken_elsewhere_and_failed_proof(runs):
    run = runs()
    run.take()
    run.update()
    run.capture.break_chain("step 1 was lost")
    save = run.take()
    assert (save.kind, save.reason) == (SaveKind.BASE_ONLY, "step 1 was lost")
    assert run.capture.tap._pool.free_count == 3, "its slots are free at once"
    run.update()
    run.capture.use_state("the proof failed")
    save = run.take()
    assert (save.kind, save.reason) == (SaveKind.STATE, "the proof failed")


def test_regrouped_parameters_are_followed(runs):
    run = runs()
    run.take()
    run.update()
    held = run.take()
    kept = held.updates[0].memory.run.copy()
    begun = run.capture.updates_begun
    run.model.target.requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.model.target.parameters()), "lr": 0.5})
    run.update()
    save = run.take()
    assert save.kind is SaveKind.BASE_ONLY
    assert "regrouped" in save.reason
    assert np.array_equal(held.updates[0].memory.run, kept), "slots in use are left alone"
    assert run.capture.updates_begun > begun
    for _ in range(3):
        run.update()
        save = run.take()
        assert save.kind is SaveKind.GRADIENT
        assert len(save.updates[0].record.groups) == 2
        save.release()


def test_two_optimizers_one_gradient_layout_each(runs):
    model = Net()
    optimizers = {
        "body": torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        "head": torch.optim.AdamW([*model.norm.parameters(), *model.last.parameters()], lr=0.1),
    }
    run = runs(model, optimizers)
    run.take()
    for _ in range(4):
        run.update()
        save = run.take()
        assert [u.record.optimizer for u in save.updates] == [0, 1]
        assert len({u.layout.hash for u in save.updates}) == 2
        save.release()


def test_overlapping_parameters_mean_state_capture(runs):
    memory = torch.zeros(20)
    model = nn.ParameterDict({"a": nn.Parameter(memory[:12]), "b": nn.Parameter(memory[8:])})
    model.forward = lambda x: (model["a"].sum() + model["b"].sum()) * x
    run = runs(model)
    assert "share memory" in run.capture.why_state


def test_large_extra_tensors_are_reported(runs):
    run = runs(extra={"ema": {"w": torch.ones(1000)}})
    run.take()
    assert run.take().extra_bytes == 4000


def test_eager_digest_is_taken_at_the_save(runs):
    run = runs(eager_digest=lambda: "digest of now")
    assert run.take().digest == "digest of now"


def test_blocked_time_is_counted(runs):
    now = iter(range(100_000))
    run = runs(clock=lambda: float(next(now)))
    run.take()
    run.update()
    assert run.capture.tap.blocked_s > 0
    assert run.capture.tap.waited_s == 0


def test_python_work_per_save_does_not_grow_with_the_number_of_tensors(runs, monkeypatch):
    from stepwell.pipeline.slots import LayoutMemory

    calls = {"foreach": 0, "views": 0}
    foreach, made = torch._foreach_copy_, LayoutMemory.__init__

    def counted(*args, **options):
        calls["foreach"] += 1
        return foreach(*args, **options)

    def making(*args, **options):
        calls["views"] += 1
        return made(*args, **options)

    model = nn.Module()
    for number in range(300):
        model.register_parameter(f"p{number}", nn.Parameter(torch.ones(4)))
    model.forward = lambda x: torch.stack(list(model.parameters())).sum() * x
    run = runs(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    run.take().release()
    for _ in range(5):
        run.update()
        run.take().release()
    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    monkeypatch.setattr(LayoutMemory, "__init__", making)
    run.update()
    save = run.capture.take(99)
    save.wait(10)
    assert calls["foreach"] <= len(save.updates[0].layout.chunks) + len(save.aux.layout.chunks)
    assert calls["views"] == 0
