"""An actuator starts and stops processes for the scheduler: on one host, or in one cluster.

`follow` polls the scheduler, and with each question says which processes run. The answer describes a state, not an
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

#: Between two questions to a scheduler that does not answer.
AWAY_PAUSE_S = 1.0

#: Between two looks at a system.
LOOK_S = 1.0


class Actuator(ABC):
    """A system that can start and stop processes. There may be several, each with a prefix for instances' names."""

    def __init__(self) -> None:
        self.actuator_id = secrets.token_hex(8)
        self._refused: set[InstanceId] = set()  # still wanted although their start failed
        self._failed: list[FailedStart] = []  # failed starts that the scheduler has not heard of
        self._ended: deque[EndedProcess] = deque(maxlen=MAX_ENDED)  # ends that the scheduler has not heard of
        self._changed = anyio.Event()

    @property
    def changed(self) -> anyio.Event:
        """Set at the next change of what `report` says."""
        return self._changed

    @abstractmethod
    def report(self) -> ActuatorReported:
        """Return which processes run, are being started or are ending, and how much memory is free.

        A process's ``pid`` may be any number that its predecessor of the same name did not have; an instance's is the
        one that it registers with. The last process of an instance that leaves is reported until its memory is free.
        """

    @abstractmethod
    def pursue(self, desired: DesiredProcesses, tasks: anyio.abc.TaskGroup) -> None:
        """Begin, in ``tasks``, what is desired and neither done nor begun. Never waits, and does not raise."""

    def heard(self, report: ActuatorReported) -> None:
        """Forget the failed starts and the ends of processes that the scheduler has heard of."""
        del self._failed[: len(report.failed)]
        for ended in report.ended:
            with suppress(ValueError):  # later ends have taken its place
                self._ended.remove(ended)

    def note_change(self) -> None:
        """Let the scheduler have a new report."""
        self._changed.set()
        self._changed = anyio.Event()

    def _refuse(self, instance_ids: Iterable[InstanceId], reason: str) -> None:
        """Report that instances could not be started; they are not tried again as long as they are wanted."""
        for instance_id in instance_ids:
            self._refused.add(instance_id)
            self._failed.append(FailedStart(instance_id=instance_id, reason=reason))
        self.note_change()


class LookingActuator(Actuator):
    """An actuator that learns of processes by looking at a system again and again."""

    @abstractmethod
    async def look(self) -> None:
        """Take note of the processes. Raises PdmeshError."""

    async def run(self, config: MeshConfig) -> None:
        """Look at the system, and follow the scheduler of ``config``, until cancelled."""
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
                    log.error("cannot look at the processes; trying again", reason=str(error))
                complaint = str(error)
            await anyio.sleep(LOOK_S)


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
