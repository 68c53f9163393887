"""The gateway's long-lived stream to the scheduler: register, submit, cancel, and receive commands.

While the scheduler is unreachable, running generations continue, because tokens do not pass through it. Cancels of that
time are not lost: the next registration names the requests that are still waited for, and the scheduler frees the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import anyio
import structlog

from pdmesh.config import SecurityConfig
from pdmesh.core.commands import ForgetRequest, GatewayCommand, Reject, Restart
from pdmesh.core.events import RequestCancelled
from pdmesh.errors import ProtocolError, RequestRejected
from pdmesh.model import Epoch, GatewayId, RequestId, SessionKey
from pdmesh.wire.messages import (
    Activity,
    AskSessions,
    CommandMessage,
    EndSession,
    EventMessage,
    GatewayDown,
    GatewayHeartbeat,
    GatewayUp,
    MeshStatus,
    NextActivity,
    RegisterGateway,
    SessionStatus,
    StandingBy,
    Submit,
    TenantSessions,
    WelcomeGateway,
)
from pdmesh.wire.scheduler_channel import SchedulerChannel, open_scheduler_channel
from pdmesh.wire.session import PeerSession, Terms
from pdmesh_gateway.page_activity import ActivityHub

log = structlog.get_logger()

METHOD = "/pdmesh.v1.Scheduler/Gateway"

#: Time for the scheduler to answer a request for the state of the mesh.
REFRESH_LIMIT_S = 0.25

#: Time for the scheduler to answer a question for sessions.
SESSIONS_LIMIT_S = 5.0

#: Number of unanswered heartbeats after which the gateway ends the stream; the scheduler answers each heartbeat.
SILENT_BEATS = 15

#: Instances register one after the other with a new scheduler. Contexts that several instances hold together may be as
#: long as the previous scheduler allowed for this time, so that long requests wait instead of being refused.
REGISTER_AGAIN_S = 30.0


class Outlook(Enum):
    """State of the mesh for a new request: ready, or the reason to wait.

    ``COMING``: an instance is being started again.
    """

    READY = auto()
    COMING = auto()
    NO_SCHEDULER = auto()
    NO_INSTANCE = auto()


class Waiting(Protocol):
    """Receiver of the scheduler's commands about the generations that the gateway waits for."""

    def waiting(self) -> tuple[tuple[RequestId, Epoch], ...]: ...

    def unbegun(self, scheduler_id: str) -> tuple[RequestId, ...]: ...

    def on_connected(self) -> None: ...

    def on_rejected(self, command: Reject) -> None: ...

    def on_restarted(self, command: Restart) -> None: ...

    def on_finished(self, command: ForgetRequest) -> None: ...


