"""Parameters and state that something other than an update changes; saves at uncommon moments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from resume_rig import (
    TOTAL,
    Lives,
    Place,
    Training,
    assert_same,
    batch,
    bits_of,
    plain,
    restore,
    resume,
    seed_everything,
    small_model,
    train,
    uninterrupted,
)
from torch import nn, optim

Change = Callable[[nn.Module, optim.Optimizer, int], None]


def changed(change: Change, make=optim.AdamW) -> Callable[[], Training]:
    """The ordinary loop, with something else at its end."""

    def build() -> Training:
        network = small_model()
        optimizer = make(network.parameters())

        def step(at: int) -> None:
            optimizer.zero_grad()
            network(batch(at, 5, 9)).square().mean().backward()
            optimizer.step()
            change(network, optimizer, at)

        return Training(network, optimizer, step)

    return build


@torch.no_grad()
def clamp(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    for parameter in network.parameters():
        parameter.clamp_(-0.25, 0.25)


@torch.no_grad()
def prune_now_and_then(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at in (3, 6):
        network[0].weight[:, ::3] = 0.0


def rebind_data(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at in (3, 6):
        network[0].weight.data = network[0].weight.data * 0.5


def write_through_data(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at in (3, 6):
        network[0].weight.data.mul_(0.5)


def clamp_through_data(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    for parameter in network.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def load_state(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at == 4:
        optimizer.load_state_dict(optimizer.state_dict())


def forget_state(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at == 4:
        optimizer.state.clear()


def change_moments(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at in (3, 6):
        optimizer.state[network[0].weight]["exp_avg"].zero_()


def replace_moments(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at in (3, 6):
        state = optimizer.state[network[0].weight]
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


SEEN: dict[str, Change] = {
    "moments-written": change_moments,
    "moments-replaced": replace_moments,
    "pruned": prune_now_and_then,
    "state-loaded": load_state,
    "state-forgotten": forget_state,
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("fused", [False, True])
def test_a_change_outside_an_update_makes_the_next_save_a_base(place: Place, name: str, fused: bool) -> None:
    lives = resume(changed(SEEN[name], partial(optim.AdamW, fused=fused)), place)
    kinds = lives.kinds()
    at = {record.step for record in lives.saves if record.kind == "base only"}
    assert at == ({0, 4} if name.startswith("state") else {0, 3, 6})
    assert kinds.count("gradient") == TOTAL - len(at)


def test_a_change_in_every_step_makes_it_state_capture(place: Place) -> None:
    kinds = resume(changed(clamp), place).kinds()
    assert kinds == [*["base only"] * 4, "state", *["base only"] * (TOTAL - 5)], "each life learns it anew"


def write_moments_through_data(network: nn.Module, optimizer: optim.Optimizer, at: int) -> None:
    if at in (3, TOTAL - 1):
        optimizer.state[network[0].weight]["exp_avg"].data.mul_(0.5)


UNSEEN: dict[str, Change] = {
    "moments": write_moments_through_data,
    "rebound": rebind_data,
    "written": write_through_data,
    "clamped-every-step": clamp_through_data,
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("fused", [False, True])
def test_a_change_no_counter_shows_is_never_restored_wrongly(place: Place, name: str, fused: bool) -> None:
    """What is refused must be said, and what is loaded must be right, in both tiers."""
    build = changed(UNSEEN[name], partial(optim.AdamW, fused=fused))
    wanted = uninterrupted(build)
    seed_everything(1)
    training = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with place.open(training) as well:
            for step in range(TOTAL):
                training.step(step)
                well.save(step)
                assert_same(bits_of(training), wanted[step], f"step {step}")
            well.wait_until_finished(60)
            crashed = place.crashed()
            kinds = [record.kind for record in well.metrics().saves]
        for one, tier in ((crashed, "memory"), (place, "directory")):
            training = build()
            with one.open(training) as well:
                restored = well.restore()
                assert restored is not None
                where = f"{kinds}, restored {restored}"
                assert_same(bits_of(training), wanted[restored.step], where)
                assert restored.exact, where
                assert restored.tier == tier
                assert restored.lost_steps == TOTAL - 1 - restored.step
                if restored.step < TOTAL - 1:
                    assert restored.faults, where


def test_a_change_no_counter_shows_in_every_step_is_found_while_training(place: Place) -> None:
    """The proof finds that replay does not lead to the live state, and captures states from then on."""
    training = changed(clamp_through_data)()
    with place.open(training) as well, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(2000):
            training.step(step)
            well.save(step)
            if well.metrics().saves[-1].kind == "state":
                break
        else:
            pytest.fail("2000 saves that cannot be restored, and nobody noticed")
        seen = bits_of(training)
    assert [w for w in warned if "replaying the recorded gradients" in str(w.message)]
    training = changed(clamp_through_data)()
    with place.open(training) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.exact) == (step, True)
        assert_same(bits_of(training), seen, f"step {step}")


@pytest.mark.parametrize("every", [2, 3])
def test_several_updates_between_saves_are_replayed_in_order(place: Place, every: int) -> None:
    lives = resume(plain(optim.AdamW), place, saved=lambda step: step % every == 0)
    assert set(lives.kinds()[1:]) == {"gradient"}


def test_more_updates_between_saves_than_slots_make_it_state_capture(place: Place) -> None:
    lives = resume(plain(optim.AdamW), place, total=45, crash_after=30, saved=lambda step: step % 5 == 0)
    assert set(lives.kinds()) == {"base only", "state"}


def test_bases_on_the_way_leave_no_hole_in_the_log(place: Place) -> None:
    place.keys.update(base_every=3, log_budget=1000.0)
    lives = resume(plain(partial(optim.AdamW, fused=True)), place, total=14, crash_after=8, patient=True)
    assert lives.kinds() == ["base only", *["gradient"] * 13]
    assert sum(record.base for record in lives.saves) >= 4
    assert all(restored.base_step > 0 for restored in lives.restored), lives.restored


@pytest.mark.parametrize("delta", ["none", "ordered_delta", "predictive"])
def test_captured_states_resume_bit_for_bit(place: Place, delta: str) -> None:
    place.keys["pipeline"] = [{"capture": "state"}, {"delta": delta}, "shard", "replicate", "commit"]
    lives = resume(plain(optim.AdamW), place)
    assert set(lives.kinds()) <= {"base only", "state"}


def test_a_save_before_the_first_update_and_saves_without_updates(place: Place) -> None:
    build = plain(partial(optim.AdamW, fused=True))
    lives = Lives({0: uninterrupted(build, 0)[-1]})
    wanted = uninterrupted(build)
    # Labels 0, 1, 2 are saves of the state before the first update; label s + 3 follows update s.
    for label in range(TOTAL + 3):
        lives.wanted[label] = wanted[max(-1, label - 3)]
    for crash_after in (1, 2, 3, 4, 7):
        one = Place(place.root / f"after-{crash_after}", place.keys)
        seed_everything(1)
        training = build()
        with one.open(training) as well:
            for label in range(crash_after):
                if label >= 3:
                    training.step(label - 3)
                well.save(label)
            well.wait_until_finished(60)
            crashed = one.crashed()
        seed_everything(2)
        training = build()
        with crashed.open(training) as well:
            restore(well, training, lives, step=crash_after - 1, tier="memory", exact=True)
            for label in range(crash_after, TOTAL + 3):
                if label >= 3:
                    training.step(label - 3)
                well.save(label)
                assert_same(bits_of(training), lives.wanted[label], f"label {label}")


def test_many_short_lives_make_one_run(place: Place) -> None:
    """Each life makes one or two steps and crashes; the chain goes on through all of them."""
    build = plain(partial(optim.SGD, lr=0.1, momentum=0.9, fused=True))
    lives = Lives(uninterrupted(build))
    step, here = 0, place
    while step < TOTAL:
        seed_everything(step)
        training = build()
        if step == 0:
            seed_everything(1)
            training = build()
        with here.open(training) as well:
            if step:
                restore(well, training, lives, step=step - 1, tier="memory", exact=True)
            stop = min(TOTAL, step + 1 + step % 2)
            train(well, training, lives, range(step, stop))
            well.wait_until_finished(60)
            here = here.crashed(f"life-{stop}")
        step = stop
    assert lives.kinds() == ["base only", *["gradient"] * (TOTAL - 1)]
