"""Checks a saved state against the live one and loads it in place, RNG last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from stepwell.errors import FormatError, StateMismatchError
from stepwell.pipeline.bits import copy_exact, dtype_name, overlaps_itself, own_copy
from stepwell.pipeline.collected import TREE_FORMAT, section, state_prefix
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.live_extra import decode_extra, extra_kind, load_extra
from stepwell.pipeline.live_scan import OptimizerRef
from stepwell.pipeline.random_state import restore_random
from stepwell.pipeline.tree import JsonValue, TensorLookup, decode_tree, escape_segment
from stepwell.pipeline.update import class_name_of

if TYPE_CHECKING:
    from stepwell.pipeline.live import LiveState

__all__ = ["check_state", "load_state"]

_LISTED_MAX = 20
"""Names listed per kind of mismatch: a wrong model has thousands."""


def check_state(live: LiveState, tree: Mapping[str, JsonValue], specs: Sequence[TensorSpec]) -> None:
    """Compare a whole saved state with the live one, changing nothing.

    Raises
    ------
    StateMismatchError
        Lists missing and unexpected tensors, shapes, dtypes, ties, optimizers, groups, extra.
    FormatError
        The tree is of a newer format, or that of a differential.
    """
    if tree.get("format") != TREE_FORMAT:
        raise FormatError(
            f"the saved tree has format {tree.get('format')!r}, this stepwell reads {TREE_FORMAT}"
        )
    saved = {spec.name: spec for spec in specs}
    faults = [*_model_faults(live, tree, saved), *_optimizer_faults(live, tree), *_extra_faults(live, tree)]
    if faults:
        raise StateMismatchError("the checkpoint does not fit the live state:\n" + "\n".join(faults))


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


def _aliases(tree: Mapping[str, JsonValue]) -> dict[str, str]:
    """Saved name of every tied name."""
    return cast("dict[str, str]", section(tree, "model", "aliases"))


def _absent(tree: Mapping[str, JsonValue]) -> frozenset[str]:
    names = section(tree, "model").get("absent")
    if not isinstance(names, list):
        raise FormatError("the saved tree has no list of absent buffers")
    return frozenset(cast("list[str]", names))


def _model_faults(
    live: LiveState, tree: Mapping[str, JsonValue], saved: Mapping[str, TensorSpec]
) -> Iterator[str]:
    aliases, absent = _aliases(tree), _absent(tree)
    tensors: dict[str, torch.Tensor | None] = {ref.name: ref.tensor for ref in live.parameters}
    parameter_names = frozenset(tensors)
    tensors.update((ref.name, ref.owner.get(ref.key)) for ref in live.scan.buffers)
    present = set(saved) | set(aliases) | absent
    yield from _listed("missing in the checkpoint", set(tensors) - present)
    opaque = live.scan.stateful is not None
    if not opaque:
        # Names below an optimizer's own section or extra are no part of the model.
        model = {name for name, spec in saved.items() if _is_model(name, spec)} | set(aliases) | absent
        yield from _listed("not in the live model", model - set(tensors) - set(live.scan.aliases))
    if opaque != ("object" in section(tree, "model")):
        yield "  one model is an nn.Module, the other only an object with state_dict()"
    shapes, dtypes = [], []
    for name, tensor in tensors.items():
        spec = saved.get(aliases.get(name, name))
        if tensor is None or spec is None:
            continue
        if tuple(tensor.shape) != spec.shape:
            shapes.append(f"{name} (saved {list(spec.shape)}, live {list(tensor.shape)})")
        elif dtype_name(tensor.dtype) != spec.dtype:
            dtypes.append(f"{name} (saved {spec.dtype}, live {dtype_name(tensor.dtype)})")
    yield from _listed("other shape", shapes)
    yield from _listed("other dtype", dtypes)
    untied = [a for a, first in live.scan.aliases.items() if aliases.get(a, a) != aliases.get(first, first)]
    yield from _listed("tied in the live model, separate in the checkpoint", untied)
    yield from _listed("tied in the checkpoint, separate in the live model", parameter_names & set(aliases))
    modules, saved_modules = (
        {name for name, _ in live.scan.extra_state},
        set(section(tree, "model", "extra_state")),
    )
    yield from _listed("module without its saved extra state", modules - saved_modules)
    yield from _listed("extra state of a module that is not there", saved_modules - modules)


def _is_model(name: str, spec: TensorSpec) -> bool:
    return name.startswith("model/") and "/extra_state" not in name


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    ordered = sorted(names)
    if ordered:
        more = len(ordered) - _LISTED_MAX
        yield f"  {what}: " + ", ".join(ordered[:_LISTED_MAX]) + (f", and {more} more" if more > 0 else "")


def _optimizer_faults(live: LiveState, tree: Mapping[str, JsonValue]) -> Iterator[str]:
    saved = section(tree, "optimizers")
    names = {ref.name for ref in live.optimizers}
    yield from _listed("optimizer missing in the checkpoint", names - set(saved))
    yield from _listed("optimizer only in the checkpoint", set(saved) - names)
    for ref in live.optimizers:
        if ref.name not in saved:
            continue
        node = section(tree, "optimizers", ref.name)
        if node.get("class") != class_name_of(type(ref.optimizer)):
            yield f"  {ref.name}: saved from {node.get('class')}, live {class_name_of(type(ref.optimizer))}"
        if ref.custom != ("custom" in node):
            yield f"  {ref.name}: only one of the saved and the live one has a state_dict of its own"
        groups = node.get("groups")
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            raise FormatError(f"optimizer {ref.name!r}: no parameter groups; a differential's tree?")
        if len(groups) != len(ref.parameters):
            yield f"  {ref.name}: {len(groups)} parameter groups saved, {len(ref.parameters)} live"
            continue
        for g, (group, parameters) in enumerate(zip(groups, ref.parameters, strict=True)):
            theirs = cast("list[str]", cast("dict[str, JsonValue]", group)["params"])
            yield from _listed(f"{ref.name} group {g} lacks", set(theirs) - set(parameters))
            yield from _listed(f"{ref.name} group {g} had not", set(parameters) - set(theirs))
            if set(theirs) == set(parameters) and list(theirs) != list(parameters):
                yield f"  {ref.name} group {g}: the parameters are in another order"


def _extra_faults(live: LiveState, tree: Mapping[str, JsonValue]) -> Iterator[str]:
    saved = section(tree, "extra")
    yield from _listed("extra missing in the checkpoint", set(live.extra) - set(saved))
    yield from _listed("extra only in the checkpoint", set(saved) - set(live.extra))
    for name in set(live.extra) & set(saved):
        node = saved[name]
        kind = node.get("kind") if isinstance(node, dict) else None
        if kind != extra_kind(live.extra[name]):
            yield f"  extra {name}: saved as {kind}, the live one is {type(live.extra[name]).__qualname__}"
    if live.rng and "rng" not in tree:
        yield "  the checkpoint has no RNG state; open with rng=False to go on without"


def _model_targets(live: LiveState, tree: Mapping[str, JsonValue]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Name, live tensor and saved name of everything that is loaded in place."""
    aliases, absent = _aliases(tree), _absent(tree)
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
    aliases, absent = _aliases(tree), _absent(tree)
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
