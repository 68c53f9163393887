"""State that all instances of a simulation share."""

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
    """State that all instances of a simulation share.

    `runs` are found by the newest epochs' keys. `report` takes an event for the scheduler. An instance calls
    `want_turn` so that its `begin` is called after everything else of this instant. `part_exchange_s` is in seconds per
    layer.
    """

    agenda: Agenda
    links: SimulatedLinks
    exchange: SimulatedExchange
    runs: dict[RequestKey, RequestRun]
    report: Callable[[Event], None]
    land: Callable[[TransferPlan, RequestKey, float], None]
    land_ranges: Callable[[TransferPlan, RequestKey, int, float], None]
    want_turn: Callable[[InstanceId], None]
    max_decode_steps: int
    parallel_step_s: float = 0.0
    part_exchange_s: float = 0.0
