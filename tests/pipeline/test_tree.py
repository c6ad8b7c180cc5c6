"""Values through JSON, also with sorted keys: equal by type and value, or refused by name."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import FormatError, IntegrityError, UnsupportedValueError
from stepwell.pipeline.bits import bit_equal
from stepwell.pipeline.tree import JsonValue, TreeEncoder, decode_tree, encode_tree

Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


def nothing(name: str) -> torch.Tensor:
    raise AssertionError(name)


def through(value: object, *, inline: bool = False) -> object:
    tensors: list[tuple[str, torch.Tensor]] = []
    tree = encode_tree(value, None if inline else tensors, "x")
    stored = json.loads(json.dumps(tree, sort_keys=True, allow_nan=False).encode("ascii"))
    assert encode_tree(decode_tree(stored, dict(tensors).__getitem__), None, "x") == encode_tree(
        value, None, "x"
    )
    return decode_tree(stored, dict(tensors).__getitem__)


def same(first: object, second: object) -> bool:
    """Equal by type and value, order of dicts and bits of floats included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return bit_equal(first, second)
    if isinstance(first, np.ndarray | np.generic):
        return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, complex):
        return same(first.real, second.real) and same(first.imag, second.imag)
    if isinstance(first, defaultdict) and first.default_factory is not second.default_factory:
        return False
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, deque) and first.maxlen != second.maxlen:
        return False
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(st.characters()),
    st.binary(max_size=9),
    st.complex_numbers(),
)
keys = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=2),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.floats(allow_nan=False),
)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    mapping = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        mapping,
        mapping.map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=3)),
    )


@settings(max_examples=80, deadline=None)
@given(st.recursive(scalars, containers, max_leaves=12))
def test_any_nesting_comes_back_equal_by_type_and_value(value: object) -> None:
    assert same(through(value), value)


VALUES: list[object] = [
    10**5000,
    -(2**63) - 1,
    math.nan,
    struct.unpack("d", struct.pack("Q", 0xFFF8000000001234))[0],
    -0.0,
    1.0,
    5e-324,
    "\ud800",
    "é/\x00$",
    {"$tensor": 1, "a": 2},
    {"$tensor": "x"},
    {"b": 1, "a": 2},
    OrderedDict(b=1, a=2),
    defaultdict(list, {1: [2]}),
    defaultdict(None, {1: 2}),
    Counter({"a": -1, 3: 0}),
    {1: "int", "1": "str", 2.5: "float", None: "none", (1, "x"): "tuple"},
    set(),
    {3, 1, "a"},
    frozenset({1.5}),
    range(3, 9, 2),
    bytearray(b"ab"),
    torch.Size([2, 0]),
    torch.bfloat16,
    torch.device("cuda", 1),
    np.float32(0.1),
    np.float64(-0.0),
    np.int64(3),
    np.bool_(True),
    np.str_("ab"),
    np.datetime64("2020-01-02"),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.ones((2, 3))),
    np.zeros((0, 3), np.uint16),
    np.array(2.5),
    np.array(["a", "bcd"]),
    np.array([True, False]),
    np.array([1j]),
    np.broadcast_to(np.float16(2), (3, 2)),
    [[[[{}], []], ()], {}],
    (1, (True, 0, False), [0.0, None]),
]


@pytest.mark.parametrize("index", range(len(VALUES)))
def test_value_comes_back_equal_by_type(index: int) -> None:
    for inline in (False, True):
        assert same(through(VALUES[index], inline=inline), VALUES[index])


def test_tensors_are_taken_out_once_and_named_by_path() -> None:
    shared = torch.arange(3)
    tensors: list[tuple[str, torch.Tensor]] = []
    value = {
        "a/b": shared,
        "a": {"b": torch.ones(1), "~": shared[:]},
        1: torch.zeros(()),
        "1": torch.ones(()),
    }
    tree = encode_tree(value, tensors, "x")
    assert [name for name, _ in tensors] == ["x/a~1b", "x/a/b", "x/1", "x/1~2"]
    back = decode_tree(json.loads(json.dumps(tree)), dict(tensors).__getitem__)
    assert same(back, value)
    assert back["a/b"] is back["a"]["~"]


