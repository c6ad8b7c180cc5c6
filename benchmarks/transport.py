"""How fast an object goes from one process's shared memory to another's, beside memcpy and gloo.

Everything is measured in turns within one run, on loopback: a copy between two mappings in this process
(``memcpy``), ``torch.distributed`` send/recv with gloo between two processes (``gloo``), and our own
transport between two processes without authentication (``plain``), with the run's secret (``hmac``) and
with mutual TLS on top (``mtls``). Ours verifies a checksum at the receiver before it acknowledges, and
publishes; gloo does neither. Two links and two peers are measured over links of 1 Gbit/s between network
namespaces, which needs root.

Keys::

    object_bytes, rounds, machine
    gbps               {memcpy, gloo, plain, hmac, mtls, nixl}: GB/s, medians; null where there is none
    gbps_min, gbps_max the same, slowest and fastest round
    cpu_s_per_gb       {gloo, plain, hmac, mtls}: processor seconds of the sending process for one GB
    plain_to_gloo, hmac_to_gloo          of the medians
    two_links_speedup  put over two links against one; null where it cannot be measured
    two_peers_read_speedup               fetch from two peers, a link each, against one
    link_gbps          {one_link, two_links, one_peer, two_peers}
    not_measured       why something is null
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.links import NoLinksError, speedups
from benchmarks.report import arguments, machine, places, publish
from benchmarks.transport_peer import content, gloo, identity, opened
from stepwell.stores.peer import PeerStore
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.secret import SECRET_VARIABLE, RunSecret

_OURS = ("plain", "hmac", "mtls")
_WARM = 2  # rounds that count for nothing: pages and connections are made


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the object")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--link-mib", type=int, default=128, help="size of the object over slow links")
    parser.add_argument("--link-rounds", type=int, default=3)
    options = parser.parse_args()
    with places() as (disk, memory):
        result = measure(disk, memory, options.mib << 20, options.rounds)
        try:
            result.update(speedups(memory, options.link_mib << 20, options.link_rounds))
        except NoLinksError as error:
            result.update(two_links_speedup=None, two_peers_read_speedup=None, link_gbps=None)
            result["not_measured"] = {**as_dict(result["not_measured"]), "links": str(error)}
    publish(result, as_json=options.json)


def as_dict(value: object) -> dict[str, str]:
    assert isinstance(value, dict)
    return value


class Meter:
    """Seconds and processor seconds of each way."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.seconds: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def take(self, name: str, work: Callable[[], object]) -> None:
        """Time one transfer."""
        cpu, began = time.process_time(), time.perf_counter()
        work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self.cpu_s.setdefault(name, []).append(time.process_time() - cpu)

    def gbps(self, fold: Callable[[list[float]], float]) -> dict[str, float | None]:
        """Return GB/s by way; `fold` picks from the seconds of all rounds."""
        names = ("memcpy", "gloo", *_OURS, "nixl")
        found = {name: values[_WARM:] for name, values in self.seconds.items()}
        return {name: self.size_bytes / fold(found[name]) / 1e9 if name in found else None for name in names}


def measure(disk: Path, memory: Path, size_bytes: int, rounds: int) -> dict[str, object]:
    """Measure everything on loopback, in turns."""
    meter = Meter(size_bytes)
    missing = {"nixl": "there is no transport over it yet"}
    with ExitStack() as stack:
        store = stack.enter_context(opened(str(memory / "own")))
        source, copy = (asyncio.run(store.begin_put(size_bytes)) for _ in range(2))
        source.buffer[:] = content(size_bytes)
        copy.buffer[:] = source.buffer
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(np.asarray(copy.buffer), np.asarray(source.buffer)),
            "gloo": stack.enter_context(gloo_pair(disk, memory, size_bytes, rounds, source.buffer)),
        }
        for name in _OURS:
            try:
                ways[name] = stack.enter_context(stepwell_pair(name, disk, memory, source.buffer))
            except ImportError as error:
                missing[name] = str(error)
        for _ in range(_WARM + rounds):
            for name, work in ways.items():
                meter.take(name, work)
                tidy = getattr(work, "tidy", None)
                if tidy is not None:
                    tidy()
        source.discard()
        copy.discard()
    return report(meter, rounds, missing)


def report(meter: Meter, rounds: int, missing: dict[str, str]) -> dict[str, object]:
    middle = meter.gbps(statistics.median)

    def against_gloo(name: str) -> float | None:
        ours, theirs = middle[name], middle["gloo"]
        return None if ours is None or theirs is None else ours / theirs

    return {
        "object_bytes": meter.size_bytes,
        "rounds": rounds,
        "machine": machine(),
        "gbps": middle,
        "gbps_min": meter.gbps(max),
        "gbps_max": meter.gbps(min),
        "cpu_s_per_gb": {
            name: statistics.median(values[_WARM:]) / meter.size_bytes * 1e9
            for name, values in meter.cpu_s.items()
            if name != "memcpy"
        },
        "plain_to_gloo": against_gloo("plain"),
        "hmac_to_gloo": against_gloo("hmac"),
        "not_measured": missing,
    }


@contextmanager
def child(job: dict[str, object], secret: RunSecret | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the other process, which ends when its standard input does."""
    environment = {key: value for key, value in os.environ.items() if key != SECRET_VARIABLE}
    if secret is not None:
        environment[SECRET_VARIABLE] = secret.value.decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport_peer", json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=60)


@contextmanager
def gloo_pair(
    disk: Path, memory: Path, size_bytes: int, rounds: int, source: memoryview
) -> Iterator[Callable[[], object]]:
    """Give a call that sends `source` to another process with gloo."""
    job: dict[str, object] = {
        "role": "gloo",
        "directory": str(memory / "gloo"),
        "rendezvous": str(disk / "rendezvous"),
        "object_bytes": size_bytes,
        "repeats": _WARM + rounds,
    }
    with child(job):
        transfers = gloo(0, job, source)
        yield lambda: next(transfers)
        transfers.close()  # type: ignore[attr-defined]


class Put:
    """Sends the source to a peer of ours; `tidy` makes room for the next, untimed."""

    def __init__(self, store: PeerStore, source: memoryview) -> None:
        self._store = store
        self._source = source

    def __call__(self) -> None:
        """Send it."""
        asyncio.run(self._store.put("sent", [self._source]))

    def tidy(self) -> None:
        """Let the peer use the memory again."""
        asyncio.run(self._store.delete("sent"))


@contextmanager
def stepwell_pair(name: str, disk: Path, memory: Path, source: memoryview) -> Iterator[Put]:
    """Give a call that sends `source` to another process with our transport."""
    secret = None if name == "plain" else RunSecret.make()
    job: dict[str, object] = {"role": "serve", "directory": str(memory / name)}
    if name == "mtls":
        job["tls"] = str(certificates(disk / "tls"))
    with child(job, secret) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        if secret is None:
            os.environ.pop(SECRET_VARIABLE, None)
        else:
            os.environ[SECRET_VARIABLE] = secret.value.decode()
        transport = TcpTransport([address], identity("node-1", 2, job), peer_name="node-0")
        store = PeerStore(transport)
        yield Put(store, source)
        store.close()


def certificates(directory: Path) -> Path:
    """Write an authority and the certificates of both nodes; ImportError where ``trustme`` is missing."""
    import trustme

    directory.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "authority.pem")
    for name in ("node-0", "node-1"):
        certificate = authority.issue_cert(name)
        certificate.private_key_pem.write_to_path(directory / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
    return directory


if __name__ == "__main__":
    main()
