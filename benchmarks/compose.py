"""The mesh of ``deploy/compose`` on this machine's Docker engine: what its network carries, and operators at work.

    docker build -f deploy/compose/Dockerfile -t pdmesh .
    python benchmarks/compose.py                    # add --host for the variant of compose.host.yaml

IMAGE in the environment names another image.

* Bytes on the network `kv` over bytes of KV that the mesh moved, for prompts of 2,000 tokens of a model of 82M.
* An answer to a gRPC client on this machine, and a change asked for from here with an operator's token.
* Time to the first token and tokens a second of 24 requests, eight at a time.
* Streams that go on while an operator scales, drains, restarts and replaces containers: how many are lost, or differ
  from undisturbed ones, and whether what the operator set is still set.

``mesh_overhead.py --compose`` measures how much of a transfer is not hidden behind compute. Exit code 1 if a limit is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openai
from cluster_nodes import Cluster, ClusterError, Event, run, until
from engines import run as run_events
from report import Limits, heading, quantile, unavailable

from pdmesh.wire.messages import MeshStatus, RequestRecord
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.load import Stream, follow, requests_of
from pdmesh_testing.standby import free_port

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/compose"
PROJECT = "pdmesh-bench"
IMAGE = os.environ.get("IMAGE", "pdmesh")
OPERATOR_TOKEN = secrets.token_hex(16)
WORKERS = ("prefill", "decode")

#: Of what is asked for bytes, and for times.
NUM_LONG, LONG_TOKENS = 5, 2000
NUM_TIMED, TIMED_AT_ONCE, TIMED_TOKENS, TIMED_OUTPUT = 24, 8, 500, 64


@dataclass(frozen=True, slots=True)
class ComposeMesh:
    """A running project of compose."""

    model: str
    base_url: str
    grpc_address: str
    scheduler: str  # its address on this machine
    environ: tuple[str, ...]  # `env` with the variables of `docker compose`

    def compose(self, *arguments: str) -> str:
        """Run `docker compose`, and return what it printed. Raises ClusterError."""
        return run(*self.environ, "docker", "compose", *arguments)

    def pdmesh(self, *arguments: str) -> str:
        """Run `pdmesh` in the scheduler's container, and return what it printed. Raises ClusterError."""
        return self.compose("exec", "-T", "scheduler", "pdmesh", *arguments)

    def up(self, **scale: int) -> None:
        """Start what is missing, and wait until it is healthy."""
        sizes = [part for name, size in scale.items() for part in ("--scale", f"{name}={size}")]
        self.compose("up", "--detach", "--no-recreate", "--wait", *sizes)

    def status(self) -> MeshStatus:
        return msgspec.convert(json.loads(self.pdmesh("status", "-o", "json"))["state"], MeshStatus)

    def serving(self, role: str) -> list[str]:
        """Return the names of a role's instances that take requests."""
        rows = self.status().instances
        return [row.instance_id for row in rows if row.role == role and row.reachable and not row.draining]

    def request_record(self, request_id: str) -> RequestRecord:
        return msgspec.json.decode(self.pdmesh("requests", "show", request_id, "-o", "json"), type=RequestRecord)

    def device_bytes(self) -> int:
        """Return the bytes that the workers' devices on the network `kv` have sent."""
        address = f'{{{{(index .NetworkSettings.Networks "{PROJECT}_kv").MacAddress}}}}'
        read = "cat $(dirname $(grep -lx $0 /sys/class/net/*/address))/statistics/tx_bytes"
        num_bytes = 0
        for container in self._workers():
            own = run("docker", "inspect", "--format", address, container).strip()
            num_bytes += int(run("docker", "exec", container, "sh", "-c", read, own))
        return num_bytes

    def kv_bytes(self) -> int:
        """Return the bytes of KV that the workers have counted as sent."""
        code = (
            "import json, urllib.request; port = json.load(open('/tmp/ready.json'))['metrics_port'];"
            "print(urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics').read().decode())"
        )
        pages = [run("docker", "exec", each, "python", "-c", code) for each in self._workers()]
        found = [re.search(r'^pdmesh:kv_transfer_bytes_total\{direction="out"\} (\S+)', page, re.M) for page in pages]
        return sum(round(float(each[1])) for each in found if each is not None)

    def _workers(self) -> list[str]:
        return self.compose("ps", "-q", *WORKERS).split()


