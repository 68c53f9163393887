"""KV that leaves a simulated instance, for any purpose."""

from __future__ import annotations

from pdmesh.instance.residents import Residents
from pdmesh.instance.sequence import Sequence
from pdmesh.model import RequestKey, Then
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.departures import SimulatedDepartures
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.moves import SimulatedMoves
from pdmesh_lab.sim.result import RequestRun
from pdmesh_lab.sim.whole_flows import fetches, part_moves


class SimulatedCopies:
    """The copies that leave one instance, each handled by its kind."""

    def __init__(self, flows: SimulatedFlows, runs: dict[RequestKey, RequestRun], residents: Residents) -> None:
        self.departures = SimulatedDepartures(flows)
        self._moves = SimulatedMoves(flows, runs, residents)
        self.fetches = fetches(flows)
        self._parts = part_moves(flows)

    def send(self, sequence: Sequence, transfer: TransferPlan) -> None:
        match transfer.then:
            case Then.HOLD:
                self._parts.send(sequence, transfer)
            case Then.KEEP:
                self.fetches.send(sequence, transfer)
            case Then.DECODE if sequence.move is not None:
                self._moves.send(sequence, transfer)
            case Then.DECODE:
                self.departures.send(sequence, transfer)

    def send_rest(self, sequence: Sequence) -> None:
        """Send the rest of a moving sequence that no longer takes part in steps."""
        self._moves.left(sequence)

    def stop(self, key: RequestKey, transfer: TransferPlan) -> None:
        """Stop sending a transfer, for now or for good."""
        match transfer.then:
            case Then.HOLD:
                self._parts.stop(key)
            case Then.KEEP:
                self.fetches.stop(key)
            case Then.DECODE if key in self._moves:
                self._moves.stop(key)
            case Then.DECODE:
                self.departures.stop(key, transfer)

    def forget(self, key: RequestKey) -> bool:
        """Stop all sending of a sequence. Return whether its prompt was computed here."""
        self._moves.stop(key)
        self._parts.stop(key)
        self.fetches.stop(key)
        return self.departures.forget(key) is not None

    def end(self) -> None:
        """Forget all copies, because the instance is dead."""
        self._moves.end()
        self.fetches.end()
        self._parts.end()

    def drained(self, key: RequestKey) -> None:
        """Note that all KV of a sequence that may move so far has moved."""
        if key in self._moves:
            self._moves.drained(key)
        elif key in self.fetches:
            self.fetches.drained(key)
        elif key in self._parts:
            self._parts.drained(key)
        else:
            self.departures.drained(key)
