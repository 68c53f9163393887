"""What workers and the scheduler say to each other: ``/pdmesh.v1.Scheduler/Worker``."""

from __future__ import annotations

import msgspec

from pdmesh.core.commands import (
    AdmitPrefill,
    FetchKept,
    GrantTransfer,
    PlaceDecode,
    SendKept,
    SetGroup,
    SetHome,
    SetMembers,
)
from pdmesh.model import (
    GatewayId,
    InstanceId,
    InstanceProfile,
    PrefixHashes,
    RequestKey,
    Resident,
)
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, CommandMessage, EventMessage, Message, StandingBy
from pdmesh.wire.messages.generation import Generation


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
    """The registration is accepted. Without a heartbeat for ``lease_s`` the instance is given up."""

    lease_s: float
    heartbeat_s: float
    term: int = 0  # of the leader, among several schedulers; higher than those of all before
    silent_beats: int | None = None  # after so many heartbeats without an answer the leader is given up


class Admit(Message, frozen=True, kw_only=True):
    """An `AdmitPrefill` with the prompt; precedes the first plan that names the request."""

    command: AdmitPrefill
    generation: Generation
    member_addresses: tuple[bytes, ...] = ()  # data addresses of the group's members, in their order


class Regroup(Message, frozen=True, kw_only=True):
    """A `SetGroup` with the data addresses of all members, in their order; of those that were lost, nothing."""

    command: SetGroup
    member_addresses: tuple[bytes, ...]


class ExpectKv(Message, frozen=True, kw_only=True):
    """A `PlaceDecode` with the request.

    ``generation.token_ids`` is empty unless sampling needs the prompt. Then ``tail`` are the packed tokens behind the
    last full granule, which those that are drawn go on from, if its KV may be kept. Where the context is spread over
    several instances, each hears where all are.
    """

    command: PlaceDecode
    generation: Generation
    num_context_tokens: int  # tokens whose KV will land
    source_addresses: tuple[bytes, ...]  # data addresses of the transfer's sources, for the acknowledgement
    tail: bytes = b""
    destination_addresses: tuple[bytes, ...] = ()  # of the transfer's destinations, if they are several


class ExpectMove(Message, frozen=True, kw_only=True):
    """A `PlaceDecode` of a move: the source sends the request with its KV.

    ``chain`` is its own (`pdmesh.model.Request.chain`), of which it reuses as much as the transfer says.
    """

    command: PlaceDecode
    chain: PrefixHashes = ()
    source_addresses: tuple[bytes, ...]  # one, for the acknowledgement
    member_addresses: tuple[bytes, ...] = ()  # of those that hold the first ranges of its context, in their order


class ExpectPart(Message, frozen=True, kw_only=True):
    """A `PlaceDecode` of a range of a context that decodes elsewhere."""

    command: PlaceDecode
    source_addresses: tuple[bytes, ...]  # one, for the acknowledgement
    home_address: bytes  # where it decodes
    member_addresses: tuple[bytes, ...] = ()  # of those that hold the ranges before it, if it was lost


class Rehome(Message, frozen=True, kw_only=True):
    """A `SetHome` with that instance's data address."""

    command: SetHome
    home_address: bytes


class Respread(Message, frozen=True, kw_only=True):
    """A `SetMembers` with the data addresses of the members, in their order."""

    command: SetMembers
    member_addresses: tuple[bytes, ...]


class Grant(Message, frozen=True, kw_only=True):
    """A `GrantTransfer` with the data addresses of the transfer's destinations."""

    command: GrantTransfer
    destination_addresses: tuple[bytes, ...]


class ExpectKept(Message, frozen=True, kw_only=True):
    """A `FetchKept` with the source's data address, for the acknowledgement."""

    command: FetchKept
    source_addresses: tuple[bytes, ...]


class GrantKept(Message, frozen=True, kw_only=True):
    """A `SendKept` with the destination's data address."""

    command: SendKept
    destination_addresses: tuple[bytes, ...]


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


#: Core commands with what only the services know, and the end of a peer.
Accompanied = (
    Admit | Regroup | ExpectKv | ExpectMove | ExpectPart | Rehome | Respread | ExpectKept | GrantKept | Grant | PeerGone
)

WorkerDown = StandingBy | SchedulerHeartbeat | WelcomeWorker | CommandMessage | Accompanied | CheckPeers
