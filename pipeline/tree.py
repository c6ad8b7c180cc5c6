"""Values as JSON and back, equal by type and value; tensors are taken out or inlined.

Plain JSON stands for None, bool, int, float, str, list and dict. Whatever JSON cannot say exactly is an
object with one key that begins with ``$``: ``{"$tuple": [1, 2]}``. A dict is a JSON object only if its
keys are plain strings in sorted order, so that canonical JSON (which sorts keys) keeps the order of
every dict; all others are ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TypeAlias, cast

import numpy as np
import torch

from stepwell.errors import UnsupportedValueError
from stepwell.pipeline.bits import check_tensor, dtype_name, tensor_bytes
from stepwell.pipeline.tree_decode import (
    DEPTH_MAX,
    FACTORIES,
    JsonValue,
    TensorLookup,
    check_numpy,
    decode_tree,
)

__all__ = ["JsonValue", "TensorLookup", "TreeEncoder", "decode_tree", "encode_tree", "escape_segment"]

_INT_PLAIN_MAX = 1 << 63
"""Larger integers are hexadecimal: Python refuses to read decimal ones of more than 4300 digits."""


def encode_tree(value: object, tensors: list[tuple[str, torch.Tensor]] | None, path: str) -> JsonValue:
    """Encode one value.

    Parameters
    ----------
    value : object
        Nested dict, OrderedDict, defaultdict (of a builtin), Counter, list, tuple, deque, set, frozenset,
        range, None, bool, int, float, complex, str, bytes, bytearray, numpy scalars and arrays,
        torch.Tensor, torch.Size, torch.dtype, torch.device.
    tensors : list or None
        Tensors found are appended as (name, live tensor) and stand in the tree as ``{"$tensor": name}``;
        a tensor met twice is appended once. With None they are inlined, bit for bit.
    path : str
        Name of the value itself; names of tensors continue it with ``/``.

    Raises
    ------
    UnsupportedValueError
        Something that would not come back equal by type and value; names its path and type.
    """
    return TreeEncoder(tensors).encode(value, path)


def escape_segment(key: object) -> str:
    """One segment of a tensor's name for a dict key: ``/`` and ``~`` are escaped as in JSON pointers."""
    text = key if type(key) is str else repr(key)
    return text.replace("~", "~0").replace("/", "~1")


def same_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors are the same elements of the same memory; empty ones never are."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
        and first.device == second.device
        and first.numel() > 0
    )


