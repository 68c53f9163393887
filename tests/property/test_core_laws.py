"""Laws of the scheduling core over a modelled mesh in which commands and reports are late and everything may fail.

Every bundle keeps them, also when an operator switches between bundles at any moment; and so does memory on demand,
also where nobody expects outputs to be as long as they are, so that requests are retracted again and again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdmesh.core.batching.step_slots import StepSlots
from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ExpectCopy,
    ForgetRequest,
    Hold,
    Reject,
    Restart,
    RunStep,
    SendCopy,
    SetRole,
    Stop,
    StopCopy,
    WakeAt,
)
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.events import (
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
    KvReleased,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    StepDone,
    Tick,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.operator_events import (
    ActuatorLost,
    ActuatorReported,
    BatchingChangeRequested,
    BundleChangeRequested,
    FailedStart,
    OperationCancelled,
    OperationRequested,
    ResizeRequested,
    RollingRequested,
)
from pdmesh.core.operators.actuators import host_bytes
from pdmesh.core.operators.desired import DesiredState
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import (
    Epoch,
    GatewayId,
    InstanceId,
    InstanceProfile,
    RejectReason,
    Request,
    RequestId,
    RequestKey,
    Role,
    Then,
    TransferId,
)
from pdmesh.operations import (
    ManagedProcess,
    OperationId,
    OperationKind,
    OperationState,
    PoolCounts,
    PoolMember,
    ProcessKind,
)
from pdmesh.plans import StepPlan
from pdmesh.policy.batching import Mode
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.bundles import BUNDLE_NAMES, make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.prefill_groups import Schedule
from pdmesh_testing.core import FixedGrowth
from pdmesh_testing.examples import examples
from pdmesh_testing.local_decode import waiting_in_vain
from pdmesh_testing.modelled import ModelledInstance, modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

#: Many examples, and a busy machine may take minutes for them.
pytestmark = pytest.mark.timeout(400)

#: A second for each token: the seconds that pass between two events matter to every deadline.
POLICY = PolicyConfig(
    chunk_tokens=8,
    latency=LinearLatencyModel(a_s=0.0, b_s=1.0, c_s=0.0, d_s=0.0),
    prefill_step_s=8.0,
    slo_tpot_s=4.0,
    long_prompt_tokens=20,
    local_step_share=2.0,  # 8 s: prompts of up to 8 tokens are computed where they decode, now and then
)
CONFIG = CoreConfig(max_queue_entries=6, max_queue_s=50.0, policy=POLICY)
SHARES = {"": 1, "a": 1, "b": 3}  # of tenants
GATEWAYS = (GatewayId("g0"), GatewayId("g1"))
CALAMITIES = ("gateway lost", "gateway reconnects", "instance lost", "instance reconnects", "scheduler restarts")
WAYS_TO_LEAVE = ("is lost", "is lost", "reconnects", "is silent", "gives up")  # of a helper
MESHES = {
    "1P+1D": (Role.PREFILL, Role.DECODE),
    "2P+2D": (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    "2M": (Role.MIXED, Role.MIXED),
    "1P+1M+1D": (Role.PREFILL, Role.MIXED, Role.DECODE),
    "1P+2M": (Role.PREFILL, Role.MIXED, Role.MIXED),
    "4M in groups of 2": (Role.MIXED, Role.MIXED, Role.MIXED, Role.MIXED),
    "2P+2M in groups of 2": (Role.PREFILL, Role.PREFILL, Role.MIXED, Role.MIXED),
    "3P+1D in turn": (Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE),
    "1P+2M in turn": (Role.PREFILL, Role.MIXED, Role.MIXED),
    "3P+1M in turn": (Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.MIXED),
}

BLOCK_SIZE = 4  # tokens

#: Where prompts are computed in turn all of them are so many times longer, in as much time: chunks have 32 tokens at
#: least, and there must be several.
IN_TURN = 8

#: A short prompt waits for an instance without long ones, under others only where groups of a fixed size compute those;
#: long ones may go past it.
LETS_SHORT_WAIT = "pecsched-no-preemption"
LET_SHORT_WAIT_BESIDE_GROUPS = ("fcfs", "short-first", "reservation")


class MeshMachine(RuleBasedStateMachine):
    """Gateways, modelled instances, a core; each rule is one thing that may happen next."""

    @initialize(
        shape=st.sampled_from(sorted(MESHES)),
        bundle=st.sampled_from(BUNDLE_NAMES),
        schedule=st.sampled_from(tuple(Schedule)),
        reservation=st.sampled_from(tuple(KvReservation)),
        reckless=st.booleans(),
        has_pool=st.booleans(),
        num_classes=st.sampled_from((1, 1, 2)),
        num_stages=st.sampled_from((1, 1, 2, 3)),
        num_revisions=st.sampled_from((1, 1, 2)),
        weights_s=st.sampled_from((0.0, 0.0, 6.0)),
    )
    def begin(
        self,
        shape: str,
        bundle: str,
        schedule: Schedule,
        reservation: KvReservation,
        reckless: bool,
        has_pool: bool = False,
        num_classes: int = 1,
        num_stages: int = 1,
        num_revisions: int = 1,
        weights_s: float = 0.0,
    ) -> None:
        self.now_s = 0.0
        self.num_revisions, self.revision = num_revisions, 0
        self.num_classes = num_classes
        self.has_groups = "in groups" in shape
        in_turn = "in turn" in shape or self.has_groups
        self.scale = IN_TURN if in_turn else 1
        self.policy = replace(
            POLICY,
            chunk_tokens=POLICY.chunk_tokens * self.scale,
            latency=replace(POLICY.latency, b_s=POLICY.latency.b_s / self.scale, weights_s=weights_s),
            prefill_step_s=4 * weights_s or POLICY.prefill_step_s,
            long_prompt_tokens=POLICY.long_prompt_tokens * self.scale,
            sequence_parallel=schedule,
            group_size=2 if self.has_groups else 1,
            reserved_instances=2 if self.has_groups and has_pool else 0,
        )
        self.config = replace(CONFIG, kv_reservation=reservation, policy=self.policy)
        self.reckless = reckless
        self.max_total_of: dict[RequestKey, int] = {}
        self.chosen = make_bundle("pdmesh" if "in turn" in shape else bundle, self.policy)
        self.profiles = {
            profile.instance_id: profile
            for index, role in enumerate(MESHES[shape])
            for profile in [
                modelled_profile(
                    f"i{index}",
                    role,
                    num_blocks=24 if in_turn else 16,
                    block_size=BLOCK_SIZE * self.scale,
                    max_num_seqs=3,
                    num_transfer_backends=1,
                    num_layers=3,
                    joins_groups=in_turn,
                    num_stages=1 if in_turn else num_stages,
                    arithmetic=self.class_of(index),
                )
            ]
        }
        self.drawn_in: dict[RequestKey, str] = {}  # class of the instance that drew the last token
        self.drawn_with: dict[RequestKey, str] = {}  # its weights
        self.processes = set(self.profiles)  # that the actuator has, of instances that are there or come back
        self.services = {"gateway": 1, "scheduler": 1}  # processes that are no instances, with their pids
        self.mesh = ModelledMesh(self.profiles.values(), self.max_total_of)
        self.num_requests = 0
        self.num_operations = 0
        self.awaited: dict[RequestId, Request] = {}  # what gateways wait for, in its current epoch
        self.to_resume: set[RequestId] = set()
        self.retracted_once: set[RequestId] = set()  # of these
        self.num_drawn: dict[RequestId, int] = {}  # output tokens that the gateway has, in the current epoch
        self.gateway_of: dict[RequestKey, GatewayId] = {}
        self.placed: set[RequestKey] = set()
        self.new_core()

    def class_of(self, number: int) -> str:
        """Arithmetic classes take turns, among instances and the processes of one instance."""
        return f"class {number % self.num_classes}" if self.num_classes > 1 else ""

    def new_core(self) -> None:
        core: SchedulerCore | None = getattr(self, "core", None)
        desired = DesiredState() if core is None else core.desired
        self.core, self.diligent = (
            SchedulerCore(self.config, make_bundle(self.chosen.name, self.policy), random.Random(0)) for _ in range(2)
        )
        if self.reckless:
            make_reckless(self.core)
            make_reckless(self.diligent)
        self.arrivals: dict[RequestKey, Request] = {}  # that this core has heard of
        self.granted_blocks: dict[tuple[InstanceId, RequestKey], int] = {}
        make_diligent(self.diligent)
        self.ended: set[RequestKey] = set()
        self.waiting: dict[RequestKey, Request] = {}  # accepted and not placed
        self.offered: list[RequestKey] = []  # in order of first offer
        self.granted: set[RequestKey] = set()
        self.asked: dict[RequestKey, InstanceId] = {}  # for the backend of this receiver, and no answer yet
        self.plans: dict[tuple[InstanceId, int], StepPlan] = {}  # in flight
        self.num_unplanned: dict[RequestKey, int] = {}  # of placed requests: prompt tokens
        self.receiver_of: dict[RequestKey, InstanceId] = {}
        self.transfer_of: dict[RequestKey, TransferId] = {}
        self.num_receivers: Counter[RequestKey] = Counter()
        self.reserved: set[RequestKey] = set()  # the receiver knows of them
        self.reserved_moves: set[TransferId] = set()  # the same of running decodes
        self.target_of: dict[TransferId, InstanceId] = {}  # of running decodes that move
        self.wake_at_s: float | None = None
        self.leader_of: dict[RequestKey, InstanceId] = {}
        self.prefix_of: dict[RequestKey, int] = {}  # of prompts whose groups lost a helper: what leaders had then
        self.draining: set[InstanceId] = set()  # as they say themselves
        self.silent: set[InstanceId] = set()
        self.roles: dict[InstanceId, Role] = {}
        self.has_resized = False
        self.told: tuple[object, ...] | None = None  # as the actuator has last
        self.allocated: set[InstanceId] = set()  # their residents wait for the end of a prefill phase
        self.ahead: dict[RequestKey, tuple[InstanceId, int]] = {}  # computed without room to decode, and never had any
        for gateway_id in GATEWAYS:
            self.gateway_joins(gateway_id)
        for event in desired.events():
            self.feed(replace(event, patience_s=5.0) if isinstance(event, RollingRequested) else event)
        for instance in self.mesh.instances.values():
            self.feed(instance.rejoin(self.gateway_of))

    # --- the driver's part, with the laws ---

    def feed(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self.arrivals.setdefault(key_of(event.request), event.request)
        if isinstance(event, RequestArrived) and not self.core.is_active(key_of(event.request)):
            self.waiting[key_of(event.request)] = event.request
        if isinstance(event, TransferOffered):
            key = (event.request_id, event.epoch)
            if self.core.is_active(key) and key not in self.offered:
                self.offered.append(key)
        if isinstance(event, KvExpected) and event.transfer_id in self.target_of:
            self.reserved_moves.add(event.transfer_id)
        elif isinstance(event, KvExpected):
            key = (event.request_id, event.epoch)
            if self.transfer_of.get(key) == event.transfer_id:
                self.reserved.add(key)
        if isinstance(event, TransferLanded | TransferSent) and event.transfer_id in self.target_of:
            self.receiver_of[event.request_id, event.epoch] = self.target_of[event.transfer_id]
        if isinstance(event, KvReleased):
            self.granted_blocks.pop((event.instance_id, (event.request_id, event.epoch)), None)
        if isinstance(event, TransferPaused | TransferLanded | KvReleased):
            key = (event.request_id, event.epoch)
            if isinstance(event, TransferPaused) or self.asked.get(key) == event.instance_id:
                self.granted -= self.asked.keys() & {key}
                self.asked.pop(key, None)
        if isinstance(event, GroupPrefix) and (view := self.core.request(event.request_id)) is not None:
            # What was taken back for an earlier loss may have come there since: it may be computed again all the same.
            self.prefix_of[event.request_id, event.epoch] = min(event.num_tokens, view.num_planned_tokens)
        if isinstance(event, StepDone):
            self.plans.pop((event.instance_id, event.plan_id), None)
        if isinstance(event, InstanceJoined | InstanceLost):
            self.cut_off(event.profile.instance_id if isinstance(event, InstanceJoined) else event.instance_id)
        self.note_what_it_may_do(event)
        preempted = self.preempted()
        commands = self.core.handle(event, self.now_s)
        self.check_recomputed(event, commands)
        self.note_operations()
        self.check_classes(commands)
        self.check_weights(commands)
        assert self.diligent.handle(event, self.now_s) == commands, "an instance was overlooked"
        for command in commands:
            match command:
                case AdmitPrefill():
                    key = (command.request_id, command.epoch)
                    self.check_may_prefill(command)
                    self.check_waits(command)
                    if not command.leads:
                        shards, group = command.shards, command.group
                        leader_id = shards[0].instance_id if group is None else group.member_ids[0]
                        assert self.leader_of[key] == leader_id, f"{key} has two leaders"
                        self.mesh.send(command)
                        continue
                    assert key not in self.placed, f"{key} placed twice"
                    self.placed.add(key)
                    self.leader_of[key] = command.instance_id
                    self.num_unplanned[key] = self.waiting[key].num_prompt_tokens
                    self.check_overtakes_nobody(self.waiting[key])
                    del self.waiting[key]
                case ExpectCopy(transfer=transfer) | SendCopy(transfer=transfer) if transfer.then is Then.KEEP:
                    pass
                case ExpectCopy():
                    assert command.instance_id not in self.draining | self.closed, (
                        f"{command} on an instance that drains"
                    )
                    assert command.instance_id not in self.silent, f"{command} on an instance that is silent"
                    assert self.roles[command.instance_id].can_decode, f"{command} on an instance that does not decode"
                    key = (command.request_id, command.epoch)
                    if command.transfer.is_move:
                        self.target_of[command.transfer.transfer_id] = command.instance_id
                    else:
                        self.forget_receiver(key)
                        self.ahead.pop(key, None)
                        self.receiver_of[key] = command.instance_id
                        self.transfer_of[key] = command.transfer.transfer_id
                        self.num_receivers[key] += 1
                case SendCopy(transfer=transfer) if transfer.is_move:
                    assert transfer.transfer_id in self.reserved_moves, f"{command} before its target knows of it"
                case SendCopy():
                    key = (command.request_id, command.epoch)
                    assert key in self.reserved, f"{key} granted before its receiver knows of it"
                    rank = self.offered.index(key)
                    overtaken = [
                        other
                        for other in self.due(command.transfer.destination_ids[0])
                        if self.offered.index(other) < rank
                    ]
                    may_be = preempted
                    if self.chosen.sends_computed_first and self.is_computed(key):
                        may_be = preempted | {other for other in overtaken if not self.is_computed(other)}
                    assert may_be.issuperset(overtaken), "overtaken"
                    self.granted.add(key)
                case StopCopy(how=Stop.PAUSE):
                    key = (command.request_id, command.epoch)
                    assert key in self.granted
                    assert key not in self.asked, f"{key} asked twice"
                    self.asked[key] = self.receiver_of[key]
                case RunStep(plan=plan):
                    self.check_phase(command.instance_id, plan)
                    if plan.urgent:
                        self.check_urgent(command.instance_id, plan)
                    self.plans[command.instance_id, plan.plan_id] = plan
                    for chunk in plan.chunks:
                        key = (chunk.request_id, chunk.epoch)
                        assert chunk.start >= self.prefix_of.get(key, 0), f"{chunk}, which its leader has"
                        self.num_unplanned[key] -= chunk.num_tokens
                case SetRole(instance_id=instance_id, role=role):
                    self.roles[instance_id] = role
                case ForgetRequest():
                    key = (command.request_id, command.epoch)
                    assert key not in self.ended, f"{key} ended twice"
                    self.ended.add(key)
                    self.waiting.pop(key, None)
                    self.ahead.pop(key, None)
                case Hold(decodes=False):
                    self.check_growth(command)
                case Hold(ends_move=False):
                    self.forget_receiver((command.request_id, command.epoch))
                    self.ahead.pop((command.request_id, command.epoch), None)
                case Reject():
                    if self.is_current(command.request_id, command.epoch):
                        self.check_may_reject(command)
                        del self.awaited[command.request_id]
                case Restart():
                    if command.retracted:
                        self.check_retraction((command.request_id, command.epoch))
                    if self.is_current(command.request_id, command.epoch):
                        self.to_resume.add(command.request_id)
                        self.retracted_once |= {command.request_id} if command.retracted else set()
                case WakeAt():
                    assert command.at_s > self.now_s, "asked to be woken in the past"
                    self.wake_at_s = command.at_s
                case _:
                    pass
            self.mesh.send(command)
        for key in self.core.awaiting_decode:
            self.forget_receiver(key)
        self.no_backend_is_held_back()

    def forget_receiver(self, key: RequestKey) -> None:
        """Its KV has none, or another one from now on; its first offer counts yet."""
        self.receiver_of.pop(key, None)
        self.transfer_of.pop(key, None)
        self.asked.pop(key, None)
        self.granted.discard(key)
        self.reserved.discard(key)

    def check_recomputed(self, event: Event, commands: Sequence[Command]) -> None:
        """What a receiver fails of is computed again only if its source lacks it, or its receivers failed too often."""
        match event:
            case TransferFailed() | RequestDropped() | KvReleased() | InstanceLost():
                failed_id = event.instance_id
            case InstanceJoined():
                failed_id = event.profile.instance_id
            case _:
                return
        for command in commands:
            if isinstance(command, Restart) and not command.retracted and not command.reason.endswith("is drained"):
                key = (command.request_id, command.epoch)
                if self.scale > 1 and key in self.leader_of and self.leader_of[key] not in self.silent:
                    assert failed_id in (self.leader_of[key], self.receiver_of.get(key)), f"{key} lost but a helper"
                source = self.mesh.instances.get(self.leader_of.get(key, failed_id))
                has_all = source is not None and key in source.sequences and source.sequences[key].moves_on
                if has_all and self.receiver_of.get(key) == failed_id:
                    assert self.num_receivers[key] > self.config.max_lost_receivers, f"{key} is computed again"

    def note_what_it_may_do(self, event: Event) -> None:
        """Roles and drains, as the core has heard of them."""
        match event:
            case InstanceJoined(profile=profile, stopping=stopping):
                self.roles[profile.instance_id] = profile.role
                (self.draining.add if stopping else self.draining.discard)(profile.instance_id)
                self.silent.discard(profile.instance_id)
            case InstanceLost(instance_id=instance_id):
                self.draining.discard(instance_id)
                self.silent.discard(instance_id)
            case InstanceSuspected(instance_id=instance_id, suspected=suspected):
                (self.silent.add if suspected else self.silent.discard)(instance_id)
            case DrainRequested(instance_id=instance_id, enabled=enabled):
                (self.draining.add if enabled else self.draining.discard)(instance_id)
            case _:
                pass

    def note_operations(self) -> None:
        """Instances that operators took out of use, as the operations say that run or ran."""
        self.closed: set[InstanceId] = set()
        self.has_resized |= any(view.kind is OperationKind.RESIZE for view in self.core.operations)
        if self.has_resized:  # what it started, or took back, is in use whatever was done to its name before
            drains = [each for each in self.core.desired.operations if each.kind is OperationKind.DRAIN]
            self.closed.update(each.instance_id for each in drains)
        for view in () if self.has_resized else self.core.operations:
            if view.state is OperationState.DONE and view.kind not in (OperationKind.ROLE, OperationKind.MOVE):
                (self.closed.add if view.kind is OperationKind.DRAIN else self.closed.discard)(view.instance_id)
        self.closed.update(
            view.instance_id
            for view in self.core.operations
            if view.state is OperationState.RUNNING and view.kind in (OperationKind.DRAIN, OperationKind.RESTART)
        )
        self.closed &= {view.instance_id for view in self.core.instances}

    def check_classes(self, commands: Sequence[Command]) -> None:
        """A request leaves its arithmetic class only where no instance of it has room; its group never does.

        Room only shrinks while an event is handled, so what is left of it afterwards was there.
        """
        mesh = self.core._mesh
        asked_for = {
            view.request_id for view in self.core.operations if view.kind is OperationKind.MOVE and view.request_id
        }
        for command in commands:
            match command:
                case AdmitPrefill(leads=False, group=group) if group is not None:
                    classes = {mesh.instances[member_id].arithmetic for member_id in group.member_ids}
                    assert len(classes) == 1, f"{command} in {classes}"
                case ExpectCopy(transfer=transfer) if transfer.then is not Then.KEEP:
                    key, source = (command.request_id, command.epoch), mesh.instances[transfer.source_ids[0]]
                    target = mesh.instances[command.instance_id]
                    if source.arithmetic == target.arithmetic:
                        continue
                    of_class = [
                        each for each in mesh.instances.values() if each.arithmetic_class == source.arithmetic_class
                    ]
                    if transfer.is_hand_over:
                        request = mesh.requests[command.request_id].request
                        able = [each for each in of_class if each.takes_new and each.can_decode(request)]
                    elif command.request_id in asked_for:
                        continue
                    else:
                        num_blocks, hold = target.allocations[key].num_blocks, source.allocations[key]
                        able = [each for each in of_class if each.can_take_over(key, num_blocks, hold.max_blocks)]
                    assert not able, f"{command} to another class, though {able[0].instance_id} has room"
                case _:
                    pass

    def check_weights(self, commands: Sequence[Command]) -> None:
        """No command names instances of two weights identities, nor gives a request to another than its tokens'."""
        instances = self.core._mesh.instances
        for command in commands:
            match command:
                case ExpectCopy() | SendCopy():
                    ids = {command.instance_id, *command.transfer.source_ids, *command.transfer.destination_ids}
                case AdmitPrefill(group=group, transfer=transfer):
                    ids = {command.instance_id, *(() if group is None else group.member_ids)}
                    ids.update(() if transfer is None else transfer.destination_ids)
                    request = self.awaited.get(command.request_id)
                    if request is not None and request.epoch == command.epoch and request.weights:
                        assert instances[command.instance_id].weights == request.weights, f"{command} with others"
                case _:
                    continue
            weights = {instances[instance_id].weights for instance_id in ids if instance_id in instances}
            assert len(weights) == 1, f"{command} between {weights}"

    def check_may_prefill(self, command: AdmitPrefill) -> None:
        role = self.roles[command.instance_id]
        is_begun = bool(self.awaited[command.request_id].weights) and not command.moves_on
        closed = () if is_begun and self.num_revisions > 1 else self.closed
        assert command.instance_id not in {*self.draining, *closed}, f"{command} on an instance that drains"
        assert command.instance_id not in self.silent, f"{command} on an instance that is silent"
        if command.group is not None:
            assert role.can_prefill, f"{command} on an instance that does not prefill"
        elif not command.moves_on and not self.awaited[command.request_id].ends_with_prompt:
            may_decode = role.can_decode or self.may_decode_locally(command.instance_id)
            assert may_decode, f"{command} on an instance that does not decode"
        else:
            may_prefill = role.can_prefill or (role is Role.DECODE and self.chosen.local_prefill is not None)
            assert may_prefill, f"{command} on an instance that does not prefill"

    def may_decode_locally(self, instance_id: InstanceId) -> bool:
        """Whether a prefill instance may decode: by the policy, unless an operator chose its role."""
        is_fixed = self.core._operations.on_instances.fixes_role(instance_id)
        return self.chosen.local_decode is not None and self.roles[instance_id] is Role.PREFILL and not is_fixed

    def check_waits(self, command: AdmitPrefill) -> None:
        """Of what is computed ahead of room to decode no more is on an instance than may wait there, or one alone."""
        if command.awaits_receiver:
            key = (command.request_id, command.epoch)
            self.ahead[key] = command.instance_id, command.num_blocks
            there = [num for instance_id, num in self.ahead.values() if instance_id == command.instance_id]
            share = sum(there) / self.profiles[command.instance_id].num_blocks
            assert len(there) == 1 or share <= self.chosen.waiting_kv_share, f"{command}, beside {there}"

    def check_growth(self, command: Hold) -> None:
        key = (command.request_id, command.epoch)
        most = num_blocks_for(self.max_total_of[key], BLOCK_SIZE * self.scale)
        assert command.num_blocks <= most, f"{command}, of which {most} are of use"
        before = self.granted_blocks.get((command.instance_id, key), 0)
        assert command.num_blocks > before, f"{command} after {before}"
        self.granted_blocks[command.instance_id, key] = command.num_blocks

    def check_retraction(self, key: RequestKey) -> None:
        """Somebody older, on the same instance or about to release its KV there, goes before it."""
        assert self.config.kv_reservation is KvReservation.ON_DEMAND
        victim = self.arrivals.get(key)
        decode_id = self.receiver_of.get(key, self.leader_of.get(key))
        if victim is None or decode_id is None:
            return
        instance = self.mesh.instances[decode_id]
        leaving = {(event.request_id, event.epoch) for event in instance.events if isinstance(event, KvReleased)}
        others = [
            other
            for other, request in self.arrivals.items()
            if other not in self.ended
            and (self.receiver_of.get(other, self.leader_of.get(other)) == decode_id or other in leaving)
            and order_of(request) < order_of(victim)
        ]
        adopted = set(instance.sequences) - self.arrivals.keys()
        assert others or adopted, f"{key} was retracted, and is the oldest on {decode_id}"

    def check_may_reject(self, command: Reject) -> None:
        """Who was let in once does not wait in vain, nor for a place in the queue."""
        if self.awaited[command.request_id].epoch > 0:
            assert command.reason is not RejectReason.QUEUE_TIMEOUT, f"{command}, though it was resumed"
            assert command.reason is not RejectReason.OVERLOADED, f"{command}, though it was resumed"

    def check_urgent(self, instance_id: InstanceId, plan: StepPlan) -> None:
        assert self.chosen.interruption is not None
        assert not plan.with_decodes
        overtaken = [other for key, other in self.plans.items() if key[0] == instance_id]
        assert overtaken, "nothing to overtake"
        assert not any(other.urgent for other in overtaken), "two urgent plans"
        in_flight = {(chunk.request_id, chunk.epoch) for other in overtaken for chunk in other.chunks}
        assert in_flight.isdisjoint((chunk.request_id, chunk.epoch) for chunk in plan.chunks), "overtakes itself"

    def check_phase(self, instance_id: InstanceId, plan: StepPlan) -> None:
        """Where prompts have phases of their own, chunks hold the decodes, and a plan without chunks ends that."""
        batching = self.core.batching_of(instance_id)
        if batching is not None and batching.mode is Mode.EXCLUSIVE and plan.chunks:
            assert plan.holds_decodes, f"{plan} in a decode phase"
        if plan.holds_decodes:
            assert self.roles[instance_id] is not Role.PREFILL
            assert not plan.with_decodes, f"{plan} decodes in a prefill phase"
            assert not plan.urgent, f"{plan} may come late, into a decode phase"
            self.allocated.add(instance_id)
        elif not plan.urgent:
            assert plan.chunks or instance_id in self.allocated, f"{plan} has nothing to do"
            self.allocated.discard(instance_id)

    def preempted(self) -> set[RequestKey]:
        """Placed requests of whose prompt some is left to plan, and nothing planned."""
        chunks = Counter((chunk.request_id, chunk.epoch) for plan in self.plans.values() for chunk in plan.chunks)
        return {key for key in self.num_unplanned if self.num_left(key) and not chunks[key] and key not in self.ended}

    def num_left(self, key: RequestKey) -> int:
        """Prompt tokens that are not planned. What falls to the loss of a helper is known to the core alone."""
        view = self.core.request(key[0]) if key in self.prefix_of else None
        return self.num_unplanned[key] if view is None else view.num_prompt_tokens - view.num_planned_tokens

    def is_computed(self, key: RequestKey) -> bool:
        """Whether nothing of its prompt is left to plan, nor in a plan."""
        planned = any(key == (chunk.request_id, chunk.epoch) for plan in self.plans.values() for chunk in plan.chunks)
        return self.num_unplanned[key] == 0 and not planned

    def due(self, receiver_id: InstanceId) -> list[RequestKey]:
        """Who waits for a backend of this receiver and nothing else."""
        return [
            key
            for key in self.offered
            if key not in self.ended
            and key not in self.granted
            and key in self.reserved
            and self.receiver_of.get(key) == receiver_id
        ]

    def no_backend_is_held_back(self) -> None:
        """A preempted request keeps a backend that others wait for until its sender has answered, not longer."""
        preempted = self.preempted()
        for receiver_id in self.mesh.instances:
            num_due = len([key for key in self.due(receiver_id) if key not in preempted])
            idle = [
                key
                for key in self.granted & preempted
                if self.receiver_of.get(key) == receiver_id and key not in self.asked
            ]
            num_asked = sum(receiver == receiver_id for receiver in self.asked.values())
            assert num_due <= num_asked or not idle, f"{idle} keep backends of {receiver_id}"

    def cut_off(self, instance_id: InstanceId) -> None:
        """What was under way to and from an instance is lost."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] != instance_id}
        self.asked = {key: receiver for key, receiver in self.asked.items() if receiver != instance_id}
        self.granted_blocks = {key: number for key, number in self.granted_blocks.items() if key[0] != instance_id}
        self.allocated.discard(instance_id)

    def waits_for_weights(self, request: Request) -> bool:
        """Whether others may pass a request: other weights began it than new ones get, or none can decode it now."""
        new_weights = self.core.new_weights
        return request.weights not in ("", new_weights) or (new_weights is None and not request.ends_with_prompt)

    def check_overtakes_nobody(self, placed: Request) -> None:
        """By the bundle's order, its lanes and its ties, of all of its tenant that wait.

        A policy may let a prompt wait for its turn behind long ones, and with it its lane.
        """
        bundle = self.core._choice.bundle  # made for the stages of the present instances
        order = bundle.order
        waiting = {
            key: request
            for key, request in self.waiting.items()
            if request.tenant == placed.tenant and (request is placed or not self.waits_for_weights(request))
        }
        ranks = {key: order.rank(request, 0, None) for key, request in waiting.items()}
        line = sorted(waiting, key=lambda key: (ranks[key].place, *order_of(self.waiting[key])), reverse=True)
        heads = list({ranks[key].bucket: key for key in line}.values())
        keys = order.keys([ranks[key] for key in heads], self.now_s)
        first = sorted(zip(keys, heads, strict=True), key=lambda pair: (pair[0], order_of(self.waiting[pair[1]])))
        line = [head for _, head in first]
        for head in line[: line.index(key_of(placed))]:
            may_wait = (
                bundle.is_long(self.waiting[head])
                or bundle.name == LETS_SHORT_WAIT
                or (bundle.name in LET_SHORT_WAIT_BESIDE_GROUPS and self.has_groups)
            )
            assert may_wait, f"{head} is overtaken"

    def is_current(self, request_id: RequestId, epoch: Epoch) -> bool:
        request = self.awaited.get(request_id)
        return request is not None and request.epoch == epoch

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()
            assert not waiting_in_vain(self.core)
            self.mesh.transfers()
            assert set(self.waiting) == {key for key in self.waiting if self.core.is_active(key)}
            assert self.core.num_waiting == len(self.waiting)

    # --- gateways ---

    @rule(
        prompt=st.integers(1, 30),
        output=st.integers(1, 32),
        gateway=st.sampled_from(GATEWAYS),
        priority=st.sampled_from((0, 0, -1, 3)),
        slo_ttft_s=st.sampled_from((None, None, 1.0, 40.0)),
        tenant=st.sampled_from(("", "", "", "a", "b")),
    )
    def request_arrives(
        self,
        prompt: int,
        output: int,
        gateway: GatewayId,
        priority: int,
        slo_ttft_s: float | None,
        tenant: str = "",
    ) -> None:
        self.num_requests += 1
        request = Request(
            request_id=RequestId(f"r{self.num_requests:04}"),
            epoch=Epoch(0),
            gateway_id=gateway,
            num_prompt_tokens=prompt * self.scale,
            max_tokens=output,
            arrival_s=self.now_s,
            priority=priority,
            slo_ttft_s=slo_ttft_s,
            tenant=tenant,
            share=SHARES[tenant],
        )
        self.submit(request)

    def submit(self, request: Request) -> None:
        self.awaited[request.request_id] = request
        self.max_total_of[key_of(request)] = request.max_total_tokens
        self.gateway_of[key_of(request)] = request.gateway_id
        self.feed(RequestArrived(request))

    @precondition(lambda self: self.to_resume)
    @rule(data=st.data())
    def request_resumes(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.to_resume)))
        self.to_resume.remove(request_id)
        self.resume(request_id)

    def resume(self, request_id: RequestId) -> None:
        old = self.awaited.get(request_id)
        if old is None:
            return
        new = replace(old, epoch=Epoch(old.epoch + 1))
        if request_id in self.retracted_once:
            self.retracted_once.remove(request_id)
            num_drawn = min(self.num_drawn.pop(request_id, 0), old.max_tokens - 1)
            new = replace(
                new,
                num_prompt_tokens=old.num_prompt_tokens + num_drawn,
                max_tokens=old.max_tokens - num_drawn,
                arithmetic=self.drawn_in.get(key_of(old), "") if num_drawn else old.arithmetic,
                weights=self.drawn_with.get(key_of(old), "") if num_drawn else old.weights,
            )
        self.submit(new)

    @precondition(lambda self: self.awaited)
    @rule(data=st.data())
    def client_goes_away(self, data: st.DataObject) -> None:
        request = self.awaited.pop(data.draw(st.sampled_from(sorted(self.awaited))))
        num_drawn = data.draw(st.sampled_from((None, 0, 3)))
        self.feed(RequestCancelled(request.gateway_id, request.request_id, request.epoch, num_drawn))

    @precondition(lambda self: self.awaited)
    @rule(data=st.data())
    def request_is_sent_again(self, data: st.DataObject) -> None:
        request = self.awaited[data.draw(st.sampled_from(sorted(self.awaited)))]
        if self.core.is_active(key_of(request)):
            self.feed(RequestArrived(request))

    def gateway_joins(self, gateway: GatewayId, *, tells_unbegun: bool = False) -> None:
        waiting = tuple(key_of(request) for request in self.awaited.values() if request.gateway_id == gateway)
        unbegun = tuple(request_id for request_id, _ in waiting) if tells_unbegun else ()
        self.feed(GatewayJoined(gateway, waiting, unbegun))

    def gateway_is_lost(self, gateway: GatewayId) -> None:
        self.awaited = {key: request for key, request in self.awaited.items() if request.gateway_id != gateway}
        self.feed(GatewayLost(gateway))

    # --- instances ---

    def pick(self, data: st.DataObject, instances: list[ModelledInstance]) -> ModelledInstance | None:
        return data.draw(st.sampled_from(instances)) if instances else None

    @rule(data=st.data(), at_most=st.sampled_from((1, 9, 9)))
    def commands_arrive(self, data: st.DataObject, at_most: int) -> None:
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.commands]):
            for _ in range(min(at_most, len(instance.commands))):
                instance.take_command()

    @precondition(lambda self: self.mesh.pieces.under_way)
    @rule(data=st.data(), at_most=st.sampled_from((1, 9, 9)))
    def pieces_arrive(self, data: st.DataObject, at_most: int) -> None:
        destinations = {piece.destination_id for piece in self.mesh.pieces.under_way}
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.instance_id in destinations]):
            instance.take_pieces(at_most)

    @rule(data=st.data(), at_most=st.sampled_from((1, 9, 9)))
    def reports_arrive(self, data: st.DataObject, at_most: int) -> None:
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.events]):
            for _ in range(min(at_most, len(instance.events))):
                self.deliver(instance)

    @rule(data=st.data(), ended_by_first_token=st.booleans())
    def mesh_works(self, data: st.DataObject, ended_by_first_token: bool) -> None:
        """Commands, a step and its reports, without a delay."""
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.commands or i.plans or i.running]):
            while instance.commands:
                instance.take_command()
            instance.take_pieces(99)
            if instance.running or instance.can_begin:
                self.run_step(instance, ended_by_first_token)
            while instance.events:
                self.deliver(instance)

    @rule(num_rounds=st.integers(1, 3), num_short=st.integers(0, 3), with_long=st.booleans())
    def rush_hour(self, num_rounds: int, num_short: int, with_long: bool) -> None:
        """Short prompts overtake a long one that is being computed, and need the backend that it has."""
        for prompt in [30] * with_long + [5] * num_short:
            self.request_arrives(prompt, 4, GATEWAYS[0], prompt, None)
        for _ in range(num_rounds):
            for instance in self.mesh.instances.values():
                while instance.commands:
                    instance.take_command()
                instance.take_pieces(99)
                if instance.running or instance.can_begin:
                    self.run_step(instance, ended_by_first_token=False)
            for instance in self.mesh.instances.values():
                while instance.events:
                    self.deliver(instance)

    @precondition(lambda self: self.scale > 1)
    @rule(data=st.data(), prompt=st.integers(21, 30), num_rounds=st.integers(1, 4), how=st.sampled_from(WAYS_TO_LEAVE))
    def helper_leaves(self, data: st.DataObject, prompt: int, num_rounds: int, how: str) -> None:
        """Some instances compute a prompt in turn, and then one of them helps no more: what it owed others is lost."""
        self.request_arrives(prompt, 4, GATEWAYS[0], 0, None)
        for _ in range(num_rounds):
            for instance in self.mesh.instances.values():
                while instance.commands:
                    instance.take_command()
                instance.take_pieces(data.draw(st.sampled_from((0, 1, 99))))
                if instance.running or instance.can_begin:
                    self.run_step(instance, ended_by_first_token=False)
            for instance in self.mesh.instances.values():
                while instance.events:
                    self.deliver(instance)
        helpers = [
            (instance, key)
            for instance in self.mesh.instances.values()
            for key, held in instance.sequences.items()
            if not held.leads
        ]
        if not helpers:
            return
        helper, key = data.draw(st.sampled_from(helpers))
        match how:
            case "is lost":
                self.lose(helper)
            case "reconnects":
                self.feed(InstanceUnreachable(helper.instance_id))
                self.feed(helper.rejoin(self.gateway_of))
            case "is silent":
                self.feed(InstanceSuspected(helper.instance_id))
            case _:
                helper.drop(key)

    @rule(data=st.data(), num_requests=st.integers(1, 3), drains=st.booleans(), is_granted=st.booleans())
    def decodes_leave(self, data: st.DataObject, num_requests: int, drains: bool, is_granted: bool) -> None:
        """Some requests come to decode, and then one of them, or all of an instance's, are to move."""
        for _ in range(num_requests):
            self.request_arrives(5, 40, GATEWAYS[0], 0, None)
        for _ in range(3):
            self.all_goes_well()
        decoding = [i for i in self.mesh.instances.values() if i.decoding]
        if source := self.pick(data, decoding):
            if drains:
                self.feed(DrainRequested(source.instance_id))
            else:
                key = data.draw(st.sampled_from(source.decoding))
                for other_id in self.mesh.instances:
                    self.operate(OperationKind.MOVE, other_id, role=Role.MIXED, timeout_s=60.0, request_id=key[0])
            if is_granted:
                self.all_goes_well()

    def all_goes_well(self) -> None:
        """For a round; what moves stays under way."""
        for instance in self.mesh.instances.values():
            while instance.commands:
                instance.take_command()
            instance.take_pieces(99)
            if instance.running or instance.can_begin:
                self.run_step(instance, ended_by_first_token=False)
        for transfer in self.mesh.transfers():
            if transfer[0].sequences[transfer[2]].is_computed:
                self.mesh.land(*transfer)
        for instance in self.mesh.instances.values():
            while instance.events:
                self.deliver(instance)

    def deliver(self, instance: ModelledInstance) -> None:
        self.feed(instance.events.popleft())

    @rule(data=st.data())
    def report_arrives_twice(self, data: st.DataObject) -> None:
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.events]):
            event = instance.events[0]
            self.deliver(instance)
            if not isinstance(event, InstanceJoined):
                self.feed(event)

    @rule(data=st.data(), ended_by_first_token=st.booleans())
    def step_runs(self, data: st.DataObject, ended_by_first_token: bool) -> None:
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.running or i.can_begin]):
            self.run_step(instance, ended_by_first_token)

    @rule(data=st.data())
    def step_begins(self, data: st.DataObject) -> None:
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.can_begin]):
            instance.begin_step()

    def run_step(self, instance: ModelledInstance, ended_by_first_token: bool) -> None:
        if instance.can_begin:
            instance.begin_step()
        if instance.can_end:
            instance.end_step(ended_by_first_token=ended_by_first_token)
            self.see_drawn(instance)

    @rule(data=st.data())
    def transfer_lands(self, data: st.DataObject) -> None:
        transfers = [(s, r, key) for s, r, key in self.mesh.transfers() if s.sequences[key].is_computed]
        if transfers:
            self.mesh.land(*data.draw(st.sampled_from(transfers)))

    @rule(data=st.data(), at_sender=st.booleans())
    def transfer_fails(self, data: st.DataObject, at_sender: bool) -> None:
        transfers = self.mesh.transfers()
        if transfers:
            sender, receiver, key = data.draw(st.sampled_from(transfers))
            self.mesh.fail(sender if at_sender else receiver, key)

    @rule(data=st.data(), how=st.sampled_from(("lands", "lands", "commits", "fails", "fails there", "is acknowledged")))
    def a_move_goes_on(self, data: st.DataObject, how: str) -> None:
        if how == "is acknowledged":
            if landed := self.mesh.landed_moves():
                self.mesh.acknowledge_move(*data.draw(st.sampled_from(landed)))
            return
        if not (moves := self.mesh.moves()):
            return
        source, target, key = data.draw(st.sampled_from(moves))
        match how:
            case "lands":
                self.mesh.land_move(source, target, key)
            case "commits":
                self.mesh.commit_move(source, key)
            case "fails":
                self.mesh.fail_move(source, key)
            case _:
                self.mesh.fail(target, key)

    @rule(data=st.data(), num_steps=st.sampled_from((1, 40)))
    def instance_decodes(self, data: st.DataObject, num_steps: int) -> None:
        """By itself, and tells of it with its next report or after so many steps."""
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.can_decode]):
            instance.decode(num_steps)
            self.see_drawn(instance)

    @rule(data=st.data())
    def hold_runs_out(self, data: st.DataObject) -> None:
        """Nothing was planned for too long: what is held goes on."""
        allocated = [i for i in self.mesh.instances.values() if i.own.held and not i.running and not i.plans]
        if instance := self.pick(data, allocated):
            instance.own.held = False

    @rule(data=st.data(), num_tokens=st.sampled_from((1, 5, 30)))
    def decodes_go_on(self, data: st.DataObject, num_tokens: int) -> None:
        instances = [i for i in self.mesh.instances.values() if i.decoding and not i.own.held]
        if instance := self.pick(data, instances):
            instance.draw(num_tokens)
            self.see_drawn(instance)

    def see_drawn(self, instance: ModelledInstance) -> None:
        """Tokens do not pass through the scheduler: a gateway knows of them, and of the end, before it does."""
        for key in instance.decoding:
            if self.is_current(*key):
                self.num_drawn[key[0]] = instance.num_tokens(key) - self.awaited[key[0]].num_prompt_tokens
                self.drawn_in[key] = instance.profile.arithmetic
                self.drawn_with[key] = weights = instance.profile.weights
                assert self.awaited[key[0]].weights in ("", weights), f"{key} has tokens of two identities"
        for event in instance.events:
            if isinstance(event, RequestFinished) and self.is_current(event.request_id, event.epoch):
                del self.awaited[event.request_id]

    @rule(data=st.data())
    def generation_ends(self, data: st.DataObject) -> None:
        free = [instance for instance in self.mesh.instances.values() if not instance.own.held]
        decoding = [(i, key) for i in free for key in i.decoding]
        if decoding:
            instance, key = data.draw(st.sampled_from(decoding))
            instance.finish(key)
            self.see_drawn(instance)

    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS), what=st.sampled_from(CALAMITIES))
    def something_breaks(self, data: st.DataObject, gateway: GatewayId, what: str) -> None:
        match what:
            case "gateway lost":
                self.gateway_is_lost(gateway)
            case "gateway reconnects":
                self.gateway_joins(gateway, tells_unbegun=data.draw(st.booleans()))
            case "instance lost":
                self.instance_is_lost(data)
            case "instance reconnects":
                self.instance_reconnects(data)
            case _:
                self.new_core()

    def instance_is_lost(self, data: st.DataObject) -> None:
        if len(self.mesh.instances) > 1 and (instance := self.pick(data, list(self.mesh.instances.values()))):
            self.lose(instance)

    def lose(self, instance: ModelledInstance) -> None:
        del self.mesh.instances[instance.instance_id]
        self.mesh.pieces.cut_off(instance.instance_id)
        self.feed(InstanceLost(instance.instance_id))

    @precondition(lambda self: self.num_revisions > 1)
    @rule()
    def weights_are_replaced(self) -> None:
        """Where they lie: the processes that are started from now on load others."""
        self.revision += 1

    def next_process(self, before: InstanceProfile) -> InstanceProfile:
        """A process that loads the weights that there are now."""
        weights = f"weights {self.revision % self.num_revisions}" if self.revision else ""
        return replace(before, pid=before.pid + 1, weights=weights, started_at=self.now_s)

    @rule(data=st.data())
    def stopped_process_starts_again(self, data: st.DataObject) -> None:
        """An operation asked for that; what is still there is lost with it."""
        if instance := self.pick(data, self.told_to_stop):
            self.start_again(instance)

    @property
    def told_to_stop(self) -> list[ModelledInstance]:
        return [instance for instance in self.mesh.instances.values() if instance.machine.is_told_to_stop]

    def start_again(self, instance: ModelledInstance) -> None:
        """A process ends, and another one takes its place."""
        instance_id = instance.instance_id
        self.mesh.pieces.cut_off(instance_id)
        self.feed(InstanceLost(instance_id))
        self.profiles[instance_id] = self.next_process(self.profiles[instance_id])
        self.mesh.instances[instance_id] = self.new_instance(instance_id)
        self.feed(self.mesh.instances[instance_id].rejoin(self.gateway_of))

    @rule(data=st.data())
    def instance_returns(self, data: st.DataObject) -> None:
        absent = sorted(set(self.profiles) - set(self.mesh.instances))
        if absent:
            instance_id = data.draw(st.sampled_from(absent))
            self.mesh.instances[instance_id] = self.new_instance(instance_id)
            self.feed(self.mesh.instances[instance_id].rejoin(self.gateway_of))

    def new_instance(self, instance_id: InstanceId) -> ModelledInstance:
        self.mesh.pieces.cut_off(instance_id)  # what others sent there before they heard of its end
        return ModelledInstance(self.profiles[instance_id], self.max_total_of, self.mesh.pieces)

    @rule(data=st.data())
    def another_process_takes_the_place(self, data: st.DataObject) -> None:
        """It began before the lease of the one that died ended, so that nobody told of its loss."""
        if instance := self.pick(data, list(self.mesh.instances.values())):
            instance_id = instance.instance_id
            self.feed(InstanceUnreachable(instance_id))
            before = self.profiles[instance_id]
            arithmetic = self.class_of(int(before.arithmetic[-1:] or 0) + 1)
            self.profiles[instance_id] = replace(self.next_process(before), arithmetic=arithmetic)
            self.mesh.instances[instance_id] = self.new_instance(instance_id)
            self.feed(self.mesh.instances[instance_id].rejoin(self.gateway_of))

    def instance_reconnects(self, data: st.DataObject) -> None:
        if instance := self.pick(data, list(self.mesh.instances.values())):
            self.feed(InstanceUnreachable(instance.instance_id))
            self.feed(instance.rejoin(self.gateway_of))

    @rule(data=st.data(), suspected=st.sampled_from((True, True, False)))
    def instance_is_silent(self, data: st.DataObject, suspected: bool) -> None:
        """Or only busy: it goes on with what it has. Nothing that decodes is lost by it."""
        if instance := self.pick(data, list(self.mesh.instances.values())):
            decoding = {view.request_id for view in self.core.requests(1000) if view.decodes}
            self.feed(InstanceSuspected(instance.instance_id, suspected))
            assert all(self.core.request(request_id) is not None for request_id in decoding)

    @rule(data=st.data(), enabled=st.sampled_from((True, True, False)))
    def instance_drains(self, data: st.DataObject, enabled: bool) -> None:
        if instance := self.pick(data, list(self.mesh.instances.values())):
            self.feed(DrainRequested(instance.instance_id, enabled))

    @rule(data=st.data())
    def instance_stops(self, data: st.DataObject) -> None:
        """It refuses what is on its way from now on; the scheduler hears of that later."""
        if instance := self.pick(data, [i for i in self.mesh.instances.values() if i.machine.holding.admits]):
            instance.machine.holding.admits = False
            instance.events.append(DrainRequested(instance.instance_id))

    @rule(
        data=st.data(),
        kind=st.sampled_from(tuple(OperationKind)),
        role=st.sampled_from(tuple(Role)),
        timeout_s=st.sampled_from((0.0, 4.0, 60.0)),
        force=st.booleans(),
    )
    def operator_asks(
        self, data: st.DataObject, kind: OperationKind, role: Role, timeout_s: float, force: bool
    ) -> None:
        if instance := self.pick(data, list(self.mesh.instances.values())):
            self.operate(kind, instance.instance_id, role=role, timeout_s=timeout_s, force=force)

    @rule(data=st.data(), timeout_s=st.sampled_from((4.0, 60.0)))
    def operator_moves_a_request(self, data: st.DataObject, timeout_s: float) -> None:
        decoding = [view.request_id for view in self.core.requests(1000) if view.decodes]
        if decoding and (target := self.pick(data, list(self.mesh.instances.values()))):
            request_id, move = data.draw(st.sampled_from(decoding)), OperationKind.MOVE
            self.operate(move, target.instance_id, role=Role.MIXED, timeout_s=timeout_s, request_id=request_id)

    def operate(self, kind: OperationKind, instance_id: InstanceId, **fields: Any) -> None:
        self.feed(self.operation(kind, instance_id, **fields))

    def operation(
        self,
        kind: OperationKind,
        instance_id: InstanceId,
        *,
        role: Role,
        timeout_s: float,
        force: bool = False,
        request_id: RequestId | None = None,
    ) -> OperationRequested:
        """One more, as an operator asks for it."""
        self.num_operations += 1
        return OperationRequested(
            operation_id=OperationId(f"o{self.num_operations}"),
            kind=kind,
            instance_id=instance_id,
            timeout_s=timeout_s,
            role=role if kind is OperationKind.ROLE else None,
            force=force,
            request_id=request_id,
        )

    @rule(
        counts=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)),
        timeout_s=st.sampled_from((0.0, 4.0, 60.0)),
        start_timeout_s=st.sampled_from((4.0, 200.0)),
        num_spare=st.sampled_from((0, 9, 9)),
    )
    def operator_resizes(
        self, counts: tuple[int, int, int], timeout_s: float, start_timeout_s: float, num_spare: int
    ) -> None:
        self.actuator_tells(num_spare=num_spare)
        prefill, decode, mixed = counts
        self.num_operations += 1
        self.feed(
            ResizeRequested(
                operation_id=OperationId(f"o{self.num_operations}"),
                pools=PoolCounts(prefill=prefill, decode=decode, mixed=mixed),
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
            )
        )

    @rule(
        timeout_s=st.sampled_from((0.0, 4.0, 60.0)),
        start_timeout_s=st.sampled_from((4.0, 200.0)),
        num_spare=st.sampled_from((0, 9, 9)),
        force=st.booleans(),
    )
    def operator_restarts_everything(
        self, timeout_s: float, start_timeout_s: float, num_spare: int, force: bool
    ) -> None:
        self.actuator_tells(num_spare=num_spare)
        self.num_operations += 1
        self.feed(
            RollingRequested(
                operation_id=OperationId(f"o{self.num_operations}"),
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
                force=force,
            )
        )

    @rule(
        num_rounds=st.sampled_from((1, 5, 30, 60)),
        timeout_s=st.sampled_from((0.0, 60.0)),
        is_cancelled=st.sampled_from((False, False, True)),
    )
    def everything_is_restarted(self, num_rounds: int, timeout_s: float, is_cancelled: bool) -> None:
        """All goes well for so long; what is begun goes on under other rules."""
        is_quiet = not any(view.state is OperationState.RUNNING for view in self.core.operations)
        is_whole = set(self.profiles) == set(self.mesh.instances) == self.processes
        is_ready = is_whole and all(
            each.machine.holding.admits and not each.events for each in self.mesh.instances.values()
        )
        is_ready = is_ready and all(view.reachable and not view.draining for view in self.core.instances)
        is_ready = is_ready and self.core.unready_reason is None
        before = {instance_id: self.profiles[instance_id].pid for instance_id in self.mesh.instances} | self.services
        self.operator_restarts_everything(timeout_s=timeout_s, start_timeout_s=200.0, num_spare=9, force=False)
        name = OperationId(f"o{self.num_operations}")
        for turn in range(num_rounds):
            if is_cancelled and turn == num_rounds // 2:
                self.feed(OperationCancelled(name))
            self.all_goes_well()
            for instance in self.mesh.instances.values():
                if not instance.own.held and len(instance.machine.residents):
                    instance.draw(99)
                    self.see_drawn(instance)
            for what in self.wanted()[:1]:
                self.actuate(what)
            if self.now_told != self.told:
                self.actuator_tells()
            for instance in self.told_to_stop[:1]:
                self.start_again(instance)
            self.time_passes(4.0)
            states = {view.operation_id: view for view in self.core.operations}
            if is_quiet and is_ready:
                assert self.core.unready_reason is None, "nobody serves while another one is restarted"
                assert states[name].state is not OperationState.FAILED, states[name].detail
        if any(view.operation_id == name and view.state is OperationState.DONE for view in self.core.operations):
            after = {instance_id: profile.pid for instance_id, profile in self.profiles.items()} | self.services
            assert all(after[each] > pid for each, pid in before.items() if each in after), f"{before}, {after}"

    @property
    def running(self) -> tuple[InstanceId, ...]:
        return tuple(sorted(self.processes))

    @rule(num_spare=st.sampled_from((0, 9, 9)))
    def actuator_tells(self, num_spare: int = 9, failed: InstanceId | None = None) -> None:
        """What runs; what an instance takes is one byte."""
        self.told = self.now_told
        instances = [
            ManagedProcess(name=name, pid=self.profiles[name].pid) for name in self.running if name in self.profiles
        ]
        services = [ManagedProcess(name=name, pid=pid, kind=ProcessKind(name)) for name, pid in self.services.items()]
        failures = () if failed is None else (FailedStart(instance_id=failed, reason="no memory"),)
        self.feed(
            ActuatorReported(
                actuator_id="a",
                processes=(*instances, *services),
                available_bytes=num_spare * host_bytes(next(iter(self.profiles.values()))),
                failed=failures,
            )
        )

    @property
    def now_told(self) -> tuple[object, ...]:
        """What there is to tell."""
        return (*self.running, *self.services.items())

    @rule()
    def actuator_falls_silent(self) -> None:
        self.told = None
        self.feed(ActuatorLost("a"))

    @rule(data=st.data(), fails=st.sampled_from((False, False, True)))
    def actuator_acts(self, data: st.DataObject, fails: bool) -> None:
        """It does one thing that is wanted; what became of it, it tells later."""
        if wanted := self.wanted():
            self.actuate(data.draw(st.sampled_from(wanted)), fails=fails)

    def wanted(self) -> list[PoolMember | InstanceId | ManagedProcess]:
        """What the actuator has not done yet: to start one, to stop one, or to replace a process."""
        desired = self.core.desired_processes("a")
        start = [member for member in desired.start if member.instance_id not in self.processes]
        stop = [instance_id for instance_id in desired.stop if instance_id in self.processes]
        return [*start, *stop, *(each for each in desired.replace if self.services.get(each.name) == each.pid)]

    def actuate(self, what: PoolMember | InstanceId | ManagedProcess, *, fails: bool = False) -> None:
        if isinstance(what, ManagedProcess):
            self.services[what.name] += 1
            if what.kind is ProcessKind.SCHEDULER:
                self.new_core()
        elif not isinstance(what, PoolMember):
            self.processes.remove(what)
            del self.profiles[what]
            if (instance := self.mesh.instances.pop(what, None)) is not None:
                assert not instance.sequences, f"{what} is stopped, and holds {instance.sequences}"
                self.feed(InstanceLost(what))
        elif fails:
            self.actuator_tells(failed=what.instance_id)
        else:
            instance_id = what.instance_id
            like = next(iter(self.profiles.values()))
            self.profiles[instance_id] = replace(self.next_process(like), instance_id=instance_id, role=what.role)
            self.processes.add(instance_id)
            self.mesh.instances[instance_id] = self.new_instance(instance_id)
            self.feed(self.mesh.instances[instance_id].rejoin(self.gateway_of))

    @rule(data=st.data())
    def operator_takes_back(self, data: st.DataObject) -> None:
        running = [view for view in self.core.operations if view.state is OperationState.RUNNING]
        if running:
            self.feed(OperationCancelled(data.draw(st.sampled_from(running)).operation_id))

    @rule(data=st.data())
    def copies_begin_or_end(self, data: st.DataObject) -> None:
        """While copies run, freed blocks are quarantined."""
        if instance := self.pick(data, list(self.mesh.instances.values())):
            if instance.machine.holding.copies_run:
                instance.do(instance.machine.end_copies())
            else:
                instance.machine.holding.copies_run = True

    @rule(data=st.data())
    def load_is_reported(self, data: st.DataObject) -> None:
        if instance := self.pick(data, list(self.mesh.instances.values())):
            instance.do(instance.machine.report_load())

    @rule(bundle=st.sampled_from(BUNDLE_NAMES))
    def operator_switches(self, bundle: str) -> None:
        self.chosen = make_bundle(bundle, self.policy)
        self.feed(BundleChangeRequested(bundle))
        assert self.core.bundle == bundle

    @rule(batching=st.sampled_from(("", "mb", *["eb"] * 3, "ebplus")), threshold=st.sampled_from((None, 0.3, 0.7)))
    def operator_switches_the_mode(self, batching: str, threshold: float | None) -> None:
        self.feed(BatchingChangeRequested(batching, threshold))
        assert not batching or self.core.batching == batching

    @rule(seconds=st.sampled_from((0.0, 0.5, 5.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        if self.wake_at_s is not None and self.wake_at_s <= self.now_s:
            self.feed(Tick())

    # --- the end ---

    def teardown(self) -> None:
        """Let everything that is under way come to its end: then all is free."""
        if not hasattr(self, "core"):
            return
        for instance_id in sorted(set(self.profiles) - set(self.mesh.instances)):
            self.mesh.instances[instance_id] = self.new_instance(instance_id)
            self.feed(self.mesh.instances[instance_id].rejoin(self.gateway_of))
        for instance in self.told_to_stop:
            self.start_again(instance)
        for instance_id, instance in self.mesh.instances.items():
            instance.machine.holding.admits = True
            instance.do(instance.machine.end_copies())
            self.feed(InstanceSuspected(instance_id, suspected=False))
            instance.events.append(DrainRequested(instance_id, enabled=False))
            self.operate(OperationKind.UNDRAIN, instance_id, role=Role.MIXED, timeout_s=0.0, force=False)
            role, kind = self.last_role(instance_id), OperationKind.ROLE
            last = self.operation(kind, instance_id, role=role, timeout_s=0.0, force=True)
            instance.events.append(last)
            instance.do(instance.machine.report_load())
        for _ in range(1000):
            if not self.settle_once():
                break
        self.books_balance()
        assert not self.wanted(), f"{self.wanted()} is left to do for the actuator"
        running = [view for view in self.core.operations if view.state is OperationState.RUNNING]
        assert not running, f"{running} never ended"
        assert not self.awaited, f"{self.awaited} never ended"
        assert self.core.num_waiting == 0
        assert self.core.num_running == 0
        assert not any(tenant.num_waiting or tenant.num_running for tenant in self.core.tenants)
        for view in self.core.instances:
            assert view.num_free_blocks == view.num_blocks, f"{view.instance_id} is not free"
            assert view.num_seats_taken == 0
            assert view.num_queued_tokens == 0
            instance = self.mesh.instances[view.instance_id]
            assert not instance.sequences, f"{view.instance_id} still holds {instance.sequences}"

    def last_role(self, instance_id: InstanceId) -> Role:
        """With which an instance ends: as it began, if what is left can serve then."""
        roles = {self.profiles[name].role for name in self.mesh.instances}
        can_serve = any(role.can_prefill for role in roles) and any(role.can_decode for role in roles)
        return self.profiles[instance_id].role if can_serve else Role.MIXED

    def settle_once(self) -> bool:
        """One round of everything but failures; False when nothing is left to do."""
        busy = False
        while wanted := self.wanted():
            self.actuate(wanted[0])
            busy = True
        for instance in self.told_to_stop:
            self.start_again(instance)
            busy = True
        if self.now_told != self.told:
            self.actuator_tells()
            busy = True
        for instance in self.mesh.instances.values():
            while instance.commands:
                instance.take_command()
                busy = True
            instance.take_pieces(99)
            while instance.can_begin or (instance.running and instance.can_end):
                self.run_step(instance, ended_by_first_token=False)
                busy = True
            if not instance.own.held and len(instance.machine.residents):
                instance.draw(99)
                self.see_drawn(instance)
                busy = True
        for transfer in self.mesh.transfers():
            if transfer[0].sequences[transfer[2]].is_computed:
                self.mesh.land(*transfer)
                busy = True
        for move in self.mesh.moves():
            self.mesh.land_move(*move)
            busy = True
        for source, key in self.mesh.landed_moves():
            self.mesh.acknowledge_move(source, key)
            busy = True
        for instance in self.mesh.instances.values():
            while instance.events:
                self.deliver(instance)
                busy = True
        for request_id in sorted(self.to_resume):
            self.to_resume.remove(request_id)
            self.resume(request_id)
            busy = True
        if not busy:
            waiting = [plan for instance in self.mesh.instances.values() for plan in instance.running]
            assert not waiting, f"{waiting} wait for each other"
        new_weights = self.core.new_weights
        serving = [each.view for each in self.core._mesh.instances.values() if new_weights in (None, each.weights)]
        if not busy and self.core.num_waiting and self.chosen.why_not(serving) is not None:
            self.operator_switches("fcfs")  # a pool that is empty has requests wait until somebody joins it
            busy = True
        if not busy and not any(instance.sequences for instance in self.mesh.instances.values()):
            may_be_unready = self.has_resized or self.num_revisions > 1
            is_served = not may_be_unready or self.core.unready_reason is None
            num_unserved = sum(map(self.waits_for_weights, self.waiting.values()))
            assert self.core.num_waiting <= num_unserved or not is_served, "requests wait though the mesh is empty"
            assert not self.allocated, f"residents of {self.allocated} would wait for ever"
        if not busy and self.wake_at_s is not None and self.wake_at_s > self.now_s:
            self.now_s = self.wake_at_s
            self.feed(Tick())
            busy = True
        return busy


class EveryInstance(StepSlots):
    """Looks at every instance each time, and leaves none out that might be of use."""

    def update(self, bundle: Bundle) -> None:
        self._reset(bundle)
        super().update(bundle)

    def refresh(self, instances: Iterable[InstanceState]) -> None:
        super().refresh({*self._mesh.instances.values(), *instances})

    def computing(self) -> list[InstanceState]:
        not_idle = (instance for instance in self._mesh.instances.values() if not self.is_idle(instance))
        return sorted(not_idle, key=lambda instance: instance.number)  # one that joined again has its number still


def make_reckless(core: SchedulerCore) -> None:
    """Have it expect everybody to be done soon, and let in far more than there is room for."""
    on_demand = core._mesh.growth.on_demand
    core._mesh.growth = FixedGrowth(1.0, on_demand=on_demand, risk=0.5)


def make_diligent(core: SchedulerCore) -> None:
    """Have it pack as if it could not tell which instances have changed."""
    core._packer._step_slots = EveryInstance(core._mesh, CONFIG.plans_in_flight, core._choice.bundle, core._modes)


def key_of(request: Request) -> RequestKey:
    return request.request_id, request.epoch


def order_of(request: Request) -> tuple[float, str]:
    return request.arrival_s, request.request_id


MeshMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
TestMesh = MeshMachine.TestCase


class Drawn:
    """Stands for Hypothesis' data: draws the elements at these places, then the first ones."""

    def __init__(self, *places: int) -> None:
        self.places = list(places)

    def draw(self, strategy: Any) -> Any:
        return strategy.elements[self.places.pop(0) if self.places else 0]


def test_what_decodes_where_it_is_computed_waits_for_no_backend_whatever_its_source_offered_before() -> None:
    """An example of 2026-11-23 in which the laws took such a request for one that is overtaken."""
    mesh, data = MeshMachine(), cast("st.DataObject", Drawn(0, 0, 0, 2, 0, 1))
    full = KvReservation.FULL
    mesh.begin(shape="1P+1M+1D", bundle="pdmesh", reservation=full, reckless=False, schedule=Schedule.PIPELINED)
    mesh.another_process_takes_the_place(data=data)
    mesh.another_process_takes_the_place(data=data)
    mesh.rush_hour(num_rounds=1, num_short=3, with_long=True)
    mesh.step_runs(data=data, ended_by_first_token=True)
    mesh.something_breaks(data=data, gateway=GATEWAYS[0], what="instance reconnects")
    mesh.step_runs(data=data, ended_by_first_token=False)
    mesh.rush_hour(num_rounds=1, num_short=0, with_long=True)
    mesh.something_breaks(data=data, gateway=GATEWAYS[0], what="instance reconnects")
    mesh.rush_hour(num_rounds=1, num_short=0, with_long=False)
    mesh.teardown()


def test_what_no_weights_can_decode_may_be_passed_by_what_ends_with_its_prompt() -> None:
    """An example of 2026-11-30 in which the laws took the former for overtaken."""
    mesh = MeshMachine()
    full = KvReservation.FULL
    mesh.begin(
        shape="1P+1D", bundle="fcfs", reservation=full, reckless=False, schedule=Schedule.PIPELINED, num_revisions=2
    )
    mesh.weights_are_replaced()
    mesh.another_process_takes_the_place(data=cast("st.DataObject", Drawn(1)))
    for output in (2, 1):
        mesh.request_arrives(prompt=8, output=output, gateway=GATEWAYS[0], priority=0, slo_ttft_s=None)
    assert list(mesh.waiting) == [("r0001", 0)]
    mesh.teardown()
