"""A Kubernetes of three nodes with the chart of ``deploy/helm``, and what is done to it.

Takes a folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet (of before 1.24: it speaks to
Docker), kube-proxy and kubectl, and helm on the path. Pods of different nodes reach each other by routes. Names are
answered by a dnsmasq on the first node, which is told of pods and services as the API server has them. What so old an
API server does not know (policy/v1, endPort) is given to it as it does.
"""

from __future__ import annotations

import json
import re
import secrets
import ssl
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cluster_nodes import Cluster, ClusterError, Event, Node, run, until

from pdmesh.cli.tls import make_certificates

CHART = Path(__file__).parents[1] / "deploy/helm"
RELEASE = "mesh"
SERVICES = "10.96.0.0/16"
API = "10.96.0.1"
DOMAIN = "cluster.local"

#: A node that was not heard of for so long is not ready; its pods may go `unreachableSeconds` of the chart later.
GRACE_S = 40

#: Of the schedulers: the API server shares cores with the mesh here, and is late with its answers.
LEASE_S = 10

#: Streams have so long to end on a gateway that is replaced.
DRAIN_S = 120

_PAUSE = 'FROM {image}\nUSER root\nENTRYPOINT ["sleep", "infinity"]\nCMD []\n'


def pods_of(node: Node) -> str:
    """The first three numbers of the addresses of a node's pods."""
    return f"10.244.{node.number}"


