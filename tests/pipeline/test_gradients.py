"""The gradient tap: what it captures replays bit for bit, and what would not, it says."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from capture_rig import HeldCopier, Rig, assert_same, gradients_of, one_torch_thread, replay, small_model
from torch import nn

from stepwell.errors import UsageError
from stepwell.pipeline.probation import PROBATION_UPDATES
from stepwell.pipeline.state_watch import ENTRIES_MAX

__all__ = ["one_torch_thread"]  # used by pytest

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

OPTIMIZERS = {
    "adamw": (AdamW, {}),
    "adamw-foreach": (AdamW, {"foreach": True}),
    "adamw-fused": (AdamW, {"fused": True}),
    "adam-amsgrad": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adam-maximize": (Adam, {"maximize": True, "foreach": True}),
    "adamw-tensor-lr": (AdamW, {"lr": torch.tensor(0.01)}),
    "sgd-momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "sgd-nesterov-loop": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    "sgd-nesterov-foreach": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "sgd-fused": (SGD, {"momentum": 0.9, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.fixture
def rigs():
    made = []

    def make(*args, **options) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def rig_of(rigs, cls=AdamW, model=None, rig_options=None, **options) -> Rig:
    model = model or small_model()
    options.setdefault("lr", 0.01)
    return rigs(model, cls(model.parameters(), **options), **(rig_options or {}))


class DoublingScaler:
    """What GradScaler does around a step, on the CPU: unscales in place, or lets a fused step do it."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        bad = not all(bool(g.isfinite().all()) for g in gradients)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = torch.tensor(self.scale)
            optimizer.found_inf = torch.tensor(float(bad))
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        elif not bad:
            for gradient in gradients:
                gradient.div_(self.scale)
            optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_updates_replay_bit_for_bit(rigs, name):
    cls, options = OPTIMIZERS[name]
    rig = rig_of(rigs, cls, **options)
    held = []
    for _ in range(6):
        rig.update()
        held.append(rig.save().updates[0].by_reference)
    by_copy = name == "sgd-nesterov-foreach"
    assert held == [False, False, *[not by_copy] * 4]


def test_first_updates_are_copied_and_later_ones_held_by_reference(rigs):
    rig = rig_of(rigs)
    for n in range(5):
        rig.update()
        assert rig.tap._interval.updates[-1].by_reference == (n >= PROBATION_UPDATES)
        rig.save()
    assert rig.tap.taps[0].probation.eager is None


def test_change_of_flags_goes_back_on_probation_but_a_new_lr_does_not(rigs):
    rig = rig_of(rigs)
    seen = []
    for n in range(9):
        rig.optimizers[0].param_groups[0]["lr"] = 0.01 / (n + 1)
        if n == 5:
            rig.optimizers[0].param_groups[0]["foreach"] = True
        rig.update()
        seen.append(rig.save().updates[0].by_reference)
    assert seen == [False, False, True, True, True, False, False, True, True]


def test_held_gradients_are_released_after_the_copy(rigs):
    copier = HeldCopier()
    rig = rig_of(rigs, rig_options={"copier": copier}, model=nn.Linear(9, 3000))
    for _ in range(3):
        rig.update()
        if not copier.works:
            rig.save()
    alive = weakref.ref(rig.model.weight.grad)
    rig.optimizers[0].zero_grad()
    assert alive() is not None
    copier.run()
    assert alive() is None
    rig.save()


def test_held_gradient_written_to_while_copied_is_torn_and_said(rigs):
    copier = HeldCopier()
    rig = rig_of(rigs, rig_options={"copier": copier})
    for _ in range(2):
        rig.update()
        rig.save()
    rig.update()
    rig.model[0].weight.grad.add_(1)
    copier.run()
    update = rig.tap._interval.updates[0]
    assert "model/0.weight" in update.torn
    interval = rig.tap.take()
    assert interval.updates == ()
    assert "torn" in interval.broken
    rig.tap.rebase()
    rig.base = rig.snapshot()
    for _ in range(4):
        rig.update()
        assert not rig.save().updates[0].by_reference, "eager from then on"


