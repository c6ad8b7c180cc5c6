from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepwell.errors import FormatError, PermanentStoreError, UnsupportedValueError
from stepwell.stores.keys import (
    NAME_BYTES_MAX,
    check_directory,
    check_key,
    check_prefix,
    decode_name,
    encode_name,
)
from stepwell.stores.testing import BAD_KEYS

# Characters that matter to the encoding, far more often than chance would bring them.
SPECIAL = st.sampled_from(list("aAcCzZ019._-=/~% \\:\0\n\x7féÉ\u0301\u0130\u0131ß\u017fΩ\ud800😀"))
NAMES = st.lists(
    st.one_of(SPECIAL, st.sampled_from(["zarr.json", "__", "..", "c", "=_", "//"])), max_size=24
).map("".join)


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: ascii(key)[:20])
def test_bad_keys_are_refused(key: str) -> None:
    with pytest.raises(PermanentStoreError, match="refused"):
        check_key(key)


@pytest.mark.parametrize("key", [None, 3, b"bytes", ["a"]])
def test_keys_that_are_no_text_are_refused(key: object) -> None:
    with pytest.raises(PermanentStoreError, match="not text"):
        check_key(key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "stepwell.json",
        "a/b/c",
        ".hidden",
        "a/...",
        "A b/é",
        "s" * 255,
        "000001-ab/step/000000000001/rank-00000.pack",
    ],
)
def test_good_keys_come_back(key: str) -> None:
    assert check_key(key) is key


def test_total_length_counts_bytes() -> None:
    assert check_key("/".join(["é" * 100] * 5))
    with pytest.raises(PermanentStoreError, match="1024"):
        check_key("/".join(["é" * 100] * 6))


def test_prefixes() -> None:
    assert check_prefix("") == ""
    assert check_prefix("a/b/") == "a/b/"
    assert check_directory("a/b") == "a/b/"
    assert check_directory("") == ""
    for bad in ("/", "a//", "../", "a/../"):
        with pytest.raises(PermanentStoreError):
            check_prefix(bad)


@pytest.mark.parametrize(
    "name",
    [
        "model/h.0.attn.weight",
        "optim/state/transformer.wte.weight/exp_avg_sq",
        "a",
        "0",
        "_private-x",
        "a/c0",
        "s" * 200,
    ],
)
def test_common_names_are_their_own_keys(name: str) -> None:
    assert encode_name(name) == name


def test_examples_of_the_table() -> None:
    assert encode_name("SelfAttention") == "=self=attention"
    assert encode_name("a:b") == "a=_3a_b"
    assert encode_name("a//b") == "a/=-/b"
    assert encode_name("zarr.json") == "=_7a_arr.json"
    assert encode_name("c/0") == "=_63_/0"
    assert encode_name("__x") == "=_5f__x"
    assert encode_name("..") == "=_2e_=_2e_"


@given(NAMES)
@example("")
@example("x" * 300)
@example("x" * 198 + "__" + "y" * 200)
@example("X" * 300)
@settings(max_examples=100, deadline=None)
def test_every_name_comes_back_from_a_safe_key(name: str) -> None:
    encoded = encode_name(name)
    assert decode_name(encoded) == name
    check_key(f"state/{encoded}/zarr.json")
    assert encoded == encoded.casefold() == encoded.lower()
    assert unicodedata.normalize("NFC", encoded) == unicodedata.normalize("NFD", encoded) == encoded
    for segment in encoded.split("/"):
        assert segment.strip(".")
        assert len(segment) <= 200
        assert not segment.startswith(("__", "."))
        assert not segment.endswith(".")
        assert segment not in {"zarr.json", "c"}


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_name(name: str) -> None:
    assert decode_name(encode_name(name)) == name


@given(NAMES, NAMES)
@settings(max_examples=100, deadline=None)
def test_two_names_never_collide(one: str, other: str) -> None:
    assert (encode_name(one) == encode_name(other)) == (one == other)


@given(st.text(alphabet="acAz0._-=/3fe", max_size=30))
@settings(max_examples=100, deadline=None)
def test_what_decodes_is_the_only_spelling_of_its_name(text: str) -> None:
    try:
        name = decode_name(text)
    except FormatError:
        return
    assert encode_name(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "a=",
        "a=/b",
        "=",
        "=_",
        "=_zz_",
        "=_61_",
        "c",
        "zarr.json",
        "..",
        "a//b",
        "é",
        "=_ff_",
        "__a",
        "a=_6_",
    ],
)
def test_what_was_never_encoded_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        decode_name(text)


def test_a_name_too_long_for_any_key_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedValueError, match=str(NAME_BYTES_MAX)):
        encode_name("😀" * 300)
