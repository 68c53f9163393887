"""What drawing tokens costs: a row of logits by itself, and a decode step that samples against one that is greedy.

    python benchmarks/draws.py [--rounds 15] [--batches 1 8 32] [--vocabularies 49152 151936]

Times are CPU time of one thread, the best of several rounds that go through all cases in turn. Logits are normal of
deviation 2.5; steps are of SmolLM2-135M's shape (49,152 tokens) and Qwen2.5-0.5B's (151,936) with random weights, at a
context of 256. *sampled* is temperature 0.7, top_p 0.95, top_k 40.
"""

from __future__ import annotations

import argparse
import array
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import structlog
import torch
from cpu_levels import SHAPE as QWEN_05B
from report import GREEDY, SAMPLED, Limits, heading

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.drawing import draw_kernels
from pdmesh.engine.runner import TorchEngine
from pdmesh.engine.sampler import sample, token_logprobs
from pdmesh.model import RequestId, SamplingParams, num_blocks_for
from pdmesh_testing.checkpoints import CheckpointShape, write_config

SMOLLM2_135M = CheckpointShape(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)
CONTEXT, BLOCK = 256, 16

#: Most seconds of a draw at temperature 1 and top_p 0.95, by vocabulary.
MOST_S = {49_152: 0.4e-3, 151_936: 1e-3, 248_320: 1.5e-3}
#: Of the tokens a second of greedy steps.
LEAST_RATE = 0.95

#: Sampling parameters of the cases.
DRAWS: Mapping[str, Mapping[str, float]] = {
    "greedy": GREEDY,
    "temperature 1": {},
    "temperature 1, top_p 0.95": {"top_p": 0.95},
    "sampled": SAMPLED,
    "sampled, repetition penalty": {**SAMPLED, "repetition_penalty": 1.1},
    "sampled, frequency penalty": {**SAMPLED, "frequency_penalty": 0.2},
}
STEPS = ("greedy", "sampled", "temperature 1, top_p 0.95", "sampled, repetition penalty")


def best_of(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU seconds of each case."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, call in cases.items():
            began_s = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - began_s)
    return best


def sequence(number: int, vocab_size: int, params: Mapping[str, float]) -> EngineSequence:
    """A sequence whose second half is output."""
    num_blocks = num_blocks_for(CONTEXT, BLOCK)
    return EngineSequence(
        request_id=RequestId(f"bench-{number}"),
        params=SamplingParams(max_tokens=1 << 20, seed=number, **params),  # type: ignore[arg-type]
        token_ids=array.array("i", [(7919 * (token + number)) % vocab_size for token in range(CONTEXT)]),
        num_prompt_tokens=CONTEXT // 2,
        block_table=list(range(number * num_blocks, (number + 1) * num_blocks)),
    )


def report_rows(rounds: int, limits: Limits) -> None:
    kernels = draw_kernels()
    print(f"a row ({'torch' if kernels is None else kernels.level})" + "".join(f"{size:>12,}" for size in MOST_S))
    times_s: dict[str, list[float]] = {}
    for vocab_size in MOST_S:
        logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(1)) * 2.5
        cases: dict[str, Callable[[], object]] = {
            name: partial(sample, logits, [sequence(0, vocab_size, params)]) for name, params in DRAWS.items()
        }
        cases["log-probabilities of 5"] = partial(token_logprobs, logits, [0], [5])
        for name, time_s in best_of(cases, rounds).items():
            times_s.setdefault(name, []).append(time_s)
    for name, each in times_s.items():
        print(f"  {name:30}" + "".join(f"{time_s * 1e3:9.3f} ms" for time_s in each))
    name = "temperature 1, top_p 0.95"
    for (vocab_size, most_s), time_s in zip(MOST_S.items(), times_s[name], strict=True):
        print(f"  {name}, {vocab_size:,}: {limits.at_most(f'a draw of {vocab_size:,}', time_s, most_s)}")


def step(batch: int, vocab_size: int, params: Mapping[str, float]) -> list[SequenceSlice]:
    return [
        SequenceSlice(sequence=sequence(number, vocab_size, params), start=CONTEXT - 1, num_tokens=1, sample=True)
        for number in range(batch)
    ]


def report_steps(shape: CheckpointShape, batches: list[int], rounds: int, limits: Limits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_config(Path(folder), shape=shape, dtype="bfloat16")
        num_blocks = max(batches) * num_blocks_for(CONTEXT, BLOCK)
        engine = TorchEngine(
            checkpoint, num_blocks=num_blocks, block_size=BLOCK, num_threads=1, has_random_weights=True
        )
        print(f"decode, vocabulary of {shape.vocab_size:,}: {engine.compute_path.kernels}")
        for batch in batches:
            cases = {name: partial(engine.execute, step(batch, shape.vocab_size, DRAWS[name])) for name in STEPS}
            times_s = best_of(cases, rounds)
            for name, time_s in times_s.items():
                ratio = times_s["greedy"] / time_s
                what = f"{name}, batch {batch}, vocabulary {shape.vocab_size:,}"
                verdict = limits.at_least(what, ratio, LEAST_RATE) if name == "sampled" else ""
                print(f"  batch {batch:3} {name:28} {batch / time_s:8.1f} tokens/s {ratio:6.3f} x greedy  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[49_152, 151_936], help="of decode steps")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    torch.set_num_threads(1)
    limits = Limits()
    print(heading("draws: CPU time of one thread"))
    report_rows(options.rounds, limits)
    for shape in (SMOLLM2_135M, QWEN_05B):
        if shape.vocab_size in options.vocabularies:
            report_steps(shape, options.batches, options.rounds, limits)
    limits.end()


if __name__ == "__main__":
    main()
