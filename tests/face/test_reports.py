"""Faults that people reported of neighbouring projects, tried here: state that has to come back as it was.

Each test is named for its symptom. ``docs/reports.md`` lists them all, also those that other files hold.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import warnings
from collections.abc import Coroutine
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from failure_rig import PATIENCE_S, Job, Run, break_tier, idle, uninterrupted
from report_rig import GRADIENTS, STATES, Things, open_with, told
from torch import Tensor, nn

import stepwell
from stepwell.errors import UnsupportedValueError
from stepwell.pipeline.bits import as_integers, bytes_to_tensor
from stepwell.pipeline.layout import ITEM_BYTES
from stepwell.stores.fault import Fault, FaultKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {
        name: (one.dtype, tuple(one.shape), as_integers(one.detach()).numpy().tobytes())
        for name, one in tensors.items()
    }


def stored_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


# Torn captures.


@pytest.mark.parametrize("base", [False, True], ids=["differential", "base"])
@pytest.mark.parametrize("pipeline", [GRADIENTS, STATES], ids=["gradient", "state"])
def test_async_save_of_cpu_tensors_wrote_values_changed_after_the_call(
    run: Run, monkeypatch: pytest.MonkeyPatch, pipeline: list[object], base: bool
) -> None:
    """torch 144657: every CPU tensor there is gets another value while all writes are held up."""
    run.keys = {"pipeline": pipeline}
    stall = Fault(FaultKind.STALL, "put", "*/000000000002/*", times=None)
    store = break_tier(monkeypatch, "directory", stall)
    job, mean = Job(), torch.zeros(3)
    job.model.register_buffer("mean", torch.zeros(4))
    with run.open(job, extra={"mean": mean}) as well:
        for step in range(3):
            job.step()
            mean.add_(1)
            job.model.mean.add_(1)
            handle = well.save(step, base=base and step == 2)
            if step < 2:
                handle.until(None, PATIENCE_S)
                idle(well)
        wanted = job.bits()
        states = [value for state in job.optimizer.state.values() for value in state.values()]
        with torch.no_grad():
            for tensor in (*job.model.parameters(), *job.model.buffers(), mean, *states):
                tensor.add_(1)
        store().release()
        handle.until(None, PATIENCE_S)
        idle(well)
        copy = run.copied("copy", memory=False)
    monkeypatch.undo()
    again, found = Job(seed=99), torch.full((3,), 7.0)
    again.model.register_buffer("mean", torch.ones(4))
    with copy.open(again, extra={"mean": found}) as well:
        restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.exact) == (2, True)
        assert again.bits() == wanted
    assert found.tolist() == [3.0] * 3


def test_staging_buffers_were_reused_while_the_writer_still_read_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron 2288: save, free, allocate garbage of the same sizes at once, 50 times, under a slow store."""
    run.keys = {"base_every": 10, "tiers": [{"kind": "directory", "path": str(run.directory), "keep": 9}]}
    break_tier(monkeypatch, "directory", Fault(FaultKind.SLOW, "put", times=None, delay_s=0.001))
    job = Job(width=64)
    shapes = [parameter.shape for parameter in job.model.parameters()]
    with run.open(job) as well:
        for step in range(50):
            job.step()  # the gradients go, while the capture may still read them
            well.save(step)
            garbage = [torch.full(shape, float("nan")) for shape in shapes * 4]
        well.wait_until_finished(PATIENCE_S)
        idle(well)
        assert len(garbage) == 4 * len(shapes)
    code, report = told(capsys, "verify", str(run.directory))
    assert code == 0, report
    wanted = uninterrupted(50, 64)
    for step in range(9, 50, 20):
        with stepwell.view(str(run.directory), step) as state:
            weight = np.asarray(zarr.open_group(state, mode="r")["model/0.weight"])
        assert weight.tobytes() == wanted[step]["model.0.weight"], step


