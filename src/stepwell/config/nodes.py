"""The nodes of a cluster, and which of them hold whose copies."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from stepwell.config.addresses import Addresses
from stepwell.config.strict import NAME_PATTERN, Strict

__all__ = [
    "NODES_VARIABLE",
    "NODE_VARIABLE",
    "NodeConfig",
    "Placement",
    "holders",
    "nodes_of_environment",
    "own_node",
]

NODES_VARIABLE = "STEPWELL_NODES"
NODE_VARIABLE = "STEPWELL_NODE"

Placement = Literal["auto", "adjacent", "racks"]


class NodeConfig(Strict):
    """One node.

    Attributes
    ----------
    name : str
    address : str or list of str
        ``host:port`` of its keeper; several where several links lead to it.
    rack : str
        What fails together with it; empty where that is not known.
    """

    name: str = Field(pattern=NAME_PATTERN)
    address: Addresses
    rack: str = ""


def nodes_of_environment(environment: Mapping[str, str] = os.environ) -> list[dict[str, object]]:
    """Read ``STEPWELL_NODES``: ``name=host:port`` for each node, ``name=host:port@rack`` where that is known.

    Returns
    -------
    list of dict
        As a configuration would have them; empty where the variable is not set.

    Raises
    ------
    ValueError
        A word is something else.
    """
    nodes: list[dict[str, object]] = []
    for word in environment.get(NODES_VARIABLE, "").replace(",", " ").split():
        found = re.fullmatch(r"([^=@]+)=([^=@]+)(?:@([^=@]+))?", word)
        if found is None:
            raise ValueError(f"{NODES_VARIABLE}: {word!r} is not name=host:port or name=host:port@rack")
        nodes.append({"name": found[1], "address": found[2], "rack": found[3] or ""})
    return nodes


def own_node(
    nodes: Sequence[NodeConfig], name: str, environment: Mapping[str, str] = os.environ
) -> NodeConfig:
    """Return which node this is: by name, by ``STEPWELL_NODE``, else by the name of the host.

    Raises
    ------
    ValueError
        It is none of them.
    """
    name = name or environment.get(NODE_VARIABLE, "")
    host = socket.gethostname()
    asked = (name,) if name else (host, host.partition(".")[0])
    for node in nodes:
        if node.name in asked:
            return node
    known = ", ".join(node.name for node in nodes)
    raise ValueError(
        f"{asked[0]!r} is none of the nodes ({known}); say which one this is with `node`, or with "
        f"{NODE_VARIABLE} in the environment"
    )


def holders(
    nodes: Sequence[NodeConfig], own: NodeConfig, copies: int, placement: Placement
) -> list[NodeConfig]:
    """Return the nodes that hold the copies of `own`, nearest first.

    Parameters
    ----------
    nodes : sequence of NodeConfig
        All of them, in an order that is the same everywhere.
    own : NodeConfig
    copies : int
    placement : "auto", "adjacent" or "racks"
        ``adjacent``: those that follow in the list, as in TierCheck. ``racks``: groups of ``copies + 1``
        nodes of different racks that hold each other's copies. Of several nodes that fail at once, groups
        lose a node with all its copies less often than a ring (16 nodes, 2 failures, one copy: 0.933
        against 0.867 that nothing is lost). ``auto``: racks where all nodes name theirs.

    Raises
    ------
    ValueError
        There are too few nodes; or ``racks``, and some node names none, or one rack has more nodes than
        there are groups, so that two of a group would be in it.
    """
    if copies >= len(nodes):
        raise ValueError(
            f"{copies} copies beside the original need {copies + 1} nodes, there are {len(nodes)}"
        )
    known = all(node.rack for node in nodes)
    if placement == "racks" and not known:
        missing = ", ".join(node.name for node in nodes if not node.rack)
        raise ValueError(f"placement over racks needs the `rack` of each node; {missing} has none")
    if placement == "adjacent" or not known:
        at = nodes.index(own)
        return [nodes[(at + step) % len(nodes)] for step in range(1, copies + 1)]
    chosen = _over_racks(nodes, copies)
    for node in nodes if placement == "racks" else ():  # on all nodes alike
        if any(other.rack == node.rack for other in chosen[node.name]):
            raise ValueError(
                f"rack {node.rack!r} has so many of the {len(nodes)} nodes that a copy would lie in it too; "
                "use `placement: auto` to accept that"
            )
    return chosen[own.name]


def _over_racks(nodes: Sequence[NodeConfig], copies: int) -> dict[str, list[NodeConfig]]:
    """Return the holders of each node's copies, by its name: of its group, those of other racks first."""
    chosen = {}
    for group in _groups(nodes, copies + 1):
        for at, own in enumerate(group):
            others = [*group[at + 1 :], *group[:at]]
            others.sort(key=lambda node: node.rack == own.rack)
            chosen[own.name] = others[:copies]
    return chosen


def _groups(nodes: Sequence[NodeConfig], size: int) -> list[list[NodeConfig]]:
    """Deal nodes into groups of at least `size`, with as few of one rack in a group as can be."""
    racks: dict[str, list[NodeConfig]] = {}
    for node in nodes:
        racks.setdefault(node.rack, []).append(node)
    # The largest first: dealt out in turn, neighbours in this row never meet in a group.
    row = [node for rack in sorted(racks.values(), key=len, reverse=True) for node in rack]
    count = len(row) // size
    return [row[first::count] for first in range(count)]
