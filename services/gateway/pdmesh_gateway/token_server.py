"""Server of the workers' token streams: ``/pdmesh.v1.Gateway/Tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import structlog

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.errors import ProtocolError
from pdmesh.wire.endpoint import serving
from pdmesh.wire.link import FrameLink, serve_link
from pdmesh.wire.messages import (
    PromptLogprobs,
    RegisterTokens,
    StreamHandover,
    TokenMessage,
    TokenOut,
    TokensAccepted,
    TokensDown,
    TokensHeard,
    TokensHeartbeat,
    TokensUp,
)
from pdmesh.wire.rejected_peers import RejectedPeers
from pdmesh.wire.roles import RoleRule, ServiceRole
from pdmesh.wire.session import Silence, converse, registration
from pdmesh_gateway.transcripts import Transcripts

log = structlog.get_logger()

SERVICE = "pdmesh.v1.Gateway"

#: Interval of a worker's heartbeats, and number that may be missing on either side. A connection that broke in one
#: direction is noticed within 2.1 s. With a lower number, an overloaded machine would restart requests.
HEARTBEAT_S = 0.3
MAX_MISSING = 6


@asynccontextmanager
async def serve_tokens(
    transcripts: Transcripts, config: GatewayConfig, security: SecurityConfig, rejected_peers: RejectedPeers
) -> AsyncGenerator[int]:
    """Serve workers' token streams within the block; yields the port. ``rejected_peers`` counts refused peers."""

    async def serve(link: FrameLink[TokensDown, TokensUp], peer: str) -> None:
        await _receive_tokens(link, peer, transcripts)

    rule = RoleRule(ServiceRole.WORKER, security.tls_roles, rejected_peers)
    methods = {"Tokens": serve_link(serve, TokensUp, rule)}
    async with serving(
        SERVICE,
        methods,
        host=config.token_host,
        port=config.token_port,
        security=security,
        setting="gateway.token_port",
        rejected_peers=rejected_peers,
    ) as port:
        yield port


async def _receive_tokens(link: FrameLink[TokensDown, TokensUp], peer: str, transcripts: Transcripts) -> None:
    frames = link.frames()
    registered, rest = await registration(frames, RegisterTokens)
    instance_id = registered.instance_id

    silence = Silence(HEARTBEAT_S, MAX_MISSING)

    async def read() -> None:
        transcripts.deliver(_tokens(rest, link), instance_id, registered.weights)
        async for frame in frames:
            silence.heard()
            transcripts.deliver(_tokens(frame, link), instance_id, registered.weights)

    transcripts.source_opened(instance_id, registered.arithmetic)
    link.post(TokensAccepted(heartbeat_s=HEARTBEAT_S, max_unanswered=MAX_MISSING))
    log.info("worker's token stream opened", instance_id=instance_id, peer=peer)
    try:
        await converse(link, read, silence=silence)
    finally:
        log.info("worker's token stream ended", instance_id=instance_id)
        transcripts.source_lost(instance_id, was_silent=silence.is_too_long)


def _tokens(frame: list[TokensUp], link: FrameLink[TokensDown, TokensUp]) -> list[TokenMessage]:
    """Return a frame's messages about requests, and answer its heartbeats.

    Raise ProtocolError for a second registration.
    """
    tokens: list[TokenMessage] = []
    for message in frame:
        match message:
            case TokenOut() | PromptLogprobs() | StreamHandover():
                tokens.append(message)
            case TokensHeartbeat():
                link.post(TokensHeard())
            case RegisterTokens():
                raise ProtocolError("RegisterTokens twice")
    return tokens
