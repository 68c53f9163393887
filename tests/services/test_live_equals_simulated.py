"""The scheduler service, on virtual time with modelled workers, decides and serves as the simulator does.

The service is the real one but for gRPC itself: streams with their registrations and leases, frames encoded and
decoded, the driver with its inbox and its timer, records and metrics. At the other end of each worker's stream is the
simulator's instance.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pdmesh.config import SchedulerConfig, SecurityConfig
from pdmesh.core.commands import (
    Command,
    ExpectCopy,
    ForgetRequest,
    FreeKv,
    Hold,
    Outcome,
    Reject,
    Restart,
    SendCopy,
    StopCopy,
    WakeAt,
)
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.events import Event, InstanceEvent, KvExpected, LoadReported
from pdmesh.core.requests.request_histories import RequestHistories
from pdmesh.decisions import Decision
from pdmesh.eventlog import EventLogReader, EventLogWriter, Header, replay
from pdmesh.model import (
    NO_TRANSFER,
    Epoch,
    GatewayId,
    InstanceId,
    InstanceProfile,
    Request,
    RequestKey,
    SamplingParams,
    request_id_of,
)
from pdmesh.plans import TransferPlan
from pdmesh.policy.bundles import BUNDLE_NAMES
from pdmesh.policy.config import PolicyConfig
from pdmesh.telemetry.tracing import Tracing
from pdmesh.wire.link import FrameLink
from pdmesh.wire.messages import (
    CommandMessage,
    EventMessage,
    GatewayDown,
    GatewayUp,
    Generation,
    PeersHere,
    RegisterGateway,
    RegisterWorker,
    SchedulerHeartbeat,
    Submit,
    WelcomeWorker,
    WorkerDown,
    WorkerUp,
    pack_token_ids,
)
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.context import SimContext
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.instance import SimInstance
from pdmesh_lab.sim.links import FlowId, SimulatedLinks
from pdmesh_lab.sim.recorded import recorded_run
from pdmesh_lab.sim.result import RequestRun
from pdmesh_lab.sim.simulator import GATEWAY, SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_scheduler.activity import ActivityFeed
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.gateway_streams import GatewayStreams
from pdmesh_scheduler.history import MeshHistory
from pdmesh_scheduler.mesh_check import MeshCheck
from pdmesh_scheduler.peer_streams import Leases, Peers
from pdmesh_scheduler.request_records import RequestRecords
from pdmesh_scheduler.scheduler_metrics import SchedulerMetrics
from pdmesh_scheduler.scheduler_spans import SchedulerSpans
from pdmesh_scheduler.session_statuses import SessionStatuses
from pdmesh_scheduler.tenants import TenantUsage
from pdmesh_scheduler.worker_streams import WorkerStreams
from pdmesh_testing.core import regrouped
from pdmesh_testing.decisions import RememberingCore
from pdmesh_testing.examples import slow_beyond
from pdmesh_testing.sim import UNEVEN_MODEL, InstanceCounts, a_workload, tiny_mesh
from pdmesh_testing.virtual_time import VirtualTimeLoop

POLICY = PolicyConfig(
    chunk_tokens=16, latency=UNEVEN_MODEL, long_prompt_tokens=200, prefill_step_s=0.1, local_step_share=4.0
)
CONFIG = CoreConfig(policy=POLICY, max_queue_s=2.0)
SIM_CONFIG = SimConfig(port_bytes_per_s=1e6)
MESHES: list[InstanceCounts] = [{"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 2}, {"mixed": 2}]
SEED = 3


@pytest.fixture(autouse=True)
def ids_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service takes none of others; the simulator has no reject cache."""
    monkeypatch.setattr("pdmesh_lab.sim.simulator.RequestId", partial(request_id_of, GATEWAY))


def an_overload(seed: int) -> list[Arrival]:
    """More than the mesh can take: some wait in vain."""
    return a_workload(seed, num_requests=100, requests_per_s=6.0)


def profiles_of(mesh: InstanceCounts) -> list[InstanceProfile]:
    shape = tiny_mesh(mesh, num_kv_tokens=2048, num_transfer_backends=1)
    return [replace(profile, data_address=profile.instance_id.encode()) for profile, _ in shape.instances(UNEVEN_MODEL)]


# --- the service's side ---


