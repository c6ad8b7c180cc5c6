"""What all commands share in how they speak: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = ["JsonOption", "Meter", "bytes_text", "console", "print_json", "ranges_text", "table"]

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

QUIET_S = 1.0  # nothing that is over within a second is worth a progress bar
PIPE_COLUMNS = 200  # a file or pipe has no width; rich would cut at 80


def console(*, stderr: bool = False) -> Console:
    """Return a console that does not cut lines short where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False)


def print_json(document: object) -> None:
    """Print one JSON object on a line of its own."""
    typer.echo(json.dumps(document, ensure_ascii=False))


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a heading that ends in a blank sets its column to the right, as numbers are."""
    made = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        show_header=any(headings),
    )
    for heading in headings:
        right = heading.endswith(" ")
        made.add_column(heading.strip(), justify="right" if right else "left", overflow="fold")
    for row in rows:
        # Text, not str: names of tensors may hold brackets, which rich would take for markup.
        made.add_row(*(Text(str(cell)) for cell in row))
    console().print(made)


def bytes_text(size_bytes: float) -> str:
    """Return a size as a person reads it: ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def ranges_text(steps: Sequence[int]) -> str:
    """Return sorted steps as ranges: ``0-3, 7, 9-12``."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) or "none"


class Meter:
    """A progress bar on standard error that appears only when the work lasts.

    Parameters
    ----------
    label : str
    quiet : bool
        Never show anything (``--json``); without a terminal nothing is shown either.
    """

    def __init__(self, label: str, *, quiet: bool) -> None:
        self._label = label
        self._quiet = quiet or not sys.stderr.isatty()
        self._since_s = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int | None) -> None:
        """Say how far the work is."""
        if self._quiet or time.monotonic() - self._since_s < QUIET_S:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._label, total=total)
        assert self._task is not None
        self._progress.update(self._task, completed=done, total=total)