class GatewaySession:
    """The stream to the scheduler. `run` keeps it connected; only `wait_changed`, `refresh` and `sessions` wait."""

    def __init__(self, gateway_id: GatewayId, address: str, security: SecurityConfig, *, token_address: str) -> None:
        """Connect later, in `run`, to the scheduler or schedulers at ``address``.

        Workers reach this gateway at ``token_address``.
        """
        self._gateway_id = gateway_id
        self._token_address = token_address
        self._address = address
        self._security = security
        self._session: PeerSession[GatewayUp, GatewayDown] | None = None
        self.is_connected = False
        self._changed = anyio.Event()
        #: Number of streams made so far; the last one may have ended.
        self.num_connections = 0
        #: Id of the scheduler at the other end of the last stream.
        self.scheduler_id: str | None = None
        #: The scheduler's last report on the mesh; None while the scheduler is unreachable.
        self.state: MeshStatus | None = None
        #: Longest context in the last report that named one.
        self._longest_context = 0
        #: Longest context that the previous scheduler served, and the time until which this is used.
        self._longest_before, self._before_until_s = 0, 0.0
        self._num_reports = 0
        #: Whether a report was asked for out of turn and has not come yet.
        self._is_asked = False
        self._num_questions = 0
        #: Answers to questions for sessions; None until the answer came.
        self._answers: dict[int, tuple[SessionStatus, ...] | None] = {}

    @property
    def unready_reason(self) -> str | None:
        """The reason why the mesh cannot take a request now; None if it can."""
        if not self.is_connected:
            return "the scheduler cannot be reached"
        if self.state is None:
            return "the scheduler has not reported its instances yet"
        return None if self.state.ready else self.state.reason or "no instance can serve"

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens that the mesh serves, or lately served under another scheduler; 0 if unknown."""
        if self.state is None or not self.state.max_model_len:
            return 0
        return max(self.state.max_model_len, self._longest_of_before)

    @property
    def new_weights(self) -> str:
        """The identity of the weights for new requests, by the scheduler's last report; empty if unknown."""
        return "" if self.state is None else self.state.new_weights

    @property
    def _longest_of_before(self) -> int:
        return self._longest_before if anyio.current_time() < self._before_until_s else 0

    @property
    def outlook(self) -> Outlook:
        """The state of the mesh for a new request."""
        if not self.is_connected:
            return Outlook.NO_SCHEDULER
        if self.unready_reason is None:
            return Outlook.READY
        return Outlook.COMING if self.state is not None and self.state.num_coming else Outlook.NO_INSTANCE

    async def wait_changed(self, outlook: Outlook) -> None:
        """Wait until the outlook differs from this one."""
        while self.outlook is outlook:
            await self._changed.wait()

    async def refresh(self) -> None:
        """Ask the scheduler for its current report, and wait at most `REFRESH_LIMIT_S` for it.

        Concurrent callers share one report.
        """
        asked_at = self._num_reports
        if not self._is_asked:
            self._is_asked = self._post(GatewayHeartbeat())
        with anyio.move_on_after(REFRESH_LIMIT_S):
            while self._is_asked and self._num_reports == asked_at:
                await self._changed.wait()

    def submit(self, message: Submit) -> None:
        """Send a request to the scheduler.

        Raises RequestRejected if the scheduler is unreachable or reads too slowly.
        """
        if not self._post(message):
            raise RequestRejected("The scheduler cannot be reached.", status=503, code="unavailable", retry_after_s=1)

    def cancel(self, request_id: RequestId, epoch: Epoch, *, num_output_tokens: int) -> None:
        """Ask the scheduler to free a request. Without a scheduler nothing is sent: see the module's docstring."""
        self._post(EventMessage.of(RequestCancelled(self._gateway_id, request_id, epoch, num_output_tokens)))

    def end_session(self, session: SessionKey) -> None:
        """Tell the scheduler that a session has ended. Without a scheduler nothing is sent."""
        self._post(EndSession(session=session))

    async def sessions(self, tenant: str, session: SessionKey | None = None) -> tuple[SessionStatus, ...]:
        """Ask the scheduler for a tenant's sessions, the newest first, or for one of them.

        Raises RequestRejected if the scheduler does not answer within `SESSIONS_LIMIT_S`.
        """
        self._num_questions += 1
        number, answer = self._num_questions, None
        self._answers[number] = None
        try:
            if self._post(AskSessions(number=number, tenant=tenant, session=session)):
                with anyio.move_on_after(SESSIONS_LIMIT_S):
                    while (answer := self._answers[number]) is None:
                        await self._changed.wait()
        finally:
            del self._answers[number]
        if answer is None:
            raise RequestRejected("The scheduler cannot be reached.", status=503, code="unavailable", retry_after_s=1)
        return answer

    def ask_activity(self) -> None:
        """Ask for the next `Activity`.

        Without a scheduler nothing is sent; the next stream asks again if a page is open.
        """
        self._post(NextActivity())

    def _post(self, message: GatewayUp) -> bool:
        return self.is_connected and self._session is not None and self._session.post(message)

    async def run(self, waiting: Waiting, watchers: ActivityHub) -> None:
        """Connect, and reconnect whenever the stream ends, until cancelled."""
        async with open_scheduler_channel(self._address, self._security) as channel:
            talk = _Talk(self, channel, waiting, watchers)
            self._session = PeerSession(channel, METHOD, GatewayDown, talk, answer_limit_s=channel.answer_limit_s)
            await self._session.run()

    # Methods for `_Talk`.

    def registration(self, waiting: Waiting, unreached_leader: str) -> RegisterGateway:
        return RegisterGateway(
            gateway_id=self._gateway_id,
            waiting=waiting.waiting(),
            scheduler_id=self.scheduler_id or "",
            unbegun=() if self.scheduler_id is None else waiting.unbegun(self.scheduler_id),
            token_address=self._token_address,
            unreached_leader=unreached_leader,
        )

    def connected(self, welcome: WelcomeGateway) -> None:
        self.num_connections += 1
        if self.scheduler_id not in (None, welcome.scheduler_id):
            self._longest_before = max(self._longest_context, self._longest_of_before)
            self._before_until_s = anyio.current_time() + REGISTER_AGAIN_S
        self.scheduler_id = welcome.scheduler_id
        self.is_connected = True
        self._change()
        log.info("registered with the scheduler", gateway_id=self._gateway_id)

    def answered(self, message: TenantSessions) -> None:
        if message.number in self._answers:
            self._answers[message.number] = message.sessions
            self._change()

    def reported(self, state: MeshStatus) -> None:
        self.state = state
        self._longest_context = state.max_model_len or self._longest_context
        self._num_reports += 1
        self._is_asked = False
        self._change()

    @property
    def was_silent(self) -> bool:
        """Whether this gateway ended the last stream because the scheduler was silent."""
        return self._session is not None and self._session.was_silent

    def lost(self) -> None:
        self.state = None
        self.is_connected = self._is_asked = False
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@dataclass(frozen=True, slots=True)
class _Talk:
    """The gateway's side of the stream's protocol (`pdmesh.wire.session.Talk`)."""

    link: GatewaySession
    channel: SchedulerChannel
    waiting: Waiting
    watchers: ActivityHub

    async def prepare(self) -> None:
        pass

    def opening(self) -> Sequence[GatewayUp]:
        return [self.link.registration(self.waiting, self.channel.unreached_leader)]

    def welcomed(self, welcome: Any) -> Terms:
        welcome = self.channel.check(welcome, WelcomeGateway)
        self.link.connected(welcome)
        self.waiting.on_connected()
        if self.watchers.is_watched:
            self.link.ask_activity()
        silent_beats = welcome.silent_beats if welcome.silent_beats is not None else SILENT_BEATS
        return Terms(heartbeat_s=welcome.heartbeat_s, max_unanswered=silent_beats)

    def heartbeat(self) -> GatewayUp:
        return GatewayHeartbeat()

    def handle(self, message: GatewayDown) -> None:
        match message:
            case MeshStatus():
                self.link.reported(message)
            case TenantSessions():
                self.link.answered(message)
            case CommandMessage():
                self._obey(message.gateway_command)
            case Activity():
                self.watchers.publish(message)
                if self.watchers.is_watched:
                    self.link.ask_activity()
            case WelcomeGateway() | StandingBy():
                raise ProtocolError("WelcomeGateway twice")

    def _obey(self, command: GatewayCommand) -> None:
        match command:
            case Reject():
                self.waiting.on_rejected(command)
            case Restart():
                self.waiting.on_restarted(command)
            case ForgetRequest():
                self.waiting.on_finished(command)

    def overflowed(self) -> None:
        """Do nothing: the stream ends, and the next registration names the requests that are still waited for."""
        pass

    def lost(self) -> None:
        if self.link.was_silent:
            self.channel.fell_silent()
        self.link.lost()
