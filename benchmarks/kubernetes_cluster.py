"""The chart of ``deploy/helm`` on the Kubernetes of ``kubernetes_nodes.py``, and what is done to it.

Takes helm on the path, and prometheus in the folder of Kubernetes' programs. Prefill and decode instances run on
labelled nodes. A folder that all nodes have is the volume for models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cluster_nodes import Cluster, ClusterError, Event, Node, until
from kubernetes_nodes import Kubernetes

from pdmesh.cli.tls import make_certificates

CHART = Path(__file__).parents[1] / "deploy/helm"
RELEASE = "mesh"

#: The name in the certificate of all services.
SERVER_NAME = "mesh.internal"

#: Labels of nodes, by number. Each role has two nodes, so that one can be drained.
LABELS = {1: ["prefill=yes"], 2: ["prefill=yes", "decode=yes"], 3: ["decode=yes"]}

#: Of the schedulers: the API server shares cores with the mesh here, and is late with its answers.
LEASE_S = 10

#: Streams have so long to end on a gateway that is replaced.
DRAIN_S = 120

#: Longest wait for pods: the first ones download and measure a model.
SETTLED_LIMIT_S = 900.0

#: The port of Prometheus on the first node.
PROMETHEUS_PORT = 9099


class ChartOnKubernetes:
    """A release of the chart. Made by `running_kubernetes`.

    ``model`` is one that the chart's Job downloads; empty: the image's demo model.
    """

    def __init__(self, kubernetes: Kubernetes, folder: Path, image: str, model: str) -> None:
        self._kubernetes = kubernetes
        self._folder = folder
        self._image = image
        self._model = model
        self._values = {"prefill": 1, "decode": 2, "chunk": 512}

    def install(self, settings: str) -> None:
        """Install the chart as docs/kubernetes.md says, beside what it needs of a cluster."""
        make_certificates(self._folder / "mesh", hosts=(SERVER_NAME, self._kubernetes.head.address), days=30)
        (self._folder / "mesh/pdmesh.toml").write_text(settings)
        files = {"tls.crt": "mesh.pem", "tls.key": "mesh.key", "ca.crt": "ca.pem"}
        given = [f"--from-file={name}={self._folder / 'mesh' / file}" for name, file in files.items()]
        self._kubernetes.kubectl("create", "secret", "generic", "pdmesh-tls", *given)
        settings_file = self._folder / "mesh/pdmesh.toml"
        self._kubernetes.kubectl("create", "secret", "generic", "pdmesh", f"--from-file={settings_file}")
        (self._folder / "models").mkdir()
        (self._folder / "models").chmod(0o777)
        self._kubernetes.kubectl("apply", "-f", "-", given=json.dumps(_VOLUME))
        self._kubernetes.kubectl("apply", "-f", "-", given=json.dumps(_POD_MONITORS))
        until(
            "PodMonitors are known",
            lambda: bool(self._kubernetes.kubectl("get", "crd", _POD_MONITORS["metadata"]["name"])),
        )
        self.apply()

    def apply(self) -> None:
        """Install or upgrade the chart."""
        small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
        pools = {
            role: {"replicas": self._values[role], "nodeSelector": {role: "yes"}, "resources": small}
            for role in ("prefill", "decode")
        }
        values: dict[str, Any] = {
            "image": self._image,
            "imagePullPolicy": "Never",
            "secretName": "pdmesh",
            "tls": {"secretName": "pdmesh-tls", "serverName": SERVER_NAME},
            "podMonitor": {"enabled": True},
            "drainSeconds": DRAIN_S,
            "gateway": {"replicas": 1, "service": {"type": "NodePort"}, "resources": small},
            "scheduler": {"resources": small},
            "actuator": {"resources": small},
            "test": {"resources": small},
            "pools": pools,
            "settings": {"POLICY_CHUNK_TOKENS": self._values["chunk"], "STANDBY_LEASE_S": LEASE_S},
        }
        if self._model:
            claim = {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "shared",
                "resources": {"requests": {"storage": "10Gi"}},
            }
            values |= {"model": self._model, "modelVolume": {"claim": claim}}
            values["modelDownload"] = {"enabled": True, "resources": small}
        (self._folder / "values.json").write_text(json.dumps(values))
        self._kubernetes.helm("upgrade", "--install", RELEASE, str(CHART), "-f", str(self._folder / "values.json"))

    def settled(self) -> None:
        until("all pods are ready, and as many as there should be", self._is_settled, SETTLED_LIMIT_S)

    def _is_settled(self) -> bool:
        for kind in ("statefulsets", "deployments"):
            for each in self._kubernetes.get(kind):
                status, wanted = each["status"], each["spec"]["replicas"]
                if status.get("readyReplicas", 0) != wanted or status.get("replicas", 0) != wanted:
                    return False
                if status.get("observedGeneration") != each["metadata"]["generation"]:
                    return False
                if kind == "statefulsets" and _is_replacing(each):
                    return False
        return not [each for each in self._kubernetes.get("pods") if "deletionTimestamp" in each["metadata"]]

    def pdmesh(self, *arguments: str) -> str:
        """Run a command of pdmesh in the actuator's pod."""
        return self._kubernetes.kubectl("exec", f"deploy/{RELEASE}-actuator", "--", "pdmesh", *arguments, limit_s=600)

    def resize(self, role: str, number: int) -> None:
        self.pdmesh("pool", "resize", f"--{role}", str(number))
        self._values[role] = number
        self.settled()

    def upgrade(self) -> None:
        """Change a setting of all services, and replace them by pods of the new template."""
        self._values["chunk"] //= 2
        self.apply()
        self.settled()
        self._replace_instances()

    def restart_instances(self) -> None:
        self._kubernetes.kubectl(
            "rollout", "restart", f"statefulset/{RELEASE}-prefill", f"statefulset/{RELEASE}-decode"
        )
        self._replace_instances()

    def _replace_instances(self) -> None:
        self.pdmesh("restart", "--rolling")
        self.settled()
        until("all pods are of the present templates", self._is_updated)

    def _is_updated(self) -> bool:
        revisions = {
            each["metadata"]["name"]: each["status"]["updateRevision"] for each in self._kubernetes.get("statefulsets")
        }
        return all(
            pod["metadata"]["labels"]["controller-revision-hash"] == revisions[owner["name"]]
            for pod in self._kubernetes.get("pods")
            for owner in pod["metadata"].get("ownerReferences", [])
            if owner["kind"] == "StatefulSet"
        )

    def test(self) -> None:
        self._kubernetes.helm("test", RELEASE, "--timeout=10m", limit_s=600)

    def scrape(self) -> None:
        """Have Prometheus scrape what the PodMonitor selects, until no target is missing or down."""
        head, file = self._kubernetes.head, self._folder / "prometheus.json"
        monitor = json.loads(self._kubernetes.kubectl("get", "podmonitor", RELEASE, "-o", "json"))
        file.write_text(json.dumps({"scrape_configs": scrape_configs(monitor)}))
        self._kubernetes.begin(
            *(head, "prometheus", "--config.file=/files/prometheus.json", "--storage.tsdb.path=/run/prometheus"),
            f"--web.listen-address={head.address}:{PROMETHEUS_PORT}",
        )
        try:
            until("Prometheus scrapes all pods", lambda: self._targets() == dict.fromkeys(self._served_pods(), "up"))
        except ClusterError as error:
            raise ClusterError(f"{error}: {self._targets()}") from error
        finally:
            head.run("sh", "-c", "kill $(pidof prometheus)")

    def _targets(self) -> dict[str, str]:
        """The health of each pod that Prometheus scrapes."""
        url = f"http://{self._kubernetes.head.address}:{PROMETHEUS_PORT}/api/v1/targets"
        try:
            targets = httpx.get(url).raise_for_status().json()["data"]["activeTargets"]
        except httpx.HTTPError as error:
            raise ClusterError(f"{error!r}") from error
        return {each["labels"]["pod"]: each["health"] for each in targets}

    def _served_pods(self) -> list[str]:
        """The pods whose services go on."""
        pods = self._kubernetes.get("pods")
        return [each["metadata"]["name"] for each in pods if each["spec"]["restartPolicy"] == "Always"]

    def restart_schedulers(self) -> None:
        self._kubernetes.kubectl("rollout", "restart", f"statefulset/{RELEASE}-scheduler")
        self.settled()
        until("all pods are of the present templates", self._is_updated)

    def delete_leader(self) -> None:
        address = self._kubernetes.kubectl(
            "get", "lease", f"{RELEASE}-scheduler", "-o", "jsonpath={.spec.holderIdentity}"
        )
        (pod,) = [
            each for each in self._kubernetes.get("pods") if address.startswith(f"{each['status'].get('podIP')}:")
        ]
        self._kubernetes.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        self.settled()

    def busiest(self, nodes: Sequence[Node]) -> Node:
        """The node with most instances of those that the gateway is not on: streams end with their gateway."""
        pods: dict[str, list[str]] = {node.name: [] for node in self._kubernetes.nodes}
        for pod in self._kubernetes.get("pods"):
            if "nodeName" in pod["spec"]:
                pods[pod["spec"]["nodeName"]].append(pod["metadata"]["labels"]["app.kubernetes.io/component"])
        node = max(
            (node for node in nodes if "gateway" not in pods[node.name]),
            key=lambda node: pods[node.name].count("worker"),
        )
        if "worker" not in pods[node.name]:
            raise ClusterError(f"no instance is on a node without the gateway: {pods}")
        return node

    def drain(self) -> None:
        node = self.busiest(self._kubernetes.nodes)
        self._kubernetes.kubectl("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
        self.settled()
        self._kubernetes.kubectl("uncordon", node.name)

    def kill(self) -> None:
        """A node is lost, and removed, as somebody has to before its pods are made anew; then it comes back."""
        node = self.busiest(self._kubernetes.nodes[1:])  # the control plane is on the first
        node.lose_power()
        until(f"{node.name} is not ready", lambda: not self._kubernetes.is_ready(node))
        self._kubernetes.kubectl("delete", "node", node.name)
        self.settled()
        node.restore_power()
        self._kubernetes.start_node(node)
        until(f"{node.name} is ready", lambda: self._kubernetes.is_ready(node))

    def events(self) -> list[Event]:
        return [
            Event("all pods scraped", self.scrape),
            Event("helm test", self.test),
            Event("pool resize: decode 2 -> 3", lambda: self.resize("decode", 3)),
            Event("pool resize: decode 3 -> 1", lambda: self.resize("decode", 1)),
            Event("pool resize: decode 1 -> 2", lambda: self.resize("decode", 2)),
            Event("pool resize: prefill 1 -> 2", lambda: self.resize("prefill", 2)),
            Event("helm upgrade and restart --rolling", self.upgrade),
            Event("rollout restart and restart --rolling", self.restart_instances),
            Event("rollout restart of the schedulers", self.restart_schedulers),
            Event("the leading scheduler's pod deleted", self.delete_leader),
            Event("a node loses power, and comes back", self.kill),
            Event("a node drained", self.drain),
        ]

    def base_url(self) -> str:
        """The gateways' Service, by a port of the first node."""
        (service,) = [
            each for each in self._kubernetes.get("services") if each["metadata"]["name"] == f"{RELEASE}-gateway"
        ]
        (port,) = [each["nodePort"] for each in service["spec"]["ports"] if each["name"] == "http"]
        return f"https://{self._kubernetes.head.address}:{port}"

    def logs(self) -> str:
        """What all pods that are there have logged, and the cluster's own events."""
        told = [("logs", each["metadata"]["name"]) for each in self._kubernetes.get("pods")]
        return "".join(map(self._told, [*told, ("get", "events", "--sort-by=.lastTimestamp")]))

    def _told(self, command: tuple[str, ...]) -> str:
        try:
            return self._kubernetes.kubectl(*command)
        except ClusterError as error:  # a pod that is just going
            return f"{error}\n"


_VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "shared"},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "10Gi"},
        "hostPath": {"path": "/files/models"},
        "storageClassName": "shared",
    },
}

