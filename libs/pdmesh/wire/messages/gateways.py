"""Messages between gateways and the scheduler: ``/pdmesh.v1.Scheduler/Gateway``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from pdmesh.model import (
    Epoch,
    GatewayId,
    InstanceId,
    RequestId,
    SessionKey,
    SessionName,
)
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, CommandMessage, EventMessage, Message, StandingBy
from pdmesh.wire.messages.generation import Generation
from pdmesh.wire.messages.status_messages import Activity, MeshStatus, SessionStatus


class RegisterGateway(Message, frozen=True, kw_only=True):
    """First message of a gateway's stream, also after a reconnect.

    * ``waiting``: requests without an outcome yet.
    * ``scheduler_id``: the scheduler of its last registration; empty before the first.
    * ``unbegun``: waiting requests that were sent to that scheduler, without any news since.
    * ``token_address``: where the gateway takes tokens; empty: unknown.
    * ``unreached_leader``: address of the leading scheduler, if the gateway cannot reach it.
    """

    gateway_id: GatewayId
    waiting: tuple[tuple[RequestId, Epoch], ...]
    scheduler_id: str = ""
    unbegun: tuple[RequestId, ...] = ()
    token_address: str = ""
    unreached_leader: str = ""
    version: int = PROTOCOL_VERSION


class GatewayHeartbeat(Message, frozen=True, kw_only=True):
    """The gateway's heartbeat. Answered by a `MeshStatus`."""


class OtherChoice(msgspec.Struct, frozen=True, array_like=True):
    """The differences of a further choice from the first one of the same prompt."""

    request_id: RequestId
    seed: int


class Submit(Message, frozen=True, kw_only=True):
    """A request, or several choices of one prompt, which is sent once: each choice is a separate request.

    * ``tenant``, ``share``: name and share of the API key of the request.
    * ``num_tokens_before``: number of tokens in earlier prompts of the same client request.
    * ``age_s``: for a request that was submitted before, also to another scheduler, seconds since it began.
    * ``session``: the session that the client named.
    * ``silent_source_id``: for a request resumed because its tokens stopped coming, the instance that sent them.
    """

    generation: Generation
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    others: tuple[OtherChoice, ...] = ()
    tenant: str = ""
    share: int = 1
    num_tokens_before: int = 0
    age_s: float = 0.0
    session: SessionName | None = None
    silent_source_id: InstanceId | None = None

    def generations(self) -> Iterator[Generation]:
        """Yield a generation for every choice. They share the tokens' bytes."""
        first = self.generation
        yield first
        for other in self.others:
            params = dataclasses.replace(first.params, seed=other.seed)
            yield msgspec.structs.replace(first, request_id=other.request_id, params=params)


class EndSession(Message, frozen=True, kw_only=True):
    """The end of a session, as its client asked."""

    session: SessionKey


class AskSessions(Message, frozen=True, kw_only=True):
    """A question for a tenant's sessions, or for one of them. Answered by `TenantSessions` with the same ``number``."""

    number: int
    tenant: str
    session: SessionKey | None = None


class NextActivity(Message, frozen=True, kw_only=True):
    """A request for the next `Activity`, for a page that watches the mesh. Each one is requested separately."""


GatewayUp = RegisterGateway | GatewayHeartbeat | Submit | EventMessage | EndSession | AskSessions | NextActivity


class WelcomeGateway(Message, frozen=True, kw_only=True):
    """The acceptance of a gateway's registration. Each heartbeat is answered.

    ``scheduler_id`` differs for each process of a scheduler. ``term`` is the term of the leader among several
    schedulers, higher than all before. After ``silent_beats`` heartbeats without an answer, the gateway looks for a new
    leader; None: after its own default.
    """

    scheduler_id: str
    heartbeat_s: float
    term: int = 0
    silent_beats: int | None = None


class TenantSessions(Message, frozen=True, kw_only=True):
    """The answer to `AskSessions`: the tenant's sessions whose state changed last, the newest first."""

    number: int
    sessions: tuple[SessionStatus, ...]


GatewayDown = StandingBy | WelcomeGateway | CommandMessage | MeshStatus | Activity | TenantSessions
