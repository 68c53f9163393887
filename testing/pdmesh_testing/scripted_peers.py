"""A worker's peers, a scheduler and a gateway that do what a test tells them, over real gRPC on loopback."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import grpc.aio

from pdmesh.config import LOOPBACK, SecurityConfig
from pdmesh.core.commands import InstanceCommand
from pdmesh.core.events import InstanceEvent
from pdmesh.wire.endpoint import serving
from pdmesh.wire.link import FrameLink, serve_link
from pdmesh.wire.messages import (
    CommandMessage,
    EventMessage,
    Goodbye,
    Prompt,
    RegisterWorker,
    TokenOut,
    TokensAccepted,
    TokensDown,
    TokensHeard,
    TokensHeartbeat,
    TokensUp,
    WelcomeWorker,
    WorkerDown,
    WorkerUp,
)

T = TypeVar("T")

WAIT_LIMIT_S = 60.0


class ScriptedPeer:
    """Common parts of scripted peers: received frames, open streams, and a way to cut them."""

    def __init__(self) -> None:
        # Number of streams that were ever opened.
        self.num_streams = 0
        self._streams: set[anyio.CancelScope] = set()
        self._changed = anyio.Event()

    def cut_streams(self) -> None:
        """Break every open stream; the server itself stays."""
        for stream in self._streams:
            stream.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that comes in makes ``condition`` true."""
        with anyio.fail_after(WAIT_LIMIT_S):
            while not condition():
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class ScriptedScheduler(ScriptedPeer):
    """Scheduler that welcomes every worker, records reports, and sends messages that the test posts."""

    def __init__(self, *, heartbeat_s: float = 1.0) -> None:
        super().__init__()
        self.reports: list[WorkerUp | InstanceEvent] = []
        self._heartbeat_s = heartbeat_s
        self._link: FrameLink[WorkerDown, WorkerUp] | None = None

    def post(self, message: WorkerDown | InstanceCommand, prompt: Prompt | None = None) -> None:
        assert self._link is not None, "no worker is registered"
        self._link.post(CommandMessage.of(message, prompt) if isinstance(message, InstanceCommand) else message)

    def reports_of(self, kind: type[T], request_id: str | None = None) -> list[T]:
        return [
            report
            for report in self.reports
            if isinstance(report, kind) and (request_id is None or getattr(report, "request_id", None) == request_id)
        ]

    async def reported(self, kind: type[T], request_id: str | None = None, *, count: int = 1) -> T:
        await self.until(lambda: len(self.reports_of(kind, request_id)) >= count)
        return self.reports_of(kind, request_id)[count - 1]

    async def serve(self, link: FrameLink[WorkerDown, WorkerUp], _peer: str) -> None:
        self.num_streams += 1
        with anyio.CancelScope() as stream:
            self._streams.add(stream)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(link.pump)
                async for messages in link.frames():
                    if any(isinstance(message, RegisterWorker) for message in messages):
                        link.post(WelcomeWorker(heartbeat_s=self._heartbeat_s))
                        self._link = link
                    self.reports.extend(m.event if isinstance(m, EventMessage) else m for m in messages)
                    self._notify()
                    if any(isinstance(message, Goodbye) for message in messages):
                        break
                link.close()
        self._streams.discard(stream)


class ScriptedGateway(ScriptedPeer):
    """Gateway that accepts every worker's token stream, and records the frames."""

    def __init__(self, heartbeat_s: float = 0.4) -> None:
        super().__init__()
        self.heartbeat_s = heartbeat_s
        self.frames: list[list[TokensUp]] = []
        # Whether the gateway answers heartbeats.
        self.answers = True

    def tokens_of(self, request_id: str) -> dict[int, TokenOut]:
        """Return the request's tokens by index. A repeated token counts once, and must be equal."""
        tokens: dict[int, TokenOut] = {}
        for frame in self.frames:
            for message in frame:
                if isinstance(message, TokenOut) and message.request_id == request_id:
                    assert tokens.setdefault(message.index, message) == message
        return tokens

    async def finished(self, request_id: str) -> list[int]:
        """Wait for the request's end and return its token ids; none may be missing."""
        await self.until(lambda: any(token.finish_reason for token in self.tokens_of(request_id).values()))
        tokens = self.tokens_of(request_id)
        assert sorted(tokens) == list(range(len(tokens)))
        return [token.token_id for _, token in sorted(tokens.items()) if token.token_id is not None]

    async def serve(self, link: FrameLink[TokensDown, TokensUp], _peer: str) -> None:
        self.num_streams += 1
        with anyio.CancelScope() as stream:
            self._streams.add(stream)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(link.pump)
                link.post(TokensAccepted(heartbeat_s=self.heartbeat_s, max_unanswered=4))
                async for messages in link.frames():
                    said: list[TokensUp] = []
                    for message in messages:
                        if not isinstance(message, TokensHeartbeat):
                            said.append(message)
                        elif self.answers:
                            link.post(TokensHeard())
                    if said:
                        self.frames.append(said)
                        self._notify()
                link.close()
        self._streams.discard(stream)


@asynccontextmanager
async def serving_scheduler(scheduler: ScriptedScheduler, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve it within the block; yields its address."""
    async with _serving("pdmesh.v1.Scheduler", "Worker", serve_link(scheduler.serve, WorkerUp), port) as address:
        yield address


@asynccontextmanager
async def serving_gateway(gateway: ScriptedGateway, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve it within the block; yields its token address."""
    async with _serving("pdmesh.v1.Gateway", "Tokens", serve_link(gateway.serve, TokensUp), port) as address:
        yield address


@asynccontextmanager
async def _serving(
    service: str, method: str, handler: grpc.RpcMethodHandler[object, object], port: int
) -> AsyncGenerator[str]:
    async with serving(service, {method: handler}, host=LOOPBACK, port=port, security=SecurityConfig()) as bound_port:
        yield f"{LOOPBACK}:{bound_port}"
