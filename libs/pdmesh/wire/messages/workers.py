"""Messages between workers and the scheduler: ``/pdmesh.v1.Scheduler/Worker``."""

from __future__ import annotations

import msgspec

from pdmesh.model import (
    NO_USES,
    GatewayId,
    InstanceId,
    InstanceProfile,
    Jumps,
    LastUses,
    PrefixHashes,
    RequestKey,
    Resident,
)
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, CommandMessage, EventMessage, Message, StandingBy


class RegisterWorker(Message, frozen=True, kw_only=True):
    """First message of a worker's stream, also after a reconnect.

    * ``kept``, ``offloaded``: granules cached in the KV cache and in the offload tier, longest unused first.
    * ``jumps``: which granules of ``kept`` follow which (`pdmesh.core.instances.kept_chains`).
    * ``uses``: last uses of granules of ``kept``.
    * ``states``: granules of ``kept`` with a cached state.
    * ``stopping``: the worker takes no new work.
    * ``dropped``: requests that were dropped since the last registration, and decode nowhere.
    """

    profile: InstanceProfile
    residents: tuple[Resident, ...]
    kept: PrefixHashes = ()
    offloaded: PrefixHashes = ()
    states: PrefixHashes = ()
    stopping: bool = False
    dropped: tuple[RequestKey, ...] = ()
    jumps: Jumps = ()
    uses: LastUses = NO_USES
    version: int = PROTOCOL_VERSION


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker's announcement of an orderly stop: its lease need not be waited for."""


class PeerProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that an instance does not reach, or is not reached by.

    ``kind`` is "kv to", "kv from" or "tokens to".
    """

    kind: str
    peer: str
    reason: str


class PeersChecked(Message, frozen=True, kw_only=True):
    """An instance's answer to `CheckPeers`.

    ``wall_time_s`` is the instance's clock when it was asked, and ``certificate_expires_at`` the end of its certificate
    (None without TLS), both in Unix time. ``version`` is pdmesh's.
    """

    check_id: int
    problems: tuple[PeerProblem, ...]
    wall_time_s: float
    version: str
    certificate_expires_at: float | None = None


WorkerUp = RegisterWorker | EventMessage | Goodbye | PeersChecked


class WelcomeWorker(Message, frozen=True, kw_only=True):
    """The acceptance of a worker's registration.

    ``term`` is the term of the leader among several schedulers, higher than all before. After ``silent_beats``
    heartbeats without an answer, the worker looks for a new leader; None: gRPC's keepalive decides.
    """

    heartbeat_s: float
    term: int = 0
    silent_beats: int | None = None


class PeersHere(Message, frozen=True, kw_only=True):
    """Data addresses of registered instances.

    They precede every command that names one of these instances. The first command of a worker's stream follows all
    addresses.
    """

    data_addresses: dict[InstanceId, bytes]


class PeerGone(Message, frozen=True, kw_only=True):
    """A data address that no instance answers at any more: the instance was lost or restarted."""

    data_address: bytes


class CheckPeers(Message, frozen=True, kw_only=True):
    """A request to report which of these peers are reachable; answered by `PeersChecked`.

    All instances are asked at the same time. ``kv_peers`` are other instances with their data addresses, and
    ``gateways`` have their token addresses.
    """

    check_id: int
    kv_peers: tuple[tuple[InstanceId, bytes], ...]
    gateways: tuple[tuple[GatewayId, str], ...]


class SchedulerHeartbeat(Message, frozen=True, kw_only=True):
    """The leader's heartbeat. Sent if the welcome has ``silent_beats``."""


WorkerDown = StandingBy | SchedulerHeartbeat | WelcomeWorker | CommandMessage | PeersHere | PeerGone | CheckPeers
