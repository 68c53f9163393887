"""How long new requests wait while hosts are cut from each other.

    python benchmarks/host_arrivals.py [--per-s 1.5] [--cut-s 10]

Hosts are network namespaces on a switch (`pdmesh_testing.hosts`; needs root), with mutual TLS and KV over UCX. Requests
arrive all the time, before, during and after the cut. Two meshes, one after the other:

* a prefill and a decode instance on one host, a decode instance on another; the two hosts are cut from each other;
* two schedulers and etcd; the gateway is cut from the scheduler that leads.

Instances compute nothing (steps of 20 ms); what each says depends on its prompt alone. One line for each cut: requests,
those that failed or did not end (lost), those that say something else than undisturbed (differ), the longest wait for
any token, and for a first one. Exit code 1 if a request is lost or differs, or a limit of *Card* is missed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import httpx
from report import Limits, heading, unavailable

from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.host_load import STAND_IN, StreamFailed, client_of, draw
from pdmesh_testing.host_standby import running_two_schedulers
from pdmesh_testing.hosts import Hosts, running_hosts, why_no_hosts
from pdmesh_testing.standby import why_no_etcd

NUM_TOKENS = 100  # of an answer: 2 s

#: Before the cut begins, and after it ended.
CALM_S = 4.0

#: For all requests to end.
LIMIT_S = 120.0

#: Longest wait for a token, by *Card*.
INSTANCES_LIMIT_S, GATEWAY_LIMIT_S = 3.0, 6.0


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    token_ids: list[int]
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    ended: bool = False
    error: str = ""


class Cost(NamedTuple):
    """What a cut cost the requests."""

    num_lost: int
    num_differ: int
    longest_wait_s: float


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> Answer:
    """Draw one answer, and note its waits."""
    answer = Answer([])
    last_s = time.monotonic()

    def wait() -> None:
        nonlocal last_s
        now_s = time.monotonic()
        answer.longest_wait_s = max(answer.longest_wait_s, now_s - last_s)
        last_s = now_s

    def came(token_ids: list[int]) -> None:
        is_first = not answer.token_ids
        answer.token_ids = list(token_ids)
        wait()
        if is_first:
            answer.first_wait_s = answer.longest_wait_s

    try:
        await draw(client, prompt, NUM_TOKENS, came)
        answer.ended = len(answer.token_ids) == NUM_TOKENS
    except (httpx.HTTPError, StreamFailed) as error:
        answer.error = repr(error)[:200]
    wait()
    return answer


async def measure(name: str, hosts: Hosts, one: str, other: str, options: argparse.Namespace) -> Cost:
    """Print and return what a cut between two hosts costs."""
    num_requests = round((2 * CALM_S + options.cut_s) * options.per_s)
    prompts = random_prompts([300 + 3 * index for index in range(num_requests)], TINY.vocab_size, seed=5)
    undisturbed: list[Answer] = []
    answers: dict[int, Answer] = {}
    async with client_of(hosts, "d") as client:
        for prompt in prompts:
            undisturbed.append(await ask(client, prompt))

        async def cut() -> None:
            await anyio.sleep(CALM_S)
            await anyio.to_thread.run_sync(hosts.cut, one, other)
            await anyio.sleep(options.cut_s)
            await anyio.to_thread.run_sync(hosts.heal, one, other)

        async def arrive(index: int) -> None:
            answers[index] = await ask(client, prompts[index])

        with anyio.move_on_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cut)
                for index in range(num_requests):
                    tasks.start_soon(arrive, index)
                    await anyio.sleep(1 / options.per_s)
    num_lost = num_requests - sum(answer.ended for answer in answers.values())
    num_differ = sum(
        answer.ended and answer.token_ids != undisturbed[index].token_ids for index, answer in answers.items()
    )
    longest_s = max(answer.longest_wait_s for answer in answers.values())
    first_s = max(answer.first_wait_s for answer in answers.values())
    calm_s = max(answer.longest_wait_s for answer in undisturbed)
    print(
        f"{name:34} {num_requests:8} {num_lost:5} {num_differ:7} {longest_s:8.2f} s {first_s:8.2f} s {calm_s:10.2f} s",
        flush=True,
    )
    for reason in dict.fromkeys(answer.error for answer in answers.values() if answer.error):
        print(f"    lost: {reason}")
    return Cost(num_lost, num_differ, longest_s)


def instances(folder: Path, run: Callable[[Hosts], Cost]) -> Cost:
    settings = {"MODEL": str(write_checkpoint(folder / "model", seed=3)), **STAND_IN}
    with running_hosts(folder / "hosts", ("a", "b", "c", "d"), settings) as hosts:
        hosts["a"].start("scheduler", "scheduler")
        for host, kind in (("b", "prefill"), ("b", "decode"), ("c", "decode")):
            hosts[host].start(kind, f"{kind}-{host}", {"WORKER_INSTANCE_ID": f"{kind}-{host}"})
        hosts["d"].start("gateway", "gateway")
        return run(hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-s", type=float, default=1.5, help="new requests")
    parser.add_argument("--cut-s", type=float, default=10.0)
    options = parser.parse_args()
    if (why_not := why_no_hosts()) is not None:
        unavailable(why_not)
    print(heading("new requests while hosts are cut from each other"))
    print(f"{'cut':34} {'requests':>8} {'lost':>5} {'differ':>7} {'longest':>10} {'first':>10} {'undisturbed':>12}")
    limits = Limits()
    with tempfile.TemporaryDirectory() as folder:
        cost = instances(
            Path(folder), lambda hosts: anyio.run(measure, "two instances' hosts", hosts, "b", "c", options)
        )
        judge(limits, "instances", cost, INSTANCES_LIMIT_S)
    if (why_not := why_no_etcd()) is not None:
        unavailable(why_not)
    with tempfile.TemporaryDirectory() as folder, running_two_schedulers(Path(folder), STAND_IN) as hosts:
        cost = anyio.run(measure, "gateway and leading scheduler", hosts, "a", "d", options)
        judge(limits, "gateway", cost, GATEWAY_LIMIT_S)
    limits.end()


def judge(limits: Limits, name: str, cost: Cost, limit_s: float) -> None:
    limits.at_most(f"{name}: lost or different", cost.num_lost + cost.num_differ, 0.5)
    limits.at_most(f"{name}: longest wait", cost.longest_wait_s, limit_s)


if __name__ == "__main__":
    main()
