"""KV on its way from a simulated instance to another one, for any purpose."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.instance.effects import CopyEvent
from pdmesh.model import InstanceProfile, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.links import FlowId, SimulatedLinks


class SimulatedFlows:
    """Flows that leave an instance, one for each request whose KV it sends.

    ``tell`` takes events of copies. ``land`` is called for transfers that moved whole. ``land_ranges`` is called with
    the number of tokens that have moved of a prompt whose ranges leave while it is computed.
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
        """Give the links ``num_bytes`` more to move."""
        self._links.send(self._flow(key, plan), num_bytes)

    def drop(self, key: RequestKey, plan: TransferPlan) -> float:
        """Stop a transfer's flow. Return the number of bytes that had not moved."""
        return self._links.drop(self._flow(key, plan))

    def alone_s(self, plan: TransferPlan, num_bytes: float) -> float:
        """Return the time that ``num_bytes`` take while nothing else moves."""
        return self._links.alone_s(self._instance_id, plan.destination_ids[0], num_bytes)

    def _flow(self, key: RequestKey, plan: TransferPlan) -> FlowId:
        return key, self._instance_id, plan.destination_ids[0]
