"""Running decodes that move away from a simulated instance, and decode on while their KV goes over the links.

When the KV present at the start has moved, the request leaves at the end of the running step. The KV of tokens drawn
meanwhile follows, and a little later the request continues at its target. So the stream pauses for the time of the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.instance.effects import CopyCaughtUp, CopyCommitted, CopyFailed, CopySent
from pdmesh.instance.residents import Residents
from pdmesh.instance.sequence import Sequence
from pdmesh.model import RequestKey, Then
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.result import RequestRun

#: Seconds that the final message takes beside its bytes.
LAST_WORD_S = 0.001


@dataclass(slots=True, eq=False)
class _Departure:
    sequence: Sequence
    plan: TransferPlan
    began_s: float
    num_tokens: int  # given to the links
    num_bytes: float
    stands_since_s: float = 0.0


class SimulatedMoves:
    """Moves of decodes from an instance."""

    def __init__(self, flows: SimulatedFlows, runs: dict[RequestKey, RequestRun], residents: Residents) -> None:
        self._flows = flows
        self._residents = residents
        self._block_size = flows.layout.block_size
        self._runs = runs
        self._all: dict[RequestKey, _Departure] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def send(self, sequence: Sequence, plan: TransferPlan) -> None:
        """Send the KV of all tokens drawn so far."""
        num_tokens = self._residents.num_tokens(sequence.key)
        num_bytes = num_tokens * self._flows.layout.token_bytes
        self._all[sequence.key] = _Departure(sequence, plan, self._flows.agenda.now_s, num_tokens, num_bytes)
        self._flows.send(sequence.key, plan, num_bytes)

    def stop(self, key: RequestKey) -> None:
        """Stop the move of a request that ends, is freed, or stays."""
        departure = self._all.pop(key, None)
        if departure is not None:
            self._flows.drop(key, departure.plan)

    def end(self) -> None:
        """Forget all moves, because the instance is dead."""
        self._all.clear()

    def drained(self, key: RequestKey) -> None:
        """Note that all KV given to the links has moved.

        Report that the copy has caught up, or that it failed because the request has outgrown its blocks. If the
        request is frozen, commit and land the move after `LAST_WORD_S`.
        """
        departure = self._all[key]
        move = departure.sequence.move
        if move is not None and move.is_frozen:
            self._flows.tell(CopyCommitted(key))
            self._flows.agenda.at(self._flows.agenda.now_s + LAST_WORD_S, lambda: self._arrived(key, departure))
            return
        num_tokens = self._residents.num_tokens(key)
        if num_tokens > departure.plan.destinations[0].part.blocks.size * self._block_size:
            self._flows.tell(CopyFailed(key, Then.DECODE, "it has outgrown its blocks at the destination"))
        else:
            self._flows.tell(CopyCaughtUp(key))

    def left(self, sequence: Sequence) -> None:
        """Send the rest of a request that no longer takes part in steps."""
        departure = self._all[sequence.key]
        departure.stands_since_s = self._flows.agenda.now_s
        num_bytes = max(1, sequence.num_tokens - departure.num_tokens) * self._flows.layout.token_bytes
        departure.num_bytes += num_bytes
        self._flows.send(sequence.key, departure.plan, num_bytes)

    def _arrived(self, key: RequestKey, departure: _Departure) -> None:
        if self._all.get(key) is not departure:
            return
        del self._all[key]
        now_s, move = self._flows.agenda.now_s, departure.sequence.move
        self._runs[key].num_moves += 1
        duration_s, frozen_s = now_s - departure.began_s, now_s - departure.stands_since_s
        self._flows.land(departure.plan, key, duration_s)
        if move is not None and not move.is_abandoned:
            self._flows.tell(CopySent(key, Then.DECODE, round(departure.num_bytes), duration_s, frozen_s))
