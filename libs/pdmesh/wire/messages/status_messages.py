"""What the scheduler tells of the mesh, to gateways and to those who ask."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from pdmesh.model import (
    ComputePath,
    InstanceId,
    ManagedProcess,
    PoolCounts,
    RequestId,
    Role,
)
from pdmesh.wire.messages.envelope import Message


class InstanceNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to an instance, when, and what happens next."""

    at: float  # Unix time, seconds
    cause: str  # completes a sentence about the instance, such as "was killed by SIGKILL"
    next: str = ""  # a clause, such as "its supervisor starts it again"


class GoneInstance(Message, frozen=True, kw_only=True):
    """An instance that was lost or has stopped, and has not joined again."""

    instance_id: InstanceId
    role: Role
    state: str  # "restarting", "lost" or "left"
    note: InstanceNote
    pid: int = 0  # pid of the last process
    device: str = ""
    host: str = ""


class MeshEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of the mesh that operators ask about afterwards."""

    at: float  # Unix time, seconds
    what: str  # "lost", "restarted", "policy set" and the like
    name: str = ""  # instance, gateway or process
    detail: str = ""
    away_s: float = 0.0  # how long an instance that joined again had been away


class BatchingStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance that prefills and decodes does at once."""

    mode: str  # "mb" or "eb"
    phase: str = ""  # of "eb": "prefill" or "decode"
    idle_share: float = 0.0  # of the seats, at which a decode phase ends
    num_seats: int = 0
    gain: float | None = None  # predicted throughput of "eb" over "mb", less 1
    reason: str = ""  # why the faster mode is not chosen


class InstanceStatus(Message, frozen=True, kw_only=True):
    """One row of `pdmesh status`."""

    instance_id: InstanceId
    role: Role
    model: str
    device: str
    pid: int
    draining: bool
    num_blocks: int
    num_free_blocks: int  # those that are kept for requests to come among them
    num_held_blocks: int
    num_quarantined_blocks: int
    num_prefilling: int
    num_decoding: int
    num_queued_tokens: int
    block_size: int = 0  # tokens
    num_kept_blocks: int = 0
    num_offloaded_granules: int = 0  # in its offload tier, of as many as there is room for
    num_offload_granules: int = 0
    num_taken_blocks: int = 0  # held, or promised to requests on their way
    reachable: bool = True  # its stream is open; else it is given up once its lease ends
    suspected: bool = False  # its stream is open, and silent
    batching: BatchingStatus | None = None  # is there if the instance has modes to choose from
    compute: ComputePath | None = None
    arithmetic: str = ""  # its class; instances of one class compute the same bits
    weights: str = ""  # identity of the weights that it loaded
    host: str = ""  # where its memory can be shared
    rank_pids: tuple[int, ...] = ()  # of its processes, the leader's first; empty: it is one
    num_stages: int = 1  # that its steps pass one after the other
    joined_at: float = 0.0  # Unix time, seconds: when its process joined
    num_restarts: int = 0  # processes of the instance that this scheduler has seen end
    note: InstanceNote | None = None  # why it does not serve, or why its process is a new one
    safe_to_delete: bool = False  # ending the process disturbs no request
    safe_to_delete_why: str = ""

    @property
    def state(self) -> str:
        """Say in one word what can be asked of the instance: up, draining, drained, unreachable or silent."""
        if self.draining:
            is_left = self.num_prefilling or self.num_decoding or self.num_queued_tokens or self.num_taken_blocks
            return "draining" if is_left else "drained"
        return "unreachable" if not self.reachable else "silent" if self.suspected else "up"


_PLACES = {Role.PREFILL: 0, Role.MIXED: 1, Role.DECODE: 2}


class _Placed(Protocol):
    @property
    def instance_id(self) -> InstanceId: ...
    @property
    def role(self) -> Role: ...


PlacedT = TypeVar("PlacedT", bound=_Placed)


def in_order(instances: Iterable[PlacedT]) -> list[PlacedT]:
    """Sort instances by role and name for people to read, ``decode-10`` after ``decode-9``.

    The scheduler tells of instances as they joined, so that one that is started again would change its place.
    """

    def place(status: PlacedT) -> tuple[int, str]:
        return _PLACES[status.role], re.sub(r"\d+", lambda digits: digits[0].zfill(20), status.instance_id)

    return sorted(instances, key=place)


