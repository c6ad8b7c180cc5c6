"""Object storage through tensorstore: ``s3://``, ``gs://`` and ``memory://``.

tensorstore copies what is written into memory of its own while it holds the interpreter, 0.7 s for
200 MB (one run, a busy machine), and the training would wait. So large objects are written as the single,
uncompressed chunk of an array, which it sends straight from our memory; a ``kvstack`` gives that
chunk the name of the object.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import tensorstore as ts

from stepwell.errors import PermanentStoreError, StoreError, TransientStoreError, UsageError
from stepwell.stores.base import Failure
from stepwell.stores.blobs import Blob, Blobs
from stepwell.stores.condition import created_by_us

__all__ = ["KvBlobs"]

Result = TypeVar("Result")

BY_REFERENCE_BYTES_MIN = 1 << 18  # opening an array takes 0.5 ms, in which 256 KiB are copied many times
FAR = 1 << 50  # no object reaches here: S3 ends at 50 TB, GCS at 5 TiB
RACERS = 8  # writers of one object, all of which look before the first one writes
CLIPS_MAX = 4  # how often an object may be replaced by a shorter one while a part of it is read

_TRANSIENT = frozenset(
    {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN"}
)
_REFUSED = re.compile(r"\[http_response_code='4(?!08|09|29)\d\d'\]")
_CONFLICT = "[http_response_code='409']"  # S3: a conditional write met another one; it is to be tried again
_SIZE = re.compile(r"(?:total size |value of size |<ActualObjectSize>)(\d+)")
_DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")

_shared_memory: list[ts.Context] = []
_shared_memory_mutex = threading.Lock()


def memory_context() -> ts.Context:
    """Return the one context in which ``memory://`` keeps its objects for this process."""
    with _shared_memory_mutex:
        if not _shared_memory:
            _shared_memory.append(ts.Context())
        return _shared_memory[0]


