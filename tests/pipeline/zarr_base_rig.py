"""What tests of bases as zarr share: layouts with every type and name, random bits, a store of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stepwell.errors import IntegrityError, MissingObjectError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.keys import state_prefix
from stepwell.pipeline.layout import ITEM_BYTES, Layout, TensorSpec
from stepwell.pipeline.pack import PackIdentity, PackKind
from stepwell.pipeline.plan import plan_layout
from stepwell.stores.base import BytesLike

INC = "000001-00000000000000ff"
IDENTITY = PackIdentity(PackKind.BASE, "run-a", INC, 50)
HEADER = {"tree": {"lr": 0.1, "none": None, "w": {"$tensor": "model/w"}}}


class Objects:
    """The one method of a store that reading a base uses, over plain bytes."""

    def __init__(self, items: dict[str, bytes]) -> None:
        self.items = items

    async def fetch(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        if key not in self.items:
            raise MissingObjectError(key)
        data = memoryview(self.items[key])[start:]
        if length is not None and len(data) < length:
            raise IntegrityError(f"{key}: short")
        return data[:length]


def random_run(layout: Layout, seed: int = 0) -> np.ndarray:
    """Random bits in every tensor (bool: 0 or 1), zeros between."""
    rng = np.random.default_rng(seed)
    run = np.zeros(layout.size_bytes, np.uint8)
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            start = chunk.offset_bytes + piece.offset_bytes
            size = (piece.stop - piece.start) * ITEM_BYTES[chunk.dtype]
            run[start : start + size] = rng.integers(0, 2 if chunk.dtype == "bool" else 256, size, np.uint8)
    return run


def spec(name: str, shape: Sequence[int], dtype: str = "float32", group: str = "") -> TensorSpec:
    return TensorSpec(name, tuple(shape), dtype, Kind.WEIGHT, group)


def written(items: Mapping[str, BytesLike], root: Path) -> Path:
    for key, data in items.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root / state_prefix(INC, 50)


def bits_of(layout: Layout, run: np.ndarray, name: str) -> np.ndarray:
    """The tensor as unsigned bytes, last axis widened."""
    index = layout.index_of[name]
    start = layout.tensor_offsets[index]
    size = layout.tensors[index].size_bytes
    return run[start : start + size]


LAYOUT = plan_layout(
    [
        spec("model/w", (100, 64)),
        spec("model/long", (1000,)),
        spec("model/ragged", (1001,)),
        spec("model/conv", (8, 4, 3, 64)),
        spec("model/bias", (7,)),
        spec("model/scalar", ()),
        spec("model/empty", (0, 3)),
        spec("model/one", (1, 1, 1)),
        *(spec(f"types/{dtype}", (5, 3), dtype) for dtype in ITEM_BYTES),
        *(spec(f"types/{dtype}.0d", (), dtype) for dtype in ITEM_BYTES),
    ],
    chunk_bytes=1024,
)


NASTY = [
    "model/w",
    "model/W",
    "model/a",
    "model/a/b",
    "model/a/b/c",
    "model//a",
    "model/a/",
    "model/zarr.json",
    "model/c",
    "model/c/0",
    "model/caf\u00e9",
    "model/cafe\u0301",
    "model/..",
    "model/.",
    "model/__x",
    "model/" + "n" * 300,
    "\u6a21\u578b/\u91cd",
    "",
    "/abs",
]


GOLDEN = Path(__file__).parent.parent / "golden" / "format-1"
GOLDEN_LAYOUT = plan_layout(
    [
        spec("model/w", (9, 64), group="optim:0"),
        spec("model/h", (3,), "bfloat16"),
        spec("model/n", (), "int64"),
    ],
    chunk_bytes=1024,
)


def golden_run() -> np.ndarray:
    run = np.zeros(GOLDEN_LAYOUT.size_bytes, np.uint8)
    for chunk in GOLDEN_LAYOUT.chunks:
        start, stop = chunk.offset_bytes, chunk.offset_bytes + chunk.size_bytes
        run[start:stop] = np.arange(start, stop) % 251
    return run
