"""Docker Compose as an actuator, on a stand-in for `docker`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from pdmesh.cli.compose_actuator import ComposeActuator, DockerError
from pdmesh.core.commands import DesiredProcesses
from pdmesh.model import InstanceId, Role
from pdmesh.operations import PoolMember

pytestmark = pytest.mark.anyio


@dataclass(slots=True)
class FakeContainer:
    """A container whose instance registers at once, unless it is ``silent``."""

    service: str
    name: str
    starts: int = 1
    silent: bool = False
    one_off: bool = False

    def inspected(self, container_id: str) -> dict[str, Any]:
        labels = {"com.docker.compose.service": self.service, "com.docker.compose.oneoff": str(self.one_off)}
        state = {"Status": "running", "StartedAt": f"start {self.starts}"}
        return {"Id": container_id, "Config": {"Labels": labels}, "State": state}

    @property
    def facts(self) -> dict[str, Any]:
        return {"instance_id": self.name, "pid": 100 + self.starts, "metrics_port": 9100}


@dataclass(slots=True)
class FakeProject:
    """A project of `docker compose`, and the commands that changed it."""

    containers: dict[str, FakeContainer] = field(default_factory=dict[str, FakeContainer])
    changes: list[str] = field(default_factory=list[str])
    refusal: str = ""  # of changes
    number_made: int = 0
    silent: bool = False  # containers that are made do not register

    def add(self, service: str) -> None:
        """Make a container; its instance takes the first free number of the service, as the entrypoint does."""
        names = {each.name for each in self.containers.values()}
        name = next(each for number in range(9) if (each := f"{service}-{number}") not in names)
        self.number_made += 1
        self.containers[f"id{self.number_made}"] = FakeContainer(service, name, silent=self.silent)

    async def run(self, *arguments: str) -> str:
        match arguments:
            case ("compose", "ps", *_):
                return "\n".join(self.containers)
            case ("inspect", *ids):
                return json.dumps([self.containers[each].inspected(each) for each in ids])
            case ("exec", container_id, "cat", _):
                container = self.containers[container_id]
                return "" if container.silent else json.dumps(container.facts)
            case _:
                self.changes.append(" ".join(arguments))
                if self.refusal:
                    raise DockerError(self.refusal)
        match arguments:
            case ("compose", "up", *_, scale, service):
                while sum(each.service == service for each in self.containers.values()) < int(scale.split("=")[1]):
                    self.add(service)
            case ("rm", container_id):
                del self.containers[container_id]
            case _:
                pass
        return ""


def a_project() -> FakeProject:
    project = FakeProject()
    project.add("prefill")
    project.add("decode")
    return project


async def acting(project: FakeProject) -> ComposeActuator:
    actuator = ComposeActuator(project.run)
    await actuator.look()
    return actuator


async def pursue(actuator: ComposeActuator, desired: DesiredProcesses) -> None:
    """Do it to the end."""
    async with anyio.create_task_group() as tasks:
        actuator.pursue(desired, tasks)


def members(*names: str) -> tuple[PoolMember, ...]:
    return tuple(PoolMember(instance_id=InstanceId(name), role=Role(name.split("-")[0])) for name in names)


def running(actuator: ComposeActuator) -> dict[str, int]:
    return {each.name: each.pid for each in actuator.report().processes}


async def test_it_reports_the_instances_that_have_registered() -> None:
    project = a_project()
    actuator = await acting(project)
    assert running(actuator) == {"prefill-0": 101, "decode-0": 101}
    project.containers["id2"].starts, project.containers["id2"].silent = 2, True
    changed = actuator.changed
    await actuator.look()
    assert changed.is_set()
    assert running(actuator) == {"prefill-0": 101}
    assert actuator.report().unsettled == ("decode-0",), "it is started again"
    project.containers["id2"].silent = False
    await actuator.look()
    assert running(actuator) == {"prefill-0": 101, "decode-0": 102}


async def test_a_ready_file_of_the_process_before_does_not_count() -> None:
    project = a_project()
    actuator = await acting(project)
    container = project.containers["id2"]
    container.starts = 2
    stale = {**container.facts, "pid": 101}
    before = project.run

    async def run(*arguments: str) -> str:
        return json.dumps(stale) if arguments[:2] == ("exec", "id2") else await before(*arguments)

    actuator._docker = run
    for _ in range(2):
        await actuator.look()
        assert running(actuator) == {"prefill-0": 101}


async def test_another_actuator_makes_no_container_for_an_instance_that_is_loading() -> None:
    project = a_project()
    project.silent = True
    wanted = DesiredProcesses(start=members("decode-1"))
    await pursue(await acting(project), wanted)
    await pursue(await acting(project), wanted)
    assert set(project.containers) == {"id1", "id2", "id3"}


async def test_a_container_of_docker_compose_run_belongs_to_no_pool() -> None:
    project = a_project()
    project.containers["id2"].one_off = True
    actuator = await acting(project)
    assert running(actuator) == {"prefill-0": 101}
    await pursue(actuator, DesiredProcesses(start=members("decode-1")))
    assert project.changes[-1].endswith("--scale decode=1 decode")


async def test_no_container_is_made_while_one_of_its_pool_is_removed() -> None:
    """Docker Compose starts a stopped container again, and it has to be removed."""
    project = a_project()
    actuator = await acting(project)
    await pursue(actuator, DesiredProcesses(start=members("decode-1"), stop=(InstanceId("decode-0"),)))
    assert [change.split()[0] for change in project.changes] == ["stop", "rm", "compose"]


async def test_what_is_wanted_is_made_once_however_often_it_is_asked_for() -> None:
    project = a_project()
    actuator = await acting(project)
    wanted = DesiredProcesses(start=members("decode-1", "decode-2", "mixed-0"))
    for _ in range(3):
        await pursue(actuator, wanted)
    flags = "--detach --no-recreate --no-deps"
    assert sorted(project.changes) == [
        f"compose up {flags} --scale decode=3 decode",
        f"compose up {flags} --scale mixed=1 mixed",
    ]
    assert set(running(actuator)) == {"prefill-0", "decode-0", "decode-1", "decode-2", "mixed-0"}


async def test_an_instance_that_leaves_takes_its_own_container_along() -> None:
    project = a_project()
    actuator = await acting(project)
    await pursue(actuator, DesiredProcesses(start=members("decode-1", "decode-2")))
    project.changes.clear()
    await pursue(actuator, DesiredProcesses(stop=(InstanceId("decode-1"), InstanceId("decode-7"))))
    assert project.changes == ["stop --time 40 id3", "rm id3"]
    assert set(running(actuator)) == {"prefill-0", "decode-0", "decode-2"}


async def test_a_container_that_never_registers_is_removed_when_its_instance_is_given_up() -> None:
    project = a_project()
    actuator = await acting(project)
    project.silent = True
    await pursue(actuator, DesiredProcesses(start=members("decode-1")))
    assert actuator.report().unsettled == ("decode-1",)
    await pursue(actuator, DesiredProcesses(stop=(InstanceId("decode-1"),)))
    assert set(project.containers) == {"id1", "id2"}


async def test_a_start_that_fails_is_told_once_and_tried_again_when_it_is_wanted_anew() -> None:
    project = a_project()
    actuator = await acting(project)
    project.refusal = "no space left on device"
    wanted = DesiredProcesses(start=members("decode-1"))
    for _ in range(2):
        await pursue(actuator, wanted)
    report = actuator.report()
    assert [(each.instance_id, each.reason) for each in report.failed] == [("decode-1", "no space left on device")]
    actuator.heard(report)
    assert not actuator.report().failed
    project.refusal = ""
    await pursue(actuator, DesiredProcesses())
    await pursue(actuator, wanted)
    assert "decode-1" in running(actuator)


async def test_a_container_that_cannot_be_removed_is_tried_again() -> None:
    project = a_project()
    actuator = await acting(project)
    project.refusal = "the engine is busy"
    leaves = DesiredProcesses(stop=(InstanceId("decode-0"),))
    await pursue(actuator, leaves)
    project.refusal = ""
    await pursue(actuator, leaves)
    assert set(project.containers) == {"id1"}
