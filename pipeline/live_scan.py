"""Finds what a live model and its optimizers hold, and names it once.

Names follow ``torch.distributed.checkpoint.state_dict.get_state_dict``: fully qualified, without the
prefixes that wrappers (DDP, torch.compile, activation checkpointing, FSDP) add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import nn

from stepwell.errors import UnsupportedValueError, UsageError
from stepwell.pipeline.tree import TreeEncoder, escape_segment

__all__ = [
    "BufferRef",
    "ModelScan",
    "OptimizerRef",
    "ParameterRef",
    "Stateful",
    "scan_model",
    "scan_optimizers",
]

_TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back."""

    def state_dict(self) -> object:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: object) -> object:
        """Take a state back."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ParameterRef:
    """One parameter, tied ones once.

    Attributes
    ----------
    name : str
        ``model/<fqn>``, or ``<optimizer>/param/<group>.<index>`` where the model does not have it.
    tensor : Tensor
    optimizer : int
        Index of the (first) optimizer that steps it; -1 for none.
    group, index : int
        Parameter group, and place in it; -1 for none.
    """

    name: str
    tensor: torch.Tensor
    optimizer: int = -1
    group: int = -1
    index: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerRef:
    """One optimizer.

    Attributes
    ----------
    name : str
        ``optim``, ``optim.0`` or ``optim.<name>``.
    optimizer : Optimizer
    parameters : tuple of tuple of str
        Parameter names per group, in the order of the group.
    custom : bool
        Its class has a ``state_dict`` of its own, so its state is what that says.
    """

    name: str
    optimizer: torch.optim.Optimizer
    parameters: tuple[tuple[str, ...], ...]
    custom: bool


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A persistent buffer by where it hangs, since assignment replaces the tensor."""

    name: str
    owner: MutableMapping[str, torch.Tensor | None]
    key: str


Owner: TypeAlias = tuple[MutableMapping[str, "torch.Tensor | None"], str, torch.Tensor]
"""The dict a parameter hangs in, its key there, and the parameter."""


@dataclass(slots=True)
class ModelScan:
    """What hangs in a model.

    ``aliases`` maps the other names of tied parameters and shared modules to the one that is saved.
    ``skeleton`` counts members per module: a cheap sign that something was registered since.
    """

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    owners: list[tuple[MutableMapping[str, torch.Tensor | None], str, torch.Tensor]] = field(
        default_factory=list
    )
    buffers: list[BufferRef] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: list[tuple[str, nn.Module]] = field(default_factory=list)
    skeleton: list[tuple[nn.Module, int, int, int]] = field(default_factory=list)
    stateful: Stateful | None = None

    def unchanged(self) -> bool:
        """True while every parameter is the same object in the same place and nothing was registered."""
        return all(owner.get(key) is tensor for owner, key, tensor in self.owners) and all(
            (len(module._parameters), len(module._buffers), len(module._modules)) == (p, b, m)
            for module, p, b, m in self.skeleton
        )


def scan_model(model: object) -> ModelScan:
    """Walk a model once.

    Parameters
    ----------
    model : nn.Module, mapping of nn.Module, object with state_dict and load_state_dict, or None

    Raises
    ------
    UsageError
        It is none of these.
    UnsupportedValueError
        Two different parameters get the same name once wrappers are stripped.
    """
    scan = ModelScan()
    if isinstance(model, torch.jit.ScriptModule):
        _scan_stateful(scan, cast(Stateful, model))
    elif isinstance(model, nn.Module):
        _Walk(scan).module(model, (), ())
    elif isinstance(model, Mapping) and all(isinstance(part, nn.Module) for part in model.values()):
        walk = _Walk(scan)
        for key, part in model.items():
            walk.module(part, (str(key),), ())
    elif isinstance(model, Stateful) and not isinstance(model, type):
        _scan_stateful(scan, model)
    elif model is not None:
        raise UsageError(
            f"model is a {type(model).__qualname__}; give an nn.Module, a mapping of names to modules, "
            "or an object with state_dict() and load_state_dict()"
        )
    return scan


