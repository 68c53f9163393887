"""The scheduler's reports on the mesh, to gateways and observers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from pdmesh.model import ComputePath, InstanceId, RequestId, Role
from pdmesh.operations import ManagedProcess, PoolCounts
from pdmesh.wire.messages.envelope import Message


class InstanceNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last event of an instance, and its consequence.

    ``at`` is in Unix time. ``cause`` completes a sentence about the instance, such as "was killed by SIGKILL". ``next``
    is a clause, such as "its supervisor starts it again".
    """

    at: float
    cause: str
    next: str = ""


class GoneInstance(Message, frozen=True, kw_only=True):
    """An instance that was lost or has stopped, and has not joined again.

    ``state`` is "restarting", "lost" or "left". ``pid`` is its last process.
    """

    instance_id: InstanceId
    role: Role
    state: str
    note: InstanceNote
    pid: int = 0
    device: str = ""
    host: str = ""


class MeshEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of the mesh that operators ask about afterwards, at Unix time ``at``.

    ``what`` is "lost", "restarted", "policy set" and the like; ``name`` is an instance, gateway or process. ``away_s``
    is the time for which an instance that joined again had been away.
    """

    at: float
    what: str
    name: str = ""
    detail: str = ""
    away_s: float = 0.0


class BatchingStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The batching of an instance that can prefill and decode.

    * ``mode``: "mb" or "eb". ``phase``: of "eb", "prefill" or "decode".
    * ``idle_share``: share of idle seats at which a decode phase ends.
    * ``gain``: predicted throughput of "eb" over "mb", less 1.
    * ``reason``: why the faster mode is not chosen.
    """

    mode: str
    phase: str = ""
    idle_share: float = 0.0
    num_seats: int = 0
    gain: float | None = None
    reason: str = ""


class InstanceStatus(Message, frozen=True, kw_only=True):
    """A row of `pdmesh status`.

    * ``num_free_blocks`` includes the ``num_cached_blocks``, which are cached for later requests.
    * ``num_offloaded_granules`` of at most ``num_offload_granules`` are in the offload tier.
    * ``num_taken_blocks``: blocks that are held, or promised to requests on their way.
    * ``block_size``: in tokens.
    * ``reachable``: the stream is open; otherwise the instance is lost once its lease ends. ``suspected``: open but
      silent.
    * ``arithmetic``: instances of one arithmetic class compute the same bits.
    * ``weights``: identity of the loaded weights.
    * ``host``: label of the host; instances with equal labels can share memory.
    * ``rank_pids``: pids of the ranks, the leader's first; empty for one process.
    * ``num_stages``: number of pipeline stages of a step.
    * ``joined_at``: when its process joined, in Unix time.
    * ``num_restarts``: number of the instance's processes that this scheduler has seen end.
    * ``note``: why it does not serve, or why its process is new.
    * ``safe_to_delete``: whether no request is disturbed if the process ends; ``safe_to_delete_why`` gives the reason.
    """

    instance_id: InstanceId
    role: Role
    model: str
    device: str
    pid: int
    draining: bool
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_quarantined_blocks: int
    num_prefilling: int
    num_decoding: int
    num_queued_tokens: int
    block_size: int = 0
    num_cached_blocks: int = 0
    num_offloaded_granules: int = 0
    num_offload_granules: int = 0
    num_taken_blocks: int = 0
    reachable: bool = True
    suspected: bool = False
    batching: BatchingStatus | None = None
    compute: ComputePath | None = None
    arithmetic: str = ""
    weights: str = ""
    host: str = ""
    rank_pids: tuple[int, ...] = ()
    num_stages: int = 1
    joined_at: float = 0.0
    num_restarts: int = 0
    note: InstanceNote | None = None
    safe_to_delete: bool = False
    safe_to_delete_why: str = ""

    @property
    def state(self) -> str:
        """A word for the instance's state: up, draining, drained, unreachable or silent."""
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
    """Return instances by role and name, for people to read, ``decode-10`` after ``decode-9``.

    The scheduler lists instances as they joined, so a restarted instance would change its place.
    """

    def place(status: PlacedT) -> tuple[int, str]:
        return _PLACES[status.role], re.sub(r"\d+", lambda digits: digits[0].zfill(20), status.instance_id)

    return sorted(instances, key=place)


class TenantStatus(Message, frozen=True, kw_only=True):
    """Requests and recent share of an API key, or of the remaining keys together.

    ``share`` is the key's share; 0 for several keys. ``recent_share`` is the share of the tokens charged in the last
    minute, from 0 to 1.
    """

    tenant: str
    share: int
    num_waiting: int
    num_running: int
    recent_share: float


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that a prefill group computes. ``member_ids`` has the leader first.

    ``num_planned_tokens`` are computed or in a plan.
    """

    request_id: RequestId
    member_ids: tuple[InstanceId, ...]
    num_prompt_tokens: int
    num_planned_tokens: int


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Recent speed of KV transfers from one host to another.

    ``source`` and ``destination`` are hosts, or instances with unknown hosts.
    """

    source: str
    destination: str
    bytes_per_s: float
    num_transfers: int


class RevisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one weights identity.

    ``share`` is the share of the latest new requests, from 0 to 1. ``takes_new`` is set if new requests are placed
    here.
    """

    weights: str
    instance_ids: tuple[InstanceId, ...]
    share: float
    takes_new: bool


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """A metric of the scheduler that gateways serve, too.

    Each sample is the suffix of its name, its labels and its value.
    """

    name: str
    documentation: str
    type: str
    samples: tuple[tuple[str, dict[str, str], float], ...]


class MeshStatus(Message, frozen=True, kw_only=True):
    """Sent to gateways at each change of readiness and at each heartbeat. `pdmesh status` prints it, too.

    * ``ready``: a prefill and a decode instance can take a request; otherwise ``reason`` says why not.
    * ``max_model_len``: the smallest of all instances; 0 without instances.
    * ``num_coming``: instances that served and are away, but are being restarted or may only be silent.
    * ``pools``: numbers of instances that an operator has asked for; None if none were asked for.
    * ``groups``, ``links``, ``gone``: possibly only some of many. ``links`` cover the last minute.
    * ``tenants``, ``services``: for operators only. ``services`` are all processes that `pdmesh up` keeps running.
    * ``num_parked``: number of waiting requests that fit none of the current instances.
    * ``metrics``: for gateways only.
    * ``num_fetched_tokens``: number of tokens whose cached KV was copied to another instance since the scheduler
      started.
    * ``new_weights``: identity of the weights that new requests are placed on.
    * ``revisions``: one for each weights identity.
    * ``at``: time of this status in Unix time, by the scheduler's clock.
    * ``events``: the latest, newest last.
    """

    ready: bool
    reason: str
    instances: tuple[InstanceStatus, ...]
    num_waiting: int
    num_running: int
    bundle: str
    batching: str = ""
    max_model_len: int = 0
    num_gateways: int = 0
    num_coming: int = 0
    pools: PoolCounts | None = None
    groups: tuple[GroupStatus, ...] = ()
    tenants: tuple[TenantStatus, ...] = ()
    services: tuple[ManagedProcess, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    num_parked: int = 0
    metrics: tuple[MetricFamily, ...] = ()
    num_fetched_tokens: int = 0
    new_weights: str = ""
    revisions: tuple[RevisionStatus, ...] = ()
    at: float = 0.0
    gone: tuple[GoneInstance, ...] = ()
    events: tuple[MeshEvent, ...] = ()


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A session that a client named.

    * ``session``, ``parent``: ids, which are hashes of names.
    * ``state``: as in `pdmesh.core.sessions.session_state.SessionState`; ``since_s``: seconds in this state.
    * ``pause_s``: expected time between two turns; None: not known yet.
    * ``num_children``: number of known child sessions.
    * ``num_prompt_tokens``: of the latest prompt.
    * ``num_reused_tokens``, ``num_possible_tokens``: prompt tokens that were not computed again, and that an earlier
      turn had computed.
    * ``cached_on``: instances that have the KV of the latest prompt.
    * ``num_waits``, ``longest_aside_s``: how often a turn was set aside lately, and for how long at most.
    """

    session: str
    tenant: str
    state: str
    since_s: float
    pause_s: float | None
    parent: str | None
    num_children: int
    num_turns: int
    num_prompt_tokens: int
    num_reused_tokens: int
    num_possible_tokens: int
    cached_on: tuple[InstanceId, ...]
    num_waits: int = 0
    longest_aside_s: float = 0.0


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that waits or runs.

    ``phase`` is "waiting", "prefilling" or "decoding". ``where`` is the instance that computes the prompt, then the
    decode instance. ``helpers`` compute the prompt together with the first. ``num_planned_tokens`` of the prompt are
    computed or in a plan. ``label`` is the client's name for the request.
    """

    id: RequestId
    label: str = ""
    phase: str
    where: tuple[InstanceId, ...]
    num_prompt_tokens: int
    num_planned_tokens: int
    age_s: float
    helpers: tuple[InstanceId, ...] = ()


class StepBar(msgspec.Struct, frozen=True, array_like=True):
    """A planned step that has ended, or consecutive decode steps that an instance made on its own.

    Times are on the scheduler's clock. ``num_tokens`` counts prompt tokens, and ``num_decodes`` the decodes of one
    step.
    """

    instance_id: InstanceId
    begin_s: float
    end_s: float
    num_tokens: int
    num_decodes: int
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
    """An event of one moment.

    ``what`` is "preempted", "retracted", "restarted", "transfer failed" or "lost", for example.
    """

    instance_id: InstanceId
    at_s: float
    what: str
    request_id: str


class Activity(Message, frozen=True, kw_only=True):
    """The mesh's current activity, and its activity since the last message. Each list is limited to a visible amount.

    ``now_s`` and all times are on the scheduler's clock.
    """

    now_s: float
    state: MeshStatus
    requests: tuple[RequestActivity, ...]
    steps: tuple[StepBar, ...]
    moves: tuple[KvMove, ...]
    marks: tuple[ActivityMark, ...]
