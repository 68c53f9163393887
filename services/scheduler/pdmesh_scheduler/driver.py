"""Driver of the scheduling core: applies real events and carries out the core's commands.

One task applies all events in the order of their arrival, so that the event log repeats every decision. An exception in
this task is a bug in pdmesh. The exception ends the service rather than leave a wrong mesh state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter
from typing import assert_never

import anyio
import anyio.lowlevel
import structlog

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ForgetRequest,
    Outcome,
    SetRole,
    ToGateway,
    ToInstance,
    WakeAt,
)
from pdmesh.core.events import (
    DrainRequested,
    Event,
    GatewayJoined,
    InstanceJoined,
    InstanceLost,
    InstanceUnreachable,
    LoadReported,
    RequestArrived,
    Tick,
)
from pdmesh.core.operator_events import ActuatorLost, ActuatorReported
from pdmesh.core.requests.request_histories import RequestHistories
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.eventlog import EventLogWriter
from pdmesh.model import GatewayId, InstanceId, InstanceProfile
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.views import InstanceView
from pdmesh.wire.messages import (
    CommandMessage,
    GatewayDown,
    Generation,
    MeshStatus,
    PeerGone,
    PeersHere,
    WorkerDown,
)
from pdmesh_scheduler.activity import ActivityFeed
from pdmesh_scheduler.history import MeshHistory
from pdmesh_scheduler.longest_context import LongestContext
from pdmesh_scheduler.mesh_status import mesh_status
from pdmesh_scheduler.observing import Handled, Observer
from pdmesh_scheduler.peer_streams import Peers
from pdmesh_scheduler.prompts import Prompts

log = structlog.get_logger()

#: Largest number of events in the inbox. While more are queued, `Driver.submit` waits, so streams are not read.
MAX_INBOX = 4096

#: Largest number of lost instances' data addresses that are remembered, so that a returning instance closes its
#: endpoints.
MAX_TOLD_GONE = 1024

#: Events applied before other tasks run.
BATCH = 64


@dataclass(frozen=True, slots=True)
class _Queued:
    """An event in the inbox.

    `generation` is the prompt of an arriving request. `first` is called just before the event is applied, and `applied`
    is set afterwards.
    """

    event: Event
    generation: Generation | None = None
    first: Callable[[], None] | None = None
    applied: anyio.Event | None = None


class Driver:
    """Owner of the core. `submit` and `post` queue events; `run` applies them."""

    def __init__(
        self,
        core: SchedulerCore,
        *,
        clock: Callable[[], float],
        workers: Peers[InstanceId, WorkerDown],
        gateways: Peers[GatewayId, GatewayDown],
        lives: RequestHistories,
        activity: ActivityFeed,
        history: MeshHistory,
        observers: Sequence[Observer],
        event_log: EventLogWriter | None = None,
        may_command: Callable[[], bool] = lambda: True,
    ) -> None:
        """``may_command`` is asked before each batch of events; once it returns False, no more events are applied."""
        self._core = core
        self._may_command = may_command
        self._clock = clock
        self._workers = workers
        self._gateways = gateways
        self._lives = lives
        self.activity = activity
        self._history = history
        self._observers = (*observers, history, activity)
        self._event_log = event_log
        self._inbox: deque[_Queued] = deque()
        self._filled = anyio.Event()
        self._emptied = anyio.Event()
        self._prompts = Prompts(core)
        self._profiles: dict[InstanceId, InstanceProfile] = {}
        self._longest_context = LongestContext(core, clock)
        self._joined: dict[InstanceId, int] = {}  # each instance's latest join number, in ascending order
        self._num_joined = 0
        self._introduced: dict[InstanceId, int] = {}  # largest join number each instance was introduced to
        self._told_gone: dict[bytes, None] = {}  # data addresses the other instances have closed
        self._loads: dict[InstanceId, LoadReported] = {}
        self._num_operation_changes = 0
        self._wake_at_s: float | None = None
        self._wake_changed = anyio.Event()
        self._silent: set[InstanceId] = set()  # lost for silence, processes perhaps alive
        self._readiness: tuple[str | None, int, int, str | None] = ("", 0, 0, "")

    # --- events in ---

    def post(
        self, event: Event, generation: Generation | None = None, *, first: Callable[[], None] | None = None
    ) -> None:
        """Queue an event without waiting. Only for the few events that the start or end of a stream causes.

        ``first`` is called just before the event is applied.
        """
        self._put(_Queued(event, generation, first=first))

    async def submit(self, event: Event, generation: Generation | None = None) -> None:
        """Queue an event, then wait while more than `MAX_INBOX` are queued. ``generation``: the arrived request."""
        self.post(event, generation)
        while len(self._inbox) > MAX_INBOX:
            await self._emptied.wait()

    async def act(self, event: Event) -> None:
        """Queue an event and wait until it is applied."""
        applied = anyio.Event()
        self._put(_Queued(event, applied=applied))
        await applied.wait()

    def _put(self, queued: _Queued) -> None:
        self._inbox.append(queued)
        self._filled.set()

    async def run(self) -> None:
        """Apply events until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick)
            tasks.start_soon(self.activity.run, self.state)
            while True:
                if not self._inbox:
                    self._filled = anyio.Event()
                    await self._filled.wait()
                if not self._may_command():
                    await anyio.sleep_forever()  # another scheduler leads, or will lead
                for _ in range(min(BATCH, len(self._inbox))):
                    queued = self._inbox.popleft()
                    if queued.first is not None:
                        queued.first()
                    self._apply(queued.event, queued.generation)
                    if queued.applied is not None:
                        queued.applied.set()
                if len(self._inbox) <= MAX_INBOX:
                    self._emptied.set()
                    self._emptied = anyio.Event()
                await anyio.lowlevel.checkpoint()

    async def _tick(self) -> None:
        while True:
            self._wake_changed = changed = anyio.Event()
            if self._wake_at_s is None:
                await changed.wait()
                continue
            with anyio.move_on_after(max(0.0, self._wake_at_s - self._clock())):
                await changed.wait()
                continue
            self._wake_at_s = None
            self.post(Tick())

    def _apply(self, event: Event, generation: Generation | None) -> None:
        now_s = self._clock()
        if self._event_log is not None:
            self._event_log.record(now_s, event)
        self._remember(event, generation)
        began_s = perf_counter()
        commands = self._core.handle(event, now_s)
        decision_s = perf_counter() - began_s
        if self._event_log is not None:
            self._event_log.record_commands(commands)
        handled = Handled(
            event=event,
            now_s=now_s,
            commands=commands,
            milestones=self._lives.observe(event, commands, now_s),
            generation=generation,
            bundle=self._core.bundle,
            decision_s=decision_s,
        )
        for observer in self._observers:
            observer.observe(handled)
        for command in commands:
            self._carry_out(command)
        self._follow_up(event)
        if self._core.num_operation_changes != self._num_operation_changes:
            self._num_operation_changes = self._core.num_operation_changes
            self._tell_readiness()

    def _remember(self, event: Event, generation: Generation | None) -> None:
        match event:
            case RequestArrived() if generation is not None:
                self._prompts.arrived(generation)
            case InstanceJoined():
                before = self._profiles.get(event.profile.instance_id)
                self._profiles[event.profile.instance_id] = event.profile
                self._longest_context.joined(event.profile.instance_id)
                self._prompts.joined(event.profile)
                if before is not None and before.data_address != event.profile.data_address:
                    self._tell_gone(before)
                self._note_joined(event.profile)
                self._loads.pop(event.profile.instance_id, None)
            case InstanceLost():
                self._longest_context.is_lost(event.instance_id)
            case LoadReported():
                self._loads[event.instance_id] = event
            case _:
                pass

    def _follow_up(self, event: Event) -> None:
        self._prompts.handled(event)
        match event:
            case GatewayJoined():
                self._gateways.post(event.gateway_id, self.state())
            case InstanceJoined():
                self._silent.discard(event.profile.instance_id)
                self._tell_readiness()
            case InstanceUnreachable() | DrainRequested() | ActuatorReported() | ActuatorLost():
                self._tell_readiness()
            case InstanceLost():
                lost = self._profiles.pop(event.instance_id, None)
                self._joined.pop(event.instance_id, None)
                self._introduced.pop(event.instance_id, None)
                self._loads.pop(event.instance_id, None)
                if lost is not None:
                    self._tell_gone(lost)
                self._tell_readiness()
            case _:
                pass

    # --- commands out ---

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToInstance():
                self._introduce_peers(command.instance_id)
                prompt = self._prompts.sent_with(command)
                self._workers.post(command.instance_id, CommandMessage.of(command, prompt))
                if isinstance(command, SetRole):
                    self._tell_readiness()
                if isinstance(command, AdmitPrefill) and prompt is not None:
                    log.debug(
                        "request placed",
                        request_id=command.request_id,
                        epoch=command.epoch,
                        label=prompt.generation.label,
                        prefill=command.instance_id,
                        decode=command.decode_instance_id if command.moves_on else command.instance_id,
                    )
            case ForgetRequest():
                if command.outcome is Outcome.FINISHED:
                    # The last token takes another way to the gateway, and may be lost there with its instance.
                    self._gateways.post(command.gateway_id, CommandMessage.of(command))
                self._prompts.ended(command)
                log.debug("request ended", request_id=command.request_id, epoch=command.epoch, outcome=command.outcome)
            case ToGateway():
                self._gateways.post(command.gateway_id, CommandMessage.of(command))
            case WakeAt():
                self._wake_at_s = command.at_s
                self._wake_changed.set()
            case _:
                assert_never(command)

    def _note_joined(self, profile: InstanceProfile) -> None:
        """Note that an instance joined, so that each instance gets its address with the next command.

        After a loss the other instances have closed their endpoints. If the same process joins again, tell it to close
        its own endpoints first. Otherwise its first message to each peer is lost, and seconds pass before the loss is
        noticed.
        """
        instance_id = profile.instance_id
        self._joined.pop(instance_id, None)
        self._num_joined += 1
        self._joined[instance_id] = self._num_joined
        self._introduced.pop(instance_id, None)
        if profile.data_address in self._told_gone:
            del self._told_gone[profile.data_address]
            for other in self._profiles.values():
                if other.instance_id != instance_id:
                    self._workers.post(instance_id, PeerGone(data_address=other.data_address))

    def _introduce_peers(self, instance_id: InstanceId) -> None:
        """Send an instance the addresses of all instances that joined since it last received addresses.

        Addresses go out only before a command. Otherwise 1,000 instances that join at once would cause a million
        messages.
        """
        before = self._introduced.get(instance_id, 0)
        if before == self._num_joined:
            return
        self._introduced[instance_id] = self._num_joined
        new_ids = list(takewhile(lambda joined_id: self._joined[joined_id] > before, reversed(self._joined)))
        addresses = {joined_id: self._profiles[joined_id].data_address for joined_id in new_ids}
        self._workers.post(instance_id, PeersHere(data_addresses=addresses))

    def _tell_gone(self, profile: InstanceProfile) -> None:
        """Tell the other instances to free their endpoints and buffers for this instance."""
        self._told_gone[profile.data_address] = None
        if len(self._told_gone) > MAX_TOLD_GONE:
            del self._told_gone[next(iter(self._told_gone))]
        for instance_id in self._profiles:
            if instance_id != profile.instance_id:
                self._workers.post(instance_id, PeerGone(data_address=profile.data_address))

    # --- the mesh's state ---

    def wait_for(self, instance_id: InstanceId) -> None:
        """Report an instance as coming back, in the state for gateways, although silence is about to make it lost."""
        self._silent.add(instance_id)
        self._history.fell_silent(instance_id, self._clock())
        self._tell_readiness()

    def wait_no_longer_for(self, instance_id: InstanceId) -> None:
        """Stop reporting an instance as coming back."""
        self._silent.discard(instance_id)
        self._tell_readiness()

    @property
    def instances(self) -> Sequence[InstanceView]:
        """The core's views of the instances."""
        return self._core.instances

    @property
    def policy(self) -> PolicyConfig:
        """Policy settings for the bundles that the core makes."""
        return self._core.policy

    def state(self) -> MeshStatus:
        """Return the state that operators and gateways receive."""
        return mesh_status(
            self._core,
            self._profiles,
            self._loads,
            self._history,
            self._clock(),
            num_gateways=len(self._gateways),
            num_coming=self._num_coming,
            silent=self._silent,
            longest=self._longest_context.num_tokens(self._profiles),
        )

    @property
    def _num_coming(self) -> int:
        return len(self._core.actuators.coming | self._silent)

    def _tell_readiness(self) -> None:
        """Push the state to all gateways if a fact that they act upon has changed.

        These are readiness, the longest context, the number of returning instances, and new weights.
        """
        longest = self._longest_context.num_tokens(self._profiles)
        readiness = (self._core.unready_reason, longest, self._num_coming, self._core.new_weights)
        if readiness != self._readiness:
            self._readiness = readiness
            state = self.state()
            for gateway_id in self._gateways:
                self._gateways.post(gateway_id, state)
