"""Whether the scheduling core still decides as it did: digests of all that it was told and all that it commanded.

Usage: python -m benchmarks.simulation.command_digest [--azure FILE] [--mooncake FILE] [--all] [--bundle NAME ...]
                                           [--write FILE | --compare FILE]

A digest is over every ``(now_s, event, commands)`` of a run, in the words of commit 905a652: `RENAMED`, `ADDED`,
`NEW_EVENTS` and `TRANSLATED` say what has had another name or shape since, and `DECIDED_ANEW` what is decided otherwise
on purpose, for which digests were taken again; all are printed. The runs are simulations
of two traces and random workloads over modelled instances,
which lose transfers, instances, gateways and the scheduler, and are drained, given other roles and quarantined. As at
the baseline, a prompt is computed again if its receiver fails (`max_lost_receivers` 0), no pair of processes is
remembered as cut (`cut_memory_s` 0), no prefill instance decodes (`decodes_locally` false), and nothing moves away from
an instance that is drained (`evacuates` false). Each is run under every bundle. Without
``--all`` it takes the first requests of each trace and the first random workloads.

``--compare`` (by default with ``command_digest.json`` beside it) exits 1 if a digest is another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ExpectCopy,
    ForgetRequest,
    Hold,
    Reject,
    Restart,
    SendCopy,
    SetPlaces,
    SetRole,
    Stop,
    StopCopy,
    WakeAt,
)
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    CacheReported,
    DrainRequested,
    Event,
    GatewayJoined,
    GatewayLost,
    InstanceJoined,
    InstanceLost,
    InstanceUnreachable,
    KvExpected,
    LoadReported,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    StepDone,
    Tick,
    TransferFailed,
    TransferSent,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import KvLayout
from pdmesh.model import NO_TRANSFER, Epoch, GatewayId, InstanceId, Request, RequestId, RequestKey, Role, Then
from pdmesh.plans import PrefillGroup
from pdmesh.policy.bundles import BUNDLE_NAMES, make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.traces import read_trace
from pdmesh_testing.modelled import ModelledInstance, modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

BASELINE = Path(__file__).with_suffix(".json")

# --- the words of 905a652 -----------------------------------------------------------------------------------------

#: Types of events and commands: what they are called, what they were called.
RENAMED: Mapping[str, str] = {"KvLow": "CreditLow"}

#: What a command was by its ``how``.
STOPPED: Mapping[str, str] = {"pause": "PauseTransfer", "withdraw": "WithdrawTransfer", "cancel": "CancelMove"}

#: Fields that did not exist, as "Type.field" or "Type.field.field of that".
ADDED: Sequence[str] = (
    "RequestArrived.request.tenant",
    "RequestArrived.request.share",
    "RequestArrived.request.num_tokens_before",
    "RequestArrived.request.arithmetic",
    "RequestArrived.silent_source_id",
    "RequestArrived.request.prefix",
    "RequestArrived.request.always_moves",
    "RequestArrived.request.prefix_weights",
    "RequestArrived.request.weights",
    "RequestArrived.request.session",
    "InstanceJoined.profile.weights",
    "InstanceJoined.profile.started_at",
    "StepDone.lent_share",
    "TransferSent.carrier",
    "MoveSent.carrier",
    "KvReleased.granules",
    "KvReleased.num_known",
    "AdmitPrefill.keeps_prefix",
    "LoadReported.num_cached_blocks",
    "LoadReported.num_offloaded_granules",
    "InstanceJoined.offloaded",
    "InstanceJoined.dropped",
    "InstanceJoined.jumps",
    "InstanceJoined.uses",
    "InstanceJoined.profile.num_offload_granules",
    "InstanceJoined.profile.load_bytes_per_s",
    "InstanceJoined.profile.num_stages",
    "InstanceJoined.profile.max_kv_tokens",
    "InstanceJoined.profile.kv_layout.window",
    "InstanceJoined.profile.kv_layout.windowed_layers",
    "InstanceJoined.profile.kv_layout.pages",
    "InstanceJoined.profile.kv_layout.has_states",
    "Reject.reject_ttl_s",
    "Restart.retracted",
    "Restart.blame",
    "RequestCancelled.gateway_id",
    "RequestCancelled.num_output_tokens",
    "ForgetRequest.gateway_id",
    "ForgetRequest.drawn_by",
    "DecodeReserved.transfer_id",
    "HelperJoined.transfer_id",
    "TransferOffered.transfer_id",
    "TransferPaused.transfer_id",
    "TransferLanded.transfer_id",
    "TransferSent.transfer_id",
    "InstanceJoined.profile.drafts",
    "RequestFinished.num_drafted_tokens",
    "RequestFinished.num_accepted_tokens",
    "TransferSent.sent_s",
    "TransferSent.destination_id",
    "MoveSent.sent_s",
    "MoveSent.destination_id",
    "TransferFailed.transfer_id",
    "FreeKv.transfer_id",
    "PlaceDecode.chain",
    "PlaceDecode.home_id",
    "KvReleased.transfer_id",
    *(f"RunStep.plan.{name}" for name in ("holds_decodes", "in_parallel", "at_once")),
    "StepDone.num_decode_context_tokens",
    "StepDone.own_steps",
    "StepDone.began_s",
    "StepDone.ended_s",
    "StepDone.waited_s",
    "RequestFinished.own_steps",
    "InstanceJoined.stopping",
    "InstanceJoined.profile.host",
    "InstanceJoined.kept",
    "GatewayJoined.unbegun",
    "InstanceJoined.profile.joins_groups",
    "InstanceJoined.profile.compute",
    "InstanceJoined.profile.arithmetic",
    "InstanceJoined.profile.deterministic",
    "InstanceJoined.profile.rank_pids",
    "InstanceJoined.profile.num_cached_states",
    *(f"{name}.states" for name in ("InstanceJoined", "KvReleased", "CacheReported")),
)

#: Fields that are no more, with what they had where nothing asked for them.
REMOVED: Mapping[str, Any] = {"RunStep.plan.group": None, "InstanceJoined.profile.group_id": ""}

#: Events that did not exist. They are left out where the core answers nothing, as it must where nothing is learnt.
NEW_EVENTS: Sequence[str] = ("DecodeStepsDone",)


def _admit_prefill(fields: dict[str, Any]) -> dict[str, Any]:
    """shards were num_blocks and members (none for a group of one), transfer was decode_instance_id"""
    if "shards" in fields:
        shards, transfer = fields.pop("shards"), fields.pop("transfer")
        fields["members"] = [shard["instance_id"] for shard in shards]
        fields["num_blocks"] = sum(_num_blocks(s) for s in shards if s["instance_id"] == fields["instance_id"])
        fields["decode_instance_id"] = None if transfer is None else transfer["destinations"][0]["instance_id"]
    if len(fields["members"]) == 1:
        fields["members"] = []
    return fields


def _place_decode(fields: dict[str, Any]) -> dict[str, Any]:
    """transfer was num_blocks, prefill_instance_id and capability"""
    if "transfer" in fields:
        transfer = fields.pop("transfer")
        fields["num_blocks"] = _num_blocks(transfer["destinations"][0])
        fields["prefill_instance_id"] = transfer["sources"][0]["instance_id"]
        fields["capability"] = transfer["capability"]
    return fields


def _grant_transfer(fields: dict[str, Any]) -> dict[str, Any]:
    """transfer was decode_instance_id and capability"""
    if "transfer" in fields:
        transfer = fields.pop("transfer")
        fields["decode_instance_id"] = transfer["destinations"][0]["instance_id"]
        fields["capability"] = transfer["capability"]
    return fields


def _instance_joined(fields: dict[str, Any]) -> dict[str, Any]:
    """residents told neither what they may come to hold nor what brought their KV, and none were spread"""
    for resident in fields["residents"]:
        for name in ("max_total_tokens", "transfer_id", "granules", "members", "part", "user"):
            resident.pop(name, None)
    return fields


def _num_blocks(shard: dict[str, Any]) -> int:
    start, stop = shard["part"][0]
    return int(stop - start)


#: Types whose fields had another shape: what makes the old fields of the new ones, and leaves old ones as they are.
TRANSLATED: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "AdmitPrefill": _admit_prefill,
    "PlaceDecode": _place_decode,
    "GrantTransfer": _grant_transfer,
    "InstanceJoined": _instance_joined,
}


#: What commands for an end of a copy were, by whether it was of cached granules.
_COPIES: Mapping[tuple[type, bool], str] = {
    (ExpectCopy, False): "PlaceDecode",
    (ExpectCopy, True): "FetchKept",
    (SendCopy, False): "GrantTransfer",
    (SendCopy, True): "SendKept",
}


def _split(said: Event | Command) -> tuple[str, dict[str, Any]]:
    """Six commands and four events were two or three each, and what is evicted was three fields of its command"""
    name, fields = type(said).__name__, msgspec.to_builtins(said)
    if isinstance(said, ExpectCopy | SendCopy):
        is_fetch = said.transfer.then is Then.KEEP
        name = _COPIES[type(said), is_fetch]
        if is_fetch:
            fields["transfer"]["purpose"] = "fetch"
            del fields["transfer"]["then"]
    if name == "FetchKept":
        fields |= dict.fromkeys(("drop", "offload", "evict"), ())
    fields |= fields.pop("room", {})
    match said:
        case KvExpected():
            name = "HelperJoined" if said.transfer_id == NO_TRANSFER else "DecodeReserved"
        case TransferSent():
            if fields.pop("was_decoding"):
                name, fields["frozen_s"] = "MoveSent", fields.pop("exposed_s")
        case TransferFailed():
            if fields.pop("committed") is not None:
                name, fields["committed"] = "MoveFailed", said.committed
        case CacheReported():
            lost = fields.pop("lost")
            if said.kept is None:
                name = "OffloadedLost"
                fields = {"instance_id": said.instance_id, "granules": lost}
        case StopCopy():
            name = STOPPED[fields.pop("how")]
            if said.how is Stop.PAUSE:
                del fields["transfer_id"]
        case Hold(decodes=False):
            name = "GrowKv"
        case Hold(ends_move=True):
            name, fields["transfer_id"] = "ResumeDecode", fields.pop("move_id")
            for field in ("num_blocks", "num_elsewhere_blocks", "decodes"):
                fields.pop(field, None)
        case Hold():
            name = "KeepKv"
            del fields["decodes"]
        case SetPlaces(places=PrefillGroup()):
            name, fields["group"] = "SetGroup", fields.pop("places")
        case SetPlaces(places=str()):
            name, fields["home_id"] = "SetHome", fields.pop("places")
        case SetPlaces():
            name, fields["members"] = "SetMembers", fields.pop("places")
        case _:
            pass
    return name, fields


def in_old_words(said: Event | Command) -> tuple[str, dict[str, Any]]:
    """An event or a command as 905a652 would have written it."""
    name, fields = _split(said)
    if isinstance(said, Reject | Restart):
        field = "message" if isinstance(said, Reject) else "reason"
        for now, before in REWORDED.items():
            fields[field] = re.sub(f"^{now}$", before, fields[field])
    for path in _ADDED_TO.get(name, ()):
        inner = fields
        for step in path[:-1]:
            inner = inner[step]
        inner.pop(path[-1], None)
    for path, value in _REMOVED_FROM.get(name, ()):
        inner = fields
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
    if name in TRANSLATED:
        fields = TRANSLATED[name](fields)
    return RENAMED.get(name, name), fields


#: Patterns of reworded messages and reasons, with their words in 905a652.
REWORDED: dict[str, str] = json.loads(Path(__file__).with_name("command_digest_words.json").read_text())
_ADDED_TO: dict[str, list[Sequence[str]]] = {}
for _name, *_path in (added.split(".") for added in ADDED):
    _ADDED_TO.setdefault(_name, []).append(_path)


_REMOVED_FROM: dict[str, list[tuple[Sequence[str], Any]]] = {}
for _removed, _value in REMOVED.items():
    _name, *_path = _removed.split(".")
    _REMOVED_FROM.setdefault(_name, []).append((_path, _value))


class DigestingCore:
    """In the place of a core: adds all that passes to a digest."""

    def __init__(self, core: SchedulerCore, digest: Any) -> None:
        self.core = core
        self._digest = digest

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self.core.handle(event, now_s)
        if not commands and type(event).__name__ in NEW_EVENTS:
            return commands
        said = [now_s, in_old_words(event), [in_old_words(command) for command in commands]]
        self._digest.update(msgspec.json.encode(said, order="sorted"))
        return commands

    def check_integrity(self) -> None:
        self.core.check_integrity()


#: What the core decides otherwise than 905a652 did, and which digests were taken again for it.
DECIDED_ANEW: Sequence[str] = (
    "a resumed request does not time out in the queue: random workloads (153 of these 560 differ, each first in a "
    "Reject for queue_timeout of an epoch above 0)",
    "pdmesh computes prompts ahead of room to decode, bounds the KV that waits, computes locally where that pays, and "
    "lets computed KV have a scarce backend first: its traces, and random workloads of any bundle that switch to it "
    "(44 of these 600 differ, 30 of pdmesh and one of each other, each first at the event that switches to pdmesh, or "
    "later while it decides)",
    "no instances are put into a group as they start: of mooncake's mesh 4 had been, of the random workloads 75 of 600 "
    "(each eighth) and 375 of 3,000 of whose instances both were; long prompts are computed there as elsewhere. All "
    "others, taken together, have the digests that they had",
    "a request that waited for room to decode and has gone keeps that room from nobody (586f690): one of 3,000 random "
    "workloads, 129 of pdmesh, at its event 52, where a prompt that began without room now begins with it",
    "what has one token left to draw ends where its prompt is computed, and no instance decodes it: some of each "
    "bundle's random workloads, and mooncake's first 300 requests, two of which have one output token",
    "of instances with equally few queued tokens, pdmesh and pecsched take the one with the fewest seats taken: their "
    "traces, and random workloads of any bundle that switch to them",
)


# --- traces -------------------------------------------------------------------------------------------------------

LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
AZURE_MESH = MeshShape(
    num_prefill=1,
    num_decode=1,
    num_mixed=1,
    kv_layout=LAYOUT,
    num_kv_tokens=120_000,
    max_num_seqs=64,
    num_transfer_backends=1,
)
MOONCAKE_MESH = MeshShape(
    num_prefill=4,
    num_decode=3,
    num_mixed=4,
    kv_layout=LAYOUT,
    num_kv_tokens=200_000,
    max_num_seqs=64,
    num_transfer_backends=1,
)
#: Links slow enough for backends to be scarce, and commands and reports that cross each other.
SIM_CONFIG = SimConfig(port_bytes_per_s=1.5e9, control_delay_s=0.0005)


def digest_of_trace(path: Path, mesh: MeshShape, bundle: str, limit: int | None) -> str:
    digest = hashlib.sha256()
    policy = PolicyConfig(chunk_tokens=256, decodes_locally=False)
    arrivals = read_trace(path, limit=limit)
    core = DigestingCore(study_core(bundle, policy, 0), digest)
    Simulator(core, mesh.instances(policy.latency), arrivals, SIM_CONFIG).run()
    return digest.hexdigest()


# --- random workloads ---------------------------------------------------------------------------------------------

#: A second for each token, as in the property machine of the core's laws.
POLICY = PolicyConfig(
    chunk_tokens=8,
    latency=LinearLatencyModel(a_s=0.0, b_s=1.0, c_s=0.0, d_s=0.0),
    prefill_step_s=8.0,
    slo_tpot_s=4.0,
    long_prompt_tokens=20,
    local_step_share=2.0,
    decodes_locally=False,
)
CONFIG = CoreConfig(
    max_queue_entries=6, max_queue_s=50.0, max_lost_receivers=0, evacuates=False, cut_memory_s=0.0, policy=POLICY
)
GATEWAYS = (GatewayId("g0"), GatewayId("g1"))
MESHES = (
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.MIXED, Role.DECODE),
)
NUM_ACTIONS = 150


class Instance(ModelledInstance):
    """One as the baseline has it.

    Who rejoins has its first role, tells of its prompts' tokens only, and of nothing that it dropped. A step's report
    counts all that decode.
    """

    def rejoin(self, gateway_of: dict[RequestKey, GatewayId]) -> InstanceJoined:
        joined = super().rejoin(gateway_of)
        residents = [
            replace(each, num_context_tokens=self.sequences[each.request_id, each.epoch].num_tokens - 1)
            for each in joined.residents
        ]
        return replace(joined, profile=self.profile, residents=tuple(residents), dropped=())

    def end_step(self, *, ended_by_first_token: bool = False) -> None:
        num_decoding, num_events = len(self.decoding), len(self.events)
        local = {key for key, held in self.sequences.items() if not held.moves_on}
        super().end_step(ended_by_first_token=ended_by_first_token)
        for index, event in enumerate(self.events):
            if index >= num_events and isinstance(event, StepDone):
                num_decoding += sum(
                    bool(done.is_last and done.num_tokens and (done.request_id, done.epoch) in local)
                    for done in event.chunks
                )
                self.events[index] = replace(event, num_decodes=num_decoding)


@dataclass(frozen=True, slots=True)
class RoleChangeRequested:
    """An operator's change of a role, as it was: nothing leaves for it. Now it is an operation."""

    instance_id: InstanceId
    role: Role


