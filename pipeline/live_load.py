"""Loads a whole saved state in place, RNG last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from stepwell.errors import FormatError, StateMismatchError
from stepwell.pipeline.bits import copy_exact, overlaps_itself, own_copy
from stepwell.pipeline.collected import section, state_prefix
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.live_check import check_state, saved_absent, saved_aliases
from stepwell.pipeline.live_extra import decode_extra, load_extra
from stepwell.pipeline.live_scan import OptimizerRef
from stepwell.pipeline.random_state import restore_random
from stepwell.pipeline.tree import JsonValue, TensorLookup, decode_tree, escape_segment

if TYPE_CHECKING:
    from stepwell.pipeline.live import LiveState

__all__ = ["load_state"]


def load_state(
    live: LiveState, tree: Mapping[str, JsonValue], specs: Sequence[TensorSpec], lookup: TensorLookup
) -> dict[str, object]:
    """Load a whole state in place: extra, model, optimizer states, groups, then RNG.

    Everything is checked and all of the tree decoded before the first change. Tensors of the model and
    optimizer state of unchanged shape keep their memory; new state is allocated on the parameter's
    device. Aliases inside optimizer state come back as aliases.

    Parameters
    ----------
    live : LiveState
    tree, specs
        Of ``LiveState.collect``, or an ``overlay``.
    lookup : callable
        Gives verified tensors; they are copied, never kept.

    Returns
    -------
    dict
        What now stands for each entry of ``extra``.

    Raises
    ------
    StateMismatchError, FormatError
        As ``check_state``; the live state is then untouched. An object of ``extra`` that refuses its state
        is found before model and optimizers are touched, but after the entries before it.
    """
    live.refresh()
    check_state(live, tree, specs)
    targets = list(_model_targets(live, tree))
    for name, target, source in targets:
        if overlaps_itself(target):
            _check_overlap(name, target, lookup(source))
    extras = {name: decode_extra(name, node, lookup) for name, node in section(tree, "extra").items()}
    groups = {ref.name: _decode_groups(tree, ref, lookup) for ref in live.optimizers}
    random_state = decode_tree(tree.get("rng"), lookup) if live.rng else None
    placers = {ref.name: _StatePlacer(live, ref, lookup) for ref in live.optimizers}
    result: dict[str, object] = {}
    for name, saved in extras.items():
        result[name] = load_extra(name, live.extra[name], saved)
        if result[name] is not live.extra[name] and isinstance(live.extra, MutableMapping):
            live.extra[name] = result[name]
    _load_model(live, tree, targets, lookup)
    for ref in live.optimizers:
        _set_groups(ref, groups[ref.name])
        placers[ref.name].load(tree)
        # A scheduler or a state_dict of its own may have touched the groups: theirs is the last word.
        _set_groups(ref, groups[ref.name])
    if live.rng:
        restore_random(random_state)
    return result


def _model_targets(live: LiveState, tree: Mapping[str, JsonValue]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Name, live tensor and saved name of everything that is loaded in place."""
    aliases, absent = saved_aliases(tree), saved_absent(tree)
    for ref in live.parameters:
        yield ref.name, ref.tensor, aliases.get(ref.name, ref.name)
    for buffer in live.scan.buffers:
        tensor = buffer.owner.get(buffer.key)
        if tensor is not None and buffer.name not in absent:
            yield buffer.name, tensor, aliases.get(buffer.name, buffer.name)


