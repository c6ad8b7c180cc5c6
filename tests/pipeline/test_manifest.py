from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.errors import FormatError, IntegrityError, StepwellError
from stepwell.pipeline.keys import Series, manifest_key
from stepwell.pipeline.manifest import (
    CommitRecord,
    IncarnationRecord,
    Link,
    Manifest,
    ObjectEntry,
    RunRecord,
    seal,
    unseal,
)
from stepwell.pipeline.sealed import canonical_json, parse_json

INC = "000002-0123456789abcdef"
GOLDEN = Path(__file__).parent.parent / "golden" / "format-1"
PREFIX = f"{INC}/step/000000000041/"

RUN = RunRecord("run-a", "nano", 1.5)
INCARNATION = IncarnationRecord(
    "run-a", INC, Link("000001-00000000000000aa", 40), 1, "ab" * 16, 2, 12.0, {"device": "cpu"}, None
)
MANIFEST = Manifest(
    "run-a",
    INC,
    41,
    0,
    1,
    "gradient",
    Link(INC, 40),
    False,
    (ObjectEntry(PREFIX + "rank-00000.pack", 1234, "00" * 16),),
    ("ab" * 16,),
    {"algorithm": "xxh3", "values": [None, "1f"]},
    {"torch": "2.13", "é": "\ud800"},
)
COMMIT = CommitRecord("run-a", INC, Series.STEP, 41, 1, (ObjectEntry.of(MANIFEST.key, MANIFEST.encode()),))
DOCUMENTS = {
    "stepwell.json": (RUN, RunRecord),
    INCARNATION.key: (INCARNATION, IncarnationRecord),
    MANIFEST.key: (MANIFEST, Manifest),
    COMMIT.key: (COMMIT, CommitRecord),
}


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_document_is_read_back_equal(key: str) -> None:
    value, kind = DOCUMENTS[key]
    assert kind.decode(value.encode(), key) == value


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_document_is_plain_json_for_people(key: str) -> None:
    value, _ = DOCUMENTS[key]
    document = json.loads(value.encode())
    assert set(document) == {"document", "xxh3_128"}
    assert document["document"]["run"] == "run-a"


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_flip_of_any_bit_is_found(key: str) -> None:
    value, kind = DOCUMENTS[key]
    data = value.encode()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(IntegrityError):
                kind.decode(bytes(damaged), key)


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_cut_at_any_length_is_found(key: str) -> None:
    value, kind = DOCUMENTS[key]
    data = value.encode()
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            kind.decode(data[:length], key)
    with pytest.raises(IntegrityError):
        kind.decode(data + b"\n", key)


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_newer_format_names_both_versions(key: str) -> None:
    value, kind = DOCUMENTS[key]
    newer = json.loads(value.encode())["document"] | {"format": 2}
    with pytest.raises(FormatError, match=r"format 2.* up to format 1"):
        kind.decode(seal(newer), key)


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_field_that_is_missing_or_of_another_type_is_refused(key: str) -> None:
    value, kind = DOCUMENTS[key]
    document = json.loads(value.encode())["document"]
    for name in document:
        with pytest.raises(FormatError):
            kind.decode(seal({k: v for k, v in document.items() if k != name}), key)
        if name != "digest":
            with pytest.raises(FormatError):
                kind.decode(seal(document | {name: [{}]}), key)


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_document_under_the_name_of_another_is_refused(key: str) -> None:
    value, _ = DOCUMENTS[key]
    for other, (_, kind) in DOCUMENTS.items():
        if other != key:
            with pytest.raises(FormatError, match="is needed"):
                kind.decode(value.encode(), other)


def test_a_manifest_moved_to_another_step_is_refused() -> None:
    with pytest.raises(IntegrityError, match="belongs under"):
        Manifest.decode(MANIFEST.encode(), manifest_key(Series.STEP, INC, 42, 0))
    with pytest.raises(IntegrityError, match="belongs under"):
        CommitRecord.decode(COMMIT.encode(), COMMIT.key.replace("41", "42"))


@pytest.mark.parametrize(
    "key",
    [
        "../../etc/passwd",
        "/etc/passwd",
        PREFIX + "../../../x.pack",
        PREFIX.replace("41", "42") + "rank-00000.pack",
        PREFIX + "rank-00000.manifest.json",
        f"{INC}/base/000000000041/state/../../x",
        "a\\b",
        "a\0b",
        "stepwell.json",
    ],
)
def test_keys_in_a_manifest_cannot_lead_elsewhere(key: str) -> None:
    document = json.loads(MANIFEST.encode())["document"] | {"objects": [[key, 1, "00" * 16]]}
    with pytest.raises(FormatError):
        Manifest.decode(seal(document), MANIFEST.key)


def test_a_commit_names_the_manifest_of_every_rank() -> None:
    document = json.loads(COMMIT.encode())["document"]
    with pytest.raises(FormatError, match="2 ranks"):
        CommitRecord.decode(seal(document | {"world": 2}), COMMIT.key)
    with pytest.raises(FormatError, match="of 1 ranks"):
        CommitRecord.decode(seal(document | {"manifests": []}), COMMIT.key)


def test_layout_hashes_are_hashes() -> None:
    document = json.loads(MANIFEST.encode())["document"] | {"layouts": ["../x"]}
    with pytest.raises(FormatError):
        Manifest.decode(seal(document), MANIFEST.key)


def test_entries_check_plain_objects() -> None:
    entry = ObjectEntry.of(MANIFEST.key, b"abc")
    entry.check(b"abc")
    entry.check(memoryview(b"abc"))
    with pytest.raises(IntegrityError, match="2 bytes where 3"):
        entry.check(b"ab")
    with pytest.raises(IntegrityError, match="checksum"):
        entry.check(b"abd")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\x80\x04\x95.",
        b"null",
        b'{"document":' + b"[" * 100_000,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="here"):
        unseal(data, "here", "run")


@pytest.mark.parametrize(
    "body",
    [b"[]", b"[" * 100_000, b'{"a":NaN}', b'{"a":1,"a":2}', b'{"a":', b"\xff", b'{"a":' + b"9" * 5000 + b"}"],
)
def test_json_that_is_valid_only_for_python_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        parse_json(body, "here")


def test_canonical_json_has_one_form_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": [0.1, -0.0, "é"]}) == b'{"a":[0.1,-0.0,"\\u00e9"],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_a_save_knows_its_place() -> None:
    assert MANIFEST.link == Link(INC, 41)
    assert MANIFEST.series is Series.STEP
    assert MANIFEST.size_bytes == 1234
    assert INCARNATION.counter == 2
    assert issubclass(FormatError, StepwellError)


@pytest.mark.parametrize("key", DOCUMENTS)
def test_golden_documents_of_format_1_are_still_read(key: str) -> None:
    value, kind = DOCUMENTS[key]
    data = (GOLDEN / key).read_bytes()
    assert kind.decode(data, key) == value
    assert data == value.encode(), "the format changed: bump the version and keep this file"
