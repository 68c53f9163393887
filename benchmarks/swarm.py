"""A Docker Swarm of three nodes with the stack of ``deploy/swarm``, and what is done to it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from cluster_nodes import Cluster, ClusterError, Event, Node, run, until

STACK = Path(__file__).parents[1] / "deploy/swarm/stack.yaml"
ETCD_IMAGE = "pdmesh-etcd"

#: The network between services; `docker stack` puts the name of the stack before those of the file.
PREFIX = "pdmesh_"

#: Swarm takes a node for lost once it has been silent for so long, and then starts its tasks elsewhere.
HEARTBEAT_S = 20

#: For the logs of a service. Docker waits for ever for those of tasks that went with a node.
LOGS_S = 20.0


class Swarm:
    """A swarm whose first node manages it, and has schedulers and gateway. Made by `running_swarm`."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._manager = nodes[0]

    def docker(self, *arguments: str, given: str | None = None) -> str:
        return self._manager.run("docker", *arguments, given=given)

    def settled(self) -> None:
        """Wait until each service has its tasks, and no other task runs."""
        until("all services have their tasks, and no others", self._is_settled)

    def _is_settled(self) -> bool:
        listed = self.docker("service", "ls", "--format", "{{.Name}} {{.Replicas}}").splitlines()
        replicas = dict(each.split()[:2] for each in listed)
        if not all(map(self._is_whole, replicas, replicas.values())):
            return False
        names = list(replicas)
        told = self.docker(
            *("service", "ps", *names, "--filter", "desired-state=shutdown"),
            "--format",
            "{{.CurrentState}} on {{.Node}}",
        )
        return not [
            each for each in told.splitlines() if each.startswith("Running") and self._is_there(each.split()[-1])
        ]

    def _is_whole(self, service: str, replicas: str) -> bool:
        """Whether a service has its tasks, as far as it can: a member of etcd stays on its node."""
        if (pinned := re.fullmatch(f"{PREFIX}etcd-(\\d)", service)) is not None:
            node = self._nodes[int(pinned[1]) - 1].name
            state = self.docker("node", "inspect", node, "--format", "{{.Status.State}} {{.Spec.Availability}}")
            if state.split() != ["ready", "active"]:
                return True
        running, _, wanted = replicas.partition("/")
        return running == wanted

    def _is_there(self, node: str) -> bool:
        return self.docker("node", "inspect", node, "--format", "{{.Status.State}}").strip() == "ready"

    def scale(self, decode: int) -> None:
        self.docker("service", "scale", "--detach", f"{PREFIX}decode={decode}")
        self.settled()

    def update(self, *services: str) -> None:
        """Replace all tasks of services, one after the other."""
        for service in services:
            self.docker("service", "update", "--force", "--quiet", f"{PREFIX}{service}")
        self.settled()

    def leader(self) -> str:
        """Return the name of the leading scheduler's container, which etcd has as its address."""
        (member,) = self.docker("ps", "-q", "--filter", f"name=^{PREFIX}etcd-1\\.").split()
        record = json.loads(
            self.docker("exec", "-e", "ETCDCTL_API=3", member, "etcdctl", "get", "--print-value-only", "pdmesh")
        )
        return str(record["address"]).removesuffix(":7000")

    def kill_leader(self) -> None:
        self.docker("kill", self.leader())
        self.settled()

    def drain(self, node: Node) -> None:
        self.docker("node", "update", "--availability", "drain", node.name)
        self.settled()

    def use_again(self, node: Node) -> None:
        """Let a node have tasks again; what is there is spread anew."""
        self.docker("node", "update", "--availability", "active", node.name)
        self.update("decode", "prefill")

    def kill(self, node: Node) -> None:
        node.lose_power()
        until(f"{node.name} is known to be down", lambda: not self._is_there(node.name))
        self.settled()

    def restore(self, node: Node) -> None:
        node.restore_power()
        until(f"{node.name} is ready", lambda: self._is_there(node.name))
        self.update("decode", "prefill")

    def events(self) -> list[Event]:
        second, third = self._nodes[1:3]
        return [
            Event("scale decode 2 -> 3", lambda: self.scale(3)),
            Event("scale decode 3 -> 1", lambda: self.scale(1)),
            Event("scale decode 1 -> 2", lambda: self.scale(2)),
            Event("rolling update of all instances", lambda: self.update("decode", "prefill")),
            Event("rolling update of the schedulers", lambda: self.update("scheduler")),
            Event("the leading scheduler killed", self.kill_leader),
            Event(f"{third.name} drained", lambda: self.drain(third)),
            Event(f"{third.name} used again", lambda: self.use_again(third)),
            Event(f"{second.name} loses power", lambda: self.kill(second)),
            Event(f"{second.name} comes back", lambda: self.restore(second)),
        ]

    def logs(self) -> str:
        """What all services have logged, except where a node of theirs is away."""
        names = self.docker("service", "ls", "--format", "{{.Name}}").split()
        return "".join(map(self._logs, names))

    def _logs(self, service: str) -> str:
        try:
            return self._manager.run("docker", "service", "logs", "--raw", service, limit_s=LOGS_S)
        except ClusterError as error:  # though some was printed
            return f"{error}\n"


def etcd_image() -> str:
    """Build the image of the schedulers' etcd, and return its name."""
    run("docker", "build", "-t", ETCD_IMAGE, "-", given=(STACK.parent / "Dockerfile.etcd").read_text(), limit_s=900)
    return ETCD_IMAGE


@contextmanager
def running_swarm(nodes: list[Node], settings: str, api_key: str, *, encrypted: bool) -> Generator[Cluster]:
    """Make the nodes a swarm with the stack on it; ``settings`` are the file pdmesh.toml."""
    manager, *others = nodes
    swarm = Swarm(nodes)
    swarm.docker("swarm", "init", "--advertise-addr", manager.address)
    swarm.docker("swarm", "update", "--dispatcher-heartbeat", f"{HEARTBEAT_S}s")
    token = swarm.docker("swarm", "join-token", "-q", "worker").strip()
    for node in others:
        node.run("docker", "swarm", "join", "--token", token, manager.address)
    swarm.docker("node", "update", "--label-add", "pdmesh=edge", manager.name)
    for node in others:
        swarm.docker("node", "update", "--label-add", "pdmesh=worker", node.name)
    for node in nodes:  # a member of etcd on each
        swarm.docker("node", "update", "--label-add", f"pdmesh-etcd-{node.number}=here", node.name)
    swarm.docker("secret", "create", "pdmesh.toml", "-", given=settings)
    stack = STACK.read_text()
    if not encrypted:
        stack = stack.replace('    driver_opts:\n      encrypted: "true"\n', "")  # to say "false" is to say it, to some
    swarm.docker("stack", "deploy", "--resolve-image", "never", "-c", "-", "pdmesh", given=stack)
    try:
        swarm.settled()
    except ClusterError as error:
        raise ClusterError(
            f"{error}\n{swarm.docker('stack', 'ps', '--no-trunc', 'pdmesh')}\n{swarm.logs()[-4000:]}"
        ) from error
    yield Cluster(f"http://{manager.address}:8000", None, api_key, swarm.events(), swarm.logs)
