"""Drives a scheduling core on a virtual clock, over modelled instances, with the requests of a workload."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Protocol, assert_never

from pdmesh.core.commands import (
    Command,
    ForgetRequest,
    Outcome,
    Reject,
    Restart,
    StopInstance,
    ToInstance,
    WakeAt,
)
from pdmesh.core.events import Event, GatewayJoined, InstanceJoined, InstanceLost, RequestArrived, Tick
from pdmesh.model import GRANULE_TOKENS, Epoch, GatewayId, InstanceId, InstanceProfile, Request, RequestId, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.policy.latency import LatencyModel
from pdmesh_lab.sim.agenda import Agenda, Appointment
from pdmesh_lab.sim.context import SimContext
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.faults import Death
from pdmesh_lab.sim.instance import SimInstance
from pdmesh_lab.sim.links import FlowId, HostLink, HostLinks, SimulatedLinks
from pdmesh_lab.sim.result import InstanceRun, RequestRun, SimResult
from pdmesh_lab.sim.staged import StagedInstance
from pdmesh_lab.sim.workload import Arrival, ClosedLoop

GATEWAY = GatewayId("simulated")


class Core(Protocol):
    """What of `SchedulerCore` a simulation needs; another core can wrap it, to time or to record it."""

    def handle(self, event: Event, now_s: float) -> list[Command]: ...

    def check_integrity(self) -> None: ...


#: Measured median of a layer's exchange between instances of one host (`benchmarks/spread_exchange.py` at dbfd7179).
PART_EXCHANGE_S = 250e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The modelled mesh beside its instances."""

    port_bytes_per_s: float = 25e9  # each instance's, in and out: a 200 Gb/s adapter
    #: Between two hosts, one way, where that is slower than a port; instances say where they are.
    host_link_bytes_per_s: Mapping[HostLink, float] = field(default_factory=dict[HostLink, float])
    control_delay_s: float = 0.0  # from the scheduler to an instance, and back
    parallel_step_s: float = (
        0.0  # a step of a parallel step takes so much longer: its members wait for each other in each layer
    )
    #: A layer of a step takes so much longer, beside what is read, if it decodes a context that is spread over several
    #: instances: the query's way to the others, and their answers'.
    part_exchange_s: float = PART_EXCHANGE_S
    max_decode_steps: int = 128  # in one appointment; less changes only the cost, and the last bits of what is reported
    events_between_checks: int = 10_000  # of the core's state
    deaths: Sequence[Death] = ()  # of any instances
    requests_of_operators: Sequence[tuple[float, Event]] = ()  # when, and what
    restart_s: float = 1.0  # until a process that an operation ends is there again