class TenantStatus(Message, frozen=True, kw_only=True):
    """What a key, or the keys not told apart, have and had of the mesh."""

    tenant: str
    share: int  # of the key; 0 for several
    num_waiting: int  # in line
    num_running: int
    recent_share: float  # share of the tokens charged in the last minute, 0 to 1


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that instances compute in turn."""

    request_id: RequestId
    member_ids: tuple[InstanceId, ...]  # the leader first
    num_prompt_tokens: int
    num_planned_tokens: int  # computed, or in a plan


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How fast KV went from one host to another of late."""

    source: str  # a host, or an instance that does not say where it is
    destination: str
    bytes_per_s: float
    num_transfers: int


class RevisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one weights identity."""

    weights: str
    instance_ids: tuple[InstanceId, ...]
    share: float  # share of the latest new requests, 0 to 1
    takes_new: bool  # new requests are placed here


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """A metric of the scheduler's that gateways serve, too: samples are the rest of a name, labels and a value."""

    name: str
    documentation: str
    type: str
    samples: tuple[tuple[str, dict[str, str], float], ...]


class MeshStatus(Message, frozen=True, kw_only=True):
    """Pushed to gateways at each change of readiness and at each heartbeat; also what `pdmesh status` prints."""

    ready: bool  # a prefill and a decode instance can take a request
    reason: str  # why not, if not
    instances: tuple[InstanceStatus, ...]
    num_waiting: int
    num_running: int
    bundle: str
    batching: str = ""
    max_model_len: int = 0  # smallest of the instances; 0 while there is none
    num_gateways: int = 0
    num_coming: int = 0  # instances that served and are away, and are being started again or may only be silent
    pools: PoolCounts | None = None  # that an operator wants; None if none asked for other ones
    groups: tuple[GroupStatus, ...] = ()  # some, where there are many
    tenants: tuple[TenantStatus, ...] = ()  # for operators alone, as is
    services: tuple[ManagedProcess, ...] = ()  # all that `pdmesh up` keeps running
    links: tuple[LinkStatus, ...] = ()  # of the last minute; some, where there are many
    num_parked: int = 0  # of those that wait: what fits none of the instances that are there now
    metrics: tuple[MetricFamily, ...] = ()  # for gateways alone
    num_fetched_tokens: int = 0  # whose KV was copied to be kept elsewhere, too, since the scheduler started
    new_weights: str = ""  # identity of the weights that new requests are placed on
    revisions: tuple[RevisionStatus, ...] = ()  # one for each weights identity
    at: float = 0.0  # Unix time of this status by the scheduler's clock, seconds
    gone: tuple[GoneInstance, ...] = ()  # lost and stopped instances; some, where there are many
    events: tuple[MeshEvent, ...] = ()  # the latest, the newest last


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that waits or runs."""

    id: RequestId
    label: str = ""  # what its client calls it
    phase: str  # "waiting", "prefilling" or "decoding"
    where: tuple[InstanceId, ...]  # where its prompt is computed, then where it decodes
    num_prompt_tokens: int
    num_planned_tokens: int  # of the prompt, computed or in a plan
    age_s: float
    helpers: tuple[InstanceId, ...] = ()  # that compute its prompt in turn with the first instance


class StepBar(msgspec.Struct, frozen=True, array_like=True):
    """A planned step that ended, or decode steps that an instance made by itself one after the other.

    Times are on the scheduler's clock.
    """

    instance_id: InstanceId
    begin_s: float
    end_s: float
    num_tokens: int  # of prompts
    num_decodes: int  # in one step
    urgent: bool


class KvMove(msgspec.Struct, frozen=True, array_like=True):
    """A KV transfer that was acknowledged."""

    source_id: InstanceId
    destination_id: InstanceId
    begin_s: float
    end_s: float
    num_bytes: int
    request_id: RequestId


class ActivityMark(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened at one moment, as "preempted", "retracted", "restarted", "transfer failed" or "lost"."""

    instance_id: InstanceId
    at_s: float
    what: str
    request_id: str


class Activity(Message, frozen=True, kw_only=True):
    """What the mesh does, and did since the last one; only so much of each as one can look at."""

    now_s: float  # the scheduler's clock
    state: MeshStatus
    requests: tuple[RequestActivity, ...]
    steps: tuple[StepBar, ...]
    moves: tuple[KvMove, ...]
    marks: tuple[ActivityMark, ...]
