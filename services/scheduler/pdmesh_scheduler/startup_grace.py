"""The time after a scheduler's start in which some instances may not have registered, and operations wait."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdmesh.core.events import InstanceJoined
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.core.scheduler import SchedulerCore
from pdmesh_scheduler.observing import Handled

#: Seconds in which instances register if an actuator reports their processes. Commands wait longer for their first
#: answer.
REGISTER_S = 5.0


class StartupGrace:
    """Grace that ends once an actuator is connected and all instances it reports have registered.

    Without an actuator the grace ends at ``until_s``, with one `REGISTER_S` later at the latest. Implements
    `pdmesh_scheduler.observing.Observer`.
    """

    def __init__(self, core: SchedulerCore, *, until_s: float, clock: Callable[[], float]) -> None:
        self._core = core
        self._until_s = until_s
        self._clock = clock
        self._news = anyio.Event()

    def observe(self, handled: Handled) -> None:
        """Check again whether the grace is over if an instance has joined or an actuator has reported."""
        if isinstance(handled.event, InstanceJoined | ActuatorReported):
            self._news.set()
            self._news = anyio.Event()

    async def wait(self) -> None:
        """Wait until the grace is over."""
        while (left_s := self._left_s()) > 0:
            with anyio.move_on_after(left_s):
                await self._news.wait()

    def _left_s(self) -> float:
        """Return an upper bound of the seconds left; 0 once an actuator is here and all its instances are."""
        if not self._core.actuators.there:
            return self._until_s - self._clock()
        if not self._core.actuators.away:
            return 0.0
        return self._until_s + REGISTER_S - self._clock()
