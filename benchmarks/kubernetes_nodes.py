"""A Kubernetes of the nodes of ``cluster_nodes.py``, with its control plane on the first of them.

Takes a folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl, etcd,
containerd, containerd-shim-runc-v2 and ctr. Pods of different nodes reach each other by routes. A dnsmasq on the first
node answers names of pods and services, which the API server gives it, and passes other names on.
"""

from __future__ import annotations

import base64
import json
import secrets
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from cluster_nodes import ClusterError, Engine, Node, run, until

from pdmesh.cli.tls import make_certificates

SERVICES = "10.96.0.0/16"
API = "10.96.0.1"
DOMAIN = "cluster.local"

#: A node that was not heard of for so long is not ready; its pods may go `unreachableSeconds` of the chart later.
GRACE_S = 40

PAUSE_IMAGE = "pdmesh-pause"
_PAUSE = 'FROM {image}\nUSER root\nENTRYPOINT ["sleep", "infinity"]\nCMD []\n'


def pods_of(node: Node) -> str:
    """The first three numbers of the addresses of a node's pods."""
    return f"10.244.{node.number}"


def containerd(folder: Path, image: str, binaries: str) -> Engine:
    """Return the engine of all nodes, whose /files is ``folder``. Builds the image that holds a pod's namespaces."""
    run("docker", "build", "-q", "-t", PAUSE_IMAGE, "-", given=_PAUSE.format(image=image))
    (folder / "containerd.toml").write_text(
        "version = 3\n"
        "[plugins.'io.containerd.cri.v1.images'.pinned_images]\n"
        f"sandbox = 'docker.io/library/{PAUSE_IMAGE}:latest'\n"
        "[plugins.'io.containerd.cri.v1.runtime'.cni]\n"
        "bin_dirs = ['/usr/lib/cni']\n"
        "conf_dir = '/etc/cni/net.d'\n"
    )
    return Engine(
        ("env", f"PATH={binaries}:/usr/sbin:/usr/bin:/sbin:/bin", "containerd", "--config", "/files/containerd.toml"),
        (f"{binaries}/ctr", "version"),
        (f"{binaries}/ctr", "-n", "k8s.io", "images", "import"),
    )


