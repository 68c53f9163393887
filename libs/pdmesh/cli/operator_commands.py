"""Commands that change what instances and pools do: `drain`, `undrain`, `role`, `move`, `restart`, `pool`, `ops`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from typer import Argument, Exit, Option

from pdmesh.cli.command_group import Commands
from pdmesh.cli.options import Asked, asks_scheduler, new_operation_id
from pdmesh.errors import ConfigError
from pdmesh.units import parse_seconds

app = Commands("operate")
ops_app = Commands("ops", "Show running and recent operations, such as drains and role changes.", default="list")
pool_app = Commands("pool", "Change how many instances of each role a mesh has.")

#: The limit in `pdmesh.core.operator_events`.
MAX_OPERATION_S = 86400.0

#: An answer of a thousand tokens ends within this time, on most machines. A longer one continues elsewhere.
DEFAULT_TIMEOUT_S = 30.0

#: A large model is loaded within this time.
DEFAULT_START_TIMEOUT_S = 600.0

Instance = Annotated[str, Argument(metavar="INSTANCE", help="Name of an instance, as in `pdmesh status`.")]
Timeout = Annotated[
    float,
    Option(
        min=0,
        max=MAX_OPERATION_S,
        parser=parse_seconds,
        help="Time that requests have to finish; then they move or restart elsewhere.",
    ),
]
StartTimeout = Annotated[
    float, Option(min=0, max=MAX_OPERATION_S, parser=parse_seconds, help="Time that a new instance has to register.")
]
PoolSize = Annotated[int | None, Option(min=0, max=1024, help="Number of instances. [default: as now]")]
Force = Annotated[bool, Option("--force", help="Do it even if this is the last instance that can prefill, or decode.")]
Wait = Annotated[bool, Option("--wait/--no-wait", help="Wait until the operation has ended.")]


@app.command(example="pdmesh drain decode-0 --timeout 60")
@asks_scheduler
def drain(
    asked: Asked, instance: Instance, timeout: Timeout = DEFAULT_TIMEOUT_S, force: Force = False, wait: Wait = True
) -> None:
    """Take an instance out of use: it gets no new requests, and its decodes move elsewhere with their KV.

    Decodes that cannot move restart elsewhere at the timeout. The last instance of its kind is refused without --force.
    """
    _operate(asked, "drain", instance, wait=wait, timeout_s=timeout, force=force)


@app.command(example="pdmesh undrain decode-0")
@asks_scheduler
def undrain(asked: Asked, instance: Instance) -> None:
    """Put a drained instance back into use."""
    _operate(asked, "undrain", instance, timeout_s=0.0)


@app.command(example="pdmesh role decode-1 prefill --timeout 5")
@asks_scheduler
def role(
    asked: Asked,
    instance: Instance,
    to: Annotated[Literal["prefill", "decode", "mixed"], Argument(metavar="ROLE", help="prefill, decode or mixed.")],
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    force: Force = False,
    wait: Wait = True,
) -> None:
    """Change an instance's role, once requests that the new role cannot serve have ended or moved."""
    _operate(asked, "role", instance, wait=wait, timeout_s=timeout, force=force, role=to)


@app.command(example="pdmesh move chatcmpl-cd69 decode-1")
@asks_scheduler
def move(
    asked: Asked,
    request: Annotated[str, Argument(metavar="REQUEST", help="Request id, response id, or the client's label.")],
    instance: Annotated[str, Argument(metavar="INSTANCE", help="Instance to move it to.")],
    timeout: Annotated[
        float,
        Option(
            min=0,
            max=MAX_OPERATION_S,
            parser=parse_seconds,
            help="Time that the move may take; then the request stays where it is.",
        ),
    ] = DEFAULT_TIMEOUT_S,
    wait: Wait = True,
) -> None:
    """Move a decoding request to another instance with its KV. Its stream goes on, token for token."""
    _operate(asked, "move", instance, wait=wait, timeout_s=timeout, request_id=request)


