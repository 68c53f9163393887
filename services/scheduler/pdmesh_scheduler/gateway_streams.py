"""Gateways' streams: the requests they bring, and what happens to these when a gateway is lost."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import msgspec
import structlog

from pdmesh.config import SchedulerConfig
from pdmesh.core.commands import Reject
from pdmesh.core.events import GatewayJoined, GatewayLost, RequestArrived, SessionEnded
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import MAX_REQUEST_TOKENS, MAX_WEIGHTS_CHARS, GatewayId, RejectReason, Request, is_request_of
from pdmesh.prefixes import HASH_BYTES
from pdmesh.wire.link import FrameLink
from pdmesh.wire.messages import (
    AskSessions,
    CommandMessage,
    EndSession,
    EventMessage,
    GatewayDown,
    GatewayHeartbeat,
    GatewayUp,
    Generation,
    MetricFamily,
    NextActivity,
    RegisterGateway,
    Submit,
    TenantSessions,
    WelcomeGateway,
)
from pdmesh.wire.session import converse, registration
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.mesh_check import MeshCheck
from pdmesh_scheduler.peer_streams import Connection, Leases, Peers
from pdmesh_scheduler.session_statuses import SessionStatuses
from pdmesh_scheduler.standby.keeper import LeaseRequest
from pdmesh_scheduler.standby.leader_term import ALONE, LeaderTerm

log = structlog.get_logger()

#: Heartbeat intervals of silence after which a gateway counts as cut off.
QUIET_BEATS = 2

#: Smallest accepted target, in seconds: far below any that can be met, far above the values whose division overflows.
MIN_TARGET_S = 1e-9


#: Most sessions in one answer to a gateway.
MAX_SESSIONS_TOLD = 1000


@dataclass(frozen=True, slots=True)
class GatewayStreams:
    """Server of the gateways' streams.

    A gateway whose stream breaks may reconnect within the rest of its lease, while its requests continue. `is_refused`
    returns whether an address refuses connections. `metrics` returns the families that gateways serve, too.
    """

    driver: Driver
    peers: Peers[GatewayId, GatewayDown]
    leases: Leases[GatewayId]
    config: SchedulerConfig
    stopping: anyio.Event
    clock: Callable[[], float]
    is_refused: Callable[[str], Awaitable[bool]]
    check: MeshCheck
    sessions: SessionStatuses
    leader_term: LeaderTerm = ALONE
    metrics: Callable[[], tuple[MetricFamily, ...]] = tuple
    scheduler_id: str = field(default_factory=lambda: secrets.token_hex(8))

    async def serve(self, link: FrameLink[GatewayDown, GatewayUp], peer: str) -> None:
        """Serve one stream, from its registration to its end.

        Raise InstanceUnavailable if its lease runs out or a newer stream of the gateway replaces it.
        """
        frames = link.frames()
        registered, rest = await registration(frames, RegisterGateway)
        gateway_id = registered.gateway_id
        waiting = tuple(key for key in registered.waiting if is_request_of(gateway_id, key[0]))
        if len(waiting) < len(registered.waiting):
            log.error("a gateway claims requests of another gateway", gateway_id=gateway_id)

        async def read() -> None:
            await self._take(gateway_id, rest)
            async for messages in frames:
                self.leases.renew(gateway_id)
                await self._take(gateway_id, messages)

        with anyio.CancelScope() as scope:
            connection: Connection[GatewayId, GatewayDown] = Connection(gateway_id, link, scope, address=peer)
            self.peers.add(connection)
            self.leases.renew(gateway_id)
            self.check.token_addresses[gateway_id] = registered.token_address
            log.info("gateway joined", gateway_id=gateway_id, num_waiting=len(waiting), peer=peer)
            try:
                beat_s = self.leader_term.beat_s(self.config.heartbeat_s)
                welcome = WelcomeGateway(
                    scheduler_id=self.scheduler_id,
                    heartbeat_s=beat_s,
                    term=self.leader_term.term,
                    silent_beats=self.leader_term.silent_beats(beat_s),
                )
                link.post(welcome)
                unbegun = registered.unbegun if registered.scheduler_id == self.scheduler_id else ()
                self.driver.post(GatewayJoined(gateway_id, waiting, unbegun))
                await converse(link, read, self.stopping)
            finally:
                if self.peers.remove(connection):
                    log.warning("gateway's stream ended", gateway_id=gateway_id)
                    await self._look_whether_it_lives(gateway_id, registered.token_address)
        if scope.cancelled_caught:
            raise InstanceUnavailable("the lease expired, or another stream of this gateway took over")

    async def _look_whether_it_lives(self, gateway_id: GatewayId, token_address: str) -> None:
        """Shorten the lease of a gateway without a stream if no process listens at its token port."""
        if not token_address or self.stopping.is_set():
            return
        with anyio.CancelScope(shield=True):  # the handler of a broken stream is being cancelled
            if await self.is_refused(token_address) and self.peers.get(gateway_id) is None:
                self.leases.stream_broke(gateway_id)

    async def why_keep_lead(self, request: LeaseRequest) -> str:
        """Return why this scheduler should keep the lead that another one asks for; empty if it should not.

        The other scheduler asks because a gateway reaches only that one. Wait until that gateway has been silent for
        `QUIET_BEATS` heartbeats. Keep the lead if this scheduler hears any gateway, or if an instance does not reach
        the other scheduler.
        """
        gateway_id = GatewayId(request.gateway_id)
        quiet_s = QUIET_BEATS * self.leader_term.beat_s(self.config.heartbeat_s)
        await anyio.sleep(max(0.0, quiet_s - self.leases.silent_s(gateway_id)))
        if self.leases.silent_s(gateway_id) < quiet_s:
            return "this scheduler hears the gateway"
        if heard := sorted(other for other in self.peers if self.leases.silent_s(other) < quiet_s):
            return f"this scheduler hears other gateways: {', '.join(heard)}"
        return await self.check.why_unreached(request.address)

    def expired(self, gateway_id: GatewayId) -> None:
        log.error("gateway lost: its lease expired", gateway_id=gateway_id)
        self.check.token_addresses.pop(gateway_id, None)
        self.peers.end(gateway_id)
        self.driver.post(GatewayLost(gateway_id))

    async def _take(self, gateway_id: GatewayId, messages: list[GatewayUp]) -> None:
        for message in messages:
            match message:
                case RegisterGateway():
                    raise ProtocolError("RegisterGateway twice")
                case GatewayHeartbeat():
                    state = msgspec.structs.replace(self.driver.state(), metrics=self.metrics())
                    self.peers.post(gateway_id, state)
                case Submit():
                    why = _impossible(message, gateway_id)
                    for index, generation in enumerate(message.generations()):
                        if why is None:
                            request = _request(message, generation, self.clock(), index)
                            await self.driver.submit(RequestArrived(request, message.silent_source_id), generation)
                        else:
                            self._refuse(gateway_id, generation, why)
                case EndSession(session=key):
                    if len(key) != HASH_BYTES:
                        raise ProtocolError(f"{gateway_id} names a session by {len(key)} bytes")
                    await self.driver.submit(SessionEnded(key))
                case AskSessions(number=number, tenant=tenant, session=key):
                    found = self.sessions.of_tenant(tenant, key, MAX_SESSIONS_TOLD)
                    self.peers.post(gateway_id, TenantSessions(number=number, sessions=found))
                case NextActivity():
                    self.driver.activity.asked(gateway_id)
                case EventMessage():
                    event = message.gateway_event
                    if event.gateway_id != gateway_id:
                        raise ProtocolError(f"a message from {gateway_id} names {event.gateway_id}")
                    await self.driver.submit(event)

    def _refuse(self, gateway_id: GatewayId, generation: Generation, why: str) -> None:
        """Log and reject one invalid request, and keep the stream for the gateway's other requests."""
        log.error("a gateway sent an invalid request", gateway_id=gateway_id, request_id=generation.request_id, why=why)
        rejected = Reject(
            gateway_id=gateway_id,
            request_id=generation.request_id,
            epoch=generation.epoch,
            reason=RejectReason.INVALID,
            message=f"The scheduler rejected the request: it {why}.",
            retry_after_s=None,
        )
        self.peers.post(gateway_id, CommandMessage.of(rejected))


