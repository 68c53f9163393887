"""A mesh on a Ray cluster: ``python examples/ray_mesh.py HUB_ID_OR_DIRECTORY --prefill 1 --decode 2``.

Needs ``pip install ray "pdmesh[ucx]"`` on all nodes. Run it on the node that clients reach, where scheduler and gateway
are to be; instances are spread over all nodes, an actor each. Ray starts one again that died, elsewhere if its node is
lost; its streams go on at other instances meanwhile. Ctrl-C or SIGTERM drains the mesh and ends it. In a program of
your own, start more instances with `start`, and end one with `stop`, which drains it; `ray.kill` alone does not.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdmesh.cli.processes import ending_with_us

PORT, SCHEDULER_PORT = 8000, 7000


class Service:
    """A process of the mesh on the node that Ray chose."""

    def __init__(self, kind: str, settings: dict[str, str]) -> None:
        read_fd, write_fd = os.pipe()
        environ = {f"PDMESH_{name}": value for name, value in settings.items()} | {"PDMESH_READY_FD": str(write_fd)}
        self._process = subprocess.Popen(
            ending_with_us([sys.executable, "-m", f"pdmesh_{kind}"]), env=os.environ | environ, pass_fds=[write_fd]
        )
        os.close(write_fd)
        self._ready_fd = read_fd
        self._facts: dict[str, Any] | None = None
        self._is_stopping = False
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        self._process.wait()
        if not self._is_stopping:
            os._exit(1)  # Ray starts another actor, and that another process

    def facts(self) -> dict[str, Any]:
        """Wait until it serves; what it announced."""
        if self._facts is None:
            with open(self._ready_fd) as ready:
                self._facts = json.loads(ready.readline())
        return self._facts

    def stop(self) -> None:
        """Let it give away or end what it does, and end it."""
        self._is_stopping = True
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def start(kind: str, name: str, settings: dict[str, str], **options: Any) -> Any:
    """Start a service as an actor of a name. ``options`` are Ray's, such as ``num_gpus``."""
    actor = ray.remote(Service).options(name=name, max_restarts=-1, **options)
    return actor.remote(kind, {**settings, "WORKER_INSTANCE_ID": name})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a hub id, or a directory that all nodes have")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--num-gpus", type=float, default=0.0, help="of an instance")
    parser.add_argument("--net-devices", default="all", help="of UCX, for KV: nobody else may reach them")
    given = parser.parse_args()
    ray.init(address="auto")
    for number in (signal.SIGINT, signal.SIGTERM):  # also where it was started in the background, or by an engine
        signal.signal(number, signal.default_int_handler)
    here = get_node_ip_address()
    head = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    api_key = os.environ.get("PDMESH_SECURITY_API_KEY") or secrets.token_hex(32)
    settings = {
        "MODEL": given.model,
        "SCHEDULER_ADDRESS": f"{here}:{SCHEDULER_PORT}",
        "SCHEDULER_HOST": here,
        "SCHEDULER_PORT": str(SCHEDULER_PORT),
        "GATEWAY_HOST": here,
        "GATEWAY_PORT": str(PORT),
        "GATEWAY_TOKEN_HOST": here,
        "SECURITY_API_KEY": api_key,
        "SECURITY_MESH_TOKEN": secrets.token_hex(32),
        # Nothing between the nodes is encrypted. With certificates on all of them, set SECURITY_TLS_CERT, _KEY, _CA.
        "SECURITY_TRUSTED_NETWORK": "true",
        "TRANSFER_TRUSTED_NETWORK": "true",
        "TRANSFER_UCX_NET_DEVICES": given.net_devices,
    }
    control = [start(kind, kind, settings, scheduling_strategy=head) for kind in ("scheduler", "gateway")]
    roles = ["prefill"] * given.prefill + ["decode"] * given.decode
    instances = [
        start(role, f"{role}-{number}", settings, scheduling_strategy="SPREAD", num_gpus=given.num_gpus)
        for number, role in enumerate(roles)
    ]
    print(json.dumps({"url": f"http://{here}:{PORT}/v1", "key": api_key}), flush=True)
    try:
        ray.get([each.facts.remote() for each in (*control, *instances)])
        print("serving", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        for services in (control[1:], instances, control[:1]):  # the gateway first: it ends what clients wait for
            ray.get([each.stop.remote() for each in services])


if __name__ == "__main__":
    main()
