"""Whole frames over one authenticated connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from stepwell.errors import TransientStoreError
from stepwell.stores.transport.frames import (
    HEAD_BYTES,
    SEAL_BYTES,
    TRAILER_BYTES,
    Frame,
    FrameError,
    decode,
    key_bytes_of,
)
from stepwell.stores.transport.handshake import Peer
from stepwell.stores.transport.wire import Wire

__all__ = ["Channel", "DamagedError"]

_SCRATCH_BYTES = 256 << 10


class DamagedError(TransientStoreError):
    """A payload did not have its checksum; the connection is still of use."""


class Channel:
    """Sends and receives frames; their seals and checksums are made and checked here.

    Parameters
    ----------
    wire : Wire
    peer : Peer
        From the handshake.
    frame_bytes_max : int
        A frame with a larger payload is an error, found before a byte of it is read.

    Attributes
    ----------
    settled : bool
        Its user's note: nothing is half sent or half read, so the connection may be used again.
    """

    def __init__(self, wire: Wire, peer: Peer, frame_bytes_max: int) -> None:
        self.wire = wire
        self.peer = peer
        self._frame_bytes_max = frame_bytes_max
        self.settled = True
        self._seal = b""  # of the frame whose payload comes next

    async def send(self, frame: Frame, payload: memoryview | bytes = b"") -> None:
        """Send one frame."""
        parts = [memoryview(payload)] if len(payload) else []
        await self.send_parts(frame, parts)

    async def send_parts(
        self, frame: Frame, parts: Sequence[memoryview], valid: Callable[[], bool] | None = None
    ) -> None:
        """Send one frame whose payload is the concatenation of `parts`, none of them empty.

        Parameters
        ----------
        valid : callable, optional
            Asked after the last byte was read: whether the parts were what they should be all the
            time. If not, the receiver gets a checksum that is wrong.
        """
        assert frame.payload_bytes == sum(part.nbytes for part in parts)
        covered = frame.encode()
        seal = self.peer.outgoing.seal(covered)
        await self.wire.write(covered + seal, more=bool(parts))
        if not parts:
            return
        hasher = xxhash.xxh3_64()
        for part in parts:
            await self.wire.write(part, hasher, more=True)
        checksum = hasher.intdigest()
        if valid is not None and not valid():
            checksum ^= 1
        await self.wire.write(self.peer.outgoing.trailer(seal, checksum))

    async def receive(self, *, patient: bool = False) -> Frame:
        """Return the next header; its payload, if any, must be taken by `land` or `discard`.

        Raises
        ------
        FrameError
            It is damaged, not from the peer, or larger than allowed. The connection is of no use.
        """
        head = await self.wire.read(HEAD_BYTES, patient=patient)
        behind = await self.wire.read(key_bytes_of(head) + SEAL_BYTES)
        key, seal = behind[:-SEAL_BYTES], behind[-SEAL_BYTES:]
        self.peer.incoming.check(head + key, seal)
        self._seal = seal
        frame = decode(head, key)
        if frame.payload_bytes > self._frame_bytes_max:
            raise FrameError(
                f"{self.wire.where} announces {frame.payload_bytes} bytes in one frame, more than "
                f"{self._frame_bytes_max}"
            )
        return frame

    async def land(self, target: memoryview) -> None:
        """Let the payload of the frame that was received land in `target`, and check it.

        Raises
        ------
        DamagedError
            Its checksum is wrong; what is in `target` means nothing.
        """
        hasher = xxhash.xxh3_64()
        if target.nbytes:
            await self.wire.read_into(target, hasher)
            await self._check_checksum(hasher.intdigest(), target.nbytes)

    async def _check_checksum(self, found: int, size_bytes: int) -> None:
        trailer = await self.wire.read(TRAILER_BYTES)
        if self.peer.incoming.checksum_of(self._seal, trailer) != found:
            raise DamagedError(
                f"{size_bytes} bytes from {self.wire.where} were damaged on their way: the checksum is wrong"
            )

    async def discard(self, size_bytes: int) -> None:
        """Read a payload that is not wanted."""
        scratch = memoryview(bytearray(min(size_bytes, _SCRATCH_BYTES)))
        left = size_bytes
        hasher = xxhash.xxh3_64()
        while left:
            piece = scratch[: min(left, scratch.nbytes)]
            await self.wire.read_into(piece, hasher)
            left -= piece.nbytes
        if size_bytes:
            await self._check_checksum(hasher.intdigest(), size_bytes)

    async def text(self, size_bytes: int) -> str:
        """Read a payload that is text."""
        buffer = bytearray(size_bytes)
        await self.land(memoryview(buffer))
        try:
            return buffer.decode()
        except UnicodeDecodeError as error:
            raise FrameError(f"{self.wire.where} sent a text that is no UTF-8") from error
