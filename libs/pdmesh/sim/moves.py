"""Running decodes that move away from a modelled instance: they decode on while their KV goes over the links.

When what was there at the start is over, the request leaves at the end of the step that is running; what it has drawn
meanwhile follows, and a little later it goes on at its target. So a stream stands still for as long as the rest takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.core.events import Event, MoveFailed, MoveSent
from pdmesh.model import InstanceProfile, RequestKey, TransferId
from pdmesh.plans import TransferPlan
from pdmesh.sim.agenda import Agenda
from pdmesh.sim.links import FlowId, SimulatedLinks
from pdmesh.sim.residents import Residents
from pdmesh.sim.result import RequestRun

#: The last word takes so long beside its bytes, seconds.
LAST_WORD_S = 0.001


@dataclass(slots=True, eq=False)
class _Departure:
    plan: TransferPlan
    began_s: float
    num_tokens: int  # whose KV has been given to the links
    num_bytes: float
    stands_since_s: float | None = None
    is_committed: bool = False  # the last word of it is on its way: perhaps it goes on at its target


class SimulatedMoves:
    """Moves from an instance. ``stir`` lets it look at its residents between steps; ``release`` gives blocks back."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        residents: Residents,
        runs: dict[RequestKey, RequestRun],
        report: Callable[[Event], None],
        land: Callable[[TransferPlan, RequestKey, float], None],
        stir: Callable[[], None],
        join: Callable[[RequestRun], None],
        release: Callable[[RequestKey], None],
    ) -> None:
        layout = profile.kv_layout
        self._instance_id = profile.instance_id
        self._token_bytes = layout.token_bytes
        self._block_size = layout.block_size
        self._agenda = agenda
        self._links = links
        self._residents = residents
        self._runs = runs
        self._report = report
        self._land = land
        self._stir = stir
        self._join = join
        self._release = release
        self._all: dict[RequestKey, _Departure] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def begin(self, key: RequestKey, plan: TransferPlan) -> None:
        """Granted; nothing if the request ended meanwhile."""
        num_tokens = self._residents.num_tokens(key)
        if num_tokens is None:
            return
        self._all[key] = _Departure(plan, self._agenda.now_s, num_tokens, num_tokens * self._token_bytes)
        self._links.send(self._flow(key, plan), num_tokens * self._token_bytes)

    def drop(self, key: RequestKey) -> None:
        """The request ends here, or is freed."""
        departure = self._all.pop(key, None)
        if departure is not None:
            self._links.drop(self._flow(key, departure.plan))

    def end(self) -> None:
        """The instance is no more."""
        self._all.clear()

    def cancel(self, key: RequestKey, transfer_id: TransferId) -> None:
        """Cancel a move: the request goes on here, unless it may have begun at its target."""
        departure = self._all.get(key)
        is_of = departure is not None and departure.plan.transfer_id == transfer_id
        committed = departure is not None and is_of and departure.is_committed
        if departure is not None and is_of:
            self.drop(key)
            if not committed and not self._residents.stay(key):
                self._join(self._runs[key])
        self._report(MoveFailed(self._instance_id, *key, transfer_id, committed, reason="it is not wanted any more"))

    def drained(self, key: RequestKey) -> None:
        """What was given to the links is over."""
        departure = self._all[key]
        if departure.stands_since_s is not None:
            departure.is_committed = True
            self._agenda.at(self._agenda.now_s + LAST_WORD_S, lambda: self._arrived(key, departure))
            return
        num_tokens = self._residents.num_tokens(key)
        assert num_tokens is not None, f"{key} moves, and does not decode"
        if num_tokens > departure.plan.destinations[0].part.blocks.size * self._block_size:
            del self._all[key]
            transfer_id = departure.plan.transfer_id
            self._report(MoveFailed(self._instance_id, *key, transfer_id, committed=False, reason="it has outgrown it"))
        else:
            self._residents.leave(key)
            self._stir()

    def left(self, key: RequestKey) -> None:
        """Send the rest of a request that takes part in no step any more."""
        departure, run = self._all[key], self._runs[key]
        departure.stands_since_s = self._agenda.now_s
        num_tokens = run.request.num_prompt_tokens + len(run.token_times_s)
        num_bytes = max(1, num_tokens - departure.num_tokens) * self._token_bytes
        departure.num_bytes += num_bytes
        self._links.send(self._flow(key, departure.plan), num_bytes)

    def _flow(self, key: RequestKey, plan: TransferPlan) -> FlowId:
        return key, self._instance_id, plan.destination_ids[0]

    def _arrived(self, key: RequestKey, departure: _Departure) -> None:
        if self._all.get(key) is not departure:
            return
        del self._all[key]
        now_s, plan = self._agenda.now_s, departure.plan
        assert departure.stands_since_s is not None
        self._runs[key].num_moves += 1
        self._land(plan, key, now_s - departure.began_s)
        self._report(
            MoveSent(
                self._instance_id,
                *key,
                plan.transfer_id,
                round(departure.num_bytes),
                now_s - departure.began_s,
                now_s - departure.stands_since_s,
            )
        )
        self._release(key)
