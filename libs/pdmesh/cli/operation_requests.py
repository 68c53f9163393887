"""`pdmesh drain|undrain|role|move|restart|pool resize|ops`: an operator's operations on a running mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import anyio
import msgspec
import typer

from pdmesh.cli.options import Asked, Output, new_operation_id
from pdmesh.cli.tables import Column, Table, duration
from pdmesh.core.operator_events import OperationRequested
from pdmesh.errors import InstanceUnavailable
from pdmesh.model import Role
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts
from pdmesh.wire.messages import (
    MAX_WAIT_S,
    AdminRequest,
    CancelOperation,
    GetStatus,
    ListOperations,
    MeshStatus,
    OperationList,
    OperationStatus,
    StartOperation,
    StartResize,
    StartRolling,
    WaitOperation,
)

T = TypeVar("T")

#: Nothing was changed, because no process starts and stops others for the scheduler. The commands to run were printed.
EXIT_NO_ACTUATOR = 3

#: Nothing was changed, because the operation is impossible.
EXIT_REFUSED = 4

#: Seconds in which a restarted scheduler is back, and continues with the operation.
AWAY_LIMIT_S = 60.0

#: Limit before the operation was asked for, so that a wrong address is reported soon.
FIRST_LIMIT_S = 10.0

#: Seconds between two tries to reach an absent scheduler.
AWAY_PAUSE_S = 0.5


#: Units of an operation's remaining work, one and several. For other operations these are requests.
_LEFT = {OperationKind.RESIZE: ("instance", "instances"), OperationKind.ROLLING: ("process", "processes")}


def start(asked: Asked, requested: OperationRequested, *, wait: bool = True) -> int:
    """Ask for an operation, wait until it is over if ``wait``, and return the exit code.

    Raises PdmeshError if no mesh can be asked, or it takes no change from here.
    """
    if requested.kind is OperationKind.RESTART:
        requested = replace(requested, pid=_pid(asked, requested.instance_id))
    return anyio.run(_run, asked, StartOperation(requested=requested), wait)


def _pid(asked: Asked, name: str) -> int | None:
    """Return the pid that serves under a name, so that repeated requests restart it once; None if it is not known."""
    state = current_state(asked)
    pids = {each.name: each.pid for each in state.services} | {row.instance_id: row.pid for row in state.instances}
    return pids.get(name) or None


def resize(
    asked: Asked, sizes: Mapping[Role, int | None], *, timeout_s: float, start_timeout_s: float, wait: bool
) -> int:
    """Resize the pools with a size; wait for the end if ``wait``. Return the exit code, and raise, as `start` does."""
    question = StartResize(
        operation_id=new_operation_id(),
        pools=PoolCounts(**{str(role): sizes[role] or 0 for role in Role}),
        kept=tuple(role for role in Role if sizes[role] is None),
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
    )
    return anyio.run(_run, asked, question, wait)


def restart_all(asked: Asked, *, timeout_s: float, start_timeout_s: float, force: bool, wait: bool) -> int:
    """Restart every process, one after the other, and return the exit code, if ``wait`` once that is over.

    Raise PdmeshError as `start` does.
    """
    question = StartRolling(
        operation_id=new_operation_id(), timeout_s=timeout_s, start_timeout_s=start_timeout_s, force=force
    )
    return anyio.run(_run, asked, question, wait)


def list_operations(asked: Asked) -> None:
    """Print the operations that the scheduler remembers. Raises PdmeshError if no mesh can be asked."""
    answer = anyio.run(_ask, asked, ListOperations(), OperationList, FIRST_LIMIT_S)
    if asked.output is Output.JSON:
        _print_json(answer)
        return
    table = Table([*map(Column, ("id", "operation", "instance", "state", "left", "since", "detail"))])
    for each in answer.operations:
        since = f"{duration(time.time() - each.began_at)} ago"
        left = str(each.num_left) if each.state == OperationState.RUNNING else ""
        table.add(each.operation_id, _what(each), each.instance_id, each.state, left, since, each.detail)
    table.show()


def show_operation(asked: Asked, operation_id: str) -> None:
    """Print one operation. Raises PdmeshError if it is not remembered, or no mesh can be asked."""
    question = WaitOperation(operation_id=OperationId(operation_id), num_left=0, wait_s=0.0)
    _print(anyio.run(_ask, asked, question, OperationStatus, FIRST_LIMIT_S), asked.output)


def cancel_operation(asked: Asked, operation_id: str) -> int:
    """Cancel an operation. Return 1 if it was already over, else 0. Raises PdmeshError as `start` does.

    A part of a rolling restart or of a move that has begun ends before the operation is over.
    """
    question = CancelOperation(operation_id=OperationId(operation_id))
    answer = anyio.run(_ask, asked, question, OperationStatus, FIRST_LIMIT_S)
    _print(answer, asked.output)
    return 0 if answer.state in (OperationState.CANCELLED, OperationState.RUNNING) else 1


def current_state(asked: Asked) -> MeshStatus:
    """Return the mesh's state. Raises PdmeshError if no mesh can be asked."""
    return anyio.run(_ask, asked, GetStatus(), MeshStatus, FIRST_LIMIT_S)


