"""Which updates one gradient each can describe, and which optimizers write into their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import TypeVar, cast

import torch
from torch.optim import Optimizer

from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import dtype_name
from stepwell.pipeline.layout import TensorSpec

__all__ = [
    "Arguments",
    "closure_of",
    "gradients_of",
    "missing_of",
    "why_not_gradients",
    "why_not_replayable",
    "with_closure",
    "writes_gradients",
]

Function = TypeVar("Function", bound=Callable[..., object])

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""What ``step`` was called with: positional arguments from ``self`` on, and keywords."""

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def runs_hooks(optimizer: Optimizer) -> bool:
    """Say whether an optimizer's step calls the hooks registered with it."""
    hooked = getattr(type(optimizer).step, "hooked", False)
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and bool(hooked)


def why_not_replayable(optimizer: Optimizer) -> str | None:
    """Say why an optimizer's updates can never be described by one gradient each, or return None."""
    cls = type(optimizer)
    if not runs_hooks(optimizer):
        return f"the step of {cls.__qualname__} runs no hooks"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS evaluates its closure many times in one step"
    if optimizer.defaults.get("differentiable"):
        return "its step is differentiable"
    if cls.state_dict is not Optimizer.state_dict:
        return f"{cls.__qualname__} has a state_dict of its own, so its state is not all in optimizer.state"
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return "it keeps state that belongs to no parameter"
    return None


def why_not_gradients(
    gradients: Sequence[torch.Tensor | None],
    missing: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> str | None:
    """Say why gradients cannot be captured as they are, or return None.

    Parameters
    ----------
    gradients : sequence of Tensor or None
    missing : sequence of int
        Where they are None.
    dtypes : sequence of dtype
        Of the parameters.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    kinds = set(map(type, present)) - PLAIN_TENSORS
    if kinds:
        return f"its gradients are of the class {', '.join(sorted(kind.__qualname__ for kind in kinds))}"
    if any(gradient.layout is not torch.strided for gradient in present):
        return "a gradient is not strided"
    if missing:
        absent = frozenset(missing)
        dtypes = [dtype for index, dtype in enumerate(dtypes) if index not in absent]
    if [gradient.dtype for gradient in present] != list(dtypes):
        return "a gradient has another dtype than its parameter"
    return None


def writes_gradients(optimizer: Optimizer, device_type: str) -> bool:
    """Say whether a step writes into ``.grad`` even where no GradScaler is at work.

    Measured over all classes of torch.optim and their flags: only SGD with nesterov and foreach,
    which is the default on accelerators. For classes that are not torch's, probation decides.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        group.get("nesterov")
        and (group.get("foreach") or (group.get("foreach") is None and device_type != "cpu"))
        for group in optimizer.param_groups
    )


def closure_of(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Callable[[], object] | None, list[str]]:
    """Find the closure in a step's arguments, and name the arguments that are not known here."""
    unknown = [f"{len(args) - 2} more arguments"] if len(args) > 2 else []
    unknown += [name for name in kwargs if name != "closure"]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None and not callable(closure):
        return None, [*unknown, f"a {type(closure).__qualname__}"]
    return closure, unknown


def with_closure(
    args: tuple[object, ...], kwargs: Mapping[str, object], closure: Callable[[], object]
) -> Arguments:
    """Return a step's arguments with another closure in the old one's place."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": closure}


def hidden_from_compilers(function: Function) -> Function:
    """Return a function that torch.compile runs as it is instead of tracing it."""
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor | None]:
    """Return the gradients of the parameters of all groups, in order."""
    return [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]


def missing_of(gradients: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    """Return the indices of those that are None."""
    if not any(map(is_, gradients, repeat(None))):
        return ()
    return tuple(i for i, gradient in enumerate(gradients) if gradient is None)


def gradient_specs(
    name: str, optimizer: Optimizer, parameter_names: Sequence[Sequence[str]]
) -> tuple[list[TensorSpec], list[list[int]]]:
    """Return the specs of an optimizer's parameters in the groups' order, and their indices by group.

    Parameters
    ----------
    name : str
        Of the optimizer; ``<name>:<group>`` keeps groups apart in chunks.
    optimizer : Optimizer
    parameter_names : sequence of sequences of str
        By group.
    """
    specs: list[TensorSpec] = []
    indices: list[list[int]] = []
    for number, (group, names) in enumerate(zip(optimizer.param_groups, parameter_names, strict=True)):
        first = len(specs)
        for parameter, parameter_name in zip(group["params"], names, strict=True):
            shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
            specs.append(TensorSpec(parameter_name, shape, dtype, Kind.WEIGHT, f"{name}:{number}"))
        indices.append(list(range(first, len(specs))))
    return specs, indices
