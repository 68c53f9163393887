"""A real mesh of real processes for end-to-end tests and benchmarks, started the way a user starts one."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx
import msgspec

from pdmesh.cli.processes import ending_with_us
from pdmesh.cli.state_folder import MeshRecord
from pdmesh.config import SecurityConfig
from pdmesh.model import Role
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetStatus, MeshStatus, RequestRecord

#: Settings of a mesh without a model for tests that are not about numbers: instances start without torch, a decode step
#: takes 5 ms, and a token follows from the last one and its position.
STAND_IN: Mapping[str, str] = {
    "WORKER_ENGINE": "fake",
    "WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.005",
}

#: Settings for tests that count restarted requests. On a busy machine an instance is soon suspected, and requests that
#: it has not begun start again elsewhere. Registering with another scheduler takes longer there, too.
PATIENT: Mapping[str, str] = {"SCHEDULER_SUSPECT_S": "4.0", "SCHEDULER_ORPHAN_GRACE_S": "20.0"}

#: Degrees of prefill and of decode, tensor x stages, that the exactness of ranks is shown for.
LAYOUTS = tuple(
    f"{tensor}x{stages}-{decode}x1"
    for decode, stages, tensor in product((1, 2), (1, 2), (1, 2, 4))
    if (tensor, stages, decode) != (1, 1, 1)
)

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 300.0


class _Status(msgspec.Struct):
    state: MeshStatus


def layout_settings(layout: str) -> dict[str, str]:
    """Return the settings of a mesh whose prefill and decode instances have such degrees, as one of `LAYOUTS`."""
    return {
        f"{pool}_{setting}_PARALLEL_SIZE": size
        for pool, degrees in zip(("PREFILL", "DECODE"), layout.split("-"), strict=True)
        for setting, size in zip(("TENSOR", "PIPELINE"), degrees.split("x"), strict=True)
    }


@dataclass(frozen=True, slots=True)
class RunningMesh:
    """A mesh started by `running_mesh`."""

    record: MeshRecord
    environ: Mapping[str, str]
    #: Folder of the mesh's logs.
    folder: Path

    @property
    def base_url(self) -> str:
        return f"http://{self.record.http_address}"

    @property
    def model(self) -> str:
        return self.record.model

    def client(self) -> httpx.AsyncClient:
        """Return a client without a limit of connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.base_url, limits=limits, timeout=600, trust_env=False)

    def pdmesh(self, *arguments: str) -> str:
        """Run ``pdmesh ARGUMENTS --name …``, and return stdout; CalledProcessError, with stderr, if it fails."""
        try:
            return subprocess.run(
                [sys.executable, "-m", "pdmesh.cli", *arguments, "--name", self.record.name],
                env=dict(self.environ),
                check=True,
                capture_output=True,
                text=True,
                timeout=STOP_TIMEOUT_S,
            ).stdout
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def status(self) -> MeshStatus:
        return msgspec.json.decode(self.pdmesh("status", "-o", "json"), type=_Status).state

    async def state(self) -> MeshStatus:
        """What `status` shows, without a command that has to start."""
        security = SecurityConfig(mesh_token=self.record.mesh_token)
        state = await ask_scheduler(self.record.scheduler_address, security, GetStatus())
        assert isinstance(state, MeshStatus)
        return state

    def wait_until_idle(self, limit_s: float = 10.0) -> None:
        """Ask until no request is left and every block of every instance is free. Raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        while True:
            state = self.status()
            held = {i.instance_id: i.num_blocks - i.num_free_blocks for i in state.instances}
            if state.num_running == state.num_waiting == 0 and not any(held.values()):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{state.num_waiting} wait, {state.num_running} run, blocks not free: {held}")

    def wait_until_replaced(self, name: str, pid: int, limit_s: float = 60.0) -> None:
        """Read the supervisor's record until the service is another process than ``pid``. Raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        while self.pids().get(name, pid) == pid:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{name} was not started again")
            time.sleep(0.05)

    def request_record(self, request_id: str) -> RequestRecord:
        return msgspec.json.decode(self.pdmesh("requests", "show", request_id, "-o", "json"), type=RequestRecord)

    def pids(self) -> dict[str, int]:
        """The services' processes now; the supervisor starts one that died again under another pid."""
        record = msgspec.json.decode((self.folder / "mesh.json").read_bytes(), type=MeshRecord)
        return {service.name: service.process.pid for service in record.services}

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each service so far, in user and system time."""
        spent: dict[str, float] = {}
        for name, pid in self.pids().items():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return spent

    def metrics(self) -> dict[str, str]:
        """Return the text of each service's ``/metrics``."""
        # As the supervisor has it now: a service that was started again has another port.
        record = msgspec.json.decode((self.folder / "mesh.json").read_bytes(), type=MeshRecord)
        urls = {
            service.name: f"http://127.0.0.1:{service.facts['metrics_port']}/metrics"
            for service in record.services
            if "metrics_port" in service.facts
        }
        urls["gateway"] = f"{self.base_url}/metrics"
        return {name: httpx.get(url, timeout=30).raise_for_status().text for name, url in urls.items()}

    def peer_read_bytes(self) -> float:
        """Return the bytes of KV that the instances copied from each other's caches."""
        return self.total("kv_peer_read_bytes")

    def num_accepted_tokens(self) -> float:
        """Return the number of drafted tokens that were drawn."""
        return self.total("spec_decode_num_accepted_tokens")

    def num_drafted_tokens(self) -> float:
        """Return the number of drafted tokens that were verified."""
        return self.total("spec_decode_num_draft_tokens")

    def total(self, counter: str) -> float:
        """Return the sum of a counter over all services, by its name without ``pdmesh:`` and ``_total``."""
        text = "\n".join(self.metrics().values())
        return sum(map(float, re.findall(rf"^pdmesh:{counter}(?:_total)? (\S+)$", text, re.M)))

    def event_loop_tasks(self) -> dict[str, int]:
        """Return the number of live tasks of each service."""
        found = {
            name: re.search(r"^pdmesh:event_loop_tasks (.+)$", text, re.M) for name, text in self.metrics().items()
        }
        return {name: int(float(match[1])) for name, match in found.items() if match is not None}

    def logs(self) -> str:
        """Return the logs of all services, for a failing test's message."""
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))


