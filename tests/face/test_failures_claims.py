"""A pack that claims more than its layout has is refused before any memory is taken for it."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
import warnings
from pathlib import Path

import pytest
import xxhash
from failure_rig import Run, uninterrupted

from stepwell.codecs.frame import HEADER
from stepwell.pipeline.manifest import ObjectEntry
from stepwell.pipeline.pack_format import tail_hash
from stepwell.pipeline.sealed import seal, unseal

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOTAL = 4
CLAIM_BYTES = 1 << 29
PEAK_BYTES_MAX = 1 << 26


def planes_of_constants(size_bytes: int) -> bytes:
    """Return a frame of byte planes that decodes to so many bytes and has 5 for every MiB of each plane."""
    blocks = size_bytes // 4 >> 20
    table = struct.pack("<I", 2 << 30 | 1) * (4 * blocks)
    return HEADER.pack(b"SWPF", 1, 0, 4, 20, size_bytes) + table + bytes(4 * blocks)


def swollen(pack: bytes) -> tuple[bytes, str]:
    """Let every chunk of a pack be such a frame; return the pack with right checksums, and its own."""
    offset, length = struct.unpack_from("<QQ", pack, len(pack) - 64)
    index = json.loads(pack[offset : offset + length])
    frame = planes_of_constants(CLAIM_BYTES)
    for row in index["chunks"]:
        row[6:] = [CLAIM_BYTES, 64, len(frame), xxhash.xxh3_64_hexdigest(frame)]
        row.append([{"id": "stepwell.byteplane", "itemsize": 4, "level": 1}])
    head = pack[:64] + frame + bytes(-len(frame) % 64)
    tail = json.dumps(index, separators=(",", ":"), sort_keys=True).encode()
    total = len(head) + len(tail) + 64
    trailer = struct.pack(
        "<QQ16sQ8sII", len(head), len(tail), xxhash.xxh3_128_digest(tail), total, b"LLEWPETS", 1, 0
    )
    trailer += struct.pack("<Q", xxhash.xxh3_64_intdigest(trailer))
    return head + tail + trailer, tail_hash(tail, trailer)


def replace_pack(folder: Path) -> None:
    """Put a swollen pack in place of that of a save, and let manifest and commit record vouch for it."""
    path = folder / "rank-00000.pack"
    data, digest = swollen(path.read_bytes())
    path.write_bytes(data)
    entry: list[object] = [len(data), digest]
    for name, kind, member in (
        ("rank-00000.manifest.json", "manifest", "objects"),
        ("commit.json", "commit", "manifests"),
    ):
        path = folder / name
        document = unseal(path.read_bytes(), name, kind)
        listed = document[member]
        assert isinstance(listed, list)
        listed[0][1:] = entry
        path.write_bytes(seal(document))
        entry = ObjectEntry.of(listed[0][0], path.read_bytes()).as_json()[1:]


def test_a_pack_of_half_a_gigabyte_in_a_few_kilobytes_is_gone_around(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(range(TOTAL), base_at=(0,))
    shutil.rmtree(run.memory)
    (commit,) = [
        path for path in run.objects("directory", "*") if str(path).endswith("step/000000000002/commit.json")
    ]
    replace_pack(commit.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracemalloc.start()
        try:
            restored, bits = run.restored()
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < PEAK_BYTES_MAX, f"{peak} bytes were allocated"
    assert restored is not None
    assert restored.step == 1
    assert bits == uninterrupted(TOTAL)[1]
    assert any("not part" in fault for fault in restored.faults)
