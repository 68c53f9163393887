"""The commands that change what instances do: ``drain``, ``undrain``, ``role`` and ``ops``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pdmesh.cli.options import ConfigFile, Name, Output, OutputFormat, Scheduler, Settings, build_config
from pdmesh.cli.state import DEFAULT_NAME, state_folder
from pdmesh.core.events import MAX_OPERATION_S
from pdmesh.errors import ConfigError
from pdmesh.model import OperationKind, Role

app = typer.Typer()
ops_app = typer.Typer(help="Operators' operations that run, and the last that are over.", invoke_without_command=True)

#: An answer of a thousand tokens has ended by then, on most machines; a longer one goes on elsewhere.
DEFAULT_TIMEOUT_S = 30.0

Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="As `pdmesh status` lists them.")]
Timeout = Annotated[
    float,
    typer.Option(min=0, max=MAX_OPERATION_S, help="Seconds for requests to end; then they go on elsewhere."),
]
Force = Annotated[bool, typer.Option("--force", help="Even if no other instance does what this one does.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Until it is done.")]


@app.command()
def drain(
    instance: Instance,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    force: Force = False,
    wait: Wait = True,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Take an instance out of use: nothing new goes there, and what is there ends or goes on elsewhere."""
    _operate(OperationKind.DRAIN, instance, (config, settings, scheduler, name, output), timeout, force, wait)


@app.command()
def undrain(
    instance: Instance,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Use an instance again."""
    _operate(OperationKind.UNDRAIN, instance, (config, settings, scheduler, name, output))


@app.command()
def role(
    instance: Instance,
    to: Annotated[Role, typer.Argument(metavar="ROLE", help="prefill, decode or mixed.")],
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    force: Force = False,
    wait: Wait = True,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Give an instance another role, once what this does not do has ended or gone on elsewhere."""
    _operate(OperationKind.ROLE, instance, (config, settings, scheduler, name, output), timeout, force, wait, role=to)


@app.command()
def restart(
    instance: Annotated[str | None, typer.Argument(metavar="INSTANCE", help="As `pdmesh status` lists them.")] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="All instances, one after the other.")] = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    force: Force = False,
    wait: Wait = True,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """End an instance's process once nothing is left on it, and wait until the next one has joined.

    Whoever looks after the process starts it again: `pdmesh up`, or Docker.
    """
    if (instance is None) is not rolling:
        raise ConfigError("name one instance, or say --rolling")
    if instance is not None:
        _operate(OperationKind.RESTART, instance, (config, settings, scheduler, name, output), timeout, force, wait)
    from pdmesh.cli.operations import restart_all

    tree = build_config(config, settings, scheduler_address=scheduler)
    raise typer.Exit(restart_all(tree, state_folder(os.environ, name), timeout_s=timeout, force=force, output=output))


@ops_app.callback()
def ops(
    context: typer.Context,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Operators' operations that run, and the last that are over."""
    if context.invoked_subcommand is not None:
        return
    from pdmesh.cli.operations import list_operations

    list_operations(build_config(config, settings, scheduler_address=scheduler), state_folder(os.environ, name), output)


@ops_app.command("show")
def ops_show(
    operation: Annotated[str, typer.Argument(metavar="ID")],
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Print how far an operation is."""
    from pdmesh.cli.operations import show_operation

    tree = build_config(config, settings, scheduler_address=scheduler)
    show_operation(tree, state_folder(os.environ, name), operation, output)


@ops_app.command("cancel")
def ops_cancel(
    operation: Annotated[str, typer.Argument(metavar="ID")],
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Take an operation back: the instance is used as before."""
    from pdmesh.cli.operations import cancel_operation

    tree = build_config(config, settings, scheduler_address=scheduler)
    raise typer.Exit(cancel_operation(tree, state_folder(os.environ, name), operation, output))


def _operate(
    kind: OperationKind,
    instance: str,
    where: tuple[Path | None, list[str] | None, str | None, str, Output],
    timeout_s: float = 0.0,
    force: bool = False,
    wait: bool = True,
    *,
    role: Role | None = None,
) -> None:
    from pdmesh.cli.operations import start

    config, settings, scheduler, name, output = where
    tree = build_config(config, settings, scheduler_address=scheduler)
    state = state_folder(os.environ, name)
    raise typer.Exit(
        start(tree, state, kind, instance, role=role, timeout_s=timeout_s, force=force, wait=wait, output=output)
    )
