"""What each tensor of a lossy pipeline is kept as, and why: TierCheck's adaptive choice, made explicit.

By kind, size and name: small tensors, norms, biases and embeddings as 8-bit values, large weights as
what exceeds a threshold, second moments in a logarithmic domain, everything that is no float32 or
bfloat16 of the model or its optimizer exactly. Rules by name pattern come before all of it, except that
second moments are never quantized linearly and that norms and biases are never sparse by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from stepwell.pipeline.base import Kind
from stepwell.pipeline.layout import Layout, TensorSpec

__all__ = ["EXACT", "SMALL_ELEMENTS", "Choice", "Choices", "Policy", "Rule"]

SMALL_ELEMENTS = 65_536
"""TierCheck's border between small and large tensors (field.md 5.3)."""

EXACT = "exact"
SPARSE = "sparse"
LINEAR = frozenset({"int8", "int4"})
OF_VALUES = frozenset({"log_quant", "log_quant4", "codebook"})
"""Kept as values, not as differences: their error is that of one call anyhow."""

LOSSY_DTYPES = frozenset({"float32", "bfloat16"})
EMBEDDINGS = ("*emb*", "*wte*", "*wpe*")
NORMS = ("*norm*", "*.bias", "bias", "*ln_*", "*.bn*")

# The most careful first: of several tensors in one chunk the most careful choice counts.
_CARE = (EXACT, "log_quant", "int8", "log_quant4", "codebook", "int4", SPARSE)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a tensor is kept as.

    Attributes
    ----------
    treatment : str
        ``exact``, ``int8``, ``int4``, ``log_quant``, ``log_quant4``, ``codebook`` or ``sparse``.
    reason : str
        For people.
    """

    treatment: str
    reason: str

    @property
    def told(self) -> bool:
        """Whether a captured state is told as a difference under this choice."""
        return self.treatment not in OF_VALUES

    def __str__(self) -> str:
        return f"{self.treatment}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Treatments of the parameters whose name fits a pattern, by kind; a kind left out falls through."""

    pattern: str
    treatments: Mapping[Kind, str]


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the stages ``quantize`` and ``sparsify``.

    Attributes
    ----------
    treatments : mapping of Kind to str
        What each kind is kept as where nothing else decides; exactly, where it is not named.
    sparse : frozenset of Kind
        Kinds whose large tensors are sparsified.
    small_elements : int
        Tensors with fewer elements are small; 0: none is.
    difference : bool
        Captured states are told as differences; without it no weight may lose anything.
    rules : tuple of Rule
        The first that fits decides.
    """

    treatments: Mapping[Kind, str] = field(default_factory=dict)
    sparse: frozenset[Kind] = frozenset()
    small_elements: int = SMALL_ELEMENTS
    difference: bool = False
    rules: tuple[Rule, ...] = ()


class Choices:
    """Decides for every tensor, and says so; decisions depend on names, kinds, dtypes and sizes alone."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def label(self, spec: TensorSpec) -> str:
        """Return what to add to the group of a parameter, so that a chunk holds only one class.

        It has no colon: groups are called ``<optimizer>:<number>``. Empty where classes do not matter.
        """
        label = f"+{self._class(spec)}" if self.policy.sparse else ""
        number = self._rule(parameter_of(spec.name))
        return label if number is None else f"{label}+rule{number}"

    def of_chunk(self, layout: Layout, part: int) -> Choice:
        """Decide for one chunk: the most careful of the choices of its tensors."""
        chunk = layout.chunks[part]
        found = {self.of(layout.tensors[piece.tensor], chunk.kind) for piece in chunk.pieces}
        if not found:
            return Choice(EXACT, "nothing is in it")
        return min(found, key=lambda choice: (_CARE.index(choice.treatment), choice.reason))

    def of(self, spec: TensorSpec, kind: Kind) -> Choice:
        """Decide for one tensor."""
        if kind is Kind.AUX or not spec.group:
            return Choice(EXACT, "it is no tensor that an optimizer steps")
        if spec.dtype not in LOSSY_DTYPES:
            return Choice(EXACT, f"{spec.dtype} is never quantized")
        choice = self._wanted(spec, kind)
        treatment = choice.treatment
        if spec.dtype != "float32" and treatment == "codebook":
            return Choice(EXACT, f"{choice.reason}; codebook takes float32 only")
        if spec.dtype != "float32" and treatment == SPARSE and kind is Kind.GRADIENT:
            return Choice(EXACT, f"{choice.reason}; only float32 is made sparse")
        if kind is Kind.MOMENT2 and treatment not in (EXACT, "log_quant", "log_quant4"):
            return Choice(EXACT, f"{choice.reason}; but {treatment} would ruin a second moment")
        if kind is not Kind.GRADIENT and treatment != EXACT and not self.policy.difference:
            return Choice(EXACT, f"{choice.reason}; but states are captured whole, without a closed loop")
        return choice

    def _wanted(self, spec: TensorSpec, kind: Kind) -> Choice:
        policy = self.policy
        number = self._rule(parameter_of(spec.name))
        if number is not None:
            rule = policy.rules[number]
            treatment = rule.treatments.get(kind)
            if treatment is not None:
                return Choice(treatment, f"rule {rule.pattern!r}")
        of_kind = policy.treatments.get(kind, EXACT)
        what = _KIND_NAMES[kind]
        name = self._class(spec)
        if kind not in policy.sparse:
            return Choice(of_kind, what)
        if name == "large":
            return Choice(SPARSE, f"large {what}")
        return Choice(of_kind, f"{what} of {_CLASS_NAMES[name].format(policy.small_elements)}")

    def _class(self, spec: TensorSpec) -> str:
        name = parameter_of(spec.name)
        if len(spec.shape) < 2 or any(fnmatchcase(name, pattern) for pattern in NORMS):
            return "norm"
        if any(fnmatchcase(name, pattern) for pattern in EMBEDDINGS):
            return "embedding"
        return "small" if spec.element_count < self.policy.small_elements else "large"

    def _rule(self, name: str) -> int | None:
        for number, rule in enumerate(self.policy.rules):
            if fnmatchcase(name, rule.pattern):
                return number
        return None


_KIND_NAMES = {
    Kind.GRADIENT: "gradient",
    Kind.WEIGHT: "weight",
    Kind.MOMENT1: "momentum",
    Kind.MOMENT2: "variance",
    Kind.AUX: "aux",
}

_CLASS_NAMES = {
    "norm": "a norm or bias, which is never sparse",
    "embedding": "an embedding",
    "small": "a small tensor (fewer than {} elements)",
}


def parameter_of(name: str) -> str:
    """Return the parameter's own name of a gradient, weight or optimizer state, as rules know it."""
    _, state, rest = name.partition("/state/")
    if state:
        name = rest.rpartition("/")[0]
    return name.removeprefix("model/")
