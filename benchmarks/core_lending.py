"""What lent cores gain and cost: 1P+1D on this host's cores, beside fixed numbers of threads.

Usage: python benchmarks/core_lending.py --model FILE [--rounds 3] [--prompt-tokens 2000] [--prompts 2]

Three meshes run at once, and all but one are idle: each worker has half of the cores (*own*), all of the cores (*all*),
or half of them and those that the other worker lends (*lent*). Each round measures each mesh, in turn:

* alone: time to the first token (TTFT) of a long prompt, and tokens/s of one stream;
* beside four streams: TTFT of long prompts, and the time between two tokens (ITL) of the streams meanwhile.

Figures are medians over rounds, and the 99th percentile of all ITLs. Exits 1 if a limit is missed: alone, lent cores
take at most 1.05 x the better TTFT and give at least 0.95 x the better rate; beside streams, at most 1.1 x the own
cores' TTFT and ITL. The machine must be quiet, and have an even number of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
from report import Limits, heading, quantile, unavailable

from pdmesh.engine.files import load_model_config, resolve_model
from pdmesh.host import num_usable_cores
from pdmesh_testing.mesh import RunningMesh, running_mesh

NUM_STREAMS = 4
STREAM_TOKENS = 128

#: Longer than any measurement beside streams: the streams are cancelled.
ENDLESS_TOKENS = 4000


@dataclass(slots=True)
class Figures:
    """What was measured of one mesh, in seconds and tokens/s."""

    alone_ttft_s: list[float] = field(default_factory=list[float])
    alone_rate: list[float] = field(default_factory=list[float])
    beside_ttft_s: list[float] = field(default_factory=list[float])
    beside_itl_s: list[float] = field(default_factory=list[float])

    @property
    def medians(self) -> tuple[float, float, float, float]:
        """TTFT and rate alone, then TTFT and the 99th percentile of ITL beside streams."""
        first_three = (self.alone_ttft_s, self.alone_rate, self.beside_ttft_s)
        return (*map(statistics.median, first_three), quantile(self.beside_itl_s, 0.99))  # type: ignore[return-value]


class Load:
    """Requests to one mesh, of prompts that no cache has."""

    def __init__(self, mesh: RunningMesh, client: httpx.AsyncClient, vocab_size: int, rng: random.Random) -> None:
        self._mesh = mesh
        self._client = client
        self._vocab_size = vocab_size
        self._rng = rng

    async def token_times_s(self, num_prompt_tokens: int, max_tokens: int) -> AsyncIterator[float]:
        """When each token arrives."""
        body = {
            "model": self._mesh.model,
            "prompt": [self._rng.randrange(100, self._vocab_size) for _ in range(num_prompt_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    yield time.perf_counter()

    async def ttft_s(self, num_prompt_tokens: int) -> float:
        began_s = time.perf_counter()
        times_s = [at_s async for at_s in self.token_times_s(num_prompt_tokens, 2)]
        return times_s[0] - began_s

    async def rate(self) -> float:
        times_s = [at_s async for at_s in self.token_times_s(16, STREAM_TOKENS)]
        return (len(times_s) - 1) / (times_s[-1] - times_s[0])

    async def beside_streams(self, num_prompt_tokens: int, num_prompts: int) -> tuple[list[float], list[float]]:
        """TTFTs of prompts one after the other, and ITLs of the streams meanwhile."""
        ttfts_s: list[float] = []
        itls_s: list[float] = []
        is_measuring = False
        num_streaming = 0
        all_stream = anyio.Event()

        async def stream() -> None:
            nonlocal num_streaming
            last_s = 0.0
            async for at_s in self.token_times_s(16, ENDLESS_TOKENS):
                if not last_s:
                    num_streaming += 1
                    if num_streaming == NUM_STREAMS:
                        all_stream.set()
                elif is_measuring:
                    itls_s.append(at_s - last_s)
                last_s = at_s

        async with anyio.create_task_group() as streams:
            for _ in range(NUM_STREAMS):
                streams.start_soon(stream)
            await all_stream.wait()
            is_measuring = True
            for _ in range(num_prompts):
                ttfts_s.append(await self.ttft_s(num_prompt_tokens))
            streams.cancel_scope.cancel()
        return ttfts_s, itls_s


async def measure(
    meshes: dict[str, RunningMesh], vocab_size: int, *, num_rounds: int, num_prompt_tokens: int, num_prompts: int
) -> dict[str, Figures]:
    """Measure all meshes in turn, after one round that only warms up."""
    found = {name: Figures() for name in meshes}
    rngs = {name: random.Random(0) for name in meshes}
    for number in range(num_rounds + 1):
        for name, mesh in meshes.items():
            async with mesh.client() as client:
                load, figures = Load(mesh, client, vocab_size, rngs[name]), found[name]
                if number == 0:
                    await load.ttft_s(num_prompt_tokens // 4)
                    continue
                figures.alone_ttft_s.append(await load.ttft_s(num_prompt_tokens))
                figures.alone_rate.append(await load.rate())
                ttfts_s, itls_s = await load.beside_streams(num_prompt_tokens, num_prompts)
                figures.beside_ttft_s += ttfts_s
                figures.beside_itl_s += itls_s
                print(f"round {number}, {name}: {line(figures)}", flush=True)
            mesh.wait_until_idle(60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint that compiled kernels compute")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=2, help="beside streams, in each round")
    options = parser.parse_args()
    if options.model is None:
        unavailable("--model names no checkpoint, such as SmolLM2-135M-Instruct.Q4_1.gguf")
    if (num_cores := num_usable_cores()) < 2:
        unavailable("there is one core: nothing can be lent")
    print(heading(f"Cores lent between one prefill and one decode worker, {options.model.name}, {num_cores} cores"))
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
    num_own = num_cores // 2
    settings = {"own": (num_own, "false"), "all": (num_cores, "false"), "lent": (num_own, "true")}
    model = options.model.absolute()
    vocab_size = load_model_config(resolve_model(str(model))).vocab_size
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meshes = {
            name: stack.enter_context(
                running_mesh(
                    Path(folder) / name,
                    model=model,
                    settings={
                        "WORKER_NUM_THREADS": str(num_threads),
                        "WORKER_LEND_CORES": lends,
                        "WORKER_KV_CACHE_BYTES": str(1 << 30),
                    },
                )
            )
            for name, (num_threads, lends) in settings.items()
        }
        found = anyio.run(
            lambda: measure(
                meshes,
                vocab_size,
                num_rounds=options.rounds,
                num_prompt_tokens=options.prompt_tokens,
                num_prompts=options.prompts,
            )
        )
        lent_s = meshes["lent"].total("lent_core_seconds")
    for name, figures in found.items():
        print(f"{name:5} {line(figures)}")
    print(f"load of the machine after: {os.getloadavg()[0]:.1f}; core seconds on lent cores: {lent_s:.1f}")
    judge(found)


def line(figures: Figures) -> str:
    ttft_s, rate, beside_s, itl_s = figures.medians
    return (
        f"TTFT alone {ttft_s:6.2f} s, one stream {rate:5.1f} tokens/s; "
        f"beside streams TTFT {beside_s:6.2f} s, ITL p99 {itl_s * 1e3:5.0f} ms"
    )


def judge(found: dict[str, Figures]) -> None:
    own, every, lent = (found[name].medians for name in ("own", "all", "lent"))
    limits = Limits()
    print("TTFT alone:", limits.at_most("TTFT alone", lent[0], 1.05 * min(own[0], every[0])))
    print("one stream:", limits.at_least("one stream", lent[1], 0.95 * max(own[1], every[1])))
    print("TTFT beside streams:", limits.at_most("TTFT beside streams", lent[2], 1.1 * own[2]))
    print("ITL p99 beside streams:", limits.at_most("ITL p99 beside streams", lent[3], 1.1 * own[3]))
    limits.end()


if __name__ == "__main__":
    main()