class Wire:
    """One direction of a stream, between two `FrameLink`."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._arrived = anyio.Event()

    def put(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._arrived.set()

    async def write(self, frame: bytes) -> None:
        self.put(frame)

    async def read(self) -> bytes:
        while not self._frames:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._frames.popleft()


class OrderedLink(FrameLink[WorkerDown, WorkerUp]):
    """The scheduler's end of a worker's stream. What it tells several workers at one instant arrives in that order,
    as in the simulator; in frames of a stream each, which worker answers first is anybody's guess.
    """

    def __init__(self, mesh: ModelledMesh, up: Wire, down: Wire) -> None:
        super().__init__(write=down.write, read=up.read, receive_type=WorkerUp)
        self._on_way = mesh.on_way
        self._down = down

    def post(self, message: WorkerDown) -> None:
        self._on_way.append(partial(self._down.put, msgspec.msgpack.encode([message])))


class CountingCore(RememberingCore):
    """Sets ``all_ended`` when so many requests have."""

    def __init__(self, config: CoreConfig, bundle: str, num_requests: int) -> None:
        super().__init__(config, bundle, SEED)
        self._num_open = num_requests
        self.all_ended = anyio.Event()

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = super().handle(event, now_s)
        ended = [command for command in commands if isinstance(command, ForgetRequest)]
        self._num_open -= sum(command.outcome is not Outcome.RETRACTED for command in ended)
        if not self._num_open:
            self.all_ended.set()
        return commands


class ModelledMesh:
    """Everything behind the scheduler: simulated instances on an agenda, and who is asked to begin a step."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.runs: dict[RequestKey, RequestRun] = {}
        self.workers: dict[InstanceId, Worker] = {}
        self.links = SimulatedLinks(self.agenda, SIM_CONFIG.port_bytes_per_s, self._drained)
        self.exchange = SimulatedExchange(self.agenda, self.links)
        self.turns: dict[InstanceId, None] = {}
        self.on_way = deque[Callable[[], None]]()  # messages to workers

    def settle(self) -> bool:
        """Deliver one message. If all that is due now has been told and decided, let one instance begin, if one may."""
        if self.on_way:
            self.on_way.popleft()()
            return True
        if not self.turns:
            return False
        instance_id = next(iter(self.turns))
        del self.turns[instance_id]
        self.workers[instance_id].instance.begin()
        return True

    def want_turn(self, instance_id: InstanceId) -> None:
        self.turns[instance_id] = None

    def land(self, plan: TransferPlan, key: RequestKey, duration_s: float) -> None:
        self.workers[plan.destination_ids[0]].instance.land(key, duration_s)

    def _drained(self, flow: FlowId) -> None:
        if not self.exchange.drained(flow):
            key, sender_id, _ = flow
            self.workers[sender_id].instance.copies.drained(key)


