"""A mesh on an engine of three nodes: what is lost, differs, or stands still while it scales, updates and fails.

    python benchmarks/engines.py swarm
    python benchmarks/engines.py kubernetes --binaries FOLDER      # of Kubernetes' programs (kubernetes_cluster.py)

Nodes are privileged containers with an engine of their own each (`cluster_nodes.py`), so this takes a Docker engine
that may run such, and the image of ``deploy/compose/Dockerfile``. What is deployed is the stack of ``deploy/swarm`` or
the chart of ``deploy/helm``, with the demo model in float32 or ``--model``, one prefill and two decode instances.

So many streams are open all the time, greedy and seeded ones in turn. One line for each event: how long it took, how
many streams ended from its beginning until those that ran at its end had ended, how many of them were lost or differ
from an undisturbed request, and the longest wait between two tokens of one. Exit code 1 if any was lost or differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import httpx
from cluster_nodes import DOCKER, Cluster, ClusterError, Event, Node, running_nodes, why_no_nodes
from kubernetes_cluster import running_kubernetes
from kubernetes_nodes import PAUSE_IMAGE, containerd
from report import heading, unavailable
from swarm import etcd_image, running_swarm

from pdmesh_testing.load import Stream, StreamLoad, requests_of, running_load

NUM_NODES = 3

#: Of undisturbed load before each event, seconds.
PAUSE_S = 5.0


async def run(cluster: Cluster, events: Sequence[Event], num_streams: int, num_tokens: int) -> int:
    """Print a line for each event; return how many streams were lost or differ."""
    requests = requests_of(7, [24 + 11 * index for index in range(16)], num_tokens)
    num_bad = 0
    model = model_of(cluster)
    async with running_load(cluster.base_url, model, requests, at_once=num_streams, api_key=cluster.api_key) as load:
        await load.ended(num_streams)
        print(f"{'event':44} {'took':>8} {'streams':>8} {'lost':>5} {'differ':>7} {'longest wait':>13}", flush=True)
        for event in [Event("nothing", lambda: time.sleep(PAUSE_S)), *events]:
            await asyncio.sleep(PAUSE_S)
            num_bad += await disturb(load, event)
    return num_bad


def model_of(cluster: Cluster) -> str:
    """The name of the model that the gateway serves."""
    headers = {"authorization": f"Bearer {cluster.api_key}"}
    answer = httpx.get(f"{cluster.base_url}/v1/models", headers=headers, timeout=30).raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def disturb(load: StreamLoad, event: Event) -> int:
    """Do it, and wait for the streams that it may have touched; return how many were lost or differ.

    An event that fails counts as one: what comes after it is still worth seeing.
    """
    begin_s, first = time.monotonic(), len(load.streams)
    failures: list[str] = []
    try:
        await asyncio.to_thread(event.do)
    except ClusterError as error:
        failures.append(f"it failed: {error}")
    took_s, running = time.monotonic() - begin_s, list(load.open)
    while any(each.ended_s is None for each in running):
        await load.ended(1)
    touched = StreamLoad(load.undisturbed, load.streams[first:])
    lost, differ = touched.failed, touched.differ
    longest_s = max((longest_wait_s(each, begin_s) for each in touched.streams), default=0.0)
    print(
        f"{event.name:44} {took_s:6.1f} s {len(touched.streams):8} {len(lost):5} {len(differ):7} {longest_s:11.2f} s",
        flush=True,
    )
    for reason in dict.fromkeys((*failures, *lost, *differ)):
        print(f"    {reason}", flush=True)
    return len(failures) + len(lost) + len(differ)


def longest_wait_s(stream: Stream, begin_s: float) -> float:
    """Between two tokens of a stream, if the second one came after a time."""
    return max((later - earlier for earlier, later in pairwise(stream.token_times_s) if later > begin_s), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("swarm", "kubernetes"))
    parser.add_argument("--image", default="pdmesh")
    parser.add_argument("--model", default="", help="for the chart's Job to download; default: the demo model")
    parser.add_argument("--binaries", type=Path, help="folder of Kubernetes' programs")
    parser.add_argument(
        "--plain-overlay", action="store_true", help="where the kernel lacks ESP: Swarm's network as it is"
    )
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--only", default="", help="events whose name this regular expression finds")
    parser.add_argument("--logs", type=Path, help="file for what all services logged")
    options = parser.parse_args()
    if (why_not := why_no_nodes(options.image)) is not None:
        unavailable(why_not)
    if options.engine == "kubernetes" and options.binaries is None:
        unavailable("--binaries names no folder of Kubernetes' programs")
    print(
        heading(f"a mesh on {options.engine}, {NUM_NODES} nodes, {options.streams} streams of {options.tokens} tokens")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.engine == "swarm":
            images, engine, mounts = [options.image, etcd_image()], DOCKER, []
        else:
            engine = containerd(folder, options.image, str(options.binaries.absolute()))
            images, mounts = [options.image, PAUSE_IMAGE], [options.binaries]
        with (
            running_nodes(folder, NUM_NODES, images, engine, mounts) as nodes,
            deployed(options, nodes, folder) as cluster,
        ):
            if cluster.ca_file is not None:
                os.environ["SSL_CERT_FILE"] = str(cluster.ca_file)
            events = [each for each in cluster.events if re.search(options.only, each.name)]
            try:
                num_bad = asyncio.run(run(cluster, events, options.streams, options.tokens))
            finally:
                if options.logs is not None:
                    options.logs.write_text(cluster.logs())
    print(f"{num_bad} streams were lost or differ, or events failed" if num_bad else "0 lost, 0 differ")
    return 1 if num_bad else 0


def deployed(options: argparse.Namespace, nodes: list[Node], folder: Path) -> AbstractContextManager[Cluster]:
    """The mesh on the engine that was chosen."""
    keys = {name: secrets.token_hex(16) for name in ("mesh_token", "api_key", "operator_token")}
    lines = [f'{name} = "{key}"' for name, key in keys.items()]
    worker = [] if options.model else ["[worker]", 'dtype = "float32"']  # another model in its own
    settings = "\n".join(("[security]", *lines, *worker, ""))
    if options.engine == "swarm":
        return running_swarm(nodes, settings, keys["api_key"], encrypted=not options.plain_overlay)
    binaries = str(options.binaries.absolute())
    return running_kubernetes(nodes, folder, options.image, options.model, binaries, settings, keys["api_key"])


if __name__ == "__main__":
    sys.exit(main())