def take_role_changes(core: SchedulerCore) -> None:
    """Have a core handle role changes as it did."""
    mesh = core._mesh

    def change(event: RoleChangeRequested) -> None:
        if instance := mesh.instance_of(event):
            instance.set_role(event.role)
            mesh.regroup()
            mesh.commands.append(SetRole(instance_id=event.instance_id, role=event.role))
            mesh.queue.unpark()

    core._handlers.on(RoleChangeRequested, change)


class RandomWorkload:
    """The property machine's rules, drawn by a seeded stream."""

    def __init__(self, seed: int, bundle: str, digest: Any) -> None:
        self.rng = random.Random(seed)
        self.bundle = bundle
        self.digest = digest
        self.now_s = 0.0
        self.wake_at_s: float | None = None
        roles = MESHES[seed % len(MESHES)]
        self.profiles = {
            profile.instance_id: profile
            for index, role in enumerate(roles)
            for profile in [
                modelled_profile(
                    f"i{index}", role, num_blocks=16, block_size=4, max_num_seqs=3, num_transfer_backends=1
                )
            ]
        }
        self.mesh = ModelledMesh(self.profiles.values())
        self.mesh.instances.update({name: Instance(profile) for name, profile in self.profiles.items()})
        self.num_requests = 0
        self.awaited: dict[RequestId, Request] = {}
        self.to_resume: dict[RequestId, None] = {}
        self.gateway_of: dict[tuple[RequestId, Epoch], GatewayId] = {}
        self.leader_of: dict[tuple[RequestId, Epoch], InstanceId] = {}  # of a group: it alone ends a generation
        self.new_core()

    def run(self) -> None:
        """Commands, steps and reports make up most of it; the rest is what may go wrong."""
        work = (self.commands_arrive, self.reports_arrive, self.step, self.instance_works, self.land)
        rare = (
            self.cancel,
            self.send_again,
            self.fail,
            self.lose_instance,
            self.return_instance,
            self.reconnect,
            self.gateway_reconnects,
            self.gateway_lost,
            self.new_core,
            self.switch,
            self.drain,
            self.change_role,
            self.quarantine,
        )
        for _ in range(NUM_ACTIONS):
            drawn = self.rng.random()
            if drawn < 0.15:
                self.arrive()
            elif drawn < 0.2:
                self.resume()
            elif drawn < 0.25:
                self.pass_time()
            elif drawn < 0.35:
                self.finish()
            elif drawn < 0.38:
                self.rng.choice(rare)()
            elif drawn < 0.41:
                self.rush_hour()
            else:
                self.rng.choice(work)()

    def new_core(self) -> None:
        core = SchedulerCore(CONFIG, make_bundle(self.bundle, POLICY), random.Random(0))
        take_role_changes(core)
        self.core = DigestingCore(core, self.digest)
        for gateway_id in GATEWAYS:
            self.join_gateway(gateway_id)
        for instance in self.mesh.instances.values():
            self.feed(instance.rejoin(self.gateway_of))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now_s):
            match command:
                case Reject() | Restart():
                    request = self.awaited.get(command.request_id)
                    if request is not None and request.epoch == command.epoch:
                        if isinstance(command, Reject):
                            del self.awaited[command.request_id]
                        else:
                            self.to_resume[command.request_id] = None
                case WakeAt():
                    self.wake_at_s = command.at_s
                case ForgetRequest():
                    pass
                case _:
                    if isinstance(command, AdmitPrefill):
                        self.leader_of.setdefault((command.request_id, command.epoch), command.instance_id)
                    self.mesh.send(command)

    def pick(self, instances: Iterator[ModelledInstance]) -> ModelledInstance | None:
        found = list(instances)
        return self.rng.choice(found) if found else None

    # --- gateways ---

    def arrive(self, num_prompt_tokens: int = 0, max_tokens: int = 0) -> None:
        self.num_requests += 1
        request = Request(
            request_id=RequestId(f"r{self.num_requests:04}"),
            epoch=Epoch(0),
            gateway_id=self.rng.choice(GATEWAYS),
            num_prompt_tokens=num_prompt_tokens or self.rng.randint(1, 30),
            max_tokens=max_tokens or self.rng.randint(1, 12),
            arrival_s=self.now_s,
            priority=num_prompt_tokens or self.rng.choice((0, 0, -1, 3)),
            slo_ttft_s=self.rng.choice((None, None, 1.0, 40.0)),
        )
        self.submit(request)

    def rush_hour(self) -> None:
        """Short prompts overtake a long one that is being computed, and need the backend that it has."""
        self.arrive(30, 4)
        for _ in range(self.rng.randint(2, 6)):
            for instance in self.mesh.instances.values():
                while instance.commands:
                    instance.take_command()
                if instance.running or instance.can_begin:
                    self.run_step(instance, ended_by_first_token=False)
            if self.rng.random() < 0.7:
                self.arrive(8, 2)
            for instance in self.mesh.instances.values():
                while instance.events:
                    self.feed(instance.events.popleft())

    def submit(self, request: Request) -> None:
        self.awaited[request.request_id] = request
        self.gateway_of[request.request_id, request.epoch] = request.gateway_id
        self.feed(RequestArrived(request))

    def resume(self) -> None:
        if self.to_resume:
            request_id, _ = self.to_resume.popitem()
            if (old := self.awaited.get(request_id)) is not None:
                self.submit(replace(old, epoch=Epoch(old.epoch + 1), arrival_s=self.now_s))

    def cancel(self) -> None:
        if self.awaited:
            request = self.awaited.pop(self.rng.choice(sorted(self.awaited)))
            self.feed(RequestCancelled(request.gateway_id, request.request_id, request.epoch))

    def send_again(self) -> None:
        if self.awaited:
            self.feed(RequestArrived(self.awaited[self.rng.choice(sorted(self.awaited))]))

    def join_gateway(self, gateway_id: GatewayId) -> None:
        waiting = tuple(
            (request.request_id, request.epoch) for request in self.awaited.values() if request.gateway_id == gateway_id
        )
        self.feed(GatewayJoined(gateway_id, waiting))

    def gateway_reconnects(self) -> None:
        self.join_gateway(self.rng.choice(GATEWAYS))

    def gateway_lost(self) -> None:
        gateway_id = self.rng.choice(GATEWAYS)
        self.awaited = {key: request for key, request in self.awaited.items() if request.gateway_id != gateway_id}
        self.feed(GatewayLost(gateway_id))

    # --- instances ---

    def commands_arrive(self) -> None:
        if instance := self.pick(i for i in self.mesh.instances.values() if i.commands):
            for _ in range(min(self.rng.choice((1, 9)), len(instance.commands))):
                instance.take_command()

    def reports_arrive(self) -> None:
        if instance := self.pick(i for i in self.mesh.instances.values() if i.events):
            twice = self.rng.random() < 0.1
            for _ in range(min(self.rng.choice((1, 9)), len(instance.events))):
                event = instance.events.popleft()
                self.feed(event)
                if twice and not isinstance(event, InstanceJoined):
                    self.feed(event)

    def step(self) -> None:
        if instance := self.pick(i for i in self.mesh.instances.values() if i.running or i.can_begin):
            self.run_step(instance, ended_by_first_token=self.rng.random() < 0.1)

    def instance_works(self) -> None:
        if instance := self.pick(i for i in self.mesh.instances.values() if i.commands or i.plans or i.running):
            while instance.commands:
                instance.take_command()
            if instance.running or instance.can_begin:
                self.run_step(instance, ended_by_first_token=self.rng.random() < 0.1)
            while instance.events:
                self.feed(instance.events.popleft())

    def run_step(self, instance: ModelledInstance, *, ended_by_first_token: bool) -> None:
        if instance.can_begin:
            instance.begin_step()
        instance.end_step(ended_by_first_token=ended_by_first_token)
        self.see_finished(instance)

    def see_finished(self, instance: ModelledInstance) -> None:
        for event in instance.events:
            if isinstance(event, RequestFinished):
                request = self.awaited.get(event.request_id)
                if request is not None and request.epoch == event.epoch:
                    del self.awaited[event.request_id]

    def finish(self) -> None:
        decoding = [
            (instance, key)
            for instance in self.mesh.instances.values()
            for key, held in instance.sequences.items()
            if held.is_decoding and self.leader_of[key] == instance.instance_id
        ]
        if decoding:
            instance, key = self.rng.choice(decoding)
            instance.finish(key)
            self.see_finished(instance)

    def land(self) -> None:
        transfers = [(s, r, key) for s, r, key in self.mesh.transfers() if s.sequences[key].is_computed]
        if transfers:
            self.mesh.land(*self.rng.choice(transfers))

    def fail(self) -> None:
        transfers = self.mesh.transfers()
        if transfers:
            sender, receiver, key = self.rng.choice(transfers)
            at = self.rng.choice((sender, receiver))
            plan = at.sequences[key].transfer
            assert plan is not None
            at.events.append(TransferFailed(at.instance_id, *key, plan.transfer_id, "modelled"))

    def lose_instance(self) -> None:
        if len(self.mesh.instances) > 1 and (instance := self.pick(iter(self.mesh.instances.values()))):
            del self.mesh.instances[instance.instance_id]
            self.feed(InstanceLost(instance.instance_id))

    def return_instance(self) -> None:
        absent = sorted(set(self.profiles) - set(self.mesh.instances))
        if absent:
            instance_id = self.rng.choice(absent)
            self.mesh.instances[instance_id] = Instance(self.profiles[instance_id])
            self.feed(self.mesh.instances[instance_id].rejoin(self.gateway_of))

    def reconnect(self) -> None:
        if instance := self.pick(iter(self.mesh.instances.values())):
            self.feed(InstanceUnreachable(instance.instance_id))
            views = (view for view in self.core.core.instances if view.instance_id == instance.instance_id)
            # At the baseline a drain outlasted the stream.
            self.feed(replace(instance.rejoin(self.gateway_of), stopping=any(view.draining for view in views)))

    # --- an operator, and time ---

    def an_instance(self) -> InstanceId:
        return self.rng.choice(sorted(self.profiles))

    def switch(self) -> None:
        self.feed(BundleChangeRequested(self.rng.choice(BUNDLE_NAMES)))

    def drain(self) -> None:
        self.feed(DrainRequested(self.an_instance(), self.rng.random() < 0.5))

    def change_role(self) -> None:
        self.feed(RoleChangeRequested(self.an_instance(), self.rng.choice(list(Role))))  # type: ignore[arg-type]

    def quarantine(self) -> None:
        self.feed(LoadReported(self.an_instance(), 16, 0, self.rng.choice((0, 0, 1)), 0))

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.0, 0.5, 5.0, 60.0))
        if self.wake_at_s is not None and self.wake_at_s <= self.now_s:
            self.feed(Tick())


