"""The command line: ``stepwell demo | ls | show | verify``, one file per command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line (the console script ``stepwell``); never returns normally."""
    # typer, rich and the commands are loaded only here, so that importing the package is free.
    from stepwell.cli.app import run

    raise SystemExit(run())
