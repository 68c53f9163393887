"""A mesh of processes on this machine with a leading and a standby scheduler, and the store that decides the leader.

The traffic between a scheduler and the store passes through a `Wire` that can be cut.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pdmesh.cli.processes import ending_with_us
from pdmesh.config import SecurityConfig
from pdmesh.errors import PdmeshError
from pdmesh.wire.admin import ask_one
from pdmesh.wire.endpoint import bind_socket
from pdmesh.wire.messages import GetStatus, MeshStatus

#: Long, since many processes start at once, and the machine may be busy.
START_LIMIT_S = 300.0
STOP_LIMIT_S = 30.0

#: Instances without a model, whose decode steps take 20 ms: streams last.
STAND_IN = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.02"}

#: Where etcd writes, if it can: what a disk takes for a write says nothing about schedulers.
MEMORY = Path("/dev/shm")

MESH_TOKEN = "token-of-two-schedulers"


def why_no_etcd() -> str | None:
    """Say why there can be no etcd on this machine; None if there can."""
    return None if shutil.which("etcd") else "etcd is not installed (Debian's package etcd-server)"


def free_port() -> int:
    """Return a free port of the loopback interface."""
    holder = bind_socket("127.0.0.1", 0, setting="a test's port")
    with holder:
        return int(holder.getsockname()[1])


def etcd_data_folder(folder: Path) -> str:
    """Make a folder for what an etcd keeps, in ``folder`` if not in memory, and return its path."""
    return tempfile.mkdtemp(prefix="etcd-", dir=MEMORY if MEMORY.is_dir() else folder)


def _spawned(
    command: Sequence[str], log: Path, *, environ: Mapping[str, str] | None = None, passed: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one."""
    with log.open("ab") as output:
        return subprocess.Popen(
            ending_with_us(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
        )


def etcd_command(host: str, client: int, peer: int, data: str, certificates: Path | None = None) -> list[str]:
    """Return what starts an etcd of one member, with ports of ``host`` for clients and for other members.

    With a folder of ``certificates`` (`make_certificates`) it speaks TLS, and to clients of that authority alone.
    """
    scheme = "http" if certificates is None else "https"
    options = {
        "--listen-client-urls": f"{scheme}://{host}:{client}",
        "--advertise-client-urls": f"{scheme}://{host}:{client}",
        "--listen-peer-urls": f"http://{host}:{peer}",
        "--initial-advertise-peer-urls": f"http://{host}:{peer}",
        "--initial-cluster": f"default=http://{host}:{peer}",
        "--data-dir": data,
    }
    if certificates is not None:
        options |= {
            "--cert-file": str(certificates / "mesh.pem"),
            "--key-file": str(certificates / "mesh.key"),
            "--trusted-ca-file": str(certificates / "ca.pem"),
            "--client-cert-auth": "true",
        }
    return ["etcd", *(f"{name}={value}" for name, value in options.items())]


@asynccontextmanager
async def running_etcd(folder: Path, certificates: Path | None = None) -> AsyncGenerator[int]:
    """Start an etcd of one member (`etcd_command`), and yield the port that its clients use."""
    client = free_port()
    data = await asyncio.to_thread(etcd_data_folder, folder)
    command = etcd_command("127.0.0.1", client, free_port(), data, certificates)
    process = _spawned(command, folder / "etcd.log")
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not await _listens(client):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.05)
        yield client
    finally:
        process.kill()
        process.wait()
        await asyncio.to_thread(shutil.rmtree, data)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


