"""Docker Compose as an actuator: each container of the services `prefill`, `decode` and `mixed` is an instance.

`docker compose` finds the project by its own variables, such as COMPOSE_FILE. A container names its instance in its
ready file (``deploy/compose/compose.yaml``). Containers of other services are left alone.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from pdmesh.cli.actuator import LookingActuator
from pdmesh.config import MeshConfig
from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.host import free_host_bytes
from pdmesh.model import InstanceId, Role
from pdmesh.operations import ManagedProcess, PoolMember
from pdmesh.service import ServiceContext, run_service

log = structlog.get_logger()

#: Seconds for a Docker command, beside the time that it gives a process to end.
COMMAND_LIMIT_S = 60.0

#: Seconds between SIGTERM and SIGKILL, as in ``deploy/compose/compose.yaml``.
GRACE_S = 40.0

#: Label that is "True" for a container of `docker compose run`, which belongs to no pool.
ONE_OFF_LABEL = "com.docker.compose.oneoff"

#: File in a container in which the instance reports its registration.
READY_FILE = "/tmp/ready.json"

#: Runs `docker` with arguments and returns the standard output. Raises DockerError.
Docker = Callable[..., Awaitable[str]]


class DockerError(PdmeshError):
    """Failure of a Docker command."""


async def run_docker(*arguments: str) -> str:
    """Run `docker` with ``arguments`` and return its standard output. Raise DockerError if it fails or takes too long.

    A thread runs the command: a fork by the event loop runs gRPC's fork handlers, which crash some children.
    """
    what, limit_s = f"docker {' '.join(arguments[:2])}", COMMAND_LIMIT_S + GRACE_S
    run = partial(
        subprocess.run,
        ["docker", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )
    try:
        done: subprocess.CompletedProcess[str] = await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
    except subprocess.TimeoutExpired as error:
        raise DockerError(f"{what} did not end within {limit_s:g} s") from error
    except OSError as error:
        raise DockerError(f"{what} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise DockerError(f"{what} failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


class Container(NamedTuple):
    """A container of an instance.

    `started` is the start time of its process. `instance_id` is set when the instance first registers. `pid` is the
    number with which the process registered; 0 before. `last_pid` is the previous process's number, whose ready file
    may be left.
    """

    service: str
    started: str
    is_running: bool
    instance_id: InstanceId | None = None
    pid: int = 0
    last_pid: int = 0


class ComposeActuator(LookingActuator):
    """Actuator that makes and removes containers of a Compose project."""

    def __init__(self, docker: Docker = run_docker) -> None:
        super().__init__()
        self._docker = docker
        self._containers: Mapping[str, Container] = {}  # keys: container ids
        self._starting: set[InstanceId] = set()
        self._leaving: set[str] = set()  # container ids
        self._lock = anyio.Lock()

    # --- `pdmesh.cli.actuator.Actuator` ---

    def report(self) -> ActuatorReported:
        """Return the instances that have containers, or whose containers are being made."""
        processes, unsettled = list[ManagedProcess](), list(self._starting)
        for container_id, each in self._containers.items():
            if each.instance_id is None:
                continue
            if each.pid and each.is_running and container_id not in self._leaving:
                processes.append(ManagedProcess(name=each.instance_id, pid=each.pid))
            else:
                unsettled.append(each.instance_id)
        return ActuatorReported(
            actuator_id=self.actuator_id,
            processes=tuple(processes),
            unsettled=tuple(unsettled),
            available_bytes=free_host_bytes() or 0,
            failed=tuple(self._failed),
            grace_s=GRACE_S,
        )

    def pursue(self, desired: DesiredProcesses, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to make containers for missing instances, and to remove the containers of leaving instances."""
        wanted = {member.instance_id for member in desired.start}
        self._refused &= wanted
        there = {each.instance_id for each in self._containers.values()} | self._starting | self._refused
        loading = [each for each in self._containers.values() if each.instance_id is None and each.is_running]
        unnamed = Counter(each.service for each in loading)
        for role in Role:
            members = [each for each in desired.start if each.role is role and each.instance_id not in there]
            # A container that has not registered yet may hold any of these instances.
            members = members[unnamed[role] :]
            if members:
                self._starting.update(each.instance_id for each in members)
                tasks.start_soon(self._make, role, members)
        for container_id, each in self._containers.items():
            if each.instance_id in desired.stop and container_id not in self._leaving:
                self._leaving.add(container_id)
                tasks.start_soon(self._remove, container_id, each)

    # --- the project ---

    async def look(self) -> None:
        """Read the containers and their instances. Raise DockerError if `docker` fails."""
        async with self._lock:
            await self._look()

    async def _look(self) -> None:
        ids = (await self._docker("compose", "ps", "--all", "--quiet", *Role)).split()
        listed: list[Any] = json.loads(await self._docker("inspect", *ids)) if ids else []
        pools = [each for each in listed if each["Config"]["Labels"].get(ONE_OFF_LABEL) != "True"]
        containers = {str(each["Id"]): await self._seen(each) for each in pools}
        self._leaving &= containers.keys()
        if containers != self._containers:
            self._containers = containers
            self.note_change()

    async def _seen(self, found: Mapping[str, Any]) -> Container:
        """Return a container as Docker describes it, with its instance once that has registered."""
        before = self._containers.get(str(found["Id"]))
        state = found["State"]
        now = Container(
            service=str(found["Config"]["Labels"]["com.docker.compose.service"]),
            started=str(state["StartedAt"]),
            is_running=state["Status"] == "running",
            instance_id=None if before is None else before.instance_id,
            last_pid=0 if before is None else before.pid or before.last_pid,
        )
        if before is not None and before.started == now.started and before.pid:
            return before._replace(is_running=now.is_running)
        if not now.is_running:
            return now
        try:
            facts = json.loads(await self._docker("exec", str(found["Id"]), "cat", READY_FILE))
            name, pid = InstanceId(str(facts["instance_id"])), int(facts["pid"])
        except (DockerError, ValueError, KeyError):
            return now  # not registered yet
        if pid == now.last_pid:
            return now
        return now._replace(instance_id=name, pid=pid)

    async def _make(self, role: Role, members: Sequence[PoolMember]) -> None:
        names = [member.instance_id for member in members]
        try:
            await self._until_none_leaves(role)
            async with self._lock:
                await self._look()
                number = sum(each.service == role for each in self._containers.values()) + len(members)
                log.info("making containers", service=str(role), instances=names)
                flags = ("--detach", "--no-recreate", "--no-deps", "--scale", f"{role}={number}")
                before = set(self._containers)
                await self._docker("compose", "up", *flags, role)
                await self._look()
                # Until they register, under any name, the new containers count as the instances that were asked for.
                made = [each for each in self._containers if each not in before]
                named = dict(self._containers)
                for container_id, name in zip(made, names, strict=False):
                    if named[container_id].instance_id is None:
                        named[container_id] = named[container_id]._replace(instance_id=name)
                self._containers = named
        except DockerError as error:
            log.error("cannot make containers", service=str(role), reason=str(error))
            self._refuse(names, str(error))
        finally:
            self._starting.difference_update(names)
            self.note_change()

    async def _until_none_leaves(self, role: Role) -> None:
        """Wait for removals: `docker compose up` would start a stopped container again."""
        while any(self._containers[each].service == role for each in self._leaving & self._containers.keys()):
            await self.changed.wait()

    async def _remove(self, container_id: str, container: Container) -> None:
        log.info("removing a container", instance=container.instance_id, container=container_id[:12])
        try:
            await self._docker("stop", "--time", f"{GRACE_S:.0f}", container_id)
            await self._docker("rm", container_id)
            await self.look()
        except DockerError as error:
            log.error("cannot remove a container; trying again", reason=str(error))
            self._leaving.discard(container_id)
            self.note_change()


def run_actuator(config: MeshConfig) -> int:
    """Run the actuator until it is told to stop, and return the exit code."""
    return run_service("actuator", config, serve)


async def serve(config: MeshConfig, context: ServiceContext) -> None:
    """Follow the scheduler until told to stop. Raises ConfigError, and DockerError if there is no project."""
    if not config.scheduler_address:
        raise ConfigError("no scheduler is set: give --scheduler, such as 127.0.0.1:8002 of deploy/compose")
    actuator = ComposeActuator()
    await actuator.look()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actuator.run, config)
        context.announce()
        await context.stopping.wait()
        tasks.cancel_scope.cancel()