def test_torn_copy_found_late_breaks_the_next_interval(rigs):
    copier = HeldCopier()
    rig = rig_of(rigs, rig_options={"copier": copier})
    for _ in range(2):
        rig.update()
        rig.save()
    rig.update()
    held = rig.tap.take()
    rig.model[0].weight.grad.add_(1)
    copier.run()
    assert held.updates[0].torn
    for slot in held.slots:
        slot.release()
    rig.optimizers[0].zero_grad()
    rig.update()
    assert "torn" in rig.tap.take().broken


def test_set_to_none_false_is_copied_eagerly(rigs):
    rig = rig_of(rigs)
    for _ in range(6):
        rig.update(set_to_none=False)
        assert not rig.save().updates[0].by_reference
    assert rig.tap.taps[0].probation.eager is not None


def test_set_to_none_false_later_on_is_noticed(rigs):
    copier = HeldCopier()
    rig = rig_of(rigs, rig_options={"copier": copier})
    for _ in range(3):
        rig.update()
        copier.run()
        rig.save()
    rig.optimizers[0].zero_grad(set_to_none=False)
    rig.update(set_to_none=False)
    assert not rig.save().updates[0].by_reference


def test_gradients_in_a_buffer_that_is_written_anew_are_copied_eagerly(rigs):
    """As DDP with gradient_as_bucket_view=True: new views, old memory."""
    model = small_model()
    sizes = [p.numel() for p in model.parameters()]
    bucket = torch.zeros(sum(sizes))
    rig = rig_of(rigs, model=model)
    for _ in range(6):
        rig.optimizers[0].zero_grad()
        rig.backward()
        with torch.no_grad():
            for p, view in zip(model.parameters(), bucket.split(sizes), strict=True):
                view.copy_(p.grad.reshape(-1))
                p.grad = view.view_as(p)
        rig.optimizers[0].step()
        assert not rig.save().updates[0].by_reference
    assert "written to" in rig.tap.taps[0].probation.eager


@pytest.mark.parametrize("bucket_view", [False, True])
def test_distributed_data_parallel_with_and_without_bucket_views(rigs, bucket_view):
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = small_model()
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        rig = rig_of(rigs, model=model)  # after wrapping, which writes into the parameters
        held = []
        for _ in range(6):
            rig.optimizers[0].zero_grad()
            wrapped(torch.randn(5, 9, generator=rig.generator)).square().sum().backward()
            rig.optimizers[0].step()
            held.append(rig.save().updates[0].by_reference)
        assert held == [False, False, *[not bucket_view] * 4]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_inf_steps(rigs, fused):
    rig = rig_of(rigs, fused=fused)
    scaler = DoublingScaler(2.0**10)
    for n in range(8):
        rig.optimizers[0].zero_grad()
        x = torch.randn(5, 9, generator=rig.generator)
        (rig.model(x).square().sum() * scaler.scale).backward()
        if n in (0, 3, 6):
            rig.model[0].weight.grad[0, 0] = torch.inf
        scaler.step(rig.optimizers[0])
        rig.tap.check_saveable()
        interval = rig.save()
        assert len(interval.updates) == (1 if fused or n not in (0, 3, 6) else 0)
        if fused:
            assert not interval.updates[0].by_reference
            assert interval.updates[0].record.decoded_found_inf().item() == float(n in (0, 3, 6))


