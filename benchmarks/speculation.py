"""What guessing tokens by n-grams of the prompt gains, and what it costs where nothing is quoted.

Usage: python benchmarks/speculation.py [--rounds 3] [--tokens 256] [--batches 1,8]

Two meshes of an 82M bf16 model on this machine (one instance prefills, one decodes), with ``worker.speculation`` off
and ngram, which are asked in turns, so that whatever else the machine does is in both figures:

* ``quoted``: greedy answers to prompts that hold them, of a model that quotes.
* ``random``: draws of temperature 2, which follow little that was said.

Prints tokens a second and gaps between events with tokens over those without, of one stream and of several at once;
which share of the drafted tokens was drawn; and whether any answer differs, in which case it exits 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch
from prefix_turns import Answer, ask
from report import Limits, heading
from safetensors.torch import load_file, save_file

from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

PROMPT_TOKENS = 256
WAYS = ("off", "ngram")
SETTINGS = {"WORKER_DTYPE": "bfloat16", "SCHEDULER_MAX_QUEUE_S": "600", "GATEWAY_PREFIX_REUSE": "off"}
FIELDS: dict[str, dict[str, Any]] = {"quoted": {"temperature": 0}, "random": {"temperature": 2.0, "seed": 7}}


def write_quoting_checkpoint(folder: Path) -> Path:
    """Write a model that says after each token the same other one: a prompt that holds such a walk is quoted on.

    Its layers have all their weights, and nearly no say.
    """
    write_checkpoint(folder, shape=replace(LLAMA_82M, tie_word_embeddings=False), dtype="bfloat16", seed=1)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(1e-3)
    order = torch.randperm(LLAMA_82M.vocab_size, generator=torch.Generator().manual_seed(2))
    weights["lm_head.weight"][order] = weights["model.embed_tokens.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    return folder


async def crowd(
    client: httpx.AsyncClient, prompts: Sequence[Sequence[int]], max_tokens: int, fields: dict[str, Any]
) -> tuple[float, list[Answer]]:
    """Seconds until all of the prompts are answered, asked at once; and the answers."""
    answers: dict[int, Answer] = {}

    async def one(number: int, prompt: Sequence[int]) -> None:
        answers[number] = await ask(client, prompt, max_tokens, **fields)

    async with anyio.create_task_group() as tasks:
        for number, prompt in enumerate(prompts):
            tasks.start_soon(one, number, prompt)
    ordered = [answers[number] for number in range(len(prompts))]
    began_s = max(answer.times_s[0] for answer in ordered)  # the prompts are computed
    return max(answer.times_s[-1] for answer in ordered) - began_s, ordered


async def measure(
    meshes: dict[str, RunningMesh], kind: str, batch: int, rounds: int, max_tokens: int, limits: Limits
) -> None:
    rng = random.Random(f"{kind} {batch}")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    gaps_s: dict[str, list[float]] = {way: [] for way in WAYS}
    num_differ = 0
    before = meshes["ngram"].num_drafted_tokens(), meshes["ngram"].num_accepted_tokens()
    async with meshes["off"].client() as plain, meshes["ngram"].client() as guessing:
        clients = {"off": plain, "ngram": guessing}
        for number in range(rounds):
            prompts = [[rng.randrange(LLAMA_82M.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            if kind == "quoted":
                _, first = await crowd(plain, prompts, max_tokens, FIELDS[kind])
                prompts = [[*answer.token_ids, *prompt] for prompt, answer in zip(prompts, first, strict=True)]
            said: dict[str, list[list[int]]] = {}
            for way in WAYS if number % 2 else reversed(WAYS):
                took_s, answers = await crowd(clients[way], prompts, max_tokens, FIELDS[kind])
                seconds[way].append(took_s)
                gaps_s[way] += [gap for answer in answers for gap in answer.gaps_s]
                said[way] = [answer.token_ids for answer in answers]
            num_differ += sum(a != b for a, b in zip(said["off"], said["ngram"], strict=True))
    num_drafted = meshes["ngram"].num_drafted_tokens() - before[0]
    num_accepted = meshes["ngram"].num_accepted_tokens() - before[1]
    faster = statistics.median(seconds["off"]) / statistics.median(seconds["ngram"])
    off_s, on_s = statistics.mean(gaps_s["off"]), statistics.mean(gaps_s["ngram"])
    share = num_accepted / num_drafted if num_drafted else 0.0
    same = limits.at_most(f"{kind}, batch {batch}: answers that differ", num_differ, 0.5)
    print(
        f"{kind:6} batch {batch}: {batch * max_tokens / statistics.median(seconds['ngram']):.0f} tokens/s, "
        f"{faster:.2f} x of off; mean gap between events {1e3 * on_s:.1f} ms, off {1e3 * off_s:.1f}; "
        f"{num_drafted:.0f} drafted, {share:.2f} accepted; {num_differ} of {rounds * batch} answers differ"
        f"{': MISSED' if 'MISSED' in same else ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--batches", default="1,8")
    options = parser.parse_args()
    print(heading("Speculation by n-grams of the prompt"))
    limits = Limits()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = write_quoting_checkpoint(Path(name) / "model")
        meshes = {
            way: stack.enter_context(
                running_mesh(
                    Path(name) / way,
                    model=model,
                    settings={**SETTINGS, "WORKER_SPECULATION": way},
                )
            )
            for way in WAYS
        }
        began_s = time.monotonic()
        for kind in FIELDS:
            for batch in map(int, options.batches.split(",")):
                anyio.run(measure, meshes, kind, batch, options.rounds, options.tokens, limits)
        print(f"took {time.monotonic() - began_s:.0f} s")
    limits.end()


if __name__ == "__main__":
    main()
