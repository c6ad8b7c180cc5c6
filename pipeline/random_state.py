"""The random generators of the process, and single generators, as plain values."""

from __future__ import annotations

import random
from typing import TypeAlias, cast

import numpy as np
import torch

from stepwell.errors import StateMismatchError

__all__ = ["GENERATORS", "collect_random", "generator_state", "restore_generator", "restore_random"]

PythonState: TypeAlias = tuple[int, tuple[int, ...], float | None]

GENERATORS: tuple[type, ...] = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Generators that may be given as ``extra`` although they have no state_dict."""


def collect_random() -> dict[str, object]:
    """State of the global generators of torch, CUDA (where it is in use), numpy and Python."""
    state: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": _python_state(random.getstate()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()  # not tested: needs an accelerator
    return state


def restore_random(state: object) -> None:
    """Set the global generators.

    Generators of CUDA devices are set as far as both sides have them.

    Raises
    ------
    StateMismatchError
        The value is not such a state, or numpy's global generator is of another kind.
    """
    try:
        parts = cast("dict[str, object]", state)
        torch_state = cast(torch.Tensor, parts["torch"]).cpu().clone()
        python_state = _to_python(cast("dict[str, object]", parts["python"]))
        np.random.set_state(cast("dict[str, object]", parts["numpy"]))
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if "cuda" in parts and torch.cuda.is_available():  # not tested: needs an accelerator
            saved = cast("list[torch.Tensor]", parts["cuda"])
            for device in range(min(len(saved), torch.cuda.device_count())):
                torch.cuda.set_rng_state(saved[device].cpu().clone(), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateMismatchError(f"rng: the saved state does not fit: {error}") from error


def generator_state(generator: object) -> object:
    """State of one generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _python_state(cast(random.Random, generator).getstate())


def restore_generator(generator: object, state: object) -> None:
    """Set one generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(cast(torch.Tensor, state).cpu().clone())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = cast("dict[str, object]", state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(cast("dict[str, object]", state))
    else:
        cast(random.Random, generator).setstate(_to_python(cast("dict[str, object]", state)))


def _python_state(state: tuple[object, ...]) -> dict[str, object]:
    """The 625 integers as one array: as a tuple they are 6 KB of JSON in every save."""
    version, words, gauss = cast(PythonState, state)
    return {"gauss": gauss, "version": version, "words": np.array(words, dtype=np.uint32)}


def _to_python(state: dict[str, object]) -> PythonState:
    words = cast("np.ndarray[tuple[int], np.dtype[np.uint32]]", state["words"])
    return cast(int, state["version"]), tuple(words.tolist()), cast("float | None", state["gauss"])
