"""Workers' streams: registration, reports, and the loss of silent workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import anyio
import structlog

from pdmesh.config import SchedulerConfig
from pdmesh.core.events import InstanceJoined, InstanceLost, InstanceSuspected, InstanceUnreachable, LoadReported
from pdmesh.core.instances.arithmetic import why_not_joins
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.model import InstanceId, InstanceProfile
from pdmesh.policy.latency_profile import Profile, Subject
from pdmesh.wire.link import FrameLink
from pdmesh.wire.messages import (
    EventMessage,
    Goodbye,
    PeersChecked,
    RegisterWorker,
    SchedulerHeartbeat,
    WelcomeWorker,
    WorkerDown,
    WorkerUp,
)
from pdmesh.wire.session import converse, registration
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.mesh_check import MeshCheck
from pdmesh_scheduler.peer_streams import Connection, Leases, Peers
from pdmesh_scheduler.standby.leader_term import ALONE, MIN_BEATS, LeaderTerm

log = structlog.get_logger()

#: Fewest heartbeats that an instance sends in the time after which its silence makes it suspected.
BEATS_BEFORE_SUSPICION = 3

#: Seconds for which new requests may wait for an instance that was lost although its stream was open. A process that
#: dies breaks its stream. An open stream means that the process hangs, is stopped or is cut off, so it may come back.
RETURN_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerStreams:
    """Server of the workers' streams.

    A worker whose stream breaks may reconnect within the rest of its lease, and gets no work meanwhile. Neither does a
    worker that has been silent for longer than a live one would be.

    An instance is suspected when its entry in `silences` runs out. `absences` limits the wait for instances lost for
    silence. `profile` is the operator's choice for predicting steps, if there is one.
    """

    driver: Driver
    peers: Peers[InstanceId, WorkerDown]
    leases: Leases[InstanceId]
    silences: Leases[InstanceId]
    absences: Leases[InstanceId]
    config: SchedulerConfig
    stopping: anyio.Event
    check: MeshCheck
    profile: Profile | None = None
    leader_term: LeaderTerm = ALONE
    _suspected: set[InstanceId] = field(default_factory=set[InstanceId])
    _loads: dict[InstanceId, LoadReported] = field(default_factory=dict[InstanceId, LoadReported])
    _answered_s: dict[InstanceId, float] = field(default_factory=dict[InstanceId, float])

    async def watch(self) -> None:
        """Suspect silent workers and report workers whose leases run out as lost, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.leases.run, self._expired)
            tasks.start_soon(self.silences.run, self._silent)
            tasks.start_soon(self.absences.run, self._stays_away)

    async def serve(self, link: FrameLink[WorkerDown, WorkerUp], peer: str) -> None:
        """Serve one stream, from its registration to its end. Raise ProtocolError for a registration that is refused.

        Raise InstanceUnavailable if its lease runs out or a newer stream of the instance replaces it.
        """
        frames = link.frames()
        registered, rest = await registration(frames, RegisterWorker)
        _check(registered)
        instance_id = registered.profile.instance_id
        self._check_only(registered.profile, peer)
        self._check_profile(registered.profile)

        with anyio.CancelScope() as scope:
            connection: Connection[InstanceId, WorkerDown] = Connection(
                instance_id, link, scope, address=peer, is_open=False
            )

            async def read() -> None:
                done = await self._report(connection, rest)
                while not done and (messages := await anext(frames, None)) is not None:
                    self._heard(instance_id)
                    self._answer(connection)
                    done = await self._report(connection, messages)

            self.check.profiles[instance_id] = registered.profile
            self.peers.add(connection)
            self._loads.pop(instance_id, None)
            self.absences.drop(instance_id)
            self._suspected.discard(instance_id)
            self._heard(instance_id)
            log.info("instance joined", instance_id=instance_id, role=registered.profile.role, peer=peer)
            try:
                beat_s = self.leader_term.beat_s(
                    min(self.config.heartbeat_s, self.config.suspect_s / BEATS_BEFORE_SUSPICION)
                )
                link.post(
                    WelcomeWorker(
                        heartbeat_s=beat_s,
                        term=self.leader_term.term,
                        silent_beats=self.leader_term.silent_beats(beat_s),
                    )
                )
                joined = InstanceJoined(
                    registered.profile,
                    registered.residents,
                    registered.stopping,
                    registered.kept,
                    registered.offloaded,
                    registered.dropped,
                    registered.jumps,
                    registered.states,
                    registered.uses,
                )
                self.driver.post(joined, first=connection.open)
                await converse(link, read, self.stopping)
            finally:
                if self.peers.remove(connection):
                    log.warning("instance's stream broke", instance_id=instance_id)
                    self.leases.stream_broke(instance_id)
                    self._forget_silence(instance_id)
                    if not self.stopping.is_set():
                        self.driver.post(InstanceSuspected(instance_id))
                    self.driver.post(InstanceUnreachable(instance_id))
        if scope.cancelled_caught:
            raise InstanceUnavailable("the lease expired, or another stream of this instance took over")

    def _check_only(self, instance: InstanceProfile, peer: str) -> None:
        """Raise ProtocolError if another live process has the instance's id: each would end the other's stream for
        ever.

        A silent instance may have lost its host, so a new process may replace it.
        """
        instance_id = instance.instance_id
        there = self.peers.get(instance_id)
        if there is None or instance_id in self._suspected or self.check.profiles[instance_id].is_process_of(instance):
            return
        log.error("instance refused: another has its id", instance_id=instance_id, peer=peer, other=there.address)
        raise ProtocolError(
            f"an instance named {instance_id} already runs at {there.address}: give each instance an id of its own "
            "(worker.instance_id), or stop that one"
        )

    def _check_profile(self, instance: InstanceProfile) -> None:
        """Raise ProtocolError if the operator's profile does not cover an instance, or its arithmetic class may not
        join.
        """
        problem = None if self.profile is None else self.profile.mismatch(Subject.of(instance))
        problem = problem or why_not_joins(instance, self.check.profiles.values())
        if problem is not None:
            log.error("instance refused", instance_id=instance.instance_id, reason=problem)
            raise ProtocolError(problem)

    def _heard(self, instance_id: InstanceId) -> None:
        self.leases.renew(instance_id)
        self.silences.renew(instance_id)
        if instance_id in self._suspected:
            self._suspected.discard(instance_id)
            log.info("instance reports again", instance_id=instance_id)
            self.driver.post(InstanceSuspected(instance_id, suspected=False))

    def _answer(self, connection: Connection[InstanceId, WorkerDown]) -> None:
        """Send a heartbeat if the last one is old. A worker without these leaves this scheduler."""
        now_s = anyio.current_time()
        said_s = self._answered_s.get(connection.peer_id, -math.inf)
        if now_s - said_s > self.leader_term.silence_s / (2 * MIN_BEATS):
            self._answered_s[connection.peer_id] = now_s
            self.peers.post(connection.peer_id, SchedulerHeartbeat())

    def _silent(self, instance_id: InstanceId) -> None:
        log.warning("instance is silent; nothing new is placed on it until it reports again", instance_id=instance_id)
        self._suspected.add(instance_id)
        self.driver.post(InstanceSuspected(instance_id))

    def _forget_silence(self, instance_id: InstanceId) -> None:
        """Forget the silence of an instance that has no stream."""
        self.silences.drop(instance_id)
        self._suspected.discard(instance_id)

    def _expired(self, instance_id: InstanceId) -> None:
        log.error("instance lost: its lease expired", instance_id=instance_id)
        self._forget_silence(instance_id)
        self.check.profiles.pop(instance_id, None)
        if self.peers.end(instance_id):
            self.absences.renew(instance_id)
            self.driver.wait_for(instance_id)
        self.driver.post(InstanceLost(instance_id))

    def _stays_away(self, instance_id: InstanceId) -> None:
        log.error("instance did not come back in time", instance_id=instance_id)
        self.driver.wait_no_longer_for(instance_id)

    async def _report(self, connection: Connection[InstanceId, WorkerDown], messages: list[WorkerUp]) -> bool:
        """Pass reports to the driver, but for repeated loads. Return whether the last message was a goodbye.

        Raise ProtocolError for a second registration or a report in another instance's name.
        """
        instance_id = connection.peer_id
        for message in messages:
            match message:
                case RegisterWorker():
                    raise ProtocolError("RegisterWorker twice")
                case PeersChecked():
                    self.check.answered(instance_id, message)
                case Goodbye():
                    log.info("instance left", instance_id=instance_id)
                    self.peers.remove(connection)
                    self.leases.drop(instance_id)
                    self._forget_silence(instance_id)
                    self.check.profiles.pop(instance_id, None)
                    self.driver.post(InstanceLost(instance_id))
                    return True
                case EventMessage():
                    event = message.event
                    if event.instance_id != instance_id:
                        raise ProtocolError(f"a message from {instance_id} names {event.instance_id}")
                    if isinstance(event, LoadReported):
                        if event == self._loads.get(instance_id):
                            continue  # only a heartbeat
                        self._loads[instance_id] = event
                    await self.driver.submit(event)
        return False


def _check(registration: RegisterWorker) -> None:
    """Raise ProtocolError for a registration that the core could not work with."""
    profile = registration.profile
    if not profile.instance_id:
        raise ProtocolError("the instance's id is empty")
    held = [resident.num_blocks for resident in registration.residents]
    if sum(held) > profile.num_blocks:
        raise ProtocolError(f"the residents hold {sum(held)} blocks, the instance has {profile.num_blocks}")
