"""Files for Docker and other engines: they name settings that exist, and are valid.

The chart is tested by `test_deploy_chart`.
"""

from __future__ import annotations

import json
import os
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

import msgspec.yaml
import pytest

from pdmesh.config import MeshConfig
from pdmesh.config_sources import COMPOSE_VARIABLES, CONFIG_FILE_VARIABLE, load_config
from pdmesh.settings import settings_of

pytestmark = pytest.mark.anyio

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
STACK = DEPLOY / "swarm/stack.yaml"
STACK_GPU = DEPLOY / "swarm/stack.gpu.yaml"
COMPOSE = DEPLOY / "compose/compose.yaml"
COMPOSE_GPU = DEPLOY / "compose/compose.gpu.yaml"
COMPOSE_HOST = DEPLOY / "compose/compose.host.yaml"
ETCD_IMAGE = "pdmesh-etcd"  # of Dockerfile.etcd beside it

#: Services of compose whose containers are instances.
WORKERS = ["prefill", "decode", "mixed"]


def variables_in(text: str) -> set[str]:
    """Variables of ours that a manifest sets."""
    return set(re.findall(r"PDMESH_[A-Z0-9_]*[A-Z0-9]", text)) - {CONFIG_FILE_VARIABLE}


@pytest.mark.parametrize(
    "file",
    [
        *sorted(CHART.rglob("*.*")),
        *(STACK, STACK_GPU, COMPOSE, COMPOSE_GPU, COMPOSE_HOST),
        *sorted(DEPLOY.glob("s[yl]*/pdmesh*")),
    ],
    ids=lambda f: f.name,
)
def test_every_variable_is_a_setting(file: Path) -> None:
    known = {f"PDMESH_{setting.name.replace('.', '_').upper()}" for setting in settings_of(MeshConfig)}
    assert variables_in(file.read_text()) <= known | COMPOSE_VARIABLES


def read_by_docker(*files: Path) -> dict[str, Any]:
    """The services of a stack, as Docker reads and merges its files."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    command = ["docker", "stack", "config", *(part for file in files for part in ("-c", str(file)))]
    environ = {"PATH": os.environ["PATH"], "HF_TOKEN": "hf_x"}
    read = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert read.returncode == 0, read.stderr
    assert "unsupported" not in read.stderr.lower()
    services: dict[str, Any] = msgspec.yaml.decode(read.stdout)["services"]
    return services


def test_the_stack_is_what_docker_reads() -> None:
    services = read_by_docker(STACK)
    for name in ("gateway", "prefill", "decode"):
        assert services[name]["environment"]["HF_TOKEN"] == "hf_x"
        targets = {each["target"] for each in services[name]["volumes"]}
        assert targets == {"/models", "/home/pdmesh/huggingface"}, "a node downloads a hub model once"
    assert "HF_TOKEN" not in services["scheduler"]["environment"]


def test_swarm_gives_each_worker_a_gpu_of_its_own() -> None:
    services = read_by_docker(STACK, STACK_GPU)
    for name in ("prefill", "decode"):
        (resource,) = services[name]["deploy"]["resources"]["reservations"]["generic_resources"]
        assert resource == {"discrete_resource_spec": {"kind": "GPU", "value": 1}}
        assert services[name]["environment"]["PDMESH_WORKER_DEVICE"] == "cuda"
        assert services[name]["environment"]["PDMESH_WORKER_INSTANCE_ID"], "that of the stack is still there"
        assert services[name]["deploy"]["update_config"]["order"] == "stop-first"
    assert services["gateway"]["image"] == "pdmesh"


class Container:
    """The start of a worker's container: its entrypoint with a Python that prints what it was given, and waits."""

    def __init__(self, folder: Path, gpus: str = "", devices: str = "") -> None:
        worker = services_of(COMPOSE)["decode"]
        shell, option, script = worker["entrypoint"]
        script = script.replace("$$", "$").replace("/numbers", str(folder)).replace("/tmp/ready.json", "/dev/null")
        script = script.replace("/proc/net/route", str(folder / "route"))
        python = folder / "bin/python"
        python.parent.mkdir(exist_ok=True)
        given = "$PDMESH_WORKER_INSTANCE_ID $CUDA_VISIBLE_DEVICES$PDMESH_TRANSFER_UCX_NET_DEVICES"
        python.write_text(f'#!/bin/sh\necho "$* {given}"\nexec cat\n')
        python.chmod(0o755)
        environ = {"PATH": f"{python.parent}:{os.environ['PATH']}", "GPUS": gpus}
        environ["PDMESH_TRANSFER_UCX_NET_DEVICES"] = devices
        pipe = subprocess.PIPE
        command = [shell, option, script, *worker["command"]]
        self._process = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stdout is not None
        self.printed = self._process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """End it, and return its exit code and what it complained about."""
        _, complaint = self._process.communicate(timeout=10)
        return self._process.returncode, complaint


def test_each_container_of_a_service_has_a_name_and_a_gpu_of_its_own(tmp_path: Path) -> None:
    first, second = Container(tmp_path, "3 4,5"), Container(tmp_path, "3 4,5")
    assert first.printed == "-m pdmesh_decode decode-0 3"
    assert second.printed == "-m pdmesh_decode decode-1 4,5"
    code, complaint = Container(tmp_path, "3 4,5").end()
    assert code == 1
    assert "decode-2 has no GPU: name one for each container" in complaint
    assert first.end() == (0, "")
    again = Container(tmp_path, "3 4,5")
    assert again.printed == "-m pdmesh_decode decode-0 3", "the number of the one that ended"
    assert (again.end()[0], second.end()[0]) == (0, 0)
    without = Container(tmp_path)
    assert without.printed == "-m pdmesh_decode decode-0"
    assert without.end() == (0, "")


