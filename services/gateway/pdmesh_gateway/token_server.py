"""Where workers stream tokens to: ``/pdmesh.v1.Gateway/Tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import structlog

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.errors import ProtocolError
from pdmesh.model import InstanceId
from pdmesh.wire.endpoint import serving
from pdmesh.wire.link import FrameLink, serve_link
from pdmesh.wire.messages import (
    PROTOCOL_VERSION,
    PromptLogprobs,
    RegisterTokens,
    TokenOut,
    TokensAccepted,
    TokensDown,
    TokensUp,
)
from pdmesh_gateway.transcripts import Transcripts

log = structlog.get_logger()

SERVICE = "pdmesh.v1.Gateway"

#: For a peer's first message.
REGISTER_TIMEOUT_S = 10.0


@asynccontextmanager
async def serve_tokens(
    transcripts: Transcripts, config: GatewayConfig, security: SecurityConfig
) -> AsyncGenerator[int]:
    """Serve workers' token streams within the block; yields the port."""

    async def serve(link: FrameLink[TokensDown, TokensUp], peer: str) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            await _receive_tokens(link, peer, transcripts)
            link.close()

    methods = {"Tokens": serve_link(serve, TokensUp)}
    async with serving(SERVICE, methods, host=config.token_host, port=config.token_port, security=security) as port:
        yield port


async def _receive_tokens(link: FrameLink[TokensDown, TokensUp], peer: str, transcripts: Transcripts) -> None:
    frames = link.frames()
    instance_id, rest = await _registration(frames)
    link.post(TokensAccepted())
    log.info("worker streams tokens", instance_id=instance_id, peer=peer)
    try:
        transcripts.deliver(_tokens(rest), instance_id)
        # A silent worker is a worker without requests; a dead one is noticed by gRPC's keepalive.
        async for frame in frames:
            transcripts.deliver(_tokens(frame), instance_id)
    finally:
        log.info("worker's token stream ended", instance_id=instance_id)
        transcripts.source_lost(instance_id)


async def _registration(frames: AsyncIterator[list[TokensUp]]) -> tuple[InstanceId, list[TokensUp]]:
    """Who streams, and what came in the same frame."""
    frame: list[TokensUp]
    try:
        with anyio.fail_after(REGISTER_TIMEOUT_S):
            frame = await anext(frames, [])
    except TimeoutError:
        raise ProtocolError(f"no RegisterTokens within {REGISTER_TIMEOUT_S:g} s") from None
    match frame:
        case [RegisterTokens() as register, *rest]:
            pass
        case _:
            raise ProtocolError("the first message must be RegisterTokens")
    if register.version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {register.version}, ours is {PROTOCOL_VERSION}: update both")
    return register.instance_id, rest


def _tokens(frame: list[TokensUp]) -> list[TokenOut | PromptLogprobs]:
    tokens = [message for message in frame if not isinstance(message, RegisterTokens)]
    if len(tokens) != len(frame):
        raise ProtocolError("RegisterTokens twice")
    return tokens
