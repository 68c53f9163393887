"""Kubernetes as an actuator: the pods of StatefulSets are the instances that the scheduler wants.

A StatefulSet numbers its pods, and the one with the highest number leaves first. So the scheduler drains that one
(`ActuatorReported.last_leaves_first`). A pod that is made again has the same name, and operators' wishes for the name
apply to it. A pod made from an older template is deleted when its instance is restarted, or when its process has ended
by itself. Kubernetes then makes it from the present template. Pods that no StatefulSet of the release controls are left
alone, whatever their names and labels.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import anyio.abc
import structlog
from prometheus_client import CollectorRegistry

from pdmesh.cli.actuator import LookingActuator
from pdmesh.config import MeshConfig
from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import UNKNOWN_PID, ActuatorReported, EndedProcess, FailedStart
from pdmesh.core.operators.actuators import number_of
from pdmesh.errors import ConfigError
from pdmesh.failures import describe_exit
from pdmesh.model import InstanceId, Role
from pdmesh.operations import ManagedProcess
from pdmesh.service import ServiceContext, run_service
from pdmesh.telemetry.exposition import serve_metrics, watch_event_loop
from pdmesh_kubernetes.api import Forbidden, KubernetesApi, KubernetesError, open_kubernetes

log = structlog.get_logger()

#: Seconds for an answer of the API server.
API_LIMIT_S = 10.0

#: Exit code of a container that a signal killed, less the signal's number.
SIGNALLED = 128

#: Kubernetes' default for a pod without a grace period.
DEFAULT_GRACE_S = 30.0

#: More than any host's memory: the cluster itself decides whether there is room for another pod, and waits.
_PLENTY_BYTES = 1 << 50


class PodSet(NamedTuple):
    """A StatefulSet: the wanted number of pods, and the revision of the template for new ones."""

    uid: str
    num_pods: int
    revision: str


class Pod(NamedTuple):
    """A pod of an instance.

    `revision` is the template's. `grace_s` is the time between SIGTERM and SIGKILL. `last_end` says how the last
    process ended. `has_served` says that the present process was ready before.
    """

    uid: str
    revision: str
    num_restarts: int
    is_ready: bool
    is_leaving: bool
    grace_s: float
    last_end: str = ""
    has_served: bool = False

    @property
    def pid(self) -> int:
        """Number that no other process of this name had."""
        return zlib.crc32(f"{self.uid}/{self.num_restarts}".encode())


class KubernetesActuator(LookingActuator):
    """Actuator that changes the scale of StatefulSets, and deletes pods to replace them."""

    def __init__(self, api: KubernetesApi, release: str) -> None:
        super().__init__()
        self._api = api
        self._prefix = f"{release}-"
        self._sets: Mapping[str, PodSet] = {}
        self._pods: Mapping[str, Pod] = {}
        self._num_restarts: dict[str, int] = {}  # restarts of each pod, by uid, when first seen
        self._scaling: dict[str, int] = {}  # wanted scales of StatefulSets under change
        self._deleting: set[str] = set()  # uids of pods
        self._not_deleted: set[str] = set()  # uids of pods whose failed deletion was logged
        self._not_replaced: set[int] = set()  # pids that the service account may not replace

    # --- `pdmesh.cli.actuator.Actuator` ---

    def report(self) -> ActuatorReported:
        """Return the present pods: settled if ready and not leaving, otherwise unsettled."""
        settled = {name: pod for name, pod in self._pods.items() if pod.is_ready and not pod.is_leaving}
        return ActuatorReported(
            actuator_id=self.actuator_id,
            processes=tuple(ManagedProcess(name=name, pid=pod.pid) for name, pod in settled.items()),
            unsettled=tuple(InstanceId(name) for name in self._pods if name not in settled),
            available_bytes=_PLENTY_BYTES,
            name_prefix=self._prefix,
            failed=tuple(self._failed),
            ended=tuple(self._ended),
            last_leaves_first=True,
            outdated=tuple(InstanceId(name) for name, pod in settled.items() if self._is_outdated(name, pod)),
            grace_s=max((pod.grace_s for pod in self._pods.values()), default=0.0),
        )

    def pursue(self, desired: DesiredProcesses, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to scale StatefulSets with too many or too few pods, and to delete pods of replaced processes."""
        starts = {member.instance_id for member in desired.start}
        self._refused &= starts
        for instance_id in starts - self._refused:
            if number_of(instance_id)[0] not in self._sets and self._sets:
                self._refuse([instance_id], f"there is no StatefulSet {number_of(instance_id)[0]}")
        for name, pods in self._sets.items():
            wanted = [number for stem, number in map(number_of, starts - self._refused) if stem == name]
            num_pods = max(pods.num_pods, max(wanted, default=-1) + 1)
            while num_pods and (last := InstanceId(f"{name}-{num_pods - 1}")) in desired.stop and last not in starts:
                num_pods -= 1
            if num_pods != pods.num_pods and self._scaling.get(name) != num_pods:
                self._scaling[name] = num_pods
                tasks.start_soon(self._scale, name, num_pods, [InstanceId(f"{name}-{number}") for number in wanted])

        self._not_replaced &= {process.pid for process in desired.replace}
        for process in desired.replace:
            pod = self._pods.get(process.name)
            if pod is not None and pod.pid == process.pid and process.pid not in self._not_replaced:
                tasks.start_soon(self._replace, process.name, pod)

    async def _scale(self, name: str, num_pods: int, starts: Sequence[InstanceId]) -> None:
        log.info("changing a StatefulSet's scale", name=name, replicas=num_pods)
        path = f"/apis/apps/v1/namespaces/{self._api.namespace}/statefulsets/{name}/scale"
        try:
            await self._api.patch(path, {"spec": {"replicas": num_pods}})
            await self.look()
        except KubernetesError as error:
            log.error("cannot change a StatefulSet's scale", name=name, reason=str(error))
            self._refuse(starts, str(error))
        finally:
            if self._scaling.get(name) == num_pods:
                del self._scaling[name]

    async def _replace(self, name: str, pod: Pod) -> None:
        try:
            await self._delete(name, pod)
        except Forbidden as error:
            self._not_replaced.add(pod.pid)
            self._failed.append(FailedStart(instance_id=InstanceId(name), reason=str(error)))
            self.note_change()
        except KubernetesError:
            pass  # tried again while wanted

    # --- the cluster ---

    async def look(self) -> None:
        """Read the StatefulSets and pods, and note processes that ended. Raises KubernetesError.

        Delete a pod of an older template whose process has ended and is not ready again.
        """
        sets: dict[str, PodSet] = {}
        for role in Role:
            name = f"{self._prefix}{role}"
            path = f"/apis/apps/v1/namespaces/{self._api.namespace}/statefulsets/{name}"
            if (found := await self._api.get(path)) is not None:
                sets[name] = _pod_set(found)
        selector = f"app.kubernetes.io/instance={self._prefix[:-1]},app.kubernetes.io/component=worker"
        pods_path = f"/api/v1/namespaces/{self._api.namespace}/pods"
        listed = await self._api.get(pods_path, {"labelSelector": selector}) or {}
        pods = {
            str(each["metadata"]["name"]): _pod(each)
            for each in listed.get("items", ())
            if _is_of(each["metadata"], sets)
        }
        self._num_restarts = {pod.uid: self._num_restarts.get(pod.uid, pod.num_restarts) for pod in pods.values()}
        self._deleting &= self._num_restarts.keys()
        self._not_deleted &= self._num_restarts.keys()
        for name, pod in pods.items():
            before = self._pods.get(name)
            if before is None or before.uid != pod.uid:
                continue
            if pod.num_restarts > before.num_restarts:
                self._ended.append(
                    EndedProcess(name=name, pid=UNKNOWN_PID, cause=pod.last_end, has_served=before.has_served)
                )
            elif before.has_served:  # no pod is ready right after a restart
                pods[name] = pod._replace(has_served=True)
        if (sets, pods) != (self._sets, self._pods):
            self._sets, self._pods = sets, pods
            self.note_change()
        for name, pod in pods.items():
            has_ended = pod.num_restarts > self._num_restarts[pod.uid] and not pod.is_ready
            if has_ended and self._is_outdated(name, pod):
                with suppress(KubernetesError):
                    await self._delete(name, pod)

    def _is_outdated(self, name: str, pod: Pod) -> bool:
        """Return whether a pod was made from an older template than the present one."""
        return pod.revision != self._sets[number_of(InstanceId(name))[0]].revision

    async def _delete(self, name: str, pod: Pod) -> None:
        """Delete a pod once, so that it is made from the present template. Raises KubernetesError."""
        if pod.is_leaving or pod.uid in self._deleting:
            return
        self._deleting.add(pod.uid)
        path = f"/api/v1/namespaces/{self._api.namespace}/pods/{name}"
        try:
            await self._api.delete(path, {"preconditions": {"uid": pod.uid}})
        except KubernetesError as error:
            self._deleting.discard(pod.uid)
            if pod.uid not in self._not_deleted:
                log.error("cannot delete a pod that needs the current template; trying again", reason=str(error))
            self._not_deleted.add(pod.uid)
            raise
        log.info("deleted a pod; its successor gets the current template", path=path)


