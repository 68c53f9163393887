"""The worker's stream to the scheduler: registration, heartbeats and reports, and reconnecting after a loss.

Reports are dropped while the scheduler is away, because the next registration has all that it needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_never

import anyio
import structlog

from pdmesh.core.events import InstanceEvent, LoadReported
from pdmesh.errors import ProtocolError
from pdmesh.wire.messages import (
    CheckPeers,
    CommandMessage,
    EventMessage,
    Goodbye,
    PeerGone,
    PeersChecked,
    PeersHere,
    Prompt,
    RegisterWorker,
    SchedulerHeartbeat,
    StandingBy,
    WelcomeWorker,
    WorkerDown,
    WorkerUp,
)
from pdmesh.wire.scheduler_channel import SchedulerChannel
from pdmesh.wire.session import PeerSession, Terms
from pdmesh.worker.instance import Instruction

log = structlog.get_logger()

METHOD = "/pdmesh.v1.Scheduler/Worker"

#: Seconds for the scheduler to hear the goodbye.
LEAVE_LIMIT_S = 5.0


class WorkerSession:
    """The worker's session with the scheduler.

    Before each registration ``prepare`` is awaited, and may wait for a step to end. ``registration`` returns the state
    at the moment of sending. ``registered`` is called when the registration was accepted. ``handle`` takes the
    scheduler's messages, and ``lost`` is called whenever the stream ends.
    """

    def __init__(
        self,
        channel: SchedulerChannel,
        *,
        prepare: Callable[[], Awaitable[None]],
        registration: Callable[[], RegisterWorker],
        registered: Callable[[], None],
        load: Callable[[], LoadReported],
        handle: Callable[[Instruction, Prompt | None], None],
        check: Callable[[CheckPeers], None],
        lost: Callable[[], None],
    ) -> None:
        self._registration = registration
        self._on_registered = registered
        self._load = load
        self._handle = handle
        self._check = check
        self._lost = lost
        self._channel = channel
        self._session: PeerSession[WorkerUp, WorkerDown] = PeerSession(
            channel, METHOD, WorkerDown, self, answer_limit_s=channel.answer_limit_s
        )
        self._prepare = prepare
        #: Set at the first accepted registration.
        self.registered = anyio.Event()

    def report(self, event: InstanceEvent) -> None:
        """Queue an event, or drop it while the scheduler is away."""
        self._session.post(EventMessage.of(event))

    def answer(self, checked: PeersChecked) -> None:
        """Queue the result of a check, or drop it while the scheduler is away."""
        self._session.post(checked)

    async def run(self) -> None:
        """Stay registered until cancelled or `leave`."""
        await self._session.run()

    async def leave(self) -> None:
        """Send a goodbye and wait until the scheduler has read it, for `LEAVE_LIMIT_S` at most."""
        if self._session.post(Goodbye()):
            with anyio.move_on_after(LEAVE_LIMIT_S):
                await self._session.finish()

    # `pdmesh.wire.session.Talk`.

    async def prepare(self) -> None:
        await self._prepare()

    def opening(self) -> Sequence[WorkerUp]:
        return [self._registration()]

    def welcomed(self, welcome: Any) -> Terms:
        welcome = self._channel.check(welcome, WelcomeWorker)
        log.info("registered with the scheduler")
        self._on_registered()
        self.registered.set()
        return Terms(heartbeat_s=welcome.heartbeat_s, max_unanswered=welcome.silent_beats)

    def heartbeat(self) -> WorkerUp:
        return EventMessage.of(self._load())

    def handle(self, message: WorkerDown) -> None:
        match message:
            case CommandMessage():
                self._handle(message.command, message.prompt)
            case PeersHere() | PeerGone():
                self._handle(message, None)
            case CheckPeers():
                self._check(message)
            case SchedulerHeartbeat():
                pass
            case WelcomeWorker() | StandingBy():
                raise ProtocolError("a second welcome from the scheduler")
            case _:
                assert_never(message)

    def overflowed(self) -> None:
        """Do nothing, because the next registration has the whole state."""

    def lost(self) -> None:
        self._lost()
        log.info("waiting for the scheduler")
