"""How two peers prove to each other that they know the run's secret, before anything else is said.

Four messages of one fixed length::

    client -> server   HELLO      run, name, session, a fresh nonce
    server -> client   CHALLENGE  the same of its own, and its proof
    client -> server   PROOF      its proof
    server -> client   WELCOME    or why not

A proof is HMAC-SHA256 with the secret over the role of who makes it and both first messages whole,
so it holds for these two nonces, names and sessions alone: one that was recorded earlier, or that
the other side made, proves nothing. The keys of both directions come from the same two messages.
Without a secret all stays the same with an empty one; it then finds accidents only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from stepwell.errors import PermanentStoreError, StoreError, TransientStoreError
from stepwell.stores.transport.frames import VERSION, Sealer
from stepwell.stores.transport.settings import NAME_BYTES_MAX, Identity
from stepwell.stores.transport.tls import certified_names
from stepwell.stores.transport.wire import Wire

__all__ = ["Answer", "Peer", "answer_client", "greet_server", "refuse"]

_MAGIC = b"STEPWELP"
_MESSAGE = struct.Struct(f"<8sHHB16s32sQ32sB{NAME_BYTES_MAX}s")
_NONCE_BYTES = 32
_WITH_SECRET = 1


class Answer(IntEnum):
    """What a server says to a client; anyone can say it, so it is believed only as a reason to stop."""

    WELCOME = 0
    VERSION = 1
    RUN = 2
    SECRET_NEEDED = 3
    NO_SECRET_HERE = 4
    PROOF = 5
    NAME = 6
    BUSY = 7


_MEANING = {
    Answer.VERSION: "speaks another version of the protocol; run the same stepwell on all nodes",
    Answer.RUN: "belongs to another run; check the address, or the name of the run",
    Answer.SECRET_NEEDED: "asks for the secret of the run, and none is configured here",
    Answer.NO_SECRET_HERE: "has no secret configured, so it cannot prove that it belongs to the run",
    Answer.PROOF: "says that our proof is wrong: it has another secret",
    Answer.NAME: "says that our certificate is not that of the node we say we are",
    Answer.BUSY: "has too many connections",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, and how its frames are sealed.

    Attributes
    ----------
    name : str
    session : int
    outgoing, incoming : Sealer
    """

    name: str
    session: int
    outgoing: Sealer
    incoming: Sealer


@dataclass(frozen=True, slots=True)
class _Message:
    run: bytes
    nonce: bytes
    session: int
    name: str
    has_secret: bool
    version: int = VERSION
    answer: Answer = Answer.WELCOME
    proof: bytes = bytes(32)

    def encode(self) -> bytes:
        name = self.name.encode()
        return _MESSAGE.pack(
            _MAGIC,
            self.version,
            self.answer,
            _WITH_SECRET if self.has_secret else 0,
            self.run,
            self.nonce,
            self.session,
            self.proof,
            len(name),
            name,
        )

    @classmethod
    def decode(cls, raw: bytes) -> _Message:
        """Read a message; ValueError where it is none."""
        magic, version, answer, flags, run, nonce, session, proof, name_bytes, name = _MESSAGE.unpack(raw)
        if magic != _MAGIC:
            raise ValueError(f"it starts with {magic!r}")
        if version != VERSION:  # what follows may be laid out otherwise
            return cls(run, nonce, 0, "", False, version)
        text = name[:name_bytes].decode()
        return cls(run, nonce, session, text, bool(flags & _WITH_SECRET), version, Answer(answer), proof)


def _own(identity: Identity) -> _Message:
    return _Message(
        run=hashlib.sha256(b"stepwell run\0" + identity.run.encode()).digest()[:16],
        nonce=secrets.token_bytes(_NONCE_BYTES),
        session=identity.session,
        name=identity.name,
        has_secret=identity.secret is not None,
    )


def _hmac(identity: Identity, role: bytes, hello: _Message, challenge: _Message) -> bytes:
    """Return HMAC over the role and both first messages, as they were without a proof."""
    key = b"" if identity.secret is None else identity.secret.value
    bare = _with_proof(challenge, bytes(32))
    return hmac.digest(key, b"stepwell peer\0" + role + b"\0" + hello.encode() + bare.encode(), "sha256")


def _with_proof(message: _Message, proof: bytes) -> _Message:
    return _Message(
        message.run, message.nonce, message.session, message.name, message.has_secret, proof=proof
    )


