"""Tokens a second that the mesh streams when the model takes no time.

64 HTTP clients stream completions from 1P+1D with the stand-in engine; what is left is the cost of the gateway, of the
token frames and of the client itself, all on this machine's cores.

    python benchmarks/stream_throughput.py [--clients 64] [--seconds 15] [--max-tokens 256]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from report import Limits, heading

from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh

TARGET_TOKENS_PER_S = 4000


async def stream(host: str, port: int, body: bytes, deadline_s: float) -> tuple[int, int]:
    """Requests one after the other over one connection until the deadline: (tokens, finished requests).

    A raw socket, because an HTTP library's client would cost more than the gateway that is measured.
    """
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    num_tokens = num_finished = 0
    while time.monotonic() < deadline_s:
        writer.write(head + body)
        usage = b""
        while b"[DONE]" not in usage:
            usage = usage[-2000:] + await reader.read(65536)
            if not reader.at_eof():
                continue
            raise ConnectionError(usage.decode(errors="replace"))
        while not usage.endswith(b"0\r\n\r\n"):
            usage += await reader.read(65536)
        event = next(line for line in reversed(usage.split(b"data: ")) if b'"usage"' in line)
        num_tokens += int(json.loads(event[: event.rindex(b"}") + 1])["usage"]["completion_tokens"])
        num_finished += 1
    writer.close()
    return num_tokens, num_finished


async def load(mesh: RunningMesh, clients: int, seconds: float, max_tokens: int) -> tuple[float, int]:
    """(tokens a second, finished requests) of ``clients`` at once."""
    host, port = mesh.record.http_address.rsplit(":", 1)
    body = json.dumps(
        {
            "model": mesh.model,
            "prompt": list(range(16)),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(host, int(port), body, began_s + seconds)) for _ in range(clients)]
    elapsed_s = time.monotonic() - began_s
    results = [task.result() for task in streams]
    return sum(tokens for tokens, _ in results) / elapsed_s, sum(finished for _, finished in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments, limits = parser.parse_args(), Limits()
    print(heading("Streaming throughput, stand-in engine, 1P+1D"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model")
        with running_mesh(folder, model=checkpoint, settings={"WORKER_ENGINE": "fake"}) as mesh:
            asyncio.run(load(mesh, arguments.clients, 2, arguments.max_tokens))  # warm
            rate, finished = asyncio.run(load(mesh, arguments.clients, arguments.seconds, arguments.max_tokens))
    print(
        f"{arguments.clients} clients, {finished} requests of {arguments.max_tokens} tokens: {rate:,.0f} tokens/s "
        f"({limits.at_least('tokens/s', rate, TARGET_TOKENS_PER_S)} of {TARGET_TOKENS_PER_S:,})"
    )
    limits.end()


if __name__ == "__main__":
    main()
