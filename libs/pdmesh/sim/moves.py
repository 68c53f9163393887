"""Running decodes that move away from a simulated instance: they decode on while their KV goes over the links.

When what was there at the start is over, the request leaves at the end of the step that is running; what it has drawn
meanwhile follows, and a little later it goes on at its target. So a stream stands still for as long as the rest takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.model import InstanceProfile, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.sim.agenda import Agenda
from pdmesh.sim.held import Held
from pdmesh.sim.links import FlowId, SimulatedLinks
from pdmesh.sim.result import RequestRun
from pdmesh.sim.untimed import UntimedInstance

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
    """Moves from an instance. ``land`` hears of those that moved whole."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        untimed: UntimedInstance,
        runs: dict[RequestKey, RequestRun],
        land: Callable[[TransferPlan, RequestKey, float], None],
    ) -> None:
        layout = profile.kv_layout
        self._instance_id = profile.instance_id
        self._token_bytes = layout.token_bytes
        self._block_size = layout.block_size
        self._agenda = agenda
        self._links = links
        self._untimed = untimed
        self._runs = runs
        self._land = land
        self._all: dict[RequestKey, _Departure] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def send(self, held: Held, plan: TransferPlan) -> None:
        """Send what is there now."""
        num_tokens = self._untimed.residents.num_tokens(held.key)
        num_bytes = num_tokens * self._token_bytes
        self._all[held.key] = _Departure(held, plan, self._agenda.now_s, num_tokens, num_bytes)
        self._links.send(self._flow(held.key, plan), num_bytes)

    def stop(self, key: RequestKey) -> None:
        """The request ends here, is freed, or stays."""
        departure = self._all.pop(key, None)
        if departure is not None:
            self._links.drop(self._flow(key, departure.plan))

    def end(self) -> None:
        """The instance is no more."""
        self._all.clear()

    def drained(self, key: RequestKey) -> None:
        """What was given to the links is over."""
        departure = self._all[key]
        if departure.held.is_frozen:
            self._untimed.commit_move(departure.held)
            self._agenda.at(self._agenda.now_s + LAST_WORD_S, lambda: self._arrived(key, departure))
            return
        num_tokens = self._untimed.residents.num_tokens(key)
        if num_tokens > departure.plan.destinations[0].part.blocks.size * self._block_size:
            self._untimed.fail_move(departure.held, "it has outgrown it")
        else:
            self._untimed.freeze(departure.held)

    def left(self, held: Held) -> None:
        """Send the rest of a request that takes part in no step any more."""
        departure = self._all[held.key]
        departure.stands_since_s = self._agenda.now_s
        num_bytes = max(1, held.num_tokens - departure.num_tokens) * self._token_bytes
        departure.num_bytes += num_bytes
        self._links.send(self._flow(held.key, departure.plan), num_bytes)

    def _flow(self, key: RequestKey, plan: TransferPlan) -> FlowId:
        return key, self._instance_id, plan.destination_ids[0]

    def _arrived(self, key: RequestKey, departure: _Departure) -> None:
        if self._all.get(key) is not departure:
            return
        del self._all[key]
        now_s, held = self._agenda.now_s, departure.held
        self._runs[key].num_moves += 1
        duration_s, frozen_s = now_s - departure.began_s, now_s - departure.stands_since_s
        self._land(departure.plan, key, duration_s)
        if not held.is_given_up:
            self._untimed.end_move(held, round(departure.num_bytes), duration_s, frozen_s)