def test_load_right_after_save_found_half_a_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan 930: save, change, look at once: the step before, or this one, and whole."""
    stall = Fault(FaultKind.STALL, "*", "*/step/000000000002/*", times=None)
    store = break_tier(monkeypatch, "directory", stall)
    job = Job()
    with run.open(job) as well:
        for step in range(2):
            job.step()
            well.save(step).until(None, PATIENCE_S)
        idle(well)
        job.step()
        handle = well.save(2)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.zero_()
        with stepwell.view(str(run.directory)) as state:
            assert state.step in (1, 2)
            weight = np.asarray(zarr.open_group(state, mode="r")["model/0.weight"])
            assert weight.tobytes() == uninterrupted(3)[state.step]["model.0.weight"]
        handle.until("memory", PATIENCE_S)
        copies = {1: run.copied("alone", memory=False), 2: run.copied("both")}
        store().release()
    monkeypatch.undo()
    for step, copy in copies.items():
        restored, found = copy.restored()
        assert restored is not None
        assert (restored.step, found) == (step, uninterrupted(3)[step])


# Aliases and views.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 16)
        self.head = nn.Linear(16, 500, bias=False)
        self.head.weight = self.embed.weight


def test_shared_tensor_keys_were_missing_on_load(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """accelerate 2875, DeepSpeed 8376: one payload, both names, and the two are one again."""
    things = Things.of(Tied())
    with open_with(run, things) as well:
        for step in range(2):
            things.step()
            well.save(step)
    again = Things.of(Tied())
    pointer = again.model.embed.weight.data_ptr()
    with open_with(run, again) as well:
        assert well.restore() is not None
    assert again.model.head.weight is again.model.embed.weight
    assert again.model.head.weight.data_ptr() == pointer
    assert bits(again.model.state_dict()) == bits(things.model.state_dict())

    code, shown = told(capsys, "show", str(run.directory), "0", "--base")
    assert code == 0
    (name,) = [row["name"] for row in shown["tensors"] if row["name"].startswith("model/")]
    aliases = shown["header"]["tree"]["model"]["aliases"]
    assert {name, *aliases} == {"model/embed.weight", "model/head.weight"}
    assert set(aliases.values()) == {name}
    with stepwell.view(str(run.directory), 1) as state:
        assert state.tree["model"]["aliases"] == aliases
    assert told(capsys, "verify", str(run.directory))[0] == 0
    (payload,) = run.objects("directory", "model/embed.weight/c/*/*")
    assert payload.stat().st_size == 32_000 + 4  # and a crc32c
    assert not run.objects("directory", "*head.weight*")


def test_saving_a_slice_stored_the_whole_base_storage(run: Run) -> None:
    """torch 40157: 1 KB of a tensor of 100 MB."""
    big = torch.empty(25_000_000)
    part = big[1000:1256].copy_(torch.arange(256.0))
    things = Things.of(nn.Linear(2, 2))
    with open_with(run, things) as well:
        well.close()
    things.model.register_buffer("part", part)
    with open_with(run, things, {"part": part}) as well:
        for step in range(2):
            things.step()
            well.save(step)
        well.wait_until_finished(PATIENCE_S)
        assert stored_bytes(run.directory) < 64 << 10
    found = torch.zeros(256)
    again = Things.of(nn.Linear(2, 2))
    again.model.register_buffer("part", torch.zeros(256))
    with open_with(run, again, {"part": found}) as well:
        well.restore()
    assert torch.equal(found, torch.arange(256.0))
    assert torch.equal(again.model.part, torch.arange(256.0))


# Shapes and dtypes.


SHAPES = ((), (0,), (0, 3), (1, 1, 1), (7,))
LENGTHS = range(10)


def any_bits(dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    count = int(np.prod(shape)) * ITEM_BYTES[dtype]
    top = 2 if dtype == "bool" else 256
    return bytes_to_tensor(np.random.default_rng(seed).integers(0, top, count, np.uint8), dtype, shape)


class Every(nn.Module):
    """Buffers of every dtype in every shape, all small patterns there are, and odd parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        shapes = (*SHAPES, *((length,) for length in LENGTHS))
        self.odd = nn.ParameterList([nn.Parameter(torch.full(shape, 0.5 + seed)) for shape in shapes])
        for dtype in ITEM_BYTES:
            for place, shape in enumerate(SHAPES):
                self.register_buffer(f"{dtype}_{place}", any_bits(dtype, shape, seed * 100 + place))
        for dtype in ("bfloat16", "float16", *(one for one in ITEM_BYTES if one.startswith("float8"))):
            width = ITEM_BYTES[dtype]
            patterns = np.arange(1 << 8 * width, dtype=f"<u{width}") * (1 - seed % 2)
            self.register_buffer(
                f"patterns_{dtype}", bytes_to_tensor(patterns.view(np.uint8), dtype, (patterns.size,))
            )
        zeros = torch.tensor([0.0, -0.0, 0.0, 0.0])
        self.register_buffer("negative", torch.full((2048,), -0.0) if seed == 2 else torch.zeros(2048))
        self.register_buffer("one_negative", zeros if seed == 2 else torch.zeros(4))


