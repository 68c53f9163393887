"""Streams of clients of a mesh on hosts, compared with their undisturbed output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio
import httpx

from pdmesh_testing.checkpoints import TINY
from pdmesh_testing.exactness import random_prompts, streamed
from pdmesh_testing.hosts import API_KEY, GATEWAY_PORT, Hosts

#: Instances without a model, whose decode steps take 20 ms: streams last.
STAND_IN = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.02"}

NUM_STREAMS = 8
#: Most tokens of a stream.
MOST_TOKENS = 450

#: A stream has begun once it has so many.
NUM_BEGUN = 4

#: For all that has to happen in a test.
LIMIT_S = 120.0


@asynccontextmanager
async def client_of(hosts: Hosts, name: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client on the host of that name, once its gateway is ready."""
    url = f"https://{hosts[name].address}:{GATEWAY_PORT}"
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with hosts[name].entered():
        async with httpx.AsyncClient(
            base_url=url, headers=headers, verify=hosts.https(), timeout=LIMIT_S, trust_env=False
        ) as client:
            with anyio.fail_after(LIMIT_S):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  # nobody else could tell
                    await anyio.sleep(0.1)
                yield client


class HostLoad:
    """Streams that run while the mesh is disturbed, and must have the same output as undisturbed."""

    def __init__(self, hosts: Hosts, gateway: str) -> None:
        """``gateway`` is the host of the gateway, and of the clients."""
        self._hosts = hosts
        self._gateway = gateway
        self._prompts = random_prompts([300 + 3 * i for i in range(NUM_STREAMS)], TINY.vocab_size, seed=5)
        self._undisturbed: dict[int, list[int]] = {}

    async def run(
        self, disturb: Callable[[], object], *, max_tokens: int, num_before: int = NUM_STREAMS, limit_s: float = LIMIT_S
    ) -> None:
        """Begin ``num_before`` streams, ``disturb`` once each has some tokens, begin the others, and let all end."""
        async with client_of(self._hosts, self._gateway) as client:
            if not self._undisturbed:
                async with anyio.create_task_group() as tasks:
                    for index in range(NUM_STREAMS):
                        tasks.start_soon(self._draw, client, index, MOST_TOKENS, self._undisturbed)
            got: dict[int, list[int]] = {}
            begun = [anyio.Event() for _ in range(NUM_STREAMS)]
            with anyio.fail_after(limit_s):
                async with anyio.create_task_group() as tasks:
                    for index in range(NUM_STREAMS):
                        if index == num_before:
                            for event in begun[:num_before]:
                                await event.wait()
                            disturb()
                        tasks.start_soon(self._draw, client, index, max_tokens, got, begun[index])
                    if num_before == NUM_STREAMS:
                        for event in begun:
                            await event.wait()
                        disturb()
        assert got == {index: token_ids[:max_tokens] for index, token_ids in self._undisturbed.items()}

    async def _draw(
        self,
        client: httpx.AsyncClient,
        index: int,
        max_tokens: int,
        into: dict[int, list[int]],
        begun: anyio.Event | None = None,
    ) -> None:
        def drawn(token_ids: list[int]) -> None:
            if begun is not None and len(token_ids) >= NUM_BEGUN:
                begun.set()

        into[index] = await streamed(client, "model", self._prompts[index], max_tokens, drawn)


@contextmanager
def log_of(hosts: Hosts, host: str, name: str) -> Generator[Callable[[], str]]:
    """Yield a function that returns the log of a service from here on."""
    log = hosts[host].folder / f"{name}.log"
    begin = len(log.read_text()) if log.exists() else 0
    yield lambda: log.read_text()[begin:]
