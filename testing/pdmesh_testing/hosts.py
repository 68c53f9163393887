"""Simulated hosts: network namespaces on a switch of their own, each with services of a mesh.

The traffic between two hosts can be cut, in one direction or both. Then frames are lost silently, as with a broken
cable or a host without power. Killed processes are different: their hosts refuse connections.

Requires root, and ``ip`` of iproute2. This machine's own network is not touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdmesh.cli.processes import ending_with_us
from pdmesh.cli.tls import make_certificates
from pdmesh.config import SecurityConfig

#: The scheduler's name, whichever host it is on.
SCHEDULER_NAME = "scheduler.mesh"
SCHEDULER_PORT = 7000
GATEWAY_PORT = 8000

API_KEY = "sk-of-the-hosts"
MESH_TOKEN = "token-of-the-hosts"

#: Long, since the machine may be busy.
START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0

#: Hardware address without a host: frames to it are lost.
_NOBODY = "02:00:00:00:00:ff"
_CLONE_NEWNET = 0x40000000


def why_no_hosts() -> str | None:
    """Say why there can be none on this machine; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces as hosts take root"
    if shutil.which("ip") is None or shutil.which("openssl") is None:
        return "network namespaces as hosts take ip (Debian's package iproute2) and openssl"
    probe = f"pdmesh-probe-{os.getpid()}"
    for command in (f"netns add {probe}", f"-n {probe} link add veth0 type veth peer name veth1", f"netns del {probe}"):
        tried = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False, timeout=30)
        if tried.returncode:
            return f"this machine has no network namespaces as hosts: ip {command}: {tried.stderr.strip()}"
    return None


@dataclass(slots=True)
class HostedService:
    """A process of the mesh on one of the hosts."""

    name: str
    process: subprocess.Popen[bytes]
    #: Facts that the service announced.
    facts: dict[str, Any]
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_LIMIT_S)

    def stop(self) -> int:
        """Drain the service, and return its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_LIMIT_S)


@dataclass(slots=True)
class Host:
    """A network namespace, with an address on the switch."""

    name: str
    address: str
    namespace: str
    #: Folder of the host's certificate and its services' logs.
    folder: Path
    #: Settings of all services of the host.
    settings: Mapping[str, str]
    services: list[HostedService] = field(default_factory=list[HostedService])

    def start(
        self, kind: str, name: str, settings: Mapping[str, str] | None = None, *, waits: bool = True
    ) -> HostedService:
        """Start ``pdmesh_KIND``. Raises RuntimeError, with its log, if it does not announce itself.

        ``settings`` are environment names without their prefix. Without ``waits`` it need not.
        """
        values = {**self.settings, **(settings or {})}
        environ = {**os.environ, **{f"PDMESH_{key}": value for key, value in values.items()}}
        log = self.folder / f"{name}.log"
        read_fd, write_fd = os.pipe()
        command = self.command([sys.executable, "-m", f"pdmesh_{kind}"])
        with log.open("ab") as output, open(read_fd, "rb", buffering=0) as ready:
            process = subprocess.Popen(
                ending_with_us(command),
                env={**environ, "PDMESH_READY_FD": str(write_fd)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write_fd,),
            )
            os.close(write_fd)
            service = HostedService(name, process, {}, log)
            self.services.append(service)
            if waits:
                said = ready.readline() if select.select([ready], [], [], START_LIMIT_S)[0] else b""
                service.facts = json.loads(said or b"{}")
                if "pid" not in service.facts:
                    raise RuntimeError(f"{name} on {self.name} did not start:\n{log.read_text()}")
        return service

    def command(self, command: Sequence[str]) -> list[str]:
        """Return what runs a command on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def run(self, command: Sequence[str]) -> str:
        """Run a command on this host, and return its standard output; CalledProcessError if it fails."""
        return subprocess.run(self.command(command), check=True, capture_output=True, text=True, timeout=30).stdout

    @contextmanager
    def entered(self) -> Generator[None]:
        """Be on this host: sockets that this thread opens within the block, and threads that it starts, are its own."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(path: str) -> None:
            with open(path) as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {path}")

        with open("/proc/thread-self/ns/net") as before:
            enter(f"/run/netns/{self.namespace}")
            try:
                yield
            finally:
                enter(f"/proc/self/fd/{before.fileno()}")


class Hosts:
    """Hosts on one switch. Made by `running_hosts`."""

    def __init__(self, folder: Path, hosts: Mapping[str, Host], switch: str) -> None:
        self._hosts = hosts
        self._switch = switch
        self.folder = folder

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def cut(self, sender: str, receiver: str, *, both: bool = True) -> None:
        """Lose all traffic from ``sender`` to ``receiver``, and with ``both`` also in the other direction."""
        for source, target in ((sender, receiver), (receiver, sender))[: 1 + both]:
            address = self[target].address
            ip(f"-n {self[source].namespace} neigh replace {address} lladdr {_NOBODY} dev eth0 nud permanent")

    def heal(self, sender: str, receiver: str) -> None:
        """End all cuts between the two."""
        for source, target in ((sender, receiver), (receiver, sender)):
            with suppress(subprocess.CalledProcessError):
                # There was no cut.
                ip(f"-n {self[source].namespace} neigh del {self[target].address} dev eth0")

    @contextmanager
    def slowed(self, delay_s: float, loss: float, seed: int = 0) -> Generator[None]:
        """Within the block, every frame between hosts takes ``delay_s`` each way, or is lost with a probability.

        The bridge makes way for a process that forwards them (this takes a processor, and about 100 MB a second).
        """
        ports = [f"to-{name}" for name in self._hosts]
        for port in ports:
            ip(f"-n {self._switch} link set {port} nomaster")
        switch = [sys.executable, "-m", "pdmesh_testing.slow_switch", f"--delay={delay_s}", f"--loss={loss}"]
        command = ["ip", "netns", "exec", self._switch, *switch, f"--seed={seed}", *ports]
        process = subprocess.Popen(ending_with_us(command))
        try:
            yield
        finally:
            process.kill()
            process.wait(STOP_LIMIT_S)
            for port in ports:
                ip(f"-n {self._switch} link set {port} master switch")

    def lose_power(self, name: str) -> None:
        """Take a host off the switch, and kill its services. Their peers receive no reset."""
        ip(f"-n {self._switch} link set to-{name} down")
        for service in self[name].services:
            service.kill()

    def restore_power(self, name: str) -> None:
        """Put a host that lost it on the switch again; nothing runs there."""
        self[name].services.clear()
        ip(f"-n {self._switch} link set to-{name} up")

    def name_scheduler(self, host: str) -> None:
        """Let the scheduler's name stand for this host, on all of them."""
        for other in self._hosts.values():
            # Written in place: each service has this file mounted.
            hosts_file(other.namespace).write_text(f"127.0.0.1 localhost\n{self[host].address} {SCHEDULER_NAME}\n")

    def https(self) -> ssl.SSLContext:
        """Return what a client needs to trust the gateways."""
        return ssl.create_default_context(cafile=self.folder / "ca.pem")

    def security(self, host: str) -> SecurityConfig:
        """Return the security settings of a service on this host."""
        folder = self[host].folder
        return SecurityConfig(
            tls_cert=folder / "mesh.pem",
            tls_key=folder / "mesh.key",
            tls_ca=folder / "ca.pem",
            mesh_token=MESH_TOKEN,
        )

    def logs(self) -> str:
        """Return the logs of all services, for a failing test's message."""
        files = sorted(self.folder.glob("*/*.log"))
        return "\n".join(f"== {file.parent.name}/{file.name}\n{file.read_text()}" for file in files)


