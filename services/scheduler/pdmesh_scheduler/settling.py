"""A scheduler that has just begun has not heard of everybody yet: what is asked of it meanwhile waits for that."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdmesh.core.events import InstanceJoined
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId
from pdmesh_scheduler.actuators import ActuatorDesk
from pdmesh_scheduler.observing import Handled


class Settling:
    """Over once the actuator has been heard of and all its instances are there, or ``until_s``.

    Implements `pdmesh_scheduler.observing.Observer`.
    """

    def __init__(
        self, core: SchedulerCore, actuators: ActuatorDesk, *, until_s: float, clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._actuators = actuators
        self._until_s = until_s
        self._clock = clock
        self._news = anyio.Event()

    def observe(self, handled: Handled) -> None:
        if isinstance(handled.event, InstanceJoined):
            self.tell()

    def tell(self) -> None:
        """Somebody was heard of."""
        self._news.set()
        self._news = anyio.Event()

    async def wait(self, instance_id: InstanceId | None = None) -> None:
        """Until it is over, or the instance is there if one is named."""
        with anyio.move_on_after(max(0.0, self._until_s - self._clock())):
            while not self._is_over(instance_id):
                await self._news.wait()

    def _is_over(self, instance_id: InstanceId | None) -> bool:
        there = {view.instance_id for view in self._core.instances}
        followed = self._actuators.instance_ids
        return instance_id in there or (followed is not None and there.issuperset(followed))
