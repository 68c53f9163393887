"""The scheduling core: events in, commands out.

`SchedulerCore.handle` is synchronous, deterministic and free of I/O. Time is its argument, and the only randomness is
the given stream. The same events therefore give the same commands under any driver. ``docs/architecture/request.md``
follows a request through nine steps.

Reports from outside may be late, repeated or wrong. No report raises: a report that does not fit the mesh state is
counted in ``ignored`` and changes nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import get_args

from pdmesh.core.admission.admission import Admission
from pdmesh.core.admission.aside import Aside
from pdmesh.core.admission.new_requests import NewRequests
from pdmesh.core.batching.local_work import LocalWork
from pdmesh.core.batching.modes import BatchingView, Modes
from pdmesh.core.commands import Command, DesiredProcesses, WakeAt
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.copies.cache_moves import CacheMoves
from pdmesh.core.copies.context_ranges import ContextRanges
from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.copies.handover import HandOvers
from pdmesh.core.copies.on_demand import OnDemandKv
from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.copies.rebalancing import Rebalancer
from pdmesh.core.copies.reports import TransferReports
from pdmesh.core.copies.tier_loads import TierLoads
from pdmesh.core.events import (
    CacheReported,
    DecodeStepsDone,
    DrainRequested,
    Event,
    GatewayJoined,
    GatewayLost,
    GroupPrefix,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    InstanceUnreachable,
    KvExpected,
    KvLow,
    KvReleased,
    LoadReported,
    MembersSet,
    RangeLost,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    SessionEnded,
    StepDone,
    Tick,
    TokenLinkReported,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.handlers import Handlers
from pdmesh.core.instances.feasibility import unready_reason
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.core.instances.link_rates import LinkRate, LinksAsMeasured
from pdmesh.core.instances.revisions import RevisionView, revisions
from pdmesh.core.integrity import check_integrity
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import BatchingChangeRequested, BundleChangeRequested
from pdmesh.core.operators.actuators import Actuators
from pdmesh.core.operators.all_operations import AllOperations
from pdmesh.core.operators.bundle_choice import BundleChoice
from pdmesh.core.operators.desired import DesiredState
from pdmesh.core.operators.operation_records import OperationRecord
from pdmesh.core.recovery.lost_token_links import on_token_link
from pdmesh.core.recovery.membership import Membership
from pdmesh.core.recovery.reconcile import Reconciler
from pdmesh.core.request_ends import RequestEnds
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestView
from pdmesh.core.sessions.session_state import Session
from pdmesh.core.sessions.sessions import Sessions
from pdmesh.core.steps.packer import Packer
from pdmesh.core.steps.step_reports import StepReports
from pdmesh.core.waiting.fairness import TenantView
from pdmesh.model import NO_TRANSFER, CacheUser, InstanceId, RequestId, RequestKey
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.views import InstanceView


class SchedulerCore:
    """Scheduler of the whole mesh."""

    def __init__(self, config: CoreConfig, bundle: Bundle, rng: random.Random) -> None:
        self._config = config
        growth = Growth(on_demand=config.kv_reservation is KvReservation.ON_DEMAND, risk=config.kv_risk)
        self._mesh = MeshState(rng, growth, config.max_lost_receivers, config.cut_memory_s)
        self._choice = BundleChoice(self._mesh, config, bundle)
        self._fetches = Fetches(self._mesh)
        self._parts = ContextRanges(self._mesh)
        self._reconciler = Reconciler(self._mesh, config.orphan_grace_s)
        self._moves = Moves(self._mesh)
        self._rebalancer = Rebalancer(self._mesh, self._moves)
        self._transfers = TransferReports(self._mesh, self._fetches, self._parts, self._moves, self._rebalancer)
        self._on_demand = OnDemandKv(self._mesh, self._rebalancer)
        links = LinksAsMeasured(self._mesh.links, config.policy.link_bytes_per_s)
        cache_moves = CacheMoves(self._mesh, self._fetches, links) if config.evacuates else None
        self._operations = AllOperations(self._mesh, self._moves, cache_moves)
        self._modes = Modes(self._mesh)
        self._handovers = HandOvers(self._mesh, config.max_queue_s)
        self._local_work = LocalWork(self._mesh, self._operations.on_instances.fixes_role)
        self._packer = Packer(
            self._mesh,
            config.plans_in_flight,
            bundle,
            self._modes,
            self._handovers,
            self._fetches,
            self._local_work,
        )
        self._admission = Admission(self._mesh, config)
        self._aside = Aside(self._mesh, config)
        self._tier_loads = TierLoads(self._mesh, self._fetches)
        self._new_requests = NewRequests(
            self._mesh,
            config,
            self._admission,
            self._aside,
            self._reconciler,
            self._packer.prefill_groups,
            self._operations.may_instances_come,
        )
        self._steps = StepReports(self._mesh, self._choice, self._admission)
        self._handlers = self._all_handlers()
        # Besides the present time: the next time limit of a request, and the time for which a Tick was requested.
        self._now_s, self._due_s, self._wake_s = 0.0, inf, inf

    # --- views for the driver ---

    @property
    def bundle(self) -> str:
        return self._choice.bundle.name

    @property
    def latency(self) -> LinearLatencyModel:
        """Model that currently predicts the duration of steps."""
        return self._choice.learner.model

    @property
    def num_waiting(self) -> int:
        return len(self._mesh.queue)

    @property
    def num_parked(self) -> int:
        """Number of waiting requests that fit none of the present instances."""
        return self._mesh.queue.num_parked

    @property
    def num_running(self) -> int:
        return len(self._mesh.requests) - len(self._mesh.queue)

    @property
    def awaiting_decode(self) -> Collection[RequestKey]:
        """Placed requests whose KV has no receiver."""
        return self._mesh.awaiting_decode.keys()

    @property
    def num_awaiting_decode_tokens(self) -> int:
        """Sum of the prompt tokens of the requests in `awaiting_decode`."""
        return sum(state.request.num_prompt_tokens for state in self._mesh.awaiting_decode.values())

    @property
    def max_awaiting_decode_kv_share(self) -> float:
        """Largest share of an instance's blocks held by prompts without room to decode."""
        num_blocks = Counter[InstanceId]()
        for key, state in self._mesh.awaiting_decode.items():
            num_blocks[state.prefill_ids[0]] += self._mesh.instances[state.prefill_ids[0]].allocations[key].num_blocks
        shares = (number / self._mesh.instances[name].num_blocks for name, number in num_blocks.items())
        return max(shares, default=0.0)

    @property
    def instances(self) -> list[InstanceView]:
        return [instance.view for instance in self._mesh.instances.values()]

    @property
    def policy(self) -> PolicyConfig:
        """Policy that bundles are built from, without the latency learnt since."""
        return self._choice.policy

    @property
    def batching(self) -> str:
        """The batching mode chosen for all instances: `mb`, `eb` or `ebplus`."""
        return self._choice.bundle.batching.name

    def batching_of(self, instance_id: InstanceId) -> BatchingView | None:
        """Return an instance's current batching mode and its reason; None if it has no modes to choose from."""
        return self._modes.view(self._mesh.instances[instance_id])

    def requests(self, limit: int) -> list[RequestView]:
        """Return the first ``limit`` requests in the order of their arrival, running ones before waiting ones."""
        states = self._mesh.requests.values()
        running = (state for state in states if state.phase is not Phase.WAITING)
        waiting = (state for state in states if state.phase is Phase.WAITING)
        return [state.view for state in islice(chain(running, waiting), limit)]

    @property
    def helped(self) -> list[RequestView]:
        """Requests whose prompts several instances compute and have not fully planned, in the order of placement."""
        return [state.view for state in self._packer.prefill_groups.helped]

    def request(self, request_id: RequestId) -> RequestView | None:
        """Return a request that waits or runs; None for an unknown id."""
        state = self._mesh.requests.get(request_id)
        return None if state is None else state.view

    @property
    def tenants(self) -> list[TenantView]:
        """Tenants whose requests wait or run, and others that recently used more than their share."""
        return self._mesh.queue.counters.views

    @property
    def sessions(self) -> Sessions:
        """The sessions that requests named."""
        return self._mesh.sessions

    def holders_of(self, session: Session) -> list[InstanceId]:
        """Return the instances that cache the KV of a session's latest prompt."""
        mask = 0 if session.tail is None else self._mesh.cache_index.mask_of(session.tail)
        return [each.instance_id for each in self._mesh.instances.values() if mask >> each.number & 1]

    def user_of(self, key: RequestKey) -> CacheUser | None:
        """Return the tenant and session of a request, for the next scheduler; None if it has neither or is unknown."""
        state = self._mesh.find(key)
        return None if state is None else self._mesh.sessions.user_of(state.request, state.session)

    @property
    def operations(self) -> list[OperationRecord]:
        """Operators' operations that run, and the last ended ones, in the order in which they came."""
        return self._operations.records.all

    @property
    def num_operation_changes(self) -> int:
        """Number of changes of `operations`, or of operators' wishes."""
        return self._operations.records.num_changes

    @property
    def desired(self) -> DesiredState:
        """Operators' wishes that still hold, for the next scheduler."""
        return replace(self._operations.desired, bundle=self._choice.desired_bundle, batching=self._choice.desired)

    def desired_processes(self, actuator_id: str) -> DesiredProcesses:
        """Return the processes that an actuator should start and stop."""
        return self._operations.desired_processes(actuator_id)

    @property
    def actuators(self) -> Actuators:
        """The present actuators, which start and stop processes."""
        return self._operations.actuators

    @property
    def ignored(self) -> Mapping[str, int]:
        """Numbers of reports that changed nothing because they did not fit the mesh state, by kind."""
        return self._mesh.ignored

    @property
    def unready_reason(self) -> str | None:
        """Reason why no request can be served now; None if one can."""
        return unready_reason(self._mesh.instances.values())

    @property
    def revisions(self) -> list[RevisionView]:
        """Weights identities of the present instances, and their shares of new requests."""
        return revisions(self._mesh.instances.values(), self._mesh.shares)

    @property
    def new_weights(self) -> str | None:
        """The weights identity that new requests are placed on; None without instances, or if no identity can serve.

        If all instances have one identity, the property is this identity even while none of them can serve.
        """
        return self._mesh.new_weights

    @property
    def link_rates(self) -> list[LinkRate]:
        """Recent rates of KV transfers between hosts."""
        return self._mesh.links.rates

    @property
    def num_fetched_tokens(self) -> int:
        """Number of tokens whose KV was copied between instances to be cached."""
        return self._fetches.num_fetched_tokens

    def is_active(self, key: RequestKey) -> bool:
        """Whether the request waits or runs."""
        return self._mesh.find(key) is not None

    def needs_prompt(self, key: RequestKey) -> bool:
        """Whether instances may still be asked to compute the request's prompt: it waits, or a group may help it."""
        state = self._mesh.find(key)
        return state is not None and (state.phase is Phase.WAITING or self._packer.prefill_groups.may_be_helped(key))

    def may_change_receiver(self, key: RequestKey) -> bool:
        """Whether a placed request's KV has not landed, so that it may still go to another instance."""
        state = self._mesh.find(key)
        return state is not None and state.is_in_prefill

    # --- events in, commands out ---

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Handle an event and return the commands that answer it, in order."""
        self._now_s = now_s
        commands = self._mesh.commands = []
        if isinstance(event, DecodeStepsDone) and not self._steps.own_steps(event):
            # The event only improves predictions, so no decision follows.
            return commands
        self._admission.passed(now_s)
        self._mesh.pass_time(now_s)
        if self._due_s <= now_s:
            self._new_requests.expire(now_s)
            self._reconciler.expire(now_s)
            self._handovers.expire(now_s)
        self._handlers.handle(event, now_s)
        self._operations.advance(now_s)
        self._fetches.end_useless(now_s)
        bundle = self._choice.bundle
        if self._config.evacuates:
            leaving = [*self._operations.on_instances.leaving, *self._local_work.leaving()]
            self._moves.evacuate(leaving, bundle.decode_placement)
            if bundle.rebalancing is not None:
                self._rebalancer.speed_up(bundle.rebalancing, now_s)
        if self._mesh.spreads_contexts:
            emptied = self._operations.on_instances.leaving if self._config.evacuates else ()
            self._parts.serve(self._moves.leaving(emptied), bundle.decode_placement, now_s)
        self._on_demand.serve(bundle, self._choice.learner.model, now_s, moves=self._config.evacuates)
        self._aside.look(now_s)
        self._packer.pack(bundle, now_s)
        self._tier_loads.advance(now_s)
        self._admission.note(commands)
        self._mesh.take_back_backends()
        self._ask_for_wake_up()
        return commands

    # --- handlers ---

    def _all_handlers(self) -> Handlers:
        handlers, transfers = Handlers(), self._transfers
        members = Membership(
            self._mesh,
            self._choice,
            self._reconciler,
            self._on_demand,
            self._moves,
            self._parts,
            self._rebalancer,
            self._operations.on_instances,
        )
        ends = RequestEnds(
            self._mesh,
            self._choice,
            self._modes,
            self._steps,
            self._fetches,
            self._parts,
            self._moves,
            self._on_demand,
            self._reconciler,
        )
        handlers.on_timed(RequestArrived, self._request_arrived)
        handlers.on(RequestCancelled, self._new_requests.cancelled)
        handlers.on(RequestDropped, ends.dropped)
        handlers.on_timed(RequestFinished, ends.finished)
        handlers.on_timed(GatewayJoined, self._gateway_joined)
        handlers.on(GatewayLost, self._gateway_lost)
        handlers.on_timed(InstanceJoined, members.joined)
        handlers.on(InstanceUnreachable, members.unreachable)
        handlers.on(InstanceSuspected, members.suspected)
        handlers.on_timed(InstanceLost, members.lost)
        handlers.on(DrainRequested, members.stops)
        handlers.on(CacheReported, self._cache_reported)
        handlers.on_timed(TokenLinkReported, partial(on_token_link, self._mesh, self._moves))
        handlers.on(LoadReported, self._load_reported)
        handlers.on_timed(StepDone, self._step_done)
        handlers.on(DecodeStepsDone, self._learnt_before)
        handlers.on_timed(KvExpected, self._kv_expected)
        handlers.on(GroupPrefix, self._packer.prefill_groups.recovery.on_prefix_report)
        handlers.on(TransferOffered, transfers.offered)
        handlers.on(TransferPaused, transfers.paused)
        handlers.on(TransferLanded, transfers.landed)
        handlers.on_timed(TransferSent, transfers.sent)
        handlers.on_timed(TransferFailed, transfers.failed)
        handlers.on(MembersSet, self._members_set)
        handlers.on(RangeLost, self._parts.lost_range)
        handlers.on(KvReleased, ends.released)
        handlers.on(KvLow, self._kv_low)
        self._operations.register(handlers)
        handlers.on(BundleChangeRequested, self._choice.change)
        handlers.on(BatchingChangeRequested, self._choice.change_batching)
        handlers.on(SessionEnded, self._session_ended)
        handlers.on(Tick, self._ticked)
        handlers.check(get_args(Event))
        return handlers

    # --- gateways ---

    def _gateway_joined(self, event: GatewayJoined, now_s: float) -> None:
        self._reconciler.gateway_joined(event.gateway_id, dict(event.waiting), now_s, unbegun=frozenset(event.unbegun))

    def _gateway_lost(self, event: GatewayLost) -> None:
        self._reconciler.gateway_lost(event.gateway_id)
        self._mesh.cut.forget(event.gateway_id)

    # --- instances ---

    def _step_done(self, event: StepDone, now_s: float) -> None:
        if instance := self._mesh.instance_of(event):
            self._steps.done(instance, event, now_s)

    def _learnt_before(self, _: DecodeStepsDone) -> None:
        """Do nothing: `handle` learnt from the event already."""

    def _kv_expected(self, event: KvExpected, now_s: float) -> None:
        if event.transfer_id == NO_TRANSFER:
            self._packer.prefill_groups.joined(event, now_s, self._choice.bundle)
        else:
            self._transfers.reserved(event)

    def _kv_low(self, event: KvLow) -> None:
        if instance := self._mesh.instance_of(event):
            self._on_demand.is_low(instance, event.residents)
            self._parts.grew(instance, event.residents)

    def _members_set(self, event: MembersSet) -> None:
        if (state := self._parts.set(event)) is not None:
            self._on_demand.handed_on(self._mesh.instances[event.instance_id], state.key)

    def _cache_reported(self, event: CacheReported) -> None:
        if instance := self._mesh.instance_of(event):
            if event.kept is not None:
                instance.replace_kept(event.kept, states=event.states)
            instance.kept.lose_offloaded(event.lost)

    def _load_reported(self, event: LoadReported) -> None:
        if instance := self._mesh.instance_of(event):
            instance.set_quarantined(event.num_quarantined_blocks)

    # --- requests ---

    def _request_arrived(self, event: RequestArrived, now_s: float) -> None:
        if event.silent_source_id is not None and event.silent_source_id in self._mesh.instances:
            self._mesh.cut.note(event.request.gateway_id, event.silent_source_id, now_s)
        self._new_requests.arrived(event.request, self._choice, now_s)

    def _session_ended(self, event: SessionEnded) -> None:
        if not self._mesh.sessions.close(event.session):
            self._mesh.ignore("SessionEnded")

    # --- time ---

    def _ticked(self, _: Tick) -> None:
        self._wake_s = inf

    def _ask_for_wake_up(self) -> None:
        self._due_s = min(
            self._mesh.queue.next_deadline_s,
            self._aside.next_look_s,
            self._tier_loads.next_look_s,
            self._reconciler.next_deadline_s,
            self._operations.next_deadline_s,
            self._handovers.next_deadline_s,
            self._fetches.next_deadline_s,
            self._parts.next_deadline_s,
            self._modes.wake_s,
        )
        if self._wake_s <= self._now_s:
            self._wake_s = inf
        if self._due_s < self._wake_s:
            self._wake_s = self._due_s
            self._mesh.commands.append(WakeAt(at_s=self._due_s))

    def check_integrity(self) -> None:
        """Raise AssertionError if any part of the state is inconsistent."""
        check_integrity(self._mesh)
        self._mesh.sessions.check_integrity()
        self._operations.check_integrity()
        self._moves.check_integrity()
        self._parts.check_integrity()
        self._fetches.check_integrity()
        for instance in self._mesh.instances.values():
            num_plans, limit = instance.num_regular_plans, self._config.plans_in_flight + instance.num_stages - 1
            assert num_plans <= limit, f"{instance.instance_id}: {num_plans} plans in flight"
