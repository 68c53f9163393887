"""Machines of a cluster that are not there: privileged containers on a network, each with an engine for containers.

They take a Docker engine on this machine, an image of pdmesh in it (``deploy/compose/Dockerfile``), and
python:3.11-slim of Debian 12, from whose packages the nodes are made. What a node loses with its power it loses here:
it is taken off the network first, so that nobody hears of its end, and then killed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

IMAGE = "pdmesh-node"
NETWORK = "pdmesh-nodes"
SUBNET = "10.89.77"

#: For anything that is to become true.
LIMIT_S = 300.0

_DOCKERFILE = """
FROM python:3.11-slim
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates conntrack containernetworking-plugins \
    dnsmasq-base docker.io etcd-server iproute2 iptables mount procps \
    && rm -rf /var/lib/apt/lists/*
COPY runc.py node.sh /
RUN mv "$(readlink -f "$(command -v runc)")" /usr/bin/runc.real && install -m 755 /runc.py /usr/sbin/runc
VOLUME /var/lib/containerd /var/lib/docker /var/lib/kubelet
ENTRYPOINT ["bash", "/node.sh"]
"""

#: Not every machine lets its containers be killed later than others for want of memory (CAP_SYS_RESOURCE), which those
#: that hold the namespaces of Kubernetes' pods ask for.
_RUNC = """#!/usr/bin/python3
import json, os, sys
if "--bundle" in sys.argv:
    path = os.path.join(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    with open(path) as file:
        config = json.load(file)
    config["process"]["oomScoreAdj"] = max(0, config["process"].get("oomScoreAdj") or 0)
    with open(path, "w") as file:
        json.dump(config, file)
os.execv("/usr/bin/runc.real", ["runc", *sys.argv[1:]])
"""

_ENTRYPOINT = r"""
mount --make-rshared /
rm -rf /run/docker* /run/containerd
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """The program that runs the containers of a node."""

    command: tuple[str, ...]
    is_up: tuple[str, ...]  # command that fails until the engine answers
    load: tuple[str, ...]  # command that takes the file of `docker save`


_POOL = "base=10.90.0.0/16,size=24"
DOCKER = Engine(
    (
        "dockerd",
        "--storage-driver=overlay2",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        f"--default-address-pool={_POOL}",
    ),
    ("docker", "version", "--format", "{{.Server.Version}}"),
    ("docker", "load", "-i"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an operator does, or that happens to a node."""

    name: str
    do: Callable[[], None]  # returns once the cluster is whole again


@dataclass(frozen=True, slots=True)
class Cluster:
    """A mesh on an engine."""

    base_url: str  # of a gateway that no event takes away
    ca_file: Path | None  # of the gateway's certificate
    api_key: str
    events: list[Event]
    logs: Callable[[], str]  # what its services have logged, as far as the engine has kept it


class ClusterError(Exception):
    """What was run on a node failed, or something did not become true. The message says what, and with what output."""


def run(*command: str, given: str | None = None, limit_s: float = LIMIT_S) -> str:
    """Run a command on this machine and return what it printed. Raises ClusterError."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)}: not done within {limit_s:g} s") from error
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: exit code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def until(what: str, is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until something is true; what cannot be asked is not. Raises ClusterError."""
    end_s, why = time.monotonic() + limit_s, ""
    while time.monotonic() < end_s:
        try:
            if is_true():
                return
        except ClusterError as error:
            why = f": {error}"
        time.sleep(0.5)
    raise ClusterError(f"{what}: not so within {limit_s:g} s{why}")


@dataclass(frozen=True, slots=True)
class Node:
    """One of the machines."""

    name: str
    number: int  # from 1
    engine: Engine

    @property
    def address(self) -> str:
        return f"{SUBNET}.{10 + self.number}"

    def run(self, *command: str, given: str | None = None, limit_s: float = LIMIT_S) -> str:
        """Run a command there and return what it printed. Raises ClusterError."""
        flags = () if given is None else ("-i",)
        return run("docker", "exec", *flags, self.name, *command, given=given, limit_s=limit_s)

    def start(self, *command: str, log: str) -> None:
        """Start a command there that goes on; ``log`` is the file of what it prints."""
        quoted = " ".join(f"'{each}'" for each in command)
        run("docker", "exec", "-d", self.name, "bash", "-c", f"exec {quoted} >{log} 2>&1")

    def is_up(self) -> bool:
        """Whether its engine answers."""
        return bool(self.run(*self.engine.is_up, limit_s=20))

    def lose_power(self) -> None:
        """Take it off the network, and then kill everything on it."""
        run("docker", "network", "disconnect", "-f", NETWORK, self.name)
        run("docker", "kill", self.name)

    def restore_power(self) -> None:
        """Start it again, at its address."""
        run("docker", "network", "connect", "--ip", self.address, NETWORK, self.name)
        run("docker", "start", self.name)
        until(f"{self.name} is up again", self.is_up)


def why_no_nodes(image: str) -> str | None:
    """Say why there can be none here; None if there can."""
    try:
        run("docker", "version", limit_s=20)
    except (ClusterError, OSError) as error:
        return f"no Docker engine answers here ({str(error).splitlines()[0][:120]})"
    try:
        run("docker", "image", "inspect", image)
    except ClusterError:
        return f"there is no image {image}: docker build -f deploy/compose/Dockerfile -t {image} ."
    return None


@contextmanager
def running_nodes(
    folder: Path, number: int, images: Sequence[str], engine: Engine, mounts: Sequence[Path] = ()
) -> Generator[list[Node]]:
    """Start so many nodes, each with the images; they are gone after the block.

    They have ``folder`` as /files, and ``mounts`` where they are here.
    """
    context = folder / "node"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text(_DOCKERFILE)
    (context / "node.sh").write_text(_ENTRYPOINT)
    (context / "runc.py").write_text(_RUNC)
    run("docker", "build", "-t", IMAGE, str(context), limit_s=900)
    run("docker", "save", "-o", str(folder / "images.tar"), *images)
    nodes = [Node(f"pdmesh-node-{index}", index, engine) for index in range(1, number + 1)]
    try:
        run("docker", "network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)
        for node in nodes:
            run(
                *("docker", "run", "-d", "--privileged", "--name", node.name, "--hostname", node.name),
                *("--network", NETWORK, "--ip", node.address, "--tmpfs", "/run", "--tmpfs", "/tmp"),
                *("-v", f"{folder}:/files", "-v", "/dev/kmsg:/dev/kmsg"),
                *(each for path in mounts for each in ("-v", f"{path.absolute()}:{path.absolute()}:ro")),
                *(IMAGE, *engine.command),
            )
        for node in nodes:
            until(f"{node.name} is up", node.is_up)
            node.run(*engine.load, "/files/images.tar")
        yield nodes
    finally:
        for node in nodes:
            with suppress(ClusterError):
                run("docker", "rm", "-f", "-v", node.name)
        with suppress(ClusterError):
            run("docker", "network", "rm", NETWORK)
