"""The tap of one optimizer: its hooks, and what decides how each of its gradients is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, cast

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stepwell.errors import UnsupportedValueError
from stepwell.pipeline.plan import gradient_layout
from stepwell.pipeline.private import why_not_repeatable
from stepwell.pipeline.probation import Probation
from stepwell.pipeline.replayable import (
    Arguments,
    closure_of,
    gradient_specs,
    gradients_of,
    hidden_from_compilers,
    missing_of,
    parameters_of,
    runs_hooks,
    why_not_gradients,
    why_not_replayable,
    with_closure,
    writes_gradients,
)
from stepwell.pipeline.slots import CopyPlan, Slot
from stepwell.pipeline.state_watch import StateWatch
from stepwell.pipeline.tapped import HeldCopy, TappedUpdate, fence_of, finished
from stepwell.pipeline.tree import JsonValue, encode_tree
from stepwell.pipeline.update import GroupEncoder, UpdateRecord, class_name_of, environment_of
from stepwell.pipeline.watch import GradientWatch, ParameterWatch, all_none, unused_gradient, versions_of

if TYPE_CHECKING:
    from collections import OrderedDict

    from stepwell.pipeline.gradients import GradientTap

__all__ = ["OptimizerTap"]

BY_REFERENCE_DEVICES = frozenset({"cpu", "cuda"})
"""Where a copy in the background is known to be ordered behind the writes before it."""


class OptimizerTap:
    """Hooks of one optimizer.

    Parameters
    ----------
    owner : GradientTap
    index : int
        Of the optimizer among all.
    name : str
    optimizer : Optimizer
    parameter_names : sequence of sequences of str
        By group, in the groups' order.
    chunk_bytes : int

    Attributes
    ----------
    names : tuple of str
    parameters : list of Tensor
        Of all groups in order; index i is tensor i of the gradient layout.
    plan : CopyPlan
    offset_bytes : int
        Where this optimizer's gradients begin in a slot; set by the owner.
    probation : Probation
    """

    def __init__(
        self,
        owner: GradientTap,
        index: int,
        name: str,
        optimizer: Optimizer,
        parameter_names: Sequence[Sequence[str]],
        chunk_bytes: int,
    ) -> None:
        self.owner, self.index, self.name, self.optimizer = owner, index, name, optimizer
        self.names = tuple(name for group in parameter_names for name in group)
        self.parameters = parameters_of(optimizer)
        self.offset_bytes = 0
        self._handles: list[RemovableHandle] = []
        self._begin = hidden_from_compilers(self._begin_update)
        self._end = hidden_from_compilers(self._end_update)
        self._depth = 0
        self._captured = False
        self._latest: Sequence[torch.Tensor | None] = ()
        self._latest_versions: list[int] | None = None
        self.probation = Probation(self.names)
        self._environment: dict[str, JsonValue] | None = None
        self._device_type = self.parameters[0].device.type if self.parameters else "cpu"
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        specs, indices = gradient_specs(name, optimizer, parameter_names)
        if owner.label is not None:
            specs = [replace(spec, group=spec.group + owner.label(spec)) for spec in specs]
        self.plan = CopyPlan(gradient_layout(specs, chunk_bytes=chunk_bytes))
        self._all_parts = tuple(range(len(self.plan.layout.chunks)))
        self._encoder = GroupEncoder(name, indices)
        self._watch = ParameterWatch(self.names, self.parameters)
        self._state = StateWatch(optimizer, self.parameters)
        self._gradients = GradientWatch()
        self._remember()
        reason = why_not_replayable(optimizer)
        if reason is not None:
            owner.give_up(f"{name}: {reason}")
        if self._device_type not in BY_REFERENCE_DEVICES:
            self.probation.always_eager(f"parameters are on {self._device_type}")

    # Hooks.

    def install(self) -> None:
        """Register the hooks, if there is anything that would call them."""
        if runs_hooks(self.optimizer):
            self._handles = [
                self.optimizer.register_step_pre_hook(self._before_update),
                self.optimizer.register_step_post_hook(self._after_update),
            ]

    def remove(self) -> None:
        """Remove the hooks and let go of all tensors."""
        self.remove_hooks()
        self._latest = ()
        self.probation.forget()
        self._gradients.forget()

    def remove_hooks(self) -> None:
        """Remove the hooks and touch nothing else."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take_places(self) -> None:
        """Put our pre-hook last (others may change gradients) and our post-hook first (or parameters)."""
        if not self._handles:
            return
        before, after = self._handles
        pre_hooks = cast("OrderedDict[int, object]", self.optimizer._optimizer_step_pre_hooks)
        post_hooks = cast("OrderedDict[int, object]", self.optimizer._optimizer_step_post_hooks)
        pre_hooks.move_to_end(before.id)
        post_hooks.move_to_end(after.id, last=False)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Arguments | None:
        # Read here, where a compiler tracing the step sees it; `_begin` itself is hidden from compilers.
        compiling = torch.compiler.is_compiling()
        return self._begin(args, kwargs, compiling)

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._end()

    def _begin_update(
        self, args: tuple[object, ...], kwargs: dict[str, object], compiling: bool
    ) -> Arguments | None:
        self.owner.updates_begun += 1
        self._depth += 1
        if self._depth > 1:
            # A subclass whose step calls its parent's step: the outer call is the update.
            return None
        self._captured = False
        if compiling:
            self.owner.give_up(f"{self.name}: its step is compiled, which rounds unlike the eager step")
        if not self.owner.capturing:
            return None
        closure, unknown = closure_of(args, kwargs)
        if unknown:
            self.owner.give_up(f"{self.name}: its step takes {', '.join(unknown)}, which no record can hold")
            return None
        if closure is None:
            self._capture_safely()
            return None
        return with_closure(args, kwargs, partial(self._run_closure, closure))

    def _run_closure(self, closure: Callable[[], object]) -> object:
        """Run the user's closure, which computes the gradients, and capture them at its end."""
        result = closure()
        if self._depth > 0 and self.owner.capturing:
            if self._captured:
                self.owner.give_up(f"{self.name}: its step calls the closure more than once")
                # What was captured is not what the update used: else the real gradients look unused.
                self._captured, self._latest = False, ()
            else:
                self._capture_safely()
        return result

    def _end_update(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        try:
            with self.owner.blocked():
                self._finish_update()
        except Exception as error:
            self.owner.give_up(f"{self.name}: after an update: {type(error).__name__}: {error}")

    def _finish_update(self) -> None:
        latest, self._latest = self._latest, ()
        versions, self._latest_versions = self._latest_versions, None
        if not self._captured:
            latest = gradients_of(self.optimizer)
            if self.owner.capturing:
                self.owner.break_interval(f"{self.name}: an update did not show its gradients")
        self.owner.updated(self)
        self._gradients.remember(latest, versions)
        self._remember()

    # Guards.

    def unwritten(self) -> Callable[[], bool]:
        """Return a test, for any thread, whether no parameter was written since the last look."""
        return self._watch.mark()

    def rebase(self) -> None:
        """Take the state of now as described elsewhere."""
        self._depth = 0
        if self.owner.opaque is not None:
            return
        reason = why_not_replayable(self.optimizer)
        if reason is not None:
            self.owner.give_up(f"{self.name}: {reason}")
        elif not self._has_its_parameters():
            self.owner.break_interval(f"{self.name}: its parameter groups changed")
        self._remember()

    def check_unchanged(self, when: str, *, depth: int = 0) -> bool:
        """Break the interval if anything but an update changed parameters or state.

        Parameters
        ----------
        when : str
            For the reason.
        depth : int
            Calls of ``step`` that are known to be under way.
        """
        reason = self._outside_change(depth)
        if reason is not None:
            self.owner.break_interval(f"{self.name}: {reason} ({when})")
        return reason is None

    def _outside_change(self, depth: int) -> str | None:
        if self._depth > depth:
            return "an update was begun and did not end"
        changed = self._watch.changed()
        if changed:
            more = f" and {len(changed) - 1} more parameters" if len(changed) > 1 else ""
            return f"{self.names[changed[0]]}{more} changed without an update"
        return self._state.changed()

    def _has_its_parameters(self) -> bool:
        """Say whether the optimizer has the very parameters the run was opened with."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if sum(map(len, groups)) != len(self.parameters):
            return False
        return all(map(is_, chain.from_iterable(groups), self.parameters))

    def _remember(self) -> None:
        self._watch.remember()
        if self.owner.opaque is None:
            self._state.remember()

    def accumulated(self) -> str | None:
        """Name a parameter with gradients that no update has used yet, or return None.

        Where an update went by without hooks (its parameters changed), nothing can be said.
        """
        if not self._handles:
            return None
        gradients = gradients_of(self.optimizer)
        if all_none(gradients) or self._gradients.same(gradients) or self._watch.changed():
            return None
        unused = unused_gradient(gradients)
        if unused is None:
            return None
        return self.names[unused] if unused < len(self.names) else f"parameter {unused}"

    # Capturing.

    def _capture_safely(self) -> None:
        """Capture; whatever goes wrong costs this run its gradients, never the update."""
        try:
            with self.owner.blocked(), torch.no_grad():
                self._capture()
        except Exception as error:
            self.owner.give_up(f"{self.name}: capturing a gradient failed: {type(error).__name__}: {error}")

    def _capture(self) -> None:
        self.owner.notice_torn()
        if not self.owner.capturing:
            return
        if not self._has_its_parameters():
            self.owner.break_interval(f"{self.name}: its parameter groups changed")
            return
        if not self.check_unchanged("before an update", depth=self._depth):
            return
        gradients = [parameter.grad for parameter in self.parameters]
        missing = missing_of(gradients)
        reason = self._refusal()
        if reason is not None:
            self.owner.give_up(f"{self.name}: {reason}")
            return
        scale, found_inf = (getattr(self.optimizer, key, None) for key in ("grad_scale", "found_inf"))
        groups = self._encoder.encode(self.optimizer.param_groups)
        self.probation.notice_flags(groups)
        if self._gradients.kept(gradients):
            self.probation.always_eager("gradients are kept between updates")
        self.probation.judge()
        record = UpdateRecord(
            optimizer=self.index,
            class_name=class_name_of(type(self.optimizer)),
            groups=groups,
            missing=missing,
            grad_scale=self._inline(scale, "grad_scale"),
            found_inf=self._inline(found_inf, "found_inf"),
            environment=self._environment_now(),
        )
        scaled = scale is not None or found_inf is not None
        must_copy = scaled or writes_gradients(self.optimizer, self._device_type)
        hold = self.probation.passed and not must_copy
        # Those that are held are looked at where they are copied; not here, one by one.
        reason = None if hold else why_not_gradients(gradients, missing, self._dtypes)
        if reason is not None:
            self.owner.give_up(f"{self.name}: {reason}")
            return
        slot = self.owner.claim(self)
        if slot is not None:
            self._store(slot, record, gradients, hold=hold, watch=not must_copy)
            self._latest = gradients
            self._captured = True

    def _store(
        self,
        slot: Slot,
        record: UpdateRecord,
        gradients: list[torch.Tensor | None],
        *,
        hold: bool,
        watch: bool,
    ) -> None:
        """Bring the gradients into the slot, now or in the background."""
        memory = slot.memory(self.plan, self.offset_bytes)
        parts = self._parts(record.missing)
        if hold:
            self._hold(TappedUpdate(record, memory, parts, finished(), by_reference=True), slot, gradients)
            return
        memory.copy_from(gradients, record.missing)
        self.owner.captured(TappedUpdate(record, memory, parts, finished(), by_reference=False))
        if watch:
            self.probation.watch(gradients)

    def _hold(self, update: TappedUpdate, slot: Slot, gradients: list[torch.Tensor | None]) -> None:
        """Leave the copy to the background."""
        slot.retain()
        self._latest_versions = versions_of(gradients)
        copy = HeldCopy(
            update,
            slot,
            gradients,
            self._latest_versions,
            self._dtypes,
            self.names,
            self.owner.tear,
            fence_of(self._device_type),
        )
        try:
            update.ready = self.owner.copier.submit(copy)
        except BaseException:
            slot.release()
            raise
        self.owner.captured(update)

    def _refusal(self) -> str | None:
        if self._device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "its step is captured into a CUDA graph"  # not tested: needs an accelerator
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            return "its step is differentiable"
        return why_not_repeatable(self.optimizer)

    def _parts(self, missing: tuple[int, ...]) -> tuple[int, ...]:
        """Chunks with at least one gradient."""
        if not missing:
            return self._all_parts
        absent, chunks = frozenset(missing), self.plan.layout.chunks
        return tuple(
            part
            for part in self._all_parts
            if any(piece.tensor not in absent for piece in chunks[part].pieces)
        )

    def _inline(self, value: object, what: str) -> JsonValue:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise UnsupportedValueError(f"{self.name}: {what} is a {type(value).__name__}, not a tensor")
        return encode_tree(value.detach().cpu(), None, f"{self.name}/{what}")

    def _environment_now(self) -> dict[str, JsonValue]:
        default = str(torch.get_default_dtype()).removeprefix("torch.")
        if self._environment is None or self._environment["default_dtype"] != default:
            self._environment = environment_of(self._device_type)
        return self._environment