class Wire:
    """TCP forwarder. While it is cut, data is lost silently."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server
        self.port: int

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._hang_up()

    def cut(self) -> None:
        self._is_cut = True

    def heal(self) -> None:
        """Let bytes pass again, and close the connections from before and during the cut."""
        if self._is_cut:
            self._is_cut = False
            self._hang_up()

    def _hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(there_writer)
            await asyncio.gather(self._forward(reader, there_writer), self._forward(there_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self._is_cut:
                    writer.write(data)
                    await writer.drain()
            writer.close()


def _line_of(descriptor: int) -> bytes:
    with open(descriptor, "rb", buffering=0) as file:
        return file.readline()


@dataclass(slots=True)
class MeshProcess:
    """A service of the mesh."""

    kind: str
    environ: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    async def start(self) -> None:
        """Start it. Raises RuntimeError, with its log, if it does not announce itself."""
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", f"pdmesh_{self.kind}"]
        self.process = _spawned(
            command, self.log, environ={**self.environ, "PDMESH_READY_FD": str(write_fd)}, passed=[write_fd]
        )
        os.close(write_fd)
        async with asyncio.timeout(START_LIMIT_S):
            said = await asyncio.to_thread(_line_of, read_fd)
        self.facts = json.loads(said or b"{}")
        if "pid" not in self.facts:
            raise RuntimeError(f"{self.kind} did not start:\n{self.log.read_text()}")

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_LIMIT_S)


@dataclass(slots=True)
class Scheduler(MeshProcess):
    """Process of one of the schedulers."""

    address: str = ""
    #: Wire to the store.
    wire: Wire | None = None


@dataclass(slots=True)
class StandbyMesh:
    """What `running_standby_mesh` yields."""

    schedulers: Sequence[Scheduler]
    others: Sequence[MeshProcess]
    base_url: str
    security: SecurityConfig
    folder: Path

    async def leader(self) -> Scheduler | None:
        """Return the scheduler that leads, by its own word."""
        for scheduler in self.schedulers:
            if await self.leads(scheduler):
                return scheduler
        return None

    async def some_leader(self, limit_s: float) -> Scheduler:
        """Return the scheduler that leads, once there is one. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while (leader := await self.leader()) is None:  # noqa: ASYNC110  # asked, as it does not tell
                await asyncio.sleep(0.02)
        return leader

    async def until_leads(self, scheduler: Scheduler, limit_s: float) -> None:
        """Wait until this scheduler leads. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while not await self.leads(scheduler):  # noqa: ASYNC110  # asked, as it does not tell
                await asyncio.sleep(0.02)

    async def leads(self, scheduler: Scheduler) -> bool:
        """Whether a scheduler answers as a leader does."""
        if scheduler.has_ended:
            return False
        try:
            return isinstance(await ask_one(scheduler.address, self.security, GetStatus()), MeshStatus)
        except PdmeshError:
            return False

    async def look_after(self) -> None:
        """Restart schedulers that have ended, until cancelled, as a process supervisor does."""
        while True:
            for scheduler in self.schedulers:
                if scheduler.has_ended:
                    await scheduler.start()
            await asyncio.sleep(0.05)

    def logs(self) -> str:
        """Return the logs of all services."""
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))


@asynccontextmanager
async def running_standby_mesh(
    folder: Path,
    model: Path,
    store: str,
    *,
    prefill: int = 1,
    decode: int = 2,
    settings: Mapping[str, str] | None = None,
) -> AsyncGenerator[StandbyMesh]:
    """Start two schedulers around a ``store``, instances and a gateway, and end them when the block is left."""
    security = SecurityConfig(mesh_token=MESH_TOKEN)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    common = {
        "MODEL": str(model),
        "SCHEDULER_ADDRESS": ",".join(addresses),
        "SECURITY_MESH_TOKEN": MESH_TOKEN,
        "STANDBY_STORE": store,
        "STANDBY_FILE": str(folder / "lease.json"),
        "DRAIN_S": "5",
        "WORKER_NUM_THREADS": "1",
        **(settings or {}),
    }
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PDMESH_")}

    def environ(**more: str) -> dict[str, str]:
        return {**plain, **{f"PDMESH_{name}": value for name, value in {**common, **more}.items()}}

    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(folder)) if store == "etcd" else None
        schedulers: list[Scheduler] = []
        for index, address in enumerate(addresses):
            wire = None if etcd is None else await stack.enter_async_context(Wire(etcd))
            endpoint = {} if wire is None else {"STANDBY_ETCD_ENDPOINTS": f"http://127.0.0.1:{wire.port}"}
            port = address.rpartition(":")[2]
            scheduler = Scheduler(
                "scheduler",
                environ(SCHEDULER_PORT=port, **endpoint),
                folder / f"scheduler-{index}.log",
                address=address,
                wire=wire,
            )
            stack.callback(scheduler.kill)
            await scheduler.start()
            schedulers.append(scheduler)
        others: list[MeshProcess] = []
        for kind, index in [*(("prefill", i) for i in range(prefill)), *(("decode", i) for i in range(decode))]:
            name = f"{kind}-{index}"
            others.append(MeshProcess(kind, environ(WORKER_INSTANCE_ID=name), folder / f"{name}.log"))
        others.append(gateway := MeshProcess("gateway", environ(GATEWAY_PORT="0"), folder / "gateway.log"))
        for process in others:
            stack.callback(process.kill)
        await asyncio.gather(*(process.start() for process in others))
        yield StandbyMesh(schedulers, others, f"http://{gateway.facts['http_address']}", security, folder)
