"""What it costs the mesh to refuse a request that would come too late: CPU microseconds of each process.

    python benchmarks/refusal_cost.py [--requests 1500] [--clients 8] [--long 300]

A 1P+1D mesh of stand-in engines whose steps are slow and take no CPU. Clients ask, one request after the other, for a
first token within ten seconds; a few of them are taken, and wait, and then nearly all are refused: prompts as ids, as
text and as chat, short and long, each on a connection of its own or on one that is kept. The CPU of idle seconds before
is taken off. The last column is that of the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from report import heading

from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Of the stand-in: a short prompt takes 1.3 s.
STEPS = "a_s=0.01,b_s=0.02,decode_a_s=0.005"
TARGET_S = 10.0

IDLE_S = 3.0
SHORT_TOKENS = 64

#: A client that has no answer by then has been taken, and asks on another connection.
REFUSED_WITHIN_S = 1.0

_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_LENGTH = re.compile(rb"content-length: (\d+)", re.I)


def cpu_us(pid: int) -> float:
    """All threads."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e3


def request_of(kind: str, num_tokens: int, rng: random.Random, *, keep: bool) -> bytes:
    words = " ".join(rng.choice(("what", "time", "is", "it", "now", "here")) for _ in range(num_tokens))
    match kind:
        case "ids":
            body = {"prompt": [rng.randrange(10, 200) for _ in range(num_tokens)], "max_tokens": 8}
        case "text":
            body = {"prompt": words, "max_tokens": 8}
        case _:
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 8}
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {'keep-alive' if keep else 'close'}\r\n"
        f"x-slo-ttft-ms: {1e3 * TARGET_S:g}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@dataclass(slots=True)
class Flood:
    """Clients that ask one after the other."""

    host: str
    port: int
    requests: list[bytes]
    keep: bool
    answers: Counter[str] = field(default_factory=Counter[str])
    taken: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])

    async def run(self, num_requests: int, num_clients: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_clients):
                    tasks.create_task(self._client(num_requests // num_clients))
        finally:
            for writer in self.taken:
                writer.close()

    async def _client(self, num_requests: int) -> None:
        connection = None
        for number in range(num_requests):
            if connection is None:
                connection = await asyncio.open_connection(self.host, self.port)
            reader, writer = connection
            writer.write(self.requests[number % len(self.requests)])
            try:
                async with asyncio.timeout(REFUSED_WITHIN_S):
                    head = await reader.readuntil(b"\r\n\r\n")
            except TimeoutError:
                self.taken.append(writer)
                self.answers["taken"] += 1
                connection = None
                continue
            length, status = _LENGTH.search(head), _STATUS.match(head)
            assert length is not None, head
            assert status is not None, head
            await reader.readexactly(int(length[1]))
            self.answers[status[1].decode()] += 1
            if not self.keep:
                writer.close()
                connection = None
        if connection is not None:
            connection[1].close()


async def measure(mesh: RunningMesh, options: argparse.Namespace) -> None:
    host, _, port = mesh.record.http_address.partition(":")
    rng = random.Random(0)
    pids = mesh.pids()
    before = {name: cpu_us(pid) for name, pid in pids.items()}
    await asyncio.sleep(IDLE_S)
    idle_per_s = {name: (cpu_us(pid) - before[name]) / IDLE_S for name, pid in pids.items()}
    print(f"{'prompt':22} {'connection':10} {'refused':>10} " + " ".join(f"{name:>12}" for name in (*pids, "client")))
    for num_tokens in (SHORT_TOKENS, options.long):
        for kind in options.kinds.split(","):
            for keep in (False, True):
                requests = [request_of(kind, num_tokens, rng, keep=keep) for _ in range(50)]
                fill = Flood(host, int(port), requests, keep)
                async with asyncio.TaskGroup() as tasks:
                    filling = tasks.create_task(fill.run(1000, 12))
                    await asyncio.sleep(2 * REFUSED_WITHIN_S + 0.5)  # the line is full
                    flood = Flood(host, int(port), requests, keep)
                    filling_num = fill.answers.total()
                    before, began_s = {name: cpu_us(pid) for name, pid in pids.items()}, time.monotonic()
                    own_s = time.process_time()
                    await flood.run(options.requests, options.clients)
                    took_s, own_s = time.monotonic() - began_s, time.process_time() - own_s
                    num = flood.answers.total() + fill.answers.total() - filling_num
                    cost = {
                        name: (cpu_us(pid) - before[name] - took_s * idle_per_s[name]) / num
                        for name, pid in pids.items()
                    }
                    await filling
                print(
                    f"{num_tokens:5} tokens, {kind:8} {'kept' if keep else 'its own':10} "
                    f"{flood.answers['429']:5}/{flood.answers.total():4} "
                    + " ".join(f"{cost[name]:9.0f} us" for name in pids)
                    + f" {1e6 * own_s / num:9.0f} us",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500, help="of each kind")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--long", type=int, default=300, help="tokens of the longer prompts")
    parser.add_argument("--kinds", default="ids,text,chat")
    options = parser.parse_args()
    print(heading("CPU of a refusal"))
    settings = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": STEPS}
    with TemporaryDirectory() as folder, running_mesh(Path(folder), model=None, settings=settings) as mesh:
        asyncio.run(measure(mesh, options))


if __name__ == "__main__":
    main()