@contextmanager
def running_compose(folder: Path, model: Path | None, *, host: bool, dtype: str) -> Generator[ComposeMesh]:
    """Start the mesh with one prefill and one decode instance; nothing of it is left after the block.

    ``model`` is a checkpoint in ``folder``; None: the demo model.
    """
    folder.chmod(0o755)
    override = folder / "override.json"
    settings = {name: {"PDMESH_WORKER_DTYPE": dtype} for name in WORKERS}
    settings |= {"scheduler": {"PDMESH_SECURITY_OPERATOR_TOKEN": OPERATOR_TOKEN}, "gateway": {}}
    settings |= {"host": {}} if host else {}
    services = {name: {"image": IMAGE, "environment": each} for name, each in settings.items()}
    override.write_text(json.dumps({"services": services}))
    files = [FOLDER / "compose.yaml", *([FOLDER / "compose.host.yaml"] if host else []), override]
    port, grpc_port, scheduler_port = free_port(), free_port(), free_port()
    variables = {
        "PDMESH_PORT": str(port),
        "PDMESH_GRPC_PORT": str(grpc_port),
        "PDMESH_OPERATOR_PORT": str(scheduler_port),
        "COMPOSE_FILE": ":".join(map(str, files)),
        "COMPOSE_PROJECT_NAME": PROJECT,
        "PDMESH_MODELS": str(folder),
        **({} if model is None else {"PDMESH_MODEL": f"/models/{model.name}"}),
    }
    mesh = ComposeMesh(
        model="pdmesh-demo" if model is None else model.name,
        base_url=f"http://127.0.0.1:{port}",
        grpc_address=f"127.0.0.1:{grpc_port}",
        scheduler=f"127.0.0.1:{scheduler_port}",
        environ=("env", *(f"{name}={value}" for name, value in variables.items())),
    )
    mesh.compose("down", "--volumes", "--timeout", "10")  # what an interrupted run has left
    try:
        mesh.up()
        yield mesh
    finally:
        mesh.compose("down", "--volumes", "--timeout", "10")


def why_no_compose() -> str | None:
    """Say why compose cannot run here; None if it can."""
    try:
        run("docker", "compose", "version", limit_s=20)
        run("docker", "image", "inspect", IMAGE, limit_s=20)
    except (ClusterError, OSError) as error:
        return str(error).splitlines()[0][:200]
    return None


async def ask_all(
    mesh: ComposeMesh, number: int, num_tokens: int, max_tokens: int, at_once: int
) -> tuple[list[Stream], float]:
    """Return the streams of ``number`` unlike greedy requests, and how long all of them took in seconds."""
    lengths = [num_tokens + index % 7 for index in range(2 * number)]
    requests = requests_of(num_tokens + number, lengths, max_tokens)[::2]
    waiting, streams = list(requests), list[Stream]()
    began_s = time.monotonic()
    async with openai.AsyncOpenAI(base_url=f"{mesh.base_url}/v1", api_key="none", timeout=600) as client:

        async def keep_asking() -> None:
            while waiting:
                streams.append(await follow(client, mesh.model, Stream(waiting.pop(), time.monotonic())))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(keep_asking())
    errors = [each.error for each in streams if each.error is not None]
    if errors:
        raise ClusterError(f"{len(errors)} requests failed: {errors[0]}")
    return streams, time.monotonic() - began_s


def measure(mesh: ComposeMesh, limits: Limits, *, over_ucx: bool) -> None:
    """Print what the KV devices carried, and the times of some requests."""
    asyncio.run(ask_all(mesh, 1, LONG_TOKENS, 4, 1))
    if over_ucx:
        on_device, moved = mesh.device_bytes(), mesh.kv_bytes()
        asyncio.run(ask_all(mesh, NUM_LONG, LONG_TOKENS, 4, 1))
        on_device, moved = mesh.device_bytes() - on_device, mesh.kv_bytes() - moved
        judged = limits.at_least("bytes on the network kv", on_device / moved, 1.0)
        print(f"{moved / 1e6:.1f} MB of KV moved, {on_device / 1e6:.1f} MB on the network kv ({judged} of 1.0 x)")
    newest = json.loads(mesh.pdmesh("requests", "list", "-o", "json"))["requests"][0]["request_id"]
    sent = [entry.detail for entry in mesh.request_record(newest).entries if entry.what == "sent"]
    print(f"requests show: sent {'; '.join(sent)}")
    streams, took_s = asyncio.run(ask_all(mesh, NUM_TIMED, TIMED_TOKENS, TIMED_OUTPUT, TIMED_AT_ONCE))
    first_ms = [1e3 * (each.token_times_s[0] - each.began_s) for each in streams]
    num_tokens = sum(len(each.token_ids) for each in streams)
    print(
        f"{NUM_TIMED} requests of {TIMED_TOKENS} tokens, {TIMED_AT_ONCE} at once: TTFT p50 "
        f"{quantile(first_ms, 0.5):.0f}, p99 {quantile(first_ms, 0.99):.0f} ms; {num_tokens / took_s:.1f} tokens/s",
        flush=True,
    )


def try_clients(mesh: ComposeMesh) -> None:
    """Ask by gRPC, and change the mesh with an operator's token, both from this machine. Raises ClusterError."""
    answer = run(sys.executable, str(ROOT / "examples/grpc_client.py"), mesh.grpc_address, "Once upon a time")
    print(f"a gRPC client on this machine: {answer.strip().splitlines()[-1]}")
    pdmesh = (sys.executable, "-m", "pdmesh.cli", "policy", "set", "fcfs", "--scheduler", mesh.scheduler)
    try:
        run(*pdmesh)
    except ClusterError as error:
        print(f"without a token: {str(error).splitlines()[-1][-160:]}")
    else:
        raise ClusterError("a change from this machine was taken without a token")
    run("env", f"PDMESH_SECURITY_OPERATOR_TOKEN={OPERATOR_TOKEN}", *pdmesh)
    print("with the operator's token: policy set fcfs: done", flush=True)
    mesh.pdmesh("policy", "set", "pdmesh")


