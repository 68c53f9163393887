"""What workers and the scheduler say to each other: ``/pdmesh.v1.Scheduler/Worker``."""

from __future__ import annotations

import msgspec

from pdmesh.model import (
    GatewayId,
    InstanceId,
    InstanceProfile,
    PrefixHashes,
    RequestKey,
    Resident,
)
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, CommandMessage, EventMessage, Message, StandingBy


class RegisterWorker(Message, frozen=True, kw_only=True):
    """First message of a worker's stream, also after a reconnect."""

    profile: InstanceProfile
    residents: tuple[Resident, ...]
    kept: PrefixHashes = ()  # for requests to come, those used longest ago first
    offloaded: PrefixHashes = ()  # in its tier, likewise
    stopping: bool = False  # it takes no new work
    dropped: tuple[RequestKey, ...] = ()  # since it was registered last, and they decode nowhere
    version: int = PROTOCOL_VERSION


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker is stopping in good order: no lease to wait for."""


class PeerProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that an instance does not reach, or is not reached by."""

    kind: str  # "kv to", "kv from" or "tokens to"
    peer: str
    reason: str


class PeersChecked(Message, frozen=True, kw_only=True):
    """An instance's answer to `CheckPeers`."""

    check_id: int
    problems: tuple[PeerProblem, ...]
    wall_time_s: float  # its clock when it was asked, Unix time
    version: str  # of pdmesh
    certificate_expires_at: float | None = None  # Unix time; None without TLS


WorkerUp = RegisterWorker | EventMessage | Goodbye | PeersChecked


class WelcomeWorker(Message, frozen=True, kw_only=True):
    """The registration is accepted."""

    heartbeat_s: float
    term: int = 0  # of the leader, among several schedulers; higher than those of all before
    silent_beats: int | None = None  # after so many heartbeats without an answer the leader is given up


class PeersHere(Message, frozen=True, kw_only=True):
    """The data addresses of registered instances.

    Precedes every command that names one of them. The first command of a worker's stream comes behind all addresses.
    """

    data_addresses: dict[InstanceId, bytes]


class PeerGone(Message, frozen=True, kw_only=True):
    """An instance was lost, or has begun anew: nobody will answer at this data address any more."""

    data_address: bytes


class CheckPeers(Message, frozen=True, kw_only=True):
    """See which of these peers you reach; answered by `PeersChecked`. All instances are asked at the same time."""

    check_id: int
    kv_peers: tuple[tuple[InstanceId, bytes], ...]  # other instances, by their data addresses
    gateways: tuple[tuple[GatewayId, str], ...]  # by their token addresses


class SchedulerHeartbeat(Message, frozen=True, kw_only=True):
    """The leader lives. Sent if the welcome says ``silent_beats``."""


WorkerDown = StandingBy | SchedulerHeartbeat | WelcomeWorker | CommandMessage | PeersHere | PeerGone | CheckPeers
