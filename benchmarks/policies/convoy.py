"""The convoy: what long prompts do to the short ones among them.

The 82M-parameter model on 1P+1D, one mesh after the other on this machine: short requests of 32 to 256 tokens alone,
then the same with 3 % prompts of 16K among them, under ``fcfs`` and under ``pdmesh``, and on vLLM if it is named. A
Poisson stream of 2 requests a second, the same for all, from one streaming HTTP client.

    python -m benchmarks.policies.convoy [--requests 200] [--vllm PATH/TO/vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.harness.report import Limits, heading
from benchmarks.harness.vllm_server import best_threads, running_vllm
from pdmesh.metrics import percentile
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.streaming import Answer, ask

REQUESTS_PER_S = 2.0
SHORT_TOKENS = (32, 256)
LONG_TOKENS = 16 * 1024
LONG_SHARE = 0.03
OUTPUT_TOKENS = 32

#: For two long prompts and all short ones at once, on each instance.
KV_CACHE_BYTES = 512 << 20
TPOT_TARGET_S = 0.05

NUM_WARM = 16

#: Limits of the default bundle: over short requests alone, and over `fcfs`.
TTFT_LIMIT, LONG_LIMIT, MAKESPAN_LIMIT = 1.5, 1.4, 1.05

SHORT_ONLY, FCFS, DEFAULT, VLLM = "short only", "fcfs", "pdmesh", "vllm"


@dataclass(frozen=True, slots=True)
class Planned:
    at_s: float
    num_prompt_tokens: int

    @property
    def is_long(self) -> bool:
        return self.num_prompt_tokens > SHORT_TOKENS[1]


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as its client saw it. Without tokens if it failed."""

    name: str
    is_long: bool
    answer: Answer

    @property
    def finished(self) -> bool:
        return len(self.answer.token_ids) == OUTPUT_TOKENS


def make_load(num_requests: int, seed: int) -> list[Planned]:
    rng = random.Random(seed)
    num_long = round(num_requests * LONG_SHARE)
    long = set(rng.sample(range(num_requests), num_long))
    at_s = 0.0
    load: list[Planned] = []
    for number in range(num_requests):
        at_s += rng.expovariate(REQUESTS_PER_S)
        num_tokens = rng.randint(*SHORT_TOKENS)  # drawn in any case: the short ones are the same in every load
        load.append(Planned(at_s, LONG_TOKENS if number in long else num_tokens))
    return load


async def ask_then(
    client: httpx.AsyncClient, model: str, name: str, planned: Planned, began_s: float, seed: int
) -> Seen:
    rng = random.Random(seed)
    prompt = [rng.randrange(LLAMA_82M.vocab_size) for _ in range(planned.num_prompt_tokens)]
    await asyncio.sleep(began_s + planned.at_s - time.perf_counter())
    try:
        answer = await ask(client, prompt, OUTPUT_TOKENS, {"X-Request-Id": name}, model=model)
    except (httpx.HTTPError, KeyError) as error:
        print(f"  {name} failed: {error!r}")
        answer = Answer(time.perf_counter())
    return Seen(name, planned.is_long, answer)


async def drive(base_url: str, model: str, load: Sequence[Planned], seed: int) -> list[Seen]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=900) as client:
        async with asyncio.TaskGroup() as tasks:  # first use of code and memory
            for number in range(NUM_WARM):
                planned = Planned(number / 4, SHORT_TOKENS[number % 2])
                tasks.create_task(ask_then(client, model, f"warm-{number}", planned, time.perf_counter(), -1))
        began_s = time.perf_counter() + 0.5
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(ask_then(client, model, f"convoy-{number}", planned, began_s, seed + number))
                for number, planned in enumerate(load)
            ]
    return [task.result() for task in asked]


def run(kind: str, load: Sequence[Planned], seed: int, model: Path, folder: Path, vllm: str | None) -> list[Seen]:
    if kind == SHORT_ONLY:
        load = [planned for planned in load if not planned.is_long]
    if kind == VLLM:
        assert vllm is not None
        seen: dict[str, list[Seen]] = {}

        def rate(threads: str) -> float:
            with running_vllm(Path(vllm), model, threads) as base_url:
                seen[threads] = asyncio.run(drive(base_url, str(model), load, seed))
            return 1e3 / figures_of(seen[threads]).makespan_s

        return seen[best_threads(rate, "runs in 1000 s")]
    bundle = FCFS if kind == FCFS else DEFAULT
    settings = {"SCHEDULER_BUNDLE": bundle, "WORKER_KV_CACHE_BYTES": str(KV_CACHE_BYTES)}
    with running_mesh(folder, model=model, settings=settings) as mesh:
        return asyncio.run(drive(mesh.base_url, mesh.model, load, seed))


