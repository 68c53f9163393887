"""Simulator of a scheduling core on a virtual clock, over modelled instances, with the requests of a workload."""

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
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, GatewayId, InstanceId, InstanceProfile, Request, RequestId, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.policy.latency import LatencyModel
from pdmesh_lab.sim.agenda import Agenda, Timer
from pdmesh_lab.sim.context import SimContext
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.faults import Death
from pdmesh_lab.sim.instance import SimInstance
from pdmesh_lab.sim.links import FlowId, HostLink, HostLinks, SimulatedLinks
from pdmesh_lab.sim.result import InstanceRun, RequestRun, SimResult
from pdmesh_lab.sim.staged import StagedInstance
from pdmesh_lab.sim.workload import Arrival, Clients, Loop

GATEWAY = GatewayId("simulated")


class Core(Protocol):
    """Interface of `SchedulerCore` that a simulation needs. A wrapper of the core can time or record it."""

    def handle(self, event: Event, now_s: float) -> list[Command]: ...

    def check_integrity(self) -> None: ...


#: Measured time of a layer's exchange between instances of one host, beside attention (docs/results.md).
PART_EXCHANGE_S = 200e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Settings of the modelled mesh beside its instances.

    `port_bytes_per_s` is each instance's bandwidth in and out; the default is a 200 Gb/s adapter. `control_delay_s`
    passes from the scheduler to an instance, and back. Each member of a parallel step takes `parallel_step_s` longer,
    because members wait for each other in each layer. At most `max_decode_steps` are in one appointment; fewer
    change only the cost, and the last bits of reported times. The core's state is checked every `events_between_checks`
    events. `requests_of_operators` are events with their times. A process that an operation ends is back after
    `restart_s`.
    """

    port_bytes_per_s: float = 25e9
    #: Rate from one host to another if less than a port's. Instances' profiles name their hosts.
    host_link_bytes_per_s: Mapping[HostLink, float] = field(default_factory=dict[HostLink, float])
    control_delay_s: float = 0.0
    parallel_step_s: float = 0.0
    #: Seconds by which a layer of a step takes longer, beside its reads, if the step decodes a spread context. The
    #: query goes to the other instances, and their answers come back.
    part_exchange_s: float = PART_EXCHANGE_S
    max_decode_steps: int = 128
    events_between_checks: int = 10_000
    deaths: Sequence[Death] = ()
    requests_of_operators: Sequence[tuple[float, Event]] = ()
    restart_s: float = 1.0


class Simulator:
    """A single simulation. All events of an instant are reported and decided before an idle instance begins a step."""

    def __init__(
        self,
        core: Core,
        instances: Sequence[tuple[InstanceProfile, LatencyModel]],
        arrivals: Iterable[Arrival],
        config: SimConfig | None = None,
        *,
        closed_loop: Loop | None = None,
    ) -> None:
        """Simulate ``arrivals``. In a ``closed_loop``, clients send them one after the other, whatever their times."""
        self._config = config = config or SimConfig()
        self._check_deaths({profile.instance_id: profile for profile, _ in instances})
        self._core = core
        self._agenda = Agenda()
        hosts = {profile.instance_id: profile.host for profile, _ in instances}
        host_links = HostLinks(hosts, config.host_link_bytes_per_s)
        self._links = SimulatedLinks(self._agenda, config.port_bytes_per_s, self._drained, host_links)
        self._exchange = SimulatedExchange(self._agenda, self._links)
        self._requests: list[RequestRun] = []
        self._runs: dict[RequestKey, RequestRun] = {}  # keys: the newest epochs
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
        self._clients: Clients | None = None if closed_loop is None else closed_loop.clients(arrivals)
        self._num_sent = 0
        self._inbox: deque[Event] = deque()
        self._turns: dict[InstanceId, None] = {}
        self._wake: Timer | None = None
        self._on_ended: Callable[[int], None] | None = None
        self._num_open = 0
        self._num_ended = 0
        self._num_events = 0
        self._num_commands = 0

    def _new_instance(self, profile: InstanceProfile, model: LatencyModel) -> SimInstance:
        kind = SimInstance if profile.num_stages == 1 else StagedInstance
        return kind(profile, model, self._context)

    def run(self, on_ended: Callable[[int], None] | None = None) -> SimResult:
        """Serve all requests. Call ``on_ended`` with the number of ended requests whenever one ends."""
        self._on_ended = on_ended
        self._inbox.append(GatewayJoined(GATEWAY, ()))
        self._inbox.extend(InstanceJoined(instance.profile, ()) for instance in self._instances.values())
        for death in self._config.deaths:
            self._agenda.at(death.at_s, partial(self._die, death))
        for at_s, requested in self._config.requests_of_operators:
            self._agenda.at(at_s, partial(self._inbox.append, requested))
        if self._clients is None:
            self._await_arrival()
        else:
            self._send(self._clients.begin())
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
        """Schedule the next arrival, and count it as open, so that a gap in the workload does not end the run."""
        for index, arrival in self._arrivals:
            self._num_open += 1
            self._agenda.at(arrival.arrival_s, partial(self._arrive, index, arrival))
            return

    def _send(self, arrivals: Iterable[Arrival]) -> None:
        """Schedule the next requests of clients, and count them as open."""
        for arrival in arrivals:
            self._agenda.at(arrival.arrival_s, partial(self._arrive, self._num_sent, arrival))
            self._num_sent += 1
            self._num_open += 1

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
            session=arrival.session,
        )
        run = self._runs[request.request_id, request.epoch] = RequestRun(request, arrival.num_output_tokens, granules)
        self._requests.append(run)
        self._inbox.append(RequestArrived(request))
        if self._clients is None:
            self._await_arrival()

    def _resume(self, key: RequestKey, *, decodes: bool) -> None:
        """Resume a request under its next epoch, as its gateway would: its KV was freed for others, or lost."""
        run = self._runs.pop(key)
        drawn_s = run.token_times_s  # set by `die` if it was lost
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
                pass  # resumed in the next epoch
            case ForgetRequest():
                self._runs[command.request_id, command.epoch].outcome = command.outcome
                self._num_open -= 1
                self._num_ended += 1
                if self._clients is not None:
                    self._send(self._clients.ended(int(command.request_id[1:]), self._agenda.now_s))
                if self._on_ended is not None:
                    self._on_ended(self._num_ended)
            case WakeAt():
                if self._wake is not None:
                    self._wake.cancel()
                if isfinite(command.at_s):
                    self._wake = self._agenda.at(command.at_s, lambda: self._inbox.append(Tick()))
            case Reject():
                pass  # a ForgetRequest accompanies it
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
                raise ValueError(f"{death.instance_id} cannot be lost: it is not running")
            if death.away_s <= 2 * self._config.control_delay_s:
                raise ValueError(f"{death.instance_id} would return before its loss is noticed")

    def _die(self, death: Death) -> None:
        self._instances[death.instance_id].die()
        for instance in self._instances.values():
            instance.lose_member(death.instance_id)
        self._report(InstanceLost(death.instance_id))
        self._agenda.at(self._agenda.now_s + death.away_s, partial(self._come_back, death.instance_id))

    def _come_back(self, instance_id: InstanceId) -> None:
        """Replace a dead instance by a new process. The steps of both are in one timeline."""
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
        """Land the whole ranges in the first ``num_tokens`` moved tokens of a prompt, each at its destination."""
        for destination_id in plan.destination_ids[1:]:
            instance = self._instances[destination_id]
            num_tokens -= instance.profile.max_kv_tokens
            if num_tokens >= 0:
                instance.land_range(key, duration_s)

    def _land(self, plan: TransferPlan, key: RequestKey, duration_s: float) -> None:
        for destination_id in reversed(plan.destination_ids):  # the decoding instance is last
            self._instances[destination_id].land(key, duration_s)
