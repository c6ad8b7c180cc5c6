"""Three nodes: what is lost with the trainer, with its node, with two of three, with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cluster_rig import Cluster, Event, Trainer, await_condition, wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

BEFORE = 8  # steps of the first life
TOTAL = 12
BASES = (3,)
WIDE = 20_000  # 2.4 MB of state, 0.8 MB of gradients


def config_of(cluster: Cluster, host: str, dying: str = "", **keys: object) -> dict[str, object]:
    """Return a run with its own memory, two peers, and a directory that every node sees.

    Of the `dying` peer the test waits out the deadline; of those that live it must not be met.
    """
    directory = {"kind": "directory", "path": str(cluster.directory), "keep": 1000}
    peers = [
        cluster.keepers[name].tier(keep=1000, call_s=1.0 if name == dying else 20.0) for name in ("b", "c")
    ]
    return cluster.config(host, *peers, directory, **keys)


def first_life(cluster: Cluster, *tiers: str, stall_directory_from: int | None = None) -> None:
    """Train on node a until its newest save but one is in `tiers`; killed while the last one travels."""
    trainer = cluster.trainer("a", config_of(cluster, "a", stall_directory_from=stall_directory_from))
    assert trainer.opened()["restored"] == {}
    trainer.train(BEFORE, BASES)
    trainer.acknowledged(BEFORE - 1, *tiers)
    trainer.train(1)
    trainer.saved(BEFORE)
    trainer.kill()
    same_as_uninterrupted(trainer)


def next_life(cluster: Cluster, host: str, dying: str = "") -> tuple[Mapping[str, object], Trainer]:
    """Restore on a host and train to the end; return what was restored, and the trainer."""
    trainer = cluster.trainer(host, config_of(cluster, host, dying))
    opened = trainer.opened()
    restored = opened["restored"]
    assert isinstance(restored, dict)
    assert restored["exact"], restored
    assert opened["bits"] == wanted(TOTAL)[restored["step"]]
    trainer.train(TOTAL - 1 - restored["step"])
    trainer.saved(TOTAL - 1)
    same_as_uninterrupted(trainer)
    return restored, trainer


def same_as_uninterrupted(trainer: Trainer, width: int = 8) -> None:
    saved = trainer.all_of("saved")
    assert saved
    assert {event["step"]: event["bits"] for event in saved} == {
        event["step"]: wanted(TOTAL, width)[int(str(event["step"]))] for event in saved
    }
    assert not trainer.all_of("raised")


def warnings_of(trainer: Trainer) -> str:
    return " ".join(str(event["what"]) for event in trainer.all_of("warning"))


def test_killed_trainer_is_back_from_its_own_memory(cluster: Cluster) -> None:
    cluster.prepare("a", "a")
    first_life(cluster, "memory", "b", "c", "directory")
    restored, trainer = next_life(cluster, "a")
    assert restored["step"] in (BEFORE - 1, BEFORE)
    assert (restored["tier"], restored["lost_steps"]) == ("memory", 0)
    trainer.acknowledged(TOTAL - 1, "memory", "b", "c", "directory")
    trainer.close()


def test_lost_node_is_back_from_a_peer(cluster: Cluster) -> None:
    """Trainer, keeper and memory of node a are gone; the run goes on at another node."""
    cluster.prepare("a", "d")
    first_life(cluster, "b", "c")
    cluster.lose_node("a")
    restored, trainer = next_life(cluster, "d")
    assert restored["step"] in (BEFORE - 1, BEFORE)
    assert (restored["tier"], restored["lost_steps"]) == ("b", 0)
    trainer.acknowledged(TOTAL - 1, "memory", "b", "c", "directory")


def test_two_of_three_nodes_lost_is_back_from_the_last_one(cluster: Cluster) -> None:
    cluster.prepare("a", "d")
    first_life(cluster, "b", "c")
    cluster.lose_node("a")
    cluster.lose_node("b")
    restored, trainer = next_life(cluster, "d", dying="b")
    assert restored["step"] in (BEFORE - 1, BEFORE)
    assert (restored["tier"], restored["lost_steps"]) == ("c", 0)
    assert "tier b is given up" in warnings_of(trainer)
    trainer.acknowledged(TOTAL - 1, "memory", "c", "directory")


@pytest.mark.parametrize("damaged", [False, True], ids=["nothing-left", "one-left-damaged"])
def test_all_nodes_lost_is_back_from_the_directory_that_was_behind(cluster: Cluster, damaged: bool) -> None:
    """The steps the directory did not have are told as lost where anything is left that knows of them."""
    behind = 4
    cluster.prepare("a", "d")
    first_life(cluster, "b", "c", stall_directory_from=BEFORE - behind)
    cluster.lose_node("a")
    cluster.lose_node("b")
    if damaged:
        assert damage(cluster.keepers["c"].directory)
        cluster.replace_nodes("b")
    else:
        cluster.lose_node("c")
        cluster.replace_nodes("b", "c")
    restored, trainer = next_life(cluster, "d")
    assert (restored["step"], restored["tier"]) == (BEFORE - behind - 1, "directory")
    if damaged:
        assert restored["lost_steps"] in (behind, behind + 1)
        assert f"{restored['lost_steps']} steps before the newest" in warnings_of(trainer)
    else:
        # Whoever knew of them is gone with them: "what is known to be missing" (docs/tiers.md) is nothing.
        assert restored["lost_steps"] == 0
        trainer.acknowledged(TOTAL - 1, "memory", "b", "c", "directory")


def damage(arena: Path) -> int:
    """Spoil every pack and base in a keeper's memory, not the small records; return how many."""
    spoiled = 0
    for path in arena.rglob("object-*"):
        data = np.fromfile(path, dtype=np.uint8)
        key = bytes(data[40:4000])
        if b".pack" in key or b"/base/" in key:
            data[4096:] ^= 0x55
            with path.open("r+b") as file:
                file.write(data.tobytes())
            spoiled += 1
    return spoiled