@dataclass(frozen=True, slots=True)
class Figures:
    num_finished: int
    num_requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    long_mean_s: float | None  # from sending to the last token
    makespan_s: float


def figures_of(seen: Sequence[Seen]) -> Figures:
    """TTFT and ITL are of the short requests."""
    short = [one.answer for one in seen if not one.is_long and one.answer.times_s]
    ttfts_s = [answer.ttft_s for answer in short]
    long_s = [one.answer.times_s[-1] - one.answer.began_s for one in seen if one.is_long and one.answer.times_s]
    ends_s = [one.answer.times_s[-1] for one in seen if one.answer.times_s]
    return Figures(
        num_finished=sum(one.finished for one in seen),
        num_requests=len(seen),
        ttft_p50_s=percentile(ttfts_s, 50) or 0.0,
        ttft_p99_s=percentile(ttfts_s, 99) or 0.0,
        itl_p99_s=percentile([gap_s for answer in short for gap_s in answer.gaps_s], 99) or 0.0,
        long_mean_s=sum(long_s) / len(long_s) if long_s else None,
        makespan_s=max(ends_s) - min(one.answer.began_s for one in seen),
    )


def print_table(runs: dict[str, Figures], limits: Limits) -> None:
    def row(name: str, *cells: str) -> None:
        print(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells))

    figures = list(runs.values())
    row("", *runs)
    row("finished", *(f"{one.num_finished} of {one.num_requests}" for one in figures))
    row("short TTFT p50, ms", *(f"{one.ttft_p50_s * 1e3:.0f}" for one in figures))
    row("short TTFT p99, ms", *(f"{one.ttft_p99_s * 1e3:.0f}" for one in figures))
    row("short ITL p99, ms", *(f"{one.itl_p99_s * 1e3:.1f}" for one in figures))
    row("long completion mean, s", *("-" if one.long_mean_s is None else f"{one.long_mean_s:.1f}" for one in figures))
    row("makespan, s", *(f"{one.makespan_s:.1f}" for one in figures))
    if not {SHORT_ONLY, FCFS, DEFAULT} <= set(runs):
        return
    alone, fcfs, ours = runs[SHORT_ONLY], runs[FCFS], runs[DEFAULT]
    ttft = ours.ttft_p99_s / alone.ttft_p99_s
    stands = limits.at_most("short TTFT p99", ttft, TTFT_LIMIT)
    print(f"{DEFAULT}: short TTFT p99 {ttft:.2f} x short only ({stands} of {TTFT_LIMIT})")
    stands = limits.at_most("ITL p99", ours.itl_p99_s, TPOT_TARGET_S)
    print(f"  ITL p99 {ours.itl_p99_s * 1e3:.1f} ms ({stands}, the TPOT target of {TPOT_TARGET_S * 1e3:.0f} ms)")
    if ours.long_mean_s is not None and fcfs.long_mean_s:
        long = ours.long_mean_s / fcfs.long_mean_s
        stands = limits.at_most("long completion", long, LONG_LIMIT)
        print(f"  long completion {long:.2f} x fcfs ({stands} of {LONG_LIMIT})")
    makespan = ours.makespan_s / fcfs.makespan_s
    stands = limits.at_most("makespan", makespan, MAKESPAN_LIMIT)
    print(f"  makespan {makespan:.3f} x fcfs ({stands} of {MAKESPAN_LIMIT})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", help="its command, to measure it beside")
    parser.add_argument("--runs", nargs="+", default=[SHORT_ONLY, FCFS, DEFAULT], choices=[SHORT_ONLY, FCFS, DEFAULT])
    options = parser.parse_args()
    kinds = [*options.runs, *([VLLM] if options.vllm else [])]
    load = make_load(options.requests, options.seed)
    num_long = sum(planned.is_long for planned in load)
    print(heading("The convoy, Llama 82M bf16, 1P+1D"))
    print(
        f"{len(load)} requests, {REQUESTS_PER_S:g} a second, {num_long} of {LONG_TOKENS} tokens, the others of "
        f"{SHORT_TOKENS[0]} to {SHORT_TOKENS[1]}; {OUTPUT_TOKENS} output tokens each; seed {options.seed}"
    )
    with tempfile.TemporaryDirectory() as name:
        model = write_checkpoint(Path(name) / "model", shape=LLAMA_82M, dtype="bfloat16")
        runs = {kind: run(kind, load, options.seed, model, Path(name), options.vllm) for kind in kinds}
    limits = Limits()
    print_table({kind: figures_of(seen) for kind, seen in runs.items()}, limits)
    limits.end()


if __name__ == "__main__":
    main()
