"""Run one plan and say whether the laws held."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from pdmesh.errors import RequestRejected
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_testing.dst.clients import MAY_REFUSE, TOO_MANY, SimulatedClient
from pdmesh_testing.dst.data_plane import DataPlane, PieceWeather
from pdmesh_testing.dst.laws import FREE, NO_FAILURE, PROGRESS, Laws
from pdmesh_testing.dst.network import Network
from pdmesh_testing.dst.plan import SCHEDULER, Ask, FaultKind, Plan
from pdmesh_testing.dst.process import ProcessLoop, TooManyTurns
from pdmesh_testing.dst.simulation import Simulation
from pdmesh_testing.dst.surroundings import simulated_surroundings
from pdmesh_testing.dst.timeline import LawBroken, Timeline
from pdmesh_testing.dst.weather import Weather

#: Virtual seconds after the last fault within which all requests must have ended, and all must be free again.
PROGRESS_S = 90.0
FREE_S = 60.0

#: Virtual seconds. Stops that are shorter in total cause no refusal.
WAITED_FOR_S = 35.0

#: How often processes are looked at from outside, virtual seconds.
LOOK_S = 0.25

#: Turns of the event loop, far more than any plan needs: tasks wake each other without end.
MAX_TURNS = 3_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run."""

    plan: Plan
    broken: LawBroken | None
    timeline: list[str]
    #: Number of events that cores handled.
    num_events: int
    virtual_s: float
    num_tokens: int


def run(plan: Plan, *, with_timeline: bool = False) -> Result:
    """Simulate a plan: the same plan gives the same run, to the last bit, whatever the hash seed."""
    agenda = Agenda()
    loop = ProcessLoop(agenda, MAX_TURNS)
    rng = random.Random(plan.seed)
    timeline = Timeline(lambda: agenda.now_s, with_timeline)
    laws = Laws(timeline, is_healthy=not plan.faults)
    network = Network(loop, rng, Weather(delay_s=(0.0002, plan.delay_s), window=plan.window))
    plane = DataPlane(rng, PieceWeather(delay_s=(0.0001, plan.delay_s)))
    network.on_failure = laws.on_failure
    simulation = Simulation(plan, loop, network, plane, rng, laws, timeline)
    loop.set_exception_handler(lambda _loop, context: _unhandled(timeline, context))
    with (
        _collected_at_the_end(),
        simulated_surroundings(loop, network, rng, laws.on_decision, max_outbox=plan.max_outbox, copy_s=plan.copy_s),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        try:
            runner.run(_run(simulation, laws, timeline))
        except TooManyTurns:
            timeline.broke(PROGRESS, f"more than {MAX_TURNS} turns of the event loop")
    num_tokens = sum(len(tokens) for client in simulation.clients for tokens in client.tokens.values())
    return Result(plan, timeline.broken, timeline.lines, laws.num_events, agenda.now_s, num_tokens)


@contextmanager
def _collected_at_the_end() -> Iterator[None]:
    """Collect a run's garbage once: looking for it meanwhile takes a third of the time, and memory is no matter."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        gc.enable()


async def _run(simulation: Simulation, laws: Laws, timeline: Timeline) -> None:
    plan = simulation.plan
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    for name in (SCHEDULER, *plan.gateways, *plan.instances):
        simulation.start(name)
    await asyncio.sleep(_START_S)
    for ask in plan.asks:
        loop.agenda.at(_START_S + ask.at_s, partial(simulation.bring, ask))
    for fault in plan.faults:
        loop.agenda.at(_START_S + fault.at_s, partial(simulation.begin, fault))
    await _until_ended(simulation, laws, timeline, _START_S + plan.quiet_from_s)
    if timeline.broken is None:
        await _probe(simulation, laws, timeline)
    for client in simulation.clients:
        if client.has_ended and timeline.broken is None:
            client.judge(partial(_allows, plan, client))
    await simulation.shut_down()


#: For processes to find each other before the first request.
_START_S = 2.0


async def _until_ended(simulation: Simulation, laws: Laws, timeline: Timeline, quiet_from_s: float) -> None:
    """Return when every client has its end, or a law broke."""
    while timeline.broken is None:
        await asyncio.sleep(LOOK_S)
        laws.check_instances(simulation.processes.values())
        if simulation.now_s < quiet_from_s:
            continue
        for name in simulation.plan.instances:
            simulation.restore(name)
        waiting = [client.name for client in simulation.clients if not client.has_ended]
        if not waiting:
            return
        if simulation.now_s > quiet_from_s + PROGRESS_S:
            timeline.broke(PROGRESS, f"{', '.join(waiting)} wait {PROGRESS_S:g} s after the last fault")


async def _probe(simulation: Simulation, laws: Laws, timeline: Timeline) -> None:
    """Check that the mesh serves again after all faults, and holds nothing when it is idle."""
    plan = simulation.plan
    asks = [
        Ask(at_s=0.0, gateway=name, label=f"probe{index}", prompt=(index, 2, 3, 4, 5, 6), max_tokens=4)
        for index, name in enumerate(plan.gateways)
    ]
    for _ in range(int(PROGRESS_S / LOOK_S)):
        if simulation.is_whole:
            break
        # A process that was asked to stop does so meanwhile.
        await asyncio.sleep(LOOK_S)
    # Services that were just restarted need this time.
    await asyncio.sleep(_START_S)
    probes = [simulation.ask(ask) for ask in asks]
    await _until_ended(simulation, laws, timeline, simulation.now_s)
    for probe in probes:
        if timeline.broken is None and (probe is None or probe.error is not None):
            timeline.broke(PROGRESS, f"a new request after all faults: {probe and probe.error!r}")
    deadline_s = simulation.now_s + FREE_S
    while timeline.broken is None and (held := laws.not_free(simulation.processes.values())):
        if simulation.now_s > deadline_s:
            timeline.broke(FREE, "; ".join(held))
        await asyncio.sleep(LOOK_S)


def _allows(plan: Plan, client: SimulatedClient, error: RequestRejected) -> bool:
    kinds = {fault.kind for fault in plan.faults}
    if error.code == "generation_failed":
        return FaultKind.BREAK in kinds
    if error.code == "restarted_too_often":
        return FaultKind.PIECES in kinds
    if error.status == TOO_MANY and plan.max_queue_entries < len(plan.asks) * max(ask.n for ask in plan.asks):
        # Perhaps only some of the choices found room.
        return True
    if kinds == {FaultKind.STOP} and sum(fault.duration_s for fault in plan.faults) < WAITED_FOR_S:
        # The mesh waits for a stopped process.
        return False
    return not client.tokens and error.status in MAY_REFUSE and bool(kinds)


def _unhandled(timeline: Timeline, context: dict[str, object]) -> None:
    error = context.get("exception")
    timeline.broke(NO_FAILURE, f"{context.get('message')}: {error!r}")
