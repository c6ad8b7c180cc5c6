"""Real text that every machine has: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["VOCABULARY", "Text", "library_files", "library_text"]

VOCABULARY = 256
_HELD_OUT = 10  # every tenth file is for validation


@dataclass(frozen=True, slots=True)
class Text:
    """What is trained on, and what is kept for validation.

    Attributes
    ----------
    train, held_out : Tensor, (n,), uint8
        Whole files one after the other; none is in both.
    """

    train: torch.Tensor
    held_out: torch.Tensor

    def batch(self, size: int, time: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, targets), each (size, time), int64; the same for the same seed."""
        return _windows(self.train, size, time, seed)

    def validation(self, size: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, targets) of text that is never trained on, always the same."""
        return _windows(self.held_out, size, time, 0)


def library_files() -> list[Path]:
    """Return the modules at the top of the standard library, sorted by name.

    Raises
    ------
    FileNotFoundError
        This Python came without its sources.
    """
    where = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(where.glob("*.py"))
    if len(files) < _HELD_OUT:
        raise FileNotFoundError(f"{where} has no sources to train on")
    return files


def library_text() -> Text:
    """Read the standard library's sources, every tenth file apart.

    Raises
    ------
    FileNotFoundError
        This Python came without its sources.
    """
    files = library_files()
    train: list[bytes] = []
    held_out: list[bytes] = []
    for number, file in enumerate(files, 1):
        (train if number % _HELD_OUT else held_out).append(file.read_bytes())
    return Text(_bytes(train), _bytes(held_out))


def _bytes(parts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _windows(text: torch.Tensor, size: int, time: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - time, (size, 1), generator=generator)
    tokens = text[starts + torch.arange(time + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]
