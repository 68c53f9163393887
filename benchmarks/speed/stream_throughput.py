"""Tokens a second that the mesh streams when the model takes no time.

64 HTTP clients stream completions from 1P+1D with the stand-in engine; what is left is the cost of the gateway, of the
token frames and of the client itself, all on this machine's cores. CPU seconds for a million tokens tell more than the
rate does where something else is at work.

    python -m benchmarks.speed.stream_throughput [--clients 64] [--seconds 15] [--max-tokens 256] [--chat]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.harness.report import Limits, heading
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

TARGET_TOKENS_PER_S = 30_000

#: A response ends within so many bytes with its usage.
LAST_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Streamed:
    """What all clients were sent."""

    num_tokens: int
    num_finished: int
    num_events: int
    elapsed_s: float


class Client(asyncio.Protocol):
    """Asks for one completion after the other over a connection, until the deadline, and counts what it is sent.

    A protocol of its own, because an HTTP library, or a task to read each piece, would cost more than the gateway that
    is measured.
    """

    def __init__(self, request: bytes, deadline_s: float) -> None:
        self._request = request
        self._deadline_s = deadline_s
        self._transport: asyncio.WriteTransport | None = None
        self._rest = b""  # the end of what came: the last event of a response, and the end of its chunks
        self.num_tokens = self.num_finished = self.num_events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self._rest = (self._rest + data)[-LAST_BYTES:]
        if self._rest.endswith(b"0\r\n\r\n") and b"[DONE]" in self._rest:
            event = next(line for line in reversed(self._rest.split(b"data: ")) if b'"usage":{' in line)
            self.num_tokens += int(json.loads(event[: event.rindex(b"}") + 1])["usage"]["completion_tokens"])
            self.num_finished += 1
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(self._rest.decode(errors="replace")))

    def _ask(self) -> None:
        assert self._transport is not None
        self._rest = b""
        if time.monotonic() < self._deadline_s:
            self._transport.write(self._request)
        else:
            self.done.set_result(None)
            self._transport.close()


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
    headers = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = f"POST {path} HTTP/1.1\r\n{headers}".encode() + body
    loop, began_s = asyncio.get_running_loop(), time.monotonic()

    def client() -> Client:
        return Client(request, began_s + seconds)

    asking = [(await loop.create_connection(client, host, int(port)))[1] for _ in range(clients)]
    await asyncio.gather(*(each.done for each in asking))
    return Streamed(
        num_tokens=sum(each.num_tokens for each in asking),
        num_finished=sum(each.num_finished for each in asking),
        num_events=sum(each.num_events for each in asking),
        elapsed_s=time.monotonic() - began_s,
    )


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
            uvloop.run(load(mesh, arguments.clients, 2, number, chat=chat))  # warm
            before_s, own_before_s = mesh.cpu_s(), time.process_time()
            streamed = uvloop.run(load(mesh, arguments.clients, arguments.seconds, number, chat=chat))
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