def _sealers(identity: Identity, hello: _Message, challenge: _Message) -> tuple[Sealer, Sealer]:
    """Return the sealer of what the server gets, and of what the client gets."""
    to_server = Sealer(_hmac(identity, b"to server", hello, challenge))
    return to_server, Sealer(_hmac(identity, b"to client", hello, challenge))


async def greet_server(wire: Wire, identity: Identity, expected_name: str | None) -> Peer:
    """Prove to a server who we are, and let it prove who it is.

    Raises
    ------
    PermanentStoreError
        It is no stepwell peer, not of this run, does not know the secret, or is not `expected_name`.
    TransientStoreError
        It went away or is busy.
    """
    hello = _own(identity)
    await wire.write(hello.encode())
    challenge = await _heard(wire)
    if challenge.run != hello.run:
        raise PermanentStoreError(f"the peer {wire.where} {_MEANING[Answer.RUN]}")
    if identity.secret is not None:
        if not challenge.has_secret:
            raise PermanentStoreError(f"the peer {wire.where} {_MEANING[Answer.NO_SECRET_HERE]}")
        if not hmac.compare_digest(challenge.proof, _hmac(identity, b"server", hello, challenge)):
            raise PermanentStoreError(f"the peer {wire.where} does not know the secret of this run")
    if expected_name is not None and challenge.name != expected_name:
        raise PermanentStoreError(f"the peer {wire.where} is {challenge.name!r}, not {expected_name!r}")
    proof = _hmac(identity, b"client", hello, challenge)
    await wire.write(_with_proof(hello, proof).encode())
    await _heard(wire)
    to_server, to_client = _sealers(identity, hello, challenge)
    return Peer(challenge.name, challenge.session, outgoing=to_server, incoming=to_client)


async def _heard(wire: Wire) -> _Message:
    """Read what a server says; a refusal is an error."""
    message = await _read_message(wire)
    answer = Answer.VERSION if message.version != VERSION else message.answer
    if answer is not Answer.WELCOME:
        kind: type[StoreError] = TransientStoreError if answer is Answer.BUSY else PermanentStoreError
        raise kind(f"the peer {wire.where} {_MEANING[answer]}")
    return message


async def _read_message(wire: Wire) -> _Message:
    raw = await wire.read(_MESSAGE.size)
    try:
        return _Message.decode(raw)
    except ValueError as error:
        raise PermanentStoreError(
            f"{wire.where} is no stepwell peer: it does not speak the protocol ({error})"
        ) from error


async def answer_client(wire: Wire, identity: Identity, busy: Callable[[], bool]) -> Peer:
    """Let a client prove who it is, and prove to it who we are; refuse it where `busy` says so.

    Raises
    ------
    PermanentStoreError
        It is no peer of this run; it was told why, as far as it understands.
    TransientStoreError
        It went away.
    """
    own = _own(identity)
    hello = await _read_message(wire)
    fault = _fault_of(hello, own)
    if fault is None and busy():
        fault = Answer.BUSY
    if fault is None and identity.tls is not None and hello.name not in certified_names(wire.certificate):
        fault = Answer.NAME
    if fault is not None:
        await refuse(wire, identity, fault)
        raise PermanentStoreError(f"{wire.where} was refused: {fault.name}")
    await wire.write(_with_proof(own, _hmac(identity, b"server", hello, own)).encode())
    proof = (await _read_message(wire)).proof
    if not hmac.compare_digest(proof, _hmac(identity, b"client", hello, own)):
        await refuse(wire, identity, Answer.PROOF)
        raise PermanentStoreError(f"{wire.where} does not know the secret of this run")
    await wire.write(own.encode())
    to_server, to_client = _sealers(identity, hello, own)
    return Peer(hello.name, hello.session, outgoing=to_client, incoming=to_server)


def _fault_of(hello: _Message, own: _Message) -> Answer | None:
    if hello.version != VERSION:
        return Answer.VERSION
    if hello.run != own.run:
        return Answer.RUN
    if own.has_secret and not hello.has_secret:
        return Answer.SECRET_NEEDED
    if hello.has_secret and not own.has_secret:
        return Answer.NO_SECRET_HERE
    return None


async def refuse(wire: Wire, identity: Identity, answer: Answer) -> None:
    """Tell a client why it may not connect."""
    own = _own(identity)
    message = _Message(own.run, own.nonce, 0, "", own.has_secret, answer=answer)
    await wire.write(message.encode())
