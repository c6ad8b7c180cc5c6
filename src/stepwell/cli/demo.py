"""``stepwell demo``: a training run that is killed with SIGKILL and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepwell.cli.output import JsonOption, bytes_text, console, print_json, table

if TYPE_CHECKING:
    from stepwell.demo.report import Report

__all__ = ["Screen", "demo"]


def demo(
    steps: Annotated[int, typer.Option(help="Steps to train.", min=1)] = 40,
    kills: Annotated[int, typer.Option(help="How often to kill the run.", min=0)] = 2,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory for the checkpoints, kept afterwards; must be empty."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Kill a small GPT with SIGKILL while it learns English, and compare it with one that lived.

    It takes about a minute. Exit code 1 if the two do not end equal to the last bit.
    """
    from stepwell.demo.supervisor import Plan, run_demo

    watcher = Screen(quiet=as_json)
    try:
        report = run_demo(Plan(steps, kills, directory), watcher)
    finally:
        watcher.close()
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    return 0 if report.bit_equal else 1


class Screen:
    """Progress on standard error: bars on a terminal, lines elsewhere, nothing where `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = console(stderr=True)
        self._quiet = quiet
        self._bars = not quiet and self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self._console,
            disable=not self._bars,
        )
        self._progress.start()

    def phase(self, title: str, steps: int) -> None:
        """Begin a bar."""
        self._task = self._progress.add_task(title, total=steps, loss="")
        if not self._quiet and not self._bars:
            self._console.print(f"{title}: {steps} steps")

    def step(self, step: int, loss: float) -> None:
        """Move the bar; it goes back when a run does."""
        self._progress.update(self._task, completed=step + 1, loss=f"loss {loss:.3f}")

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        if not self._quiet:
            self._progress.console.print(text, markup=False)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


def _print(report: Report) -> None:
    """Tell a person what the demo found; the last line is the verdict."""
    facts = report.as_json()
    blocked = f"{facts['blocked_ms_p50']:.2f} ms (p99 {facts['blocked_ms_p99']:.2f} ms)"
    rows: list[tuple[str, object]] = [
        ("model", f"{report.params:,} parameters, {report.steps} steps, a checkpoint at every one"),
        ("step, without checkpoints", f"{facts['plain_step_ms_p50']:.1f} ms"),
        ("step, with checkpoints", f"{facts['step_ms_p50']:.1f} ms, of which blocked {blocked}"),
        ("bytes per parameter and step", f"{facts['bytes_per_param_step']:.2f}"),
        ("bytes per parameter, whole state", f"{facts['state_bytes_per_param']:.2f}"),
    ]
    for restore in report.restores:
        after = " and loss of the memory tier" if restore.memory_wiped else ""
        exact = "bit for bit" if restore.exact else "not exact"
        rows.append(
            (
                f"SIGKILL in step {restore.killed_in}{after}",
                f"step {restore.step} back from {restore.tier} in {restore.seconds:.2f} s, {exact}",
            )
        )
    sizes = report.sizes
    assert sizes is not None
    rows.append(("newest base", f"step {sizes.base_step}, {bytes_text(sizes.base_bytes)}"))
    table("what happened", ("", ""), rows)
    typer.echo("\nthe checkpoints, with any zarr:")
    look = f"g = zarr.open_group('{sizes.group}', mode='r'); print(g['model/norm.weight'][:8])"
    typer.echo(f'  python -c "import zarr; {look}"')
    typer.echo(f"  stepwell ls {report.directory}")
    for name in [*report.different, *(report.group_different or [])]:
        typer.echo(f"differs: {name}")
    typer.echo(f"bit-equal: {'yes' if report.bit_equal else 'no'}")
