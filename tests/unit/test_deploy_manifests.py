"""What is deployed on several machines: manifests name settings that exist, and are valid to those who read them.

Helm and the schemas of Kubernetes come with ``tests/manifests.sh FOLDER``; where they are not on the path, what needs
them is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import msgspec.yaml
import pytest

from pdmesh.cli.kubernetes_actuator import KubernetesActuator
from pdmesh.config import MeshConfig
from pdmesh.config_sources import CONFIG_FILE_VARIABLE, load_config
from pdmesh.core.commands import DesiredProcesses
from pdmesh.model import InstanceId, PoolMember, Role
from pdmesh.settings import settings_of
from pdmesh.testing.kubernetes import NAMESPACE, FakeApiServer, FakeCluster, asking, rules_of
from pdmesh_scheduler.standby.kubernetes_store import KubernetesStore
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.store import StoreUnavailable

pytestmark = pytest.mark.anyio

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
STACK = DEPLOY / "swarm/stack.yaml"
COMPOSE = DEPLOY / "compose/compose.yaml"
ETCD_IMAGE = "pdmesh-etcd"  # of Dockerfile.etcd beside it

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
    (*TLS, "--set-string", "settings.POLICY_CHUNK_TOKENS=512,pools.decode.settings.WORKER_MAX_NUM_SEQS=8"),
]


def variables_in(text: str) -> set[str]:
    """Variables of ours that a manifest sets."""
    return set(re.findall(r"PDMESH_[A-Z0-9_]*[A-Z0-9]", text)) - {CONFIG_FILE_VARIABLE}


@pytest.mark.parametrize(
    "file",
    [*sorted(CHART.rglob("*.*")), STACK, COMPOSE, *sorted(DEPLOY.glob("s[yl]*/pdmesh*"))],
    ids=lambda f: f.name,
)
def test_every_variable_is_a_setting(file: Path) -> None:
    known = {f"PDMESH_{setting.name.replace('.', '_').upper()}" for setting in settings_of(MeshConfig)}
    compose = {"PDMESH_PORT", "PDMESH_MODELS", "PDMESH_TORCH"}
    assert variables_in(file.read_text()) <= known | compose


@pytest.fixture(scope="module")
def helm() -> str:
    found = shutil.which("helm")
    if found is None:
        pytest.skip("helm is not on the path (tests/manifests.sh puts it into a folder)")
    return found


def rendered(helm: str, *values: str) -> subprocess.CompletedProcess[str]:
    command = [helm, "template", "release", str(CHART), *values]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_the_chart_is_valid(helm: str, tmp_path: Path, values: tuple[str, ...]) -> None:
    linted = subprocess.run(
        [helm, "lint", "--strict", str(CHART), *values], capture_output=True, text=True, check=False, timeout=60
    )
    assert linted.returncode == 0, linted.stdout
    made = rendered(helm, *values)
    assert made.returncode == 0, made.stderr
    environ = dict(re.findall(r'name: (PDMESH_[A-Z_]+), value: "?([^"}]*)"?}', made.stdout))
    environ.pop(CONFIG_FILE_VARIABLE, None)
    load_config(None, environ, {})  # of all services together
    validate = shutil.which("kubernetes-validate")
    if validate is None:
        pytest.skip("kubernetes-validate is not on the path (tests/manifests.sh)")
    (tmp_path / "rendered.yaml").write_text(made.stdout)
    for version in VERSIONS:
        command = [validate, "--strict", "-k", version, str(tmp_path / "rendered.yaml")]
        checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_the_chart_does_not_render_a_mesh_that_anybody_can_enter(helm: str) -> None:
    made = rendered(helm)
    assert made.returncode
    assert "set tls.secretName" in made.stderr


def manifests_of(made: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert made.returncode == 0, made.stderr
    return [msgspec.yaml.decode(text) for text in re.split("^---$", made.stdout, flags=re.M) if "kind:" in text]


def pod_templates(made: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    templates = [each.get("spec", {}).get("template") for each in manifests_of(made)]
    return [template for template in templates if template is not None]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("values", "scheme"), [(TLS, "https"), (("--set", "trustedNetwork=true"), "http")])
def test_probes_and_scrapers_speak_as_the_services_do_and_find_those_that_hang(
    helm: str, values: tuple[str, ...], scheme: str
) -> None:
    found: list[str] = []
    for template in pod_templates(rendered(helm, *values)):
        (container,) = template["spec"]["containers"]
        found.append(container["name"])
        annotations, liveness = template["metadata"]["annotations"], container["livenessProbe"]["httpGet"]
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


@pytest.mark.slow
def test_no_process_of_a_pod_is_process_1(helm: str) -> None:
    assert all(each["spec"]["shareProcessNamespace"] for each in pod_templates(rendered(helm, *TLS)))


@pytest.mark.slow
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


def test_the_stack_is_what_docker_reads() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    command = ["docker", "stack", "config", "-c", str(STACK)]
    read = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert read.returncode == 0, read.stderr
    assert "unsupported" not in read.stderr.lower()


def test_the_stack_has_a_standby_and_an_etcd_that_outlives_a_node() -> None:
    services = services_of(STACK)
    scheduler = services["scheduler"]
    environ = {name: value for name, value in scheduler["environment"].items() if name != CONFIG_FILE_VARIABLE}
    standby = load_config(None, environ, {}).standby
    assert scheduler["deploy"]["replicas"] > 1
    assert scheduler["deploy"]["update_config"]["order"] == "start-first", "a standby is there before a leader ends"
    assert (standby.store, standby.address) == ("etcd", "{{.Task.Name}}:7000"), "a name of all would be any of them"
    members = {name: each for name, each in services.items() if each["image"] == ETCD_IMAGE}
    assert len(members) == 3
    assert standby.etcd_endpoints == ",".join(f"http://{name}:2379" for name in members)
    places, volumes = set[str](), set[str]()
    for name, member in members.items():
        settings, deploy = member["environment"], member["deploy"]
        assert settings["ETCD_NAME"] == name
        assert settings["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{name}:2379"
        assert settings["ETCD_INITIAL_CLUSTER"] == ",".join(f"{each}=http://{each}:2380" for each in members)
        assert settings["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"http://{name}:2380"
        assert "healthcheck" not in member, "its name would be known to the others only once it has found them"
        places.update(deploy["placement"]["constraints"])
        volumes.update(member["volumes"])
    assert (len(places), len(volumes)) == (3, 3), "a member comes back to its own volume"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_an_image_is_built_with_all_that_a_wheel_takes(name: str) -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    folder = DEPLOY / "compose"
    copied = re.findall(r"COPY (.*) /tmp/build/deploy/", (folder / name).read_text())
    scripts = copied[0].split()
    assert hook in scripts
    assert ("PDMESH_COMPILE_CORE" in (folder / name).read_text()) == ("deploy/compile_core.py" in scripts)
    run = re.findall(r"/src/(deploy/\w+\.py)", (folder / name).read_text())
    kept = set((folder / "Dockerfile.dockerignore").read_text().splitlines())
    assert {f"!{each}" for each in [*scripts, *run]} <= kept


def test_no_engine_ends_a_gateway_because_others_are_away() -> None:
    """Its streams go on without a scheduler, and a large model takes long to load: it is alive, though not ready."""
    check = services_of(STACK)["gateway"]["healthcheck"]["test"][-1]
    assert "8000" in check
    assert "'/live'" in check


def services_of(file: Path) -> dict[str, Any]:
    """The services of a file of Docker's."""
    services: dict[str, Any] = msgspec.yaml.decode(file.read_text())["services"]
    return services


