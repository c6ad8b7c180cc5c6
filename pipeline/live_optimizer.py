"""Takes the state of an optimizer apart, and remembers what it found while its tensors stay.

A base of a model with many tensors is taken on the trainer's thread: naming 40,000 of them costs
hundreds of milliseconds, looking whether they are still the same ones in the same places a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from stepwell.errors import UnsupportedValueError
from stepwell.pipeline.collected import Gatherer, encode_states
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.live_scan import OptimizerRef
from stepwell.pipeline.tree import JsonValue
from stepwell.pipeline.update import UNSAVED_GROUP_KEYS, class_name_of

__all__ = ["OptimizerMemo", "encode_groups"]


@dataclass(slots=True)
class _Found:
    """What was found of states that are tensors and nothing else, none an alias of another."""

    parameters: list[int]
    keys: list[tuple[object, ...] | None]
    named: list[tuple[str, torch.Tensor]]
    addresses: list[int]
    dtypes: list[torch.dtype]
    specs: tuple[TensorSpec, ...]
    pairs: list[JsonValue]


class OptimizerMemo:
    """Encodes one optimizer for a base.

    Parameters
    ----------
    ref : OptimizerRef
        Valid while its groups are those of the scan.
    """

    def __init__(self, ref: OptimizerRef) -> None:
        self._ref = ref
        self._found: _Found | None = None

    def encode(self, gatherer: Gatherer, specs: Sequence[TensorSpec]) -> dict[str, JsonValue]:
        """Encode groups and state.

        Parameters
        ----------
        gatherer : Gatherer
            Has all parameters already.
        specs : sequence of TensorSpec
            Of all parameters.

        Raises
        ------
        UnsupportedValueError
            A value cannot be saved, or belongs to a tensor that is in no group.
        """
        ref = self._ref
        groups = encode_groups(gatherer, ref)
        node: dict[str, JsonValue] = {
            "class": class_name_of(type(ref.optimizer)),
            "groups": [
                {"params": list(names), "values": values}
                for names, values in zip(ref.parameters, groups, strict=True)
            ],
            "state": [],
            "other": {},
        }
        if ref.custom:
            node["custom"] = gatherer.encoder.encode(ref.optimizer.state_dict(), f"{ref.name}/custom")
            return node
        node["state"] = self._encode_states(gatherer, specs)
        node["other"] = self._encode_other(gatherer)
        return node

    def _encode_states(self, gatherer: Gatherer, specs: Sequence[TensorSpec]) -> list[JsonValue]:
        found = self._found
        if found is not None and self._unchanged(found):
            gatherer.extend(found.specs, found.named)
            return found.pairs
        live = self._states()
        owners = [(tensor, name) for tensor, name in self._parameters() if tensor in live]
        by_name = {spec.name: spec for spec in specs}
        start = gatherer.count()
        states = [(by_name[name], live[tensor]) for tensor, name in owners]
        pairs = encode_states(gatherer, self._ref.name, states)
        taken_specs, named = gatherer.taken_since(start)
        values = [value for _, state in states for value in state.values()]
        self._found = None
        # An alias is saved under one name only, a plain value may change: neither may be remembered.
        if len(named) == len(values) and all(isinstance(value, torch.Tensor) for value in values):
            self._found = _Found(
                parameters=[tensor.data_ptr() for tensor, _ in self._parameters()],
                keys=[tuple(live[tensor]) if tensor in live else None for tensor, _ in self._parameters()],
                named=named,
                addresses=[tensor.data_ptr() for _, tensor in named],
                dtypes=[tensor.dtype for _, tensor in named],
                specs=taken_specs,
                pairs=pairs,
            )
        return pairs

    def _unchanged(self, found: _Found) -> bool:
        """True if all states are the same tensors with the same elements.

        Assigning to ``.data`` changes those under the same object. Lazily, object by object: keeping
        thousands of small tuples would wake the garbage collector.
        """
        live = self._states()
        values: list[object] = []
        for (tensor, _), address, keys in zip(self._parameters(), found.parameters, found.keys, strict=True):
            state = live.get(tensor)
            if tensor.data_ptr() != address or (None if state is None else tuple(state)) != keys:
                return False
            if state is not None:
                values.extend(state.values())
        return all(
            value is tensor
            and tensor.data_ptr() == address
            and tensor.shape == spec.shape
            and tensor.dtype is dtype
            for value, (_, tensor), address, spec, dtype in zip(
                values, found.named, found.addresses, found.specs, found.dtypes, strict=True
            )
        )

    def _states(self) -> Mapping[torch.Tensor, Mapping[object, object]]:
        return cast("Mapping[torch.Tensor, Mapping[object, object]]", self._ref.optimizer.state)

    def _encode_other(self, gatherer: Gatherer) -> JsonValue:
        live = cast("Mapping[object, object]", self._ref.optimizer.state)
        other = {key: value for key, value in live.items() if not isinstance(key, torch.Tensor)}
        known = {id(tensor) for tensor, _ in self._parameters()}
        for key in live:
            if isinstance(key, torch.Tensor) and id(key) not in known:
                raise UnsupportedValueError(
                    f"{self._ref.name}: has state of a tensor of shape {tuple(key.shape)} that is in no group"
                )
        return gatherer.encoder.encode(other, f"{self._ref.name}/other")

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        groups = self._ref.optimizer.param_groups
        for group, names in zip(groups, self._ref.parameters, strict=True):
            yield from zip(group["params"], names, strict=True)


def encode_groups(gatherer: Gatherer, ref: OptimizerRef) -> list[JsonValue]:
    """Encode the parameter groups as they are now, without the parameters."""
    values: list[JsonValue] = []
    for g, group in enumerate(ref.optimizer.param_groups):
        kept = {key: value for key, value in group.items() if key not in UNSAVED_GROUP_KEYS}
        values.append(gatherer.encoder.encode(kept, f"{ref.name}/group/{g}"))
    return values
