"""Compares a saved state with the live one, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from stepwell.errors import FormatError, StateMismatchError
from stepwell.pipeline.bits import dtype_name, torch_dtype
from stepwell.pipeline.collected import TREE_FORMAT, optimizer_states, section
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.live_extra import extra_kind
from stepwell.pipeline.tree import JsonValue, decode_tree
from stepwell.pipeline.update import class_name_of

if TYPE_CHECKING:
    from stepwell.pipeline.live import LiveState

__all__ = ["check_state", "saved_absent", "saved_aliases"]

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
    _check_readable(live, tree, saved)
    faults = [*_model_faults(live, tree, saved), *_optimizer_faults(live, tree), *_extra_faults(live, tree)]
    if faults:
        raise StateMismatchError("the checkpoint does not fit the live state:\n" + "\n".join(faults))


def _check_readable(live: LiveState, tree: Mapping[str, JsonValue], saved: Mapping[str, TensorSpec]) -> None:
    """Decode all that loading will decode, over stand-ins, so that no damage is found half-way."""

    made: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def stand_in(name: str) -> torch.Tensor:
        spec = saved.get(name)
        if spec is None:
            raise FormatError(f"the saved tree refers to the tensor {name!r}, which was not saved")
        key = (spec.dtype, spec.shape)
        if key not in made:
            made[key] = torch.zeros((), dtype=torch_dtype(spec.dtype)).expand(spec.shape)
        return made[key]

    for name in section(tree, "optimizers"):
        node = section(tree, "optimizers", name)
        optimizer_states(tree, name, stand_in)
        decode_tree(node.get("other"), stand_in)
        decode_tree(node.get("custom"), stand_in)
    for node in (section(tree, "model", "extra_state"), section(tree, "extra")):
        for entry in node.values():
            decode_tree(entry, stand_in)
    decode_tree(section(tree, "model").get("object"), stand_in)
    if live.rng:
        decode_tree(tree.get("rng"), stand_in)
    absent_names = [first for first in saved_aliases(tree).values() if first not in saved]
    if absent_names:
        raise FormatError(f"tied names refer to {absent_names[0]!r}, which was not saved")


def saved_aliases(tree: Mapping[str, JsonValue]) -> dict[str, str]:
    """Return the saved name of every tied name."""
    return cast("dict[str, str]", section(tree, "model", "aliases"))


def saved_absent(tree: Mapping[str, JsonValue]) -> frozenset[str]:
    """Return the names of buffers that were None."""
    names = section(tree, "model").get("absent")
    if not isinstance(names, list):
        raise FormatError("the saved tree has no list of absent buffers")
    return frozenset(cast("list[str]", names))


def _model_faults(
    live: LiveState, tree: Mapping[str, JsonValue], saved: Mapping[str, TensorSpec]
) -> Iterator[str]:
    aliases, absent = saved_aliases(tree), saved_absent(tree)
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