class Operator:
    """What an operator does with `docker compose`. Each step returns once it is done."""

    def __init__(self, mesh: ComposeMesh) -> None:
        self._mesh = mesh
        self._closing = ExitStack()

    def start_actuator(self) -> None:
        """Start what makes and removes containers from now on, on this machine."""
        command = (sys.executable, "-m", "pdmesh.cli", "actuator", "--compose", "--scheduler", self._mesh.scheduler)
        actuator = subprocess.Popen([*self._mesh.environ, *command])
        self._closing.callback(actuator.wait)
        self._closing.callback(actuator.terminate)

    def ask(self, *arguments: str) -> None:
        """Run `pdmesh` in the scheduler's container."""
        self._mesh.pdmesh(*arguments)

    def close(self) -> None:
        """End the actuator."""
        self._closing.close()

    def resize(self, decode: int) -> None:
        self._mesh.pdmesh("pool", "resize", "--decode", str(decode))
        until(f"{decode} decode instances", lambda: len(self._mesh.serving("decode")) == decode)

    def scale(self, decode: int) -> None:
        self._mesh.up(decode=decode)
        until(f"{decode} decode instances", lambda: len(self._mesh.serving("decode")) == decode)

    def replace_scheduler(self) -> None:
        """Replace the scheduler's container, and check that it goes on with what was set."""
        mesh = self._mesh
        mesh.pdmesh("policy", "set", "fcfs")
        mesh.pdmesh("drain", "decode-2")
        before = mesh.compose("ps", "-q", "scheduler")
        mesh.compose("up", "--detach", "--no-deps", "--force-recreate", "--wait", "scheduler")
        if mesh.compose("ps", "-q", "scheduler") == before:
            raise ClusterError("the scheduler's container was not replaced")
        until("all instances are back", lambda: sum(row.reachable for row in mesh.status().instances) == 4)
        status = mesh.status()
        drained = [row.instance_id for row in status.instances if row.draining]
        if (status.bundle, drained) != ("fcfs", ["decode-2"]):
            raise ClusterError(f"fcfs was set and decode-2 drained; the next scheduler has {status.bundle}, {drained}")
        mesh.pdmesh("undrain", "decode-2")
        mesh.pdmesh("policy", "set", "pdmesh")

    def kill(self, service: str) -> None:
        """Kill a container's process; the engine starts the container again."""
        container = self._mesh.compose("ps", "-q", service).split()[0]
        pid = self._pid(container)
        os.kill(int(pid), 9)
        until("the container runs again", lambda: self._pid(container) not in ("0", pid))
        until("an instance serves", lambda: len(self._mesh.serving(service)) > 0)

    def events(self) -> list[Event]:
        return [
            Event("scale decode 1 -> 3", lambda: self.scale(3)),
            Event("drain decode-0", lambda: self.ask("drain", "decode-0")),
            Event("undrain decode-0", lambda: self.ask("undrain", "decode-0")),
            Event("restart decode-1", lambda: self.ask("restart", "decode-1")),
            Event("rolling restart", lambda: self.ask("restart", "--rolling", "--force")),
            Event("scheduler's container replaced", self.replace_scheduler),
            Event("scale decode 3 -> 1", lambda: self.scale(1)),
            Event("the only decode container killed", lambda: self.kill("decode")),
            Event("actuator started", self.start_actuator),
            Event("pool resize --decode 2", lambda: self.resize(2)),
            Event("rolling restart by the actuator", lambda: self.ask("restart", "--rolling")),
            Event("pool resize --decode 1", lambda: self.resize(1)),
        ]

    def _pid(self, container: str) -> str:
        return run("docker", "inspect", "--format", "{{.State.Pid}}", container).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="the variant of compose.host.yaml")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--only", default="", help="events whose name this regular expression finds")
    parser.add_argument("--skip", choices=("measure", "events"), help="a half that is left out")
    options, limits = parser.parse_args(), Limits()
    if (why_not := why_no_compose()) is not None:
        unavailable(why_not)
    print(heading(f"a mesh of docker compose, KV over {'memory' if options.host else 'UCX'}"), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.skip != "measure":
            model = write_checkpoint(folder / "llama-82m", shape=LLAMA_82M, dtype="bfloat16")
            with running_compose(folder, model, host=options.host, dtype="bfloat16") as mesh:
                measure(mesh, limits, over_ucx=not options.host)
        if options.skip != "events":
            with running_compose(folder, None, host=options.host, dtype="float32") as mesh:
                try_clients(mesh)
                operator = Operator(mesh)
                events = [each for each in operator.events() if re.search(options.only, each.name)]
                cluster = Cluster(mesh.base_url, None, "none", events, lambda: mesh.compose("logs"))
                with closing(operator):
                    num_bad = asyncio.run(run_events(cluster, events, options.streams, options.tokens))
                print(f"lost, different or failed: {num_bad} ({limits.at_most('lost or different', num_bad, 0)})")
    limits.end()


if __name__ == "__main__":
    main()
