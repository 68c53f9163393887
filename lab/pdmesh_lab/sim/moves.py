"""Running decodes that move away from a simulated instance: they decode on while their KV goes over the links.

When what was there at the start is over, the request leaves at the end of the step that is running; what it has drawn
meanwhile follows, and a little later it goes on at its target. So a stream stands still for as long as the rest takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import RequestKey
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.held import Held
from pdmesh_lab.sim.result import RequestRun

#: The last word takes so long beside its bytes, seconds.
LAST_WORD_S = 0.001


@dataclass(slots=True, eq=False)
class _Departure:
    held: Held
    plan: TransferPlan
    began_s: float
    num_tokens: int  # whose KV has been given to the links
    num_bytes: float
    stands_since_s: float = 0.0


class SimulatedMoves:
    """Moves from an instance."""

    def __init__(self, flows: SimulatedFlows, runs: dict[RequestKey, RequestRun]) -> None:
        self._flows = flows
        self._block_size = flows.layout.block_size
        self._runs = runs
        self._all: dict[RequestKey, _Departure] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def send(self, held: Held, plan: TransferPlan) -> None:
        """Send what is there now."""
        num_tokens = self._flows.untimed.residents.num_tokens(held.key)
        num_bytes = num_tokens * self._flows.layout.token_bytes
        self._all[held.key] = _Departure(held, plan, self._flows.agenda.now_s, num_tokens, num_bytes)
        self._flows.send(held.key, plan, num_bytes)

    def stop(self, key: RequestKey) -> None:
        """The request ends here, is freed, or stays."""
        departure = self._all.pop(key, None)
        if departure is not None:
            self._flows.drop(key, departure.plan)

    def end(self) -> None:
        """The instance is no more."""
        self._all.clear()

    def drained(self, key: RequestKey) -> None:
        """What was given to the links is over."""
        departure = self._all[key]
        if departure.held.is_frozen:
            self._flows.untimed.commit_move(departure.held)
            self._flows.agenda.at(self._flows.agenda.now_s + LAST_WORD_S, lambda: self._arrived(key, departure))
            return
        num_tokens = self._flows.untimed.residents.num_tokens(key)
        if num_tokens > departure.plan.destinations[0].part.blocks.size * self._block_size:
            self._flows.untimed.fail_move(departure.held, "it has outgrown it")
        else:
            self._flows.untimed.freeze(departure.held)

    def left(self, held: Held) -> None:
        """Send the rest of a request that takes part in no step any more."""
        departure = self._all[held.key]
        departure.stands_since_s = self._flows.agenda.now_s
        num_bytes = max(1, held.num_tokens - departure.num_tokens) * self._flows.layout.token_bytes
        departure.num_bytes += num_bytes
        self._flows.send(held.key, departure.plan, num_bytes)

    def _arrived(self, key: RequestKey, departure: _Departure) -> None:
        if self._all.get(key) is not departure:
            return
        del self._all[key]
        now_s, held = self._flows.agenda.now_s, departure.held
        self._runs[key].num_moves += 1
        duration_s, frozen_s = now_s - departure.began_s, now_s - departure.stands_since_s
        self._flows.land(departure.plan, key, duration_s)
        if not held.is_given_up:
            self._flows.untimed.end_move(held, round(departure.num_bytes), duration_s, frozen_s)