@pytest.mark.parametrize("fused", [False, True])
def test_real_grad_scaler_on_cpu(rigs, fused):
    rig = rig_of(rigs, SGD, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
    updates = 0
    for _ in range(12):
        rig.optimizers[0].zero_grad()
        loss = rig.model(torch.randn(5, 9, generator=rig.generator)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(rig.optimizers[0])
        scaler.update()
        rig.tap.check_saveable()
        updates += len(rig.save().updates)
    assert 0 < updates <= 12


def test_closure_is_captured_at_its_end(rigs):
    rig = rig_of(rigs)

    def closure():
        rig.optimizers[0].zero_grad()
        rig.backward()
        return torch.tensor(1.0)

    for n in range(5):
        loss = rig.optimizers[0].step(closure) if n % 2 else rig.optimizers[0].step(closure=closure)
        assert loss.item() == 1.0
        assert len(rig.save().updates) == 1


def test_closure_called_more_than_once_means_state_capture(rigs):
    class Twice(SGD):
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            return super().step(closure)

    rig = rig_of(rigs, Twice)
    rig.optimizers[0].step(lambda: (rig.optimizers[0].zero_grad(), rig.backward()))
    assert "more than once" in rig.tap.take().broken
    assert rig.tap.opaque


def test_lbfgs_means_state_capture_without_any_slot(rigs):
    rig = rig_of(rigs, torch.optim.LBFGS)
    assert "LBFGS" in rig.tap.opaque
    assert rig.memory.reserved == []
    rig.optimizers[0].step(lambda: (rig.optimizers[0].zero_grad(), rig.backward(), torch.tensor(1.0))[-1])
    assert rig.tap.updates_begun == 1
    rig.tap.check_saveable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole_function", [False, True])
def test_compiled_step_means_state_capture(rigs, whole_function):
    torch._dynamo.reset()
    rig = rig_of(rigs)
    rig.update()
    rig.save()
    step = rig.optimizers[0].step
    compiled = torch.compile((lambda: step()) if whole_function else step, backend="eager")
    rig.optimizers[0].zero_grad()
    rig.backward()
    compiled()
    assert "compiled" in rig.tap.take().broken
    assert rig.tap.opaque
    assert rig.tap.updates_begun == 2


def test_differentiable_and_sparse_and_other_dtypes_mean_state_capture(rigs):
    assert "differentiable" in rig_of(rigs, SGD, differentiable=True).tap.opaque
    model = nn.Embedding(9, 3, sparse=True)
    rig = rig_of(rigs, SGD, model=model)
    model(torch.tensor([1, 2])).sum().backward()
    rig.optimizers[0].step()
    assert "not strided" in rig.tap.take().broken


def test_gradients_that_turn_sparse_while_they_are_held_are_torn_and_then_given_up(rigs):
    copier = HeldCopier()
    model = nn.Embedding(9, 3)
    rig = rigs(model, SGD(model.parameters(), lr=0.1), copier=copier)
    for _ in range(3):
        model(torch.tensor([1, 2])).sum().backward()
        rig.optimizers[0].step()
        rig.optimizers[0].zero_grad()
        interval = rig.tap.take()
        copier.run()
        for slot in interval.slots:
            slot.release()
    model.sparse = True
    model(torch.tensor([1, 2])).sum().backward()
    rig.optimizers[0].step()
    held = rig.tap.take()
    copier.run()
    assert "not strided" in held.updates[0].torn
    for slot in held.slots:
        slot.release()
    rig.optimizers[0].zero_grad()
    rig.tap.rebase()
    model(torch.tensor([1, 2])).sum().backward()
    rig.optimizers[0].step()
    assert "not strided" in rig.tap.opaque


def test_of_many_parameters_the_states_are_watched_in_turn(rigs):
    count = 2 * ENTRIES_MAX + 50
    model = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))
    rig = rig_of(rigs, Adam, model=model)

    def update() -> None:
        for parameter in model:
            parameter.grad = torch.ones(1)
        rig.optimizers[0].step()
        rig.optimizers[0].zero_grad()

    update()
    rig.optimizers[0].load_state_dict(rig.optimizers[0].state_dict())
    assert "state was replaced" in rig.tap.take().broken, "seen at once"
    reasons = []
    for _ in range(3):
        rig.tap.rebase()
        update()
        # One parameter alone: seen when its turn has come.
        rig.optimizers[0].state[model[count - 1]]["exp_avg"].zero_()
        interval = rig.tap.take()
        reasons.append(interval.broken)
        for slot in interval.slots:
            slot.release()
    assert sum(reason is not None and "written to" in reason for reason in reasons) >= 1
    rig.tap.rebase()
    update()
    for parameter in model:
        rig.optimizers[0].state[parameter]["exp_avg"].zero_()
    assert "written to" in rig.tap.take().broken, "all of them: seen at once"


def test_optimizer_whose_step_runs_no_hooks_means_state_capture(rigs):
    class Bare(SGD):
        pass

    rig_model = small_model()
    optimizer = Bare(rig_model.parameters(), lr=0.1)
    Bare.step = lambda self, closure=None: None
    rig = rigs(rig_model, optimizer)
    assert "no hooks" in rig.tap.opaque
    rig.backward()
    rig.tap.check_saveable()


def test_subclass_that_calls_its_parents_step_is_one_update(rigs):
    class Nested(AdamW):
        def step(self, closure=None):
            loss = super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.mul_(0.99)
            return loss

    rig = rig_of(rigs, Nested)
    for _ in range(4):
        rig.update()
        assert len(rig.save().updates) == 1


