"""`pdmesh pool auto`: follows the advice, one role at a time, and takes back changes that made things worse."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import typer

from pdmesh.cli.operation_requests import current_state, start
from pdmesh.cli.options import Asked, Output, new_operation_id
from pdmesh.core.operator_events import OperationRequested
from pdmesh.errors import ConfigError, InstanceUnavailable
from pdmesh.model import InstanceId, OperationKind, PoolCounts, Role
from pdmesh.wire.messages import InstanceStatus
from pdmesh_lab.cli.advise import AdviceOptions, advise, recording_of


class Flip(NamedTuple):
    """A change of one instance's role."""

    instance_id: InstanceId
    role: Role


def next_flip(there: Sequence[InstanceStatus], wanted: PoolCounts, least: int) -> Flip | None:
    """Return one step towards ``wanted``: the least used instance of a role that has too many, and its new role.

    None if the pools are as wanted, or if only ``least`` instances are left of every role that would have to give one.
    """
    counts = {role: sum(row.role is role for row in there) for role in Role}
    missing = [role for role in Role if counts[role] < wanted.of(role)]
    spare = [
        row
        for row in there
        if counts[row.role] > wanted.of(row.role)
        and (counts[row.role] > least or row.role is Role.MIXED)
        and row.state == "up"
    ]
    if not missing or not spare:
        return None
    chosen = min(spare, key=lambda row: (row.num_prefilling + row.num_decoding, row.instance_id))
    return Flip(chosen.instance_id, missing[0])


def run_auto(asked: Asked, options: AdviceOptions, *, every_s: float, least: int, timeout_s: float, once: bool) -> int:
    """Follow the advice every ``every_s`` seconds until interrupted; ``once`` does so once and returns its exit code.

    Bundles are left alone, and no process is started or stopped. Raises PdmeshError if no mesh can be asked; a
    scheduler that has answered once may be away for a while, for example while it restarts.
    """
    has_looked = False
    while True:
        began_s = time.monotonic()
        try:
            code = _look(asked, options, least, timeout_s)
        except InstanceUnavailable as error:
            if not has_looked:
                raise
            typer.echo(f"pdmesh: {error}; trying again later", err=True)
        else:
            if once:
                return code
            has_looked = True
        time.sleep(max(0.0, began_s + every_s - time.monotonic()))


def _look(asked: Asked, options: AdviceOptions, least: int, timeout_s: float) -> int:
    there = current_state(asked).instances
    try:
        advice = advise(recording_of(asked, options), options, Output.JSON, same_bundle=True)
    except ConfigError as error:
        _say(str(error))
        return 0
    if advice.best is None:
        _say(f"no proposal is better by {100 * options.min_gain:g} points than {advice.now.proposal.pools}")
        return 0
    best = advice.best
    if all(best.proposal.pools.of(role) == sum(row.role is role for row in there) for role in Role):
        _say(f"{best.proposal.pools}, the better pools, are already running")
        return 0
    flip = next_flip(there, best.proposal.pools, least)
    if flip is None:
        _say(f"{best.proposal.pools} would be better, but leaves fewer than {least} of a kind")
        return 0
    _say(
        f"{best.proposal.pools} would have had {best.attainment:.1%} of requests within targets, "
        f"{advice.now.proposal.pools} {advice.now.attainment:.1%}: {flip.instance_id} becomes {flip.role}"
    )
    requested = OperationRequested(
        operation_id=new_operation_id(),
        kind=OperationKind.ROLE,
        instance_id=flip.instance_id,
        timeout_s=timeout_s,
        role=flip.role,
        judged=True,
    )
    return start(asked, requested)


def _say(what: str) -> None:
    typer.echo(f"pdmesh: {what}")
