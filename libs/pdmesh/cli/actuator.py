"""The local supervisor as an actuator: it starts and stops the workers that the scheduler wants.

It asks again and again, and tells what runs as it asks. What it is told is a state, not an order: whatever is done
already is not done twice, also after the scheduler or a question was lost.
"""

from __future__ import annotations

import secrets

import anyio
import anyio.abc

from pdmesh.cli.processes import is_gateway
from pdmesh.cli.supervisor import Service, Supervisor
from pdmesh.errors import PdmeshError
from pdmesh.host import free_host_bytes
from pdmesh.model import InstanceId, PoolMember
from pdmesh.wire.messages import MAX_WAIT_S, FailedStart, FollowPools, PoolsWanted, ServiceProcess

#: Between two questions to a scheduler that does not answer.
AWAY_PAUSE_S = 1.0


async def follow_scheduler(supervisor: Supervisor, tasks: anyio.abc.TaskGroup) -> None:
    """Start and stop the supervisor's children as the scheduler wants, until cancelled."""
    await Actuator(supervisor, tasks).run()


class Actuator:
    """Follows the scheduler's wishes for a supervisor, whose children live in ``tasks``."""

    def __init__(self, supervisor: Supervisor, tasks: anyio.abc.TaskGroup) -> None:
        self._supervisor = supervisor
        self._plan = supervisor.plan
        self._tasks = tasks
        self._id = secrets.token_hex(8)
        self._starting: dict[InstanceId, anyio.CancelScope] = {}
        self._replacing: set[int] = set()  # processes, by pid
        self._refused: set[InstanceId] = set()  # could not be started, and are still wanted
        self._failed: list[FailedStart] = []  # of these, those of which the scheduler has not heard

    async def run(self) -> None:
        """Follow what the scheduler wants until cancelled; processes being started then end."""
        wanted: PoolsWanted | None = None
        async with anyio.create_task_group() as acting:
            while True:
                answer = await self._ask(-1 if wanted is None else wanted.revision)
                wanted = answer or wanted
                if wanted is not None:
                    self._act(wanted, acting)

    async def _ask(self, revision: int) -> PoolsWanted | None:
        """What is wanted; None if a service has changed meanwhile: there is something else to tell then."""
        answer: PoolsWanted | None = None
        changed = self._supervisor.changed
        failed = tuple(self._failed)
        question = FollowPools(
            actuator_id=self._id,
            services=tuple(
                ServiceProcess(name=service.instance_id, pid=0 if service.child is None else service.child.pid)
                for service in self._supervisor.services
                if service.facts and (self._supervisor.is_beside(service) or not service.is_stopping)
            ),
            unsettled=tuple(
                InstanceId(service.instance_id if service.facts else f"{self._plan.name_prefix}{service.name}")
                for service in self._supervisor.workers
                if not service.facts or service.is_stopping
            ),
            available_bytes=free_host_bytes() or 0,
            name_prefix=self._plan.name_prefix,
            failed=failed,
            revision=revision,
            wait_s=MAX_WAIT_S,
        )
        async with anyio.create_task_group() as racing:

            async def ask() -> None:
                nonlocal answer
                answer = await self._plan.follow(question)
                if answer is None:
                    await anyio.sleep(AWAY_PAUSE_S)
                else:
                    del self._failed[: len(failed)]
                racing.cancel_scope.cancel()

            racing.start_soon(ask)
            await changed.wait()
            racing.cancel_scope.cancel()
        return answer

    def _act(self, wanted: PoolsWanted, acting: anyio.abc.TaskGroup) -> None:
        there = {service.instance_id: service for service in self._supervisor.workers}
        self._refused &= {member.instance_id for member in wanted.start}
        missing = [
            member for member in wanted.start if member.instance_id not in {*there, *self._starting, *self._refused}
        ]
        num_workers = len(there) + len(self._starting) + len(missing)
        for member in missing:
            self._starting[member.instance_id] = anyio.CancelScope()
            acting.start_soon(self._start, member, num_workers)
        for instance_id in wanted.stop:
            if (scope := self._starting.get(instance_id)) is not None:
                scope.cancel()
            elif (service := there.get(instance_id)) is not None and not service.is_stopping:
                acting.start_soon(self._remove, service)

        for process in wanted.replace:
            for service in self._supervisor.services:
                is_it = service.name == process.name and service.child is not None and service.child.pid == process.pid
                if is_it and process.pid not in self._replacing:
                    self._replacing.add(process.pid)
                    acting.start_soon(self._replace, service, process.pid)

    async def _replace(self, service: Service, pid: int) -> None:
        """Replace a process. The scheduler's successor takes its port; gateways share theirs, so there is no gap."""
        self._supervisor.say(f"{service.name} is being replaced")
        try:
            if is_gateway(service.name):
                await self._supervisor.add(self._tasks, service.spec)
                await self._supervisor.remove(service, self._plan.drain_s())
            else:
                await service.restart(self._plan.drain_s())
        except PdmeshError as error:
            self._supervisor.say(f"{service.name} stays as it is: {error}")
        finally:
            self._replacing.discard(pid)

    async def _start(self, member: PoolMember, num_workers: int) -> None:
        self._supervisor.say(f"{member.instance_id} starts, because the pools grow")
        try:
            with self._starting[member.instance_id]:
                spec = self._plan.worker(member, num_workers)
                await self._supervisor.add(self._tasks, spec)
                self._share(len(self._supervisor.workers))
        except PdmeshError as error:
            self._supervisor.say(f"{member.instance_id} could not be started: {error}")
            self._refused.add(member.instance_id)
            self._failed.append(FailedStart(instance_id=member.instance_id, reason=str(error)))
            self._supervisor.note_change()
        finally:
            del self._starting[member.instance_id]

    async def _remove(self, service: Service) -> None:
        self._supervisor.say(f"{service.name} stops, because the pools shrink")
        await self._supervisor.remove(service, self._plan.drain_s())
        self._share(len(self._supervisor.workers))

    def _share(self, num_workers: int) -> None:
        """Let those that run take their share of the machine when they are started again."""
        for service in self._supervisor.workers:
            service.spec = self._plan.resized(service.spec, num_workers)
