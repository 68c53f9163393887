"""Memory on demand beside full reservation: how many chats without ``max_tokens`` run at once in the same cache.

Usage: python benchmarks/memory.py [--chats 200] [--contexts 2] [--seed 0]

A mesh of real processes with one instance that does both, the stand-in engine with the step times of a small model, a
context of 32K tokens and a cache that holds ``--contexts`` of them. All chats are sent at once; an answer ends by
chance, after 200 tokens in the mean. Of each kind of reservation: the chats that decode at once (the mean over the time
in which more wait), failures, preemptions. Prints JSON; exits 1 unless credit runs 8 times as many as full reservation,
nothing failed, tokens are the same under both, and all blocks were free in the end.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
from report import heading

from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

CONTEXT_TOKENS = 32_768
BLOCK_BYTES = 2 * 2 * 2 * 64 * 16 * 4  # of the stand-in: layers, keys and values, heads, dimension, tokens, bytes
WANTED_RATIO = 8

#: It draws one of 60 tokens at random: this one ends an answer, after 140 tokens, with the next 60 in the mean.
END_TOKEN, MIN_TOKENS = 40, 140


@dataclass
class Chat:
    text: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""


async def ask(client: httpx.AsyncClient, model: str, number: int, seed: int) -> Chat:
    chat = Chat()
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Say something about {number}. " * (1 + number % 4)}],
        "stream": True,
        "seed": seed + number,
        "temperature": 1,
        "ignore_eos": True,
        "stop_token_ids": [END_TOKEN],
        "min_tokens": MIN_TOKENS,
    }
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    chat.error = json.dumps(event["error"])
                    break
                for choice in event["choices"]:
                    chat.text += choice["delta"].get("content") or ""
                    chat.last_s = time.monotonic()
                    chat.first_s = chat.first_s or chat.last_s
            if response.status_code != 200:
                chat.error = chat.error or f"status {response.status_code}"
    except httpx.HTTPError as error:
        chat.error = repr(error)
    return chat


def mean_at_once(chats: list[Chat]) -> float:
    """Between the first token of all and the first token of the last to begin."""
    begun = [chat for chat in chats if chat.first_s]
    start_s, end_s = min(chat.first_s for chat in begun), max(chat.first_s for chat in begun)
    busy_s = sum(max(0.0, min(chat.last_s, end_s) - chat.first_s) for chat in begun)
    return busy_s / max(end_s - start_s, 1e-9)


async def serve(mesh: RunningMesh, num_chats: int, seed: int) -> list[Chat]:
    chats: list[Chat] = []

    async def one(number: int) -> None:
        chats[number] = await ask(client, mesh.model, number, seed)

    async with mesh.client() as client:
        chats += [Chat() for _ in range(num_chats)]
        async with anyio.create_task_group() as tasks:
            for number in range(num_chats):
                tasks.start_soon(one, number)
    return chats


def a_model(folder: Path) -> Path:
    """Of which the stand-in takes the tokenizer, and the gateway the context length."""
    folder.mkdir()
    shape = replace(TINY, max_position_embeddings=CONTEXT_TOKENS)
    write_checkpoint(folder, architecture="llama", shape=shape, seed=1)
    return folder


def measure(reservation: str, num_chats: int, contexts: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    settings = {
        "SCHEDULER_KV_RESERVATION": reservation,
        "SCHEDULER_REFUSES_EARLY": "false",
        "SCHEDULER_MAX_QUEUE_S": "900",
        "WORKER_ENGINE": "fake",
        "WORKER_FAKE_LATENCY": "a_s=0.005,b_s=2e-5,decode_a_s=0.004",
        "WORKER_MAX_MODEL_LEN": str(CONTEXT_TOKENS),
        "WORKER_MAX_NUM_SEQS": "64",
        "WORKER_KV_CACHE_BYTES": str(contexts * CONTEXT_TOKENS // 16 * BLOCK_BYTES),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(
            Path(folder), model=a_model(Path(folder) / "model"), prefill=0, decode=0, mixed=1, settings=settings
        ) as mesh,
    ):
        began_s = time.monotonic()
        chats = anyio.run(serve, mesh, num_chats, seed)
        took_s = time.monotonic() - began_s
        try:
            mesh.wait_until_idle()
            is_free = True
        except TimeoutError:
            is_free = False
        gateway = next(text for name, text in mesh.metrics().items() if name.startswith("gateway"))
    counted = re.search(r"^pdmesh:num_preemptions_total\S* (\S+)", gateway, re.MULTILINE)
    result = {
        "at_once": round(mean_at_once(chats), 1),
        "seconds": round(took_s, 1),
        "failures": [chat.error for chat in chats if chat.error][:3],
        "preemptions": float(counted[1]) if counted else None,
        "mean_answer_characters": statistics.mean(len(chat.text) for chat in chats),
        "all_blocks_free": is_free,
    }
    return result, [chat.text for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}
    for reservation in ("full", "on_demand"):
        results[reservation], texts[reservation] = measure(reservation, options.chats, options.contexts, options.seed)
    ratio = results["on_demand"]["at_once"] / max(results["full"]["at_once"], 1e-9)
    same = texts["full"] == texts["on_demand"]
    print(heading("Memory on demand, beside full reservation"), file=sys.stderr)
    print(json.dumps({**results, "ratio": round(ratio, 1), "same_tokens": same}, indent=1))
    clean = all(not result["failures"] and result["all_blocks_free"] for result in results.values())
    sys.exit(0 if ratio >= WANTED_RATIO and same and clean else 1)


if __name__ == "__main__":
    main()
