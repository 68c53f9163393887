"""Tokens a second that the mesh streams when the model takes no time.

64 HTTP clients stream completions from 1P+1D with the stand-in engine; what is left is the cost of the gateway, of the
token frames and of the client itself, all on this machine's cores. CPU seconds for a million tokens tell more than the
rate does where something else is at work.

    python benchmarks/stream_throughput.py [--clients 64] [--seconds 15] [--max-tokens 256] [--chat]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from report import Limits, heading

from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh

TARGET_TOKENS_PER_S = 30_000


@dataclass(frozen=True, slots=True)
class Streamed:
    """What all clients were sent."""

    num_tokens: int
    num_finished: int
    num_events: int
    elapsed_s: float


async def stream(host: str, port: int, path: str, body: bytes, deadline_s: float) -> tuple[int, int, int]:
    """Requests one after the other over one connection until the deadline: (tokens, finished requests, events).

    A raw socket, because an HTTP library's client would cost more than the gateway that is measured.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    num_tokens = num_finished = num_events = 0
    while time.monotonic() < deadline_s:
        writer.write(head + body)
        usage = b""
        while b"[DONE]" not in usage:
            piece = await reader.read(65536)
            num_events += piece.count(b"data: ")
            usage = usage[-2000:] + piece
            if not reader.at_eof():
                continue
            raise ConnectionError(usage.decode(errors="replace"))
        while not usage.endswith(b"0\r\n\r\n"):
            usage += await reader.read(65536)
        event = next(line for line in reversed(usage.split(b"data: ")) if b'"usage"' in line)
        num_tokens += int(json.loads(event[: event.rindex(b"}") + 1])["usage"]["completion_tokens"])
        num_finished += 1
    writer.close()
    return num_tokens, num_finished, num_events


async def load(mesh: RunningMesh, clients: int, seconds: float, max_tokens: int, *, chat: bool) -> Streamed:
    """What ``clients`` at once are sent."""
    host, port = mesh.record.http_address.rsplit(":", 1)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": list(range(16))}
    body = json.dumps(
        {
            "model": mesh.model,
            **prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(host, int(port), path, body, began_s + seconds)) for _ in range(clients)]
    elapsed_s = time.monotonic() - began_s
    num_tokens, num_finished, num_events = map(sum, zip(*(task.result() for task in streams), strict=True))
    return Streamed(num_tokens, num_finished, num_events, elapsed_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--chat", action="store_true", help="stream chats, not completions")
    arguments, limits = parser.parse_args(), Limits()
    print(heading("Streaming throughput, stand-in engine, 1P+1D"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model")
        with running_mesh(folder, model=checkpoint, settings={"WORKER_ENGINE": "fake"}) as mesh:
            number, chat = arguments.max_tokens, arguments.chat
            asyncio.run(load(mesh, arguments.clients, 2, number, chat=chat))  # warm
            before_s, own_before_s = mesh.cpu_s(), time.process_time()
            streamed = asyncio.run(load(mesh, arguments.clients, arguments.seconds, number, chat=chat))
            spent_s = {name: after_s - before_s[name] for name, after_s in mesh.cpu_s().items()}
            spent_s["clients"] = time.process_time() - own_before_s
    rate = streamed.num_tokens / streamed.elapsed_s
    print(
        f"{arguments.clients} clients, {streamed.num_finished} requests of {number} tokens: {rate:,.0f} tokens/s "
        f"({limits.at_least('tokens/s', rate, TARGET_TOKENS_PER_S)} of {TARGET_TOKENS_PER_S:,}), "
        f"{streamed.num_tokens / streamed.num_events:.2f} tokens an event"
    )
    million = streamed.num_tokens / 1e6
    told = ", ".join(f"{name} {spent / million:.1f}" for name, spent in spent_s.items())
    print(f"CPU seconds for a million tokens: {told}; together {sum(spent_s.values()) / million:.1f}")
    limits.end()


if __name__ == "__main__":
    main()
