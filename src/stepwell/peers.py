"""Opening a peer tier: the way to a keeper on another node."""

from __future__ import annotations

import os
import secrets
import socket

from stepwell.config import PeerTier
from stepwell.stores.peer import PeerStore
from stepwell.stores.transport.client import TcpTransport
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.settings import NAME_BYTES_MAX, Identity, Limits
from stepwell.stores.transport.tls import MutualTls

__all__ = ["open_peer"]


def open_peer(tier: PeerTier, run: str, *, read_only: bool = False) -> PeerStore:
    """Return the store of a peer tier; nothing is connected yet.

    Parameters
    ----------
    tier : PeerTier
    run : str
        Name of the run, as its configuration has it.
    read_only : bool

    Raises
    ------
    ConfigError
        The secret or a certificate cannot be used, or the address is beyond this machine and there is
        neither.
    PermanentStoreError
        The file of the secret cannot be read.
    """
    secret = (
        RunSecret.from_environment() if tier.secret_file is None else RunSecret.from_file(tier.secret_file)
    )
    tls = None
    if tier.tls is not None:
        tls = MutualTls(certificate=tier.tls.certificate, key=tier.tls.key, authority=tier.tls.authority)
    # With TLS a peer is who its certificate says, so the name is that of the node alone.
    node = socket.gethostname() if tls is not None else f"{socket.gethostname()}/{os.getpid()}"
    identity = Identity(run, node[:NAME_BYTES_MAX], secrets.randbits(64), secret=secret, tls=tls)
    limits = Limits(call_s=tier.call_s)
    transport = TcpTransport(tier.addresses, identity, peer_name=tier.keeper, limits=limits)
    return PeerStore(transport, read_only=read_only)
