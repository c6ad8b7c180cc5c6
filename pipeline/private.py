"""Private optimizers: the same class and the same arithmetic, without anyone's hooks or profiling.

Replay and proof step these. What a class is allowed to be replayed as is said here too: by blocks
(elementwise), tensor by tensor, or only as a whole.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

import torch
from torch.optim import Optimizer

from stepwell.errors import StateMismatchError
from stepwell.pipeline.update import class_name_of

__all__ = [
    "ELEMENTWISE_STATE",
    "SCALAR_STATE",
    "is_elementwise",
    "is_per_tensor",
    "optimizer_class",
    "private_optimizer",
    "raw_step",
    "why_not_repeatable",
    "writes_gradients",
]

ELEMENTWISE_CLASSES = frozenset(
    {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"}
)
"""Classes of torch.optim in which element i of weight and state depends on elements i alone."""

PER_TENSOR_CLASSES = frozenset({"Adafactor", "Muon"})
"""Classes of torch.optim in which a tensor depends on itself alone, but not element by element."""

ELEMENTWISE_STATE = frozenset(
    {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "exp_inf",
        "ax",
        "prev",
        "step_size",
    }
)
"""State entries of the elementwise classes with one element per element of the parameter."""

SCALAR_STATE = frozenset({"step", "eta", "mu", "mu_product"})
"""State entries of the elementwise classes with one value per parameter."""

UNSHARED_ATTRIBUTES = frozenset(
    {"step", "state", "param_groups", "grad_scale", "found_inf", "_zero_grad_profile_name"}
)
"""Instance attributes a private optimizer never takes over: ``step`` is a scheduler's wrapper."""

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@cache
def _torch_classes() -> Mapping[str, type[Optimizer]]:
    """Return the optimizers that torch.optim exports, by record name."""
    found = {}
    for name in dir(torch.optim):
        value = getattr(torch.optim, name)
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            found[class_name_of(value)] = value
    return found


def _is_torch_class(cls: type, names: frozenset[str]) -> bool:
    return cls.__name__ in names and getattr(torch.optim, cls.__name__, None) is cls


def is_elementwise(cls: type[Optimizer]) -> bool:
    """Say whether `cls` may be replayed block by block.

    Only the exact classes of torch.optim; a subclass may do anything.
    """
    return _is_torch_class(cls, ELEMENTWISE_CLASSES)


def is_per_tensor(cls: type[Optimizer]) -> bool:
    """Say whether one tensor may be replayed without the others; true of elementwise classes too."""
    return _is_torch_class(cls, PER_TENSOR_CLASSES) or is_elementwise(cls)


def optimizer_class(class_name: str, live: Optimizer | None = None) -> type[Optimizer]:
    """Return the class a record names, without importing anything by that name.

    Parameters
    ----------
    class_name : str
        ``module:qualname``, read from disk and therefore only compared.
    live : Optimizer, optional
        The optimizer of the running program; its own class is the only one accepted beside
        those that torch.optim exports.

    Raises
    ------
    StateMismatchError
        Neither torch.optim nor the live optimizer has this class.
    """
    if live is not None and class_name_of(type(live)) == class_name:
        return type(live)
    known = _torch_classes().get(class_name)
    if known is not None:
        return known
    have = f"the live optimizer is {class_name_of(type(live))}" if live is not None else "none is live"
    raise StateMismatchError(
        f"updates were recorded with the optimizer class {class_name}, which is not one of torch.optim; "
        f"{have}. Restore with the optimizer that was trained with, or start from a base."
    )


