"""What one call of ``optimizer.step`` did, as values: all that replay needs beside the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from stepwell.errors import FormatError, UnsupportedValueError
from stepwell.pipeline.tree import JsonValue, decode_tree, encode_tree

__all__ = ["GroupEncoder", "UpdateRecord", "class_name_of", "environment_of", "index_runs", "runs_to_indices"]

Scalar = TypeVar("Scalar")

UNSAVED_GROUP_KEYS = ("params", "param_names")
"""Group entries that are not values of the update: the parameters are named by index instead, and
their names (one per parameter, never read by a step) would make every record O(parameters)."""

REUSABLE = (bool, int, float, str, type(None))
"""Immutable types: the same object still has the same value, so its encoding may be reused."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One update, by value.

    Attributes
    ----------
    optimizer : int
        Index of the optimizer in ``LiveState.optimizers``.
    class_name : str
        ``module:qualname`` of the optimizer's class. A name to compare, never one to import.
    groups : tuple of mappings
        Parameter groups as this update used them. ``"params"`` holds the indices of the group's
        tensors in the gradient layout, in the group's order; every other value is encoded by
        ``stepwell.pipeline.tree.encode_tree`` with its tensors inline (a tensor lr is a copy).
        Shared between records while unchanged: never modify.
    missing : tuple of int, sorted
        Tensors of the layout, of this optimizer's groups, whose ``.grad`` was None.
    grad_scale, found_inf : JsonValue
        Encoded tensors that GradScaler sets on optimizers that unscale by themselves, or None.
    environment : mapping
        What else decides the bits of an update: torch version, device type, default dtype, CPU
        capability, flushing of denormals.
    """

    optimizer: int
    class_name: str
    groups: tuple[Mapping[str, JsonValue], ...]
    missing: tuple[int, ...]
    grad_scale: JsonValue
    found_inf: JsonValue
    environment: Mapping[str, JsonValue]

    def group_params(self, group: int) -> tuple[int, ...]:
        """Return the layout's tensor indices of one group, in the group's order."""
        return tuple(cast("list[int]", self.groups[group]["params"]))

    def decoded_groups(self) -> list[dict[str, object]]:
        """Return fresh group dictionaries; ``"params"`` is a list of layout tensor indices.

        Key order is the order the live group had. The caller replaces the indices by tensors.
        """
        decoded: list[dict[str, object]] = []
        for index, group in enumerate(self.groups):
            values: dict[str, object] = {"params": list(self.group_params(index))}
            for key, value in group.items():
                if key != "params":
                    values[key] = decode_tree(value, _no_tensor)
            decoded.append(values)
        return decoded

    def decoded_grad_scale(self) -> torch.Tensor | None:
        """Return the ``grad_scale`` the update saw, on the CPU."""
        return _decoded_scalar(self.grad_scale, "grad_scale")

    def decoded_found_inf(self) -> torch.Tensor | None:
        """Return the ``found_inf`` the update saw, on the CPU."""
        return _decoded_scalar(self.found_inf, "found_inf")

    def to_json(self) -> dict[str, JsonValue]:
        """Return the JSON form; index lists become runs, so that it stays small."""
        groups: list[JsonValue] = []
        for index, group in enumerate(self.groups):
            entries: list[JsonValue] = [[key, value] for key, value in group.items() if key != "params"]
            groups.append({"params": _json_runs(self.group_params(index)), "values": entries})
        return {
            "optimizer": self.optimizer,
            "class": self.class_name,
            "groups": groups,
            "missing": _json_runs(self.missing),
            "grad_scale": self.grad_scale,
            "found_inf": self.found_inf,
            "environment": dict(self.environment),
        }

    @classmethod
    def from_json(cls, document: object) -> UpdateRecord:
        """Read the JSON form back.

        Raises
        ------
        FormatError
            The document is not a record.
        """
        try:
            if not isinstance(document, dict):
                raise TypeError(f"a {type(document).__name__}")
            groups: list[Mapping[str, JsonValue]] = []
            for group in document["groups"]:
                values: dict[str, JsonValue] = {"params": list(runs_to_indices(group["params"]))}
                for key, value in group["values"]:
                    values[str(key)] = value
                groups.append(values)
            return cls(
                optimizer=_exactly(document["optimizer"], int),
                class_name=_exactly(document["class"], str),
                groups=tuple(groups),
                missing=runs_to_indices(document["missing"]),
                grad_scale=document["grad_scale"],
                found_inf=document["found_inf"],
                environment=dict(document["environment"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"update record: not a record ({type(error).__name__}: {error})") from error


class GroupEncoder:
    """Encodes an optimizer's groups for each update, reusing what did not change.

    Parameters
    ----------
    name : str
        The optimizer's name, for error messages.
    params : sequence of sequences of int
        Layout tensor indices per group.
    """

    def __init__(self, name: str, params: Sequence[Sequence[int]]) -> None:
        self._name = name
        self._params: list[list[JsonValue]] = [list(indices) for indices in params]
        self._seen: list[dict[str, object]] = [{} for _ in params]
        self._encoded: list[dict[str, JsonValue]] = [{"params": indices} for indices in self._params]
        self._all = tuple(self._encoded)

    def encode(self, groups: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, JsonValue], ...]:
        """Encode `groups` as they are now; equal to the last ones, the same object is returned.

        Raises
        ------
        UnsupportedValueError
            A value of a group cannot be saved.
        """
        changed = False
        for index, group in enumerate(groups):
            encoded = self._encode_group(index, group)
            if encoded is not self._encoded[index]:
                self._encoded[index] = encoded
                changed = True
        if changed:
            self._all = tuple(self._encoded)
        return self._all

    def _encode_group(self, index: int, group: Mapping[str, object]) -> dict[str, JsonValue]:
        seen, before = self._seen[index], self._encoded[index]
        values: dict[str, JsonValue] = {"params": self._params[index]}
        for key, value in group.items():
            if key in UNSAVED_GROUP_KEYS:
                continue
            if type(value) in REUSABLE and key in before and seen.get(key, self) is value:
                values[key] = before[key]
                continue
            if not isinstance(key, str):
                raise UnsupportedValueError(
                    f"{self._name}: group {index} has the key {key!r}; only text can be saved as a key"
                )
            values[key] = encode_tree(value, None, f"{self._name}/groups/{index}/{key}")
            seen[key] = value if type(value) in REUSABLE else self
        # Equality alone would take True for 1 and 0.0 for -0.0; the text of both cannot.
        if list(values) == list(before) and all(_same(values[key], before[key]) for key in values):
            return before
        return values


def class_name_of(optimizer_class: type) -> str:
    """Return the ``module:qualname`` that records carry."""
    return f"{optimizer_class.__module__}:{optimizer_class.__qualname__}"


def environment_of(device_type: str) -> dict[str, JsonValue]:
    """Return what decides, beside the values, how an update on `device_type` rounds."""
    # Whether denormals are flushed cannot be asked for, only observed: 2**-1074 times 1 is 0 then.
    flushed = bool((torch.full((1,), 5e-324, dtype=torch.float64) * 1.0 == 0.0).item())
    return {
        "torch": str(torch.__version__),
        "device": device_type,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "flush_denormal": flushed,
    }


def index_runs(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Write a sequence of indices as half-open runs ``(start, stop)``, keeping its order."""
    runs: list[tuple[int, int]] = []
    start = stop = -1
    for index in indices:
        if index == stop and start >= 0:
            stop += 1
            continue
        if start >= 0:
            runs.append((start, stop))
        start, stop = index, index + 1
    if start >= 0:
        runs.append((start, stop))
    return runs


