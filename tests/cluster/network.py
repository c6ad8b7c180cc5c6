"""Hosts for tests: network namespaces on one bridge, each with an address of its own.

A namespace has no name here and is held open by a process that reads from us, so it goes with this
process, however that ends; the links in it go with it. Nothing is made outside such namespaces.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

PATIENCE_S = 30.0
NETWORK = "192.0.2"  # RFC 5737: of nobody
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "sh", "cat")


class End(StrEnum):
    """Which end of a cable is set down: at the host sending fails at once, at the bridge it is silent."""

    HOST = "host"
    BRIDGE = "bridge"


class Namespace:
    """A network namespace, there from the first line on until `close`."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate(timeout=PATIENCE_S)
            raise OSError(said.strip() or "unshare --net failed")
        self.pid = self._holder.pid

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs `words` in here, killed if this process dies."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "setpriv", "--pdeathsig", "KILL", *words]

    def run(self, *words: str) -> str:
        """Run a command in here and return what it prints.

        Raises
        ------
        OSError
            It failed; the message is what it said.
        """
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def close(self) -> None:
        """Let go of it; it ends with the last process in it."""
        if self._holder.returncode is None:
            self._holder.communicate(timeout=PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine on the network."""

    name: str
    address: str
    namespace: Namespace


class Network:
    """Hosts around one bridge, which is in a namespace of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        self._namespaces: list[Namespace] = []
        try:
            self._bridge = self._namespace()
            self._bridge.run("ip", "link", "add", "bridge", "type", "bridge")
            self._bridge.run("ip", "link", "set", "bridge", "up")
            self.hosts = {name: self._host(name, number) for number, name in enumerate(names, 1)}
        except BaseException:
            self.close()
            raise

    def _namespace(self) -> Namespace:
        self._namespaces.append(Namespace())
        return self._namespaces[-1]

    def _host(self, name: str, number: int) -> Host:
        made = Host(name, f"{NETWORK}.{number}", self._namespace())
        ends = (self._port(name), "type", "veth", "peer", "name", "eth0", "netns", str(made.namespace.pid))
        self._bridge.run("ip", "link", "add", *ends)
        self._bridge.run("ip", "link", "set", self._port(name), "master", "bridge", "up")
        made.namespace.run("ip", "link", "set", "lo", "up")
        made.namespace.run("ip", "address", "add", f"{made.address}/24", "dev", "eth0")
        made.namespace.run("ip", "link", "set", "eth0", "up")
        return made

    @staticmethod
    def _port(name: str) -> str:
        return f"to-{name}"

    def cut(self, name: str, end: End = End.BRIDGE) -> None:
        """Take a host off the network."""
        self._set(name, end, "down")

    def mend(self, name: str, end: End = End.BRIDGE) -> None:
        """Bring a host that was cut off back."""
        self._set(name, end, "up")

    def _set(self, name: str, end: End, state: str) -> None:
        if end is End.HOST:
            self.hosts[name].namespace.run("ip", "link", "set", "eth0", state)
        else:
            self._bridge.run("ip", "link", "set", self._port(name), state)

    def shape(self, name: str, *discipline: str) -> None:
        """Send everything to a host through a queueing discipline of the kernel.

        Raises
        ------
        OSError
            The kernel has none of this kind.
        """
        self._bridge.run("tc", "qdisc", "replace", "dev", self._port(name), "root", *discipline)

    def unshape(self, name: str) -> None:
        """Send to a host as before."""
        self._bridge.run("tc", "qdisc", "delete", "dev", self._port(name), "root")

    def received_bytes(self, name: str) -> int:
        """Return how many bytes a host has received."""
        told = json.loads(self.hosts[name].namespace.run("ip", "-s", "-j", "link", "show", "dev", "eth0"))
        return int(told[0]["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """End the network; processes in it are ended before."""
        for namespace in reversed(self._namespaces):
            namespace.close()


@cache
def why_not() -> str | None:
    """Return why no network can be made here, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    try:
        Network(["a", "b"]).close()
    except OSError as error:
        return str(error)
    return None


@cache
def why_not_netem() -> str | None:
    """Return why packets cannot be lost and delayed here, or None."""
    network = Network(["a"])
    try:
        network.shape("a", "netem", "loss", "30%", "delay", "200ms")
    except OSError as error:
        return str(error)
    finally:
        network.close()
    return None
