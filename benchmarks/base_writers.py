"""Ways to bring one base to a disk, durably, and back: ours in both layouts, and what others use.

Every ``write`` returns when all is durable, files and directories. Every ``read`` gives the whole state in
fresh memory. Whoever needs warm buffers or plans makes them before, as a run does once.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from stepwell.pipeline.base import Kind
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.keys import incarnation_name
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.manifest import Manifest
from stepwell.pipeline.pack import PackIdentity, PackKind
from stepwell.pipeline.plan import plan_layout
from stepwell.pipeline.records import Link
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.source import READ_AHEAD, SaveSource
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.zarr_base import GroupPlan, export_base
from stepwell.pipeline.zarr_pack import PackedPlan, export_packed
from stepwell.stores.file import FileStore

__all__ = [
    "Base",
    "Dcp",
    "Plain",
    "Safetensors",
    "Stepwell",
    "Tensorstore",
    "Writer",
    "gpt_base",
    "small_base",
]

Found = Mapping[str, np.ndarray]

_LINK = Link(incarnation_name(1, 1), 0)


class Writer(Protocol):
    """One way to bring a base to a directory and back."""

    name: str

    def write(self, directory: Path) -> None:
        """Write the base below a directory that is not there yet."""

    def read(self, directory: Path) -> Found:
        """Read it back into fresh memory; `Base.check` knows the names."""


class Base:
    """A state in one run of memory, as a captured one.

    Attributes
    ----------
    layout : Layout
    run : ndarray, (layout.size_bytes,), uint8
    tensors : dict of str to Tensor
        They alias `run`.
    """

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]], chunk_bytes: int = 16 << 20) -> None:
        specs = [TensorSpec(name, shape, "float32", Kind.WEIGHT, "optim:0") for name, shape in shapes]
        self.layout: Layout = plan_layout(specs, chunk_bytes=chunk_bytes)
        self.run = np.zeros(self.layout.size_bytes, np.uint8)
        rng = np.random.default_rng(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for spec, offset in zip(self.layout.tensors, self.layout.tensor_offsets, strict=True):
            part = self.run[offset : offset + spec.size_bytes].view(np.float32)
            rng.standard_normal(out=part.reshape(spec.shape), dtype=np.float32)
            self.tensors[spec.name] = torch.from_numpy(part.reshape(spec.shape))

    def check(self, found: Found) -> None:
        """Raise AssertionError unless what was read is the whole base, bit for bit.

        Names are those of the tensors, ``run`` for all in one, or the numbers of the layout's chunks.
        """
        chunks = self.layout.chunks
        known: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        wanted = {"run": {"run": self.run}}.get(next(iter(found)), known)
        if next(iter(found)).isdigit():
            ends = [(chunk.offset_bytes, chunk.offset_bytes + chunk.size_bytes) for chunk in chunks]
            wanted = {str(part): self.run[start:stop] for part, (start, stop) in enumerate(ends)}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            same = np.array_equal(found[name].reshape(-1).view(np.uint8), value.reshape(-1).view(np.uint8))
            assert same, f"{name} came back with other bits"


def gpt_base(size_bytes: int) -> Base:
    """Weights and moments of as many GPT-2-small blocks as the bytes give room for."""
    width = 768
    block = {
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.project.weight": (width, width),
        "attn.project.bias": (width,),
        "mlp.up.weight": (4 * width, width),
        "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (width, 4 * width),
        "mlp.down.bias": (width,),
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
    }
    block_bytes = 3 * 4 * sum(int(np.prod(shape)) for shape in block.values())
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for number in range(max(1, round(size_bytes / block_bytes))):
        for name, shape in block.items():
            shapes.append((f"model/h.{number}.{name}", shape))
            for state in ("exp_avg", "exp_avg_sq"):
                shapes.append((f"optim/state/h.{number}.{name}/{state}", shape))
    return Base(shapes)


def small_base(count: int, array_bytes: int) -> Base:
    """Many arrays of one small size."""
    return Base([(f"model/t{number}", (array_bytes // 4,)) for number in range(count)])


class Plain:
    """One write into one file, and fsync: the measure of all."""

    name = "plain"

    def __init__(self, base: Base) -> None:
        self._run = base.run

    def write(self, directory: Path) -> None:
        """Write, fsync the file, fsync the directories."""
        directory.mkdir()
        with (directory / "state").open("wb", buffering=0) as file:
            rest = self._run.data
            while rest.nbytes:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        _sync_directories(directory)

    def read(self, directory: Path) -> Found:
        """Read the file into fresh memory."""
        return {"run": np.fromfile(directory / "state", np.uint8)}


class Safetensors:
    """``save_file``, then fsync; ImportError where it is not installed."""

    name = "safetensors"

    def __init__(self, base: Base) -> None:
        import safetensors.torch

        self._module = safetensors.torch
        self._tensors = base.tensors

    def write(self, directory: Path) -> None:
        """Save, then make it durable."""
        directory.mkdir()
        self._module.save_file(self._tensors, directory / "state.safetensors")
        _sync(directory / "state.safetensors")
        _sync_directories(directory)

    def read(self, directory: Path) -> Found:
        """Load; what is mapped is copied, as for everybody else."""
        loaded = self._module.load_file(directory / "state.safetensors")
        return {name: tensor.clone().numpy() for name, tensor in loaded.items()}


class Dcp:
    """``torch.distributed.checkpoint.save`` in one process; it fsyncs its files itself."""

    name = "dcp"

    def __init__(self, base: Base) -> None:
        self._tensors = base.tensors

    def write(self, directory: Path) -> None:
        """Save."""
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(self._tensors), checkpoint_id=str(directory))
        _sync_directories(directory)

    def read(self, directory: Path) -> Found:
        """Load into fresh tensors."""
        import torch.distributed.checkpoint as dcp

        state = {name: torch.empty_like(tensor) for name, tensor in self._tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=str(directory))
        return {name: tensor.numpy() for name, tensor in state.items()}


class Tensorstore:
    """A zarr v3 array for each tensor with the chunks and codecs of ours; its file driver fsyncs."""

    name = "tensorstore"

    def __init__(self, base: Base) -> None:
        import tensorstore

        self._ts = tensorstore
        self._arrays = {name: tensor.numpy() for name, tensor in base.tensors.items()}
        group = GroupPlan(base.layout)
        self._documents = {
            spec.name: group.documents[f"{path}/zarr.json"]
            for spec, path in zip(base.layout.tensors, group.paths, strict=True)
        }

    def _spec(self, directory: Path, name: str) -> dict[str, object]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory / name}/"}}

    def write(self, directory: Path) -> None:
        """Create and write all arrays, all at once."""
        import json

        async def write_all() -> None:
            async def write(name: str, array: np.ndarray) -> None:
                document = json.loads(self._documents[name])
                wanted = ("shape", "data_type", "chunk_grid", "codecs", "fill_value")
                spec = {**self._spec(directory, name), "metadata": {key: document[key] for key in wanted}}
                opened = await self._ts.open(spec, create=True)
                await opened.write(array, can_reference_source_data_indefinitely=True)

            async with asyncio.TaskGroup() as group:
                for name, array in self._arrays.items():
                    group.create_task(write(name, array))

        asyncio.run(write_all())

    def read(self, directory: Path) -> Found:
        """Open and read all arrays, all at once."""

        async def read_all() -> Found:
            async def read(name: str) -> np.ndarray:
                opened = await self._ts.open(self._spec(directory, name), read=True)
                return np.asarray(await opened.read())

            return dict(zip(self._arrays, await asyncio.gather(*map(read, self._arrays)), strict=True))

        return asyncio.run(read_all())


class Stepwell:
    """Checksums, objects, manifest and commit record, as a run writes a base into a directory."""

    def __init__(self, base: Base, *, packed: bool) -> None:
        self.name = "stepwell pack" if packed else "stepwell tree"
        self._base = base
        self._group = GroupPlan(base.layout)
        self._packed = PackedPlan(self._group, 0) if packed else None
        self._identity = PackIdentity(PackKind.BASE, "0" * 32, _LINK.incarnation, _LINK.step)

    def write(self, directory: Path) -> None:
        """Write and commit."""
        store = FileStore(directory)
        asyncio.run(self._write(Tier("directory", store)))
        store.close()

    async def _write(self, tier: Tier) -> None:
        run, layout = self._base.run.data, self._base.layout
        if self._packed is not None:
            written = list(export_packed(self._packed, self._identity, {}, run))
        else:
            written = list(export_base(self._group, self._identity, {}, run))
        commit = Commit(Replicate())
        await tier.store.put_batch([item for item, _ in written])
        await commit.save_layout(tier, layout)
        objects = tuple(entry for _, entry in written)
        run_id, (incarnation, step) = self._identity.run, (_LINK.incarnation, _LINK.step)
        await commit.save(
            tier,
            Manifest(run_id, incarnation, step, 0, 1, "base", None, True, objects, (layout.hash,)),
        )

    def read(self, directory: Path) -> Found:
        """Read manifest and chunks through what a restore uses, every byte checked."""
        store = FileStore(directory, read_only=True)
        found = asyncio.run(self._read(Tier("directory", store)))
        store.close()
        return found

    async def _read(self, tier: Tier) -> Found:
        source = SaveSource([tier], await Inventory.read([tier]), Commit(Replicate()))
        base = await source.base(_LINK, ahead=READ_AHEAD)
        found = {str(part): await base.chunk(part) for part in range(len(base.layout.chunks))}
        await base.stop()
        return found


def _sync_directories(directory: Path) -> None:
    _sync(directory)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