@contextmanager
def running_mesh(
    folder: Path,
    *,
    model: Path | None,
    prefill: int = 1,
    decode: int = 1,
    mixed: int = 0,
    gateways: int = 1,
    settings: Mapping[str, str] | None = None,
) -> Generator[RunningMesh]:
    """Start ``pdmesh up`` with its state under ``folder`` and stop it at the end.

    A process that is killed within the block takes its mesh along: the kernel ends the supervisor when the thread that
    started it ends, and the services with the supervisor. ``settings`` are environment names without their prefix, as
    ``{"POLICY_CHUNK_TOKENS": "7"}``.
    """
    environ = {
        **os.environ,
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PDMESH_GATEWAY_PORT": "0",
        **{f"PDMESH_{key}": value for key, value in (settings or {}).items()},
    }
    name = "test"
    pools = ["--prefill", str(prefill), "--decode", str(decode), "--mixed", str(mixed), "--gateways", str(gateways)]
    arguments = ["up", "--name", name, *pools, *(["--model", str(model)] if model is not None else [])]
    command = [sys.executable, "-m", "pdmesh.cli"]
    state = folder / "state" / "pdmesh" / name
    state.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    with (state / "supervisor.log").open("wb") as log, open(read_fd, "rb") as ready:
        supervisor = subprocess.Popen(
            ending_with_us([*command, *arguments]),
            env={**environ, "PDMESH_READY_FD": str(write_fd)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(write_fd,),
        )
        os.close(write_fd)
        try:
            has_news = bool(select.select([ready], [], [], START_TIMEOUT_S)[0])
            last = next((line for line in ready if b'"said"' not in line), b"") if has_news else b""
            if b'"pid"' not in last:
                supervisor.terminate()
                supervisor.wait(STOP_TIMEOUT_S)
                logs = "\n".join(file.read_text() for file in sorted(state.glob("*.log")))
                raise RuntimeError(f"pdmesh up exited with {supervisor.returncode}:\n{logs}")
            record = msgspec.json.decode((state / "mesh.json").read_bytes(), type=MeshRecord)
            yield RunningMesh(record, environ, state)
        finally:
            if supervisor.poll() is None:
                supervisor.terminate()
                supervisor.wait(STOP_TIMEOUT_S)


@contextmanager
def another_worker(
    mesh: RunningMesh, model: Path, role: Role, instance_id: str, settings: Mapping[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    """Start one more instance in a mesh of `running_mesh`, with its own ``settings``, and kill it at the end.

    Raises TimeoutError, with the logs, if the instance ends or does not register in time.
    """
    environ = {
        **mesh.environ,
        "PDMESH_MODEL": str(model),
        "PDMESH_SCHEDULER_ADDRESS": mesh.record.scheduler_address,
        "PDMESH_SECURITY_MESH_TOKEN": mesh.record.mesh_token,
        "PDMESH_WORKER_INSTANCE_ID": instance_id,
        "PDMESH_WORKER_NUM_THREADS": "1",
        **{f"PDMESH_{key}": value for key, value in settings.items()},
    }
    package = "pdmesh_prefill" if role is Role.PREFILL else "pdmesh_decode"
    with (mesh.folder / f"{instance_id}.log").open("wb") as log:
        command = ending_with_us([sys.executable, "-m", package])
        worker = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not any(row.instance_id == instance_id for row in mesh.status().instances):
            if worker.poll() is not None or time.monotonic() > deadline_s:
                raise TimeoutError(f"{instance_id} did not register: {mesh.logs()}")
        yield worker
    finally:
        worker.kill()
        worker.wait()