class TreeEncoder:
    """Encodes several values that share one list of tensors, so that aliases between them are seen.

    Parameters
    ----------
    tensors : list or None
        As in ``encode_tree``. Tensors already listed are aliases to be, their names are taken.
    """

    def __init__(self, tensors: list[tuple[str, torch.Tensor]] | None) -> None:
        self._tensors = tensors
        self._names: set[str] = set()
        # First owner of an address, and the others where several views begin there. The tensors are
        # kept: state_dict() may hand out temporaries, and memory freed between two of them must not
        # look like an alias. Flat, because thousands of small tuples wake the garbage collector.
        self._first: dict[int, torch.Tensor] = {}
        self._first_name: dict[int, str] = {}
        self._others: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors or ():
            self.remember(name, tensor)

    def remember(self, name: str, tensor: torch.Tensor) -> None:
        """Note that these elements are saved under this name already."""
        self._names.add(name)
        address = tensor.data_ptr()
        if not address:
            return
        if self._first.setdefault(address, tensor) is tensor:
            self._first_name.setdefault(address, name)
        else:
            self._others.setdefault(address, []).append((name, tensor))

    def find(self, tensor: torch.Tensor) -> str | None:
        """Return the name under which the same elements are saved, if any."""
        address = tensor.data_ptr()
        first = self._first.get(address)
        if first is None:
            return None
        if same_elements(first, tensor):
            return self._first_name[address]
        others = self._others.get(address, ())
        return next((name for name, other in others if same_elements(other, tensor)), None)

    def encode(self, value: object, path: str) -> JsonValue:
        """Encode one value; see ``encode_tree``."""
        return self._encode(value, path, 0)

    def tensor(self, value: torch.Tensor, path: str) -> JsonValue:
        """Encode one tensor: append or inline it, or refer to what it aliases; see ``encode_tree``."""
        check_tensor(path, value)
        if self._tensors is None:
            data = base64.b64encode(tensor_bytes(value).data).decode("ascii")
            return {"$inline": [dtype_name(value.dtype), list(value.shape), data]}
        name = self.find(value)
        if name is None:
            name = self._free_name(path)
            self._tensors.append((name, value))
            self.remember(name, value)
        return {"$tensor": name}

    def _free_name(self, path: str) -> str:
        """The path, or the path with a number where e.g. the keys ``1`` and ``"1"`` make it ambiguous."""
        name, count = path, 1
        while name in self._names:
            count += 1
            name = f"{path}~{count}"  # escaped keys only have ~0 and ~1
        return name

    def _encode(self, value: object, path: str, depth: int) -> JsonValue:
        kind = type(value)
        if value is None or kind is bool:
            return cast(JsonValue, value)
        if kind is int:
            return _encode_int(cast(int, value))
        if kind is float:
            return _encode_float(cast(float, value))
        if kind is str:
            return _encode_str(cast(str, value))
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            return self.tensor(cast(torch.Tensor, value), path)
        if depth >= DEPTH_MAX:
            raise UnsupportedValueError(f"{path}: nested deeper than {DEPTH_MAX} levels (a cycle?)")
        container = _CONTAINERS.get(kind)
        if container is not None:
            return container(self, value, path, depth + 1)
        leaf = _LEAVES.get(kind)
        if leaf is not None:
            return leaf(value)
        if kind is np.ndarray:
            return self._array(cast("np.ndarray[tuple[int, ...], np.dtype[np.generic]]", value), path)
        if isinstance(value, np.generic):
            check_numpy(value.dtype, path)
            return {"$scalar": [value.dtype.str, _text(value.tobytes())]}
        raise UnsupportedValueError(
            f"{path}: a value of type {kind.__module__}.{kind.__qualname__} cannot be saved; "
            "give it as an object of its own with state_dict() and load_state_dict(), or as plain values"
        )

    def _array(self, value: np.ndarray[tuple[int, ...], np.dtype[np.generic]], path: str) -> JsonValue:
        check_numpy(value.dtype, path)
        flat = np.ascontiguousarray(value).reshape(value.shape)
        if self._tensors is None or not _torch_has(value.dtype):
            return {"$array": [value.dtype.str, list(value.shape), _text(flat.tobytes())]}
        # A copy: torch warns about read-only arrays.
        data = torch.from_numpy(flat.copy())
        return {"$array": [value.dtype.str, list(value.shape), self.tensor(data, path)]}

    def _items(self, values: Iterable[object], path: str, depth: int) -> list[JsonValue]:
        return [self._encode(item, f"{path}/{i}", depth) for i, item in enumerate(values)]

    def _pairs(self, value: dict[object, object], path: str, depth: int) -> list[JsonValue]:
        pairs: list[JsonValue] = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise UnsupportedValueError(f"{path}: a tensor as the key of a dict cannot be saved")
            place = f"{path}/{escape_segment(key)}"
            pairs.append([self._encode(key, place, depth), self._encode(item, place, depth)])
        return pairs

    def _dict(self, value: object, path: str, depth: int) -> JsonValue:
        mapping = cast("dict[object, object]", value)
        previous = ""
        for key in mapping:
            if type(key) is not str or key < previous or key[:1] == "$" or not key.isascii():
                return {"$dict": self._pairs(mapping, path, depth)}
            previous = key
        return {
            cast(str, key): self._encode(item, f"{path}/{escape_segment(key)}", depth)
            for key, item in mapping.items()
        }

    def _set(self, value: object, path: str, depth: int) -> list[JsonValue]:
        # A set has no order to keep: sort, so that equal sets are equal bytes.
        return sorted(self._items(cast("set[object]", value), path, depth), key=repr)

    def _defaultdict(self, value: object, path: str, depth: int) -> JsonValue:
        mapping = cast("defaultdict[object, object]", value)
        factory = mapping.default_factory
        name = None if factory is None else next((n for n, f in FACTORIES.items() if f is factory), "")
        if name == "":
            raise UnsupportedValueError(f"{path}: a defaultdict can be saved with a builtin factory only")
        return {"$defaultdict": [name, self._pairs(mapping, path, depth)]}

    def _deque(self, value: object, path: str, depth: int) -> JsonValue:
        items = cast("deque[object]", value)
        return {"$deque": [items.maxlen, self._items(items, path, depth)]}


_Container: TypeAlias = Callable[[TreeEncoder, object, str, int], JsonValue]

_CONTAINERS: dict[type, _Container] = {
    dict: TreeEncoder._dict,
    list: lambda encoder, value, path, depth: encoder._items(cast("list[object]", value), path, depth),
    tuple: lambda encoder, value, path, depth: {
        "$tuple": encoder._items(cast("tuple[object, ...]", value), path, depth)
    },
    OrderedDict: lambda encoder, value, path, depth: {
        "$ordered": encoder._pairs(cast("dict[object, object]", value), path, depth)
    },
    Counter: lambda encoder, value, path, depth: {
        "$counter": encoder._pairs(cast("dict[object, object]", value), path, depth)
    },
    defaultdict: TreeEncoder._defaultdict,
    deque: TreeEncoder._deque,
    set: lambda encoder, value, path, depth: {"$set": encoder._set(value, path, depth)},
    frozenset: lambda encoder, value, path, depth: {"$frozenset": encoder._set(value, path, depth)},
}

_LEAVES: dict[type, Callable[[object], JsonValue]] = {
    bytes: lambda value: {"$bytes": _text(cast(bytes, value))},
    bytearray: lambda value: {"$bytearray": _text(bytes(cast(bytearray, value)))},
    complex: lambda value: {
        "$complex": [_encode_float(cast(complex, value).real), _encode_float(cast(complex, value).imag)]
    },
    range: lambda value: {"$range": _range_ends(cast(range, value))},
    torch.Size: lambda value: {"$size": list(cast(torch.Size, value))},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_int(value: int) -> JsonValue:
    return value if -_INT_PLAIN_MAX <= value < _INT_PLAIN_MAX else {"$int": hex(value)}


def _range_ends(value: range) -> list[JsonValue]:
    return [_encode_int(end) for end in (value.start, value.stop, value.step)]


def _encode_float(value: float) -> JsonValue:
    # repr gives back every finite double; NaN payloads need their bits.
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> JsonValue:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"$str": _text(value.encode("utf-8", "surrogatepass"))}
    return value


def _torch_has(dtype: np.dtype[np.generic]) -> bool:
    """True for the plain numbers that are a torch dtype too."""
    return dtype.isnative and dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)