class Simulator:
    """One run. Everything that is due at an instant is reported and decided before an idle instance begins a step."""

    def __init__(
        self,
        core: Core,
        instances: Sequence[tuple[InstanceProfile, LatencyModel]],
        arrivals: Iterable[Arrival],
        config: SimConfig | None = None,
        *,
        closed_loop: ClosedLoop | None = None,
    ) -> None:
        """Simulate ``arrivals``; under a ``closed_loop`` each client sends the next one when it has time."""
        self._config = config = config or SimConfig()
        self._check_deaths({profile.instance_id: profile for profile, _ in instances})
        self._core = core
        self._agenda = Agenda()
        hosts = {profile.instance_id: profile.host for profile, _ in instances}
        host_links = HostLinks(hosts, config.host_link_bytes_per_s)
        self._links = SimulatedLinks(self._agenda, config.port_bytes_per_s, self._drained, host_links)
        self._exchange = SimulatedExchange(self._agenda, self._links)
        self._requests: list[RequestRun] = []
        self._runs: dict[RequestKey, RequestRun] = {}  # by their newest epoch
        self._context = SimContext(
            agenda=self._agenda,
            links=self._links,
            exchange=self._exchange,
            runs=self._runs,
            report=self._report,
            land=self._land,
            land_ranges=self._land_ranges,
            want_turn=self._want_turn,
            parallel_step_s=config.parallel_step_s,
            part_exchange_s=config.part_exchange_s,
            max_decode_steps=config.max_decode_steps,
        )
        self._instances = {profile.instance_id: self._new_instance(profile, model) for profile, model in instances}
        self._arrivals = iter(enumerate(arrivals))
        self._closed_loop = closed_loop
        self._num_sent = 0
        self._inbox: deque[Event] = deque()
        self._turns: dict[InstanceId, None] = {}
        self._wake: Appointment | None = None
        self._on_ended: Callable[[int], None] | None = None
        self._num_open = 0
        self._num_ended = 0
        self._num_events = 0
        self._num_commands = 0

    def _new_instance(self, profile: InstanceProfile, model: LatencyModel) -> SimInstance:
        kind = SimInstance if profile.num_stages == 1 else StagedInstance
        return kind(profile, model, self._context)

    def run(self, on_ended: Callable[[int], None] | None = None) -> SimResult:
        """Serve all requests; ``on_ended`` is told how many have ended, each time one has."""
        self._on_ended = on_ended
        self._inbox.append(GatewayJoined(GATEWAY, ()))
        self._inbox.extend(InstanceJoined(instance.profile, ()) for instance in self._instances.values())
        for death in self._config.deaths:
            self._agenda.at(death.at_s, partial(self._die, death))
        for at_s, requested in self._config.requests_of_operators:
            self._agenda.at(at_s, partial(self._inbox.append, requested))
        if self._closed_loop is None:
            self._await_arrival()
        else:
            self._let_clients_send(0.0)
        self._settle()
        while self._num_open:
            advanced = self._agenda.advance()
            assert advanced, f"{self._num_open} requests are open and nothing is due"
            self._settle()
        self._core.check_integrity()
        return SimResult(
            requests=self._requests,
            instances=[
                InstanceRun(instance.instance_id, instance.profile.role, instance.steps)
                for instance in self._instances.values()
            ],
            num_events=self._num_events,
            num_commands=self._num_commands,
        )

    # --- requests ---

    def _await_arrival(self) -> None:
        """Note the next arrival; until it comes it is open, so that a gap in the workload does not end the run."""
        for index, arrival in self._arrivals:
            self._num_open += 1
            self._agenda.at(arrival.arrival_s, partial(self._arrive, index, arrival))
            return

    def _let_clients_send(self, think_s: float) -> None:
        """Let each client that has time send a request after ``think_s``."""
        assert self._closed_loop is not None
        while self._num_open < self._closed_loop.clients_at(self._num_sent):
            found = next(self._arrivals, None)
            if found is None:
                return
            index, arrival = found
            arrival = replace(arrival, arrival_s=self._agenda.now_s + think_s)
            self._num_sent += 1
            self._num_open += 1
            self._agenda.at(arrival.arrival_s, partial(self._arrive, index, arrival))

    def _arrive(self, index: int, arrival: Arrival) -> None:
        granules = arrival.hashes
        request = Request(
            request_id=RequestId(f"r{index:07d}"),
            epoch=Epoch(0),
            gateway_id=GATEWAY,
            num_prompt_tokens=arrival.num_prompt_tokens,
            max_tokens=arrival.num_output_tokens if arrival.max_tokens is None else arrival.max_tokens,
            arrival_s=arrival.arrival_s,
            priority=arrival.priority,
            slo_ttft_s=arrival.slo_ttft_s,
            slo_tpot_s=arrival.slo_tpot_s,
            tenant=arrival.tenant,
            prefix=granules[: arrival.num_prompt_tokens // GRANULE_TOKENS],
        )
        run = self._runs[request.request_id, request.epoch] = RequestRun(request, arrival.num_output_tokens, granules)
        self._requests.append(run)
        self._inbox.append(RequestArrived(request))
        if self._closed_loop is None:
            self._await_arrival()

    def _resume(self, key: RequestKey, *, decodes: bool) -> None:
        """Its KV is given up for others, or lost: its gateway asks again, with what it has."""
        run = self._runs.pop(key)
        drawn_s = run.token_times_s  # where it was lost, that was told when it was
        if decodes:
            assert run.decode_id is not None
            drawn_s = self._instances[run.decode_id].drawn_s(key, run)
        request = run.resume(drawn_s, self._agenda.now_s)
        self._runs[request.request_id, request.epoch] = run
        self._inbox.append(RequestArrived(request))

    # --- events in, commands out ---

    def _settle(self) -> None:
        """Decide on all events of this instant, then let instances begin, until neither is left."""
        while True:
            while self._inbox:
                self._apply(self._inbox.popleft())
            if not self._turns:
                return
            instance_id = next(iter(self._turns))
            del self._turns[instance_id]
            self._instances[instance_id].begin()

    def _apply(self, event: Event) -> None:
        commands = self._core.handle(event, self._agenda.now_s)
        self._num_events += 1
        self._num_commands += len(commands)
        if self._num_events % self._config.events_between_checks == 0:
            self._core.check_integrity()
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case StopInstance(instance_id=instance_id):
                at_s = self._agenda.now_s + self._config.control_delay_s
                self._agenda.at(at_s, partial(self._die, Death(instance_id, at_s, self._config.restart_s)))
            case ToInstance():
                take = self._instances[command.instance_id].take
                if self._config.control_delay_s:
                    self._agenda.at(self._agenda.now_s + self._config.control_delay_s, partial(take, command))
                else:
                    take(command)
            case ForgetRequest(outcome=Outcome.RETRACTED | Outcome.RESTARTED):
                pass  # it goes on
            case ForgetRequest():
                self._runs[command.request_id, command.epoch].outcome = command.outcome
                self._num_open -= 1
                self._num_ended += 1
                if self._closed_loop is not None:
                    self._let_clients_send(self._closed_loop.think_s)
                if self._on_ended is not None:
                    self._on_ended(self._num_ended)
            case WakeAt():
                if self._wake is not None:
                    self._wake.cancel()
                if isfinite(command.at_s):
                    self._wake = self._agenda.at(command.at_s, lambda: self._inbox.append(Tick()))
            case Reject():
                pass  # ForgetRequest comes with it
            case Restart():
                is_foreseen = command.retracted or self._config.deaths or self._config.requests_of_operators
                assert is_foreseen, f"nothing fails here, and yet: {command}"
                self._resume((command.request_id, command.epoch), decodes=command.retracted)
            case _:
                assert_never(command)

    def _report(self, event: Event) -> None:
        if self._config.control_delay_s:
            arrive = partial(self._inbox.append, event)
            self._agenda.at(self._agenda.now_s + self._config.control_delay_s, arrive)
        else:
            self._inbox.append(event)

    def _want_turn(self, instance_id: InstanceId) -> None:
        self._turns[instance_id] = None

    # --- deaths ---

    def _check_deaths(self, profiles: Mapping[InstanceId, InstanceProfile]) -> None:
        for death in self._config.deaths:
            if death.instance_id not in profiles:
                raise ValueError(f"{death.instance_id} cannot die: it is not there")
            if death.away_s <= 2 * self._config.control_delay_s:
                raise ValueError(f"{death.instance_id} would be back before it is missed")

    def _die(self, death: Death) -> None:
        self._instances[death.instance_id].die()
        for instance in self._instances.values():
            instance.lose_member(death.instance_id)
        self._report(InstanceLost(death.instance_id))
        self._agenda.at(self._agenda.now_s + death.away_s, partial(self._come_back, death.instance_id))

    def _come_back(self, instance_id: InstanceId) -> None:
        """Another process, with nothing; what it does is added to what the one before did."""
        before = self._instances[instance_id]
        profile = replace(before.profile, pid=before.profile.pid + 1)
        instance = self._instances[instance_id] = self._new_instance(profile, before.model)
        instance.steps = before.steps
        self._links.connect(before.instance_id)
        self._report(InstanceJoined(instance.profile, ()))

    # --- KV ---

    def _drained(self, flow: FlowId) -> None:
        if not self._exchange.drained(flow):
            key, sender_id, _ = flow
            self._instances[sender_id].copies.drained(key)

    def _land_ranges(self, plan: TransferPlan, key: RequestKey, num_tokens: int, duration_s: float) -> None:
        """So many tokens of a prompt have moved: whole ranges of it are where they go."""
        for destination_id in plan.destination_ids[1:]:
            instance = self._instances[destination_id]
            num_tokens -= instance.profile.max_kv_tokens
            if num_tokens >= 0:
                instance.land_range(key, duration_s)

    def _land(self, plan: TransferPlan, key: RequestKey, duration_s: float) -> None:
        for destination_id in reversed(plan.destination_ids):  # where it decodes, last
            self._instances[destination_id].land(key, duration_s)
