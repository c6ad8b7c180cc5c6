"""The way back of ``stepwell.pipeline.tree``: from JSON to values. What is read is not trusted."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import torch

from stepwell.errors import FormatError, IntegrityError, StepwellError, UnsupportedValueError
from stepwell.pipeline.bits import bytes_to_tensor, own_copy, tensor_bytes

__all__ = ["DEPTH_MAX", "FACTORIES", "JsonValue", "TensorLookup", "check_numpy", "decode_tree"]

JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
TensorLookup: TypeAlias = Callable[[str], torch.Tensor]
"""From the name of a tensor to its values."""

DEPTH_MAX = 100
"""Nesting allowed in a value. Each level costs two of Python's 1000 frames and up to three levels of JSON."""

FACTORIES: dict[str, Callable[[], object]] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
}
"""What a defaultdict may make, by name."""


def decode_tree(tree: JsonValue, lookup: TensorLookup) -> object:
    """Decode what ``encode_tree`` made.

    Parameters
    ----------
    tree : JsonValue
        Read from a file, so not trusted: every fault in it is a FormatError.
    lookup : callable
        Gives the tensor of a name. Tensors are placed into the result as they come from it: they may
        alias other memory, copying is the caller's business.

    Raises
    ------
    FormatError
    """
    try:
        return _decode(tree, lookup, 0)
    except UnsupportedValueError as error:
        raise FormatError(f"a stored value cannot be read: {error}") from error
    except StepwellError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error) as error:
        # RuntimeError: torch's word for a malformed device name.
        raise FormatError(f"a stored value cannot be read: {error}") from error


def check_numpy(dtype: np.dtype[np.generic], path: str) -> None:
    """Refuse structured and object dtypes, naming the place."""
    if dtype.kind not in "biufcSUMm" or dtype.names is not None:
        raise UnsupportedValueError(f"{path}: numpy values of dtype {dtype} cannot be saved")


def _decode(node: JsonValue, lookup: TensorLookup, depth: int) -> object:
    if depth > DEPTH_MAX + 1:
        raise FormatError(f"a stored value is nested deeper than {DEPTH_MAX} levels")
    if type(node) is list:
        return _decode_list(node, lookup, depth)
    if type(node) is not dict:
        return node
    if len(node) == 1:
        ((tag, body),) = node.items()
        if tag[:1] == "$":
            decoder = _DECODERS.get(tag)
            if decoder is None:
                raise FormatError(f"a stored value has the unknown tag {tag!r}; a newer stepwell wrote it?")
            return decoder(body, lookup, depth + 1)
    if any(key[:1] == "$" for key in node):
        raise FormatError("a stored value has a tag beside other keys")
    return {key: _decode(item, lookup, depth + 1) for key, item in node.items()}


def _decode_list(body: JsonValue, lookup: TensorLookup, depth: int) -> list[object]:
    return [_decode(item, lookup, depth + 1) for item in _as_list(body)]


def _decode_pairs(body: JsonValue, lookup: TensorLookup, depth: int) -> list[tuple[object, object]]:
    pairs: list[tuple[object, object]] = []
    for pair in _as_list(body):
        key, item = _as_list(pair)
        pairs.append((_decode(key, lookup, depth), _decode(item, lookup, depth)))
    return pairs


def _as_list(body: JsonValue) -> list[JsonValue]:
    if type(body) is not list:
        raise FormatError(f"a stored value has {type(body).__name__} where a list belongs")
    return body


def _as_str(body: JsonValue) -> str:
    if type(body) is not str:
        raise FormatError(f"a stored value has {type(body).__name__} where a string belongs")
    return body


def _as_int(body: JsonValue) -> int:
    if type(body) is not int:
        raise FormatError(f"a stored value has {type(body).__name__} where an integer belongs")
    return body


def _data(body: JsonValue) -> bytes:
    return base64.b64decode(_as_str(body), validate=True)


def _decode_inline(body: JsonValue, lookup: TensorLookup, depth: int) -> torch.Tensor:
    name, shape, data = _as_list(body)
    extents = [_as_int(extent) for extent in _as_list(shape)]
    try:
        return own_copy(bytes_to_tensor(_data(data), _as_str(name), extents))
    except IntegrityError as error:
        raise FormatError(f"an inlined tensor is damaged: {error}") from error