class Kubernetes:
    """The control plane and the nodes, with ``labels`` by their numbers. All of them have the folder ``binaries``."""

    def __init__(self, nodes: list[Node], folder: Path, binaries: str, labels: Mapping[int, Sequence[str]]) -> None:
        self.nodes = nodes
        self.head = nodes[0]
        self._folder = folder
        self._binaries = binaries
        self._labels = labels
        self._closing = threading.Event()
        self._api = httpx.Client()
        self._naming = threading.Thread(target=self._name_forever)

    # --- the cluster ---

    def start(self) -> None:
        """Start it, and wait until all nodes are ready."""
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}")
        make_certificates(self._folder / "pki", hosts=(self.head.address, API, *names), days=30)
        run("openssl", "genrsa", "-traditional", "-out", str(self._folder / "pki/account.key"), "2048")
        token = secrets.token_hex(16)
        (self._folder / "pki/tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        authority = base64.b64encode((self._folder / "pki/ca.pem").read_bytes()).decode()
        cluster = {"server": f"https://{self.head.address}:6443", "certificate-authority-data": authority}
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
        until("the API server answers", lambda: self.get("nodes") == [])
        self._start_controllers()
        for node in self.nodes:
            self.start_node(node)
        until("all nodes are ready", lambda: all(map(self.is_ready, self.nodes)))

    def _start_api(self) -> None:
        pki, head = "/files/pki", self.head
        self.begin(head, "etcd", "--data-dir=/run/etcd")
        self.begin(
            *(head, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={head.address}"),
            *("--secure-port=6443", f"--service-cluster-ip-range={SERVICES}", "--authorization-mode=RBAC"),
            *("--allow-privileged=true", f"--token-auth-file={pki}/tokens.csv", f"--client-ca-file={pki}/ca.pem"),
            *(f"--tls-cert-file={pki}/mesh.pem", f"--tls-private-key-file={pki}/mesh.key"),
            *(f"--service-account-key-file={pki}/account.key", f"--service-account-signing-key-file={pki}/account.key"),
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        )

    def _start_controllers(self) -> None:
        pki, head, configured = "/files/pki", self.head, "--kubeconfig=/files/kubeconfig"
        self.begin(
            *(head, "kube-controller-manager", configured, "--leader-elect=false", f"--root-ca-file={pki}/ca.pem"),
            *(f"--service-account-private-key-file={pki}/account.key", "--node-monitor-period=2s"),
            f"--node-monitor-grace-period={GRACE_S}s",
        )
        self.begin(head, "kube-scheduler", configured, "--leader-elect=false")
        self._naming.start()

    def start_node(self, node: Node) -> None:
        """Start what makes a machine a node of the cluster."""
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
        outside = ("POSTROUTING", "-s", "10.244.0.0/16", "!", "-d", "10.0.0.0/8", "-j", "MASQUERADE")
        node.run("iptables", "-t", "nat", "-A", *outside)
        for other in self.nodes:
            if other is not node:
                node.run("ip", "route", "replace", f"{pods_of(other)}.0/24", "via", other.address)
        node.run("sh", "-c", "cat > /etc/kubelet.json", given=json.dumps(self._kubelet()))
        self.begin(
            *(node, "kubelet", "--config=/etc/kubelet.json", "--kubeconfig=/files/kubeconfig"),
            *(f"--hostname-override={node.name}", f"--node-ip={node.address}"),
            f"--node-labels={','.join(self._labels[node.number])}",
        )
        self.begin(
            *(node, "kube-proxy", "--kubeconfig=/files/kubeconfig", f"--hostname-override={node.name}"),
            *("--proxy-mode=iptables", "--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0"),
            *("--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"),
        )

    def _kubelet(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [self.head.address],
            "clusterDomain": DOMAIN,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "evictionHard": {"memory.available": "1Mi"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",
            "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
        }

    def begin(self, node: Node, program: str, *flags: str) -> None:
        node.start(f"{self._binaries}/{program}", *flags, log=f"/run/{program}.log")

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = 300.0) -> str:
        command = (f"{self._binaries}/kubectl", f"--kubeconfig={self._folder / 'kubeconfig'}", *arguments)
        return run(*command, given=given, limit_s=limit_s)

    def helm(self, *arguments: str, limit_s: float = 300.0) -> str:
        return run("helm", f"--kubeconfig={self._folder / 'kubeconfig'}", *arguments, limit_s=limit_s)

    def get(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind. The API server is asked straight: to start a kubectl takes a good part of a core."""
        group = "api/v1" if kind in ("nodes", "pods", "services") else "apis/apps/v1"
        path = f"/{group}/nodes" if kind == "nodes" else f"/{group}/namespaces/default/{kind}"
        try:
            items: list[dict[str, Any]] = self._api.get(path).raise_for_status().json()["items"]
        except httpx.HTTPError as error:
            raise ClusterError(f"{kind}: {error!r}") from error
        return items

    def is_ready(self, node: Node) -> bool:
        """Whether the cluster has heard of a node lately."""
        return any(
            each["metadata"]["name"] == node.name and condition["status"] == "True"
            for each in self.get("nodes")
            for condition in each["status"]["conditions"]
            if condition["type"] == "Ready"
        )

    # --- names ---

    def _name_forever(self) -> None:
        """Keep the names of pods and services up to date, until closed."""
        said = ""
        self.head.run("touch", "/run/names")
        self.head.start(
            *("dnsmasq", "--keep-in-foreground", "--no-hosts", "--user=root", "--pid-file=/run/dns.pid"),
            *("--addn-hosts=/run/names", f"--local=/{DOMAIN}/", "--bind-interfaces"),
            f"--listen-address={self.head.address}",
            log="/run/dnsmasq.log",
        )
        while not self._closing.wait(0.5):
            with suppress(ClusterError):
                if (names := self._names()) != said:
                    self.head.run("sh", "-c", "cat > /run/names && kill -HUP $(cat /run/dns.pid)", given=names)
                    said = names

    def _names(self) -> str:
        def full(*parts: str) -> str:
            return ".".join((*parts, "default.svc", DOMAIN))

        lines: list[str] = []
        pods = [each for each in self.get("pods") if each["status"].get("podIP")]
        for pod in pods:
            if "subdomain" in pod["spec"]:
                lines.append(f"{pod['status']['podIP']} {full(pod['metadata']['name'], pod['spec']['subdomain'])}")
        for service in self.get("services"):
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