@app.command(example="pdmesh restart decode-0, or pdmesh restart --rolling --no-wait")
@asks_scheduler
def restart(
    asked: Asked,
    instance: Annotated[
        str | None,
        Argument(metavar="NAME", help="An instance, a gateway or the scheduler."),
    ] = None,
    rolling: Annotated[bool, Option("--rolling", help="Restart every process, one at a time.")] = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    start_timeout: StartTimeout = DEFAULT_START_TIMEOUT_S,
    force: Force = False,
    wait: Wait = True,
) -> None:
    """Drain a process, or each in turn (--rolling), end it, and wait for its successor. No stream breaks.

    The process's supervisor (`pdmesh up` or Docker) starts it again. Only `pdmesh up` restarts the scheduler and
    gateways. With --rolling, `pdmesh up` starts a temporary instance beside the last one of a role.
    """
    if (instance is None) is not rolling:
        raise ConfigError("give the name of one process, or --rolling for all")
    if instance is not None:
        _operate(asked, "restart", instance, wait=wait, timeout_s=timeout, force=force)
    from pdmesh.cli.operation_requests import restart_all

    raise Exit(restart_all(asked, timeout_s=timeout, start_timeout_s=start_timeout, force=force, wait=wait))


@pool_app.command("resize", example="pdmesh pool resize --prefill 2 --decode 3")
@asks_scheduler
def pool_resize(
    asked: Asked,
    prefill: PoolSize = None,
    decode: PoolSize = None,
    mixed: PoolSize = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    start_timeout: StartTimeout = DEFAULT_START_TIMEOUT_S,
    wait: Wait = True,
) -> None:
    """Resize the pools: instances change roles, are started by `pdmesh up`, or are drained and stopped."""
    from pdmesh.cli.operation_requests import resize
    from pdmesh.model import Role

    sizes = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: mixed}
    if all(size is None for size in sizes.values()):
        raise ConfigError("no pool size is given: use --prefill, --decode or --mixed")
    raise Exit(resize(asked, sizes, timeout_s=timeout, start_timeout_s=start_timeout, wait=wait))


@ops_app.command("list, ls", example="pdmesh ops -o json")
@asks_scheduler
def ops_list(asked: Asked) -> None:
    """List running and recent operations.

    Exit codes of commands that change a mesh: 0 done (or begun, with --no-wait), 1 failed, cancelled or undone, 2 wrong
    usage, 3 no `pdmesh up` here to start and stop processes, 4 refused. After 2, 3 and 4 nothing has changed.
    """
    from pdmesh.cli.operation_requests import list_operations

    list_operations(asked)


@ops_app.command("show", example="pdmesh ops show 54b2f72b")
@asks_scheduler
def ops_show(asked: Asked, operation: Annotated[str, Argument(metavar="ID")]) -> None:
    """Show the progress of an operation."""
    from pdmesh.cli.operation_requests import show_operation

    show_operation(asked, operation)


@ops_app.command("cancel", example="pdmesh ops cancel 54b2f72b")
@asks_scheduler
def ops_cancel(asked: Asked, operation: Annotated[str, Argument(metavar="ID")]) -> None:
    """Cancel an operation and use its instances as before. Restarts that have begun are completed.

    Exits with 1 if the operation was over.
    """
    from pdmesh.cli.operation_requests import cancel_operation

    raise Exit(cancel_operation(asked, operation))


def _operate(asked: Asked, kind: str, instance: str, *, wait: bool = True, **more: Any) -> NoReturn:
    import msgspec

    from pdmesh.cli.operation_requests import start
    from pdmesh.core.operator_events import OperationRequested

    fields = {"operation_id": new_operation_id(), "kind": kind, "instance_id": instance, **more}
    try:
        requested = msgspec.convert(fields, OperationRequested)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no such operation: {error}") from error
    raise Exit(start(asked, requested, wait=wait))