@pytest.mark.parametrize("own", ["eth0", "eth1"])
def test_a_container_moves_kv_over_the_network_that_leads_nowhere_else(own: str, tmp_path: Path) -> None:
    other = {"eth0": "eth1", "eth1": "eth0"}[own]
    routes = [("Iface", "Destination"), (other, "00000000"), (other, "00021EAC"), (own, "00011EAC")]
    (tmp_path / "route").write_text("".join(f"{device}\t{destination}\t0\n" for device, destination in routes))
    for devices, found in (("kv", own), ("mlx5_0:1", "mlx5_0:1")):
        container = Container(tmp_path, devices=devices)
        assert container.printed == f"-m pdmesh_decode decode-0 {found}"
        assert container.end() == (0, "")


def test_compose_gives_workers_their_gpus_by_name() -> None:
    services = services_of(COMPOSE_GPU)
    for name in WORKERS:
        assert f"PDMESH_{name.upper()}_GPU" in services[name]["environment"]["GPUS"]
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["count"] == "all"
        assert "entrypoint" not in services[name], "that of compose.yaml chooses"


def test_prometheus_of_compose_scrapes_each_service_where_it_listens() -> None:
    services = services_of(COMPOSE)
    configs = msgspec.yaml.decode(COMPOSE.read_text())["configs"]
    jobs = {each["job_name"]: each for each in msgspec.yaml.decode(configs["prometheus"]["content"])["scrape_configs"]}
    for name, setting in (("gateway", "PDMESH_GATEWAY_PORT"), ("scheduler", "PDMESH_SCHEDULER_METRICS_PORT")):
        assert jobs[name]["static_configs"] == [{"targets": [f"{name}:{services[name]['environment'][setting]}"]}]
    (found,) = jobs["workers"]["dns_sd_configs"]
    assert found["names"] == WORKERS
    for name in WORKERS:
        assert services[name]["environment"]["PDMESH_WORKER_METRICS_PORT"] == str(found["port"])
        assert "default" in services[name]["networks"], "the one that Prometheus is on"
    for name in ("scheduler", *WORKERS):
        assert services[name]["environment"]["PDMESH_TELEMETRY_METRICS_HOST"] == "0.0.0.0"
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        assert all(each["source"] in configs for each in services[name]["configs"])
    (folder,) = services["grafana"]["volumes"]
    assert (COMPOSE.parent / folder.split(":")[0] / "pdmesh.json").is_file()
    provider = msgspec.yaml.decode(configs["grafana-dashboards"]["content"])["providers"][0]
    assert provider["options"]["path"] == folder.split(":")[1]


def settings_in(service: dict[str, Any]) -> MeshConfig:
    """The settings of a compose service, where nothing is set in the environment of compose."""
    environ = {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in service["environment"].items()}
    return load_config(None, environ, {})


def test_workers_of_compose_share_nothing_but_two_networks_and_move_kv_over_ucx() -> None:
    services = services_of(COMPOSE)
    for name in WORKERS:
        worker = services[name]
        assert not {"network_mode", "ipc", "pid"} & worker.keys()
        assert worker["networks"] == {"kv": None, "default": None}
        transfer = settings_in(worker).transfer
        assert transfer.ucx_net_devices == "kv", "the entrypoint finds the device"
        assert (transfer.ucx_tls, transfer.trusted_network) == (None, True)
    assert services["mixed"]["scale"] == 0
    assert settings_in(services["mixed"]).worker.role == "mixed"
    on_kv = {name for name, service in services.items() if "kv" in service.get("networks", {})}
    assert on_kv == set(WORKERS), "UCX trusts all that reach it"
    networks = msgspec.yaml.decode(COMPOSE.read_text())["networks"]
    assert networks["kv"]["internal"]


def test_compose_keeps_what_operators_set_in_a_volume_that_the_scheduler_may_write() -> None:
    scheduler = services_of(COMPOSE)["scheduler"]
    file = settings_in(scheduler).scheduler.operations_file
    assert file is not None
    assert scheduler["volumes"] == [f"state:{file.parent}"]
    for image in ("Dockerfile", "Dockerfile.gpu"):
        text = (COMPOSE.parent / image).read_text()
        assert "WORKDIR /home/pdmesh\n" in text
        assert re.search(rf"^RUN mkdir .*\b{file.parent.name}\b", text, re.MULTILINE), "a volume takes its owner"


def test_compose_publishes_http_grpc_and_the_scheduler_on_loopback_alone() -> None:
    services = services_of(COMPOSE)
    published = [port for name in services for port in services[name].get("ports", ())]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)
    gateway = services["gateway"]
    grpc_port = settings_in(gateway).gateway.grpc_port
    assert any(port.endswith(f":{grpc_port}") for port in gateway["ports"])


def test_compose_of_one_host_has_workers_in_the_namespaces_of_one_container() -> None:
    services = services_of(COMPOSE_HOST)
    for name in WORKERS:
        worker = services[name]
        assert {worker[key] for key in ("network_mode", "ipc", "pid")} == {"service:host"}
        assert settings_in(worker).transfer.ucx_net_devices == ""


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
    text = file.read_text().replace("!reset ", "")
    services: dict[str, Any] = msgspec.yaml.decode(text)["services"]
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
