from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trustme
from transport_faults import TO_SERVER, Fault, proxy
from transport_rig import CLIENT, LIMITS, SERVER, memory_store, serving, transport_to

from stepwell.errors import ConfigError, PermanentStoreError, StoreError, TransientStoreError
from stepwell.stores.memory import MemoryStore
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.server import PeerServer
from stepwell.stores.transport.tls import MutualTls, certified_names

LARGE = np.random.default_rng(0).bytes(5 * LIMITS.part_bytes + 11)
Certify = Callable[..., MutualTls]


@pytest.fixture
def certify(tmp_path: Path) -> Certify:
    """Give what makes the TLS of a node, signed by the authority of the run or by another one."""
    authorities = {"run": trustme.CA(), "other": trustme.CA()}

    def make(*names: str, signed_by: str = "run", trusts: str = "run") -> MutualTls:
        directory = tmp_path / "-".join([*names, signed_by, trusts])
        directory.mkdir()
        certificate = authorities[signed_by].issue_cert(*names)
        key, chain, authority = (directory / name for name in ("key.pem", "chain.pem", "authority.pem"))
        certificate.private_key_pem.write_to_path(key)
        for part in certificate.cert_chain_pems:
            part.write_to_path(chain, append=True)
        authorities[trusts].cert_pem.write_to_path(authority)
        return MutualTls(certificate=chain, key=key, authority=authority)

    return make


@pytest.fixture
def far(memory_directory: Path) -> Iterator[MemoryStore]:
    with memory_store(memory_directory) as store:
        yield store


@pytest.fixture
def server(far: MemoryStore, certify: Certify) -> Iterator[PeerServer]:
    with serving(far, replace(SERVER, tls=certify("node-0"))) as running:
        yield running


@pytest.mark.parametrize("with_secret", [True, False])
async def test_objects_travel_encrypted(far: MemoryStore, certify: Certify, with_secret: bool) -> None:
    secret = SERVER.secret if with_secret else None
    with (
        serving(far, replace(SERVER, secret=secret, tls=certify("node-0"))) as server,
        proxy(server.addresses[0]) as between,
    ):
        identity = replace(CLIENT, secret=secret, tls=certify("node-1"))
        transport = TcpTransport([between.address], identity, peer_name="node-0", limits=LIMITS)
        await transport.put("a-key-to-look-for", [LARGE[:7], LARGE[7:]])
        await transport.put("s", [b"a text to look for" * 10])
        assert bytes(await transport.get("a-key-to-look-for")) == LARGE
        assert bytes(await far.fetch("a-key-to-look-for")) == LARGE
        await transport.close()
        for recorded in between.recorded:
            for secret_text in (b"look for", b"look-for", LARGE[1000:1020], b"STEPWELP", b"node-1"):
                assert secret_text not in recorded


async def test_without_a_certificate_of_the_run_nobody_is_let_in(
    server: PeerServer, far: MemoryStore, certify: Certify
) -> None:
    stranger = replace(CLIENT, tls=certify("node-1", signed_by="other"))
    deceived = replace(CLIENT, tls=certify("node-1", trusts="other"))
    for identity, message in ((stranger, "certificate"), (deceived, "certificate"), (CLIENT, "ended")):
        transport = transport_to(server, identity)
        with pytest.raises(StoreError, match=message):
            await transport.put("k", [b"x"])
        await transport.close()
    assert [key async for key in far.list()] == []
    transport = transport_to(server, replace(CLIENT, tls=certify("node-1")))
    await transport.put("k", [b"x"])
    await transport.close()


async def test_who_claims_another_name_is_refused(server: PeerServer, certify: Certify) -> None:
    claiming = replace(CLIENT, name="node-2", tls=certify("node-1"))
    transport = transport_to(server, claiming)
    with pytest.raises(PermanentStoreError, match="certificate is not that of the node"):
        await transport.put("k", [b"x"])
    await transport.close()


async def test_a_server_with_the_certificate_of_another_node_is_refused(
    far: MemoryStore, certify: Certify
) -> None:
    with serving(far, replace(SERVER, tls=certify("node-7"))) as impostor:
        transport = transport_to(impostor, replace(CLIENT, tls=certify("node-1")))
        with pytest.raises(PermanentStoreError, match="certificate"):
            await transport.put("k", [b"x"])
        await transport.close()


async def test_a_server_without_tls_is_sent_nothing(far: MemoryStore, certify: Certify) -> None:
    with serving(far, limits=replace(LIMITS, handshake_s=1.0)) as plain:
        transport = transport_to(
            plain, replace(CLIENT, tls=certify("node-1")), replace(LIMITS, handshake_s=1.0)
        )
        with pytest.raises(StoreError):
            await transport.put("k", [b"x"])
        await transport.close()
    assert [key async for key in far.list()] == []


async def test_a_flipped_byte_in_a_large_object_is_made_up_for(
    server: PeerServer, far: MemoryStore, certify: Certify
) -> None:
    with proxy(server.addresses[0]) as between:
        identity = replace(CLIENT, tls=certify("node-1"))
        for at in (20_000, 100_000):
            between.fault = Fault(TO_SERVER, at, "flip")
            transport = TcpTransport([between.address], identity, peer_name="node-0", limits=LIMITS)
            await transport.put("k", [LARGE])
            assert not between.fault.times
            assert bytes(await far.fetch("k")) == LARGE
            await transport.close()


async def test_a_link_that_holds_everything_back_is_given_up(server: PeerServer, certify: Certify) -> None:
    limits = replace(LIMITS, progress_s=0.3, attempts_max=2)
    with proxy(server.addresses[0]) as between:
        between.fault = Fault(TO_SERVER, 20_000, "hold", times=100)
        identity = replace(CLIENT, tls=certify("node-1"))
        transport = TcpTransport([between.address], identity, peer_name="node-0", limits=limits)
        with pytest.raises(TransientStoreError, match="moved for"):
            await transport.put("k", [bytes(8 << 20)])
        await transport.close()


def test_files_that_are_none_are_a_fault_of_the_configuration(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for certificate in (empty, tmp_path / "absent.pem"):
        with pytest.raises(ConfigError, match=certificate.name):
            MutualTls(certificate=certificate, key=certificate, authority=certificate)


def test_names_in_a_certificate() -> None:
    found = certified_names({"subjectAltName": (("DNS", "a"), ("IP Address", "1.2.3.4"), ("DNS", "b"))})
    assert found == {"a", "b"}
    assert certified_names(None) == certified_names({}) == frozenset()
