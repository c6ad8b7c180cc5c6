"""One opener of a run on object storage: refusal of a second, takeover of a dead one, fencing."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stepwell.errors import LockedError, PermanentStoreError, UsageError
from stepwell.stores import opener
from stepwell.stores.blobs_kv import KvBlobs, memory_context
from stepwell.stores.opener import OpenerLock
from stepwell.stores.remote import RemoteStore
from stepwell.stores.remote_options import RemoteOptions
from stepwell.stores.testing import fetched
from stepwell.stores.threads import wait_apart

if TYPE_CHECKING:
    from s3_rig import Bucket

_names = itertools.count(1)

HOLD = """
import sys
from stepwell.stores.remote import RemoteStore
from stepwell.stores.remote_options import RemoteOptions
store = RemoteStore(RemoteOptions(sys.argv[1], lease_s=1.0))
store.lock("run").acquire()
print("held", flush=True)
sys.stdin.read()
"""


def options_of(s3: Bucket, lease_s: float = 1.0) -> RemoteOptions:
    return RemoteOptions(s3.url, endpoint=s3.endpoint, lease_s=lease_s)


def held_elsewhere(s3: Bucket) -> subprocess.Popen[str]:
    """Let another process become the opener."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, s3.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **s3.environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def move_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """From here on this process seems to run on another machine."""
    patch.setattr(opener, "_boot_of_this_machine", lambda: "another boot")


def test_a_living_process_is_named_and_a_dead_one_is_followed_at_once(s3: Bucket) -> None:
    process = held_elsewhere(s3)
    second = RemoteStore(options_of(s3, lease_s=600.0)).lock("run")
    with pytest.raises(LockedError, match=f"process {process.pid} on "):
        second.acquire()
    assert not second.held
    os.kill(process.pid, signal.SIGKILL)
    end(process)
    second.acquire()  # without the ten minutes of its lease
    assert second.number == 2
    second.release()
    assert not second.held


def test_the_same_process_is_refused_too(s3: Bucket) -> None:
    first, second = (RemoteStore(options_of(s3)).lock("run") for _ in range(2))
    first.acquire()
    with pytest.raises(LockedError, match="already"):
        first.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()


def test_another_machine_is_believed_to_live_while_it_gives_signs(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RemoteStore(options_of(s3)).lock("run")
    first.acquire()
    second = RemoteStore(options_of(s3, lease_s=30.0)).lock("run")
    with monkeypatch.context() as patch:
        move_elsewhere(patch)
        with pytest.raises(LockedError, match="end it first"):
            second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_another_machine_without_a_sign_for_a_lease_is_followed_and_fenced(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(options_of(s3))
    first = store.lock("run")
    first.acquire()
    asyncio.run(store.create("before", [b"1"]))
    # Its signs of life end, as those of a stopped process do; it does not know.
    first._ended.set()
    assert first._beating is not None
    first._beating.join()
    other = RemoteStore(options_of(s3))
    second = other.lock("run")
    with monkeypatch.context() as patch:
        move_elsewhere(patch)
        second.acquire()
    assert second.number == 2
    for write in (
        lambda: store.create("after", [b"1"]),
        lambda: store.delete("before"),
        lambda: store.delete_dir(""),
        lambda: store.sweep_temps(),
    ):
        with pytest.raises(PermanentStoreError, match="taken over by process"):
            asyncio.run(write())
    assert not asyncio.run(other.exists("after"))
    assert asyncio.run(fetched(other, "before")) == b"1"
    asyncio.run(other.create("after", [b"2"]))
    second.release()


def test_a_create_that_was_overtaken_is_not_acknowledged(s3: Bucket) -> None:
    """The takeover comes between the question before the create and the answer to it."""
    store = RemoteStore(options_of(s3))
    lock = store.lock("run")
    lock.acquire()
    create = store._objects.create

    async def overtaken(key: str, views: object, size_bytes: int) -> bool:
        done = await create(key, views, size_bytes)  # type: ignore[arg-type]
        s3.put("run/.stepwell-opener-run/000002.json", json.dumps({"pid": 1, "host": "elsewhere"}).encode())
        return done

    store._objects.create = overtaken  # type: ignore[method-assign]
    with pytest.raises(PermanentStoreError, match="taken over by process 1 on elsewhere"):
        asyncio.run(store.create("k", [b"1"]))
    lock.release()


def test_of_racing_openers_one_succeeds(s3: Bucket) -> None:
    locks = [RemoteStore(options_of(s3)).lock("run") for _ in range(4)]
    start = threading.Barrier(len(locks))
    results: list[BaseException | None] = [None] * len(locks)

    def acquire(at: int) -> None:
        start.wait()
        try:
            locks[at].acquire()
        except LockedError as error:
            results[at] = error

    threads = [threading.Thread(target=acquire, args=(at,)) for at in range(len(locks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(result is None for result in results) == 1
    assert sum(lock.held for lock in locks) == 1
    for lock in locks:
        lock.release()


def test_a_service_that_ignores_conditions_is_refused(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old service stores every PUT; here the conditions are cut from the requests on their way."""
    s3.proxy.dropped_headers = {"if-none-match"}
    with pytest.raises(PermanentStoreError, match="ignores conditions on writes"):
        RemoteStore(options_of(s3)).lock("run").acquire()
    s3.proxy.dropped_headers = set()
    lock = RemoteStore(options_of(s3)).lock("run")
    lock.acquire()
    lock.release()


def test_a_damaged_record_of_an_opener_keeps_nobody_out_for_longer_than_a_lease(s3: Bucket) -> None:
    s3.put("run/.stepwell-opener-run/000007.json", b"\xff{")
    lock = RemoteStore(options_of(s3)).lock("run")
    lock.acquire()
    assert lock.number == 8
    lock.release()


def test_a_store_without_its_lock_is_not_fenced_and_a_released_one_writes_nothing_more(s3: Bucket) -> None:
    store = RemoteStore(options_of(s3))
    asyncio.run(store.create("free", [b"1"]))
    lock = store.lock("run")
    lock.acquire()
    lock.release()
    with pytest.raises(UsageError, match="without its lock"):
        asyncio.run(lock.check())


def test_a_waiter_uses_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of the other's lease passes at once by a clock that runs: nothing waits for wall time."""
    blobs = KvBlobs(
        "memory://opener",
        {"driver": "memory", "path": f"opener-{os.getpid()}-{next(_names)}/"},
        memory_context(),
    )
    about = {"pid": 5, "boot": "another", "host": "gone", "lease_s": 3600.0}
    record = np.frombuffer(json.dumps(about).encode(), np.uint8)
    wait_apart(blobs.write(".stepwell-opener-run/000001.json", record))
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 2000.0
        return now_s

    slept: list[float] = []

    async def no_sleep(pause_s: float) -> None:
        slept.append(pause_s)

    monkeypatch.setattr(opener.asyncio, "sleep", no_sleep)
    lock = OpenerLock(blobs, "run", 20.0, monotonic=clock)
    lock.acquire()
    assert lock.number == 2
    assert slept == [360.0], "a tenth of the hour"
    lock.release()
