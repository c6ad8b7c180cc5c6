"""A state taken apart: tensors with their specs, and the tree of everything else.

The tree (JSON-able, small beside the tensors)::

    {"format": 1,
     "model":      {"aliases": {tied name: saved name}, "absent": [buffers that are None],
                    "extra_state": {module: value}, "object": value},
     "optimizers": {name: {"class": "module:qualname",
                           "groups": [{"params": [names], "values": {...}}],
                           "state": [[parameter, {key: value}], ...],
                           "other": {...}, "custom": value}},
     "extra":      {name: {"kind": "object" | "value" | ..., "value": value}},
     "rng":        value}

``object`` is there for a model that is no nn.Module, ``custom`` for an optimizer with a state_dict of
its own, ``rng`` only if asked. The tree of a differential (``LiveState.collect_aux``) lacks ``params``,
``state``, ``other`` and ``custom``: what updates change is replayed, the rest laid over it by ``overlay``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, cast

import torch

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import check_tensor, dtype_name
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.tree import JsonValue, TensorLookup, TreeEncoder, decode_tree, escape_segment

__all__ = [
    "Collected",
    "Gatherer",
    "OptimizerStates",
    "optimizer_states",
    "overlay",
    "section",
    "state_prefix",
    "with_optimizer_states",
]

OptimizerStates: TypeAlias = Mapping[str, Mapping[str, Mapping[str, object]]]
"""optimizer name -> parameter name -> key -> tensor or plain value."""

TREE_FORMAT = 1

_STATE_KINDS: Mapping[str, Kind] = {
    "exp_avg": Kind.MOMENT1,
    "momentum_buffer": Kind.MOMENT1,
    "grad_avg": Kind.MOMENT1,
    "exp_avg_sq": Kind.MOMENT2,
    "max_exp_avg_sq": Kind.MOMENT2,
    "square_avg": Kind.MOMENT2,
    "exp_inf": Kind.MOMENT2,
    "sum": Kind.MOMENT2,
    "acc_delta": Kind.MOMENT2,
    "variance": Kind.MOMENT2,
}
"""Keys of torch.optim's states that have the parameter's shape; the kind only guides encoders."""


@dataclass(frozen=True)
class Collected:
    """Specs, tensors in the same order, and the tree that refers to them by name.

    The tensors are live references or views of a restored region: who keeps them copies them.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    tree: dict[str, JsonValue]

    @cached_property
    def by_name(self) -> Mapping[str, torch.Tensor]:
        """Tensors by name."""
        return {spec.name: tensor for spec, tensor in zip(self.specs, self.tensors, strict=True)}

    def lookup(self, name: str) -> torch.Tensor:
        """Return the tensor of a name.

        Raises
        ------
        IntegrityError
            The tree refers to a tensor that is not there.
        """
        tensor = self.by_name.get(name)
        if tensor is None:
            raise IntegrityError(f"the state refers to the tensor {name!r}, which is not part of it")
        return tensor


class Gatherer:
    """Collects tensors with specs; values are encoded so that aliases among all of them are seen."""

    def __init__(self) -> None:
        self._named: list[tuple[str, torch.Tensor]] = []
        self._specs: list[TensorSpec] = []
        self.encoder = TreeEncoder(self._named)

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        """Take a tensor with a known spec."""
        self._flush()
        self._named.append((spec.name, tensor))
        self._specs.append(spec)
        self.encoder.remember(spec.name, tensor)

    def extend(self, specs: Sequence[TensorSpec], named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take many tensors at once, without looking for aliases of them later (no work per tensor)."""
        self._flush()
        self._named.extend(named)
        self._specs.extend(specs)

    def add_all(self, specs: Sequence[TensorSpec], named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Like ``add`` for many tensors."""
        self.extend(specs, named)
        for name, tensor in named:
            self.encoder.remember(name, tensor)

    def add_state(self, name: str, key: object, value: object, parameter: TensorSpec) -> JsonValue:
        """Take one value of the optimizer's state of a parameter; tensors of its shape join its group."""
        if not isinstance(value, torch.Tensor):
            return self.encoder.encode(value, name)
        self._flush()
        before = len(self._named)
        node = self.encoder.tensor(value, name)
        if len(self._named) > before:
            saved = self._named[-1][0]
            kind, group = Kind.AUX, ""
            if value.shape == parameter.shape and parameter.shape:
                kind, group = _STATE_KINDS.get(str(key), Kind.AUX), parameter.group
            self._specs.append(TensorSpec(saved, tuple(value.shape), dtype_name(value.dtype), kind, group))
        return node

    def count(self) -> int:
        """Return how many tensors were taken so far."""
        self._flush()
        return len(self._specs)

    def taken_since(self, start: int) -> tuple[tuple[TensorSpec, ...], list[tuple[str, torch.Tensor]]]:
        """Return specs and named tensors of what was taken since `count` was `start`."""
        self._flush()
        return tuple(self._specs[start:]), self._named[start:]

    def finish(self, tree: dict[str, JsonValue]) -> Collected:
        """Everything taken so far, with the tree that refers to it."""
        self._flush()
        return Collected(tuple(self._specs), tuple(tensor for _, tensor in self._named), tree)

    def _flush(self) -> None:
        """Specs for what the encoder has appended by itself."""
        if len(self._named) == len(self._specs):
            return
        for name, tensor in self._named[len(self._specs) :]:
            self._specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), Kind.AUX))


def spec_of(name: str, tensor: torch.Tensor, kind: Kind, group: str = "") -> TensorSpec:
    """Spec of a live tensor that is restored in place.

    Raises
    ------
    UnsupportedValueError
        It cannot be saved bit for bit.
    """
    check_tensor(name, tensor, in_place=True)
    return TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), kind, group)