class Worker:
    """A simulated instance behind a worker's stream."""

    def __init__(self, profile: InstanceProfile, mesh: ModelledMesh) -> None:
        self._mesh = mesh
        up, down = Wire(), Wire()
        self.server = OrderedLink(mesh, up, down)
        self._link = FrameLink[WorkerUp, WorkerDown](write=up.write, read=down.read, receive_type=WorkerDown)
        self.profile = profile
        context = SimContext(
            agenda=mesh.agenda,
            links=mesh.links,
            exchange=mesh.exchange,
            runs=mesh.runs,
            report=self._report,
            land=mesh.land,
            land_ranges=lambda plan, key, num_tokens, duration_s: None,
            want_turn=mesh.want_turn,
            max_decode_steps=SIM_CONFIG.max_decode_steps,
        )
        self.instance = SimInstance(profile, UNEVEN_MODEL, context)

    async def run(self, heartbeat_s: float, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self._link.post(RegisterWorker(profile=self.profile, residents=()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._link.pump)
            self._beat_in(heartbeat_s)
            async for messages in self._link.frames():
                for message in messages:
                    if isinstance(message, WelcomeWorker):
                        task_status.started()
                    elif isinstance(message, CommandMessage):
                        self.instance.take(message.command)
                    else:
                        assert isinstance(message, SchedulerHeartbeat | PeersHere), message

    def _beat(self, interval_s: float) -> None:
        self._report(LoadReported(self.profile.instance_id, self.profile.num_blocks, 0, 0, 0))
        self._beat_in(interval_s)

    def _beat_in(self, interval_s: float) -> None:
        self._mesh.agenda.at(self._mesh.agenda.now_s + interval_s, partial(self._beat, interval_s))

    def _report(self, event: Event) -> None:
        assert isinstance(event, InstanceEvent)
        self._link.post(EventMessage.of(event))


class Gateway:
    """Submits each request of a workload when it arrives."""

    def __init__(self, arrivals: Sequence[Arrival], mesh: ModelledMesh) -> None:
        up, down = Wire(), Wire()
        self._arrivals = arrivals
        self._mesh = mesh
        self.server = FrameLink[GatewayDown, GatewayUp](write=down.write, read=up.read, receive_type=GatewayUp)
        self._link = FrameLink[GatewayUp, GatewayDown](write=up.write, read=down.read, receive_type=GatewayDown)
        self.heard: list[GatewayDown] = []
        self.runs: list[RequestRun] = []

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self._link.post(RegisterGateway(gateway_id=GATEWAY, waiting=()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._link.pump)
            async for messages in self._link.frames():
                if not self.heard:
                    task_status.started()
                self.heard += messages
                for message in messages:
                    if isinstance(message, CommandMessage) and isinstance(command := message.gateway_command, Restart):
                        self._resume((command.request_id, command.epoch))

    def open(self) -> None:
        for index, arrival in enumerate(self._arrivals):
            self._mesh.agenda.at(arrival.arrival_s, partial(self._submit, index, arrival))

    def _submit(self, index: int, arrival: Arrival) -> None:
        request = Request(
            request_id=request_id_of(GATEWAY, f"r{index:07d}"),
            epoch=Epoch(0),
            gateway_id=GATEWAY,
            num_prompt_tokens=arrival.num_prompt_tokens,
            max_tokens=arrival.max_tokens or arrival.num_output_tokens,
            arrival_s=self._mesh.agenda.now_s,
            priority=arrival.priority,
            slo_ttft_s=arrival.slo_ttft_s,
            slo_tpot_s=arrival.slo_tpot_s,
        )
        run = self._mesh.runs[request.request_id, request.epoch] = RequestRun(request, arrival.num_output_tokens)
        self.runs.append(run)
        self._post(run)

    def _resume(self, key: RequestKey) -> None:
        """Go on with what was drawn."""
        run = self._mesh.runs.pop(key)
        assert run.decode_id is not None
        request = run.resume(self._mesh.workers[run.decode_id].instance.drawn_s(key, run), self._mesh.agenda.now_s)
        self._mesh.runs[request.request_id, request.epoch] = run
        self._post(run)

    def _post(self, run: RequestRun) -> None:
        request = run.current
        generation = Generation(
            request_id=request.request_id,
            epoch=request.epoch,
            gateway_id=GATEWAY,
            token_address="127.0.0.1:1",
            token_ids=pack_token_ids([0] * request.num_prompt_tokens),
            num_prompt_tokens=run.request.num_prompt_tokens,
            params=SamplingParams(max_tokens=run.request.max_tokens),
        )
        self._link.post(
            Submit(
                generation=generation,
                priority=request.priority,
                slo_ttft_s=request.slo_ttft_s,
                slo_tpot_s=request.slo_tpot_s,
                age_s=0.0 if request.epoch == 0 else self._mesh.agenda.now_s - run.request.arrival_s,
            )
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What the service made of a workload."""

    decisions: Sequence[Decision]
    runs: Sequence[RequestRun]
    records: RequestRecords
    heard: Sequence[GatewayDown] = field(default_factory=list[GatewayDown])


def serve(
    arrivals: Sequence[Arrival],
    profiles: Sequence[InstanceProfile],
    bundle: str,
    *,
    heartbeat_s: float = 1e6,
    log: EventLogWriter | None = None,
    config: CoreConfig = CONFIG,
) -> Served:
    """Serve a workload by the service on virtual time."""
    mesh = ModelledMesh()
    agenda = mesh.agenda
    loop = VirtualTimeLoop(agenda, mesh.settle)
    settings = SchedulerConfig(lease_s=1e7, suspect_s=1e7, heartbeat_s=heartbeat_s)

    async def main() -> Served:
        core = CountingCore(config, bundle, len(arrivals))
        workers: Peers[InstanceId, WorkerDown] = Peers()
        gateways: Peers[GatewayId, GatewayDown] = Peers()
        records = RequestRecords(lambda at_s: at_s)
        driver = Driver(
            core,
            clock=lambda: agenda.now_s,
            workers=workers,
            gateways=gateways,
            lives=RequestHistories(len(arrivals)),
            activity=ActivityFeed(core, gateways, clock=lambda: agenda.now_s, label=records.label),
            history=MeshHistory(core, lambda at_s: at_s, agenda.now_s),
            observers=(
                SchedulerMetrics(CollectorRegistry(), core, TenantUsage(core)),
                records,
                SchedulerSpans(Tracing(), lambda at_s: at_s),
            ),
            event_log=log,
        )
        worker_leases: Leases[InstanceId] = Leases(settings.lease_s)
        silences: Leases[InstanceId] = Leases(settings.suspect_s)
        absences: Leases[InstanceId] = Leases(settings.max_queue_s)
        gateway_leases: Leases[GatewayId] = Leases(settings.lease_s)
        stopping, check = anyio.Event(), MeshCheck(workers, SecurityConfig())
        worker_streams = WorkerStreams(driver, workers, worker_leases, silences, absences, settings, stopping, check)

        async def is_refused(_address: str) -> bool:
            return False

        gateway_streams = GatewayStreams(
            driver,
            gateways,
            gateway_leases,
            settings,
            stopping,
            lambda: agenda.now_s,
            is_refused,
            check,
            SessionStatuses(core, lambda: agenda.now_s),
        )
        gateway = Gateway(arrivals, mesh)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.run)
            tasks.start_soon(worker_streams.watch)
            tasks.start_soon(gateway_leases.run, gateway_streams.expired)
            tasks.start_soon(gateway_streams.serve, gateway.server, "gateway")
            await tasks.start(gateway.run)
            for profile in profiles:
                mesh.workers[profile.instance_id] = worker = Worker(profile, mesh)
                tasks.start_soon(worker_streams.serve, worker.server, profile.instance_id)
                await tasks.start(worker.run, heartbeat_s)
            gateway.open()
            await core.all_ended.wait()
            await loop.end_of_instant()
            tasks.cancel_scope.cancel()
        core.check_integrity()
        return Served(core.decisions, gateway.runs, records, gateway.heard)

    return anyio.run(main, backend="asyncio", backend_options={"loop_factory": lambda: loop})


def simulate(
    arrivals: Sequence[Arrival], profiles: Sequence[InstanceProfile], bundle: str, config: CoreConfig = CONFIG
) -> tuple[list[Decision], Sequence[RequestRun]]:
    core = RememberingCore(config, bundle, SEED)
    result = Simulator(core, [(profile, UNEVEN_MODEL) for profile in profiles], arrivals, SIM_CONFIG).run()
    return core.decisions, result.requests


def tokens_of(runs: Sequence[RequestRun]) -> list[list[float]]:
    return [list(run.token_times_s) for run in runs]


@pytest.mark.parametrize("seed", slow_beyond(1, range(3)))
@pytest.mark.parametrize("bundle", ["fcfs", "sjf", "lars", "medha", "pdmesh"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_service_decides_as_the_simulator_does(mesh: InstanceCounts, bundle: str, seed: int) -> None:
    """Event for event and command for command, at the same times; and so every token comes at the same time."""
    arrivals, profiles = an_overload(seed), profiles_of(mesh)
    decisions, runs = simulate(arrivals, profiles, bundle)
    served = serve(arrivals, profiles, bundle)
    for live, simulated in zip(served.decisions, decisions, strict=False):
        assert live == simulated
    assert len(served.decisions) == len(decisions)
    assert tokens_of(served.runs) == tokens_of(runs)
    assert any(run.num_preemptions for run in runs) == (bundle != "fcfs")


@pytest.mark.parametrize("batching", ["mb", "eb"])
@pytest.mark.parametrize("mesh", [{"prefill": 1, "decode": 1}, {"mixed": 2}], ids=str)
def test_the_same_by_credit_and_in_phases(mesh: InstanceCounts, batching: str) -> None:
    """Requests that may draw far more than they do, and then do: some are retracted, and resumed by their gateway."""
    rng = random.Random(SEED)
    arrivals = [
        Arrival(
            arrival_s=0.05 * index,
            num_prompt_tokens=rng.randint(1, 60),
            num_output_tokens=1 + int(rng.expovariate(1 / (10 if index < 60 else 350))),
            max_tokens=900,
        )
        for index in range(110)
    ]
    config = replace(
        CONFIG,
        kv_reservation=KvReservation.ON_DEMAND,
        max_queue_s=1e6,
        policy=replace(POLICY, batching=batching),
        refuses_early=False,
    )
    profiles = profiles_of(mesh)
    decisions, runs = simulate(arrivals, profiles, "pdmesh", config)
    served = serve(arrivals, profiles, "pdmesh", config=config)
    for live, simulated in zip(served.decisions, decisions, strict=False):
        assert live == simulated
    assert len(served.decisions) == len(decisions)
    assert tokens_of(served.runs) == tokens_of(runs)
    assert all(len(run.token_times_s) == run.num_output_tokens for run in runs)
    kinds = {type(command) for decision in decisions for command in decision.commands}
    assert kinds >= {Hold, Restart, FreeKv}


@pytest.mark.parametrize("seed", slow_beyond(1, range(2)))
@pytest.mark.parametrize("mesh", [{"prefill": 3, "decode": 1}, {"mixed": 3}], ids=str)
def test_the_same_where_instances_compute_prompts_in_turn(mesh: InstanceCounts, seed: int) -> None:
    """Helpers join late, are sent what was computed before, and wait for each other's KV on shared links."""
    arrivals = a_workload(seed, num_requests=80, requests_per_s=3.0)
    profiles = [replace(profile, joins_groups=True) for profile in profiles_of(mesh)]
    config = replace(CONFIG, policy=replace(POLICY, link_bytes_per_s=SIM_CONFIG.port_bytes_per_s))
    decisions, runs = simulate(arrivals, profiles, "pdmesh", config)
    served = serve(arrivals, profiles, "pdmesh", config=config)
    for live, simulated in zip(served.decisions, decisions, strict=False):
        assert live == simulated
    assert len(served.decisions) == len(decisions)
    assert tokens_of(served.runs) == tokens_of(runs)
    expected = [decision.event for decision in decisions if isinstance(decision.event, KvExpected)]
    joined = [event.request_id for event in expected if event.transfer_id == NO_TRANSFER]
    assert len(joined) > 3
    sizes = {len(group.member_ids) for decision in decisions for _, group in regrouped(decision.commands)}
    assert max(sizes) == 2, "of no more members than its layers"


def test_all_that_matters_happens_in_the_cases_above() -> None:
    """Requests are refused, prompts preempted, transfers paused and gone on with."""
    kinds = set[type]()
    for bundle in ("fcfs", "sjf", "lars", "pdmesh"):
        decisions, _ = simulate(an_overload(0), profiles_of({"prefill": 1, "decode": 1}), bundle)
        kinds |= {type(command) for decision in decisions for command in decision.commands}
    assert kinds >= {ExpectCopy, SendCopy, StopCopy, Reject, WakeAt}


def test_heartbeats_decide_nothing() -> None:
    arrivals, profiles = an_overload(0), profiles_of({"prefill": 2, "decode": 2})
    decisions, _ = simulate(arrivals, profiles, "pdmesh")
    served = serve(arrivals, profiles, "pdmesh", heartbeat_s=0.25)
    beats = [decision for decision in served.decisions if isinstance(decision.event, LoadReported)]
    assert len(beats) == len(profiles), "only what says something new is an event"
    assert not any(beat.commands for beat in beats)
    assert [decision for decision in served.decisions if not isinstance(decision.event, LoadReported)] == decisions


@pytest.mark.parametrize("bundle", ["fcfs", "pdmesh"])
def test_records_and_gateways_are_told_what_was_simulated(bundle: str) -> None:
    arrivals, profiles = an_overload(0), profiles_of({"prefill": 1, "decode": 1})
    _, runs = simulate(arrivals, profiles, bundle)
    served = serve(arrivals, profiles, bundle)
    for run in runs:
        record = served.records.get(run.request.request_id)
        assert record is not None
        assert (record.state, record.bundle) == (run.outcome, bundle)
        assert (record.first_token_s, record.last_token_s) == (run.ttft_s, run.jct_s)
    commands = [message.gateway_command for message in served.heard if isinstance(message, CommandMessage)]
    rejected = [command.request_id for command in commands if isinstance(command, Reject)]
    assert sorted(rejected) == [run.request.request_id for run in runs if run.outcome is Outcome.REJECTED] != []


@pytest.mark.parametrize("bundle", BUNDLE_NAMES)
def test_the_log_of_a_live_run_replays_to_the_same_commands_and_tells_of_the_run(tmp_path: Path, bundle: str) -> None:
    arrivals, profiles = an_overload(1), profiles_of({"prefill": 1, "decode": 1})
    path = tmp_path / "events.log"
    header = Header(seed=SEED, bundle=bundle, config=CONFIG, started_at=0.0, started_s=0.0)
    with EventLogWriter(path, header) as log:
        served = serve(arrivals, profiles, bundle, heartbeat_s=1.0, log=log)
    with EventLogReader(path) as read:
        decisions = [Decision(entry.now_s, entry.event, tuple(commands)) for entry, commands in replay(read)]
    assert decisions == served.decisions
    recorded = recorded_run(decisions)
    finished = [run for run in served.runs if run.token_times_s]
    assert [run.ttft_s for run in recorded.result.requests] == pytest.approx([run.ttft_s for run in finished])
    assert [run.jct_s for run in recorded.result.requests] == pytest.approx([run.jct_s for run in finished])