class _Walk:
    """One pass over modules; remembers the first name of everything."""

    def __init__(self, scan: ModelScan) -> None:
        self._scan = scan
        self._visited: set[int] = set()
        self._first: dict[int, str] = {}
        self._first_buffer: dict[tuple[int, str], str] = {}
        self._names: dict[str, int] = {}

    def module(self, module: nn.Module, prefix: tuple[str, ...], above: tuple[int, ...]) -> None:
        if id(module) in above:
            return  # a module that contains itself
        scan = self._scan
        if id(module) not in self._visited:
            self._visited.add(id(module))
            counts = (len(module._parameters), len(module._buffers), len(module._modules))
            scan.skeleton.append((module, *counts))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                scan.extra_state.append((".".join(prefix), module))
        self._parameters(module, prefix)
        self._buffers(module, prefix)
        for key, child in module._modules.items():
            if child is not None:
                inner = prefix if _is_transparent(module, key) else (*prefix, key)
                self.module(child, inner, (*above, id(module)))

    def _parameters(self, module: nn.Module, prefix: tuple[str, ...]) -> None:
        scan = self._scan
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = _name(prefix, key)
            first = self._first.setdefault(id(parameter), name)
            self._claim(name, id(parameter))
            if first == name:
                scan.parameters[name] = parameter
            else:
                scan.aliases[name] = first
            owner = cast("MutableMapping[str, torch.Tensor | None]", module._parameters)
            scan.owners.append((owner, key, parameter))

    def _buffers(self, module: nn.Module, prefix: tuple[str, ...]) -> None:
        for key in module._buffers:
            if key in module._non_persistent_buffers_set:
                continue
            name = _name(prefix, key)
            self._claim(name, id(module._buffers))
            first = self._first_buffer.setdefault((id(module), key), name)
            if first != name:
                self._scan.aliases[name] = first
            else:
                self._scan.buffers.append(BufferRef(name, module._buffers, key))

    def _claim(self, name: str, owner: int) -> None:
        if self._names.setdefault(name, owner) != owner:
            raise UnsupportedValueError(
                f"{name}: two members of the model have this name without their wrappers"
            )


def _is_transparent(module: nn.Module, key: str) -> bool:
    """True for the child that a wrapper stands for."""
    return key in _TRANSPARENT or (key == "module" and isinstance(module, _WRAPPERS))


def _name(prefix: tuple[str, ...], key: str) -> str:
    return "model/" + escape_segment(".".join((*prefix, key)))


def _scan_stateful(scan: ModelScan, model: Stateful) -> None:
    """Name the tensors of an opaque model by their place in its state_dict."""
    scan.stateful = model
    tensors: list[tuple[str, torch.Tensor]] = []
    TreeEncoder(tensors).encode(model.state_dict(), "model")
    scan.parameters.update(tensors)


def normalize_optimizers(optimizers: object) -> list[tuple[str, torch.optim.Optimizer]]:
    """Name the optimizers: one is ``optim``, a list ``optim.0``..., a mapping ``optim.<key>``.

    Raises
    ------
    UsageError
        Something in it has no ``param_groups`` and ``state``.
    """
    named: list[tuple[str, object]]
    if optimizers is None:
        named = []
    elif isinstance(optimizers, Mapping):
        named = [(f"optim.{escape_segment(str(key))}", value) for key, value in optimizers.items()]
    elif isinstance(optimizers, Sequence):
        named = [(f"optim.{i}", value) for i, value in enumerate(optimizers)]
    else:
        named = [("optim", optimizers)]
    found: list[tuple[str, torch.optim.Optimizer]] = []
    for name, optimizer in named:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            raise UsageError(f"{name} is a {type(optimizer).__qualname__}, not an optimizer")
        found.append((name, cast(torch.optim.Optimizer, optimizer)))
    return found


def scan_optimizers(
    named: Sequence[tuple[str, torch.optim.Optimizer]], scan: ModelScan
) -> tuple[list[ParameterRef], list[OptimizerRef]]:
    """Name every parameter, the model's first, and say who steps it."""
    by_id = {id(tensor): name for name, tensor in scan.parameters.items()}
    # The state_dict of an opaque model hands out other tensor objects than the optimizer has; their
    # elements tell.
    by_elements = TreeEncoder([] if scan.stateful is None else list(scan.parameters.items()))
    stepped: dict[str, ParameterRef] = {}
    references: list[OptimizerRef] = []
    for which, (name, optimizer) in enumerate(named):
        groups: list[tuple[str, ...]] = []
        for g, group in enumerate(optimizer.param_groups):
            names: list[str] = []
            for i, tensor in enumerate(group["params"]):
                found = by_id.get(id(tensor)) or by_elements.find(tensor)
                parameter = by_id[id(tensor)] = found or f"{name}/param/{g}.{i}"
                stepped.setdefault(parameter, ParameterRef(parameter, tensor, which, g, i))
                names.append(parameter)
            groups.append(tuple(names))
        custom = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
        references.append(OptimizerRef(name, optimizer, tuple(groups), custom))
    return list(_ordered(scan, stepped)), references


def _ordered(scan: ModelScan, stepped: dict[str, ParameterRef]) -> Iterator[ParameterRef]:
    """Parameters in the model's order, then those only the optimizers have."""
    for name, tensor in scan.parameters.items():
        if name in stepped:
            yield stepped.pop(name)
        elif scan.stateful is None:
            yield ParameterRef(name, tensor)
    yield from stepped.values()


def overlapping(parameters: Sequence[ParameterRef]) -> tuple[str, ...]:
    """Names of parameters whose memory overlaps that of another one, or that overlap themselves."""
    spans: list[tuple[int, int, str]] = []
    for ref in parameters:
        tensor = ref.tensor
        if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            continue
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        spans.append((start, start + (int(extent) + 1) * tensor.element_size(), ref.name))
    spans.sort()
    found: set[str] = set()
    reach, holder = -1, ""
    for start, stop, name in spans:
        if start < reach:
            found |= {name, holder}
        if stop > reach:
            reach, holder = stop, name
    return tuple(sorted(found))
