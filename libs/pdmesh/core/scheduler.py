"""The scheduling core: events in, commands out.

`SchedulerCore.handle` is synchronous, deterministic and free of I/O. Time is its argument, and the only randomness is
the stream it was given, so the same events give the same commands, whoever drives it. ``docs/architecture.md`` tells a
request's way in nine steps.

Reports from outside may be late, repeated or wrong. They never raise: what does not fit the books is counted in
``ignored`` and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain, islice
from math import inf
from typing import assert_never

from pdmesh.core.admission import Admission, work_us
from pdmesh.core.batching import BatchingView, Modes
from pdmesh.core.books import Books
from pdmesh.core.commands import Command, Outcome, SetRole, WakeAt
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.credit import Credit
from pdmesh.core.events import (
    BatchingChangeRequested,
    BundleChangeRequested,
    CreditLow,
    DecodeReserved,
    DecodeStepsDone,
    DrainRequested,
    Event,
    GatewayJoined,
    GatewayLost,
    GroupPrefix,
    HelperJoined,
    InstanceJoined,
    InstanceLost,
    InstanceStartFailed,
    InstanceSuspected,
    InstanceUnreachable,
    KvReleased,
    LoadReported,
    MoveFailed,
    MoveSent,
    OperationCancelled,
    OperationRequested,
    ProcessesReported,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    ResizeRequested,
    RoleChangeRequested,
    StepDone,
    Tick,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.fairness import TenantView
from pdmesh.core.growth import Growth
from pdmesh.core.handover import HandOvers
from pdmesh.core.judging import Judge
from pdmesh.core.learning import LatencyLearner
from pdmesh.core.moves import Moves
from pdmesh.core.operations import Operations, OperationView
from pdmesh.core.packing import Packer
from pdmesh.core.placing import could_place, have_pair
from pdmesh.core.pools import DesiredPools, Pools
from pdmesh.core.rebalancing import Rebalancer
from pdmesh.core.requests import Phase, RequestView
from pdmesh.core.reunion import Reunion
from pdmesh.core.state import HoldKind, InstanceBooks
from pdmesh.core.suspicion import go_on_without, receive_elsewhere, start_elsewhere
from pdmesh.core.transfer_reports import TransferReports
from pdmesh.errors import ConfigError
from pdmesh.model import InstanceId, RejectReason, Request, RequestId, RequestKey
from pdmesh.policy.base import Bundle, InstanceView
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.latency import LinearLatencyModel


class SchedulerCore:
    """Decides for the whole mesh."""

    def __init__(self, config: CoreConfig, bundle: Bundle, rng: random.Random) -> None:
        self._config = config
        self._bundle = bundle
        growth = Growth(by_credit=config.kv_reservation is KvReservation.CREDIT, risk=config.kv_risk)
        self._books = Books(rng, growth, config.max_lost_receivers)
        self._books.broker.computed_first = bundle.sends_computed_first
        self._transfers = TransferReports(self._books)
        self._reunion = Reunion(self._books, config.orphan_grace_s)
        self._moves = Moves(self._books)
        self._rebalancer = Rebalancer(self._books, self._moves)
        self._credit = Credit(self._books, self._rebalancer)
        self._judge = Judge()
        self._operations = Operations(self._books, self._moves, self._judge)
        self._pools = Pools(self._books, self._operations)
        self._modes = Modes(self._books)
        self._handovers = HandOvers(self._books, config.max_queue_s)
        self._packer = Packer(self._books, config.plans_in_flight, bundle, self._modes, self._handovers)
        self._learner = LatencyLearner(config.policy.latency, config.learning)
        self._admission = Admission(self._books, config)
        self._now_s = 0.0
        self._due_s = inf  # when the next time limit of a request ends
        self._wake_s = inf  # for when a Tick was asked for

    # --- what the driver may look at ---

    @property
    def bundle(self) -> str:
        return self._bundle.name

    @property
    def latency(self) -> LinearLatencyModel:
        """What steps are predicted by now."""
        return self._learner.model

    @property
    def num_waiting(self) -> int:
        return len(self._books.queue)

    @property
    def num_running(self) -> int:
        return len(self._books.requests) - len(self._books.queue)

    @property
    def unreceived(self) -> Collection[RequestKey]:
        """Placed requests whose KV has no receiver."""
        return self._books.unreceived.keys()

    @property
    def num_unreceived_tokens(self) -> int:
        """Prompt tokens of them."""
        return sum(state.request.num_prompt_tokens for state in self._books.unreceived.values())

    @property
    def max_waiting_kv_share(self) -> float:
        """The largest share of an instance's KV that waits to move away."""
        shares = (each.num_waiting_blocks / each.profile.num_blocks for each in self._books.instances.values())
        return max(shares, default=0.0)

    @property
    def instances(self) -> list[InstanceView]:
        return [instance.view for instance in self._books.instances.values()]

    @property
    def batching(self) -> str:
        """The batching mode that is chosen for all instances: `mb`, `eb` or `ebplus`."""
        return self._bundle.batching.name

    def batching_of(self, instance_id: InstanceId) -> BatchingView:
        """What an instance that is there does, and why."""
        return self._modes.view(self._books.instances[instance_id])

    def requests(self, limit: int) -> list[RequestView]:
        """The first ``limit`` requests in the order in which they came, those that run before those that wait."""
        states = self._books.requests.values()
        running = (state for state in states if state.phase is not Phase.WAITING)
        waiting = (state for state in states if state.phase is Phase.WAITING)
        return [state.view for state in islice(chain(running, waiting), limit)]

    @property
    def helped(self) -> list[RequestView]:
        """Requests whose prompts several instances compute in turn, in the order in which they were placed."""
        return [state.view for state in self._packer.relays.helped]

    def request(self, request_id: RequestId) -> RequestView | None:
        """A request that waits or runs."""
        state = self._books.requests.get(request_id)
        return None if state is None else state.view

    @property
    def tenants(self) -> list[TenantView]:
        """The keys whose requests wait or run, and those that were charged more than the others of late."""
        return self._books.queue.counters.views

    @property
    def operations(self) -> list[OperationView]:
        """Operators' operations that run, and the last that are over, in the order in which they came."""
        return sorted([*self._operations.views, *self._pools.views], key=lambda view: view.began_s)

    @property
    def num_operation_changes(self) -> int:
        """How often `operations`, `wishes` or `desired_pools` changed."""
        return self._operations.num_changes + self._pools.num_changes

    @property
    def wishes(self) -> list[OperationRequested]:
        """What operators want of the instances: for the scheduler that comes after this one, to ask for again."""
        return self._operations.wishes

    @property
    def resize_wish(self) -> ResizeRequested | None:
        """What they want of the pools, for the same."""
        return self._pools.wish

    @property
    def desired_pools(self) -> DesiredPools:
        """What whoever starts and stops processes has to do."""
        return self._pools.desired

    @property
    def ignored(self) -> Mapping[str, int]:
        """Reports that changed nothing because they did not fit the books, by what they were."""
        return self._books.ignored

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now; None if one can."""
        takers = [instance for instance in self._books.instances.values() if instance.is_usable]
        if have_pair(takers):
            return None
        if not any(instance.role.can_prefill for instance in takers):
            return "no prefill instance is there"
        if not any(instance.role.can_decode for instance in takers):
            return "no decode instance is there"
        return "no prefill and decode instance have the same model and KV layout"

    def is_active(self, key: RequestKey) -> bool:
        """Whether the request waits or runs."""
        return self._books.find(key) is not None

    def needs_prompt(self, key: RequestKey) -> bool:
        """Whether instances may yet be asked to compute its prompt."""
        state = self._books.find(key)
        return state is not None and (state.phase is Phase.WAITING or self._packer.relays.may_be_helped(key))

    def may_change_receiver(self, key: RequestKey) -> bool:
        """Whether its KV has not landed, so that it may go to another instance yet."""
        state = self._books.find(key)
        return state is not None and state.phase is Phase.PREFILLING

    # --- events in, commands out ---

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take note of an event and return what is to be done, in order."""
        self._now_s = now_s
        commands = self._books.commands = []
        if isinstance(event, DecodeStepsDone) and not self._own_steps(event):
            return commands  # nothing is decided by it
        self._admission.passed(now_s)
        if self._due_s <= now_s:
            self._expire()
        match event:
            case RequestArrived():
                self._arrived(event.request)
            case RequestCancelled():
                self._cancelled(event)
            case GatewayJoined():
                self._reunion.gateway_joined(
                    event.gateway_id, dict(event.waiting), now_s, unbegun=frozenset(event.unbegun)
                )
            case GatewayLost():
                self._reunion.gateway_lost(event.gateway_id)
            case InstanceJoined():
                self._reunion.instance_joined(event.profile, event.residents, now_s, stopping=event.stopping)
                self._credit.joined(self._books.instances[event.profile.instance_id])
                if self._learner.joined(event.profile):
                    self._rebuild_bundle(self._bundle.name)
                self._moves.joined(event.profile.instance_id, stopping=event.stopping)
                self._operations.joined(event.profile.instance_id, now_s)
                start_elsewhere(self._books, self._bundle)
            case InstanceUnreachable():
                if instance := self._instance(event.instance_id, event):
                    instance.set_reachable(False)
                    go_on_without(self._books, instance)
                    receive_elsewhere(self._books, instance)
            case InstanceSuspected():
                if instance := self._instance(event.instance_id, event):
                    instance.set_suspected(event.suspected)
                    if event.suspected:
                        self._moves.suspected(event.instance_id)
                        go_on_without(self._books, instance)
                    start_elsewhere(self._books, self._bundle)
            case InstanceLost():
                self._reunion.instance_lost(event.instance_id)
                self._moves.lost(event.instance_id)
                self._rebalancer.lost(event.instance_id)
                self._operations.lost(event.instance_id, now_s)
            case DrainRequested():
                if instance := self._instance(event.instance_id, event):
                    instance.set_draining(event.enabled)
                    self._moves.stops(event.instance_id, event.enabled)
            case RoleChangeRequested():
                self._role_change_requested(event)
            case OperationRequested():
                self._operations.request(event, now_s)
            case OperationCancelled():
                owner = self._pools if self._pools.knows(event.operation_id) else self._operations
                owner.cancel(event.operation_id, now_s)
            case ResizeRequested():
                self._pools.request(event, now_s)
            case InstanceStartFailed():
                self._pools.start_failed(event, now_s)
            case ProcessesReported():
                self._pools.processes_reported(event)
            case BundleChangeRequested():
                self._bundle_change_requested(event.bundle)
            case BatchingChangeRequested():
                self._batching_change_requested(event)
            case StepDone():
                self._step_done(event)
            case DecodeStepsDone():
                pass  # learnt from above
            case HelperJoined():
                self._packer.relays.joined(event, now_s, self._bundle)
            case GroupPrefix():
                self._packer.relays.healing.told(event)
            case (
                DecodeReserved()
                | TransferOffered()
                | TransferPaused()
                | TransferLanded()
                | TransferSent()
                | TransferFailed()
            ):
                self._transfers.handle(event)
            case MoveSent():
                self._moves.sent(event)
                self._rebalancer.timed(event)
            case MoveFailed():
                self._moves.failed(event)
            case RequestDropped():
                self._dropped(event)
            case RequestFinished():
                self._finished(event)
            case KvReleased():
                self._released(event)
            case CreditLow():
                if instance := self._instance(event.instance_id, event):
                    self._credit.is_low(instance, event.residents)
            case LoadReported():
                if instance := self._instance(event.instance_id, event):
                    instance.set_quarantined(event.num_quarantined_blocks)
            case Tick():
                self._wake_s = inf  # what is due has been looked at
            case _:
                assert_never(event)
        self._operations.advance(now_s)
        while self._pools.advance(now_s):
            self._operations.advance(now_s)
        if self._config.evacuates:
            self._moves.evacuate(self._operations.leaving, self._bundle.decode_placement)
            if self._bundle.rebalancing is not None:
                self._rebalancer.speed_up(self._bundle.rebalancing, now_s)
        self._credit.serve(self._bundle, self._learner.model, now_s, moves=self._config.evacuates)
        self._packer.pack(self._bundle, now_s)
        self._admission.note(commands)
        self._books.take_back_backends()
        self._ask_for_wake_up()
        return commands

    # --- requests come and go ---

    def _arrived(self, request: Request) -> None:
        books = self._books
        known = books.requests.get(request.request_id)
        owner = self._reunion.gateway_of(request.request_id) if known is None else known.request.gateway_id
        if owner is not None and owner != request.gateway_id:
            books.refuse(request, "another gateway's request has this id", self._config.retry_after_s)
            return
        if known is not None:
            if known.request.epoch >= request.epoch:
                books.ignore("RequestArrived")  # sent again after a reconnect
                return
            books.end(known, Outcome.SUPERSEDED)
        state = books.open(request, self._bundle.order.rank(request, 0, None))
        state.work_us = work_us(request, self._learner.model)
        instance_id = self._reunion.claim(state.key, request.gateway_id)
        if instance_id is not None:
            books.adopt(state, instance_id)
        elif self._is_full_for(request):
            self._judge.refused(request, self._now_s)
            message = f"{len(books.queue)} requests are waiting"
            books.reject(
                state,
                RejectReason.OVERLOADED,
                message,
                self._admission.full_retry_after_s(state, self._bundle.order, self._now_s),
            )
        elif self._is_too_long(request):
            message = f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} to generate fit no instance"
            books.reject(state, RejectReason.TOO_LONG, message, None)
        elif (refusal := self._admission.refusal(state, self._bundle.order, self._now_s)) is not None:
            self._judge.refused(request, self._now_s)
            message = (
                f"its first token is predicted {refusal.predicted_s:.2g} s from now, later than {refusal.limit_s:g} s"
            )
            books.reject(state, RejectReason.OVERLOADED, message, refusal.retry_after_s)
        else:
            books.queue.add(state, self._now_s + self._config.max_queue_s)

    def _is_full_for(self, request: Request) -> bool:
        if request.epoch > 0:
            return False  # it was let in before, and half of its answer may be out
        queue = self._books.queue
        return (
            len(queue) >= self._config.max_queue_entries
            or queue.num_tokens + request.num_prompt_tokens > self._config.max_queue_tokens
        )

    def _is_too_long(self, request: Request) -> bool:
        kinds = self._books.kinds
        return have_pair(kinds) and not could_place(request, kinds, self._books.groups, self._bundle)

    def _cancelled(self, event: RequestCancelled) -> None:
        was_orphan = self._reunion.forget(event.request_id, event.gateway_id)
        state = self._books.requests.get(event.request_id)
        if state is not None and state.request.gateway_id == event.gateway_id and state.request.epoch <= event.epoch:
            self._books.end(state, Outcome.CANCELLED, num_output_tokens=event.num_output_tokens)
        elif not was_orphan:
            self._books.ignore("RequestCancelled")

    def _finished(self, event: RequestFinished) -> None:
        if event.instance_id in self._books.instances:
            self._own_steps(event)
        state = self._books.find((event.request_id, event.epoch))
        if state is None or not state.needs(event.instance_id):
            self._books.ignore("RequestFinished")
            return
        self._modes.finished(state, event.num_output_tokens)
        self._credit.ended(state, event.instance_id, event.num_output_tokens)
        self._judge.finished(state.request, state.placed_s, state.first_token_s, event.num_output_tokens, self._now_s)
        # The one that reports frees its own KV; after the landing so do the sources, when they hear of it.
        spare = (event.instance_id, *(state.prefill_ids if state.phase is Phase.DECODING and state.transfer else ()))
        if state.move is not None:  # perhaps back to where it came from
            spare = tuple([name for name in spare if name != state.move.target_id])
        self._books.end(state, Outcome.FINISHED, num_output_tokens=event.num_output_tokens, spare=spare)

    # --- steps ---

    def _own_steps(self, event: DecodeStepsDone | RequestFinished) -> bool:
        """Learn from decode steps that an instance made by itself. Whether that changes what is decided."""
        own_steps, instance = event.own_steps, self._books.instances.get(event.instance_id)
        if own_steps is None:
            return False
        if instance is None:
            self._books.ignore(type(event).__name__)
            return False
        moved = self._learner.own_steps(instance, own_steps)
        if moved:
            self._rebuild_bundle(self._bundle.name)
        return moved

    def _step_done(self, event: StepDone) -> None:
        instance = self._instance(event.instance_id, event)
        if instance is None:
            return
        plan = instance.end_plan(event.plan_id)
        if plan is None:
            self._books.ignore("StepDone")
            return
        if self._learner.step_done(instance, plan, event):
            self._rebuild_bundle(self._bundle.name)
        done = {(chunk.request_id, chunk.epoch): chunk.num_tokens for chunk in event.chunks}
        for chunk in plan.chunks:
            state = self._books.find((chunk.request_id, chunk.epoch))
            if state is None:
                continue
            state.num_chunks_in_flight -= 1
            if state.phase is not Phase.PREFILLING:
                continue
            is_computed = done.get(state.key) == chunk.num_tokens
            if chunk.is_last and is_computed:
                state.first_token_s = self._now_s
                self._admission.first_token(state, self._now_s)
            if is_computed and state.group is not None:
                self._packer.relays.healing.computed(state, event.instance_id, chunk)
            if not is_computed and not state.is_healing:
                if state.needs(event.instance_id):  # not one that was freed in the last layer of its last chunk
                    self._books.restart(state, f"instance {event.instance_id} dropped a chunk")
            elif not is_computed:
                self._books.note_preemption(state)
            elif chunk.is_last and state.decode_id == event.instance_id:
                self._books.land(state)
            elif chunk.is_last:
                self._books.computed(state)
            else:
                self._books.note_preemption(state)

    def _dropped(self, event: RequestDropped) -> None:
        state = self._books.find((event.request_id, event.epoch))
        if state is not None and state.needs(event.instance_id):
            reason = f"instance {event.instance_id} does not serve it: {event.reason}"
            self._books.do_without(state, event.instance_id, reason)
        elif state is None or state.move is None or state.move.target_id != event.instance_id:
            self._books.ignore("RequestDropped")

    def _released(self, event: KvReleased) -> None:
        key = (event.request_id, event.epoch)
        instance = self._instance(event.instance_id, event)
        if instance is None:
            return
        hold = instance.give_back(key, event.transfer_id)
        if hold is None:
            self._books.ignore("KvReleased")
            return
        if hold.kind is not HoldKind.PREFILL:
            self._modes.released(instance, self._bundle, self._learner.estimate(instance.make))
        self._reunion.released(event.instance_id, key)
        self._moves.released(event.instance_id, key)
        state = self._books.find(key)
        # A source frees when the acknowledgement reaches it, perhaps before we hear of the landing. Any other release
        # that nobody asked for leaves a request without its KV.
        if (
            state is not None
            and state.needs(event.instance_id)
            and not (state.transfer is not None and state.transfer.was_sent_by(event.instance_id))
        ):
            self._books.do_without(state, event.instance_id, f"instance {event.instance_id} dropped its KV")
        self._books.grant(self._books.broker.release_of(key, event.instance_id))

    # --- an operator's changes ---

    def _role_change_requested(self, event: RoleChangeRequested) -> None:
        if instance := self._instance(event.instance_id, event):
            instance.set_role(event.role)
            self._books.regroup()
            self._books.commands.append(SetRole(instance_id=event.instance_id, role=event.role))
            self._books.queue.unpark()

    def _bundle_change_requested(self, name: str) -> None:
        try:
            self._rebuild_bundle(name)
        except ConfigError:
            self._books.ignore("BundleChangeRequested")

    def _batching_change_requested(self, event: BatchingChangeRequested) -> None:
        before = self._config
        policy = replace(before.policy, batching=event.batching, eb_threshold=event.threshold)
        self._config = replace(before, policy=policy)
        try:
            self._rebuild_bundle(self._bundle.name)
        except ConfigError:
            self._config = before
            self._books.ignore("BatchingChangeRequested")

    def _rebuild_bundle(self, name: str) -> None:
        """Decide by the bundle called ``name`` from here on, and by what is known of latency now.

        Raises ConfigError if there is none.
        """
        learner = self._learner
        policy = replace(self._config.policy, latency=learner.model, latency_of_make=learner.models)
        self._bundle = make_bundle(name, policy)
        self._books.broker.computed_first = self._bundle.sends_computed_first
        self._books.queue.reorder(self._bundle.order)
        for state in self._books.requests.values():
            if state.phase is Phase.PREFILLING:
                state.rank_by(self._bundle.order)

    # --- time ---

    def _expire(self) -> None:
        retry_after_s = self._config.retry_after_s
        while (state := self._books.queue.first_due(self._now_s)) is not None:
            unready = self.unready_reason
            if unready is None and state.request.epoch > 0:  # it was let in before, and half of its answer may be out
                self._books.queue.postpone(state, self._now_s + self._config.max_queue_s)
            elif unready is None:
                self._judge.refused(state.request, self._now_s)
                message = f"no room for {self._config.max_queue_s:g} s"
                self._books.reject(state, RejectReason.QUEUE_TIMEOUT, message, retry_after_s)
            else:
                self._books.reject(state, RejectReason.NO_INSTANCE, unready, retry_after_s)
        self._reunion.expire(self._now_s)
        self._handovers.expire(self._now_s)

    def _ask_for_wake_up(self) -> None:
        self._due_s = min(
            self._books.queue.next_deadline_s,
            self._reunion.next_deadline_s,
            self._operations.next_deadline_s,
            self._pools.next_deadline_s,
            self._handovers.next_deadline_s,
            self._modes.wake_s,
        )
        if self._wake_s <= self._now_s:
            self._wake_s = inf
        if self._due_s < self._wake_s:
            self._wake_s = self._due_s
            self._books.commands.append(WakeAt(at_s=self._due_s))

    # --- small things ---

    def _instance(self, instance_id: InstanceId, event: Event) -> InstanceBooks | None:
        instance = self._books.instances.get(instance_id)
        if instance is None:
            self._books.ignore(type(event).__name__)
        return instance

    def check_integrity(self) -> None:
        """Every book balances with every other; AssertionError names the numbers."""
        self._books.check_integrity()
        self._operations.check_integrity()
        self._moves.check_integrity()
        for instance in self._books.instances.values():
            num_plans = instance.num_regular_plans
            assert num_plans <= self._config.plans_in_flight, f"{instance.instance_id}: {num_plans} plans in flight"