class Kubernetes:
    """A cluster whose first node has the control plane, and pods as the others. Made by `running_kubernetes`."""

    def __init__(self, nodes: list[Node], folder: Path, image: str, binaries: str) -> None:
        self._nodes = nodes
        self._head = nodes[0]
        self._folder = folder
        self._image = image
        self._binaries = binaries
        self._values = {"prefill": 1, "decode": 2, "chunk": 512}
        self._closing = threading.Event()
        self._api = httpx.Client()
        self._naming = threading.Thread(target=self._name_forever)

    # --- the cluster ---

    def start(self) -> None:
        """Start it, and wait until all nodes are ready."""
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}")
        make_certificates(self._folder / "pki", hosts=(self._head.address, API, *names), days=30)
        run("openssl", "genrsa", "-traditional", "-out", str(self._folder / "pki/account.key"), "2048")
        token = secrets.token_hex(16)
        (self._folder / "pki/tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        cluster = {"server": f"https://{self._head.address}:6443", "certificate-authority": "/files/pki/ca.pem"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
            "current-context": "here",
        }
        (self._folder / "kubeconfig").write_text(json.dumps(config))
        self._start_api()
        trusts = ssl.create_default_context(cafile=self._folder / "pki/ca.pem")
        self._api = httpx.Client(
            base_url=cluster["server"], verify=trusts, trust_env=False, headers={"authorization": f"Bearer {token}"}
        )
        until("the API server answers", lambda: self._get("nodes") == [])
        self._start_controllers()
        for node in self._nodes:
            self.start_node(node)
        until("all nodes are ready", lambda: all(map(self._is_ready, self._nodes)))

    def _start_api(self) -> None:
        pki, head = "/files/pki", self._head
        head.start("etcd", "--data-dir=/run/etcd", log="/run/etcd.log")
        self._begin(
            *(head, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={head.address}"),
            *("--secure-port=6443", f"--service-cluster-ip-range={SERVICES}", "--authorization-mode=RBAC"),
            *("--allow-privileged=true", f"--token-auth-file={pki}/tokens.csv", f"--client-ca-file={pki}/ca.pem"),
            *(f"--tls-cert-file={pki}/mesh.pem", f"--tls-private-key-file={pki}/mesh.key"),
            *(f"--service-account-key-file={pki}/account.key", f"--service-account-signing-key-file={pki}/account.key"),
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        )

    def _start_controllers(self) -> None:
        pki, head, configured = "/files/pki", self._head, "--kubeconfig=/files/kubeconfig"
        self._begin(
            *(head, "kube-controller-manager", configured, "--leader-elect=false", f"--root-ca-file={pki}/ca.pem"),
            *(f"--service-account-private-key-file={pki}/account.key", "--node-monitor-period=2s"),
            f"--node-monitor-grace-period={GRACE_S}s",
        )
        self._begin(head, "kube-scheduler", configured, "--leader-elect=false")
        self._naming.start()

    def start_node(self, node: Node) -> None:
        """Start what makes a machine a node of the cluster."""
        node.run("docker", "build", "-q", "-t", "pause", "-", given=_PAUSE.format(image=self._image))
        network = {
            "cniVersion": "0.3.1",
            "name": "pods",
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": f"{pods_of(node)}.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        node.run("sh", "-c", "mkdir -p /etc/cni/net.d && cat > /etc/cni/net.d/pods.conf", given=json.dumps(network))
        node.run("sh", "-c", "iptables -P FORWARD ACCEPT; sysctl -q -w net.bridge.bridge-nf-call-iptables=1 || true")
        for other in self._nodes:
            if other is not node:
                node.run("ip", "route", "replace", f"{pods_of(other)}.0/24", "via", other.address)
        self._begin(
            *(node, "kubelet", "--kubeconfig=/files/kubeconfig", f"--hostname-override={node.name}"),
            *(f"--node-ip={node.address}", "--container-runtime=docker", "--pod-infra-container-image=pause"),
            *("--network-plugin=cni", "--cni-bin-dir=/usr/lib/cni", "--cni-conf-dir=/etc/cni/net.d"),
            *(f"--cluster-dns={self._head.address}", f"--cluster-domain={DOMAIN}", "--fail-swap-on=false"),
            *("--cgroups-per-qos=false", "--enforce-node-allocatable=", "--eviction-hard=memory.available<1Mi"),
            *("--image-gc-high-threshold=100", "--node-status-update-frequency=2s", "--read-only-port=0"),
            *("--anonymous-auth=true", "--authorization-mode=AlwaysAllow"),
        )
        self._begin(
            *(node, "kube-proxy", "--kubeconfig=/files/kubeconfig", f"--hostname-override={node.name}"),
            *("--proxy-mode=iptables", "--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0"),
            *("--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"),
        )

    def _begin(self, node: Node, program: str, *flags: str) -> None:
        node.start(f"{self._binaries}/{program}", *flags, log=f"/run/{program}.log")

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = 300.0) -> str:
        command = (f"{self._binaries}/kubectl", "--kubeconfig=/files/kubeconfig", *arguments)
        return self._head.run(*command, given=given, limit_s=limit_s)

    def _get(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind. The API server is asked straight: to start a kubectl takes a good part of a core."""
        group = "api/v1" if kind in ("nodes", "pods", "services") else "apis/apps/v1"
        path = f"/{group}/nodes" if kind == "nodes" else f"/{group}/namespaces/default/{kind}"
        try:
            items: list[dict[str, Any]] = self._api.get(path).raise_for_status().json()["items"]
        except httpx.HTTPError as error:
            raise ClusterError(f"{kind}: {error!r}") from error
        return items

    def _is_ready(self, node: Node) -> bool:
        """Whether the cluster has heard of a node lately."""
        return any(
            each["metadata"]["name"] == node.name and condition["status"] == "True"
            for each in self._get("nodes")
            for condition in each["status"]["conditions"]
            if condition["type"] == "Ready"
        )

    # --- names ---

    def _name_forever(self) -> None:
        """Keep the names of pods and services up to date, until closed."""
        said = ""
        self._head.run("touch", "/run/names")
        self._head.start(
            *("dnsmasq", "--keep-in-foreground", "--no-hosts", "--no-resolv", "--user=root", "--pid-file=/run/dns.pid"),
            *("--addn-hosts=/run/names", f"--local=/{DOMAIN}/"),
            log="/run/dnsmasq.log",
        )
        while not self._closing.wait(0.5):
            with suppress(ClusterError):
                if (names := self._names()) != said:
                    self._head.run("sh", "-c", "cat > /run/names && kill -HUP $(cat /run/dns.pid)", given=names)
                    said = names

    def _names(self) -> str:
        def full(*parts: str) -> str:
            return ".".join((*parts, "default.svc", DOMAIN))

        lines: list[str] = []
        pods = [each for each in self._get("pods") if each["status"].get("podIP")]
        for pod in pods:
            if "subdomain" in pod["spec"]:
                lines.append(f"{pod['status']['podIP']} {full(pod['metadata']['name'], pod['spec']['subdomain'])}")
        for service in self._get("services"):
            name, spec = full(service["metadata"]["name"]), service["spec"]
            if spec["clusterIP"] != "None":
                lines.append(f"{spec['clusterIP']} {name}")
                continue
            wanted = spec["selector"].items()
            lines += [f"{pod['status']['podIP']} {name}" for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        return "\n".join(sorted(lines)) + "\n"

    def close(self) -> None:
        self._closing.set()
        if self._naming.is_alive():
            self._naming.join()
        self._api.close()

    # --- the mesh ---

    def apply(self) -> None:
        """Apply the chart, as `helm upgrade` does."""
        small = "{requests: {cpu: 50m, memory: 64Mi}}"
        values = self._folder / "values.yaml"
        values.write_text(
            f"image: {self._image}\nimagePullPolicy: Never\ntrustedNetwork: true\nsecretName: pdmesh\n"
            f"drainSeconds: {DRAIN_S}\n"
            f"gateway: {{replicas: 1, service: {{type: NodePort}}, resources: {small}}}\n"
            f"scheduler: {{resources: {small}}}\nactuator: {{resources: {small}}}\n"
            f"pools:\n  prefill: {{replicas: {self._values['prefill']}, resources: {small}}}\n"
            f"  decode: {{replicas: {self._values['decode']}, resources: {small}}}\n"
            f'settings: {{POLICY_CHUNK_TOKENS: "{self._values["chunk"]}", STANDBY_LEASE_S: "{LEASE_S}"}}\n'
        )
        text = run("helm", "template", "--no-hooks", RELEASE, str(CHART), "-n", "default", "-f", str(values))
        text = re.sub(r"policy/v1$", "policy/v1beta1", text, flags=re.MULTILINE)
        self.kubectl("apply", "--validate=false", "-f", "-", given=re.sub(r", endPort: \d+", "", text))

    def settled(self) -> None:
        until("all pods are ready, and as many as there should be", self._is_settled)

    def _is_settled(self) -> bool:
        for kind in ("statefulsets", "deployments"):
            for each in self._get(kind):
                status, wanted = each["status"], each["spec"]["replicas"]
                if status.get("readyReplicas", 0) != wanted or status.get("replicas", 0) != wanted:
                    return False
                if status.get("observedGeneration") != each["metadata"]["generation"]:
                    return False
                if kind == "statefulsets" and _is_replacing(each):
                    return False
        return not [each for each in self._get("pods") if "deletionTimestamp" in each["metadata"]]

    def pdmesh(self, *arguments: str) -> str:
        """Run a command of pdmesh in the actuator's pod."""
        name = f"{RELEASE}-scheduler"
        address = ",".join(f"{name}-{number}.{name}:7000" for number in range(2))
        return self.kubectl(
            *("exec", f"deploy/{RELEASE}-actuator", "--", "pdmesh", *arguments, "--scheduler", address), limit_s=600
        )

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
        self.kubectl("rollout", "restart", f"statefulset/{RELEASE}-prefill", f"statefulset/{RELEASE}-decode")
        self._replace_instances()

    def _replace_instances(self) -> None:
        self.pdmesh("restart", "--rolling")
        self.settled()
        until("all pods are of the present templates", self._is_updated)

    def _is_updated(self) -> bool:
        revisions = {each["metadata"]["name"]: each["status"]["updateRevision"] for each in self._get("statefulsets")}
        return all(
            pod["metadata"]["labels"]["controller-revision-hash"] == revisions[owner["name"]]
            for pod in self._get("pods")
            for owner in pod["metadata"]["ownerReferences"]
            if owner["kind"] == "StatefulSet"
        )

    def restart_schedulers(self) -> None:
        self.kubectl("rollout", "restart", f"statefulset/{RELEASE}-scheduler")
        self.settled()
        until("all pods are of the present templates", self._is_updated)

    def delete_leader(self) -> None:
        address = self.kubectl("get", "lease", f"{RELEASE}-scheduler", "-o", "jsonpath={.spec.holderIdentity}")
        (pod,) = [each for each in self._get("pods") if address.startswith(f"{each['status'].get('podIP')}:")]
        self.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        self.settled()

    def busiest(self, nodes: Sequence[Node]) -> Node:
        """The node with most instances of those that the gateway is not on: streams end with their gateway."""
        pods: dict[str, list[str]] = {node.name: [] for node in self._nodes}
        for pod in self._get("pods"):
            pods[pod["spec"]["nodeName"]].append(pod["metadata"]["labels"]["app.kubernetes.io/component"])
        node = max(
            (node for node in nodes if "gateway" not in pods[node.name]),
            key=lambda node: pods[node.name].count("worker"),
        )
        if "worker" not in pods[node.name]:
            raise ClusterError(f"no instance is on a node without the gateway: {pods}")
        return node

    def drain(self) -> None:
        node = self.busiest(self._nodes)
        self.kubectl("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data")
        self.settled()
        self.kubectl("uncordon", node.name)

    def kill(self) -> None:
        """A node is lost, and removed, as somebody has to before its pods are made anew; then it comes back."""
        node = self.busiest(self._nodes[1:])  # the control plane is on the first
        node.lose_power()
        until(f"{node.name} is not ready", lambda: not self._is_ready(node))
        self.kubectl("delete", "node", node.name)
        self.settled()
        node.restore_power()
        self.start_node(node)
        until(f"{node.name} is ready", lambda: self._is_ready(node))

    def events(self) -> list[Event]:
        return [
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
        (service,) = [each for each in self._get("services") if each["metadata"]["name"] == f"{RELEASE}-gateway"]
        (port,) = [each["nodePort"] for each in service["spec"]["ports"] if each["name"] == "http"]
        return f"http://{self._head.address}:{port}"

    def logs(self) -> str:
        """What all pods that are there have logged, and the cluster's own events."""
        told = [("logs", each["metadata"]["name"]) for each in self._get("pods")]
        return "".join(map(self._told, [*told, ("get", "events", "--sort-by=.lastTimestamp")]))

    def _told(self, command: tuple[str, ...]) -> str:
        try:
            return self.kubectl(*command)
        except ClusterError as error:  # a pod that is just going
            return f"{error}\n"


def _is_replacing(stateful_set: dict[str, Any]) -> bool:
    """Whether Kubernetes is replacing its pods, one after the other."""
    status, strategy = stateful_set["status"], stateful_set["spec"]["updateStrategy"]["type"]
    return bool(strategy == "RollingUpdate" and status.get("currentRevision") != status.get("updateRevision"))


@contextmanager
def running_kubernetes(
    nodes: list[Node], folder: Path, image: str, binaries: str, settings: str, api_key: str
) -> Generator[Cluster]:
    """Make the nodes a cluster with the chart on it.

    ``settings`` are the file pdmesh.toml, and ``binaries`` is a folder that all nodes have.
    """
    cluster = Kubernetes(nodes, folder, image, binaries)
    try:
        cluster.start()
        cluster.kubectl("create", "secret", "generic", "pdmesh", f"--from-literal=pdmesh.toml={settings}")
        cluster.apply()
        try:
            cluster.settled()
        except ClusterError as error:
            raise ClusterError(f"{error}\n{cluster.kubectl('describe', 'pods')[-8000:]}") from error
        yield Cluster(cluster.base_url(), api_key, cluster.events(), cluster.logs)
    finally:
        cluster.close()
