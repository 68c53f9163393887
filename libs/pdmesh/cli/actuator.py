"""An actuator starts and stops processes for the scheduler: on one host, or in one cluster.

`follow` polls the scheduler, and with each question says which processes run. The answer describes a state, not an
action, so nothing is done twice if a question is lost or the scheduler restarts. To support another system, implement
`Actuator` in a module of its own; `pdmesh.cli.supervisor_actuator` does it for ``pdmesh up``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import anyio.abc
import structlog

from pdmesh.config import MeshConfig
from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.errors import PdmeshError
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import MAX_WAIT_S, FollowPools, PoolsDesired

log = structlog.get_logger()

#: Between two questions to a scheduler that does not answer.
AWAY_PAUSE_S = 1.0


class Actuator(Protocol):
    """A system that can start and stop processes. There may be several, each with a prefix for instances' names."""

    @property
    def changed(self) -> anyio.Event:
        """Set at the next change of what `report` says."""
        ...

    def report(self) -> ActuatorReported:
        """Return which processes run, are being started or are ending, and how much memory is free.

        A process's ``pid`` may be any number that its predecessor of the same name did not have; an instance's is the
        one that it registers with. The last process of an instance that leaves is reported until its memory is free.
        """
        ...

    def heard(self, report: ActuatorReported) -> None:
        """Forget the failed starts of a report: the scheduler has heard of them."""
        ...

    def pursue(self, desired: DesiredProcesses, tasks: anyio.abc.TaskGroup) -> None:
        """Begin, in ``tasks``, what is desired and neither done nor begun. Never waits, and does not raise."""
        ...


#: Asks the scheduler; None if it does not answer.
Ask = Callable[[FollowPools], Awaitable[PoolsDesired | None]]


def ask_of(config: MeshConfig) -> Ask:
    """Return what asks the scheduler of a configuration, and logs that it does not answer."""

    async def ask(question: FollowPools) -> PoolsDesired | None:
        try:
            answer = await ask_scheduler(config.scheduler_address, config.security, question)
        except PdmeshError as error:
            log.warning("the scheduler does not answer", reason=str(error))
            return None
        return answer if isinstance(answer, PoolsDesired) else None

    return ask


async def follow(actuator: Actuator, ask: Ask) -> None:
    """Have an actuator do what the scheduler wants, until cancelled; what it has begun is cancelled then, too."""
    last: PoolsDesired | None = None
    async with anyio.create_task_group() as tasks:
        while True:
            changed, report = actuator.changed, actuator.report()
            question = FollowPools(report=report, revision=-1 if last is None else last.revision, wait_s=MAX_WAIT_S)
            answer = await _ask_until(changed, ask, question)
            if answer is not None:
                actuator.heard(report)
                last = answer
            if last is not None:
                actuator.pursue(last.processes, tasks)


async def _ask_until(changed: anyio.Event, ask: Ask, question: FollowPools) -> PoolsDesired | None:
    """What is wanted; None if something has changed meanwhile: there is something else to tell then."""
    answer: PoolsDesired | None = None
    async with anyio.create_task_group() as racing:

        async def wait_for_answer() -> None:
            nonlocal answer
            answer = await ask(question)
            if answer is None:
                await anyio.sleep(AWAY_PAUSE_S)
            racing.cancel_scope.cancel()

        racing.start_soon(wait_for_answer)
        await changed.wait()
        racing.cancel_scope.cancel()
    return answer