@contextmanager
def running_hosts(folder: Path, names: Sequence[str], settings: Mapping[str, str] | None = None) -> Generator[Hosts]:
    """Make hosts with mutual TLS, a key each, and KV over UCX. Their services are killed at the end.

    The scheduler's name stands for the first of them.
    """
    prefix = f"pdmesh-{secrets.token_hex(4)}"
    switch = f"{prefix}-switch"
    hosts: dict[str, Host] = {}
    with ExitStack() as stack:
        stack.callback(_remove, switch)
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add switch type bridge")
        ip(f"-n {switch} link set switch up")
        for number, name in enumerate(names, 1):
            namespace = f"{prefix}-{name}"
            host = hosts[name] = Host(name, f"10.77.0.{number}", namespace, folder / name, {})
            stack.callback(_remove, namespace)
            _connect(host, switch)
            hosts_file(namespace).parent.mkdir(parents=True)
            hosts_file(namespace).touch()
            host.settings = {**_settings(folder, host), **(settings or {})}
        everything = Hosts(folder, hosts, switch)
        everything.name_scheduler(names[0])
        stack.callback(_kill_all, everything, names)
        yield everything


def hosts_file(namespace: str) -> Path:
    """Return the path of a namespace's ``/etc/hosts``."""
    return Path("/etc/netns") / namespace / "hosts"


def _connect(host: Host, switch: str) -> None:
    ip(f"netns add {host.namespace}")
    ip(f"link add eth0 netns {host.namespace} type veth peer name to-{host.name} netns {switch}")
    ip(f"-n {switch} link set to-{host.name} master switch up")
    ip(f"-n {host.namespace} addr add {host.address}/24 dev eth0")
    for device in ("lo", "eth0"):
        ip(f"-n {host.namespace} link set {device} up")


def _settings(folder: Path, host: Host) -> dict[str, str]:
    make_certificates(folder, hosts=("127.0.0.1", host.address, SCHEDULER_NAME), days=30)
    host.folder.mkdir()
    for file in ("ca.pem", "mesh.pem", "mesh.key"):
        shutil.copy(folder / file, host.folder)
    return {
        "SECURITY_TLS_CERT": str(host.folder / "mesh.pem"),
        "SECURITY_TLS_KEY": str(host.folder / "mesh.key"),
        "SECURITY_TLS_CA": str(host.folder / "ca.pem"),
        "SECURITY_MESH_TOKEN": MESH_TOKEN,
        "SECURITY_API_KEY": API_KEY,
        "SCHEDULER_ADDRESS": f"{SCHEDULER_NAME}:{SCHEDULER_PORT}",
        "SCHEDULER_HOST": host.address,
        "SCHEDULER_PORT": str(SCHEDULER_PORT),
        "GATEWAY_HOST": host.address,
        "GATEWAY_PORT": str(GATEWAY_PORT),
        "GATEWAY_TOKEN_HOST": "0.0.0.0",
        "TRANSFER_UCX_NET_DEVICES": "eth0",
        "TRANSFER_TRUSTED_NETWORK": "true",
        "WORKER_NUM_THREADS": "1",
        "DRAIN_S": "5",
    }


def _kill_all(hosts: Hosts, names: Sequence[str]) -> None:
    for name in names:
        for service in hosts[name].services:
            service.kill()


def _remove(namespace: str) -> None:
    with suppress(subprocess.CalledProcessError):
        ip(f"netns del {namespace}")
    shutil.rmtree(hosts_file(namespace).parent, ignore_errors=True)


def ip(arguments: str) -> str:
    """Run ``ip ARGUMENTS``; CalledProcessError if it fails."""
    command = ["ip", *arguments.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def until(is_so: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait until it is so. Raises TimeoutError."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("it has not come to be so")
        time.sleep(0.05)
