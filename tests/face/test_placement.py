"""Whose copies lie where: chosen on every node alike, from one configuration."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, uninterrupted
from keeper_rig import make_secret

import stepwell
from stepwell.config import PeerTier, load_config
from stepwell.config.nodes import NodeConfig, holders, nodes_of_environment, own_node
from stepwell.errors import ConfigError
from stepwell.keeper.keeper import default_directory

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def nodes_in(racks: str) -> list[NodeConfig]:
    """Make a node for each letter, in the rack of that letter; none for a dot."""
    return [
        NodeConfig(name=f"n{number}", address=("10.0.0.1:7070",), rack=rack.strip("."))
        for number, rack in enumerate(racks)
    ]


def names(nodes: list[NodeConfig]) -> list[str]:
    return [node.name for node in nodes]


def test_adjacent_are_those_that_follow() -> None:
    nodes = nodes_in("....")
    assert names(holders(nodes, nodes[1], 2, "auto")) == ["n2", "n3"]
    assert names(holders(nodes, nodes[3], 2, "adjacent")) == ["n0", "n1"]


@pytest.mark.parametrize(
    ("racks", "copies"),
    [
        *((racks, 1) for racks in ("aabb", "abab", "aaabbbb", "aaabbbccc", "abcabcab", "abcdefgh" * 2)),
        *((racks, 2) for racks in ("aaabbbccc", "abcabcab", "aabbccdde", "abcdefgh" * 2)),
    ],
)
def test_no_copy_lies_in_the_rack_of_its_original(racks: str, copies: int) -> None:
    nodes = nodes_in(racks)
    held: Counter[str] = Counter()
    for own in nodes:
        chosen = holders(nodes, own, copies, "racks")
        assert len({node.name for node in [own, *chosen]}) == copies + 1
        assert own.rack not in {node.rack for node in chosen}
        held.update(names(chosen))
    assert max(held.values()) <= 2 * copies, "the burden is spread"


@pytest.mark.parametrize("racks", ["aaab", "aaaa", "aaaab", "abbbbbbbb"])
def test_racks_too_unequal_for_it_are_said_or_accepted(racks: str) -> None:
    nodes = nodes_in(racks)
    for own in nodes:
        with pytest.raises(ValueError, match="a copy would lie in it too"):
            holders(nodes, own, 1, "racks")
        assert len(holders(nodes, own, 1, "auto")) == 1


def test_groups_lose_everything_less_often_than_a_ring() -> None:
    """The figures of the documentation: 16 nodes, each pair of them failing at once."""
    nodes = nodes_in("abcdefghijklmnop")

    def safe(placement: str) -> float:
        held = {own.name: holders(nodes, own, 1, placement)[0].name for own in nodes}  # type: ignore[arg-type]
        pairs = list(combinations(held, 2))
        return sum(held[one] != other and held[other] != one for one, other in pairs) / len(pairs)

    assert safe("racks") == pytest.approx(0.933, abs=5e-4)
    assert safe("adjacent") == pytest.approx(0.867, abs=5e-4)


def test_too_few_nodes_and_unknown_racks_are_said() -> None:
    nodes = nodes_in("ab.")
    with pytest.raises(ValueError, match="3 copies beside the original need 4 nodes"):
        holders(nodes, nodes[0], 3, "auto")
    with pytest.raises(ValueError, match="n2 has none"):
        holders(nodes, nodes[0], 1, "racks")
    assert names(holders(nodes, nodes[0], 1, "auto")) == ["n1"]


def test_nodes_from_the_environment() -> None:
    told = nodes_of_environment({"STEPWELL_NODES": "a=10.0.0.1:70@r1, b=[fd00::2]:70@r2\nc=c.local:70"})
    assert told == [
        {"name": "a", "address": "10.0.0.1:70", "rack": "r1"},
        {"name": "b", "address": "[fd00::2]:70", "rack": "r2"},
        {"name": "c", "address": "c.local:70", "rack": ""},
    ]
    assert nodes_of_environment({}) == []
    for word in ("a", "a=", "=b:1", "a=b:1@", "a=b:1=c"):
        with pytest.raises(ValueError, match="STEPWELL_NODES"):
            nodes_of_environment({"STEPWELL_NODES": word})


def test_this_node_is_known_by_the_host_or_by_name() -> None:
    host = socket.gethostname()
    nodes = [*nodes_in("ab"), NodeConfig(name=host.partition(".")[0], address=("10.0.0.1:7070",))]
    assert own_node(nodes, "", {}) is nodes[2]
    assert own_node(nodes, "", {"STEPWELL_NODE": "n1"}) is nodes[1]
    assert own_node(nodes, "n0", {"STEPWELL_NODE": "n1"}) is nodes[0]
    with pytest.raises(ValueError, match="none of the nodes"):
        own_node(nodes, "other", {})


NODES = [{"name": name, "address": f"127.0.0.1:{port}"} for port, name in enumerate("abc", 7070)]
PEERS = {"kind": "peers", "copies": 2}


def config(**keys: object) -> dict[str, object]:
    return {"nodes": NODES, "node": "b", "tiers": [{"kind": "memory"}, PEERS], **keys}


def test_copies_become_tiers_and_the_node_gets_a_keeper() -> None:
    loaded = load_config(config())
    peers = [tier for tier in loaded.tiers if isinstance(tier, PeerTier)]
    assert [(tier.name, tier.keeper, tier.address) for tier in peers] == [
        ("c", "c", ("127.0.0.1:7072",)),
        ("a", "a", ("127.0.0.1:7070",)),
    ]
    assert loaded.keeper is not None
    assert (loaded.keeper.name, loaded.keeper.listen) == ("b", ("127.0.0.1:7071",))
    assert load_config(loaded.model_dump()) == loaded
    assert load_config(config(keeper=None)).keeper is None
    told = load_config(config(keeper={"listen": "127.0.0.1:9", "budget_bytes": 5})).keeper
    assert told is not None
    assert (told.name, told.listen, told.budget_bytes) == ("b", ("127.0.0.1:9",), 5)


def test_nodes_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_NODES", "a=127.0.0.1:7070,b=127.0.0.1:7071,c=127.0.0.1:7072")
    monkeypatch.setenv("STEPWELL_NODE", "b")
    told = {key: value for key, value in config().items() if key not in ("nodes", "node")}
    assert load_config(told) == load_config(config(nodes=[{**node, "rack": ""} for node in NODES]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nodes": []}, "needs `nodes`"),
        ({"node": "z"}, "none of the nodes"),
        ({"nodes": [*NODES, NODES[0]]}, "two nodes are called 'a'"),
        ({"tiers": [{"kind": "peers", "copies": 3}]}, "need 4 nodes"),
        ({"tiers": [{"kind": "peers", "copy": 1}]}, 'did you mean "copies"'),
        ({"tiers": [{"kind": "peers", "placement": "rack"}]}, 'did you mean "racks"'),
        ({"tiers": [PEERS, PEERS]}, "two tiers are called"),
        ({"nodes": [{"name": "b", "address": "here"}]}, "no address"),
        ({"nodes": [{**NODES[0], "racks": "r"}]}, 'did you mean "rack"'),
    ],
)
def test_mistakes_are_said(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config(**keys))
    assert said in str(caught.value)


@pytest.fixture
def cluster(tmp_path: Path, memory_directory: Path) -> Iterator[tuple[Path, str]]:
    """One configuration file for three nodes, and the name of its run."""
    run = f"placed-{os.getpid()}"
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "abc"]
        ports = [each.getsockname()[1] for each in sockets]
    written = {
        "run": run,
        "nodes": [{"name": name, "address": f"127.0.0.1:{port}"} for name, port in zip("abc", ports)],  # noqa: B905
        "tiers": [
            {"kind": "memory", "directory": str(memory_directory / "memory")},
            {**PEERS, "secret_file": str(make_secret(tmp_path / "secret")), "call_s": 5.0},
        ],
        "handle_sigterm": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(written))
    yield path, run
    for name in "abc":
        directory = default_directory(run, name)
        if directory.is_dir():
            command("--stop", path, name)
            shutil.rmtree(directory, ignore_errors=True)


def command(option: str, path: Path, name: str) -> int:
    words = [sys.executable, "-m", "stepwell", "keeper", option, "--config", str(path)]
    return subprocess.run(
        words, env={**os.environ, "STEPWELL_NODE": name}, timeout=PATIENCE_S, check=False
    ).returncode


def test_one_configuration_serves_all_nodes(
    cluster: tuple[Path, str], memory_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = cluster
    with ExitStack() as ended:
        for name in "bc":  # nodes without a trainer
            words = [sys.executable, "-m", "stepwell", "keeper", "--config", str(path), "--json"]
            keeper = subprocess.Popen(
                words, env={**os.environ, "STEPWELL_NODE": name}, stdout=subprocess.PIPE, text=True
            )
            ended.enter_context(keeper)
            ended.callback(keeper.terminate)
            assert keeper.stdout is not None
            assert json.loads(keeper.stdout.readline())["name"] == name
        monkeypatch.setenv("STEPWELL_NODE", "a")
        job = Job()
        with stepwell.open_sync(path, model=job.model, optimizer=job.optimizer) as well:
            assert command("--status", path, "a") == 0, "its own, started along"
            for step in range(3):
                job.step()
                handle = well.save(step)
            handle.until("b", PATIENCE_S)
            handle.until("c", PATIENCE_S)
        shutil.rmtree(memory_directory / "memory", ignore_errors=True)
        again = Job(seed=99)
        with stepwell.open_sync(path, model=again.model, optimizer=again.optimizer) as well:
            restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.tier, restored.exact) == (2, "b", True)
        assert again.bits() == uninterrupted(3)[2]