#: PodMonitors as the Prometheus operator defines them, without the schema of their fields.
_POD_MONITORS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def scrape_configs(monitor: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the configuration that the Prometheus operator makes of a PodMonitor."""
    labels = monitor["spec"]["selector"]["matchLabels"]
    selected = [
        {
            "action": "keep",
            "source_labels": [f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', name)}"],
            "regex": value,
        }
        for name, value in labels.items()
    ]
    return [
        {
            "job_name": endpoint["port"],
            "honor_labels": endpoint["honorLabels"],
            "scrape_interval": "2s",  # rather than the monitor's
            "scheme": endpoint["scheme"],
            "tls_config": {"ca_file": "/files/mesh/ca.pem", "server_name": endpoint["tlsConfig"]["serverName"]},
            "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": "/files/kubeconfig"}],
            "relabel_configs": [
                {"action": "drop", "source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)"},
                *selected,
                {
                    "action": "keep",
                    "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                    "regex": endpoint["port"],
                },
                {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            ],
        }
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    ]


def _is_replacing(stateful_set: dict[str, Any]) -> bool:
    """Whether Kubernetes is replacing its pods, one after the other."""
    status, strategy = stateful_set["status"], stateful_set["spec"]["updateStrategy"]["type"]
    return bool(strategy == "RollingUpdate" and status.get("currentRevision") != status.get("updateRevision"))


@contextmanager
def running_kubernetes(
    nodes: list[Node], folder: Path, image: str, model: str, binaries: str, settings: str, api_key: str
) -> Generator[Cluster]:
    """Make the nodes a cluster with the chart on it.

    ``settings`` are the file pdmesh.toml, and ``binaries`` is a folder that all nodes have.
    """
    kubernetes = Kubernetes(nodes, folder, binaries, LABELS)
    chart = ChartOnKubernetes(kubernetes, folder, image, model)
    try:
        kubernetes.start()
        try:
            chart.install(settings)
            chart.settled()
        except ClusterError as error:
            raise ClusterError(f"{error}\n{kubernetes.kubectl('describe', 'pods')[-8000:]}") from error
        yield Cluster(chart.base_url(), folder / "mesh/ca.pem", api_key, chart.events(), chart.logs)
    finally:
        kubernetes.close()
