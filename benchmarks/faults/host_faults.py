"""What is cut between hosts, or loses power, while streams run: what is lost, what differs, and for how long they stop.

    python -m benchmarks.faults.host_faults [--streams 24] [--only TEXT]

Hosts are network namespaces on a switch (`pdmesh_testing.hosts`; it takes root), with mutual TLS and KV over UCX:
the scheduler, a prefill and a decode instance, a prefill and a decode instance, the gateway with the clients. Each
pair of services on two hosts is cut, one way and both, for 5 and for 25 s; then a host with instances loses power.
Instances compute nothing (steps of 40 ms), so that streams last; what they say depends on what they were asked alone.

One line for each fault: streams that ended badly, or not at all (lost), that say something else than undisturbed
(differ), tokens that came twice (twice), instances given up though the scheduler could hear them, and the longest wait
between two tokens of a stream that had begun. Exit code 1 if anything but that wait is not 0.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import httpx

from benchmarks.harness.report import heading, unavailable
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import StreamFailed, random_prompts, streamed
from pdmesh_testing.hosts import API_KEY, GATEWAY_PORT, Hosts, running_hosts, why_no_hosts

#: By host: what runs there.
PLACES = {"a": ("scheduler",), "b": ("prefill", "decode"), "c": ("prefill", "decode"), "d": ("gateway",)}
STAND_IN = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.04"}

CUT_S = (5.0, 25.0)

#: Tokens of a stream that a cut is made under: it goes on for longer than the cut.
TOKENS_A_S = 25

#: Tokens that each stream has before something is cut.
NUM_BEGUN = 4

#: For a stream to end, beyond the cut.
LIMIT_S = 90.0


class Fault(NamedTuple):
    name: str
    away: str  # hosts that the scheduler does not hear, or that do not hear it
    duration_s: float
    begin: Callable[[Hosts], None]
    end: Callable[[Hosts], None]


@dataclass(slots=True)
class Stream:
    """What one stream said."""

    token_ids: list[int] = field(default_factory=list[int])
    longest_wait_s: float = 0.0
    ended: bool = False
    error: str = ""


def cuts() -> list[Fault]:
    faults: list[Fault] = []
    for duration_s in CUT_S:
        for one, other in combinations(PLACES, 2):
            for source, target, both in ((one, other, True), (one, other, False), (other, one, False)):
                names = f"{'/'.join(PLACES[source])} {'x' if both else 'x->'} {'/'.join(PLACES[target])}"

                def begin(hosts: Hosts, source: str = source, target: str = target, both: bool = both) -> None:
                    hosts.cut(source, target, both=both)

                def end(hosts: Hosts, source: str = source, target: str = target) -> None:
                    hosts.heal(source, target)

                name = f"{source}{'-' if both else '>'}{target} {names}"
                away = one + other if "a" in (one, other) else ""
                faults.append(Fault(name, away, duration_s, begin, end))
    faults.append(Fault("c loses power", "c", 10.0, lambda hosts: hosts.lose_power("c"), restore))
    return faults


def restore(hosts: Hosts) -> None:
    hosts.restore_power("c")
    start(hosts, "c")


def start(hosts: Hosts, host: str) -> None:
    for kind in PLACES[host]:
        hosts[host].start(kind, f"{kind}-{host}", {"WORKER_INSTANCE_ID": f"{kind}-{host}"})


async def follow(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
    """Note what comes of a stream, and how it ends."""
    last_s = math.inf

    def came(token_ids: list[int]) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        stream.token_ids = token_ids
        stream.longest_wait_s = max(stream.longest_wait_s, now_s - last_s)
        last_s = now_s

    try:
        await streamed(client, "model", prompt, max_tokens, came)
        stream.ended = True
    except (httpx.HTTPError, StreamFailed) as error:
        stream.error = repr(error)[:200]


async def ready(client: httpx.AsyncClient) -> None:
    with anyio.fail_after(LIMIT_S):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  # nobody else could tell
            await anyio.sleep(0.1)


async def run(hosts: Hosts, faults: Sequence[Fault], num_streams: int) -> int:
    """Print a line for each fault; return how many things were not as they should be."""
    prompts = random_prompts([40 + 3 * index for index in range(num_streams)], TINY.vocab_size, seed=5)
    client = httpx.AsyncClient(
        base_url=f"https://{hosts['d'].address}:{GATEWAY_PORT}",
        headers={"Authorization": f"Bearer {API_KEY}"},
        verify=hosts.https(),
        timeout=LIMIT_S + max(CUT_S),
        limits=httpx.Limits(max_connections=2 * num_streams),
        trust_env=False,
    )
    most = round((max(CUT_S) + 2) * TOKENS_A_S)
    num_bad = 0
    async with client:
        await ready(client)
        undisturbed = [Stream() for _ in prompts]
        async with anyio.create_task_group() as tasks:
            for prompt, stream in zip(prompts, undisturbed, strict=True):
                tasks.start_soon(follow, client, prompt, most, stream)
        assert all(stream.ended for stream in undisturbed), [stream.error for stream in undisturbed]
        print(f"{'fault':44} {'for':>5} {'lost':>5} {'differ':>6} {'twice':>5} {'given up':>8} {'longest gap':>11}")
        for fault in faults:
            num_bad += await one(hosts, client, prompts, undisturbed, fault)
    return num_bad


async def one(
    hosts: Hosts, client: httpx.AsyncClient, prompts: Sequence[Sequence[int]], undisturbed: list[Stream], fault: Fault
) -> int:
    log = hosts["a"].folder / "scheduler-a.log"
    begin_bytes = len(log.read_bytes())
    await ready(client)
    max_tokens = round((fault.duration_s + 2) * TOKENS_A_S)
    streams = [Stream() for _ in prompts]
    with anyio.move_on_after(fault.duration_s + LIMIT_S):
        async with anyio.create_task_group() as tasks:
            for prompt, stream in zip(prompts, streams, strict=True):
                tasks.start_soon(follow, client, prompt, max_tokens, stream)
            while not all(len(stream.token_ids) >= NUM_BEGUN or stream.error for stream in streams):  # noqa: ASYNC110
                await anyio.sleep(0.02)
            # On threads, so that the clients read on while processes are killed.
            await anyio.to_thread.run_sync(fault.begin, hosts)
            await anyio.sleep(fault.duration_s)
            await anyio.to_thread.run_sync(fault.end, hosts)
    said = log.read_bytes()[begin_bytes:].decode()
    given_up = [json.loads(line)["instance_id"] for line in said.splitlines() if '"instance lost' in line]
    num_given_up = sum(name.rpartition("-")[2] not in fault.away for name in given_up)
    lost = [stream.error or "it did not end" for stream in streams if not stream.ended]
    wanted = [stream.token_ids[:max_tokens] for stream in undisturbed]
    num_differ = sum(
        stream.token_ids[:max_tokens] != right[: len(stream.token_ids)]
        for stream, right in zip(streams, wanted, strict=True)
    )
    num_twice = sum(max(0, len(stream.token_ids) - max_tokens) for stream in streams)
    gap_s = max(stream.longest_wait_s for stream in streams)
    print(
        f"{fault.name:44} {fault.duration_s:4.0f}s {len(lost):5} {num_differ:6} {num_twice:5} {num_given_up:8} "
        f"{gap_s:9.2f} s",
        flush=True,
    )
    for reason in dict.fromkeys(lost):
        print(f"    lost: {reason}")
    await anyio.sleep(3.0)  # the next fault begins with a mesh that has forgotten a part of this one
    return len(lost) + num_differ + num_twice + num_given_up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    options = parser.parse_args()
    if (why_not := why_no_hosts()) is not None:
        unavailable(why_not)
    print(heading("faults between hosts"))
    faults = [fault for fault in cuts() if options.only in f"{fault.name} {fault.duration_s:g}"]
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "model", seed=3)
        with running_hosts(Path(folder) / "hosts", tuple(PLACES), {"MODEL": str(model), **STAND_IN}) as hosts:
            for host in PLACES:
                start(hosts, host)
            with hosts["d"].entered():
                num_bad = anyio.run(run, hosts, faults, options.streams)
    print(f"{num_bad} of it should be 0" if num_bad else "0 lost, 0 differ, 0 twice, no healthy instance given up")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
