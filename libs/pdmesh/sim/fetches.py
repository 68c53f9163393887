"""Granules that a simulated instance keeps, on their way to another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.model import GRANULE_TOKENS, InstanceProfile, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.sim.agenda import Agenda
from pdmesh.sim.held import Held
from pdmesh.sim.links import FlowId, SimulatedLinks
from pdmesh.sim.untimed import UntimedInstance


@dataclass(slots=True, eq=False)
class _Copy:
    held: Held
    plan: TransferPlan
    num_bytes: int
    began_s: float


class SimulatedFetches:
    """Fetches that an instance is the source of. ``land`` hears of those that moved whole."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        untimed: UntimedInstance,
        land: Callable[[TransferPlan, RequestKey, float], None],
    ) -> None:
        self._instance_id = profile.instance_id
        self._token_bytes = profile.kv_layout.token_bytes
        self._agenda = agenda
        self._links = links
        self._untimed = untimed
        self._land = land
        self._all: dict[RequestKey, _Copy] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def num_bytes(self, held: Held) -> int:
        """Bytes that come to where a fetch goes."""
        assert held.transfer is not None
        return (len(held.chain) - held.transfer.num_reused_granules) * GRANULE_TOKENS * self._token_bytes

    def send(self, held: Held, plan: TransferPlan) -> None:
        """Send what its destination lacks."""
        copy = self._all[held.key] = _Copy(held, plan, self.num_bytes(held), self._agenda.now_s)
        self._links.send(self._flow(held.key, plan), copy.num_bytes)

    def stop(self, key: RequestKey) -> None:
        """Send no more of it."""
        copy = self._all.pop(key, None)
        if copy is not None:
            self._links.drop(self._flow(key, copy.plan))

    def drained(self, key: RequestKey) -> None:
        """All of it has moved."""
        copy = self._all.pop(key)
        duration_s = self._agenda.now_s - copy.began_s
        self._land(copy.plan, key, duration_s)
        self._untimed.send(copy.held, copy.num_bytes, duration_s, 0.0)

    def _flow(self, key: RequestKey, plan: TransferPlan) -> FlowId:
        return key, self._instance_id, plan.destination_ids[0]
