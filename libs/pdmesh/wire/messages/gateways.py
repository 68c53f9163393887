"""What gateways and the scheduler say to each other: ``/pdmesh.v1.Scheduler/Gateway``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from pdmesh.model import (
    Epoch,
    GatewayId,
    InstanceId,
    RequestId,
)
from pdmesh.wire.messages.envelope import PROTOCOL_VERSION, CommandMessage, EventMessage, Message, StandingBy
from pdmesh.wire.messages.generation import Generation
from pdmesh.wire.messages.status_messages import Activity, MeshStatus


class RegisterGateway(Message, frozen=True, kw_only=True):
    """First message of a gateway's stream, also after a reconnect; ``waiting`` is what it still waits for."""

    gateway_id: GatewayId
    waiting: tuple[tuple[RequestId, Epoch], ...]
    scheduler_id: str = ""  # whom it was registered with last, if it was
    unbegun: tuple[RequestId, ...] = ()  # of those waited for: sent to that scheduler, and not heard of since
    token_address: str = ""  # where it takes tokens; empty: it does not say
    unreached_leader: str = ""  # address of the leading scheduler, if the gateway cannot reach it
    version: int = PROTOCOL_VERSION


class GatewayHeartbeat(Message, frozen=True, kw_only=True):
    """The gateway lives. Answered by a `MeshStatus`."""


class OtherChoice(msgspec.Struct, frozen=True, array_like=True):
    """What tells a choice from the first one of the same prompt."""

    request_id: RequestId
    seed: int


class Submit(Message, frozen=True, kw_only=True):
    """One request, or the choices of one prompt, which is sent once: each of them is a request of its own."""

    generation: Generation
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    others: tuple[OtherChoice, ...] = ()
    tenant: str = ""  # the name of the key that it came with
    share: int = 1  # of that key
    num_tokens_before: int = 0  # of the prompts of the same client request that were sent before
    age_s: float = 0.0  # since it was first submitted, of one that is resumed
    unheard_id: InstanceId | None = None  # instance whose tokens stopped coming, of one that is resumed for that

    def generations(self) -> Iterator[Generation]:
        """Yield one for every choice; they share the tokens' bytes."""
        first = self.generation
        yield first
        for other in self.others:
            params = dataclasses.replace(first.params, seed=other.seed)
            yield msgspec.structs.replace(first, request_id=other.request_id, params=params)


class NextActivity(Message, frozen=True, kw_only=True):
    """Ask for the next `Activity`, because a page watches the mesh. Each one is asked for by itself."""


GatewayUp = RegisterGateway | GatewayHeartbeat | Submit | EventMessage | NextActivity


class WelcomeGateway(Message, frozen=True, kw_only=True):
    """The registration is accepted. Each heartbeat is answered."""

    scheduler_id: str  # of this process: one that was started again has another
    heartbeat_s: float
    term: int = 0  # of the leader, among several schedulers; higher than those of all before
    silent_beats: int | None = None  # after so many heartbeats without an answer the leader is given up


GatewayDown = StandingBy | WelcomeGateway | CommandMessage | MeshStatus | Activity