def _decode_array(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    name, shape, data = _as_list(body)
    dtype: np.dtype[np.generic] = np.dtype(_as_str(name))
    check_numpy(dtype, "a stored array")
    raw: bytes | memoryview
    if type(data) is str:
        raw = _data(data)
    else:
        tensor = _decode(data, lookup, depth)
        if not isinstance(tensor, torch.Tensor):
            raise FormatError("a stored array has no data")
        raw = tensor_bytes(tensor).data
    extents = [_as_int(extent) for extent in _as_list(shape)]
    if dtype.itemsize * math.prod(extents) != len(raw) or min(extents, default=0) < 0:
        raise FormatError(f"a stored array of shape {extents} and dtype {dtype} has {len(raw)} bytes")
    # ndarray over the bytes, not frombuffer: that refuses empty buffers and zero-size items.
    return np.ndarray(tuple(extents), dtype, buffer=raw).copy()


def _decode_scalar(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    name, data = _as_list(body)
    array = _decode_array([name, [], data], lookup, depth)
    return cast("np.ndarray[tuple[()], np.dtype[np.generic]]", array)[()]


def _decode_float(body: JsonValue) -> float:
    if type(body) is float:
        return body
    if type(body) is dict:
        body = body.get("$float")
    return cast(float, struct.unpack(">d", bytes.fromhex(_as_str(body)))[0])


def _decode_defaultdict(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    name, pairs = _as_list(body)
    factory = None if name is None else FACTORIES[_as_str(name)]
    return defaultdict(factory, _decode_pairs(pairs, lookup, depth))


def _decode_counter(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    counter: Counter[object] = Counter()
    # dict.update: Counter's own would add up what it finds and drop nothing.
    dict.update(counter, cast("list[tuple[object, int]]", _decode_pairs(body, lookup, depth)))
    return counter


def _decode_deque(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    limit, items = _as_list(body)
    return deque(_decode_list(items, lookup, depth), None if limit is None else _as_int(limit))


def _decode_complex(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    real, imaginary = _as_list(body)
    return complex(_decode_float(real), _decode_float(imaginary))


def _decode_dtype(body: JsonValue, lookup: TensorLookup, depth: int) -> object:
    name = _as_str(body)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"this torch has no dtype {name!r}")
    return dtype


_DECODERS: dict[str, Callable[[JsonValue, TensorLookup, int], object]] = {
    "$tensor": lambda body, lookup, depth: lookup(_as_str(body)),
    "$inline": _decode_inline,
    "$array": _decode_array,
    "$scalar": _decode_scalar,
    "$tuple": lambda body, lookup, depth: tuple(_decode_list(body, lookup, depth)),
    "$dict": lambda body, lookup, depth: dict(_decode_pairs(body, lookup, depth)),
    "$ordered": lambda body, lookup, depth: OrderedDict(_decode_pairs(body, lookup, depth)),
    "$counter": _decode_counter,
    "$defaultdict": _decode_defaultdict,
    "$deque": _decode_deque,
    "$set": lambda body, lookup, depth: set(_decode_list(body, lookup, depth)),
    "$frozenset": lambda body, lookup, depth: frozenset(_decode_list(body, lookup, depth)),
    "$range": lambda body, lookup, depth: range(*cast("list[int]", _decode_list(body, lookup, depth))),
    "$int": lambda body, lookup, depth: int(_as_str(body), 16),
    "$float": lambda body, lookup, depth: _decode_float(body),
    "$str": lambda body, lookup, depth: _data(body).decode("utf-8", "surrogatepass"),
    "$bytes": lambda body, lookup, depth: _data(body),
    "$bytearray": lambda body, lookup, depth: bytearray(_data(body)),
    "$complex": _decode_complex,
    "$size": lambda body, lookup, depth: torch.Size([_as_int(n) for n in _as_list(body)]),
    "$dtype": _decode_dtype,
    "$device": lambda body, lookup, depth: torch.device(_as_str(body)),
}
