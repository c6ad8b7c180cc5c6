"""Plain zarr reads arrays written with our codecs, in a process that never heard of us."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec

from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.testing import state_like
from stepwell.codecs.xxh3 import Xxh3
from stepwell.codecs.zarr_byteplane import BytePlaneCodec
from stepwell.codecs.zarr_ordered_delta import OrderedDeltaCodec
from stepwell.codecs.zarr_xxh3 import Xxh3Codec
from stepwell.errors import ConfigError, IntegrityError

CHAINS: dict[str, Sequence[BytesBytesCodec]] = {
    "byteplane": [BytePlaneCodec()],
    "ordered_delta": [OrderedDeltaCodec()],
    "xxh3": [Xxh3Codec()],
    "byteplane+xxh3": [BytePlaneCodec(itemsize=4, level=2), Xxh3Codec()],
    "ordered_delta+xxh3": [OrderedDeltaCodec(dtype="float32"), Xxh3Codec()],
    "crc32c+byteplane": [zarr.codecs.Crc32cCodec(), BytePlaneCodec()],
}
V2_CODECS: dict[str, list[Codec]] = {
    "byteplane": [BytePlane(4)],
    "ordered_delta": [OrderedDelta("float32")],
    "xxh3": [Xxh3()],
    "all": [OrderedDelta("float32"), BytePlane(1), Xxh3()],
}

READER = """
import json, sys
import zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(json.dumps({name: array[...].tobytes().hex() for name, array in group.arrays()}))
assert "torch" not in sys.modules, "reading an array must not import torch"
"""


def _values() -> np.ndarray[Any, np.dtype[np.float32]]:
    values = state_like(4 * 33 * 21).view(np.float32).reshape(33, 21).copy()
    values[0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    values.view(np.uint32)[1, 1] = 0xFFC12345
    return values


def _read_elsewhere(path: Path) -> dict[str, str]:
    command = [sys.executable, "-I", "-c", READER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


def test_version_3_arrays_open_in_a_fresh_process(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "v3.zarr", zarr_format=3)
    values = _values()
    for name, chain in CHAINS.items():
        array = group.create_array(name, shape=(33, 21), chunks=(8, 21), dtype="float32", compressors=chain)
        array[...] = values
    bits = np.arange(1 << 16, dtype=np.uint16)
    chain = [OrderedDeltaCodec(dtype="bfloat16"), Xxh3Codec()]
    group.create_array("bfloat16", shape=bits.shape, chunks=(5000,), dtype="uint16", compressors=chain)[
        ...
    ] = bits
    found = _read_elsewhere(tmp_path / "v3.zarr")
    assert found == {**dict.fromkeys(CHAINS, values.tobytes().hex()), "bfloat16": bits.tobytes().hex()}


def test_version_2_arrays_open_in_a_fresh_process(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "v2.zarr", zarr_format=2)
    values = _values()
    for name, filters in V2_CODECS.items():
        group.create_array(
            name, shape=(33, 21), chunks=(8, 21), dtype="float32", filters=filters, compressors=None
        )[...] = values
    compressed = group.create_array(
        "compressor", shape=(33, 21), chunks=(8, 21), dtype="float32", filters=None, compressors=BytePlane(4)
    )
    compressed[...] = values
    found = _read_elsewhere(tmp_path / "v2.zarr")
    assert found == dict.fromkeys((*V2_CODECS, "compressor"), values.tobytes().hex())


def test_sharded_arrays_with_a_checked_index() -> None:
    values = state_like(4 * 4096).view(np.float32).reshape(64, 64)
    sharding = zarr.codecs.ShardingCodec(
        chunk_shape=(8, 64),
        codecs=[zarr.codecs.BytesCodec(), BytePlaneCodec(), Xxh3Codec()],
        index_codecs=[zarr.codecs.BytesCodec(), Xxh3Codec()],
    )
    array = zarr.create_array(
        {}, shape=(64, 64), chunks=(32, 64), dtype="float32", serializer=sharding, compressors=None
    )
    array[...] = values
    assert np.array_equal(array[...], values)
    assert np.array_equal(array[9:11], values[9:11])


def test_minus_zero_is_not_dropped_as_equal_to_the_fill_value() -> None:
    for values in (np.full(64, -0.0, np.float32), np.array([0.0] * 31 + [-0.0] + [0.0] * 32, np.float32)):
        array = zarr.create_array(
            {}, shape=(64,), chunks=(16,), dtype="float32", fill_value=0.0, compressors=[OrderedDeltaCodec()]
        )
        array[...] = values
        assert array[...].tobytes() == values.tobytes()


def test_itemsize_and_dtype_come_from_the_array() -> None:
    store: dict[str, Any] = {}
    chain = [OrderedDeltaCodec(), BytePlaneCodec(), Xxh3Codec()]
    zarr.create_array(store, shape=(4,), dtype="float64", compressors=chain)
    written = json.loads(store["zarr.json"].to_bytes())["codecs"][1:]
    assert written == [
        {"name": "stepwell.ordered_delta", "configuration": {"dtype": "float64", "level": 1}},
        {"name": "stepwell.byteplane", "configuration": {"itemsize": 8, "level": 1}},
        {"name": "stepwell.xxh3"},
    ]
    with pytest.raises(ConfigError, match="no difference is defined"):
        zarr.create_array({}, shape=(4,), dtype="datetime64[s]", compressors=[OrderedDeltaCodec()])


def test_a_flipped_byte_is_found_by_plain_zarr(tmp_path: Path) -> None:
    values = _values()
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=values.shape,
        chunks=values.shape,
        dtype="float32",
        compressors=[BytePlaneCodec(), Xxh3Codec()],
    )
    array[...] = values
    chunk = tmp_path / "a.zarr" / "c" / "0" / "0"
    good = chunk.read_bytes()
    for position in range(0, len(good), 97):
        chunk.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        with pytest.raises(IntegrityError):
            zarr.open_array(tmp_path / "a.zarr", mode="r")[...]


def test_a_chunk_that_claims_too_much_is_refused_by_plain_zarr(tmp_path: Path) -> None:
    for chain, large in (
        ([BytePlaneCodec()], BytePlane(4).encode(np.zeros(1 << 20, np.uint8))),
        ([OrderedDeltaCodec()], OrderedDelta("float32").encode(np.zeros(1 << 20, np.uint8))),
    ):
        path = tmp_path / chain[0].codec_name
        array = zarr.create_array(path, shape=(40,), chunks=(40,), dtype="float32", compressors=chain)
        array[...] = 1
        (path / "c" / "0").write_bytes(large.tobytes())
        with pytest.raises(IntegrityError, match="at most"):
            zarr.open_array(path, mode="r")[...]


@pytest.mark.parametrize("face", [BytePlaneCodec, OrderedDeltaCodec, Xxh3Codec])
def test_a_wrong_description_is_refused(face: type[BytePlaneCodec | OrderedDeltaCodec | Xxh3Codec]) -> None:
    name = face.codec_name
    assert face.from_dict(face().to_dict()) == face()
    for wrong in ({"name": "zstd"}, {}, {"name": name, "configuration": 3}):
        with pytest.raises(ConfigError, match=name):
            face.from_dict(wrong)
    with pytest.raises(ConfigError, match=name):
        face.from_dict({"name": name, "configuration": {"unknown": 1}})


def test_wrong_parameters_are_refused() -> None:
    for itemsize, level in ((0, 1), (17, 1), (4, 0), ("4", 1)):
        with pytest.raises(ConfigError):
            BytePlaneCodec(itemsize=itemsize, level=level)  # type: ignore[arg-type]
    for dtype, level in (("float33", 1), ("float32", 99)):
        with pytest.raises(ConfigError):
            OrderedDeltaCodec(dtype=dtype, level=level)
    with pytest.raises(ConfigError, match="no dtype"):
        OrderedDeltaCodec().plain()
    with pytest.raises(NotImplementedError):
        BytePlaneCodec().compute_encoded_size(4, None)  # type: ignore[arg-type]