def _check_overlap(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Try the copy on a stand-in with the same strides."""
    probe = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
    try:
        copy_exact(probe, source)
    except StateMismatchError as error:
        raise StateMismatchError(f"{name}: {error}") from error


def _load_model(
    live: LiveState,
    tree: Mapping[str, JsonValue],
    targets: Sequence[tuple[str, torch.Tensor, str]],
    lookup: TensorLookup,
) -> None:
    model = section(tree, "model")
    for _, target, source in targets:
        copy_exact(target, lookup(source))
    aliases, absent = saved_aliases(tree), saved_absent(tree)
    for ref in live.scan.buffers:
        current = ref.owner.get(ref.key)
        if ref.name in absent:
            ref.owner[ref.key] = None
        elif current is None:
            ref.owner[ref.key] = own_copy(lookup(aliases.get(ref.name, ref.name)))
    copied: dict[str, torch.Tensor] = {}

    def own(name: str) -> torch.Tensor:
        return copied.setdefault(name, own_copy(lookup(name))) if name not in copied else copied[name]

    for name, module in live.scan.extra_state:
        module.set_extra_state(decode_tree(section(tree, "model", "extra_state")[name], own))
    if live.scan.stateful is not None:
        live.scan.stateful.load_state_dict(decode_tree(model["object"], own))


def _decode_groups(
    tree: Mapping[str, JsonValue], ref: OptimizerRef, lookup: TensorLookup
) -> list[dict[str, object]]:
    groups = cast("list[dict[str, JsonValue]]", section(tree, "optimizers", ref.name)["groups"])
    decoded: list[dict[str, object]] = []
    for group in groups:
        values = decode_tree(group.get("values"), lambda name: own_copy(lookup(name)))
        if not isinstance(values, dict):
            raise FormatError(f"optimizer {ref.name!r}: a saved parameter group is no object")
        decoded.append(values)
    return decoded


def _set_groups(ref: OptimizerRef, groups: Sequence[Mapping[str, object]]) -> None:
    """Set groups by value. Keys only the live group has stay: a newer torch may need them."""
    used: set[int] = set()
    for live, saved in zip(ref.optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            current = live.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                same = current.shape == value.shape and current.dtype == value.dtype
                if same and current.data_ptr() not in used:
                    # In place: a compiled step or a captured graph holds on to the live tensor.
                    copy_exact(current, value)
                    used.add(current.data_ptr())
                    continue
                value = value.to(current.device)
            live[key] = value.clone() if isinstance(value, torch.Tensor) else value


class _StatePlacer:
    """Puts one optimizer's saved state in place, reusing live state tensors of the same shape."""

    def __init__(self, live: LiveState, ref: OptimizerRef, lookup: TensorLookup) -> None:
        self._ref = ref
        self._lookup = lookup
        self._parameters = {p.name: p.tensor for p in live.parameters}
        self._placed: dict[str, torch.Tensor] = {}
        self._used = {p.tensor.data_ptr() for p in live.parameters}

    def load(self, tree: Mapping[str, JsonValue]) -> None:
        """Replace ``optimizer.state``; parameters without saved state get none."""
        optimizer, node = self._ref.optimizer, section(tree, "optimizers", self._ref.name)
        if self._ref.custom:
            optimizer.load_state_dict(cast("dict[str, object]", decode_tree(node["custom"], self._own)))
            return
        pairs = dict(cast("list[tuple[str, JsonValue]]", node["state"]))
        live = optimizer.state
        for key in [key for key in live if not isinstance(key, torch.Tensor)]:
            del live[key]
        for group, names in zip(optimizer.param_groups, self._ref.parameters, strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                if name not in pairs:
                    live.pop(parameter, None)
                    continue
                state = self._decode(name, pairs[name], live.get(parameter, {}), parameter, group)
                target = live.get(parameter, {})
                target.clear()
                target.update(state)
                live[parameter] = target
        other = cast("dict[torch.Tensor, object]", decode_tree(node.get("other", {}), self._own))
        live.update(other)

    def _decode(
        self,
        name: str,
        node: JsonValue,
        old: Mapping[object, object],
        parameter: torch.Tensor,
        group: Mapping[str, object],
    ) -> dict[object, object]:
        prefix = state_prefix(self._ref.name, name)
        existing = {
            f"{prefix}/{escape_segment(key)}": value
            for key, value in old.items()
            if isinstance(value, torch.Tensor)
        }
        # torch keeps the step counter on the CPU unless the kernel reads it on the device.
        on_cpu = f"{prefix}/step" if not (group.get("capturable") or group.get("fused")) else ""

        def place(tensor_name: str) -> torch.Tensor:
            device = torch.device("cpu") if tensor_name == on_cpu else parameter.device
            return self._place(tensor_name, existing.get(tensor_name), device)

        return cast("dict[object, object]", decode_tree(node, place))

    def _place(self, name: str, existing: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        if name in self._parameters:
            return self._parameters[name]
        if name in self._placed:
            return self._placed[name]
        source = self._lookup(name)
        reusable = (
            existing is not None
            and existing.shape == source.shape
            and existing.dtype == source.dtype
            and existing.device == device
            and not overlaps_itself(existing)
            and (existing.numel() == 0 or existing.data_ptr() not in self._used)
        )
        if reusable and existing is not None:
            copy_exact(existing, source)
            placed = existing
        else:
            placed = own_copy(source, device)
        self._used.add(placed.data_ptr())
        self._placed[name] = placed
        return placed

    def _own(self, name: str) -> torch.Tensor:
        return self._place(name, None, torch.device("cpu"))
