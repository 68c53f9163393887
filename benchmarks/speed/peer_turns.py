"""Conversations on our mesh and on vLLM in turn: the same checkpoint, the same prompts, the same client.

    python -m benchmarks.speed.peer_turns --vllm VENV [--systems vllm mixed 1p1d] [--rounds 3]

Users share a system prompt, and each asks for several turns, one after the other: what was said before, and something
new. All users ask at once. VENV is a virtual environment that has vLLM (PEER_VENV names it too). vLLM keeps prefixes by
default, as we do. One trial with each of a few settings of its threads decides which one is compared. Figures are
medians over rounds, whose prompts are new; a round before them warms up. Answers go on to their length, so that all
systems compute as much; each goes on with its own answers. Answers are greedy, and in rounds of their own *sampled*
(temperature 0.7, top_p 0.95, top_k 40). Exit code 1 if a system of ours is behind vLLM in tokens a second, in TTFT, or
in the p99 of the gaps between tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path

import anyio
import httpx

from benchmarks.harness.report import GREEDY, SAMPLED, Limits, heading, quantile, unavailable
from benchmarks.harness.vllm_server import best_threads, running_pdmesh, running_vllm
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.streaming import Answer, ask

NUM_USERS, NUM_TURNS = 8, 6
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 2048, 100, 64

#: How answers are drawn, by the name of that in the table.
DRAWS = {"greedy": GREEDY, "sampled": SAMPLED}

#: Of ours over vLLM's.
LEAST_RATE, MOST_TTFT, MOST_ITL = 1.0, 1.0, 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One round."""

    tokens_per_s: float  # of prompts, whether computed or kept, and of answers
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float


async def one_round(base_url: str, rng: random.Random, draws: Mapping[str, float]) -> Figures:
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
            answer = await ask(client, turn, ANSWER_TOKENS, **draws)
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


def measure(
    start: Callable[[], AbstractContextManager[str]], rounds: int, draws: Sequence[str] = ("greedy",)
) -> dict[str, Figures]:
    """Medians over rounds by name of how answers are drawn, after one that warms up; progress goes to stderr."""
    with start() as base_url:
        anyio.run(one_round, base_url, random.Random(0), GREEDY)
        taken = {
            name: [
                anyio.run(one_round, base_url, random.Random(f"{name} {number}"), DRAWS[name])
                for number in range(rounds)
            ]
            for name in draws
        }
    print(f"  {taken}", file=sys.stderr, flush=True)
    return {name: _medians(each) for name, each in taken.items()}


def _medians(taken: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(each, field.name) for each in taken) for field in fields(Figures)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=os.environ.get("PEER_VENV"), help="environment that has vLLM")
    parser.add_argument("--systems", nargs="+", choices=["vllm", "mixed", "1p1d"], default=["vllm", "mixed", "1p1d"])
    parser.add_argument("--draws", nargs="+", choices=[*DRAWS], default=[*DRAWS])
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

        def rate(threads: str) -> float:
            return measure(lambda: running_vllm(program, checkpoint, threads), 1)["greedy"].tokens_per_s

        best = best_threads(rate, "tokens/s") if "vllm" in options.systems else ""
        systems: dict[str, tuple[str, Callable[[], AbstractContextManager[str]]]] = {
            "vllm": (f"vLLM, {best}", lambda: running_vllm(program, checkpoint, best)),
            "mixed": ("pdmesh, 1 mixed", lambda: running_pdmesh(checkpoint, prefill=0, decode=0, mixed=1)),
            "1p1d": ("pdmesh, 1P+1D", lambda: running_pdmesh(checkpoint, prefill=1, decode=1, mixed=0)),
        }
        figures = {key: measure(systems[key][1], options.rounds, options.draws) for key in options.systems}
    print("| draws | system | tokens/s | TTFT p50, ms | TTFT p99, ms | ITL p99, ms |\n|---|---|---|---|---|---|")
    for name in options.draws:
        for key, by_draws in figures.items():
            each = by_draws[name]
            print(
                f"| {name} | {systems[key][0]} | {each.tokens_per_s:.0f} | {1e3 * each.ttft_p50_s:.0f} | "
                f"{1e3 * each.ttft_p99_s:.0f} | {1e3 * each.itl_p99_s:.1f} |"
            )
    for name in options.draws if "vllm" in figures else ():
        theirs = figures["vllm"][name]
        for key, by_draws in figures.items():
            if key == "vllm":
                continue
            ours, what = by_draws[name], f"{key}, {name}"
            tokens, p50, p99, itl = (
                limits.at_least(f"{what}: tokens/s", ours.tokens_per_s / theirs.tokens_per_s, LEAST_RATE),
                limits.at_most(f"{what}: TTFT p50", ours.ttft_p50_s / theirs.ttft_p50_s, MOST_TTFT),
                limits.at_most(f"{what}: TTFT p99", ours.ttft_p99_s / theirs.ttft_p99_s, MOST_TTFT),
                limits.at_most(f"{what}: ITL p99", ours.itl_p99_s / theirs.itl_p99_s, MOST_ITL),
            )
            print(f"{systems[key][0]} over vLLM, {name}: tokens/s {tokens}; TTFT p50 {p50}; p99 {p99}; ITL p99 {itl}")
    limits.end()


if __name__ == "__main__":
    main()
