"""KV that leaves a simulated instance whole, in one flow for each request: fetched granules, and ranges of contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.model import GRANULE_TOKENS, RequestKey, TransferPurpose
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.held import Held


@dataclass(slots=True, eq=False)
class _OnItsWay:
    held: Held
    plan: TransferPlan
    num_bytes: int
    began_s: float


class WholeFlows:
    """``num_bytes`` says how much there is of a request; ``sent`` hears of what has moved, and how long it took."""

    def __init__(
        self, flows: SimulatedFlows, num_bytes: Callable[[Held], int], sent: Callable[[Held, int, float], object]
    ) -> None:
        self.num_bytes = num_bytes
        self._flows = flows
        self._sent = sent
        self._all: dict[RequestKey, _OnItsWay] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def send(self, held: Held, plan: TransferPlan) -> None:
        """Send all of it."""
        num_bytes = self.num_bytes(held)
        self._all[held.key] = _OnItsWay(held, plan, num_bytes, self._flows.agenda.now_s)
        self._flows.send(held.key, plan, num_bytes)

    def stop(self, key: RequestKey) -> None:
        """Send no more of it."""
        sending = self._all.pop(key, None)
        if sending is not None:
            self._flows.drop(key, sending.plan)

    def end(self) -> None:
        """The instance is no more."""
        self._all.clear()

    def drained(self, key: RequestKey) -> None:
        """All of it has moved."""
        sending = self._all.pop(key)
        duration_s = self._flows.agenda.now_s - sending.began_s
        self._flows.land(sending.plan, key, duration_s)
        self._sent(sending.held, sending.num_bytes, duration_s)


def fetches(flows: SimulatedFlows) -> WholeFlows:
    """Return the fetches that an instance is the source of: what their destinations lack."""

    def num_bytes(held: Held) -> int:
        assert held.transfer is not None
        return (len(held.chain) - held.transfer.num_reused_granules) * GRANULE_TOKENS * flows.layout.token_bytes

    return WholeFlows(flows, num_bytes, lambda held, num, duration_s: flows.untimed.send(held, num, duration_s, 0.0))


def part_moves(flows: SimulatedFlows) -> WholeFlows:
    """Return the ranges of contexts that an instance hands on, while their requests decode elsewhere, or here.

    Of a range that was lost these are its tokens, of 4 bytes.
    """

    def num_bytes(held: Held) -> int:
        assert held.handing is not None
        is_lost = held.handing.purpose is TransferPurpose.LOST_PART
        num_tokens = held.handing.destinations[0].num_blocks * flows.layout.block_size
        return num_tokens * (4 if is_lost else flows.layout.token_bytes)

    return WholeFlows(flows, num_bytes, flows.untimed.hand_on)
