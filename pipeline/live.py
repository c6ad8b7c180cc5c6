"""The live state of a training run: what there is, by name, and how to take it apart.

Everything here runs on the trainer's thread. ``collect`` (bases, state capture) is O(tensors);
``collect_aux`` (every save) is O(buffers + extra) and reuses what it made before while the buffers are
the same objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch

from stepwell.errors import UsageError
from stepwell.pipeline.base import Kind
from stepwell.pipeline.bits import dtype_name
from stepwell.pipeline.collected import TREE_FORMAT, Collected, Gatherer, spec_of
from stepwell.pipeline.layout import TensorSpec
from stepwell.pipeline.live_check import check_state
from stepwell.pipeline.live_extra import encode_extra, validate_extra
from stepwell.pipeline.live_load import load_state
from stepwell.pipeline.live_optimizer import OptimizerMemo, encode_groups
from stepwell.pipeline.live_scan import (
    ModelScan,
    OptimizerRef,
    ParameterRef,
    normalize_optimizers,
    overlapping,
    scan_model,
    scan_optimizers,
)
from stepwell.pipeline.random_state import collect_random
from stepwell.pipeline.tree import JsonValue, TensorLookup
from stepwell.pipeline.update import class_name_of

__all__ = ["LiveState", "OptimizerRef", "ParameterRef"]


class LiveState:
    """Model, optimizers, extra and RNG of the running process.

    Parameters
    ----------
    model : nn.Module, mapping of modules, object with state_dict/load_state_dict, or None
    optimizers : Optimizer, sequence or mapping of them, or None
        Named ``optim``, ``optim.0``..., ``optim.<key>``.
    extra : mapping, optional
        Name to an object with ``state_dict`` and ``load_state_dict``, a random generator (torch, numpy,
        Python), or a plain value. The mapping is kept and read at each save. On loading, tensors,
        dicts, lists, sets and deques are updated in place; values that cannot be are put into the
        mapping if it is mutable, and returned.
    rng : bool
        Include the global generators of torch, CUDA, numpy and Python.
    label : callable, optional
        What to add to the group of a parameter: those of other labels never share a chunk with it.

    Attributes
    ----------
    parameters : list of ParameterRef
        Every parameter once, in the model's order.
    optimizers : list of OptimizerRef
    version : int
        Counts rescans: names or objects may differ from those of an earlier version.

    Raises
    ------
    UsageError
        An argument is none of the above.
    UnsupportedValueError
        A parameter cannot be saved bit for bit.
    """

    def __init__(
        self,
        model: object = None,
        optimizers: object = None,
        extra: Mapping[str, object] | None = None,
        *,
        rng: bool = True,
        label: Callable[[TensorSpec], str] | None = None,
    ) -> None:
        self._model = model
        self.label = label
        self._named_optimizers = normalize_optimizers(optimizers)
        self.extra: Mapping[str, object] = {} if extra is None else extra
        self.rng = rng
        self.version = 0
        self.parameters: list[ParameterRef] = []
        self.optimizers: list[OptimizerRef] = []
        self.parameter_specs: tuple[TensorSpec, ...] = ()
        self.shared_memory: tuple[str, ...] = ()
        self.scan = ModelScan()
        validate_extra(self.extra)
        self.rescan()

    def rescan(self) -> None:
        """Walk model and optimizers anew."""
        self.scan = scan_model(self._model)
        self.parameters, self.optimizers = scan_optimizers(self._named_optimizers, self.scan)
        self.parameter_specs = tuple(self._spec(ref) for ref in self.parameters)
        self._grouped = [
            [list(group["params"]) for group in ref.optimizer.param_groups] for ref in self.optimizers
        ]
        self._memos = {ref.name: OptimizerMemo(ref) for ref in self.optimizers}
        self._named_parameters = [(ref.name, ref.tensor) for ref in self.parameters]
        self._parameter_dtypes = [ref.tensor.dtype for ref in self.parameters]
        self.shared_memory = overlapping(self.parameters)
        self._buffer_tensors: list[torch.Tensor | None] = []
        self._buffer_specs: list[TensorSpec | None] = []
        self.version += 1

    def refresh(self) -> bool:
        """Rescan if parameters were replaced, registered or regrouped; say whether that was so."""
        if self.structure_changed() is None and self.scan.unchanged():
            return False
        self.rescan()
        return True

    @property
    def trained_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the parameters that an optimizer steps: what ``plan.gradient_layout`` takes."""
        refs = zip(self.parameters, self.parameter_specs, strict=True)
        return tuple(spec for ref, spec in refs if ref.optimizer >= 0)

    def structure_changed(self) -> str | None:
        """Say what changed in the optimizers' groups since the last scan; None if nothing did.

        One identity test per parameter, cheap enough for each save. After a change: ``rescan``, and a base.
        """
        for ref, known in zip(self.optimizers, self._grouped, strict=True):
            groups = ref.optimizer.param_groups
            if len(groups) != len(known):
                return f"{ref.name} has {len(groups)} parameter groups, it had {len(known)}"
            for g, (group, before) in enumerate(zip(groups, known, strict=True)):
                params = group["params"]
                if len(params) != len(before) or not all(map(operator.is_, params, before)):
                    return f"{ref.name}: the parameters of group {g} changed"
        return None

    def obstacles(self) -> list[str]:
        """Why the updates of this state cannot be replayed from gradients alone; empty if they can.

        What only shows while training (closures, hooks, compiled steps) is for the capture to find.
        """
        reasons: list[str] = []
        if self.shared_memory:
            reasons.append(f"parameters share memory: {', '.join(self.shared_memory[:5])}")
        owner: dict[str, str] = {}
        for ref in self.optimizers:
            if ref.custom:
                reasons.append(f"{ref.name} has a state_dict of its own")
            elif any(not isinstance(key, torch.Tensor) for key in ref.optimizer.state):
                reasons.append(f"{ref.name} keeps state that belongs to no parameter")
            for name in (name for names in ref.parameters for name in names):
                if owner.setdefault(name, ref.name) != ref.name:
                    reasons.append(f"{name} is stepped by {owner[name]} and {ref.name}")
        return reasons

    def collect(self) -> Collected:
        """Take the whole state apart.

        Returns
        -------
        Collected
            Tensors are live references: copy them before training goes on. Parameters first, in the
            order of ``parameters``; then optimizer states; then the rest.

        Raises
        ------
        UnsupportedValueError
            Something cannot be saved bit for bit; named, before anything is written.
        """
        self.refresh()
        self._check_shapes()
        gatherer = Gatherer()
        gatherer.add_all(self.parameter_specs, self._named_parameters)
        optimizers: dict[str, JsonValue] = {}
        for optimizer in self.optimizers:
            memo = self._memos[optimizer.name]
            optimizers[optimizer.name] = memo.encode(gatherer, self.parameter_specs)
        return self._finish(gatherer, optimizers, whole=True)

    def collect_aux(self, *, frozen: bool = False) -> Collected:
        """Take apart what updates do not account for: buffers, parameter groups, extra, RNG.

        Parameters
        ----------
        frozen : bool
            Include the parameters that no optimizer steps.

        Returns
        -------
        Collected
            Tensors are live references (those of the RNG fresh ones), as in ``collect``.
        """
        gatherer = Gatherer()
        if frozen:
            refs = zip(self.parameters, self.parameter_specs, strict=True)
            fixed = [(spec, ref.tensor) for ref, spec in refs if ref.optimizer < 0]
            gatherer.extend([spec for spec, _ in fixed], [(spec.name, tensor) for spec, tensor in fixed])
        optimizers: dict[str, JsonValue] = {
            ref.name: {
                "class": class_name_of(type(ref.optimizer)),
                "groups": [{"values": value} for value in encode_groups(gatherer, ref)],
            }
            for ref in self.optimizers
        }
        return self._finish(gatherer, optimizers, whole=False)

    def check(self, collected: Collected) -> None:
        """Compare a whole saved state with this one; see ``live_check.check_state``."""
        check_state(self, collected.tree, collected.specs)

    def load(self, collected: Collected) -> dict[str, object]:
        """Load a whole state in place, after checking all of it; see ``live_load.load_state``."""
        return load_state(self, collected.tree, collected.specs, collected.lookup)

    def load_by(
        self, tree: dict[str, JsonValue], specs: tuple[TensorSpec, ...], lookup: TensorLookup
    ) -> dict[str, object]:
        """Like ``load``, with tensors fetched one by one."""
        return load_state(self, tree, specs, lookup)

    def _spec(self, ref: ParameterRef) -> TensorSpec:
        group = "" if ref.optimizer < 0 else f"{self.optimizers[ref.optimizer].name}:{ref.group}"
        spec = spec_of(ref.name, ref.tensor, Kind.WEIGHT, group)
        if self.label is None or not group:
            return spec
        return replace(spec, group=group + self.label(spec))

    def _check_shapes(self) -> None:
        """Assigning to ``.data`` may have changed a parameter's shape or dtype under its name."""
        kept = all(
            ref.tensor.shape == spec.shape and ref.tensor.dtype is dtype
            for ref, spec, dtype in zip(
                self.parameters, self.parameter_specs, self._parameter_dtypes, strict=True
            )
        )
        if not kept:
            self.rescan()

    def _finish(self, gatherer: Gatherer, optimizers: dict[str, JsonValue], *, whole: bool) -> Collected:
        model = self._encode_model(gatherer, whole)
        extra = {
            name: encode_extra(gatherer.encoder, name, value) for name, value in self._checked_extra().items()
        }
        tree: dict[str, JsonValue] = {
            "format": TREE_FORMAT,
            "model": model,
            "optimizers": optimizers,
            "extra": extra,
        }
        if self.rng:
            tree["rng"] = gatherer.encoder.encode(collect_random(), "rng")
        return gatherer.finish(tree)

    def _checked_extra(self) -> Mapping[str, object]:
        for name in self.extra:
            if type(name) is not str:
                raise UsageError(f"extra has the key {name!r}; names are strings")
        return self.extra

    def _encode_model(self, gatherer: Gatherer, whole: bool) -> dict[str, JsonValue]:
        aliases, absent = dict(self.scan.aliases), []
        tensors = [ref.owner.get(ref.key) for ref in self.scan.buffers]
        if not self._same_buffers(tensors):
            self._buffer_tensors = tensors
            self._buffer_specs = [
                None if tensor is None else spec_of(ref.name, tensor, Kind.AUX)
                for ref, tensor in zip(self.scan.buffers, tensors, strict=True)
            ]
        first: dict[int, str] = {}
        specs: list[TensorSpec] = []
        taken: list[tuple[str, torch.Tensor]] = []
        for ref, tensor, spec in zip(self.scan.buffers, tensors, self._buffer_specs, strict=True):
            if tensor is None or spec is None:
                absent.append(ref.name)
            elif first.setdefault(id(tensor), ref.name) != ref.name:
                aliases[ref.name] = first[id(tensor)]
            else:
                specs.append(spec)
                taken.append((ref.name, tensor))
        if whole:
            gatherer.add_all(specs, taken)
        else:
            gatherer.extend(specs, taken)
        model: dict[str, JsonValue] = {"aliases": cast(JsonValue, aliases), "absent": cast(JsonValue, absent)}
        encoder = gatherer.encoder
        model["extra_state"] = {
            name: encoder.encode(module.get_extra_state(), f"model/{name}/extra_state")
            for name, module in self.scan.extra_state
        }
        if self.scan.stateful is not None:
            for parameter in self.parameters:
                encoder.remember(parameter.name, parameter.tensor)
            model["object"] = encoder.encode(self.scan.stateful.state_dict(), "model")
        return model

    def _same_buffers(self, tensors: list[torch.Tensor | None]) -> bool:
        """True while each buffer is the object it was, with the shape and dtype it had."""
        before = self._buffer_tensors
        if len(tensors) != len(before) or not all(map(operator.is_, tensors, before)):
            return False
        return all(
            tensor is None
            or (spec is not None and tensor.shape == spec.shape and dtype_name(tensor.dtype) == spec.dtype)
            for tensor, spec in zip(tensors, self._buffer_specs, strict=True)
        )