def test_base_in_flight_when_its_peer_is_lost_costs_no_step_elsewhere(cluster: Cluster) -> None:
    """The link of a peer is slow, and the node dies with a base on its way."""
    trainer = cluster.trainer("a", config_of(cluster, "a", dying="b"), width=WIDE)
    trainer.opened()
    trainer.train(3)
    trainer.acknowledged(2, "memory", "b", "c", "directory")
    cluster.network.shape("b", "tbf", "rate", "8mbit", "burst", "32kb", "latency", "400ms")
    before = cluster.network.received_bytes("b")
    trainer.train(1, bases=[3])
    trainer.saved(3)
    await_condition("traffic to b", lambda: cluster.network.received_bytes("b") - before > 1_200_000)
    cluster.lose_node("b")
    trainer.train(TOTAL - 4)
    trainer.saved(TOTAL - 1)
    state = trainer.state()
    held, lost = state["steps"], state["lost"]
    assert isinstance(held, dict)
    assert isinstance(lost, dict)
    assert lost.keys() == {"b"}
    for tier in ("memory", "c", "directory"):
        assert held[tier] == list(range(TOTAL)), tier
    assert {event["tier"] for event in trainer.all_of("failed")} == {"b"}
    assert not [event for event in acknowledgements(trainer, "b") if int(str(event["step"])) > 3]
    same_as_uninterrupted(trainer, WIDE)
    trainer.kill()
    ((found, bases),) = cluster.held_by(cluster.keepers["c"])
    assert found == dict(enumerate(wanted(TOTAL, WIDE)))
    assert bases[:2] == [0, 3]


def acknowledgements(trainer: Trainer, tier: str) -> list[Event]:
    return [event for event in trainer.all_of("ack") if event["tier"] == tier]
