"""Plain zarr reads float32 arrays that our lossy codecs serialized, in a process that never heard of us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
import zarr.codecs
from numcodecs.abc import Codec

from stepwell.codecs.codebook import Codebook
from stepwell.codecs.testing import state_like
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.xxh3 import Xxh3
from stepwell.codecs.zarr_array_face import ArrayFace
from stepwell.codecs.zarr_codebook import CodebookCodec
from stepwell.codecs.zarr_threshold_sparse import ThresholdSparseCodec
from stepwell.codecs.zarr_xxh3 import Xxh3Codec
from stepwell.errors import ConfigError, IntegrityError

FACES: dict[str, ArrayFace] = {
    "sparse": ThresholdSparseCodec(rate=0.01),
    "sparse_int8": ThresholdSparseCodec(rate=0.2, values="int8", level=2),
    "codebook": CodebookCodec(block=64),
}
V2_CODECS: dict[str, list[Codec]] = {
    "sparse": [ThresholdSparse(0.01), Xxh3()],
    "codebook": [Codebook(64), Xxh3()],
}

READER = """
import json, sys
import zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(json.dumps({name: array[...].tobytes().hex() for name, array in group.arrays()}))
assert "torch" not in sys.modules, "reading an array must not import torch"
"""
SHAPE, CHUNKS = (50, 60), (16, 60)


def _values() -> npt.NDArray[np.float32]:
    values = state_like(4 * 3000).view(np.float32).reshape(SHAPE).copy()
    values[0, :3] = [np.inf, -np.inf, np.nan]
    return values


def _read_elsewhere(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    command = [sys.executable, "-I", "-c", READER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return {name: np.frombuffer(bytes.fromhex(text), "<f4").reshape(SHAPE) for name, text in found.items()}


def _expected(codec: ThresholdSparse | Codebook) -> npt.NDArray[np.float32]:
    values = np.zeros((64, 60), np.float32)
    values[:50] = _values()
    chunks = [codec.decode(codec.encode(values[row : row + 16])).view("<f4") for row in range(0, 64, 16)]
    return np.concatenate(chunks).reshape(64, 60)[:50]


def test_version_3_arrays_open_in_a_fresh_process(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "v3.zarr", zarr_format=3)
    for name, face in FACES.items():
        array = group.create_array(
            name, shape=SHAPE, chunks=CHUNKS, dtype="float32", serializer=face, compressors=[Xxh3Codec()]
        )
        array[...] = _values()
    found = _read_elsewhere(tmp_path / "v3.zarr")
    assert found.keys() == FACES.keys()
    for name, values in found.items():
        assert values.tobytes() == _expected(FACES[name].plain()).tobytes()  # type: ignore[arg-type]


def test_version_2_arrays_open_in_a_fresh_process(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "v2.zarr", zarr_format=2)
    for name, filters in V2_CODECS.items():
        group.create_array(
            name, shape=SHAPE, chunks=CHUNKS, dtype="float32", filters=filters, compressors=None
        )[...] = _values()
    found = _read_elsewhere(tmp_path / "v2.zarr")
    assert found.keys() == V2_CODECS.keys()
    for name, values in found.items():
        assert values.tobytes() == _expected(V2_CODECS[name][0]).tobytes()


@pytest.mark.parametrize("face", FACES.values(), ids=list(FACES))
def test_shards_and_any_order_of_axes(face: ArrayFace) -> None:
    values = state_like(4 * 64 * 64).view(np.float32).reshape(64, 64)
    sharding = zarr.codecs.ShardingCodec(chunk_shape=(16, 64), codecs=[face, Xxh3Codec()])
    transpose = zarr.codecs.TransposeCodec(order=(1, 0))
    sharded = zarr.create_array(
        {}, shape=(64, 64), chunks=(32, 64), dtype="float32", serializer=sharding, compressors=None
    )
    turned = zarr.create_array(
        {}, shape=(64, 64), chunks=(64, 64), dtype="float32", filters=[transpose], serializer=face
    )
    for array in (sharded, turned):
        array[...] = values
        found = np.asarray(array[...])
        assert np.count_nonzero(found) > 0
        assert np.abs(found - values).max() < np.abs(values).max()
        assert np.array_equal(array[17:40], found[17:40])


def test_the_metadata_says_everything() -> None:
    store: dict[str, Any] = {}
    zarr.create_array(store, shape=(4,), dtype="float32", serializer=FACES["sparse_int8"], compressors=None)
    assert json.loads(store["zarr.json"].to_bytes())["codecs"] == [
        {
            "name": "stepwell.threshold_sparse",
            "configuration": {"rate": 0.2, "values": "int8", "level": 2},
        }
    ]


@pytest.mark.parametrize("face", FACES.values(), ids=list(FACES))
def test_a_damaged_or_larger_chunk_is_refused(face: ArrayFace, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path, shape=(4000,), chunks=(4000,), dtype="float32", serializer=face, compressors=None
    )
    array[...] = state_like(16_000).view(np.float32)
    chunk = tmp_path / "c" / "0"
    good = chunk.read_bytes()
    larger = np.asarray(face.plain().encode(state_like(16_004))).tobytes()
    for wrong in (good[:-1], good + b"\0", b"", b"x" * 200, larger):
        chunk.write_bytes(wrong)
        with pytest.raises(IntegrityError):
            zarr.open_array(tmp_path, mode="r")[...]


@pytest.mark.parametrize("face", FACES.values(), ids=list(FACES))
def test_other_dtypes_are_refused(face: ArrayFace) -> None:
    for dtype in ("float64", "float16", "int32", "uint16"):
        with pytest.raises(ConfigError, match="serializes float32"):
            zarr.create_array({}, shape=(4,), dtype=dtype, serializer=face, compressors=None)


@pytest.mark.parametrize("face", FACES.values(), ids=list(FACES))
def test_a_wrong_description_is_refused(face: ArrayFace) -> None:
    name = face.codec_name
    assert type(face).from_dict(face.to_dict()) == face
    for wrong in (
        {"name": "bytes"},
        {},
        {"name": name, "configuration": 3},
        {"name": name, "configuration": {"unknown": 1}},
        {"name": name, "configuration": {"level": 0}},
    ):
        with pytest.raises(ConfigError):
            type(face).from_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        face.compute_encoded_size(4, None)  # type: ignore[arg-type]