@pytest.mark.parametrize("file", [STACK, COMPOSE], ids=lambda f: f.name)
def test_no_service_of_docker_is_process_1(file: Path) -> None:
    for name, service in services_of(file).items():
        assert service.get("init") or service.get("pid") == "service:host", name


class Answering(BaseHTTPRequestHandler):
    """Answers like a service: it lives, and is ready."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/live", "/ready") else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


CHECKED = [
    (file, name) for file in (STACK, COMPOSE) for name, service in services_of(file).items() if "healthcheck" in service
]


@pytest.mark.parametrize(("file", "name"), CHECKED, ids=lambda each: each if isinstance(each, str) else each.name)
def test_health_checks_find_those_that_hang(file: Path, name: str, tmp_path: Path) -> None:
    check = services_of(file)[name]["healthcheck"]
    _, _, *options, code = check["test"]
    ready, limit = tmp_path / "ready.json", re.search(r"timeout=(\d+)", code)
    assert limit is not None
    assert int(limit[1]) < int(check["timeout"].removesuffix("s")), "else it is ended before it says no"

    def exit_code(port: int, timeout: str = limit[0], facts: str | None = None) -> int:
        ready.write_text(json.dumps({"metrics_port": port}) if facts is None else facts)
        own = re.sub(r"'127.0.0.1', \d+", f"'127.0.0.1', {port}", code).replace("/tmp/ready.json", str(ready))
        own = own.replace(limit[0], timeout)
        return subprocess.run([sys.executable, *options, own], stderr=subprocess.DEVNULL, check=False).returncode

    with socket.create_server(("127.0.0.1", 0)) as hanging:
        assert exit_code(hanging.getsockname()[1], "timeout=0.2")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert exit_code(server.server_port) == 0
        if "ready.json" in code:
            assert exit_code(server.server_port, facts=""), "it has not registered yet"
        server.shutdown()
