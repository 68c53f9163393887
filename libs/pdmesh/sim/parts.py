"""Ranges of contexts that are spread, on their way from a simulated instance to the one that holds them next."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.sim.flows import SimulatedFlows
from pdmesh.sim.held import Held


@dataclass(slots=True, eq=False)
class _PartOnItsWay:
    held: Held
    plan: TransferPlan
    num_bytes: int
    began_s: float


class SimulatedParts:
    """Ranges that leave an instance."""

    def __init__(self, flows: SimulatedFlows) -> None:
        self._flows = flows
        self._all: dict[RequestKey, _PartOnItsWay] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def send(self, held: Held, plan: TransferPlan) -> None:
        """Send all of it, while its request decodes."""
        layout = self._flows.layout
        num_bytes = plan.destinations[0].num_blocks * layout.block_size * layout.token_bytes
        self._all[held.key] = _PartOnItsWay(held, plan, num_bytes, self._flows.agenda.now_s)
        self._flows.send(held.key, plan, num_bytes)

    def stop(self, key: RequestKey) -> None:
        """Send no more of it."""
        part = self._all.pop(key, None)
        if part is not None:
            self._flows.drop(key, part.plan)

    def end(self) -> None:
        """The instance is no more."""
        self._all.clear()

    def drained(self, key: RequestKey) -> None:
        """All of it has moved."""
        part = self._all.pop(key)
        duration_s = self._flows.agenda.now_s - part.began_s
        self._flows.land(part.plan, key, duration_s)
        self._flows.untimed.hand_on(part.held, part.num_bytes, duration_s)
