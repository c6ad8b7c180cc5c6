"""``stepwell keeper``: hold what other nodes of a run send, in memory that outlives this process."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepwell.cli.output import JsonOption, bytes_text, print_json, table
from stepwell.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from stepwell.errors import StepwellError
    from stepwell.keeper.keeper import KeeperOptions
    from stepwell.keeper.record import KeeperRecord
    from stepwell.pipeline.records import Link
    from stepwell.stores.transport.secret import RunSecret
    from stepwell.stores.transport.tls import MutualTls

__all__ = ["keeper"]


def keeper(
    config: Annotated[
        str | None,
        typer.Option(
            help="Configuration of the run: its `keeper` says all the rest, and a trainer on this node is "
            "looked after as with --finish."
        ),
    ] = None,
    run: Annotated[str, typer.Option(help="Name of the run, as its configuration has it.")] = "run",
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Address to listen on; several for several links. [default: 127.0.0.1:0]"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this node. [default: its host name]")] = "",
    memory: Annotated[
        Path | None,
        typer.Option(help="Directory in a memory file system. [default: one in /dev/shm]"),
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Most bytes that are held.", min=1)] = None,
    finish: Annotated[
        list[str] | None,
        typer.Option(
            help="Configuration, or directory, of a run that is trained on this node: the steps that its "
            "trainer had captured when it died are committed in its memory. Several for several trainers."
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="File of mode 0600 with the run's secret. [default: STEPWELL_RUN_SECRET]"),
    ] = None,
    tls: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(help="Certificate of this node, its key, and the run's authority (PEM)."),
    ] = None,
    make_secret: Annotated[
        Path | None, typer.Option(help="Write a new secret to this file, with mode 0600, and end.")
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Say what the keeper there holds, and end.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the keeper there; what it holds stays.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Hold copies for the other nodes of a run until SIGTERM; what is held stays for the next start.

    Peers connect with the run's secret or certificates of its authority; beyond this machine one of
    them is needed. Exit code 3 where --status or --stop finds no keeper running. A configuration with a
    `keeper` starts one by itself.
    """
    from stepwell.cli.reading import arena_of, config_of
    from stepwell.keeper.keeper import KeeperOptions, default_directory, keep
    from stepwell.stores.transport.secret import RunSecret

    if make_secret is not None:
        RunSecret.make().write(make_secret)
        return 0
    if config is not None:
        if listen or name or memory or budget or finish or secret_file or tls or run != "run":
            raise UsageError("with --config the configuration says the rest")
        options = _configured(config)
    else:
        node = name or socket.gethostname()
        hosts, port = _addresses(listen or ["127.0.0.1:0"])
        options = KeeperOptions(run, node, hosts, port, memory or default_directory(run, node))
    directory = options.directory
    if status:
        return _status(directory, as_json=as_json)
    if stop:
        from stepwell.keeper.attend import stop_keeper

        return 0 if stop_keeper(directory) else 3
    if config is None:
        options = replace(
            options,
            secret=_secret(secret_file),
            tls=_tls(tls),
            budget_bytes=budget,
            finish=[arena_of(config_of(source)) for source in finish or ()],
        )

    def ready(record: KeeperRecord) -> None:
        if as_json:
            print_json(record.as_json())
        else:
            typer.echo(f"keeper {record.name} of run {record.run} at {', '.join(record.addresses)}")

    def finished(arena: Path, links: list[Link]) -> None:
        steps = [link.step for link in links]
        if as_json:
            print_json({"finished": steps, "memory": str(arena)})
        else:
            typer.echo(
                f"committed in {arena}: step {', '.join(map(str, steps))}, which its trainer had captured"
            )

    def failed(arena: Path, error: StepwellError) -> None:
        typer.echo(f"stepwell: what was captured in {arena} is not committed: {error}", err=True)

    asyncio.run(keep(options, ready, finished, failed))
    return 0


def _configured(source: str) -> KeeperOptions:
    """Return what the configuration of a run says of this node's keeper.

    Raises
    ------
    ConfigError
        It says nothing.
    """
    from stepwell.cli.reading import config_of
    from stepwell.keeper.configured import completed, finished_by, options_of

    config = config_of(source)
    if config.keeper is None:
        raise ConfigError(f"{source}: there is no `keeper`")
    return options_of(completed(config.keeper, config), config.run, finished_by(config))


def _addresses(texts: list[str]) -> tuple[list[str], int]:
    """Return the hosts, and the port that all of them have.

    Raises
    ------
    UsageError
        One is no address, or the ports differ.
    """
    from stepwell.config.addresses import parse_address

    try:
        parsed = [parse_address(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from error
    ports = {port for _, port in parsed}
    if len(ports) > 1:
        raise UsageError(f"--listen: one port for all addresses, not {sorted(ports)}")
    return [host for host, _ in parsed], ports.pop()


def _secret(path: Path | None) -> RunSecret | None:
    from stepwell.stores.transport.secret import RunSecret

    return RunSecret.from_environment() if path is None else RunSecret.from_file(path)


def _tls(paths: tuple[Path, Path, Path] | None) -> MutualTls | None:
    from stepwell.stores.transport.tls import MutualTls

    if paths is None:
        return None
    certificate, key, authority = paths
    return MutualTls(certificate=certificate, key=key, authority=authority)


def _status(directory: Path, *, as_json: bool) -> int:
    """Show what the newest keeper in `directory` said of itself, and what lies in its arena."""
    from stepwell.keeper.keeper import ARENA_NAME
    from stepwell.keeper.record import KeeperRecord
    from stepwell.stores.arena import Arena
    from stepwell.stores.arena_files import LOCK_NAME
    from stepwell.stores.lock import owner_of

    record = KeeperRecord.read(directory)
    # The kernel knows, whatever the record says.
    running = owner_of(directory / ARENA_NAME / LOCK_NAME) is not None
    with Arena.inspect(directory / ARENA_NAME) as arena:
        keys = arena.keys()
        sizes = [region.header.length for key in keys if (region := arena.find(key)) and region.header]
    shown = {**record.as_json(), "running": running, "objects": len(keys), "held_bytes": sum(sizes)}
    if as_json:
        print_json(shown)
    else:
        budget = "none" if record.budget_bytes is None else bytes_text(record.budget_bytes)
        rows = [
            ("run", record.run),
            ("running", f"yes, process {record.pid}" if running else "no"),
            ("addresses", ", ".join(record.addresses)),
            ("held", f"{bytes_text(sum(sizes))} in {len(keys)} objects"),
            ("budget", budget),
        ]
        table(f"keeper {record.name} in {directory}", ("", ""), rows)
    return 0 if running else 3
