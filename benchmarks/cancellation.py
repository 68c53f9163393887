"""How soon a client that goes away gives its KV back.

A 1P+1D mesh with the 82M-parameter model; a client closes its connection while its request is queued (behind others),
prefilling, or decoding. Reported: seconds from the close to the last instance's release, from the request's record.

    python benchmarks/cancellation.py [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
from report import Limits, heading

from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

LIMIT_S = 1.0
SETTLE_S = 2.0


def body(mesh: RunningMesh, num_tokens: int) -> dict[str, object]:
    prompt = [random.randrange(LLAMA_82M.vocab_size) for _ in range(num_tokens)]
    return {"model": mesh.model, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}


async def leave(client: httpx.AsyncClient, mesh: RunningMesh, stage: str, name: str) -> float:
    """Start a request, go away at ``stage``, and return the seconds until everything it held was released."""
    closed_at = 0.0
    headers = {"X-Request-Id": name}
    if stage == "decoding":
        async with client.stream("POST", "/v1/completions", json=body(mesh, 64), headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and json.loads(line.removeprefix("data: "))["choices"]:
                    break
            closed_at = time.time()
    else:  # no token comes for seconds
        with anyio.move_on_after(0.5 + random.random()):
            await client.post("/v1/completions", json=body(mesh, 4000), headers=headers)
        closed_at = time.time()
    await anyio.sleep(SETTLE_S)
    record = await anyio.to_thread.run_sync(mesh.request_record, name)
    released = [entry.at_s for entry in record.entries if entry.what in ("released", "ended")]
    return record.arrived_at + max(released) - closed_at


async def measure(mesh: RunningMesh, rounds: int, limits: Limits) -> None:
    async with mesh.client() as client:
        for stage in ("queued", "prefilling", "decoding"):
            gone_s: list[float] = []
            for i in range(rounds):
                async with anyio.create_task_group() as tasks:
                    if stage == "queued":  # three long prompts ahead of it
                        for j in range(3):
                            tasks.start_soon(leave, client, mesh, "prefilling", f"ahead-{i}-{j}")
                        await anyio.sleep(0.1)
                    gone_s.append(await leave(client, mesh, stage, f"{stage}-{i}"))
            stands = limits.at_most(stage, max(gone_s), LIMIT_S)
            print(f"  {stage:10} {rounds} times: worst {max(gone_s):.3f} s ({stands})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    arguments, limits = parser.parse_args(), Limits()
    print(heading("From a client's close to the release of its KV, Llama 82M bf16, 1P+1D"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16")
        with running_mesh(folder, model=checkpoint, settings={"WORKER_KV_CACHE_BYTES": str(1 << 30)}) as mesh:
            anyio.run(measure, mesh, arguments.rounds, limits)
    limits.end()


if __name__ == "__main__":
    main()
