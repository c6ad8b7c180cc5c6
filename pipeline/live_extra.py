"""What the user gives as ``extra``: objects with a state, random generators, and plain values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import cast

import torch

from stepwell.errors import FormatError, StateMismatchError, StepwellError, UsageError
from stepwell.pipeline.bits import copy_exact, overlaps_itself, own_copy
from stepwell.pipeline.live_scan import Stateful
from stepwell.pipeline.random_state import GENERATORS, generator_state, restore_generator
from stepwell.pipeline.tree import JsonValue, TensorLookup, TreeEncoder, decode_tree, escape_segment

__all__ = ["decode_extra", "encode_extra", "extra_kind", "load_extra", "validate_extra"]


def validate_extra(extra: Mapping[str, object]) -> None:
    """Refuse what could never be saved, when the checkpoint is opened.

    Raises
    ------
    UsageError
        A name is no string, or an object has only one of state_dict and load_state_dict.
    """
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra is a {type(extra).__qualname__}; give a mapping of names to values")
    for name, value in extra.items():
        if type(name) is not str:
            raise UsageError(f"extra has the key {name!r}; names are strings")
        has = [hasattr(value, method) for method in ("state_dict", "load_state_dict")]
        if any(has) and not all(has):
            raise UsageError(
                f"extra[{name!r}] ({type(value).__qualname__}) has only one of state_dict and load_state_dict"
            )
        if isinstance(value, type):
            raise UsageError(f"extra[{name!r}] is the class {value.__qualname__}, not an object")


def extra_kind(value: object) -> str:
    """How an entry is saved: ``generator``, ``object`` or ``value``."""
    if isinstance(value, GENERATORS):
        return "generator"
    if isinstance(value, Stateful) and not isinstance(value, type):
        return "object"
    return "value"


def encode_extra(encoder: TreeEncoder, name: str, value: object) -> JsonValue:
    """Encode one entry.

    Raises
    ------
    UnsupportedValueError
        Its state has something that would not come back equal; the place is named.
    """
    path = f"extra/{escape_segment(name)}"
    kind = extra_kind(value)
    if kind == "generator":
        return {"kind": kind, "value": encoder.encode(generator_state(value), path)}
    if kind == "value":
        return {"kind": kind, "value": encoder.encode(value, path)}
    state = cast(Stateful, value).state_dict()
    # nn.Module.state_dict keeps the versions of its classes in an attribute of the dict.
    metadata = encoder.encode(getattr(state, "_metadata", None), f"{path}/_metadata")
    return {"kind": kind, "value": encoder.encode(state, path), "metadata": metadata}


def decode_extra(name: str, node: JsonValue, lookup: TensorLookup) -> object:
    """Decode one entry; all its tensors get memory of their own.

    A tensor that the state refers to twice is one object again.
    """
    if not isinstance(node, dict) or "value" not in node:
        raise FormatError(f"extra {name!r}: the saved entry is damaged")
    owned: dict[str, torch.Tensor] = {}

    def own(tensor_name: str) -> torch.Tensor:
        if tensor_name not in owned:
            owned[tensor_name] = own_copy(lookup(tensor_name))
        return owned[tensor_name]

    value = decode_tree(node["value"], own)
    metadata = decode_tree(node.get("metadata"), own)
    if metadata is not None:
        value._metadata = metadata  # type: ignore[attr-defined]
    return value


def load_extra(name: str, live: object, saved: object) -> object:
    """Give a decoded entry to its live counterpart, in place where that can be.

    Returns
    -------
    object
        What now stands for the entry: the live object, or the saved value where it cannot be updated.

    Raises
    ------
    StateMismatchError
        The object refuses its state.
    """
    kind = extra_kind(live)
    if kind == "value":
        return _assign(live, saved, set())
    try:
        if kind == "generator":
            restore_generator(live, saved)
        else:
            cast(Stateful, live).load_state_dict(saved)
    except StepwellError:
        raise
    except Exception as error:
        raise StateMismatchError(
            f"extra {name!r}: {type(live).__qualname__} does not take its saved state: {error}"
        ) from error
    return live


def _assign(live: object, saved: object, used: set[int]) -> object:
    """Update a plain value in place, as deep as types agree.

    `used` holds what was updated already: where the live value has one object in two places and the
    saved one has two, only the first is updated and the second replaced.
    """
    identity = live.data_ptr() if isinstance(live, torch.Tensor) else id(live)
    if type(live) is not type(saved) or identity in used:
        return saved
    used.add(identity)
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape != saved.shape or live.dtype != saved.dtype or overlaps_itself(live):
            return saved
        copy_exact(live, saved)
        return live
    if isinstance(live, dict):
        items = cast("dict[object, object]", saved)
        merged = {key: _assign(live[key], item, used) if key in live else item for key, item in items.items()}
        live.clear()
        for key, item in merged.items():  # not update(): that of a Counter adds up
            live[key] = item
        return live
    if isinstance(live, list):
        values = cast("list[object]", saved)
        live[:] = [_assign(live[i], item, used) if i < len(live) else item for i, item in enumerate(values)]
        return live
    if isinstance(live, set):
        live.clear()
        live.update(cast("set[object]", saved))
        return live
    if isinstance(live, bytearray):
        live[:] = cast(bytearray, saved)
        return live
    if isinstance(live, deque) and live.maxlen == cast("deque[object]", saved).maxlen:
        live.clear()
        live.extend(cast("deque[object]", saved))
        return live
    return saved
