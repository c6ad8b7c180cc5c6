"""Three hosts in network namespaces, each link between them 1 Gbit/s; for ``benchmarks.transport``.

Needs root, ``ip`` and ``tc``; says why where it cannot be. The namespaces are a sender's (``a``), with
two links to one peer (``b``) and one to another (``c``)::

    a 10.213.1.1 ---- 10.213.1.2 b
    a 10.213.2.1 ---- 10.213.2.2 b
    a 10.213.3.1 ---- 10.213.3.2 c
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from stepwell.stores.transport.secret import SECRET_VARIABLE, RunSecret

__all__ = ["NoLinksError", "speedups"]

_RATE = "1gbit"
_PORT = 7000
_LINKS = (("1", "b"), ("2", "b"), ("3", "c"))


class NoLinksError(Exception):
    """This machine has no network namespaces for us, or cannot limit their links."""


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise NoLinksError(f"{' '.join(command)}: {detail.strip()}") from error


@contextmanager
def _namespaces() -> Iterator[dict[str, str]]:
    """Make namespaces and links, and take them away again."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoLinksError("needs root, ip and tc")
    names = {host: f"stepwell-{os.getpid()}-{host}" for host in "abc"}
    with ExitStack() as stack:
        for name in names.values():
            _run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
        for number, host in _LINKS:
            _link(names["a"], names[host], number)
        yield names


def _link(near: str, far: str, number: str) -> None:
    """Lay one link between two namespaces; it goes with them."""
    ends = ((near, f"near{number}", f"10.213.{number}.1/24"), (far, f"far{number}", f"10.213.{number}.2/24"))
    _run(
        "ip", "-n", near, "link", "add", ends[0][1], "type", "veth", "peer", "name", ends[1][1], "netns", far
    )
    for namespace, device, address in ends:
        _run("ip", "-n", namespace, "addr", "add", address, "dev", device)
        _run("ip", "-n", namespace, "link", "set", device, "up")
        limit = ("rate", _RATE, "burst", "256k", "latency", "50ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)


@contextmanager
def _peer(namespace: str, job: dict[str, object]) -> Iterator[None]:
    """Run a node that serves in a namespace."""
    process = subprocess.Popen(_command(namespace, job), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise NoLinksError(f"a node in {namespace} did not start")
        yield
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=60)


def _command(namespace: str, job: dict[str, object]) -> Sequence[str]:
    module = (sys.executable, "-m", "benchmarks.transport_peer", json.dumps(job))
    return ("ip", "netns", "exec", namespace, *module)


def _measured(namespace: str, job: dict[str, object]) -> float:
    done = subprocess.run(_command(namespace, job), check=True, capture_output=True, text=True, timeout=300)
    return float(json.loads(done.stdout)["bytes_per_s"])


def speedups(memory: Path, object_bytes: int, rounds: int) -> dict[str, object]:
    """Measure two links against one, and two peers against one; medians over the rounds, interleaved.

    Raises
    ------
    NoLinksError
        With the reason.
    """
    os.environ[SECRET_VARIABLE] = RunSecret.make().value.decode()
    first, second, third = [(f"10.213.{number}.2", _PORT) for number, _ in _LINKS]
    cases: dict[str, tuple[str, list[list[tuple[str, int]]]]] = {
        "one_link": ("put", [[first]]),
        "two_links": ("put", [[first, second]]),
        "one_peer": ("get", [[first]]),
        "two_peers": ("get", [[first], [third]]),
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    serving = {"role": "serve", "port": _PORT, "object_bytes": object_bytes}
    with (
        _namespaces() as names,
        _peer(names["b"], {**serving, "directory": str(memory / "b"), "hosts": [first[0], second[0]]}),
        _peer(names["c"], {**serving, "directory": str(memory / "c"), "hosts": [third[0]]}),
    ):
        for _ in range(rounds):
            for name, (what, peers) in cases.items():
                job = {
                    "role": "send",
                    "what": what,
                    "peers": peers,
                    "object_bytes": object_bytes,
                    "repeats": 1,
                    "directory": str(memory / "a"),
                }
                speeds[name].append(_measured(names["a"], job))
    middle = {name: median(values) for name, values in speeds.items()}
    return {
        "two_links_speedup": middle["two_links"] / middle["one_link"],
        "two_peers_read_speedup": middle["two_peers"] / middle["one_peer"],
        "link_gbps": {name: value / 1e9 for name, value in middle.items()},
    }