def test_hooks_of_the_user_registered_later_still_come_before_the_capture(rigs):
    rig = rig_of(rigs)
    rig.update()
    rig.save()

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    rig.optimizers[0].register_step_pre_hook(halve)
    for _ in range(4):
        rig.update()
        rig.save()


def test_parameters_clamped_in_a_post_hook_are_noticed_whenever_it_was_registered(rigs):
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.01)

    def clamp(optimizer, args, kwargs):
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    rig = rigs(model, optimizer)
    rig.update()
    assert "model/0.weight changed without an update" in rig.tap.take().broken


def test_parameters_changed_outside_break_the_interval(rigs):
    rig = rig_of(rigs)
    rig.update()
    rig.save()
    with torch.no_grad():
        rig.model[2].weight.mul_(0.5)
    broken = rig.tap.take().broken
    assert "model/2.weight changed without an update" in broken
    rig.tap.rebase()
    rig.base = rig.snapshot()
    with torch.no_grad():
        for p in rig.model.parameters():
            p.mul_(0.5)
    rig.update()
    assert "and 4 more" in rig.tap.take().broken
    rig.tap.rebase()
    rig.base = rig.snapshot()
    rig.update()
    rig.save()


def test_load_state_dict_by_the_user_breaks_the_interval(rigs):
    rig = rig_of(rigs)
    rig.update()
    saved = rig.optimizers[0].state_dict()
    rig.save()
    rig.optimizers[0].load_state_dict(saved)
    assert "state was replaced" in rig.tap.take().broken
    rig.tap.rebase()
    rig.base = rig.snapshot()
    rig.update()
    rig.save()
    rig.model.load_state_dict({k: v + 1 for k, v in rig.model.state_dict().items()})
    rig.update()
    assert "changed without an update" in rig.tap.take().broken


def test_cleared_state_breaks_the_interval(rigs):
    rig = rig_of(rigs)
    rig.update()
    rig.save()
    rig.optimizers[0].state.clear()
    rig.update()
    assert "state was replaced" in rig.tap.take().broken


def test_update_that_raised_breaks_the_interval(rigs):
    rig = rig_of(rigs)
    rig.update()
    rig.save()
    rig.backward()
    rig.optimizers[0].param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        rig.optimizers[0].step()
    rig.optimizers[0].param_groups[0]["betas"] = (0.9, 0.999)
    rig.optimizers[0].step()
    assert "did not end" in rig.tap.take().broken
    rig.tap.rebase()
    rig.base = rig.snapshot()
    rig.update()
    rig.save()


def test_unseen_update_breaks_the_interval(rigs):
    rig = rig_of(rigs)
    rig.update()
    rig.save()
    rig.optimizers[0].zero_grad()
    rig.backward()
    AdamW.step.__wrapped__(rig.optimizers[0])
    rig.tap.check_saveable()
    assert "changed without an update" in rig.tap.take().broken


def test_added_parameter_group_breaks_the_interval(rigs):
    rig = rig_of(rigs)
    rig.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    rig.update()
    assert "groups changed" in rig.tap.take().broken


def test_frozen_unused_and_grouped_parameters(rigs):
    model = small_model()
    model[0].bias.requires_grad_(False)
    unused = nn.Linear(4, 4)
    model.add_module("unused", nn.Identity())
    model.register_module("spare", unused)
    model._modules["spare"].forward = lambda x: x  # it is in the chain, but its parameters are not used
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[3].bias, unused.weight, model[0].bias], "lr": 0.5},
        {"params": [unused.bias]},
    ]
    rig = rigs(model, AdamW(groups, lr=0.01))
    for _ in range(5):
        rig.update()
        update = rig.save().updates[0]
        assert update.record.missing == (3, 4, 5)
        missing_parts = set(range(len(update.layout.chunks))) - set(update.parts)
        assert all(
            all(piece.tensor in (3, 4, 5) for piece in update.layout.chunks[part].pieces)
            for part in missing_parts
        )
        assert missing_parts


def test_gradient_that_comes_and_goes_leaves_no_old_bytes(rigs):
    rig = rig_of(rigs, rig_options={"slots": 1})
    for n in range(6):
        rig.optimizers[0].zero_grad()
        rig.backward()
        if n % 2:
            rig.model[0].weight.grad = None
        rig.optimizers[0].step()
        assert rig.save().updates[0].record.missing == ((0,) if n % 2 else ())


