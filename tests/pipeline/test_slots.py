"""Capture slots: every bit, no old bytes, references counted, torch's threads left alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from capture_rig import Memory, MemoryRegion

from stepwell.errors import DeadlineError, NoSpaceError, UsageError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import as_integers, bit_equal, bytes_to_tensor, dtype_name
from stepwell.pipeline.copier import Copier
from stepwell.pipeline.layout import ITEM_BYTES, TensorSpec
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.slots import CopyPlan, LayoutMemory, SlotPool

DTYPES = [getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)]


def random_bits(shape, dtype, generator):
    count = int(np.prod(shape)) * ITEM_BYTES[dtype_name(dtype)]
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).numpy()
    return bytes_to_tensor(data, dtype_name(dtype), shape)


def plan_of(tensors, chunk_bytes=1024):
    specs = [
        TensorSpec(f"t{i}", tuple(t.shape), dtype_name(t.dtype), Kind.AUX) for i, t in enumerate(tensors)
    ]
    return CopyPlan(plan_layout(specs, chunk_bytes=chunk_bytes))


def memory_of(plan, extra=0):
    region = MemoryRegion(max(plan.layout.size_bytes + extra, 64))
    return LayoutMemory(torch.from_numpy(np.frombuffer(region.payload, dtype=np.uint8)), plan)


def found(memory, index):
    spec, offset = memory.layout.tensors[index], memory.layout.tensor_offsets[index]
    return bytes_to_tensor(memory.run[offset : offset + spec.size_bytes], spec.dtype, spec.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (5,), (3, 0), (7, 9), (40, 40)]
    tensors = [random_bits(shape, dtype, generator) for shape in shapes]
    tensors.append(random_bits((6, 8), dtype, generator).t())
    tensors.append(random_bits((6, 8), dtype, generator)[::2, 1::3])
    tensors.append(random_bits((1, 8), dtype, generator).expand(4, 8))
    memory = memory_of(plan_of(tensors))
    memory.copy_from(tensors)
    for index, tensor in enumerate(tensors):
        dense = as_integers(tensor).contiguous()
        assert torch.equal(as_integers(found(memory, index)), dense)


def test_all_patterns_of_two_byte_floats():
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    tensors = [patterns.view(torch.bfloat16), patterns.view(torch.float16), patterns.view(torch.float16)[::3]]
    memory = memory_of(plan_of(tensors, chunk_bytes=1 << 20))
    memory.copy_from(tensors)
    assert all(torch.equal(as_integers(found(memory, i)), as_integers(t)) for i, t in enumerate(tensors))


def test_conjugates_and_negatives_are_resolved():
    z = torch.randn(4, 4, dtype=torch.complex64)
    tensors = [z.conj(), z.conj().imag, z.t()]
    memory = memory_of(plan_of(tensors))
    memory.copy_from(tensors)
    assert torch.equal(found(memory, 0), z.conj().resolve_conj())
    assert torch.equal(found(memory, 1), -z.imag)


def test_one_call_for_each_shared_chunk_or_large_tensor():
    tensors = [torch.ones(10) for _ in range(1000)] + [torch.ones(100, 100)]
    plan = plan_of(tensors, chunk_bytes=16 << 10)
    assert sum(map(len, plan.groups)) == 1001
    assert len(plan.groups) <= len(plan.layout.chunks)
    assert len(plan.groups) < 20


def test_gaps_are_zero_and_chunks_are_views():
    tensors = [torch.ones(3), torch.ones(5), torch.ones(300)]
    memory = memory_of(plan_of(tensors), extra=128)
    memory.copy_from(tensors)
    total = sum(float(memory.chunk(part).view(np.float32).sum()) for part in range(len(memory.layout.chunks)))
    assert total == 308
    covered = np.zeros(memory.layout.size_bytes, bool)
    for spec, offset in zip(memory.layout.tensors, memory.layout.tensor_offsets, strict=True):
        covered[offset : offset + spec.size_bytes] = True
    assert not memory.run[~covered].any()


def test_missing_tensors_are_zero_however_often_they_come_and_go():
    tensors = [torch.ones(3), torch.full((5,), 2.0), torch.full((300,), 3.0)]
    memory = memory_of(plan_of(tensors))
    for missing in [(1,), (), (1, 2), (0,), (0, 1, 2), (1,), (1,)]:
        memory.copy_from([None if i in missing else t for i, t in enumerate(tensors)], missing)
        for index, tensor in enumerate(tensors):
            wanted = torch.zeros_like(tensor) if index in missing else tensor
            assert bit_equal(found(memory, index), wanted)


def test_views_are_made_once_and_gaps_zeroed_again_after_another_layout():
    pool = SlotPool(Memory().reserve, 1 << 16, 1)
    slot = pool.acquire(0)
    small, other = plan_of([torch.ones(3), torch.ones(3)]), plan_of([torch.ones(200)])
    memory = slot.memory(small)
    memory.copy_from([torch.ones(3), torch.ones(3)])
    slot.memory(other).copy_from([torch.ones(200)])
    assert slot.memory(small) is memory
    memory.copy_from([torch.ones(3), torch.ones(3)])
    assert memory.run.view(np.float32).sum() == 6
    assert slot.memory(small, 4096) is not memory


def test_layout_that_does_not_fit_is_refused():
    plan = plan_of([torch.ones(100)])
    with pytest.raises(UsageError, match="does not fit"):
        LayoutMemory(torch.zeros(64, dtype=torch.uint8), plan)


def test_slot_goes_back_with_its_last_reference():
    memory = Memory()
    pool = SlotPool(memory.reserve, 100, 2, recycle=memory.recycle)
    first, second = pool.acquire(0), pool.acquire(0)
    with pytest.raises(DeadlineError, match="none of 2 capture slots"):
        pool.acquire(0)
    first.retain()
    first.release()
    assert pool.free_count == 0
    first.claimed.add(1)
    first.release()
    assert pool.acquire(0) is first
    assert first.claimed == set()
    pool.close()
    assert memory.recycled == []
    first.release()
    second.release()
    assert len(memory.recycled) == 2
    pool.close()
    with pytest.raises((DeadlineError, UsageError)):
        pool.acquire(0)


def test_waiting_for_a_slot_ends_when_one_is_released_or_at_the_deadline():
    pool = SlotPool(Memory().reserve, 100, 1)
    slot = pool.acquire(0)
    with pytest.raises(DeadlineError):
        pool.acquire(0.01)
    releaser = threading.Thread(target=slot.release)
    releaser.start()
    assert pool.acquire(30) is slot
    releaser.join()


def test_slot_grows_and_a_lack_of_room_leaves_it_as_it_was():
    memory = Memory()
    pool = SlotPool(memory.reserve, 100, 1, recycle=memory.recycle)
    slot = pool.acquire(0, size_bytes=5000)
    assert slot.region.size_bytes == 5000
    assert memory.recycled == memory.reserved[:1]
    slot.release()
    memory.limit = 1
    with pytest.raises(NoSpaceError):
        pool.acquire(0, size_bytes=10_000)
    assert pool.free_count == 1
    assert pool.acquire(0).region.size_bytes == 5000


def test_lack_of_memory_shows_at_start():
    with pytest.raises(NoSpaceError):
        SlotPool(Memory(limit=2).reserve, 100, 3)
    with pytest.raises(UsageError):
        SlotPool(Memory().reserve, 100, 0)


def test_copier_uses_one_torch_thread_and_leaves_all_others_alone():
    before = torch.get_num_threads()
    copier, seen = Copier(), []
    copier.submit(lambda: seen.append(torch.get_num_threads())).result(30)
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    copier.close(30)
    assert seen == [1, before]
    assert torch.get_num_threads() == before


def test_copier_keeps_order_tells_errors_and_refuses_after_close():
    copier, seen = Copier(), []

    def fail():
        raise ValueError("no")

    failed = copier.submit(fail)
    done = [copier.submit(lambda n=n: seen.append(n)) for n in range(50)]
    done[-1].result(30)
    assert seen == list(range(50))
    assert isinstance(failed.exception(0), ValueError)
    assert not failed.cancel()
    copier.close(30)
    copier.close(30)
    with pytest.raises(UsageError, match="closed"):
        copier.submit(fail)


def test_copier_that_hangs_is_said_at_the_deadline():
    copier, go = Copier(), threading.Event()
    copier.submit(lambda: go.wait(30) and None)
    with pytest.raises(DeadlineError, match="did not end"):
        copier.close(0.01)
    go.set()


def test_copier_in_a_forked_child_raises_instead_of_hanging(monkeypatch):
    copier = Copier()
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(UsageError, match="forked"):
        copier.submit(lambda: None)