async def _run(asked: Asked, question: StartOperation | StartResize | StartRolling, wait: bool) -> int:
    status = await _ask(asked, question, OperationStatus, FIRST_LIMIT_S)
    if wait and status.state == OperationState.RUNNING:
        from pdmesh.cli.progress import progress_line  # imports rich

        with progress_line(asked.output) as say:
            while status.state == OperationState.RUNNING:
                say(_line(status))
                again = WaitOperation(operation_id=status.operation_id, num_left=status.num_left, wait_s=MAX_WAIT_S)
                is_expected = status.kind is OperationKind.ROLLING or status.instance_id == "scheduler"
                status = await _ask(asked, again, OperationStatus, AWAY_LIMIT_S, is_expected)
    _print(status, asked.output)
    if status.state == OperationState.REFUSED and status.needs_actuator:
        if status.pools is not None and asked.output is not Output.JSON:
            command = status.resize_command
            how = f" with\n  {command}" if command else ": scheduler.resize_command is not set"
            typer.echo(f"pdmesh: start and stop the instances yourself{how}", err=True)
        return EXIT_NO_ACTUATOR
    if status.state == OperationState.REFUSED:
        return EXIT_REFUSED
    return 0 if status.state in (OperationState.DONE, OperationState.RUNNING) else 1


async def _ask(asked: Asked, question: AdminRequest, kind: type[T], limit_s: float, is_replaced: bool = False) -> T:
    """Ask the scheduler, again and again for ``limit_s`` while it is absent.

    A repeated change has the same id, so it is done once. If ``is_replaced``, the operation itself replaces the
    scheduler, and its absence is expected. Raises PdmeshError as `Asked.ask` does.
    """
    until_s, has_said = anyio.current_time() + limit_s, False
    while True:
        try:
            return await asked.ask(question, kind)
        except InstanceUnavailable:
            if anyio.current_time() + AWAY_PAUSE_S > until_s:
                raise
        if not has_said and asked.output is not Output.JSON:
            waiting = f"waiting for the new scheduler (up to {limit_s:g} s)"
            gone = f"the scheduler does not answer; trying for {limit_s:g} s"
            typer.echo(f"pdmesh: {waiting if is_replaced else gone}", err=True)
        has_said = True
        await anyio.sleep(AWAY_PAUSE_S)


def _print(status: OperationStatus, output: Output) -> None:
    if output is Output.JSON:
        _print_json(status)
        return
    is_wrong = status.state in (OperationState.REFUSED, OperationState.FAILED)
    typer.echo(f"pdmesh: {_line(status)}", err=is_wrong)


def _print_json(answer: OperationStatus | OperationList) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())


def _line(status: OperationStatus) -> str:
    """Return a line with the operation's state and remaining work."""
    line = f"{_what(status)}{' ' * bool(status.instance_id)}{status.instance_id}: {status.state}"
    if status.state == OperationState.RUNNING:
        one, several = _LEFT.get(status.kind, ("request", "requests"))
        what = one if status.num_left == 1 else several
        line += f", {status.num_left} {what} left (operation {status.operation_id})"
    elif status.ended_at is not None and status.state == OperationState.DONE:
        line += f" after {status.ended_at - status.began_at:.1f} s"
    return f"{line}: {status.detail}" if status.detail else line


def _what(status: OperationStatus) -> str:
    if status.pools is not None:
        return f"pool {status.kind} to {status.pools}"
    if status.kind is OperationKind.ROLLING:
        return "rolling restart"
    if status.request_id is not None:
        return f"{status.kind} {status.request_id} to"
    return status.kind if status.role is None else f"{status.kind} {status.role}"
