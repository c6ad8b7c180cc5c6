"""The typer application: which commands there are, and how errors become exit codes.

Exit codes: 0 all is well; 1 damage was found, or the demo was not bit-equal; 2 wrong usage or
configuration, or a place that cannot be read; 3 nothing there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import wraps
from typing import Annotated, ParamSpec

import typer

from stepwell import errors

__all__ = ["Exit", "exit_code", "run"]

Options = ParamSpec("Options")

EXIT_CODES_HELP = (
    "Exit codes: 0 all is well; 1 damage was found, or the demo was not bit-equal; "
    "2 wrong usage or configuration, or a place that cannot be read; 3 nothing there."
)


class Exit(IntEnum):
    """What the command line tells its caller."""

    OK = 0
    DAMAGED = 1
    USAGE = 2
    NOTHING = 3


def exit_code(error: errors.StepwellError) -> Exit:
    """Return the exit code that stands for an error."""
    if isinstance(error, errors.NotCommittedError | errors.MissingObjectError):
        return Exit.NOTHING
    if isinstance(error, errors.IntegrityError):
        return Exit.DAMAGED
    return Exit.USAGE


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"stepwell {version('stepwell')}")
        raise typer.Exit


def build() -> typer.Typer:
    """Return the application; the modules of the commands are loaded here, their work is not."""
    from stepwell.cli import clean, demo, drain, keeper, ls, show, verify

    app = typer.Typer(
        name="stepwell",
        help="Checkpoints of every training step, bit for bit: look at them and check them.",
        epilog=EXIT_CODES_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Take the options that stand before the command."""

    commands: dict[str, Callable[..., int]] = {
        "demo": demo.demo,
        "ls": ls.ls,
        "show": show.show,
        "verify": verify.verify,
        "keeper": keeper.keeper,
        "clean": clean.clean,
        "drain": drain.drain_run,
    }
    for name, command in commands.items():
        app.command(name, epilog=EXIT_CODES_HELP)(_leaving(command))
    return app


def _leaving(command: Callable[Options, int]) -> Callable[Options, None]:
    """Make a command leave with the exit code it returns."""

    @wraps(command)
    def leave(*args: Options.args, **kwargs: Options.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("stepwell: interrupted", err=True)
            code = 130  # what a shell reports for SIGINT
        raise typer.Exit(code)

    return leave


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    With ``--json`` an error, too, is one JSON object on standard output.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build()(arguments, prog_name="stepwell")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except errors.StepwellError as error:
        if "--json" in arguments:
            typer.echo(json.dumps({"error": str(error), "kind": type(error).__name__}))
        typer.echo(f"stepwell: {error}", err=True)
        return exit_code(error)
    return Exit.OK