@pytest.mark.parametrize("pipeline", [GRADIENTS, STATES], ids=["gradient", "state"])
def test_dtypes_shapes_and_minus_zeros_were_lost_on_the_way(
    run: Run, pipeline: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 131976 and 108869, huggingface_hub 4901, GPTQModel 2863, zarr-python 3216, in one run.

    Everything torch can hold, through capture, pack, memory, zarr group, replay, restore and view.
    """
    run.keys = {"pipeline": pipeline, "chunk_bytes": 1 << 16}
    things = Things.of(Every(1))
    with open_with(run, things) as well:
        for step, seed in enumerate((1, 3, 2)):
            things.step()
            for name, value in Every(seed).named_buffers():
                as_integers(getattr(things.model, name)).copy_(as_integers(value))
            well.save(step, base=step == 1)
        well.wait_until_finished(PATIENCE_S)
        idle(well)
        copies = [run.copied("both"), run.copied("alone", memory=False)]
    wanted = bits(things.model.state_dict())
    assert wanted["negative"][2] == b"\0\0\0\x80" * 2048
    for copy in copies:
        again = Things.of(Every(5))
        with open_with(copy, again) as well:
            restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.exact) == (2, True)
        assert bits(again.model.state_dict()) == wanted
    assert told(capsys, "verify", str(run.directory))[0] == 0
    with stepwell.view(str(run.directory), 2) as state:
        group = zarr.open_group(state, mode="r")
        for name, (_, shape, data) in list(wanted.items())[::15]:
            array = np.asarray(group[f"model/{name}"])
            assert (array.shape, array.tobytes()) == (shape, data), name


def refused_dtypes() -> list[torch.dtype]:
    found = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    return sorted((one for one in found if str(one).removeprefix("torch.") not in ITEM_BYTES), key=str)


def test_dtype_table_lagged_behind_and_raised_keyerror(run: Run) -> None:
    """huggingface_hub 4901: what cannot be saved is refused by name, before anything is written."""
    extra: dict[str, object] = {"thing": {"value": 1}}
    job = Job()
    with run.open(job, extra=extra) as well:
        for dtype in refused_dtypes():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                extra["thing"]["value"] = torch.empty(2, dtype=dtype)  # type: ignore[index]
            with pytest.raises(UnsupportedValueError) as raised:
                well.save(0)
            assert re.search(rf"thing.*{str(dtype).removeprefix('torch.')}\b", str(raised.value))
        assert not run.objects("directory", "*.pack")
        assert not run.objects("directory", "commit.json")
        extra["thing"]["value"] = 2  # type: ignore[index]
        well.save(0).until(None, PATIENCE_S)


# Many small things.


def test_half_a_million_tiny_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oyster 45: scalars share packs, and are read back chunk by chunk, not one by one.

    Only a base in a directory has two files a tensor; so this is the memory tier.
    """
    count = 500
    run.keys = {"tiers": [{"kind": "memory", "directory": str(run.memory)}]}
    things = Things.of(nn.ParameterList([nn.Parameter(torch.tensor(float(at))) for at in range(count)]))
    with open_with(run, things) as well:
        for step in range(3):
            things.step()
            well.save(step).until(None, PATIENCE_S)
        idle(well)
        assert len(run.objects("memory", "*")) < 40
        copy = Run(run.root / "copy")
        copy.root.mkdir()
        shutil.copytree(run.memory, copy.memory)
    copy.keys = {"tiers": [{"kind": "memory", "directory": str(copy.memory)}]}
    again = Things.of(nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(count)]))
    asked, bridge = [], asyncio.run_coroutine_threadsafe

    def counted(coroutine: Coroutine[object, object, object], loop: asyncio.AbstractEventLoop) -> object:
        asked.append(coroutine)
        return bridge(coroutine, loop)

    with open_with(copy, again) as well:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", counted)
        assert well.restore() is not None
    assert bits(again.model.state_dict()) == bits(things.model.state_dict())
    # Each one is a round trip between two threads: 20,000 scalars took a minute that way.
    assert len(asked) < 40