class KvBlobs(Blobs):
    """Objects below the path of a tensorstore key-value store.

    Parameters
    ----------
    url : str
        For people.
    spec : mapping
        JSON of the key-value store; its ``path`` ends with ``/`` or is empty.
    context : tensorstore.Context
        Connections and limits, shared by everything that is opened here.
    survives : Failure
    """

    def __init__(
        self,
        url: str,
        spec: Mapping[str, object],
        context: ts.Context,
        survives: Failure = Failure.EVERYTHING,
    ) -> None:
        self._url = url
        self._spec = dict(spec)
        self._context = context
        self._survives = survives
        self._pid = os.getpid()
        self._opened: ts.KvStore | None = None

    @property
    def url(self) -> str:
        """As given."""
        return self._url

    @property
    def survives(self) -> Failure:
        """As given."""
        return self._survives

    @property
    def unconditional(self) -> str | None:
        """None: all three services have conditional writes; see also ``keeps_conditions``."""
        return None

    async def _kv(self) -> ts.KvStore:
        if os.getpid() != self._pid:
            # tensorstore ends the process that uses it in a forked child.
            raise UsageError(
                f"{self._url} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}; open it again there, or start processes with 'spawn'"
            )
        if self._opened is None:
            try:
                self._opened = await _awaited(ts.KvStore.open(self._spec, context=self._context))
            except ValueError as error:
                raise self._meaning(error, "open") from error
        return self._opened

    async def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read a range; see ``Blobs.read``."""
        kv = await self._kv()
        for _ in range(CLIPS_MAX):
            whole = start == 0 and stop is None
            try:
                result = await _awaited(kv.read(key, byte_range=None if whole else slice(start, stop)))
            except ValueError as error:
                if _status(error) != "OUT_OF_RANGE":
                    raise self._meaning(error, f"read {key!r}") from error
                size_bytes = _size_in(error)
            else:
                return None if result.state == "missing" else result.value
            if size_bytes is None:
                size_bytes = await self.size(key)
            if size_bytes is None:
                return None
            start, stop = min(start, size_bytes), size_bytes if stop is None else min(stop, size_bytes)
            if start >= stop:
                return b""
        raise TransientStoreError(f"{key!r} in {self._url} is replaced again and again while it is read")

    async def size(self, key: str) -> int | None:
        """Ask for a byte that no object has: the refusal names the size; else search for it."""
        try:
            # What lies so far off is never sent, so nothing but the answer costs anything.
            result = await _awaited((await self._kv()).read(key, byte_range=slice(FAR, FAR + 1)))
        except ValueError as error:
            if _status(error) != "OUT_OF_RANGE":
                raise self._meaning(error, f"ask for the size of {key!r}") from error
            found = _size_in(error)
            return await self._searched_size(key) if found is None else found
        if result.state == "missing":
            return None
        raise PermanentStoreError(f"{key!r} in {self._url}: the service answers for byte {FAR} of an object")

    async def _searched_size(self, key: str) -> int | None:
        """Find the size by asking for single bytes, where the service does not tell it."""
        high = 1
        while (reached := await self._reaches(key, high)) and high < FAR:
            high *= 2
        if reached is None:
            return None
        low = high // 2 if high > 1 else 0
        while low < high:  # the size is in [low, high]
            middle = (low + high + 1) // 2
            reached = await self._reaches(key, middle)
            if reached is None:
                return None
            low, high = (middle, high) if reached else (low, middle - 1)
        return low

    async def _reaches(self, key: str, size_bytes: int) -> bool | None:
        """Whether an object has at least `size_bytes` bytes (from 1 on); None if absent."""
        try:
            result = await _awaited(
                (await self._kv()).read(key, byte_range=slice(size_bytes - 1, size_bytes))
            )
        except ValueError as error:
            if _status(error) != "OUT_OF_RANGE":
                raise self._meaning(error, f"ask for the size of {key!r}") from error
            return False
        return None if result.state == "missing" else True

    async def write(self, key: str, data: Blob) -> None:
        """Write, large objects by reference; see ``Blobs.write``."""
        kv = await self._kv()
        try:
            if data.nbytes < BY_REFERENCE_BYTES_MIN:
                await _awaited(kv.write(key, data.tobytes()))
            else:
                await self._write_by_reference(key, data)
        except ValueError as error:
            raise self._meaning(error, f"put {key!r} of {data.nbytes} bytes") from error

    async def _write_by_reference(self, key: str, data: Blob) -> None:
        base = {**self._spec, "path": f"{self._spec.get('path', '')}{key}"}
        metadata = {
            "zarr_format": 2,
            "shape": [data.nbytes],
            "chunks": [data.nbytes],
            "dtype": "|u1",
            "order": "C",
            "compressor": None,
            "filters": None,
            "fill_value": None,
        }
        array = await _awaited(
            ts.open(
                {
                    "driver": "zarr",
                    # The only chunk has the key "0"; one character is cut off, and the object's name is left.
                    "kvstore": {
                        "driver": "kvstack",
                        "layers": [{"exact": "0", "strip_prefix": 1, "base": base}],
                    },
                    "metadata": metadata,
                    "open": True,
                    "assume_metadata": True,
                    "store_data_equal_to_fill_value": True,
                },
                # With a cache of its own: in a shared one, a second try would wait for the one that hangs.
                context=ts.Context({"cache_pool": {}}, self._context),
            )
        )
        await _awaited(array.write(data, can_reference_source_data_indefinitely=True).commit)

    async def create(self, key: str, data: Blob) -> bool:
        """Write with the condition that the key is still absent; see ``Blobs.create``."""
        kv = await self._kv()
        try:
            there = await _awaited(kv.read(key, byte_range=slice(0, 0)))
            if there.state != "missing":
                return False
            # The generation of the missing object: an empty one would mean no condition at all.
            assert there.stamp.generation
            stamp = await _awaited(kv.write(key, data.tobytes(), if_equal=there.stamp.generation))
        except ValueError as error:
            raise self._meaning(error, f"create {key!r} of {data.nbytes} bytes") from error
        # A lost race is an empty generation, not an error.
        return bool(stamp.generation) or await created_by_us(self, key, data)

    async def keeps_conditions(self, key: str) -> bool:
        """Race with ourselves; see ``Blobs.keeps_conditions``.

        tensorstore looks before it writes, so a second write alone would say nothing about the service.
        """
        kv = await self._kv()
        probe = f"{key}{secrets.token_hex(8)}"
        try:
            missing = (await _awaited(kv.read(probe))).stamp.generation
            racing = [kv.write(probe, bytes([at]), if_equal=missing) for at in range(RACERS)]
            stamps = await asyncio.gather(*map(_awaited, racing))
            await _awaited(kv.write(probe, None))
        except ValueError as error:
            raise self._meaning(error, f"create {probe!r}") from error
        return sum(bool(stamp.generation) for stamp in stamps) <= 1

    async def delete(self, key: str) -> None:
        """Remove an object."""
        kv = await self._kv()
        try:
            await _awaited(kv.write(key, None))
        except ValueError as error:
            raise self._meaning(error, f"delete {key!r}") from error

    async def list(self, prefix: str) -> list[str]:
        """List the keys with a prefix."""
        kv = await self._kv()
        start = prefix.encode()
        # No UTF-8 text has the byte 0xff, so this is above everything that starts with the prefix.
        keys = ts.KvStore.KeyRange(start, start[:-1] + bytes([start[-1] + 1])) if start else None
        try:
            return [key.decode("utf-8", "surrogateescape") for key in await _awaited(kv.list(keys))]
        except ValueError as error:
            raise self._meaning(error, f"list {prefix!r}") from error

    def close(self) -> None:
        """Let go of the store; connections end with the context."""
        self._opened = None

    def _meaning(self, error: ValueError, what: str) -> StoreError:
        """Say how to react to an error of tensorstore, which tells them apart by their text."""
        status, text = _status(error), f"cannot {what} in {self._url}: {_short(error)}"
        if _CONFLICT in str(error) or (status in _TRANSIENT and not _REFUSED.search(str(error))):
            return TransientStoreError(f"{text}; worth another try")
        if status in _DENIED:
            return PermanentStoreError(
                f"{text}; check the credentials (environment, profile or instance role) and the "
                "permissions of the bucket"
            )
        if status == "NOT_FOUND":
            return PermanentStoreError(f"{text}; check the name, region and endpoint of the bucket")
        return PermanentStoreError(text)


async def _awaited(future: ts.Future[Result]) -> Result:
    """Wait for a future of tensorstore, and leave it behind where this is cancelled.

    It may end long after that, when our loop is closed; awaited directly it would then raise in a thread of
    tensorstore's, for nobody.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell(_: ts.Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end)

    future.add_done_callback(tell)
    await ended
    return future.result()


def _status(error: ValueError) -> str:
    """Return the name of the status that every message of tensorstore begins with."""
    return str(error).partition(":")[0]


def _size_in(error: ValueError) -> int | None:
    found = _SIZE.search(str(error))
    return int(found[1]) if found else None


def _short(error: ValueError) -> str:
    """Return the message without the body of the answer, which may be long."""
    return re.sub(r" ?\[http_response_body='.*?'\](?= \[|$)", "", str(error), flags=re.DOTALL)[:500]