MAX_INDICES = 1 << 24
"""More tensors than any model has: a damaged record must not make us build a huge list."""


def runs_to_indices(runs: object) -> tuple[int, ...]:
    """Read the runs of `index_runs` back.

    Raises
    ------
    ValueError, TypeError
        Not a list of runs, or more indices than any model has.
    """
    if not isinstance(runs, Sequence) or isinstance(runs, str | bytes):
        raise TypeError("index runs are a list")
    indices: list[int] = []
    for run in runs:
        start, stop = run
        start, stop = _exactly(start, int), _exactly(stop, int)
        if not 0 <= start < stop or len(indices) + stop - start > MAX_INDICES:
            raise ValueError(f"index run {start}:{stop}")
        indices.extend(range(start, stop))
    return tuple(indices)


def _same(value: JsonValue, before: JsonValue) -> bool:
    return value is before or repr(value) == repr(before)


def _json_runs(indices: Iterable[int]) -> JsonValue:
    return [[start, stop] for start, stop in index_runs(indices)]


def _exactly(value: object, kind: type[Scalar]) -> Scalar:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} belongs")
    return value


def _decoded_scalar(value: JsonValue, what: str) -> torch.Tensor | None:
    if value is None:
        return None
    decoded = decode_tree(value, _no_tensor)
    if not isinstance(decoded, torch.Tensor):
        raise FormatError(f"update record: {what} is a {type(decoded).__name__}, not a tensor")
    return decoded


def _no_tensor(path: str) -> torch.Tensor:
    raise FormatError(f"update record: refers to the tensor {path}, but carries its tensors inline")
