"""Kubernetes as an actuator, on a stand-in for its API server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import MAX_ENDED
from pdmesh.core.operators.actuators import number_of
from pdmesh.model import InstanceId, Role
from pdmesh.operations import PoolMember
from pdmesh_kubernetes.actuator import KubernetesActuator
from pdmesh_kubernetes.api import KubernetesError
from pdmesh_testing.kubernetes import PODS, FakeCluster, Rule, asking

pytestmark = pytest.mark.anyio

LABELS = {"app.kubernetes.io/instance": "mesh", "app.kubernetes.io/component": "worker"}

#: What the chart's Role allows.
RULES = [
    Rule(("apps",), ("statefulsets",), ("get",), ("mesh-prefill", "mesh-decode", "mesh-mixed")),
    Rule(("apps",), ("statefulsets/scale",), ("patch",), ("mesh-prefill", "mesh-decode", "mesh-mixed")),
    Rule(("",), ("pods",), ("list",)),
    Rule(
        ("",),
        ("pods",),
        ("delete",),
        tuple(f"mesh-{role}-{number}" for role in ("prefill", "decode") for number in range(4)),
    ),
]


def member(name: str) -> PoolMember:
    return PoolMember(instance_id=InstanceId(name), role=Role(name.split("-")[1]))


def leaving(*names: str) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(name) for name in names)


@asynccontextmanager
async def acting(folder: Path, cluster: FakeCluster) -> AsyncGenerator[KubernetesActuator]:
    async with asking(cluster, folder) as api:
        actuator = KubernetesActuator(api, "mesh")
        await actuator.look()
        yield actuator


async def pursue(actuator: KubernetesActuator, desired: DesiredProcesses) -> None:
    """Do it to the end."""
    async with anyio.create_task_group() as tasks:
        actuator.pursue(desired, tasks)


def a_cluster(num_decode: int = 2) -> FakeCluster:
    cluster = FakeCluster(RULES)
    cluster.add_set("mesh-prefill", 1, LABELS)
    cluster.add_set("mesh-decode", num_decode, LABELS)
    cluster.add_set("other-decode", 1, {**LABELS, "app.kubernetes.io/instance": "other"})
    return cluster


async def test_it_reports_the_pods_of_its_release_that_are_ready(tmp_path: Path) -> None:
    cluster = a_cluster()
    cluster.pod("mesh-decode-1")["status"]["conditions"] = []
    async with acting(tmp_path, cluster) as actuator:
        report = actuator.report()
        assert [each.name for each in report.processes] == ["mesh-decode-0", "mesh-prefill-0"]
        assert report.unsettled == ("mesh-decode-1",)
        assert (report.name_prefix, report.last_leaves_first, report.grace_s) == ("mesh-", True, 30.0)
        cluster.pod("mesh-decode-0")["metadata"]["deletionTimestamp"] = "2026-11-24T00:00:00Z"
        changed = actuator.changed
        await actuator.look()
        assert changed.is_set()
        assert [each.name for each in actuator.report().processes] == ["mesh-prefill-0"]


async def test_pods_have_the_grace_of_their_template_to_end(tmp_path: Path) -> None:
    cluster = a_cluster()
    cluster.pod("mesh-decode-1")["spec"] = {"terminationGracePeriodSeconds": 130}
    async with acting(tmp_path, cluster) as actuator:
        assert actuator.report().grace_s == 130.0


async def test_what_is_wanted_is_started_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        wanted = DesiredProcesses(start=(member("mesh-decode-2"), member("mesh-decode-3")))
        for _ in range(3):
            await pursue(actuator, wanted)
        assert [name for name in cluster.pod_names if name.startswith("mesh-decode")] == [
            f"mesh-decode-{number}" for number in range(4)
        ]
        assert cluster.asked.count("patch statefulsets/scale mesh-decode") == 1


async def test_only_the_last_leaves_and_only_once_it_is_empty(tmp_path: Path) -> None:
    cluster = a_cluster(4)
    async with acting(tmp_path, cluster) as actuator:
        await pursue(actuator, DesiredProcesses(stop=leaving("mesh-decode-2")))
        assert "mesh-decode-3" in cluster.pod_names, "it is not empty"
        await pursue(actuator, DesiredProcesses(stop=leaving("mesh-decode-2", "mesh-decode-3")))
        assert [name for name in cluster.pod_names if name.startswith("mesh-decode")] == [
            "mesh-decode-0",
            "mesh-decode-1",
        ]
        assert "other-decode-0" in cluster.pod_names


def uids(cluster: FakeCluster) -> dict[str, str]:
    return {name: cluster.pod(name)["metadata"]["uid"] for name in cluster.pod_names}


def revision(cluster: FakeCluster, name: str) -> str:
    return str(cluster.pod(name)["metadata"]["labels"]["controller-revision-hash"])


def change_template(cluster: FakeCluster) -> None:
    path = next(path for path in cluster.objects if path.endswith("statefulsets/mesh-decode"))
    cluster.objects[path]["status"]["updateRevision"] = "two"


def crash(cluster: FakeCluster, name: str, *, is_back: bool = False) -> None:
    ready = "True" if is_back else "False"
    cluster.pod(name)["status"] = {
        "containerStatuses": [{"restartCount": 1}],
        "conditions": [{"type": "Ready", "status": ready}],
    }


@pytest.mark.parametrize(
    ("terminated", "cause"),
    [
        ({"exitCode": 137, "reason": "OOMKilled"}, "was killed by SIGKILL (OOMKilled)"),
        ({"exitCode": 1, "reason": "Error"}, "exited with code 1"),
        ({"exitCode": 0, "signal": 11}, "was killed by SIGSEGV (a crash in native code; its log says where)"),
        (None, "ended"),
    ],
)
async def test_a_container_that_ended_is_reported_once_with_its_cause(
    tmp_path: Path, terminated: dict[str, Any] | None, cause: str
) -> None:
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        crash(cluster, "mesh-decode-0")
        (container,) = cluster.pod("mesh-decode-0")["status"]["containerStatuses"]
        container["lastState"] = {} if terminated is None else {"terminated": terminated}
        for _ in range(2):
            await actuator.look()
        report = actuator.report()
        assert [(each.name, each.cause, each.has_served) for each in report.ended] == [("mesh-decode-0", cause, True)]
        assert "mesh-decode-0" in report.unsettled
        actuator.heard(report)
        assert actuator.report().ended == ()


async def test_a_process_that_served_has_served_also_after_its_pod_waited_for_its_restart(tmp_path: Path) -> None:
    """The pod is not ready for a while before its container is started again, and again after that."""
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        for num_restarts in (0, 1, 1, 2):
            cluster.pod("mesh-decode-0")["status"] = {"containerStatuses": [{"restartCount": num_restarts}]}
            await actuator.look()
        assert [each.has_served for each in actuator.report().ended] == [True, False]


async def test_few_ends_are_kept_for_a_scheduler_that_is_away(tmp_path: Path) -> None:
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        report = actuator.report()
        for num_restarts in range(1, MAX_ENDED + 4):
            cluster.pod("mesh-decode-0")["status"] = {"containerStatuses": [{"restartCount": num_restarts}]}
            await actuator.look()
            if num_restarts == 2:
                report = actuator.report()
        assert len(actuator.report().ended) == MAX_ENDED
        actuator.heard(report)
        assert len(actuator.report().ended) == MAX_ENDED - 1, "the first one was gone"


async def test_pods_of_an_older_template_are_told_of_and_replaced_once_each_when_that_is_wanted(tmp_path: Path) -> None:
    """`pdmesh restart --rolling` after `helm upgrade`: a process that would start again as it is starts in vain."""
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        assert actuator.report().outdated == ()
        change_template(cluster)
        await actuator.look()
        assert actuator.report().outdated == ("mesh-decode-0", "mesh-decode-1")
        before = uids(cluster)
        (process,) = (each for each in actuator.report().processes if each.name == "mesh-decode-0")
        for _ in range(2):
            await pursue(actuator, DesiredProcesses(replace=(process,)))
        await actuator.look()
        await pursue(actuator, DesiredProcesses(replace=(process,)))
        after = uids(cluster)
        assert {name for name in before if before[name] != after[name]} == {"mesh-decode-0"}
        assert cluster.asked.count("delete pods mesh-decode-0") == 1, "it was another process that was to go"
        assert revision(cluster, "mesh-decode-0") == "two"
        assert actuator.report().outdated == ("mesh-decode-1",)


async def test_a_pod_that_may_not_be_replaced_is_told_of_once_and_tried_again_when_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    cluster = a_cluster(6)
    async with acting(tmp_path, cluster) as actuator:
        (process,) = (each for each in actuator.report().processes if each.name == "mesh-decode-5")
        for _ in range(2):
            await pursue(actuator, DesiredProcesses(replace=(process,)))
            (failed,) = actuator.report().failed
            assert (failed.instance_id, "may not delete pods" in failed.reason) == ("mesh-decode-5", True)
        actuator.heard(actuator.report())
        await pursue(actuator, DesiredProcesses())
        cluster.rules = None
        await pursue(actuator, DesiredProcesses(replace=(process,)))
        assert actuator.report().failed == ()
        assert cluster.asked.count("delete pods mesh-decode-5") == 2


async def test_a_pod_is_replaced_as_soon_as_the_api_server_is_back(tmp_path: Path) -> None:
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        (process,) = (each for each in actuator.report().processes if each.name == "mesh-decode-0")
        before = uids(cluster)
        for cluster.is_away in (True, False):
            await pursue(actuator, DesiredProcesses(replace=(process,)))
            assert actuator.report().failed == ()
            assert (uids(cluster) == before) is cluster.is_away


async def test_a_process_that_ended_by_itself_starts_again_from_the_present_template(tmp_path: Path) -> None:
    """An older template may be why. One that is back already serves."""
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        change_template(cluster)
        await actuator.look()
        assert revision(cluster, "mesh-decode-0") == "one"
        before = uids(cluster)
        crash(cluster, "mesh-decode-0")
        crash(cluster, "mesh-decode-1", is_back=True)
        await actuator.look()
        await actuator.look()
        after = uids(cluster)
        assert {name for name in before if before[name] != after[name]} == {"mesh-decode-0"}
        assert revision(cluster, "mesh-decode-0") == "two"


async def test_pods_of_others_are_neither_told_of_nor_deleted(tmp_path: Path) -> None:
    """Whoever may make a pod can give it our labels and a name like ours."""
    cluster = a_cluster()
    looks_old = {
        "status": {"containerStatuses": [{"restartCount": 0}], "conditions": [{"type": "Ready", "status": "True"}]}
    }
    owners: list[list[dict[str, Any]]] = [
        [],
        [{"uid": cluster.pod("other-decode-0")["metadata"]["ownerReferences"][0]["uid"], "controller": True}],
        [{"uid": cluster.pod("mesh-decode-0")["metadata"]["ownerReferences"][0]["uid"]}],
    ]
    names = [f"mesh-decode-{7 + index}" for index in range(len(owners))]
    for name, references in zip(names, owners, strict=True):
        metadata = {"labels": {**LABELS, "controller-revision-hash": "old"}, "uid": name, "ownerReferences": references}
        cluster.put(f"{PODS}/{name}", {"metadata": metadata, **looks_old})
    async with acting(tmp_path, cluster) as actuator:
        for name in names:
            crash(cluster, name)
        await actuator.look()
        report = actuator.report()
        assert {each.name for each in report.processes} == {"mesh-decode-0", "mesh-decode-1", "mesh-prefill-0"}
        assert report.unsettled == ()
        assert set(names) <= set(cluster.pod_names)


async def test_a_pod_that_may_not_be_deleted_does_not_keep_the_others_from_being_looked_after(tmp_path: Path) -> None:
    cluster = a_cluster(6)
    async with acting(tmp_path, cluster) as actuator:
        change_template(cluster)
        for name in ("mesh-decode-1", "mesh-decode-5"):
            crash(cluster, name)
        await actuator.look()
        assert "delete pods mesh-decode-5" in cluster.asked, "the Role does not name it"
        assert [name for name in cluster.pod_names if revision(cluster, name) == "two"] == ["mesh-decode-1"]


async def test_what_cannot_be_started_is_told_once(tmp_path: Path) -> None:
    cluster = a_cluster()
    cluster.rules = RULES[:1] + RULES[2:]
    async with acting(tmp_path, cluster) as actuator:
        wanted = DesiredProcesses(start=(member("mesh-decode-2"), member("mesh-mixed-0")))
        await pursue(actuator, wanted)
        report = actuator.report()
        reasons = {each.instance_id: each.reason for each in report.failed}
        assert "may not patch statefulsets/scale" in reasons[InstanceId("mesh-decode-2")]
        assert reasons[InstanceId("mesh-mixed-0")] == "there is no StatefulSet mesh-mixed"
        actuator.heard(report)
        await pursue(actuator, wanted)
        assert actuator.report().failed == ()


async def test_an_api_server_that_is_away_changes_nothing(tmp_path: Path) -> None:
    cluster = a_cluster()
    async with acting(tmp_path, cluster) as actuator:
        before = actuator.report()
        cluster.is_away = True
        with pytest.raises(KubernetesError, match="503"):
            await actuator.look()
        assert actuator.report() == before


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mesh-decode-12", ("mesh-decode", 12)),
        ("decode", ("decode", -1)),
        ("decode-x", ("decode-x", -1)),
        ("d-99999999999", ("d-99999999999", -1)),
    ],
)
def test_numbers_of_names(name: str, parts: tuple[str, int]) -> None:
    assert number_of(InstanceId(name)) == parts