def digest_of_random(num_workloads: int, bundle: str) -> str:
    digest = hashlib.sha256()
    for seed in range(num_workloads):
        RandomWorkload(seed, bundle, digest).run()
    return digest.hexdigest()


# --- all of it ----------------------------------------------------------------------------------------------------


def digests(
    bundles: Sequence[str], azure: Path | None, mooncake: Path | None, *, every: bool
) -> Iterator[tuple[str, str]]:
    """The name of each run with its digest."""
    num_workloads = 200 if every else 40
    for bundle in bundles:
        yield f"random, {num_workloads} workloads, {bundle}", digest_of_random(num_workloads, bundle)
    for name, path, mesh, limit in (("azure", azure, AZURE_MESH, 1000), ("mooncake", mooncake, MOONCAKE_MESH, 300)):
        if path is not None:
            for bundle in bundles:
                what = "all" if every else f"first {limit}"
                yield f"{name}, {what}, {bundle}", digest_of_trace(path, mesh, bundle, None if every else limit)


def table() -> str:
    lines = [f"{new} was {old}" for new, old in RENAMED.items()]
    lines.append(str(_split.__doc__))
    lines += [f"{name} is new" for name in ADDED]
    lines += [f"{name} is no more" for name in REMOVED]
    lines += [f"{name}, where it is answered with nothing, is new" for name in NEW_EVENTS]
    lines += [f"{name}: {translate.__doc__}" for name, translate in TRANSLATED.items()]
    lines += [f"decided anew: {what}" for what in DECIDED_ANEW]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=Path, help="azure_2023_conv.csv")
    parser.add_argument("--mooncake", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--bundle", action="append", choices=BUNDLE_NAMES, help="by default all")
    parser.add_argument("--all", action="store_true", help="whole traces and 200 random workloads: half an hour")
    parser.add_argument("--write", type=Path, help="add the digests to this file instead of comparing")
    parser.add_argument("--compare", type=Path, default=BASELINE)
    options = parser.parse_args()
    print(table())
    known: dict[str, str] = json.loads(options.compare.read_text()) if options.write is None else {}
    if options.write is not None and options.write.exists():
        known = json.loads(options.write.read_text())
    differing: list[str] = []
    began_s = time.perf_counter()
    for name, digest in digests(options.bundle or BUNDLE_NAMES, options.azure, options.mooncake, every=options.all):
        seconds = time.perf_counter() - began_s
        if options.write is not None:
            known[name] = digest
            options.write.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            print(f"{name}: {digest[:16]} ({seconds:.1f} s)", flush=True)
            continue
        verdict = "not in the baseline" if name not in known else "equal" if known[name] == digest else "DIFFERS"
        if verdict != "equal":
            differing.append(name)
        print(f"{name}: {verdict} ({seconds:.1f} s)", flush=True)
    if differing:
        sys.exit(f"{len(differing)} digests are not those of the baseline: {'; '.join(differing)}")


if __name__ == "__main__":
    main()