def section(tree: Mapping[str, JsonValue], *keys: str) -> dict[str, JsonValue]:
    """Return a nested object of a tree.

    Raises
    ------
    FormatError
        It is not there, or no object.
    """
    node: JsonValue = cast("dict[str, JsonValue]", tree)
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise FormatError(f"the saved tree has no section {'.'.join(keys)!r}")
    return node


def state_prefix(optimizer: str, parameter: str) -> str:
    """Common beginning, without the last slash, of the names of one parameter's optimizer state."""
    return f"{optimizer}/state/{parameter.removeprefix('model/')}"


def encode_states(
    gatherer: Gatherer,
    optimizer: str,
    states: Sequence[tuple[TensorSpec, Mapping[object, object]]],
) -> list[JsonValue]:
    """Encode ``optimizer.state`` as pairs of parameter name and state, in the order given."""
    pairs: list[JsonValue] = []
    for parameter, state in states:
        prefix = state_prefix(optimizer, parameter.name)
        items: list[JsonValue] = []
        for key, value in state.items():
            name = f"{prefix}/{escape_segment(key)}"
            node = gatherer.add_state(name, key, value, parameter)
            items.append([gatherer.encoder.encode(key, name), node])
        pairs.append([parameter.name, {"$dict": items}])
    return pairs


def optimizer_states(
    tree: Mapping[str, JsonValue], optimizer: str, lookup: TensorLookup
) -> dict[str, dict[str, object]]:
    """Decode the state an optimizer had, by parameter name.

    Tensors come from `lookup` as they are. Parameters that had no state are absent.

    Raises
    ------
    FormatError
        The tree has no such optimizer, is a differential's, or is damaged.
    """
    pairs = section(tree, "optimizers", optimizer).get("state")
    if not isinstance(pairs, list):
        raise FormatError(f"the saved tree has no state of optimizer {optimizer!r}")
    states: dict[str, dict[str, object]] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise FormatError(f"the saved state of optimizer {optimizer!r} is not a list of pairs")
        state = decode_tree(pair[1], lookup)
        if not isinstance(state, dict):
            raise FormatError(f"the saved state of {pair[0]!r} in optimizer {optimizer!r} is no dict")
        states[pair[0]] = state
    return states


def with_optimizer_states(collected: Collected, states: OptimizerStates) -> Collected:
    """Return the same state with other states of the optimizers named, e.g. after a replay.

    States may have keys and parameters the old ones had not (they are created by the first update).
    Optimizers not named keep theirs. Weights and all else are taken from `collected`.
    """
    dropped = tuple(f"{optimizer}/state/" for optimizer in states)
    gatherer = Gatherer()
    parameters: dict[str, TensorSpec] = {}
    for spec, tensor in zip(collected.specs, collected.tensors, strict=True):
        if spec.kind is Kind.WEIGHT:
            parameters[spec.name] = spec
        if not spec.name.startswith(dropped):
            gatherer.add(spec, tensor)
    optimizers = dict(section(collected.tree, "optimizers"))
    for optimizer, by_parameter in states.items():
        missing = sorted(set(by_parameter) - set(parameters))
        if missing:
            raise IntegrityError(f"optimizer {optimizer!r} has state of unknown parameters {missing[:5]}")
        pairs = [
            (parameters[name], cast("Mapping[object, object]", state)) for name, state in by_parameter.items()
        ]
        old = section(collected.tree, "optimizers", optimizer)
        optimizers[optimizer] = {**old, "state": encode_states(gatherer, optimizer, pairs)}
    return gatherer.finish({**collected.tree, "optimizers": optimizers})


def overlay(base: Collected, aux: Collected) -> Collected:
    """Lay a differential's aux part over a whole state: buffers, groups, extra and RNG are those of the save.

    Parameters
    ----------
    base : Collected
        A whole state, its weights and optimizer states already those of the save (replayed).
    aux : Collected
        From ``LiveState.collect_aux`` at the save, read back.

    Raises
    ------
    FormatError
        The two do not belong together (optimizers or groups differ).
    """
    old_optimizers, new_optimizers = section(base.tree, "optimizers"), section(aux.tree, "optimizers")
    if set(old_optimizers) != set(new_optimizers):
        raise FormatError("the base and the differential have different optimizers")
    optimizers: dict[str, JsonValue] = {}
    for name in old_optimizers:
        old, new = section(base.tree, "optimizers", name), section(aux.tree, "optimizers", name)
        optimizers[name] = {**old, "groups": _merge_groups(name, old.get("groups"), new.get("groups"))}
    kept = tuple(f"{name}/{part}/" for name in old_optimizers for part in ("state", "other", "custom"))
    replaced = aux.by_name
    specs, tensors = list(aux.specs), list(aux.tensors)
    for spec, tensor in zip(base.specs, base.tensors, strict=True):
        if spec.name not in replaced and (spec.kind is Kind.WEIGHT or spec.name.startswith(kept)):
            specs.append(spec)
            tensors.append(tensor)
    tree = {**base.tree, **aux.tree, "optimizers": cast(JsonValue, optimizers)}
    return Collected(tuple(specs), tuple(tensors), tree)


def _merge_groups(name: str, old: JsonValue, new: JsonValue) -> JsonValue:
    if not isinstance(old, list) or not isinstance(new, list) or len(old) != len(new):
        raise FormatError(f"the base and the differential have different parameter groups of {name!r}")
    merged: list[JsonValue] = []
    for before, after in zip(old, new, strict=True):
        if not isinstance(before, dict) or not isinstance(after, dict):
            raise FormatError(f"a saved parameter group of {name!r} is no object")
        merged.append({**before, "values": after.get("values")})
    return merged
