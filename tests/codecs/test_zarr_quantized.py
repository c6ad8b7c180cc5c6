"""Plain zarr reads what the codecs of values wrote, in a process that never heard of us."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec

from stepwell.codecs.int4 import Int4
from stepwell.codecs.int8 import Int8
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.scaled_bf16 import ScaledBf16
from stepwell.codecs.xor_delta import XorDelta
from stepwell.codecs.zarr_face import ZarrFace
from stepwell.codecs.zarr_int4 import Int4Codec
from stepwell.codecs.zarr_int8 import Int8Codec
from stepwell.codecs.zarr_log_quant import LogQuantCodec
from stepwell.codecs.zarr_scaled_bf16 import ScaledBf16Codec
from stepwell.codecs.zarr_xor_delta import XorDeltaCodec
from stepwell.codecs.zarr_xxh3 import Xxh3Codec
from stepwell.errors import ConfigError, IntegrityError

CHAINS: dict[str, Sequence[BytesBytesCodec]] = {
    "xor_delta": [XorDeltaCodec()],
    "scaled_bf16": [ScaledBf16Codec()],
    "int8": [Int8Codec()],
    "int4": [Int4Codec(dtype="float32", block=64, level=2)],
    "log_quant": [LogQuantCodec()],
    "log_quant of 4 bits": [LogQuantCodec(bits=4), Xxh3Codec()],
}
PLAIN: dict[str, Codec] = {
    "xor_delta": XorDelta("float32"),
    "scaled_bf16": ScaledBf16(),
    "int8": Int8(),
    "int4": Int4(block=64, level=2),
    "log_quant": LogQuant(),
    "log_quant of 4 bits": LogQuant(bits=4),
}
FACES: list[type[ZarrFace]] = [XorDeltaCodec, ScaledBf16Codec, Int8Codec, Int4Codec, LogQuantCodec]

READER = """
import json, sys
import zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(json.dumps({name: array[...].tobytes().hex() for name, array in group.arrays()}))
assert "torch" not in sys.modules, "reading an array must not import torch"
"""


def _values() -> npt.NDArray[np.float32]:
    values = np.random.default_rng(0).standard_normal(16 * 256, np.float32).reshape(16, 256)
    values[4:8] = np.square(values[4:8])
    values[8:12] = (values[8:12].view(np.uint32) & 0xFFFF0000).view(np.float32) * np.float32(0.37)
    values[12, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    values.view(np.uint32)[13, 1] = 0xFFC12345
    return values


def _read_elsewhere(path: Path) -> dict[str, str]:
    command = [sys.executable, "-I", "-c", READER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_open_in_a_fresh_process(tmp_path: Path, zarr_format: int) -> None:
    group = zarr.create_group(tmp_path / "a.zarr", zarr_format=zarr_format)  # type: ignore[arg-type]
    values = _values()
    expected = {}
    for name, codec in PLAIN.items():
        chain: dict[str, Any] = {"compressors": CHAINS[name]}
        if zarr_format == 2:
            chain = {"filters": [codec], "compressors": None}
        array = group.create_array(name, shape=(16, 256), chunks=(4, 256), dtype="float32", **chain)
        array[...] = values
        chunks = [codec.decode(codec.encode(values[row : row + 4])).tobytes() for row in range(0, 16, 4)]
        expected[name] = b"".join(chunks).hex()
    assert expected["xor_delta"] == expected["scaled_bf16"] == values.tobytes().hex()
    assert len(set(expected.values())) == len(PLAIN) - 1
    assert _read_elsewhere(tmp_path / "a.zarr") == expected


def test_bfloat16_bits_are_quantized_where_the_dtype_is_named() -> None:
    bits = (_values().view(np.uint32) >> 16).astype(np.uint16).reshape(-1)
    for chain, plain in (
        ([Int8Codec(dtype="bfloat16")], Int8("bfloat16")),
        ([LogQuantCodec(dtype="bfloat16")], LogQuant("bfloat16")),
    ):
        array = zarr.create_array({}, shape=bits.shape, dtype="uint16", compressors=chain)
        array[...] = bits
        assert array[...].tobytes() == plain.decode(plain.encode(bits)).tobytes()


def test_the_dtype_comes_from_the_array_and_is_written_down() -> None:
    store: dict[str, Any] = {}
    chain = [XorDeltaCodec(), Int8Codec(), LogQuantCodec(bits=4)]
    zarr.create_array(store, shape=(4,), dtype="float32", compressors=chain)
    assert json.loads(store["zarr.json"].to_bytes())["codecs"][1:] == [
        {"name": "stepwell.xor_delta", "configuration": {"dtype": "float32", "level": 1}},
        {"name": "stepwell.int8", "configuration": {"dtype": "float32", "block": 256, "level": 1}},
        {
            "name": "stepwell.log_quant",
            "configuration": {"dtype": "float32", "bits": 4, "block": None, "level": 1},
        },
    ]
    for face in (Int8Codec(), Int4Codec(), LogQuantCodec()):
        with pytest.raises(ConfigError, match="dtype must be one of"):
            zarr.create_array({}, shape=(4,), dtype="float64", compressors=[face])
        with pytest.raises(ConfigError, match="no dtype"):
            face.plain()
    with pytest.raises(ConfigError, match="no dtype"):
        XorDeltaCodec().plain()


@pytest.mark.parametrize("name", CHAINS)
def test_a_chunk_that_claims_too_much_is_refused_by_plain_zarr(tmp_path: Path, name: str) -> None:
    array = zarr.create_array(
        tmp_path, shape=(40,), chunks=(40,), dtype="float32", compressors=CHAINS[name][:1]
    )
    array[...] = 1
    (tmp_path / "c" / "0").write_bytes(PLAIN[name].encode(np.zeros(1 << 20, np.uint8)).tobytes())
    with pytest.raises(IntegrityError, match="at most"):
        zarr.open_array(tmp_path, mode="r")[...]


@pytest.mark.parametrize("face", FACES)
def test_a_wrong_description_is_refused(face: type[ZarrFace]) -> None:
    name = face.codec_name
    assert face.from_dict(face().to_dict()) == face()
    for wrong in ({"name": "zstd"}, {}, {"name": name, "configuration": 3}):
        with pytest.raises(ConfigError, match=name):
            face.from_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=name):
        face.from_dict({"name": name, "configuration": {"unknown": 1}})
    with pytest.raises(ConfigError, match="level"):
        face.from_dict({"name": name, "configuration": {"level": 0}})
    with pytest.raises(NotImplementedError):
        face().compute_encoded_size(4, None)  # type: ignore[arg-type]
