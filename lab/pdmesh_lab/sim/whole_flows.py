"""KV that leaves a simulated instance whole, in one flow for each request: fetched granules, and ranges of contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.instance.effects import CopySent
from pdmesh.instance.sequence import Sequence
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import RequestKey, Then
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.flows import SimulatedFlows


@dataclass(slots=True, eq=False)
class _OnItsWay:
    sequence: Sequence
    plan: TransferPlan
    num_bytes: int
    began_s: float


class WholeFlows:
    """Copies of one kind. ``num_bytes`` returns a copy's size; ``then`` is the receiver's use of the KV."""

    def __init__(self, flows: SimulatedFlows, then: Then, num_bytes: Callable[[Sequence, TransferPlan], int]) -> None:
        self.num_bytes = num_bytes
        self._flows = flows
        self._then = then
        self._all: dict[RequestKey, _OnItsWay] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def send(self, sequence: Sequence, plan: TransferPlan) -> None:
        """Send all KV of a transfer."""
        num_bytes = self.num_bytes(sequence, plan)
        self._all[sequence.key] = _OnItsWay(sequence, plan, num_bytes, self._flows.agenda.now_s)
        self._flows.send(sequence.key, plan, num_bytes)

    def stop(self, key: RequestKey) -> None:
        """Stop sending to the receiver."""
        sending = self._all.pop(key, None)
        if sending is not None:
            self._flows.drop(key, sending.plan)

    def end(self) -> None:
        """Forget all copies, because the instance is dead."""
        self._all.clear()

    def drained(self, key: RequestKey) -> None:
        """Land a copy that has moved whole, and report it as sent."""
        sending = self._all.pop(key)
        duration_s = self._flows.agenda.now_s - sending.began_s
        self._flows.land(sending.plan, key, duration_s)
        self._flows.tell(CopySent(key, self._then, sending.num_bytes, duration_s))


def fetches(flows: SimulatedFlows) -> WholeFlows:
    """Return the fetches of granules whose source is an instance, without granules that the destinations have."""

    def num_bytes(sequence: Sequence, plan: TransferPlan) -> int:
        return (len(sequence.chain) - plan.num_reused_granules) * GRANULE_TOKENS * flows.layout.token_bytes

    return WholeFlows(flows, Then.KEEP, num_bytes)


def part_moves(flows: SimulatedFlows) -> WholeFlows:
    """Return the ranges of contexts that leave an instance while their requests decode.

    Of a range to be computed anew, only the tokens move, 4 bytes each.
    """

    def num_bytes(_: Sequence, plan: TransferPlan) -> int:
        num_tokens = plan.destinations[0].num_blocks * flows.layout.block_size
        return num_tokens * (4 if plan.computes else flows.layout.token_bytes)

    return WholeFlows(flows, Then.HOLD, num_bytes)
