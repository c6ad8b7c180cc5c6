"""Every way to train comes back bit for bit: scalers, closures, groups, schedules, buffers, randomness."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from resume_rig import TOTAL, Build, Place, Training, batch, plain, resume, small_model
from torch import nn, optim
from torch.optim import lr_scheduler

ALL_GRADIENTS = ["base only", *["gradient"] * (TOTAL - 1)]


def loss_of(network: nn.Module, at: int, micro: int = 0) -> torch.Tensor:
    return network(batch(at, 5, 9, micro=micro)).square().mean()


def scaled(make, *, infinite: tuple[int, ...] = (2, 4, 7)) -> Build:
    """Mixed precision's loop; some steps overflow, so that the scaler skips the update."""

    def build() -> Training:
        network = small_model()
        optimizer = make(network.parameters())
        scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=2)

        def step(at: int) -> None:
            optimizer.zero_grad()
            loss = loss_of(network, at) * (float("inf") if at in infinite else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return Training(network, optimizer, step, {"scaler": scaler})

    return build


def scaled_and_clipped() -> Training:
    network = small_model()
    optimizer = optim.AdamW(network.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=2)

    def step(at: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(network, at)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return Training(network, optimizer, step, {"scaler": scaler})


def closure() -> Training:
    network = small_model()
    optimizer = optim.AdamW(network.parameters())

    def step(at: int) -> None:
        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(network, at)
            loss.backward()
            return loss

        loss = optimizer.step(evaluate) if at % 2 else optimizer.step(closure=evaluate)
        assert loss.item() > 0

    return Training(network, optimizer, step)


def accumulated() -> Training:
    network = small_model()
    optimizer = optim.AdamW(network.parameters(), fused=True)

    def step(at: int) -> None:
        for micro in range(3):
            (loss_of(network, at, micro) / 3).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return Training(network, optimizer, step)


def groups() -> Training:
    network = small_model()
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1, "foreach": True}, {"params": others, "lr": 0.003}],
        lr=0.01,
        weight_decay=0.0,
    )

    def step(at: int) -> None:
        optimizer.zero_grad()
        loss_of(network, at).backward()
        optimizer.param_groups[1]["lr"] = 0.003 / (1 + at)
        optimizer.step()
        # What the update used is not what the save finds.
        optimizer.param_groups[0]["weight_decay"] *= 0.9

    return Training(network, optimizer, step)


def flags_change() -> Training:
    network = small_model()
    optimizer = optim.AdamW(network.parameters(), foreach=False)

    def step(at: int) -> None:
        optimizer.param_groups[0].update(foreach=at % 3 == 1, amsgrad=False, maximize=at == 5)
        optimizer.zero_grad()
        loss_of(network, at).backward()
        optimizer.step()

    return Training(network, optimizer, step)


def two_optimizers(*, mapping: bool) -> Build:
    """The two halves of a GAN: two losses, two updates in each step, the second one sometimes twice."""

    def build() -> Training:
        critic, generator = small_model(), nn.Linear(4, 9)
        first = optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
        second = optim.SGD(generator.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)

        def step(at: int) -> None:
            first.zero_grad()
            (critic(generator(batch(at, 5, 4)).detach()) - 1).square().mean().backward()
            first.step()
            for _ in range(1 + at % 2):
                second.zero_grad()
                critic(generator(batch(at, 5, 4))).square().mean().backward()
                second.step()

        if mapping:
            return Training(
                {"critic": critic, "generator": generator}, {"critic": first, "generator": second}, step
            )
        return Training(nn.ModuleList([critic, generator]), [first, second], step)

    return build


def scheduled(make) -> Build:
    def build() -> Training:
        network = small_model()
        optimizer = optim.AdamW(network.parameters(), lr=0.01)
        schedule = make(optimizer)

        def step(at: int) -> None:
            optimizer.zero_grad()
            loss = loss_of(network, at)
            loss.backward()
            optimizer.step()
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(loss.item())
            else:
                schedule.step()

        return Training(network, optimizer, step, {"schedule": schedule})

    return build


def chained(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 20)], [3])


def user_hooks() -> Training:
    """Hooks of the user's that change gradients, added after the run was opened."""
    network = small_model()
    optimizer = optim.AdamW(network.parameters())
    added: list[object] = []

    def scale(opt: optim.Optimizer, args: object, kwargs: object) -> None:
        for p in network.parameters():
            p.grad = p.grad * 0.5

    def step(at: int) -> None:
        if at > 0 and not added:
            added.append(optimizer.register_step_pre_hook(scale))
        optimizer.zero_grad()
        loss_of(network, at).backward()
        optimizer.step()

    # Life begins anew at any step: the hook counts from the first step seen, but for step 0.
    return Training(network, optimizer, step)


CASES: dict[str, Build] = {
    "scaler-loop": scaled(partial(optim.AdamW, foreach=False)),
    "scaler-foreach": scaled(partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "scaler-fused": scaled(partial(optim.AdamW, fused=True)),
    "scaler-fused-sgd": scaled(partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "scaler-clipped-fused": scaled_and_clipped,
    "closure": closure,
    "accumulation": accumulated,
    "groups": groups,
    "flags-change": flags_change,
    "two-optimizers-list": two_optimizers(mapping=False),
    "two-optimizers-mapping": two_optimizers(mapping=True),
    "cosine": scheduled(partial(lr_scheduler.CosineAnnealingLR, T_max=20)),
    "plateau": scheduled(partial(lr_scheduler.ReduceLROnPlateau, patience=1, cooldown=1)),
    "one-cycle": scheduled(partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40)),
    "warm-up-then-cosine": scheduled(chained),
    "gradients-kept": plain(optim.AdamW, set_to_none=False),
    "gradients-kept-fused": plain(partial(optim.AdamW, fused=True), set_to_none=False),
    "user-hooks": user_hooks,
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_resumes_bit_for_bit_from_gradients(place: Place, name: str) -> None:
    lives = resume(CASES[name], place)
    assert lives.kinds() == ALL_GRADIENTS, [record.reason for record in lives.saves]
    assert [restored.base_step for restored in lives.restored] == [0, 0]
