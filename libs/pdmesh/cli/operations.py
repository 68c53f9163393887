"""`pdmesh drain|undrain|role|ops`: an operator's operations on the instances of a running mesh."""

from __future__ import annotations

import secrets
import time

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdmesh.cli.admin import target
from pdmesh.cli.options import Output
from pdmesh.cli.progress import progress_line
from pdmesh.cli.state import StateFolder
from pdmesh.config import MeshConfig
from pdmesh.core.events import OperationRequested
from pdmesh.core.operations import OperationState
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.model import InstanceId, OperationId, OperationKind, Role
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import (
    MAX_WAIT_S,
    AdminRequest,
    CancelOperation,
    GetStatus,
    ListOperations,
    MeshState,
    OperationList,
    OperationStatus,
    StartOperation,
    WaitOperation,
)

#: Nothing was changed: what was asked for cannot be.
EXIT_REFUSED = 4

#: A scheduler that died is back by then, and goes on with the operation.
AWAY_LIMIT_S = 60.0

#: Between two tries to reach a scheduler that is away.
AWAY_PAUSE_S = 0.5


def start(
    config: MeshConfig,
    state: StateFolder,
    kind: OperationKind,
    instance: str,
    *,
    role: Role | None = None,
    timeout_s: float = 0.0,
    force: bool = False,
    wait: bool = True,
    output: Output = Output.TABLE,
) -> int:
    """Ask for an operation and, unless told otherwise, wait until it is over. Returns the exit code.

    Raises PdmeshError if no mesh can be asked, or it takes no change from here.
    """
    wish = OperationRequested(
        operation_id=OperationId(secrets.token_hex(4)),
        kind=kind,
        instance_id=InstanceId(instance),
        timeout_s=timeout_s,
        role=role,
        force=force,
    )
    return anyio.run(_run, config, state, wish, wait, output)


def restart_all(config: MeshConfig, state: StateFolder, *, timeout_s: float, force: bool, output: Output) -> int:
    """Restart every instance, one after the other; stop at the first that fails. Returns its exit code, or 0.

    Raises PdmeshError as `start` does.
    """
    _, address, security = target(config, state)
    answer = anyio.run(ask_scheduler, address, security, GetStatus())
    if not isinstance(answer, MeshState):
        raise ProtocolError("the scheduler answered another question")
    for row in answer.instances:
        code = start(
            config, state, OperationKind.RESTART, row.instance_id, timeout_s=timeout_s, force=force, output=output
        )
        if code:
            return code
    return 0


def list_operations(config: MeshConfig, state: StateFolder, output: Output) -> None:
    """Print the operations that the scheduler remembers. Raises PdmeshError if no mesh can be asked."""
    _, address, security = target(config, state)
    answer = anyio.run(ask_scheduler, address, security, ListOperations())
    if not isinstance(answer, OperationList):
        raise ProtocolError("the scheduler answered another question")
    if output is Output.JSON:
        _print_json(answer)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("id", "operation", "instance", "state", "left", "since", "detail"):
        table.add_column(column)
    for each in answer.operations:
        since = f"{time.time() - each.began_at:.0f} s ago"
        left = str(each.num_left) if each.state == OperationState.RUNNING else ""
        table.add_row(each.operation_id, _what(each), each.instance_id, each.state, left, since, each.detail)
    Console().print(table)


def show_operation(config: MeshConfig, state: StateFolder, operation_id: str, output: Output) -> None:
    """Print one. Raises PdmeshError if it is not remembered, or no mesh can be asked."""
    question = WaitOperation(operation_id=OperationId(operation_id), num_left=0, wait_s=0.0)
    _print(anyio.run(_ask, config, state, question), output)


def cancel_operation(config: MeshConfig, state: StateFolder, operation_id: str, output: Output) -> int:
    """Take one back; 1 if it was over already. Raises PdmeshError as `start` does."""
    answer = anyio.run(_ask, config, state, CancelOperation(operation_id=OperationId(operation_id)))
    _print(answer, output)
    return 0 if answer.state == OperationState.CANCELLED else 1


async def _run(config: MeshConfig, state: StateFolder, wish: OperationRequested, wait: bool, output: Output) -> int:
    status = await _ask(config, state, StartOperation(wish=wish))
    if wait:
        with progress_line(output) as say:
            while status.state == OperationState.RUNNING:
                say(_line(status))
                question = WaitOperation(operation_id=status.operation_id, num_left=status.num_left, wait_s=MAX_WAIT_S)
                status = await _ask_until_back(config, state, question)
    _print(status, output)
    if status.state == OperationState.REFUSED:
        return EXIT_REFUSED
    return 0 if status.state in (OperationState.DONE, OperationState.RUNNING) else 1


async def _ask_until_back(config: MeshConfig, state: StateFolder, question: WaitOperation) -> OperationStatus:
    """Like `_ask`; a scheduler that is away has time to come back."""
    with anyio.move_on_after(AWAY_LIMIT_S):
        while True:
            try:
                return await _ask(config, state, question)
            except InstanceUnavailable:
                await anyio.sleep(AWAY_PAUSE_S)
    return await _ask(config, state, question)


async def _ask(config: MeshConfig, state: StateFolder, question: AdminRequest) -> OperationStatus:
    _, address, security = target(config, state)
    answer = await ask_scheduler(address, security, question)
    if not isinstance(answer, OperationStatus):
        raise ProtocolError("the scheduler answered another question")
    return answer


def _print(status: OperationStatus, output: Output) -> None:
    if output is Output.JSON:
        _print_json(status)
        return
    is_wrong = status.state in (OperationState.REFUSED, OperationState.FAILED)
    typer.echo(f"pdmesh: {_line(status)}", err=is_wrong)


def _print_json(answer: OperationStatus | OperationList) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())


def _line(status: OperationStatus) -> str:
    """One line on how far it is."""
    line = f"{_what(status)} {status.instance_id}: {status.state}"
    if status.state == OperationState.RUNNING:
        line += f", {status.num_left} requests left (operation {status.operation_id})"
    elif status.ended_at is not None and status.state == OperationState.DONE:
        line += f" after {status.ended_at - status.began_at:.1f} s"
    return f"{line}: {status.detail}" if status.detail else line


def _what(status: OperationStatus) -> str:
    return status.kind if status.role is None else f"{status.kind} {status.role}"
