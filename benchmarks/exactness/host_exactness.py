"""The exactness promise between hosts: prompts, moves and prefill groups over a slow and lossy network.

    python -m benchmarks.exactness.host_exactness [--architectures llama,qwen2,qwen3] [--networks quiet,1ms,10ms,lossy]
        [--ways 16,adaptive,pipelined,parallel,moves,fetches]

Three network namespaces are hosts (`pdmesh_testing.hosts`; it takes root), with mutual TLS and KV over UCX: a has the
scheduler, the gateway and a decode instance; b and c have a prefill and a decode instance each. Each frame between two
hosts is delayed by 0, 1 or 10 ms each way, or by 1 ms and one of a hundred is lost. The ways are chunk sizes, how two
prefill instances share a prompt, running decodes that are moved between the three hosts again and again, and prompts
that begin alike and come at once, so that the other prefill instance copies what one keeps. Tokens and
log-probabilities are compared with those of `transformers` in fp32; each prompt is asked for four times, so that later
ones reuse KV. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import anyio
import httpx

from benchmarks.harness.report import heading
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import Reference, mismatches, random_prompts, reference
from pdmesh_testing.hosts import (
    API_KEY,
    GATEWAY_PORT,
    SCHEDULER_PORT,
    Hosts,
    running_hosts,
    why_no_hosts,
)
from pdmesh_testing.operating import Mover, OperatorClient

PLACES = (("a", "decode"), ("b", "prefill"), ("b", "decode"), ("c", "prefill"), ("c", "decode"))

#: By name: seconds each way, and the share of frames that are lost; None: the kernel's own switch.
NETWORKS = {"quiet": None, "1ms": (0.001, 0.0), "10ms": (0.010, 0.0), "lossy": (0.001, 0.01)}

LENGTHS = (1, 15, 16, 17, 100, 511, 513, 1000, 1500)
MAX_TOKENS = 16
#: Of requests that are moved, so that they last.
MOVED_TOKENS = 120
NUM_MOVES = 20

GROUPED = {"POLICY_LONG_PROMPT_TOKENS": "500", "POLICY_PREFILL_STEP_S": "0.02", "POLICY_GROUP_IMPROVEMENT": "0"}
WAYS = {
    "16": {"SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": "16"},
    "adaptive": {},
    "pipelined": {"POLICY_SEQUENCE_PARALLEL": "pipelined", **GROUPED},
    "parallel": {"POLICY_SEQUENCE_PARALLEL": "parallel", **GROUPED},
    "moves": {},
    "fetches": {"SCHEDULER_BUNDLE": "fcfs"},
}

#: A model slow enough that copying a stem of so many tokens is sooner than computing it, and what follows the stem.
SLOW = replace(TINY, hidden_size=256, intermediate_size=1024, num_layers=4)
STEM_TOKENS = 3000
REST_LENGTHS = (1, 17, 100, 200, 300, 400, 500)

GROUPS = ("pipelined", "parallel")

OPERATOR_TOKEN = "operator-of-the-hosts"
LIMIT_S = 300.0


def mover_between(hosts: Hosts) -> Mover:
    """Return what moves running decodes from host to host."""
    security = replace(hosts.security("a"), operator_token=OPERATOR_TOKEN)
    operator = OperatorClient(f"{hosts['a'].address}:{SCHEDULER_PORT}", security)
    return Mover(operator, [f"decode-{host}" for host, kind in PLACES if kind == "decode"])


def start_all(hosts: Hosts) -> None:
    hosts["a"].start("scheduler", "scheduler")
    for host, kind in PLACES:
        hosts[host].start(kind, f"{kind}-{host}", {"WORKER_INSTANCE_ID": f"{kind}-{host}"})
    hosts["a"].start("gateway", "gateway")


async def check(hosts: Hosts, references: Sequence[Reference], way: str) -> tuple[list[str], int]:
    """(what differs, moves that were made)."""
    client = httpx.AsyncClient(
        base_url=f"https://{hosts['a'].address}:{GATEWAY_PORT}",
        headers={"Authorization": f"Bearer {API_KEY}"},
        verify=hosts.https(),
        timeout=LIMIT_S,
        trust_env=False,
    )
    mover, found = mover_between(hosts), list[str]()
    async with client, anyio.create_task_group() as tasks:
        with anyio.fail_after(LIMIT_S):
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  # nobody else could tell
                await anyio.sleep(0.1)
        if way == "moves":
            tasks.start_soon(mover.run)
        # Those that begin alike come at once, but for the first: while one instance keeps what they have in common
        # and computes, the other copies it.
        num_alone = 1 if way == "fetches" else len(references)
        found += await mismatches(client, "model", references[:num_alone], concurrency=1)
        found += await mismatches(client, "model", references[num_alone:], concurrency=16)
        found += await mismatches(client, "model", list(references) * 3, concurrency=16)
        while way == "moves" and mover.num_moved < NUM_MOVES:
            found += await mismatches(client, "model", references, concurrency=4)
        tasks.cancel_scope.cancel()
    return found, mover.num_moved


def totals(hosts: Hosts, metric: str) -> int:
    """Of a counter, over all instances; metrics are served to their own hosts alone."""
    total = 0.0
    for host, kind in PLACES:
        service = next(each for each in hosts[host].services if each.name == f"{kind}-{host}")
        url = f"https://127.0.0.1:{service.facts['metrics_port']}/metrics"
        with hosts[host].entered():
            text = httpx.get(url, verify=hosts.https(), timeout=30, trust_env=False).text
        total += sum(float(number) for number in re.findall(rf"^{metric} (\S+)$", text, re.M))
    return int(total)


def try_way(folder: Path, model: Path, architecture: str, way: str, networks: Sequence[str]) -> tuple[int, int]:
    """(completions that were asked for, things that differ), of one mesh over each of the networks in turn.

    Each has prompts of its own, so that what another one's left is not reused.
    """
    num_asked = num_differ = num_shared = num_reused = 0
    settings = {"MODEL": str(model), "SECURITY_OPERATOR_TOKEN": OPERATOR_TOKEN, **WAYS[way]}
    num_copied = 0
    with running_hosts(folder, ("a", "b", "c"), settings) as hosts:
        start_all(hosts)
        for network in networks:
            began_s, slow = time.monotonic(), NETWORKS[network]
            references = references_of(model, way, seed=list(NETWORKS).index(network))
            with nullcontext() if slow is None else hosts.slowed(*slow), hosts["a"].entered():
                found, num_moved = anyio.run(check, hosts, references, way)
            reused = totals(hosts, "pdmesh:prefix_cache_hits_total") - num_reused
            num_reused += reused
            shared = totals(hosts, 'pdmesh:kv_exchange_bytes_total{direction="out"}') - num_shared
            num_shared += shared
            if way in GROUPS and not shared:
                found.append("every prompt was computed by one instance")
            copied = totals(hosts, "pdmesh:prefix_cache_fetched_tokens_total") - num_copied
            num_copied += copied
            if way == "fetches" and not copied:
                found.append("no prefix was copied")
            num_asked += 4 * len(references)
            num_differ += len(found)
            print(
                f"{architecture:6} {way:10} {network:6}: {'exact' if not found else f'{len(found)} differ'} "
                f"({time.monotonic() - began_s:.0f} s, {reused:,} tokens reused, {copied:,} copied, "
                f"{shared >> 10:,} KiB shared, {num_moved} moves)",
                flush=True,
            )
            for sentence in found[:3]:
                print(f"       {sentence[:300]}")
    return num_asked, num_differ


def references_of(model: Path, way: str, seed: int) -> list[Reference]:
    """What is expected; of requests that are moved, more tokens."""
    if way == "fetches":
        stem, *rests = random_prompts((STEM_TOKENS, *REST_LENGTHS), TINY.vocab_size, seed=seed)
        return [reference(model, [*stem, *rest], MAX_TOKENS) for rest in rests]
    prompts = random_prompts(LENGTHS, TINY.vocab_size, seed=seed)
    if way == "moves":
        return [reference(model, prompt, MOVED_TOKENS) for prompt in prompts[1:7]]
    return [reference(model, prompt, MAX_TOKENS) for prompt in prompts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="llama,qwen2,qwen3")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    if (why_not := why_no_hosts()) is not None:
        print(why_not)
        return 2
    print(heading("exactness between hosts"))
    num_asked = num_differ = 0
    for architecture in options.architectures.split(","):
        with tempfile.TemporaryDirectory() as name:
            models = {
                shape: write_checkpoint(Path(name) / folder / "model", architecture=architecture, shape=shape, seed=1)
                for folder, shape in (("tiny", TINY), ("slow", SLOW))
            }
            for way in options.ways.split(","):
                model = models[SLOW if way == "fetches" else TINY]
                asked, differ = try_way(Path(name) / way, model, architecture, way, options.networks.split(","))
                num_asked += asked
                num_differ += differ
    print(f"{num_asked} completions, {num_differ} differ")
    return 1 if num_differ else 0


if __name__ == "__main__":
    sys.exit(main())