def _pod_set(found: Mapping[str, Any]) -> PodSet:
    return PodSet(
        uid=str(found["metadata"]["uid"]),
        num_pods=int(found["spec"].get("replicas", 1)),
        revision=str(found.get("status", {}).get("updateRevision", "")),
    )


def _is_of(pod: Mapping[str, Any], sets: Mapping[str, PodSet]) -> bool:
    """Return whether one of the StatefulSets controls a pod, by its owner: names and labels can be forged."""
    owner = sets.get(number_of(InstanceId(pod["name"]))[0])
    uids = [each.get("uid") for each in pod.get("ownerReferences", ()) if each.get("controller")]
    return owner is not None and uids == [owner.uid]


def _last_end(status: Mapping[str, Any]) -> str:
    """Return how a pod's last process ended, as a phrase that follows the instance's name."""
    for container in status.get("containerStatuses", ()):
        terminated = container.get("lastState", {}).get("terminated")
        if terminated is not None:
            reason = str(terminated.get("reason", ""))
            number = int(terminated.get("signal", 0)) or int(terminated.get("exitCode", 0)) - SIGNALLED
            how = describe_exit(-number) if number > 0 else describe_exit(number + SIGNALLED)
            return f"{how} ({reason})" if reason not in ("", "Error", "Completed") else how
    return "ended"


