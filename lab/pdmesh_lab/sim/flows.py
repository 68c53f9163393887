"""KV on its way from a simulated instance to another one, whatever it goes there for."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.instance.effects import CopyEvent
from pdmesh.model import InstanceProfile, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.links import FlowId, SimulatedLinks


class SimulatedFlows:
    """What leaves an instance: for each request whose KV it sends one flow over its links.

    ``tell`` takes events of copies. ``land`` hears of transfers that moved whole, ``land_ranges`` of how many
    tokens have moved of a prompt that gives ranges back while it is computed.
    """

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        tell: Callable[[CopyEvent], None],
        land: Callable[[TransferPlan, RequestKey, float], None],
        land_ranges: Callable[[TransferPlan, RequestKey, int, float], None],
    ) -> None:
        self.layout = profile.kv_layout
        self.agenda = agenda
        self.tell = tell
        self.land, self.land_ranges = land, land_ranges
        self._instance_id = profile.instance_id
        self._links = links

    def send(self, key: RequestKey, plan: TransferPlan, num_bytes: float) -> None:
        """Give so many more bytes to the links."""
        self._links.send(self._flow(key, plan), num_bytes)

    def drop(self, key: RequestKey, plan: TransferPlan) -> float:
        """Send no more of it; the number of bytes that had not moved."""
        return self._links.drop(self._flow(key, plan))

    def alone_s(self, plan: TransferPlan, num_bytes: float) -> float:
        """Return the time that so much takes when nothing else moves."""
        return self._links.alone_s(self._instance_id, plan.destination_ids[0], num_bytes)

    def _flow(self, key: RequestKey, plan: TransferPlan) -> FlowId:
        return key, self._instance_id, plan.destination_ids[0]
