"""Requests end: what may pass is tried again, what will not never is, and everything has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from s3_proxy import Trouble, Way

from stepwell.errors import MissingObjectError, ObjectExistsError, PermanentStoreError, TransientStoreError
from stepwell.stores.remote import RemoteStore
from stepwell.stores.remote_options import RemoteOptions
from stepwell.stores.remote_url import blobs_of
from stepwell.stores.retry import RetriedBlobs
from stepwell.stores.testing import fetched

if TYPE_CHECKING:
    from s3_rig import Bucket

CALLS: dict[str, tuple[str, Callable[[RemoteStore], Awaitable[object]]]] = {
    "put": ("PUT", lambda store: store.put("k", [b"new"])),
    "put by reference": ("PUT", lambda store: store.put("k", [bytes(1_000_000)])),
    "put_batch": ("PUT", lambda store: store.put_batch([("a", [b"1"]), ("k", [b"2"])])),
    "create": ("PUT", lambda store: store.create("fresh", [b"new"])),
    "fetch": ("GET", lambda store: store.fetch("k")),
    "getsize": ("GET", lambda store: store.getsize("k")),
    "exists": ("HEAD", lambda store: store.exists("k")),
    "delete": ("DELETE", lambda store: store.delete("k")),
}
WAYS = [Way.SLOW_DOWN, Way.RESET, Way.UNANSWERED, Way.SILENT]


def store_of(s3: Bucket, **options: float) -> RemoteStore:
    return RemoteStore(RemoteOptions(s3.url, endpoint=s3.endpoint, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
async def test_what_may_pass_is_tried_again(s3: Bucket, call: str, way: Way) -> None:
    store = store_of(s3, timeout_s=1.0, retry_for_s=30.0)
    await store.put("k", [b"old"])
    method, operation = CALLS[call]
    s3.proxy.plan = [Trouble(way, method, times=1 if way is Way.SILENT else 2)]
    await operation(store)
    assert s3.proxy.plan[0].times == 0
    s3.proxy.plan = []
    wanted = {"put": b"new", "put by reference": bytes(1_000_000), "put_batch": b"2"}
    if call == "delete":
        with pytest.raises(MissingObjectError):
            await store.fetch("k")
    else:
        assert await fetched(store, "k") == wanted.get(call, b"old")


async def test_a_conditional_write_that_met_another_one_is_tried_again(s3: Bucket) -> None:
    store = store_of(s3)
    s3.proxy.plan = [Trouble(Way.CONFLICT, "PUT", times=2)]
    await store.create("k", [b"mine"])
    assert s3.get("run/k") == b"mine"


async def test_a_listing_is_tried_again(s3: Bucket) -> None:
    store = store_of(s3)
    await store.put("k", [b"old"])
    s3.proxy.plan = [Trouble(Way.SLOW_DOWN, "GET", "*list-type*"), Trouble(Way.RESET, "GET", "*list-type*")]
    assert [key async for key in store.list()] == ["k"]


@pytest.mark.parametrize("call", CALLS)
async def test_what_is_denied_is_never_tried_again(s3: Bucket, call: str) -> None:
    store = store_of(s3)
    await store.put("k", [b"old"])
    method, operation = CALLS[call]
    s3.proxy.plan = [Trouble(Way.DENIED, method, "*k" if call == "put_batch" else "*", times=100)]
    with pytest.raises(PermanentStoreError, match=r"check the credentials") as caught:
        await operation(store)
    assert not isinstance(caught.value, MissingObjectError)
    assert s3.proxy.plan[0].times == 99


async def test_a_bucket_that_is_not_there_is_never_tried_again(s3: Bucket) -> None:
    store = RemoteStore(RemoteOptions("s3://never-made/run", endpoint=s3.endpoint))
    for call in ("put", "put_batch", "create"):
        method, operation = CALLS[call]
        before = s3.proxy.count(method)
        with pytest.raises(PermanentStoreError, match="check the name, region and endpoint"):
            await operation(store)
        assert s3.proxy.count(method) <= before + (2 if call == "put_batch" else 1)
    with pytest.raises(PermanentStoreError, match="check the name, region and endpoint"):
        _ = [key async for key in store.list()]


async def test_tries_end_and_the_last_error_says_how_many_there_were(s3: Bucket) -> None:
    store = store_of(s3, retry_for_s=0.3)
    s3.proxy.plan = [Trouble(Way.SLOW_DOWN, times=1000)]
    began = time.monotonic()
    with pytest.raises(TransientStoreError, match=r"SlowDown.*tried [2-9] times"):
        await store.put("k", [b"x"])
    assert time.monotonic() - began < 10


async def test_silence_ends_at_the_deadline(s3: Bucket) -> None:
    store = store_of(s3, timeout_s=0.3, retry_for_s=0.0)
    s3.proxy.plan = [Trouble(Way.SILENT, times=1000)]
    for operation in (call for _, call in CALLS.values()):
        began = time.monotonic()
        with pytest.raises(TransientStoreError, match=r"no answer within|tried 1 times"):
            await operation(store)
        assert time.monotonic() - began < 10


async def test_a_service_that_is_away_is_worth_another_try() -> None:
    store = RemoteStore(
        RemoteOptions("s3://bucket/run", endpoint="http://127.0.0.1:9", retry_for_s=0.2, region="us-east-1")
    )
    with pytest.raises(TransientStoreError, match="worth another try"):
        await store.put("k", [b"x"])


async def test_a_create_whose_answer_was_lost_is_ours(s3: Bucket) -> None:
    store = store_of(s3)
    s3.proxy.plan = [Trouble(Way.UNANSWERED, "PUT", times=2)]
    await store.create("k", [b"mine"])
    assert s3.get("run/k") == b"mine"
    s3.proxy.plan = [Trouble(Way.RESET, "HEAD", times=2)]
    with pytest.raises(ObjectExistsError):
        await store.create("k", [b"another's"])
    assert s3.get("run/k") == b"mine"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s


async def test_pauses_double_up_to_a_limit_and_end_in_time(s3: Bucket) -> None:
    clock = Clock()
    blobs = RetriedBlobs(
        blobs_of(RemoteOptions(s3.url, endpoint=s3.endpoint)),
        timeout_s=30.0,
        retry_for_s=20.0,
        clock=clock,
        sleep=clock.sleep,
        uniform=lambda low, high: high,
    )
    s3.proxy.plan = [Trouble(Way.SLOW_DOWN, times=1000)]
    with pytest.raises(TransientStoreError, match="tried 10 times"):
        await blobs.write("k", np.zeros(3, np.uint8))
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_a_cancelled_request_is_not_tried_again(s3: Bucket) -> None:
    store = store_of(s3)
    s3.proxy.plan = [Trouble(Way.SILENT, times=1000)]
    task = asyncio.ensure_future(store.put("k", [b"x"]))
    assert await asyncio.to_thread(s3.proxy.came.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert s3.proxy.count("PUT") == 1


async def test_a_long_read_gets_the_time_that_its_size_needs(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole read names no length, so only after a first try is its size known."""
    blobs = blobs_of(RemoteOptions(s3.url, endpoint=s3.endpoint))
    await blobs.write("k", np.zeros(3_000_000, np.uint8))
    limits: list[float | None] = []
    real = asyncio.timeout

    def timeout(delay: float | None) -> contextlib.AbstractAsyncContextManager[object]:
        limits.append(delay)
        return real(delay)

    monkeypatch.setattr(asyncio, "timeout", timeout)
    s3.proxy.plan = [Trouble(Way.SILENT, "GET")]
    assert len(await RetriedBlobs(blobs, 1.0, 30.0).read("k") or b"") == 3_000_000
    assert limits[0] == 1.0
