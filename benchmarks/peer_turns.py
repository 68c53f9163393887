"""Conversations on our mesh and on vLLM in turn: the same checkpoint, the same prompts, the same client.

    python benchmarks/peer_turns.py --vllm VENV [--systems vllm mixed 1p1d] [--rounds 3]

Users share a system prompt, and each asks for several turns, one after the other: what was said before, and something
new. All users ask at once. VENV is as in `peer.py`; vLLM keeps prefixes by default, as we do. Figures are medians over
rounds, whose prompts are new; a round before them warms up. Answers go on to their length, so that all systems compute
as much; each goes on with its own answers. Exit code 1 if a system of ours is behind vLLM in tokens a second, or in
TTFT.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path

import anyio
import httpx
from peer import running_pdmesh, running_vllm
from prefix_turns import Answer, ask
from report import Limits, heading, quantile, unavailable

from pdmesh.testing.checkpoints import LLAMA_82M, write_checkpoint

NUM_USERS, NUM_TURNS = 8, 6
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 2048, 100, 64

#: Of ours over vLLM's.
LEAST_RATE, MOST_TTFT = 1.0, 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One round."""

    tokens_per_s: float  # of prompts, whether computed or kept, and of answers
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float


async def one_round(base_url: str, rng: random.Random) -> Figures:
    """Let all users have their conversations."""

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(LLAMA_82M.vocab_size) for _ in range(num_tokens)]

    system, answers, num_tokens = prompt(SYSTEM_TOKENS), list[Answer](), 0
    said = [[prompt(USER_TOKENS) for _ in range(NUM_TURNS)] for _ in range(NUM_USERS)]

    async def converse(client: httpx.AsyncClient, texts: list[list[int]]) -> None:
        nonlocal num_tokens
        turn = list(system)
        for text in texts:
            turn += text
            answer = await ask(client, turn, ANSWER_TOKENS)
            answers.append(answer)
            num_tokens += len(turn) + len(answer.token_ids)
            turn += answer.token_ids

    began_s = time.perf_counter()
    async with (
        httpx.AsyncClient(base_url=base_url, timeout=600, trust_env=False) as client,
        anyio.create_task_group() as tasks,
    ):
        for texts in said:
            tasks.start_soon(converse, client, texts)
    took_s = time.perf_counter() - began_s
    if any(len(answer.token_ids) != ANSWER_TOKENS for answer in answers):
        raise RuntimeError("an answer is not as long as was asked for")
    ttfts_s = [answer.ttft_s for answer in answers]
    gaps_s = [gap_s for answer in answers for gap_s in answer.gaps_s]
    return Figures(num_tokens / took_s, statistics.median(ttfts_s), quantile(ttfts_s, 0.99), quantile(gaps_s, 0.99))


def measure(start: Callable[[], AbstractContextManager[str]], rounds: int) -> Figures:
    """Medians over rounds, after one that is not counted; progress goes to stderr."""
    with start() as base_url:
        taken = [anyio.run(one_round, base_url, random.Random(number)) for number in range(rounds + 1)][1:]
    print(f"  {taken}", file=sys.stderr, flush=True)
    return Figures(*(statistics.median(getattr(each, name.name) for each in taken) for name in fields(Figures)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=os.environ.get("PEER_VENV"), help="environment that has vLLM")
    parser.add_argument("--systems", nargs="+", choices=["vllm", "mixed", "1p1d"], default=["vllm", "mixed", "1p1d"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(
        heading(
            f"{NUM_USERS} users, {NUM_TURNS} turns of {USER_TOKENS} in / {ANSWER_TOKENS} out behind a system prompt of "
            f"{SYSTEM_TOKENS}: pdmesh and vLLM, Llama 82M bf16"
        )
    )
    program = None if options.vllm is None else Path(options.vllm, "bin", "vllm")
    if program is None or not program.exists():
        unavailable("no vLLM is here; give its environment with --vllm or PEER_VENV")
    limits = Limits()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder, "model"), shape=LLAMA_82M, dtype="bfloat16", initializer_gain=1.0)
        systems: dict[str, tuple[str, Callable[[], AbstractContextManager[str]]]] = {
            "vllm": ("vLLM", lambda: running_vllm(program, checkpoint)),
            "mixed": ("pdmesh, 1 mixed", lambda: running_pdmesh(checkpoint, prefill=0, decode=0, mixed=1)),
            "1p1d": ("pdmesh, 1P+1D", lambda: running_pdmesh(checkpoint, prefill=1, decode=1, mixed=0)),
        }
        figures = {key: measure(systems[key][1], options.rounds) for key in options.systems}
    print("| system | tokens/s | TTFT p50, ms | TTFT p99, ms | ITL p99, ms |\n|---|---|---|---|---|")
    for key, each in figures.items():
        print(
            f"| {systems[key][0]} | {each.tokens_per_s:.0f} | {1e3 * each.ttft_p50_s:.0f} | "
            f"{1e3 * each.ttft_p99_s:.0f} | {1e3 * each.itl_p99_s:.1f} |"
        )
    if (theirs := figures.get("vllm")) is not None:
        for key, ours in figures.items():
            if key == "vllm":
                continue
            rate, p50, p99 = (
                limits.at_least(f"{key}: tokens/s", ours.tokens_per_s / theirs.tokens_per_s, LEAST_RATE),
                limits.at_most(f"{key}: TTFT p50", ours.ttft_p50_s / theirs.ttft_p50_s, MOST_TTFT),
                limits.at_most(f"{key}: TTFT p99", ours.ttft_p99_s / theirs.ttft_p99_s, MOST_TTFT),
            )
            print(f"{systems[key][0]} over vLLM: tokens/s {rate}; TTFT p50 {p50}; p99 {p99}")
    limits.end()


if __name__ == "__main__":
    main()
