"""Mutual TLS for peers: both sides show a certificate of the run's authority."""

from __future__ import annotations

import ssl
from pathlib import Path

from stepwell.errors import ConfigError

__all__ = ["MutualTls", "certified_names", "is_lasting_fault"]


# What OpenSSL calls it when the other side does not take our certificate, or speaks no TLS.
_LASTING = ("CERTIFICATE", "UNKNOWN_CA", "WRONG_VERSION_NUMBER", "PROTOCOL_VERSION", "HANDSHAKE_FAILURE")


class MutualTls:
    """What one node needs to speak TLS 1.3 with peers, in both directions.

    Parameters
    ----------
    certificate, key : path
        Of this node, PEM; the certificate names the node (subjectAltName, DNS).
    authority : path
        Certificates that sign those of peers, PEM. One of the run's own: everyone it signs may connect.

    Attributes
    ----------
    server, client : ssl.SSLContext

    Raises
    ------
    ConfigError
        A file cannot be read, or they do not fit together.
    """

    def __init__(self, *, certificate: Path | str, key: Path | str, authority: Path | str) -> None:
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the peer's name by itself
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_cert_chain(certificate, key)
                context.load_verify_locations(authority)
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(
                    f"cannot use {certificate}, {key} and {authority} for TLS: {error}"
                ) from error


def is_lasting_fault(error: BaseException | None) -> bool:
    """Say whether TLS failed for who the sides are, not for bytes that were damaged or lost."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return isinstance(error, ssl.SSLError) and any(name in (error.reason or "") for name in _LASTING)


def certified_names(certificate: object) -> frozenset[str]:
    """Return the DNS names in a certificate as ``SSLObject.getpeercert`` gives it."""
    if not isinstance(certificate, dict):
        return frozenset()
    return frozenset(value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
