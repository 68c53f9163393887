"""A long prompt that several instances compute, while one of them is killed or stopped, again and again.

    python benchmarks/relay_faults.py [--number 200] [--seed 0]

Every stream must have the tokens of an undisturbed one, and all blocks must be free at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from report import Limits, heading

from pdmesh.testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh

NUM_TOKENS = 4 * 1024
OUTPUT_TOKENS = 8
SETTINGS = {
    "WORKER_NUM_THREADS": "1",
    "WORKER_KV_CACHE_BYTES": str(1 << 30),
    "POLICY_LONG_PROMPT_TOKENS": "1024",
}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(num_tokens)]


async def ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int]) -> tuple[float, str]:
    """Seconds to the first token, and the whole text."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    began_s, first_s, lines = time.perf_counter(), 0.0, list[str]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began_s
                lines.append(line)
    texts = [match[1] for line in lines if (match := re.search(r'"text":\s*"((?:[^"\\]|\\.)*)"', line))]
    errors = [line for line in lines if '"error"' in line]
    if errors:
        raise RuntimeError(errors[0])
    return first_s, "".join(texts)


def exchanged(mesh: RunningMesh) -> str:
    """What the instances say of waiting and of bytes, summed."""
    text = "\n".join(mesh.metrics().values())

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.M))

    steps, waited_s = total("pdmesh:kv_wait_seconds_count"), total("pdmesh:kv_wait_seconds_sum")
    sent = total(r'pdmesh:kv_exchange_bytes_total\{direction="out"\}')
    return f"{steps:.0f} steps waited {waited_s:.3f} s in all, {sent / 2**20:.0f} MiB passed on"


async def faults(mesh: RunningMesh, number: int, seed: int) -> int:
    """How many streams differed, of so many with a member killed or stopped at some moment."""
    rng = random.Random(seed)
    differing = 0
    async with mesh.client() as client:
        prompt = prompt_of(1, NUM_TOKENS)
        _, expected = await ask(client, mesh.model, prompt)
        for fault in range(number):
            prefill = [(name, pid) for name, pid in mesh.pids().items() if name.startswith("prefill")]
            _, pid = rng.choice(prefill)
            kills = rng.random() < 0.5
            task = asyncio.create_task(ask(client, mesh.model, prompt))
            await asyncio.sleep(rng.uniform(0, 1.2))
            try:
                os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
                if not kills:
                    await asyncio.sleep(rng.uniform(0.05, 3))
                    os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
            seconds, text = await task
            differs = text != expected
            differing += differs
            said = "killed" if kills else "stopped"
            print(f"{fault}: {said} {pid}, {seconds:.2f} s{', DIFFERS' if differs else ''}", flush=True)
    await asyncio.to_thread(mesh.wait_until_idle, 60.0)
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(heading("A member killed or stopped, 82M parameters, bf16"))
    limits = Limits()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16")
        with running_mesh(folder, model=model, prefill=3, decode=1, settings=SETTINGS) as mesh:
            differing = asyncio.run(faults(mesh, options.number, options.seed))
            print(exchanged(mesh))
    stands = limits.at_least("streams with the same tokens", options.number - differing, options.number)
    print(
        f"{options.number - differing} of {options.number} streams have the same tokens ({stands}); all blocks are free"
    )
    limits.end()


if __name__ == "__main__":
    main()