def test_two_optimizers_with_their_updates_in_order(rigs):
    model = small_model()
    a = AdamW(model[0].parameters(), lr=0.01)
    b = SGD([*model[2].parameters(), *model[3].parameters()], lr=0.1, momentum=0.9)
    rig = rigs(model, [a, b])
    for n in range(6):
        order = [0, 1] if n % 2 else [1, 0, 1]
        for which in order:
            rig.update(which)
        interval = rig.save()
        assert [u.record.optimizer for u in interval.updates] == order
        assert len(interval.slots) == (1 if n % 2 else 2), "a slot holds one update of each optimizer"


def test_parameter_in_two_optimizers_means_state_capture(rigs):
    model = small_model()
    rig = rigs(model, [SGD(model.parameters(), lr=0.1), SGD(model[0].parameters(), lr=0.1)])
    assert "model/0.weight belongs to two optimizers" in rig.tap.opaque


def test_more_updates_than_slots_break_the_interval_at_once(rigs):
    rig = rig_of(rigs, rig_options={"stall_limit_s": 60.0})
    for _ in range(3):
        rig.update()
    assert rig.tap.broken is None
    rig.update()
    assert "more updates between saves than the 3" in rig.tap.broken
    assert rig.tap._interval.slots == []
    assert rig.tap.take().updates == ()
    rig.tap.rebase()
    rig.base = rig.snapshot()
    rig.update()
    rig.save()


def test_no_free_slot_waits_for_one_and_then_gives_the_interval_up(rigs):
    rig = rig_of(rigs, rig_options={"slots": 1, "stall_limit_s": 30.0})
    rig.update()
    interval = rig.tap.take()
    releaser = threading.Thread(target=interval.slots[0].release)
    condition, wait = rig.tap._pool._condition, threading.Condition.wait

    def waiting(self, timeout=None):
        if self is condition and not releaser.is_alive() and releaser.ident is None:
            releaser.start()
        return wait(self, timeout)

    threading.Condition.wait = waiting
    try:
        rig.update()
    finally:
        threading.Condition.wait = wait
    releaser.join()
    assert rig.tap.broken is None
    assert rig.tap.waited_s > 0
    interval = rig.tap.take()
    rig.tap.stall_limit_s = 0.0
    rig.update()
    assert "no room" in rig.tap.take().broken
    interval.slots[0].release()


def test_save_in_the_middle_of_accumulation_is_refused(rigs):
    rig = rig_of(rigs)
    rig.tap.check_saveable()
    rig.backward()
    with pytest.raises(UsageError, match=r"model/0\.weight.*no update of optim\.0"):
        rig.tap.check_saveable()
    rig.backward()
    rig.optimizers[0].step()
    rig.tap.check_saveable()
    rig.save()
    rig.backward()
    with pytest.raises(UsageError, match="accumulation"):
        rig.tap.check_saveable()
    rig.optimizers[0].step()
    rig.optimizers[0].zero_grad(set_to_none=False)
    rig.tap.check_saveable()
    rig.optimizers[0].zero_grad()
    rig.tap.check_saveable()
    rig.backward()
    with pytest.raises(UsageError):
        rig.tap.check_saveable()


def test_gan_may_save_with_stale_gradients_of_the_other_half(rigs):
    model = small_model()
    rig = rigs(model, [SGD(model[0].parameters(), lr=0.1), SGD(model[3].parameters(), lr=0.1)])
    for _ in range(3):
        rig.update(0)
        rig.update(1)
        rig.tap.check_saveable()
        rig.save()


def test_gradients_accumulated_over_micro_batches(rigs):
    rig = rig_of(rigs)
    for _ in range(5):
        rig.optimizers[0].zero_grad()
        for _ in range(3):
            rig.backward()
        torch.nn.utils.clip_grad_norm_(rig.model.parameters(), 0.5)
        rig.optimizers[0].step()
        rig.tap.check_saveable()
        rig.save()


def test_schedulers_and_their_wrapped_step(rigs):
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    rig = rigs(model, optimizer)
    rates = []
    for _ in range(6):
        rig.update()
        scheduler.step()
        rates.append(rig.save().updates[0].record.decoded_groups()[0]["lr"])
    assert len(set(rates)) == 6
    assert rates[0] == 0.1