def _impossible(submit: Submit, gateway_id: GatewayId) -> str | None:
    """Return the fault of a request that no gateway may send; None if it is valid."""
    generation = submit.generation
    if generation.gateway_id != gateway_id:
        return f"names gateway {generation.gateway_id!r}"
    request_ids = [generation.request_id, *(other.request_id for other in submit.others)]
    if not all(is_request_of(gateway_id, request_id) for request_id in request_ids):
        return "has the id of another gateway's request"
    if len(generation.token_ids) % 4 or not 1 <= generation.num_prompt_tokens <= generation.num_tokens:
        return f"has {len(generation.token_ids)} bytes of tokens for {generation.num_prompt_tokens} prompt tokens"
    if submit.session is not None and {len(key) for key in submit.session[:2] if key is not None} != {HASH_BYTES}:
        return "names a session by more or less than a hash"
    if len(generation.prefix_root) not in (0, HASH_BYTES):
        return f"has a root of {len(generation.prefix_root)} bytes for the hashes of its granules"
    if len(generation.prefix) != (generation.num_tokens // GRANULE_TOKENS if generation.prefix_root else 0):
        return f"has {len(generation.prefix)} hashes of granules of {generation.num_tokens} tokens"
    if max(len(generation.weights), len(generation.prefix_weights)) > MAX_WEIGHTS_CHARS:
        return "has too long an identity of its weights"
    if generation.epoch < 0:
        return f"is in epoch {generation.epoch}"
    if not 0 <= submit.age_s < math.inf:
        return f"is {submit.age_s} s old"
    for slo_s in (submit.slo_ttft_s, submit.slo_tpot_s):
        if slo_s is not None and not MIN_TARGET_S <= slo_s < math.inf:
            return f"has a target of {slo_s} s"
    if generation.num_tokens > MAX_REQUEST_TOKENS or not 1 <= generation.max_tokens_left <= MAX_REQUEST_TOKENS:
        return f"asks for {generation.max_tokens_left} tokens after {generation.num_tokens}"
    if submit.share < 1 or submit.num_tokens_before < 0:
        return f"has share {submit.share}, and {submit.num_tokens_before} tokens before it"
    return None


def _request(submit: Submit, generation: Generation, now_s: float, index: int) -> Request:
    """Return the core's request for one choice, the ``index``-th of its prompt."""
    return Request(
        request_id=generation.request_id,
        epoch=generation.epoch,
        gateway_id=generation.gateway_id,
        num_prompt_tokens=generation.num_tokens,
        max_tokens=generation.max_tokens_left,
        arrival_s=now_s - submit.age_s,
        priority=submit.priority,
        slo_ttft_s=submit.slo_ttft_s,
        slo_tpot_s=submit.slo_tpot_s,
        tenant=submit.tenant,
        share=submit.share,
        num_tokens_before=submit.num_tokens_before + index * generation.num_tokens,
        arithmetic=generation.arithmetic,
        weights=generation.weights,
        prefix=generation.prefix,
        prefix_weights=generation.prefix_weights,
        session=submit.session,
    )
