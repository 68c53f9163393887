"""Questions of actuators: their reports go to the core, and the core's desired processes go back."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import anyio
import structlog

from pdmesh.core.operator_events import ActuatorLost
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.wire.messages import MAX_WAIT_S, AdminError, FollowPools, PoolsDesired
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.peer_streams import Leases

log = structlog.get_logger()

#: Seconds of silence after which an actuator is lost.
ACTUATOR_LEASE_S = MAX_WAIT_S + 6.0


class ActuatorLinks:
    """Server of actuators: supervisors, and other programs that follow the scheduler in the same way."""

    def __init__(self, core: SchedulerCore, driver: Driver, changed: Callable[[], anyio.Event]) -> None:
        """``changed`` returns an event that is set at the next change of what operators want."""
        self._core = core
        self._driver = driver
        self._changed = changed
        self._leases: Leases[str] = Leases(ACTUATOR_LEASE_S)
        self._answers: dict[str, PoolsDesired] = {}

    async def follow(self, question: FollowPools) -> PoolsDesired | AdminError:
        """Pass an actuator's report to the core, and answer once the desired processes differ from the revision it
        knows.

        Answer with the same revision after ``question.wait_s``. An actuator that may not connect gets an error.
        """
        report = question.report
        actuator_id = report.actuator_id
        if (why_not := self._core.actuators.why_not(actuator_id, report.name_prefix)) is not None:
            return AdminError(message=why_not)
        if actuator_id not in self._answers:
            names = [each.name for each in report.processes]
            log.info("a supervisor is connected to start and stop instances", processes=names)
        self._leases.renew(actuator_id)
        await self._driver.act(report)
        with anyio.move_on_after(question.wait_s):
            while (desired := self._desired(actuator_id)).revision == question.revision:
                await self._changed().wait()
            return desired
        self._leases.renew(actuator_id)
        return self._desired(actuator_id)

    def _desired(self, actuator_id: str) -> PoolsDesired:
        """Return the desired processes, under a new revision if they have changed."""
        before = self._answers.get(actuator_id)
        processes = self._core.desired_processes(actuator_id)
        if before is None or before.processes != processes:
            # A random first revision differs from any of the previous scheduler's.
            revision = secrets.randbits(31) if before is None else before.revision + 1
            self._answers[actuator_id] = PoolsDesired(revision=revision, processes=processes)
        return self._answers[actuator_id]

    async def run(self) -> None:
        """Report actuators that fall silent to the core, until cancelled."""
        await self._leases.run(self._lost)

    def _lost(self, actuator_id: str) -> None:
        log.warning("the supervisor is silent; no instance is started or stopped until it is back")
        self._answers.pop(actuator_id, None)
        self._driver.post(ActuatorLost(actuator_id))
