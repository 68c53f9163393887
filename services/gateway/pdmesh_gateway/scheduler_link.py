"""The gateway's long-lived stream to the scheduler: register, submit, cancel, and what comes back.

While the scheduler is gone, running generations go on (their tokens do not pass through it); cancels are not lost,
because the requests that are still waited for are named at the next registration and the others freed.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import anyio
import structlog

from pdmesh.config import SecurityConfig
from pdmesh.errors import InstanceUnavailable, OutboxFull, ProtocolError, RequestRejected
from pdmesh.model import Epoch, GatewayId, RequestId
from pdmesh.wire.endpoint import open_channel
from pdmesh.wire.link import FrameLink, open_link
from pdmesh.wire.messages import (
    Activity,
    Cancel,
    Finished,
    GatewayDown,
    GatewayHeartbeat,
    GatewayUp,
    MeshState,
    NextActivity,
    RegisterGateway,
    Rejected,
    Restarted,
    Submit,
    WelcomeGateway,
)

log = structlog.get_logger()

METHOD = "/pdmesh.v1.Scheduler/Gateway"

#: For the scheduler's answer to a registration.
WELCOME_TIMEOUT_S = 10.0

#: Without a word from the scheduler for so many leases the stream is given up. It speaks at each heartbeat.
SILENT_LEASES = 3

#: Pauses between attempts to connect: doubled from the first to the last, each cut by a random part.
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0


class Waiting(Protocol):
    """Who waits for generations: what the scheduler says of them goes there."""

    def waiting(self) -> tuple[tuple[RequestId, Epoch], ...]: ...

    def on_connected(self) -> None: ...

    def on_rejected(self, message: Rejected) -> None: ...

    def on_restarted(self, message: Restarted) -> None: ...

    def on_finished(self, message: Finished) -> None: ...


class Watchers(Protocol):
    """Who looks at the mesh."""

    @property
    def is_watched(self) -> bool: ...

    def publish(self, activity: Activity) -> None: ...


class SchedulerLink:
    """`run` keeps the stream up; the other methods never block."""

    def __init__(self, gateway_id: GatewayId, address: str, security: SecurityConfig) -> None:
        self._gateway_id = gateway_id
        self._address = address
        self._security = security
        self._link: FrameLink[GatewayUp, GatewayDown] | None = None
        self._connected = anyio.Event()
        self._jitter = random.Random()
        #: Ever made; the last of them may have broken.
        self.num_connections = 0
        #: Whom the last of them was made to.
        self.scheduler_id: str | None = None
        #: The scheduler's last word on the mesh; None while it is gone.
        self.state: MeshState | None = None

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    @property
    def unready_reason(self) -> str | None:
        """Why the mesh cannot take a request now, if it cannot."""
        if self._link is None:
            return "the scheduler cannot be reached"
        if self.state is None:
            return "the scheduler has not reported yet"
        return None if self.state.ready else self.state.reason or "no instance can serve"

    async def wait_connected(self) -> None:
        await self._connected.wait()

    def submit(self, message: Submit) -> None:
        """Hand a request to the scheduler. Raises RequestRejected if it is gone or does not read."""
        try:
            if self._link is None:
                raise InstanceUnavailable("the scheduler cannot be reached")
            self._link.post(message)
        except (InstanceUnavailable, OutboxFull) as error:
            raise RequestRejected(
                "The scheduler cannot be reached.", status=503, type="server_error", code="unavailable", retry_after_s=1
            ) from error

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Free what a request holds. While the scheduler is gone there is nobody to tell: see the module's text."""
        if self._link is None:
            return
        try:
            self._link.post(Cancel(request_id=request_id, epoch=epoch))
        except (InstanceUnavailable, OutboxFull) as error:
            log.warning("cancel not sent", request_id=request_id, epoch=epoch, error=str(error))

    def ask_activity(self) -> None:
        """Ask for the next `Activity`. While the scheduler is gone it is asked when it is back."""
        if self._link is not None:
            with suppress(InstanceUnavailable, OutboxFull):  # the stream is about to end
                self._link.post(NextActivity())

    async def run(self, waiting: Waiting, watchers: Watchers) -> None:
        """Connect, and connect again whenever the stream ends, until cancelled."""
        pause_s = FIRST_PAUSE_S
        async with open_channel(self._address, self._security) as channel:
            while True:
                was_connected = self._connected
                try:
                    await self._run_once(channel, waiting, watchers)
                    log.warning("the scheduler ended the stream")
                except* (InstanceUnavailable, OutboxFull, ProtocolError, TimeoutError) as group:
                    log.warning("no stream to the scheduler", address=self._address, error=str(group.exceptions[0]))
                if was_connected.is_set():  # it had been up
                    pause_s = FIRST_PAUSE_S
                await anyio.sleep(pause_s * self._jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _run_once(self, channel: Any, waiting: Waiting, watchers: Watchers) -> None:
        async with open_link(channel, METHOD, GatewayDown) as link, anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            frames = link.frames()
            link.post(RegisterGateway(gateway_id=self._gateway_id, waiting=waiting.waiting()))
            welcome, rest = await _welcome(frames)
            self._link = link
            self.num_connections += 1
            self.scheduler_id = welcome.scheduler_id
            self._connected.set()
            log.info("registered with the scheduler", gateway_id=self._gateway_id)
            try:
                waiting.on_connected()
                tasks.start_soon(_beat, link, welcome.heartbeat_s)
                if watchers.is_watched:
                    self.ask_activity()
                self._handle(rest, waiting, watchers)
                frame: list[GatewayDown] | None
                while True:
                    with anyio.fail_after(SILENT_LEASES * welcome.lease_s):
                        frame = await anext(frames, None)
                    if frame is None:
                        break
                    self._handle(frame, waiting, watchers)
                tasks.cancel_scope.cancel()
            finally:
                self._link = None
                self.state = None
                self._connected = anyio.Event()

    def _handle(self, frame: list[GatewayDown], waiting: Waiting, watchers: Watchers) -> None:
        for message in frame:
            match message:
                case MeshState():
                    self.state = message
                case Rejected():
                    waiting.on_rejected(message)
                case Restarted():
                    waiting.on_restarted(message)
                case Finished():
                    waiting.on_finished(message)
                case Activity():
                    watchers.publish(message)
                    if watchers.is_watched:
                        self.ask_activity()
                case WelcomeGateway():
                    raise ProtocolError("WelcomeGateway twice")


async def _welcome(frames: AsyncIterator[list[GatewayDown]]) -> tuple[WelcomeGateway, list[GatewayDown]]:
    frame: list[GatewayDown]
    try:
        with anyio.fail_after(WELCOME_TIMEOUT_S):
            frame = await anext(frames, [])
    except TimeoutError:
        raise ProtocolError(f"the scheduler did not answer within {WELCOME_TIMEOUT_S:g} s") from None
    match frame:
        case [WelcomeGateway() as welcome, *rest]:
            return welcome, rest
        case []:
            raise InstanceUnavailable("the scheduler ended the stream")
        case _:
            raise ProtocolError("the scheduler's first message must be WelcomeGateway")


async def _beat(link: FrameLink[GatewayUp, GatewayDown], heartbeat_s: float) -> None:
    while True:
        await anyio.sleep(heartbeat_s)
        link.post(GatewayHeartbeat())
