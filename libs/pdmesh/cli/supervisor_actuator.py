"""The local supervisor as an actuator: its children are the processes that the scheduler wants."""

from __future__ import annotations

import anyio
import anyio.abc

from pdmesh.cli.actuator import Actuator, follow
from pdmesh.cli.processes import is_gateway
from pdmesh.cli.supervisor import END_S, Service, Supervisor
from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.errors import PdmeshError
from pdmesh.host import free_host_bytes
from pdmesh.model import InstanceId
from pdmesh.operations import ManagedProcess, PoolMember


async def follow_scheduler(supervisor: Supervisor, tasks: anyio.abc.TaskGroup) -> None:
    """Start and stop the supervisor's children as the scheduler wants, until cancelled."""
    await follow(SupervisorActuator(supervisor, tasks), supervisor.plan.follow)


class SupervisorActuator(Actuator):
    """Actuator that starts, stops and replaces a supervisor's children, which live in ``tasks``."""

    def __init__(self, supervisor: Supervisor, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__()
        self._supervisor = supervisor
        self._ended = supervisor.ended
        self._plan = supervisor.plan
        self._tasks = tasks
        self._starting: dict[InstanceId, anyio.CancelScope] = {}
        self._replacing: set[int] = set()  # pids of processes
        self._temporary: frozenset[InstanceId] = frozenset()

    @property
    def changed(self) -> anyio.Event:
        """Event that is set at the next change of a child."""
        return self._supervisor.changed

    def note_change(self) -> None:
        """Wake `follow`, so that the scheduler gets a new report."""
        self._supervisor.note_change()

    def report(self) -> ActuatorReported:
        """Report the children that run, start or end, the latest failed starts and ends, and the free memory."""
        return ActuatorReported(
            actuator_id=self.actuator_id,
            processes=tuple(
                ManagedProcess(
                    name=service.instance_id,
                    pid=0 if service.child is None else service.child.pid,
                    kind=self._supervisor.kind(service),
                )
                for service in self._supervisor.services
                if service.facts and (self._supervisor.is_control(service) or not service.is_stopping)
            ),
            unsettled=tuple(
                InstanceId(service.instance_id if service.facts else f"{self._plan.name_prefix}{service.name}")
                for service in self._supervisor.workers
                if not service.facts or service.is_stopping
            ),
            coming=tuple(InstanceId(each.instance_id) for each in self._supervisor.workers if each.is_coming),
            available_bytes=free_host_bytes() or 0,
            name_prefix=self._plan.name_prefix,
            failed=tuple(self._failed),
            ended=tuple(self._ended),
            grace_s=self._plan.drain_s() + END_S,
        )

    def pursue(self, desired: DesiredProcesses, tasks: anyio.abc.TaskGroup) -> None:
        """Begin the starts, stops and replacements that are neither done nor begun."""
        self._temporary = frozenset(desired.temporary)
        there = {service.instance_id: service for service in self._supervisor.workers}
        self._refused &= {member.instance_id for member in desired.start}
        missing = [
            member for member in desired.start if member.instance_id not in {*there, *self._starting, *self._refused}
        ]
        num_workers = len(there) + len(self._starting) + len(missing)
        for member in missing:
            self._starting[member.instance_id] = anyio.CancelScope()
            tasks.start_soon(self._start, member, num_workers)
        for instance_id in desired.stop:
            if (scope := self._starting.get(instance_id)) is not None:
                scope.cancel()
            elif (service := there.get(instance_id)) is not None and not service.is_stopping:
                tasks.start_soon(self._remove, service)
        for process in desired.replace:
            for service in self._supervisor.services:
                is_it = service.name == process.name and service.child is not None and service.child.pid == process.pid
                if is_it and process.pid not in self._replacing:
                    self._replacing.add(process.pid)
                    tasks.start_soon(self._replace, service, process.pid)

    async def _replace(self, service: Service, pid: int) -> None:
        """Replace a process. The scheduler's successor takes its port. Gateways share theirs, so there is no gap."""
        self._supervisor.say(f"{service.name} is being replaced")
        try:
            if is_gateway(service.name):
                await self._supervisor.add(self._tasks, service.spec)
                await self._supervisor.remove(service, self._plan.drain_s())
            else:
                await service.restart(self._plan.drain_s())
        except PdmeshError as error:
            self._supervisor.say(f"{service.name} was not replaced: {error}")
        finally:
            self._replacing.discard(pid)

    async def _start(self, member: PoolMember, num_workers: int) -> None:
        self._supervisor.say(f"{member.instance_id} starts, because the pools grow")
        try:
            with self._starting[member.instance_id]:
                spec = self._plan.worker(member, num_workers)
                await self._supervisor.add(self._tasks, spec)
                self._share()
        except PdmeshError as error:
            self._supervisor.say(f"{member.instance_id} could not be started: {error}")
            self._refuse([member.instance_id], str(error))
        finally:
            del self._starting[member.instance_id]

    async def _remove(self, service: Service) -> None:
        self._supervisor.say(f"{service.name} stops, because the pools shrink")
        await self._supervisor.remove(service, self._plan.drain_s())
        self._share()

    def _share(self) -> None:
        """Set the share of the machine that each worker takes at its next start.

        Temporary instances do not count: the others would keep a smaller share after the rolling restart.
        """
        workers = self._supervisor.workers
        num_workers = sum(service.instance_id not in self._temporary for service in workers)
        for service in workers:
            service.spec = self._plan.resized(service.spec, num_workers)
