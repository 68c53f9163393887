"""The worker's stream to the scheduler: registers, renews the lease, carries reports, comes back after a loss.

Reports are not kept while the scheduler is away: registering again tells it all that it must know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import structlog

from pdmesh.core.events import InstanceEvent, LoadReported
from pdmesh.errors import InstanceUnavailable, OutboxFull, ProtocolError, leaves
from pdmesh.wire.endpoint import MeshChannel
from pdmesh.wire.link import FrameLink, open_link
from pdmesh.wire.messages import (
    CommandMessage,
    EventMessage,
    Goodbye,
    RegisterWorker,
    WelcomeWorker,
    WorkerDown,
    WorkerUp,
)
from pdmesh.worker.instance import Instruction
from pdmesh.worker.reconnect import backoff_s

log = structlog.get_logger()

METHOD = "/pdmesh.v1.Scheduler/Worker"

#: For the scheduler's first answer, and for its end of the stream after our goodbye.
ANSWER_LIMIT_S = 5.0


class SchedulerLink:
    """See the module's docstring.

    Before each registration ``prepare`` is awaited (it may have to let a step end); ``registration`` is what is true
    at the moment of sending. ``handle`` takes what the scheduler says.
    """

    def __init__(
        self,
        channel: MeshChannel,
        *,
        prepare: Callable[[], Awaitable[None]],
        registration: Callable[[], RegisterWorker],
        load: Callable[[], LoadReported],
        handle: Callable[[Instruction], None],
    ) -> None:
        self._channel = channel
        self._prepare = prepare
        self._registration = registration
        self._load = load
        self._handle = handle
        self._link: FrameLink[WorkerUp, WorkerDown] | None = None
        self._session = anyio.CancelScope()
        self._num_failures = 0
        self._leaving = False
        self._left = anyio.Event()
        #: Set at the first accepted registration.
        self.registered = anyio.Event()

    def report(self, event: InstanceEvent) -> None:
        """Queue an event; dropped while the scheduler is away."""
        self._post(EventMessage.of(event))

    def _post(self, message: WorkerUp) -> None:
        if self._link is None:
            return
        try:
            self._link.post(message)
        except InstanceUnavailable:  # the stream broke; its session is about to notice
            self._link = None
        except OutboxFull:
            log.error("the scheduler does not read its stream; connecting again")
            self._link = None
            self._session.cancel()

    async def run(self) -> None:
        """Stay registered until cancelled or `leave`."""
        while not self._leaving:
            log.info("waiting for the scheduler")
            await self._channel.channel_ready()
            self._num_failures += 1
            try:
                with anyio.CancelScope() as self._session:
                    await self._serve()
            except* (InstanceUnavailable, ProtocolError, TimeoutError) as group:
                log.warning("lost the scheduler", reason="; ".join(str(leaf) for leaf in leaves(group)))
            finally:
                self._link = None
            if not self._leaving:
                await anyio.sleep(backoff_s(self._num_failures))
        self._left.set()

    async def leave(self) -> None:
        """Say goodbye and wait, for a while, until the scheduler has heard it."""
        self._leaving = True
        if self._link is None:
            return
        self._post(Goodbye())
        self._link.close()
        with anyio.move_on_after(ANSWER_LIMIT_S):
            await self._left.wait()

    async def _serve(self) -> None:
        """One registration, until the stream ends."""
        await self._prepare()
        async with open_link(self._channel, METHOD, WorkerDown) as link, anyio.create_task_group() as tasks:
            registration = self._registration()
            link.post(registration)
            self._link = link  # what is reported from here on comes after the registration
            tasks.start_soon(link.pump)
            frames = link.frames()
            with anyio.fail_after(ANSWER_LIMIT_S):
                first: list[WorkerDown] = await anext(frames, [])
            if not first or not isinstance(first[0], WelcomeWorker):
                raise ProtocolError("the scheduler's first message is no welcome")
            log.info("registered with the scheduler", num_residents=len(registration.residents))
            self._num_failures = 0
            self.registered.set()
            tasks.start_soon(self._renew_lease, first[0].heartbeat_s)
            self._take(first[1:])
            async for messages in frames:
                self._take(messages)
            tasks.cancel_scope.cancel()

    def _take(self, messages: list[WorkerDown]) -> None:
        for message in messages:
            match message:
                case CommandMessage():
                    self._handle(message.command)
                case WelcomeWorker():
                    raise ProtocolError("a second welcome from the scheduler")
                case _:
                    self._handle(message)

    async def _renew_lease(self, heartbeat_s: float) -> None:
        while True:
            self.report(self._load())
            await anyio.sleep(heartbeat_s)
