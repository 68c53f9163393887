"""What all instances of a simulation have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.core.events import Event
from pdmesh.model import InstanceId, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.links import SimulatedLinks
from pdmesh_lab.sim.result import RequestRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SimContext:
    """What all instances of a simulation have in common."""

    agenda: Agenda
    links: SimulatedLinks
    exchange: SimulatedExchange
    runs: dict[RequestKey, RequestRun]  # keys: the newest epochs
    report: Callable[[Event], None]  # takes an event for the scheduler
    land: Callable[[TransferPlan, RequestKey, float], None]
    land_ranges: Callable[[TransferPlan, RequestKey, int, float], None]
    want_turn: Callable[[InstanceId], None]  # an instance asks to `begin` after all else of this instant
    max_decode_steps: int
    parallel_step_s: float = 0.0
    part_exchange_s: float = 0.0  # seconds of a layer
