"""A scheduler in the test's own process, and scripted peers that talk to it over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, overload

import anyio
import anyio.lowlevel
import msgspec

from pdmesh.config import MeshConfig, SchedulerConfig, SecurityConfig
from pdmesh.core.commands import GatewayCommand
from pdmesh.core.events import GatewayEvent, InstanceEvent
from pdmesh.errors import InstanceUnavailable
from pdmesh.model import Epoch, GatewayId, InstanceProfile, RequestId, Resident
from pdmesh.service import ServiceContext
from pdmesh.wire.admin import QuestionRefused, ask_one
from pdmesh.wire.endpoint import MeshChannel, open_channel
from pdmesh.wire.link import FrameLink, open_link
from pdmesh.wire.messages import (
    AdminError,
    AdminRequest,
    AdminResponse,
    CommandMessage,
    EventMessage,
    GatewayDown,
    MeshStatus,
    Prompt,
    RegisterGateway,
    RegisterWorker,
    WelcomeGateway,
    WelcomeWorker,
    WorkerDown,
)
from pdmesh_scheduler.main import serve
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.lease_store import StoredRecord, StoreUnavailable

MessageT = TypeVar("MessageT")
AnswerT = TypeVar("AnswerT", bound=AdminResponse)

REGISTRATION = RegisterGateway(gateway_id=GatewayId("g"), waiting=())
WORKER_METHOD = "/pdmesh.v1.Scheduler/Worker"
GATEWAY_METHOD = "/pdmesh.v1.Scheduler/Gateway"

_GATEWAY_COMMANDS = {kind.__name__ for kind in get_args(GatewayCommand)}

#: Leases longer than any test, without earlier suspicion: only a test's own actions end a stream.
CONFIG = MeshConfig(scheduler=SchedulerConfig(lease_s=60.0, suspect_s=60.0, heartbeat_s=1.0, gateway_lease_s=30.0))


class RunningScheduler(ServiceContext):
    """Context of the scheduler service in this process, with its announced facts."""

    facts: dict[str, Any]
    ready: anyio.Event

    def announce(self, **facts: Any) -> None:
        self.facts = facts
        self.ready.set()


@dataclass
class SchedulerPeer:
    """A worker's or gateway's end of a stream."""

    link: FrameLink[Any, Any]
    frames: AsyncIterator[list[Any]]
    seen: list[Any]

    def post(self, *messages: Any) -> None:
        for message in messages:
            is_event = isinstance(message, InstanceEvent | GatewayEvent)
            self.link.post(EventMessage.of(message) if is_event else message)

    async def expect(self, message_type: type[MessageT], limit_s: float | None = 10) -> MessageT:
        """Return the next message of a type, dropping others before it. Raises TimeoutError."""
        message, _ = await self.expect_with_prompt(message_type, limit_s)
        return message

    async def expect_with_prompt(
        self, message_type: type[MessageT], limit_s: float | None = 10
    ) -> tuple[MessageT, Prompt | None]:
        """Return the next message of a type and the prompt that came with it. Raises TimeoutError."""
        with anyio.fail_after(limit_s):
            while True:
                for index, envelope in enumerate(self.seen):
                    message = _opened(envelope)
                    if isinstance(message, message_type):
                        del self.seen[: index + 1]
                        return message, envelope.prompt if isinstance(envelope, CommandMessage) else None
                self.seen[:] = await anext(self.frames)

    async def ended(self) -> str:
        """Return why the scheduler ended the stream."""
        with anyio.fail_after(10):
            try:
                while await anext(self.frames, None) is not None:
                    pass
            except InstanceUnavailable as error:
                return str(error)
        return "OK"


def _opened(message: Any) -> Any:
    """Return the command in an envelope, or the message itself if it has none."""
    if not isinstance(message, CommandMessage):
        return message
    return message.gateway_command if message.name in _GATEWAY_COMMANDS else message.command


@dataclass
class SchedulerBench:
    """A running scheduler, and ways to be its peer."""

    context: RunningScheduler
    channel: MeshChannel

    @asynccontextmanager
    async def connect(self, method: str, down: Any, *first: Any) -> AsyncGenerator[SchedulerPeer]:
        async with open_link(self.channel, method, down) as link, anyio.create_task_group() as tasks:

            async def pump() -> None:
                with suppress(InstanceUnavailable):
                    await link.pump()

            tasks.start_soon(pump)
            peer = SchedulerPeer(link, link.frames(), [])
            peer.post(*first)
            yield peer
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def worker(self, profile: InstanceProfile, *residents: Resident) -> AsyncGenerator[SchedulerPeer]:
        registration = RegisterWorker(profile=profile, residents=residents)
        async with self.connect(WORKER_METHOD, WorkerDown, registration) as peer:
            await peer.expect(WelcomeWorker)
            yield peer

    @asynccontextmanager
    async def gateway(self, *waiting: tuple[RequestId, Epoch]) -> AsyncGenerator[SchedulerPeer]:
        registration = msgspec.structs.replace(REGISTRATION, waiting=waiting)
        async with self.connect(GATEWAY_METHOD, GatewayDown, registration) as peer:
            await peer.expect(WelcomeGateway)
            await peer.expect(MeshStatus)
            yield peer

    @overload
    async def ask(
        self, question: AdminRequest, kind: None = None, *, operator_token: str = "", mesh_token: str = ""
    ) -> AdminResponse: ...
    @overload
    async def ask(
        self, question: AdminRequest, kind: type[AnswerT], *, operator_token: str = "", mesh_token: str = ""
    ) -> AnswerT: ...
    async def ask(
        self,
        question: AdminRequest,
        kind: type[Any] | None = None,
        *,
        operator_token: str = "",
        mesh_token: str = "",
    ) -> AdminResponse:
        """Ask with these tokens, and return the answer, which must be of this ``kind``."""
        security = SecurityConfig(operator_token=operator_token, mesh_token=mesh_token)
        try:
            answer = await ask_one(self.context.facts["address"], security, question)
        except QuestionRefused as error:
            answer = AdminError(message=str(error))
        assert kind is None or isinstance(answer, kind), answer
        return answer


class MemoryStore:
    """A lease record in memory. Implements `pdmesh_scheduler.standby.lease_store.LeaseStore`."""

    def __init__(self) -> None:
        self.stored = StoredRecord(None, None)
        self.is_away = False
        self._revision = 0

    async def read(self) -> StoredRecord:
        await anyio.lowlevel.checkpoint()
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return self.stored

    async def swap(self, record: LeaseRecord, version: str | None) -> str | None:
        await anyio.lowlevel.checkpoint()
        if self.is_away:
            raise StoreUnavailable("the store is away")
        if version != self.stored.version:
            return None
        self._revision += 1
        self.stored = StoredRecord(record, str(self._revision))
        return self.stored.version


@asynccontextmanager
async def running_scheduler(config: MeshConfig = CONFIG) -> AsyncGenerator[SchedulerBench]:
    """Yield a running scheduler, which must stop cleanly when the block is left."""
    context = RunningScheduler(ready_fd=None)
    context.ready = anyio.Event()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, config, context)
            await context.ready.wait()
            async with open_channel(context.facts["address"], SecurityConfig()) as channel:
                yield SchedulerBench(context, channel)
            context.stopping.set()
