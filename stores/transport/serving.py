"""What a server does for one authenticated client, request by request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import replace as replaced
from typing import TypeVar

import xxhash

from stepwell.errors import StepwellError, TransientStoreError
from stepwell.stores.keys import check_directory, check_key, check_prefix
from stepwell.stores.landing import Landing, Sight, begin_put, look
from stepwell.stores.transport.channel import Channel, DamagedError
from stepwell.stores.transport.frames import WHOLE, Flag, Frame, Incarnation, Kind, Status
from stepwell.stores.transport.outcome import ERROR_TEXT_BYTES_MAX, Outcome, outcome_of
from stepwell.stores.transport.shelf import Shelf

__all__ = ["Serving"]

T = TypeVar("T")

_WRITES = frozenset({Kind.PUT, Kind.BEGIN, Kind.PART, Kind.COMMIT, Kind.DELETE, Kind.DELETE_BELOW})
_BELOW = frozenset({Kind.LIST, Kind.DELETE_BELOW})  # their key is a prefix
_PAGE_BYTES = 4 << 20
_COPIED_BYTES_MAX = 1 << 20  # 50 us; a writer that replaces objects of this size is not lost against
_LOOKS_MAX = 8
_DIGEST_SLICE_BYTES = 64 << 20


class _Refused(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Serving:
    """One client.

    Parameters
    ----------
    channel : Channel
    shelf : Shelf
        What the server serves, shared by all clients.
    incarnation : Incarnation
        Our own, shown in every answer.
    session : int
        Our own; requests for another one are refused.
    """

    def __init__(self, channel: Channel, shelf: Shelf, incarnation: Incarnation, session: int) -> None:
        self._channel = channel
        self._shelf = shelf
        self._incarnation = incarnation
        self._session = session

    async def serve(self) -> None:
        """Answer until the client goes, or sends what is no request.

        Raises
        ------
        TransientStoreError
            The connection ended, or cannot be gone on with.
        """
        while True:
            request = await self._channel.receive(patient=True)
            try:
                await self._serve_one(request)
            except _Refused as refused:
                # The payload was not taken: whoever sends it must not wait for us to want it.
                await self._channel.discard(request.payload_bytes)
                await self._tell(request, refused.outcome)

    async def _serve_one(self, request: Frame) -> None:
        self._check(request)
        match request.kind:
            case Kind.PUT:
                await self._put(request)
            case Kind.PART:
                await self._part(request)
            case Kind.GET:
                await self._get(request)
            case Kind.LIST:
                await self._list(request)
            case _:
                if request.payload_bytes:
                    raise _Refused(Outcome(Status.PERMANENT, f"{request.kind.name} has no payload"))
                await self._short(request)

    def _check(self, request: Frame) -> None:
        """Refuse what may not be done, before anything is done."""
        if request.session != self._session:
            raise _Refused(Outcome(Status.STALE_SESSION, "the request is meant for an earlier session"))
        if request.kind is Kind.ANSWER:
            raise _Refused(Outcome(Status.PERMANENT, "an answer is no request"))
        if request.kind in _WRITES and not self._shelf.takes_from(request.incarnation):
            raise _Refused(
                Outcome(
                    Status.SEALED,
                    f"incarnation {request.incarnation[0]} of the run is over, or there is another: "
                    "this node takes nothing of it any more",
                )
            )
        try:
            if request.kind in _BELOW:
                check_prefix(request.key)
            else:
                check_key(request.key)
        except StepwellError as error:
            raise _Refused(outcome_of(error, self._shelf.where)) from None

    # -- answers ------------------------------------------------------------------------------

    def _answer_to(self, request: Frame, status: Status = Status.OK, length: int = 0) -> Frame:
        return Frame(
            Kind.ANSWER,
            operation=request.operation,
            status=status,
            length=length,
            incarnation=self._incarnation,
            session=self._channel.peer.session,
        )

    async def _tell(self, request: Frame, outcome: Outcome) -> None:
        text = outcome.text.encode("utf-8", "replace")[:ERROR_TEXT_BYTES_MAX]
        text = text.decode("utf-8", "ignore").encode()  # cut between characters
        await self._channel.send(self._answer_to(request, outcome.status, len(text)), text)

    async def _attended(self, request: Frame, work: Coroutine[object, object, T] | Awaitable[T]) -> T:
        """Await `work`, and let the client know from time to time that we are at it."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._shelf.limits.working_s)
                if done:
                    return task.result()
                await self._channel.send(self._answer_to(request, Status.WORKING))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    # -- writing ------------------------------------------------------------------------------

    async def _put(self, request: Frame) -> None:
        size_bytes = request.length
        if size_bytes > self._shelf.limits.part_bytes:
            raise _Refused(Outcome(Status.PERMANENT, f"{size_bytes} bytes are too many for one frame"))
        if self._shelf.was_done(request.operation):
            raise _Refused(Outcome())
        try:
            self._shelf.admit(request.key, size_bytes)
            landing = await self._attended(request, begin_put(self._shelf.store, size_bytes))
        except Exception as error:
            raise _Refused(outcome_of(error, self._shelf.where)) from None
        try:
            await self._channel.land(landing.buffer)
        except DamagedError as error:
            landing.discard()
            await self._tell(request, Outcome(Status.DAMAGED, str(error)))
            return
        except BaseException:
            landing.discard()
            raise
        await self._publish(request, landing)

    async def _publish(self, request: Frame, landing: Landing) -> None:
        async def publish() -> None:
            try:
                await landing.publish(request.key, replace=not request.flags & Flag.CREATE)
            finally:
                landing.discard()

        outcome = await self._attended(request, self._shelf.once(request.operation, publish))
        await self._tell(request, outcome)

    async def _part(self, request: Frame) -> None:
        upload = self._shelf.uploads.find(request.operation)
        if upload is None:
            if self._shelf.was_done(request.operation):
                raise _Refused(Outcome())
            raise _Refused(Outcome(Status.UNKNOWN_UPLOAD, f"no upload of {request.key!r} is on its way"))
        start, end = request.offset, request.offset + request.length
        if request.key != upload.key or end > upload.size_bytes:
            text = f"bytes {start} to {end} do not belong to the {upload.size_bytes} of {upload.key!r}"
            raise _Refused(Outcome(Status.PERMANENT, text))
        if upload.has(start, end):
            raise _Refused(Outcome())
        with upload.writing(self._channel.wire, start, end) as target:
            try:
                await self._channel.land(target)
            except DamagedError as error:
                outcome = Outcome(Status.DAMAGED, str(error))
            else:
                upload.add(start, end)
                outcome = Outcome()
        await self._tell(request, outcome)

    async def _short(self, request: Frame) -> None:
        """Requests without a payload, answered by a status, but for STAT."""
        match request.kind:
            case Kind.STAT:
                await self._stat(request)
                return
            case Kind.ABORT:
                self._shelf.uploads.drop(request.operation)
                outcome = Outcome()
            case Kind.BEGIN:
                outcome = await self._attended(request, self._shelf.begin(request))
            case Kind.COMMIT:
                outcome = await self._attended(request, self._shelf.commit(request))
            case Kind.DELETE:
                outcome = await self._attended(request, self._shelf.delete(request))
            case _:
                outcome = await self._attended(request, self._shelf.delete_below(request))
        await self._tell(request, outcome)

    # -- reading ------------------------------------------------------------------------------

    async def _get(self, request: Frame) -> None:
        sight = await self._steady_sight(request)
        view = sight.view
        step = self._shelf.limits.part_bytes
        for start in range(0, max(view.nbytes, 1), step):
            piece = view[start : start + step]
            last = start + step >= view.nbytes
            frame = replaced(
                self._answer_to(request, length=piece.nbytes),
                offset=request.offset + start,
                total=sight.size_bytes,
                generation=sight.generation,
                flags=Flag.LAST if last else Flag.NONE,
            )
            await self._channel.send_parts(frame, [piece] if piece.nbytes else [], sight.valid)

    async def _steady_sight(self, request: Frame) -> Sight:
        """Look at what is to be sent; a small piece is copied, so that no writer spoils it on its way."""
        for _ in range(_LOOKS_MAX):
            sight = await self._sight(request)
            if request.generation and sight.generation != request.generation:
                break
            view = sight.view
            if request.flags & Flag.FIRST_PART and sight.generation:
                view = view[: request.total]
            if view.nbytes > _COPIED_BYTES_MAX:
                return Sight(view, sight.size_bytes, sight.generation, sight.valid)
            copy = memoryview(bytes(view))
            if sight.valid():
                return Sight(copy, sight.size_bytes, sight.generation, lambda: True)
        raise _Refused(Outcome(Status.CHANGED, f"{request.key!r} was replaced meanwhile"))

    async def _sight(self, request: Frame) -> Sight:
        length = None if request.length == WHOLE else request.length
        try:
            return await self._attended(request, look(self._shelf.store, request.key, request.offset, length))
        except Exception as error:
            raise _Refused(outcome_of(error, self._shelf.where)) from None

    async def _stat(self, request: Frame) -> None:
        digest = bool(request.flags & Flag.DIGEST)
        try:
            sight, found = await self._attended(request, self._looked(request.key, digest=digest))
        except Exception as error:
            raise _Refused(outcome_of(error, self._shelf.where)) from None
        answer = self._answer_to(request, length=len(found))
        answer = replaced(answer, total=sight.size_bytes, generation=sight.generation)
        await self._channel.send(answer, found)

    async def _looked(self, key: str, *, digest: bool) -> tuple[Sight, bytes]:
        store = self._shelf.store
        if not digest:
            sight = await look(store, key, 0, 0)
            return sight, b""
        sight = await look(store, key)
        found = await self._shelf.workers.run(lambda: _digest(sight.view))
        if not sight.valid():
            raise TransientStoreError(f"{key!r} was replaced while it was read")
        return sight, found

    async def _list(self, request: Frame) -> None:
        if request.length > _PAGE_BYTES:
            raise _Refused(Outcome(Status.PERMANENT, "the key to go on from is too long"))
        after = await self._channel.text(request.length)
        outcome, page = Outcome(), b""
        try:
            names = await self._attended(request, self._names(request))
            page, more = _page(names, after)
        except Exception as error:
            outcome, more = outcome_of(error, self._shelf.where), False
        if outcome.status is not Status.OK:
            await self._tell(request, outcome)
            return
        answer = self._answer_to(request, length=len(page))
        await self._channel.send(replaced(answer, flags=Flag.NONE if more else Flag.LAST), page)

    async def _names(self, request: Frame) -> list[str]:
        store = self._shelf.store
        if request.flags & Flag.DIRECT:
            check_directory(request.key)
            return sorted([name async for name in store.list_dir(request.key)])
        return sorted([key async for key in store.list_prefix(request.key)])


def _digest(view: memoryview) -> bytes:
    """Return xxh3-128, in steps that let other threads run in between."""
    hasher = xxhash.xxh3_128()
    for start in range(0, view.nbytes, _DIGEST_SLICE_BYTES):
        hasher.update(view[start : start + _DIGEST_SLICE_BYTES])
    return hasher.digest()


def _page(names: list[str], after: str) -> tuple[bytes, bool]:
    """Return the names behind `after` that fit one answer, and whether more follow."""
    page: list[bytes] = []
    size_bytes = 0
    for name in names:
        if after and name <= after:
            continue
        encoded = name.encode()
        size_bytes += len(encoded) + 1
        if size_bytes > _PAGE_BYTES:
            return b"\n".join(page), True
        page.append(encoded)
    return b"\n".join(page), False