def _pod(found: Mapping[str, Any]) -> Pod:
    metadata, status = found["metadata"], found.get("status", {})
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    is_ready = conditions.get("Ready") == "True"
    return Pod(
        uid=str(metadata["uid"]),
        revision=str(metadata.get("labels", {}).get("controller-revision-hash", "")),
        num_restarts=sum(int(each["restartCount"]) for each in status.get("containerStatuses", ())),
        is_ready=is_ready,
        is_leaving="deletionTimestamp" in metadata,
        last_end=_last_end(status),
        has_served=is_ready,
        grace_s=float(found.get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)),
    )


def run_actuator(config: MeshConfig) -> int:
    """Run the actuator until it is told to stop, and return the exit code."""
    return run_service("actuator", config, serve)


async def serve(config: MeshConfig, context: ServiceContext) -> None:
    """Follow the scheduler until told to stop. Raises ConfigError."""
    if not config.scheduler_address:
        raise ConfigError("no scheduler is set: set scheduler_address (PDMESH_SCHEDULER_ADDRESS) to its host:port")
    kubernetes, registry = config.kubernetes, CollectorRegistry()
    watch_event_loop(registry)
    async with open_kubernetes(kubernetes.api, kubernetes.account, limit_s=API_LIMIT_S) as api:
        actuator = KubernetesActuator(api, kubernetes.release)
        with serve_metrics(
            registry, host=config.telemetry.metrics_host, port=kubernetes.metrics_port, security=config.security
        ) as metrics_port:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(actuator.run, config)
                context.announce(release=kubernetes.release, metrics_port=metrics_port)
                await context.stopping.wait()
                tasks.cancel_scope.cancel()
