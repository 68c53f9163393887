"""A stand-in for scheduler and workers, for tests of the gateway: it answers requests by a script.

`ScriptedMesh` serves ``/pdmesh.v1.Scheduler/Gateway`` and dials the gateway's token port as one worker. Nothing is
computed: a `Script` turns a submitted `Generation` into tokens, and a test can take any step in its own hands.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import msgspec

from pdmesh.config import SecurityConfig
from pdmesh.core.commands import GatewayCommand, Reject, Restart
from pdmesh.errors import InstanceUnavailable
from pdmesh.model import Epoch, FinishReason, InstanceId, RejectReason, RequestId, Role, SessionKey
from pdmesh.wire.endpoint import open_channel, serving
from pdmesh.wire.link import FrameLink, open_link, serve_link
from pdmesh.wire.messages import (
    AskSessions,
    CommandMessage,
    EndSession,
    EventMessage,
    GatewayDown,
    GatewayUp,
    Generation,
    InstanceStatus,
    MeshStatus,
    NextActivity,
    PromptLogprobs,
    RegisterGateway,
    RegisterTokens,
    SessionStatus,
    Submit,
    TenantSessions,
    TokenLogprobs,
    TokenOut,
    TokensAccepted,
    TokensDown,
    TokensHeartbeat,
    TokensUp,
    WelcomeGateway,
    unpack_token_ids,
)

#: Messages that answer one submitted request, as ``script(generation)``; they go out in one frame each.
Script = Callable[[Generation], Sequence[TokenOut | PromptLogprobs]]

TOKENS_METHOD = "/pdmesh.v1.Gateway/Tokens"


def token_out(generation: Generation, index: int, token_id: int | None, **fields: object) -> TokenOut:
    """Return a token of ``generation``, with further fields of `TokenOut`."""
    return TokenOut(
        request_id=generation.request_id,
        epoch=generation.epoch,
        index=index,
        token_id=token_id,
        **fields,  # type: ignore[arg-type]
    )


def echo_prompt(generation: Generation) -> list[TokenOut | PromptLogprobs]:
    """The script used by default: the output is the prompt, over and over, to ``max_tokens``.

    Log-probabilities, where asked for, are ``-1/8`` for the token at hand and ``-(rank + 1)/8`` for the top ones. An
    embedding is the prompt's length and its last token.
    """
    params = generation.params
    prompt = unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens]
    messages: list[TokenOut | PromptLogprobs] = []
    if params.embeds:
        embedding = struct.pack("<2f", len(prompt), prompt[-1])
        return [token_out(generation, 0, None, finish_reason=FinishReason.STOP, embedding=embedding)]
    if params.prompt_logprobs is not None:
        logprobs = tuple(_logprobs(token_id, params.prompt_logprobs) for token_id in prompt[1:])
        messages.append(
            PromptLogprobs(request_id=generation.request_id, epoch=generation.epoch, start=1, logprobs=logprobs)
        )
    for index in range(generation.num_output_tokens, params.max_tokens):
        token_id = prompt[index % len(prompt)]
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if token_id in params.eos_token_ids:
            finish = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            finish, stop_token_id = FinishReason.STOP, token_id
        elif index == params.max_tokens - 1:
            finish = FinishReason.LENGTH
        messages.append(
            token_out(
                generation,
                index,
                token_id,
                logprobs=None if params.logprobs is None else _logprobs(token_id, params.logprobs),
                finish_reason=finish,
                stop_token_id=stop_token_id,
            )
        )
        if finish is not None:
            break
    return messages


def saying_tokens(token_ids: Sequence[int], end_id: int) -> Script:
    """Return a script that draws these tokens to ``max_tokens``; ``end_id`` and stop tokens end an answer."""

    def say(generation: Generation) -> list[TokenOut | PromptLogprobs]:
        params, out = generation.params, list[TokenOut | PromptLogprobs]()
        for index in range(generation.num_output_tokens, min(len(token_ids), params.max_tokens)):
            token_id = token_ids[index]
            stop_id = token_id if token_id in params.stop_token_ids else None
            finish = FinishReason.LENGTH if index == params.max_tokens - 1 else None
            finish = FinishReason.STOP if token_id == end_id or stop_id is not None else finish
            out.append(token_out(generation, index, token_id, finish_reason=finish, stop_token_id=stop_id))
            if finish is not None:
                break
        return out

    return say


def silence(_generation: Generation) -> list[TokenOut | PromptLogprobs]:
    """A script that never answers: the test does."""
    return []


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple(((token_id + rank) % 256, -(rank + 1) / 8) for rank in range(num_top))
    return TokenLogprobs(-1 / 8, top)


READY = MeshStatus(
    ready=True,
    reason="",
    instances=(
        InstanceStatus(
            instance_id=InstanceId("scripted"),
            role=Role.MIXED,
            model="scripted",
            device="cpu",
            pid=0,
            draining=False,
            num_blocks=100,
            num_free_blocks=75,
            num_held_blocks=25,
            num_taken_blocks=25,
            num_quarantined_blocks=0,
            num_prefilling=0,
            num_decoding=0,
            num_queued_tokens=0,
        ),
    ),
    num_waiting=0,
    num_running=0,
    bundle="fcfs",
)


@dataclass(eq=False)
class ScriptedMesh:
    """Mesh behind a gateway: records the gateway's messages, and posts messages as scheduler and worker."""

    script: Script = echo_prompt
    state: MeshStatus = READY
    #: Empty: a new id for each registration, as after a restart.
    scheduler_id: str = ""
    heartbeat_s: float = 10.0
    answers_heartbeats: bool = True
    #: Address of the scheduler, as host:port.
    address: str = ""
    submitted: list[Submit] = field(default_factory=list[Submit])
    ended_sessions: list[SessionKey] = field(default_factory=list[SessionKey])
    sessions: list[SessionStatus] = field(default_factory=list[SessionStatus])
    cancelled: list[tuple[RequestId, Epoch]] = field(default_factory=list[tuple[RequestId, Epoch]])
    registrations: list[RegisterGateway] = field(default_factory=list[RegisterGateway])
    num_activity_asked: int = 0
    _gateway: FrameLink[GatewayDown, GatewayUp] | None = None
    _gateway_scope: anyio.CancelScope | None = None
    #: Whether the worker sends heartbeats.
    worker_beats: bool = True
    _worker: FrameLink[TokensUp, TokensDown] | None = None
    _worker_scope: anyio.CancelScope | None = None
    _tasks: anyio.abc.TaskGroup | None = None
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
        """Wait for something that the gateway's messages bring about."""
        with anyio.fail_after(timeout_s):
            while not condition():
                await self._changed.wait()

    async def next_submit(self, index: int = 0) -> Submit:
        """Wait for the ``index``-th submitted request, and return it."""
        await self.until(lambda: len(self.submitted) > index)
        return self.submitted[index]

    def say(self, *messages: GatewayDown | GatewayCommand) -> None:
        """Post to the gateway as its scheduler."""
        assert self._gateway is not None
        for message in messages:
            self._gateway.post(CommandMessage.of(message) if isinstance(message, GatewayCommand) else message)

    def lose(self, generation: Generation, reason: str = "lost", *, blame: float = 1.0) -> None:
        """Say that a request's KV is lost, and that it may have caused that."""
        self.say(
            Restart(
                gateway_id=generation.gateway_id,
                request_id=generation.request_id,
                epoch=generation.epoch,
                reason=reason,
                blame=blame,
            )
        )

    def refuse(
        self, generation: Generation, reason: RejectReason = RejectReason.OVERLOADED, /, **fields: float
    ) -> None:
        """Say that a request is refused, with further fields of `Reject`."""
        self.say(
            Reject(
                gateway_id=generation.gateway_id,
                request_id=generation.request_id,
                epoch=generation.epoch,
                reason=reason,
                message="no room",
                **{"retry_after_s": None, **fields},  # type: ignore[arg-type]
            )
        )

    def send_tokens(self, *messages: TokensUp) -> None:
        """Post to the gateway as a worker."""
        assert self._worker is not None
        for message in messages:
            self._worker.post(message)

    def set_state(self, state: MeshStatus) -> None:
        self.state = state
        self.say(state)

    async def connect_worker(self, token_address: str, instance_id: str = "scripted") -> None:
        """Dial the gateway's token port and register, as a worker does."""
        assert self._tasks is not None
        await self._tasks.start(self._run_worker, token_address, instance_id)

    def drop_worker(self) -> None:
        """Break the worker's token stream."""
        assert self._worker_scope is not None
        self._worker_scope.cancel()

    def drop_gateway(self) -> None:
        """End the gateway's stream, as a scheduler that stops."""
        assert self._gateway_scope is not None
        self._gateway_scope.cancel()

    async def _run_worker(
        self, token_address: str, instance_id: str, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        try:
            with anyio.CancelScope() as scope:
                async with (
                    open_channel(token_address, SecurityConfig()) as channel,
                    open_link(channel, TOKENS_METHOD, TokensDown) as link,
                    anyio.create_task_group() as tasks,
                ):
                    tasks.start_soon(link.pump)
                    link.post(RegisterTokens(instance_id=InstanceId(instance_id)))
                    async for frame in link.frames():
                        for message in frame:
                            if isinstance(message, TokensAccepted):
                                self._worker, self._worker_scope = link, scope
                                tasks.start_soon(self._beat, link, message.heartbeat_s)
                                task_status.started()
        except* InstanceUnavailable:
            pass
        self._worker = None

    async def _beat(self, link: FrameLink[TokensUp, TokensDown], heartbeat_s: float) -> None:
        while True:
            if self.worker_beats:
                link.post(TokensHeartbeat())
            await anyio.sleep(heartbeat_s)

    async def _serve_gateway(self, link: FrameLink[GatewayDown, GatewayUp], _peer: str) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            self._gateway, self._gateway_scope = link, tasks.cancel_scope
            async for frame in link.frames():
                for message in frame:
                    await self._handle(link, message)
                self._changed.set()
                self._changed = anyio.Event()
            tasks.cancel_scope.cancel()

    async def _handle(self, link: FrameLink[GatewayDown, GatewayUp], message: GatewayUp) -> None:
        match message:
            case RegisterGateway():
                self.registrations.append(message)
                welcome = WelcomeGateway(
                    scheduler_id=self.scheduler_id or f"scheduler-{len(self.registrations)}",
                    heartbeat_s=self.heartbeat_s,
                )
                link.post(welcome)
                link.post(self.state)
            case Submit():
                if self._worker is None:
                    await self.connect_worker(message.generation.token_address)
                for generation in message.generations():
                    self.submitted.append(msgspec.structs.replace(message, generation=generation, others=()))
                    self.send_tokens(*self.script(generation))
            case EventMessage():
                cancelled = message.gateway_event
                self.cancelled.append((cancelled.request_id, cancelled.epoch))
            case EndSession(session=session):
                self.ended_sessions.append(session)
            case AskSessions(number=number, tenant=tenant, session=session):
                known = [each for each in self.sessions if each.tenant == tenant]
                found = [each for each in known if session is None or each.session == session.hex()]
                link.post(TenantSessions(number=number, sessions=tuple(found)))
            case NextActivity():
                self.num_activity_asked += 1
            case _:
                if self.answers_heartbeats:
                    link.post(self.state)


@asynccontextmanager
async def scripted_mesh(script: Script = echo_prompt, *, port: int = 0) -> AsyncGenerator[ScriptedMesh]:
    """Run a `ScriptedMesh` that listens within the block."""
    mesh = ScriptedMesh(script)
    methods = {"Gateway": serve_link(mesh._serve_gateway, GatewayUp)}
    async with anyio.create_task_group() as tasks:
        mesh._tasks = tasks
        async with serving(
            "pdmesh.v1.Scheduler", methods, host="127.0.0.1", port=port, security=SecurityConfig()
        ) as bound_port:
            mesh.address = f"127.0.0.1:{bound_port}"
            yield mesh
        tasks.cancel_scope.cancel()
