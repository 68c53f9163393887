"""Granules that a simulated instance keeps, on their way to another one."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import GRANULE_TOKENS, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.sim.flows import SimulatedFlows
from pdmesh.sim.held import Held


@dataclass(slots=True, eq=False)
class _Copy:
    held: Held
    plan: TransferPlan
    num_bytes: int
    began_s: float


class SimulatedFetches:
    """Fetches that an instance is the source of."""

    def __init__(self, flows: SimulatedFlows) -> None:
        self._flows = flows
        self._all: dict[RequestKey, _Copy] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def num_bytes(self, held: Held) -> int:
        """Bytes that come to where a fetch goes."""
        assert held.transfer is not None
        return (len(held.chain) - held.transfer.num_reused_granules) * GRANULE_TOKENS * self._flows.layout.token_bytes

    def send(self, held: Held, plan: TransferPlan) -> None:
        """Send what its destination lacks."""
        copy = self._all[held.key] = _Copy(held, plan, self.num_bytes(held), self._flows.agenda.now_s)
        self._flows.send(held.key, plan, copy.num_bytes)

    def stop(self, key: RequestKey) -> None:
        """Send no more of it."""
        copy = self._all.pop(key, None)
        if copy is not None:
            self._flows.drop(key, copy.plan)

    def drained(self, key: RequestKey) -> None:
        """All of it has moved."""
        copy = self._all.pop(key)
        duration_s = self._flows.agenda.now_s - copy.began_s
        self._flows.land(copy.plan, key, duration_s)
        self._flows.untimed.send(copy.held, copy.num_bytes, duration_s, 0.0)