def test_tensor_lr_is_recorded_by_value(rigs):
    lr = torch.tensor(0.1)
    rig = rig_of(rigs, lr=lr)
    for _ in range(3):
        rig.update()
        lr.mul_(0.5)
    interval = rig.save()
    rates = [u.record.decoded_groups()[0]["lr"] for u in interval.updates]
    assert [r.item() for r in rates] == [pytest.approx(0.1 / 2**n) for n in range(3)]


def test_group_value_that_cannot_be_saved_means_state_capture_not_a_crash(rigs):
    rig = rig_of(rigs)
    rig.optimizers[0].param_groups[0]["callback"] = print
    rig.update()
    assert "UnsupportedValueError" in rig.tap.take().broken


def test_optimizer_in_backward(rigs):
    model = small_model()
    parameters = list(model.parameters())
    optimizers = [SGD([p], lr=0.01, momentum=0.9) for p in parameters]
    rig = rigs(model, optimizers)
    for p, o in zip(parameters, optimizers, strict=True):

        def step_now(p, o=o):
            o.step()
            o.zero_grad()

        p.register_post_accumulate_grad_hook(step_now)
    for _ in range(4):
        rig.backward()
        interval = rig.save()
        assert len(interval.updates) == len(parameters)
        assert len(interval.slots) == 1


def test_writes_through_data_pass_the_guard_but_digests_are_there_for_them(rigs):
    copier = HeldCopier()
    rig = rig_of(rigs, rig_options={"copier": copier})
    for _ in range(2):
        rig.update()
        rig.save()
    rig.update()
    rig.model[0].weight.grad.data.add_(1)
    copier.run()
    interval = rig.tap.take()
    assert interval.broken is None
    replayed = replay(rig.base, interval.updates, rig.optimizers)
    with pytest.raises(AssertionError):
        assert_same(replayed, rig.snapshot())
    for slot in interval.slots:
        slot.release()


@pytest.mark.parametrize("seed", range(20))
def test_random_writes_to_held_gradients_are_torn_or_harmless(rigs, seed):
    """Whatever the moment, an update is either right or said to be torn."""
    random = torch.Generator().manual_seed(seed)
    copier = HeldCopier()
    rig = rig_of(rigs, rig_options={"copier": copier}, fused=bool(seed % 2))
    for _ in range(6):
        rig.update()
        wanted = [p.grad.clone() for p in rig.model.parameters()]
        updates = list(rig.tap._interval.updates)
        if torch.randint(2, (), generator=random):
            copier.run()
        if torch.randint(2, (), generator=random):
            rig.model[3].bias.grad.add_(1)
        copier.run()
        for update in updates:
            if update.torn is None:
                assert all(map(torch.equal, gradients_of(update), wanted))
        interval = rig.tap.take()
        if interval.broken is not None:
            rig.tap.rebase()
        for slot in interval.slots:
            slot.release()


@pytest.mark.parametrize("seed", range(4))
def test_writes_racing_with_the_real_copier_are_torn_or_harmless(rigs, seed):
    rig = rig_of(rigs, model=nn.Linear(9, 20_000 * (1 + seed)), fused=bool(seed % 2))
    for _ in range(3):
        rig.update()
        rig.tap.notice_torn()
        update = rig.tap._interval.updates[-1]
        wanted = None if update.by_reference else [g.clone() for g in gradients_of(update)]
        if update.by_reference:
            wanted = [p.grad.clone() for p in rig.model.parameters()] if seed % 2 else None
            for p in rig.model.parameters():
                p.grad.zero_()
        update.wait(60)
        if update.torn is None:
            found = gradients_of(update)
            assert all(bool(g.any()) for g in found), "a gradient of zeros would be the one written later"
            assert wanted is None or all(map(torch.equal, found, wanted))
        for slot in rig.tap.take().slots:
            slot.release()


def test_closing_removes_every_hook():
    from torch.optim import optimizer as module

    before = dict(module._global_optimizer_pre_hooks)
    model = small_model()
    optimizer = AdamW(model.parameters())
    rig = Rig(model, optimizer)
    rig.update()
    rig.close()
    assert module._global_optimizer_pre_hooks == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    rig.update()
    assert rig.tap.updates_begun == 1