def raw_step(cls: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Return the class's ``step`` below torch's hook-and-profile wrapper; call it under ``no_grad``.

    torch wraps ``step`` once per class, when the first instance is made, and marks the wrapper
    with ``hooked``. Of a user's class only that one layer is taken off: what lies below belongs to
    the optimizer. Below it torch's own classes only switch autograd off, by a wrapper that imports
    ``torch._dynamo`` (seconds, in a process that only looks at a checkpoint).
    """
    step: Callable[[Optimizer], object] = cls.step
    if class_name_of(cls) in _torch_classes() and step.__module__.startswith("torch."):
        return cast(Callable[[Optimizer], object], inspect.unwrap(step))
    if step.__dict__.get("hooked"):
        step = cast(Callable[[Optimizer], object], step.__dict__["__wrapped__"])
    return step


def private_optimizer(
    cls: type[Optimizer],
    groups: list[dict[str, object]],
    state: Mapping[torch.Tensor, dict[str, object]],
    like: Optimizer | None = None,
) -> Optimizer:
    """Make an optimizer of class `cls` over tensors of ours; step it with ``raw_step(cls)``.

    Parameters
    ----------
    cls : type
    groups : list of dict
        Parameter groups, complete, ``"params"`` being tensors. Used, and kept, as they are: what
        a class's ``__setstate__`` would rewrite for old checkpoints is put back.
    state : mapping
        Tensor to its state dictionary; the dictionaries are used, not copied.
    like : Optimizer, optional
        The live optimizer, whose own attributes (never its hooks, groups or state) a class that
        is not torch's may read in ``step``. Containers among them are copied, so stepping the
        private optimizer does not reach the live one.
    """
    optimizer = cls.__new__(cls)
    defaults: dict[str, object] = {}
    if like is not None:
        defaults = dict(like.defaults)
        if class_name_of(cls) not in _torch_classes():
            optimizer.__dict__.update(_own_attributes(like))
    optimizer.__setstate__({"defaults": defaults, "state": defaultdict(dict), "param_groups": []})
    # ``differentiable`` in the defaults would record autograd history of the replay.
    optimizer.defaults["differentiable"] = False
    for name, value in list(optimizer.__dict__.items()):
        if name.startswith("_optimizer_") and isinstance(value, dict) and value:
            optimizer.__dict__[name] = OrderedDict()
    optimizer.param_groups = groups
    optimizer.state = defaultdict(dict, state)
    return optimizer


def _own_attributes(live: Optimizer) -> dict[str, object]:
    """Copy the attributes that a user's class keeps on its instance."""
    own: dict[str, object] = {}
    for name, value in vars(live).items():
        if name in UNSHARED_ATTRIBUTES or name == "defaults" or name.startswith("_optimizer_"):
            continue
        if isinstance(value, IMMUTABLE):
            own[name] = value
        elif isinstance(value, torch.Tensor):
            own[name] = value.detach().clone()
        elif isinstance(value, dict | list | set):
            own[name] = copy.copy(value)
        else:
            own[name] = value
    return own


def writes_gradients(cls: type[Optimizer], group: Mapping[str, object], scaled: bool) -> bool:
    """Say whether an update may write into ``.grad``, so that the gradient must be a copy.

    Measured over all torch.optim classes and flags: only SGD (nesterov, foreach) and fused
    kernels that unscale do. A class that is not torch's may do anything.
    """
    if scaled:
        return True
    if cls is torch.optim.SGD:
        return bool(group.get("nesterov"))
    return not is_elementwise(cls)


def why_not_repeatable(optimizer: Optimizer) -> str | None:
    """Say why the next step of a live optimizer would not give the same bits twice, or return None.

    To be asked before the step, with ``.grad`` and ``found_inf`` as it will find them. Both faults
    are torch's own (2.13, CPU), in fused SGD with momentum: the 16-bit kernel stores momentum that
    depends on what lies behind the tensor (measured: the same call twice, other bits), and a first
    step that GradScaler skips leaves the new momentum uninitialised.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    for group in optimizer.param_groups:
        if not group.get("fused") or not group.get("momentum"):
            continue
        if any(p.element_size() == 2 and p.is_cpu for p in group["params"]):
            return "fused SGD with momentum is not deterministic for 16-bit parameters on the CPU"
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            continue
        if all(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in _stepped(group)):
            return "fused SGD leaves its momentum uninitialised when GradScaler skips the first step"
    return None


def _stepped(group: Mapping[str, object]) -> list[torch.Tensor]:
    params = cast("list[torch.Tensor]", group["params"])
    return [p for p in params if p.grad is not None]
