"""Who starts and stops processes for the scheduler: what the actuator says of itself, and what it is asked for.

Instances are the core's affair. Gateways and the scheduler itself are none of its instances: that their processes are
replaced is asked for here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import anyio
import msgspec
import structlog

from pdmesh.core.operator_events import ActuatorFacts, InstanceStartFailed, OperationRequested, ProcessesReported
from pdmesh.core.operators.operations import COME_BACK_S
from pdmesh.core.operators.records import TAKEN_BACK, OperationRecord, OperationRecords, OperationState, OperationView
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, InstanceProfile, OperationId
from pdmesh.wire.messages import MAX_WAIT_S, AdminError, FollowPools, PoolsWanted, ServiceProcess

log = structlog.get_logger()

#: One that has said nothing for so long is not there.
ACTUATOR_LEASE_S = MAX_WAIT_S + 6.0

#: A replacement that nobody looks after has failed.
SILENCE_LIMIT_S = 60.0

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True, eq=False, kw_only=True)
class _Replacement(OperationRecord):
    """A service's process is to be another one."""

    wish: OperationRequested  # with the pid of the process that is to go


class ActuatorDesk:
    """Knows the actuator, if one is there. ``on_change`` is called when an operation of ours has changed."""

    def __init__(self, core: SchedulerCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._last: FollowPools | None = None
        self._heard_s = 0.0
        self._processes: tuple[InstanceId, ...] | None = None  # as the core was told
        # A revision that the scheduler before had not.
        self._wanted = PoolsWanted(revision=secrets.randbits(31), start=(), stop=(), replace=())
        self._replacements: OperationRecords[_Replacement] = OperationRecords()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def views(self) -> list[OperationView]:
        return self._replacements.views

    @property
    def wishes(self) -> tuple[OperationRequested, ...]:
        """Replacements under way, for the next scheduler: often enough it is the one that is replaced."""
        return tuple(each.wish for each in self._replacements.running)

    @property
    def services(self) -> Sequence[ServiceProcess]:
        """All that the actuator keeps running; nothing if none is there."""
        last = self._present
        return () if last is None else last.services

    @property
    def instance_ids(self) -> tuple[InstanceId, ...] | None:
        """The instances that the actuator looks after; None if none is there."""
        last = self._present
        return None if last is None else self._instances(last)

    @property
    def _present(self) -> FollowPools | None:
        return self._last if self._clock() - self._heard_s <= ACTUATOR_LEASE_S else None

    def facts(self, profiles: Sequence[InstanceProfile]) -> ActuatorFacts | None:
        """What it can do, for the core; None if nobody starts and stops processes."""
        last = self._present
        if last is None:
            return None
        return ActuatorFacts(
            instance_ids=self._instances(last),
            available_bytes=last.available_bytes,
            name_prefix=last.name_prefix,
            instance_bytes=max((host_bytes(profile) for profile in profiles), default=0),
        )

    # --- the actuator ---

    def hear(self, said: FollowPools) -> AdminError | list[InstanceStartFailed | ProcessesReported]:
        """Take note of what it says; what the core has to be told."""
        before = self._present
        if before is not None and before.actuator_id != said.actuator_id:
            return AdminError(message="another supervisor already manages the pools of this mesh")
        if before is None:
            log.info(
                "a supervisor is connected to start and stop instances", services=[each.name for each in said.services]
            )
        self._last, self._heard_s = said, self._clock()
        for each in self._replacements.running:
            pids = [service.pid for service in said.services if service.name == each.wish.instance_id]
            if pids and each.wish.stopped_pid not in pids:
                self._end(each, OperationState.DONE, "")
        events: list[InstanceStartFailed | ProcessesReported] = [
            InstanceStartFailed(each.instance_id, each.reason) for each in said.failed
        ]
        processes = (*self._instances(said), *said.unsettled)
        if processes != self._processes:
            self._processes = processes
            events.append(ProcessesReported(processes))
        return events

    def wanted(self) -> PoolsWanted:
        desired = self._core.desired_pools
        replaced = tuple(
            ServiceProcess(name=each.wish.instance_id, pid=each.wish.stopped_pid or 0)
            for each in self._replacements.running
        )
        wanted = PoolsWanted(revision=self._wanted.revision, start=desired.start, stop=desired.stop, replace=replaced)
        if wanted != self._wanted:
            self._wanted = msgspec.structs.replace(wanted, revision=wanted.revision + 1)
        return self._wanted

    async def follow(self, said: FollowPools, changed: Callable[[], anyio.Event]) -> PoolsWanted:
        """What is wanted, once it is something else than it knows."""
        with anyio.move_on_after(said.wait_s):
            while (wanted := self.wanted()).revision == said.revision:
                await changed().wait()
            return wanted
        self._heard_s = self._clock()
        return self.wanted()

    # --- replacing a service's process ---

    def takes(self, name: str) -> bool:
        """Whether this is the name of a service that is no instance."""
        last = self._present
        return last is not None and name in self._beside(last)

    def request(self, wish: OperationRequested) -> None:
        if wish.operation_id in self._replacements:
            return  # asked again
        pids = [service.pid for service in self.services if service.name == wish.instance_id]
        if not wish.again:
            wish = replace(wish, stopped_pid=wish.pid or (pids[0] if pids else 0))
        added = _Replacement(
            operation_id=wish.operation_id,
            kind=wish.kind,
            timeout_s=wish.timeout_s,
            began_s=self._clock(),
            instance_id=wish.instance_id,
            detail="its process is being replaced",
            wish=wish,
        )
        other = next((each for each in self._replacements.running if each.wish.instance_id == wish.instance_id), None)
        self._replacements.add(added)
        if other is not None:
            what = f"operation {other.wish.operation_id} ({other.wish.kind}) runs on {wish.instance_id}: wait for it"
            self._end(added, OperationState.REFUSED, what)
        elif any(pids) and wish.stopped_pid not in pids:
            self._end(added, OperationState.DONE, "another process registered as this instance before")
        self.on_change()

    def cancel(self, operation_id: OperationId) -> bool:
        """Whether it is one of ours. What the actuator has begun it ends."""
        found = self._replacements.get(operation_id)
        if found is not None and found.is_running:
            self._end(found, OperationState.CANCELLED, TAKEN_BACK)
        return found is not None

    def expire(self) -> None:
        """End what takes too long."""
        now_s = self._clock()
        for each in self._replacements.running:
            silent_s = now_s - max(self._heard_s, each.began_s)
            if silent_s > SILENCE_LIMIT_S:
                self._end(each, OperationState.FAILED, f"the supervisor has been silent for {silent_s:.0f} s")
            elif now_s - each.began_s > each.wish.timeout_s + COME_BACK_S:
                self._end(each, OperationState.FAILED, "no successor process serves")

    def _end(self, each: _Replacement, state: OperationState, detail: str) -> None:
        each.end(state, detail, self._clock())
        self.on_change()

    def _instances(self, last: FollowPools) -> tuple[InstanceId, ...]:
        beside = self._beside(last)
        return tuple(InstanceId(each.name) for each in last.services if each.name not in beside)

    def _beside(self, last: FollowPools) -> set[str]:
        """The services that are no instances."""
        return {each.name for each in last.services if each.name.partition("-")[0] in ("scheduler", "gateway")}


def host_bytes(profile: InstanceProfile) -> int:
    """Return bytes of host memory that another such instance takes: weights and KV; 0 if on a device."""
    if profile.device != "cpu":
        return 0
    layout = profile.kv_layout
    return profile.num_blocks * layout.num_layers * layout.block_bytes + (
        profile.num_parameters * _BYTES_OF.get(layout.dtype, 4)
    )