def test_views_of_one_storage_with_other_elements_are_no_aliases() -> None:
    base = torch.arange(6.0)
    value = [
        base[:3],
        base[3:],
        base.view(2, 3),
        base.view(2, 3).t(),
        base.view(torch.int32),
        base[:0],
        base[3:3],
    ]
    assert same(through(value), value)


def test_inline_tensors_keep_every_bit() -> None:
    value = [
        torch.tensor([math.nan, -0.0]),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.zeros(2, dtype=torch.float8_e5m2),
    ]
    assert same(through(value, inline=True), value)


def test_memory_freed_between_two_temporaries_makes_no_alias() -> None:
    tensors: list[tuple[str, torch.Tensor]] = []
    encoder = TreeEncoder(tensors)
    for i in range(20):
        encoder.encode(torch.full((64,), float(i)), f"x/{i}")
    assert [float(t[0]) for _, t in tensors] == list(map(float, range(20)))


REFUSED: list[tuple[object, str]] = [
    (Point(1, 2), "Point"),
    (Colour.RED, "Colour"),
    (lambda: None, "function"),
    (object(), "object"),
    (np.array([None]), "dtype object"),
    (np.zeros(1, "i4,f4"), "dtype"),
    (defaultdict(lambda: 1), "defaultdict"),
    ({torch.zeros(1): 1}, "key"),
    (torch.eye(2).to_sparse(), "sparse"),
    (slice(1), "slice"),
    (type, "type"),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_object_that_cannot_be_saved_is_refused_with_its_path(index: int) -> None:
    value, word = REFUSED[index]
    for tensors in ([], None):
        with pytest.raises(UnsupportedValueError, match=f"(?s)^extra/a/1.*{word}"):
            encode_tree({"a": [0, value]}, tensors, "extra")


def test_cycles_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="cycle"):
        encode_tree(loop, None, "x")


def test_deep_but_allowed_nesting_round_trips() -> None:
    value: object = 1
    for _ in range(99):
        value = {1: value}
    assert same(through(value), value)


DAMAGED: list[JsonValue] = [
    {"$unknown": 1},
    {"$tuple": 1},
    {"$tuple": [], "a": 1},
    {"a": 1, "$b": 2},
    {"$inline": ["float32", [4], "AAAA"]},
    {"$inline": ["float32", [-1], ""]},
    {"$inline": ["no_such", [1], "AAAA"]},
    {"$inline": ["float32", [1 << 60], "AAAA"]},
    {"$array": ["|O", [1], "AAAAAAAAAAA="]},
    {"$array": ["<f4", [1 << 60], "AAAA"]},
    {"$array": ["<f4", [1], "****"]},
    {"$array": ["<f4", [1], 7]},
    {"$array": ["bogus", [1], "AAAA"]},
    {"$scalar": ["<f4"]},
    {"$dict": [[1]]},
    {"$dict": [[[], 1]]},
    {"$set": [[1]]},
    {"$float": "zz"},
    {"$int": "zz"},
    {"$str": 5},
    {"$device": "bogus"},
    {"$dtype": "nn"},
    {"$deque": ["x", []]},
    {"$defaultdict": ["os.system", []]},
    {"$range": [0, 1, 0]},
    {"$tensor": 5},
    {"$complex": [1]},
]


@pytest.mark.parametrize("index", range(len(DAMAGED)))
def test_damaged_tree_is_a_format_error(index: int) -> None:
    with pytest.raises(FormatError):
        decode_tree([DAMAGED[index]], nothing)


def test_deep_tree_from_outside_is_refused_not_a_recursion_error() -> None:
    tree: JsonValue = []
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(FormatError, match="deeper"):
        decode_tree(tree, nothing)


def test_errors_of_the_lookup_pass_through() -> None:
    def damaged(name: str) -> torch.Tensor:
        raise IntegrityError(f"{name} is damaged")

    with pytest.raises(IntegrityError, match="x is damaged"):
        decode_tree({"$tensor": "x"}, damaged)
