"""Actuators, which start and stop processes for the scheduler: on one host, or in one cluster.

`follow` polls the scheduler, and with each question reports which processes run. The answer describes a state, not an
action, so nothing is done twice if a question is lost or the scheduler restarts. To support another system, derive a
class from `Actuator` in a module of its own; `pdmesh.cli.supervisor_actuator` does it for ``pdmesh up``.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import anyio
import anyio.abc
import structlog

from pdmesh.config import MeshConfig
from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import MAX_ENDED, ActuatorReported, EndedProcess, FailedStart
from pdmesh.errors import PdmeshError
from pdmesh.model import InstanceId
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import MAX_WAIT_S, FollowPools, PoolsDesired

log = structlog.get_logger()

#: Seconds between two questions to a scheduler that does not answer.
AWAY_PAUSE_S = 1.0

#: Seconds between two looks at a system.
LOOK_S = 1.0


class Actuator(ABC):
    """A system that can start and stop processes. If there are several, each has its own prefix of instances' names."""

    def __init__(self) -> None:
        self.actuator_id = secrets.token_hex(8)
        self._refused: set[InstanceId] = set()  # still wanted although their start failed
        self._failed: list[FailedStart] = []  # failed starts not yet reported
        self._ended: deque[EndedProcess] = deque(maxlen=MAX_ENDED)  # ends of processes not yet reported
        self._changed = anyio.Event()

    @property
    def changed(self) -> anyio.Event:
        """Event that is set at the next change of the report."""
        return self._changed

    @abstractmethod
    def report(self) -> ActuatorReported:
        """Return which processes run, are being started or are ending, and how much memory is free.

        A process's ``pid`` may be any number that the previous process of the same name did not have. An instance's is
        the one with which it registers. The last process of a leaving instance is reported until its memory is free.
        """

    @abstractmethod
    def pursue(self, desired: DesiredProcesses, tasks: anyio.abc.TaskGroup) -> None:
        """Begin desired actions in ``tasks`` that are neither done nor begun. Must not wait or raise."""

    def heard(self, report: ActuatorReported) -> None:
        """Forget the failed starts and the ends of processes that the scheduler has received."""
        del self._failed[: len(report.failed)]
        for ended in report.ended:
            with suppress(ValueError):  # later ends may have displaced it
                self._ended.remove(ended)

    def note_change(self) -> None:
        """Wake `follow`, so that the scheduler gets a new report."""
        self._changed.set()
        self._changed = anyio.Event()

    def _refuse(self, instance_ids: Iterable[InstanceId], reason: str) -> None:
        """Report that instances could not be started, and do not try them again while they stay wanted."""
        for instance_id in instance_ids:
            self._refused.add(instance_id)
            self._failed.append(FailedStart(instance_id=instance_id, reason=reason))
        self.note_change()


class LookingActuator(Actuator):
    """An actuator that learns of processes by polling a system."""

    @abstractmethod
    async def look(self) -> None:
        """Read the system's processes. Raise PdmeshError if they cannot be read."""

    async def run(self, config: MeshConfig) -> None:
        """Poll the system, and follow the scheduler of ``config``, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            tasks.start_soon(follow, self, ask_of(config))

    async def _watch(self) -> None:
        complaint = ""
        while True:
            try:
                await self.look()
                complaint = ""
            except PdmeshError as error:
                if str(error) != complaint:
                    log.error("cannot list the processes; trying again", reason=str(error))
                complaint = str(error)
            await anyio.sleep(LOOK_S)


#: Asks the scheduler; returns None if it does not answer.
Ask = Callable[[FollowPools], Awaitable[PoolsDesired | None]]


def ask_of(config: MeshConfig) -> Ask:
    """Return a function that asks the configured scheduler. The function logs a failure and returns None."""

    async def ask(question: FollowPools) -> PoolsDesired | None:
        try:
            answer = await ask_scheduler(config.scheduler_address, config.security, question)
        except PdmeshError as error:
            log.warning("the scheduler does not answer", reason=str(error))
            return None
        return answer if isinstance(answer, PoolsDesired) else None

    return ask


async def follow(actuator: Actuator, ask: Ask) -> None:
    """Have an actuator do what the scheduler wants, until cancelled. Begun actions are cancelled then, too."""
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
    """Return the desired processes; None if the report changes first, or the scheduler does not answer.

    Without an answer, wait for a change or `AWAY_PAUSE_S` first.
    """
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
