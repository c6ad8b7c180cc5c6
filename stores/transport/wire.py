"""One connection: bytes land where its owner says, and no wait for the other side is endless."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

from stepwell.errors import PermanentStoreError, StoreError, TransientStoreError
from stepwell.stores.transport.tls import is_lasting_fault

__all__ = ["Hasher", "Wire"]

# What one system call moves at most. The loop serves others in between, and what was just moved is
# still in the cache when its checksum is taken.
_SLICE_BYTES = 2 << 20
_STAGING_BYTES = 64 << 10  # headers and what comes behind them; larger things land in their place
# While more than this is missing, the loop is woken for no less: 10 to 25 % less processor time on
# loopback, on a machine that others kept busy. A peer so slow that it does not bring as much within
# the deadline for progress would not meet the deadline of its call either.
_LOW_WATER_BYTES = 512 << 10
_YIELD_BYTES = 8 << 20  # a socket that always takes more would otherwise keep the loop


class Hasher(Protocol):
    """What a checksum is fed by."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""


class Wire(asyncio.BufferedProtocol):
    """A connection with one reading and one writing task at a time.

    Parameters
    ----------
    where : str
        The other side, for error messages; an accepted connection learns it when it is made.
    progress_s : float
        A wait in which no byte moves for so long ends the connection.
    made : callable, optional
        Told when the connection is there.

    Notes
    -----
    After any error, and after a cancelled read or write, the connection is of no use: `abort` it.
    """

    def __init__(self, where: str, progress_s: float, made: Callable[[Wire], None] | None = None) -> None:
        self.where = where
        self._progress_s = progress_s
        self._made = made
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sender: socket.socket | None = None
        self._error: StoreError | None = None
        self._lost = self._loop.create_future()
        # reading
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._staged = (0, 0)  # first byte not yet taken, and the one after the last
        self._target: memoryview | None = None
        self._hasher: Hasher | None = None
        self._filled = 0
        self._wanted = 0
        self._paused = False
        self._low_water = 1
        self._reader: asyncio.Future[None] | None = None
        # writing
        self._writer: asyncio.Future[None] | None = None
        # progress
        self._pressed = 0  # how many waits must see bytes move
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- made and lost ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up; asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        wrapped = transport.get_extra_info("socket")
        _set_options(wrapped, self._progress_s)
        if transport.get_extra_info("sslcontext") is None:
            # asyncio refuses ``sock_sendall`` on a descriptor that a transport reads from, and its
            # own ``write`` copies what the socket does not take at once. A second descriptor of the
            # same socket has neither fault.
            self._sender = wrapped.dup()
        else:
            transport.set_write_buffer_limits(high=0)
        if not self.where:
            self.where = _text_of(transport.get_extra_info("peername"))
        if self._made is not None:
            self._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let every waiter know; asyncio calls it."""
        reason = f": {exc}" if exc is not None else ""
        kind = PermanentStoreError if is_lasting_fault(exc) else TransientStoreError
        self._fail(kind(f"the connection to {self.where} ended{reason}"))
        self._let_go_of_sender()
        if not self._lost.done():
            self._lost.set_result(None)

    def eof_received(self) -> bool:
        """Close: half a connection is of no use; asyncio calls it."""
        return False

    @property
    def usable(self) -> bool:
        """Whether the connection is there, as far as is known."""
        return self._error is None and self._transport is not None

    @property
    def certificate(self) -> object:
        """What the other side showed under TLS, else None."""
        return None if self._transport is None else self._transport.get_extra_info("peercert")

    @property
    def encrypted(self) -> bool:
        """Whether this is TLS."""
        return self._transport is not None and self._sender is None

    def abort(self, error: StoreError | None = None) -> None:
        """End the connection now; nothing lands in anybody's memory from here on."""
        self._fail(error or TransientStoreError(f"the connection to {self.where} was given up"))
        self._let_go_of_sender()
        if self._transport is not None:
            self._transport.abort()

    async def lost(self) -> None:
        """Wait until asyncio is done with the connection, which is at once after `abort`."""
        if self._transport is not None:
            await asyncio.shield(self._lost)

    def _fail(self, error: StoreError) -> None:
        if self._error is None:
            self._error = error
        self._target = self._hasher = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._error)

    def _let_go_of_sender(self) -> None:
        sender = self._sender
        if sender is not None and sender.fileno() >= 0:
            self._loop.remove_writer(sender.fileno())
            sender.close()

    def _check(self) -> None:
        if self._error is not None:
            # A fresh one: the first may be shown elsewhere with its own cause.
            raise type(self._error)(*self._error.args)

    # -- progress -----------------------------------------------------------------------------

    async def _press(self, waiter: asyncio.Future[None]) -> None:
        """Wait for `waiter` while bytes move."""
        if not self._pressed:
            self._moved_at = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._progress_s, self._look)
        self._pressed += 1
        try:
            await waiter
        finally:
            self._pressed -= 1

    def _look(self) -> None:
        self._timer = None
        if not self._pressed:
            return
        left_s = self._moved_at + self._progress_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.abort(TransientStoreError(f"no byte to or from {self.where} moved for {self._progress_s:g} s"))

    # -- reading ------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes go; asyncio calls it."""
        if self._target is not None:
            return self._target[self._filled : self._filled + _SLICE_BYTES]
        return self._staging[self._staged[1] :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes that landed; asyncio calls it."""
        self._moved_at = self._loop.time()
        if self._target is not None:
            if self._hasher is not None:
                self._hasher.update(self._target[self._filled : self._filled + nbytes])
            self._filled += nbytes
            if self._target.nbytes - self._filled <= _LOW_WATER_BYTES:
                self._set_low_water(1)
            if self._filled == self._target.nbytes:
                self._target = self._hasher = None
                self._wake_reader()
            return
        first, end = self._staged
        self._staged = first, end + nbytes
        if self._reader is not None and end + nbytes - first >= self._wanted:
            self._wake_reader()
        if end + nbytes == _STAGING_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        """Move what is staged to the front, or stop reading where there is too much of it."""
        first, end = self._staged
        if first:
            self._staging[: end - first] = bytes(self._staging[first:end])
            self._staged = 0, end - first
        elif self._transport is not None and not self._paused and self.usable:
            self._paused = True
            self._transport.pause_reading()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _resume(self) -> None:
        if self._paused and self._transport is not None and self.usable:
            self._paused = False
            self._transport.resume_reading()

    async def read(self, size_bytes: int, *, patient: bool = False) -> bytes:
        """Return exactly so many bytes (at most 64 KiB).

        Parameters
        ----------
        patient : bool
            Wait for the first byte as long as it takes: nobody owes us one.
        """
        assert size_bytes <= _STAGING_BYTES
        if patient:
            await self._staged_at_least(1, press=False)
        await self._staged_at_least(size_bytes, press=True)
        return bytes(self._take(size_bytes))

    async def _staged_at_least(self, size_bytes: int, *, press: bool) -> None:
        first, end = self._staged
        if end - first >= size_bytes:
            return
        self._check()
        if _STAGING_BYTES - first < size_bytes:
            self._make_room()
        self._wanted = size_bytes
        self._resume()
        await self._await_reader(press=press)

    async def _await_reader(self, *, press: bool) -> None:
        assert self._reader is None, "two tasks read from one connection"
        self._reader = self._loop.create_future()
        try:
            if press:
                await self._press(self._reader)
            else:
                await self._reader
        finally:
            self._reader = None

    def _take(self, size_bytes: int) -> memoryview:
        first, end = self._staged
        taken = self._staging[first : first + size_bytes]
        first += size_bytes
        self._staged = (0, 0) if first == end else (first, end)
        return taken

    async def read_into(self, target: memoryview, hasher: Hasher | None = None) -> None:
        """Fill `target`, without a copy but for what came together with the header before it."""
        first, end = self._staged
        early = min(end - first, target.nbytes)
        if early:
            target[:early] = self._take(early)
            if hasher is not None:
                hasher.update(target[:early])
        if early == target.nbytes:
            return
        self._check()
        self._target, self._hasher, self._filled = target, hasher, early
        if target.nbytes - early > _LOW_WATER_BYTES:
            self._set_low_water(_LOW_WATER_BYTES)
        self._resume()
        try:
            await self._await_reader(press=True)
        finally:
            self._target = self._hasher = None

    def _set_low_water(self, size_bytes: int) -> None:
        """Be woken when so many bytes are there, or the connection ends, or no more fit the kernel."""
        sender = self._sender
        if size_bytes != self._low_water and sender is not None and sender.fileno() >= 0:
            self._low_water = size_bytes
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    # -- writing ------------------------------------------------------------------------------

    async def write(
        self, data: memoryview | bytes, hasher: Hasher | None = None, *, more: bool = False
    ) -> None:
        """Hand `data` to the socket, feeding `hasher` on the way.

        Parameters
        ----------
        more : bool
            Something follows at once: let it share a packet.
        """
        view = memoryview(data)
        since_yield = 0
        for start in range(0, view.nbytes, _SLICE_BYTES):
            piece = view[start : start + _SLICE_BYTES]
            if hasher is not None:
                hasher.update(piece)
            last = start + _SLICE_BYTES >= view.nbytes
            if self._sender is None:
                await self._write_encrypted(piece)
            else:
                await self._write_plain(self._sender, piece, socket.MSG_MORE if more or not last else 0)
            since_yield += piece.nbytes
            if since_yield >= _YIELD_BYTES:
                since_yield = 0
                await asyncio.sleep(0)

    async def _write_plain(self, sender: socket.socket, piece: memoryview, flags: int) -> None:
        while True:
            self._check()
            try:
                sent = sender.send(piece, flags)
            except (BlockingIOError, InterruptedError):
                await self._until_writable(sender)
                continue
            except OSError as error:
                self.abort(TransientStoreError(f"the connection to {self.where} broke: {error.strerror}"))
                continue
            self._moved_at = self._loop.time()
            if sent == piece.nbytes:
                return
            piece = piece[sent:]

    async def _until_writable(self, sender: socket.socket) -> None:
        assert self._writer is None, "two tasks write to one connection"
        writer = self._writer = self._loop.create_future()
        self._loop.add_writer(sender.fileno(), _settle, writer)
        try:
            await self._press(writer)
        finally:
            self._writer = None
            if sender.fileno() >= 0:
                self._loop.remove_writer(sender.fileno())

    async def _write_encrypted(self, piece: memoryview) -> None:
        self._check()
        assert self._transport is not None
        self._transport.write(piece)
        # Until asyncio has let go of it: the memory is not ours.
        if self._transport.get_write_buffer_size():
            assert self._writer is None, "two tasks write to one connection"
            self._writer = self._loop.create_future()
            try:
                await self._press(self._writer)
            finally:
                self._writer = None

    def pause_writing(self) -> None:
        """Nothing to do: `write` asks by itself; asyncio calls it."""

    def resume_writing(self) -> None:
        """Everything was handed to the socket; asyncio calls it."""
        self._moved_at = self._loop.time()
        if self._writer is not None:
            _settle(self._writer)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _set_options(sock: socket.socket, progress_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Without it a cut link blocks for a quarter of an hour. Beside our own clock, which sees only
    # waits: an acknowledgement that never comes while nobody waits is found by the kernel.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(progress_s * 1000)))
    # An idle connection to a machine that is gone is noticed too.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, round(progress_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(progress_s)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _text_of(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        return f"{address[0]}:{address[1]}"
    return "somebody"
