"""One instance's engine against the ceilings of its machine: `python benchmarks/engine.py`.

For the 82M-parameter Llama in bf16 (or `--dtype float32`), on CPU, with one thread and with all cores. Ceilings are
measured in the same run: the best matrix product and the best rate of reading memory. MFU is a step's arithmetic
(matrix products of the layers, causal attention, one row of the vocabulary) over its time and the first, MBU its
weights and KV read once over its time and the second. Best of several rounds. Decodes are greedy, and *sampled*
(temperature 0.7, top_p 0.95, top_k 40) where a row says so; `benchmarks/draws.py` has larger vocabularies.
`--reference` adds deterministic mode with what it costs, and the plain torch path that the fast one is tested against.
"""

from __future__ import annotations

import argparse
import array
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
from report import GREEDY, SAMPLED, heading

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import RequestId, SamplingParams, num_blocks_for
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint

KV_TOKENS = 32768
CHUNK_TOKENS = 512
SHAPE = LLAMA_82M

_LAYER_WEIGHTS = SHAPE.hidden_size * (
    2 * (SHAPE.num_heads + SHAPE.num_kv_heads) * SHAPE.head_dim + 3 * SHAPE.intermediate_size
)
_HEAD_WEIGHTS = SHAPE.vocab_size * SHAPE.hidden_size
NUM_WEIGHTS = SHAPE.num_layers * _LAYER_WEIGHTS + _HEAD_WEIGHTS
KV_TOKEN_ELEMENTS = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim
DECODES = ((1, 128), (1, 8192), (32, 320), (64, 320))  # batch, context
#: Operations of one query meeting one key, all layers and heads: the quadratic part of a prefill.
PAIR_FLOPS = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim


@dataclass(frozen=True, slots=True)
class Ceilings:
    flops: float  # per second
    read_bytes: float  # per second


def peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def best_s(call: Callable[[], object], rounds: int) -> float:
    call()
    times: list[float] = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return min(times)


def measure_ceilings(rounds: int, dtype: torch.dtype) -> Ceilings:
    flops = 0.0
    for m, n, k in ((2048, 2048, 2048), (512, 4096, 768), (512, 1280, 768)):
        rows, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        products = [lambda rows=rows, weight=weight: torch.nn.functional.linear(rows, weight)]
        if dtype == torch.bfloat16:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
            products.append(
                lambda rows=rows, weight=packed: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
            )
        flops = max(flops, *(2 * m * n * k / best_s(product, 4 * rounds) for product in products))
    memory = torch.ones(1 << 28)  # 1 GiB: larger than caches
    vector = torch.ones(1 << 14, 1)
    reads = (lambda: memory.sum(), lambda: memory.view(-1, 1 << 14) @ vector, lambda: memory.view(torch.int64).sum())
    read_bytes = memory.nbytes / min(best_s(read, rounds) for read in reads)
    return Ceilings(flops, read_bytes)


def sequence(
    number: int, num_tokens: int, first_block: int, block_size: int, draws: Mapping[str, float] = GREEDY
) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId(f"bench-{number}"),
        params=SamplingParams(max_tokens=1 << 20, seed=number, **draws),  # type: ignore[arg-type]
        token_ids=array.array("i", [token % SHAPE.vocab_size for token in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        block_table=list(range(first_block, first_block + num_blocks_for(num_tokens, block_size))),
    )


def prefill(engine: TorchEngine, num_tokens: int) -> None:
    prompt = sequence(0, num_tokens, 0, engine.kv.layout.block_size)
    for start in range(0, num_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, num_tokens - start)
        engine.execute(
            [SequenceSlice(sequence=prompt, start=start, num_tokens=size, sample=start + size == num_tokens)]
        )


def decode_batch(
    engine: TorchEngine, batch: int, context: int, draws: Mapping[str, float] = GREEDY
) -> list[SequenceSlice]:
    block_size = engine.kv.layout.block_size
    blocks_each = num_blocks_for(context, block_size)
    return [
        SequenceSlice(
            sequence=sequence(number, context, number * blocks_each, block_size, draws),
            start=context - 1,
            num_tokens=1,
            sample=True,
        )
        for number in range(batch)
    ]


def step_bytes(engine: TorchEngine, kv_tokens: int) -> int:
    """Weights, and keys and values of so many tokens."""
    return (NUM_WEIGHTS + kv_tokens * KV_TOKEN_ELEMENTS) * engine.kv.layers[0].itemsize


def prefill_flops(num_tokens: int) -> float:
    pairs = num_tokens * (num_tokens + 1) / 2
    return 2 * SHAPE.num_layers * _LAYER_WEIGHTS * num_tokens + PAIR_FLOPS * pairs + 2 * _HEAD_WEIGHTS


def report_prefill(engine: TorchEngine, ceilings: Ceilings, lengths: Sequence[int], rounds: int) -> list[float]:
    """Seconds of each length."""
    times_s: list[float] = []
    for num_tokens in lengths:
        call_rounds = max(2, min(4 * rounds, rounds * 4096 // num_tokens))
        times_s.append(best_s(lambda n=num_tokens: prefill(engine, n), call_rounds))  # type: ignore[misc]
        mfu = prefill_flops(num_tokens) / times_s[-1] / ceilings.flops
        print(f"  prefill {num_tokens:6d} tokens      {times_s[-1] * 1e3:9.1f} ms   MFU {mfu:6.1%}")
    # least squares in relative error
    sizes, times = np.array(lengths, dtype=np.float64), np.array(times_s)
    (a, b), *_ = np.linalg.lstsq(np.stack([sizes, sizes**2], axis=1) / times[:, None], np.ones(len(times)), rcond=None)
    rate = PAIR_FLOPS / 2 / b
    print(
        f"  prefill = {a * 1e6:.1f} us n + {b * 1e9:.2f} ns n^2: attention at {rate / 1e9:.0f} GFLOP/s,"
        f" {rate / ceilings.flops:.1%} of the product's rate"
    )
    return times_s


def report_decode(
    engine: TorchEngine, ceilings: Ceilings, shapes: Sequence[tuple[int, int]], rounds: int
) -> list[float]:
    """Seconds of a step of each shape, greedy and sampled."""
    times_s: list[float] = []
    for batch, context in shapes:
        for name, draws in (("greedy", GREEDY), ("sampled", SAMPLED)):
            slices = decode_batch(engine, batch, context, draws)
            times_s.append(best_s(lambda slices=slices: engine.execute(slices), 8 * rounds))  # type: ignore[misc]
            mbu = step_bytes(engine, batch * context) / times_s[-1] / ceilings.read_bytes
            print(f"  decode {batch:3d} at context {context:5d}, {name:7} {times_s[-1] * 1e3:9.2f} ms   MBU {mbu:6.1%}")
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 4096, 16384])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--reference", action="store_true", help="measure deterministic mode and plain torch too")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    print(heading(f"engine: Llama 82M, {options.dtype}"))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write_checkpoint(Path(directory), shape=SHAPE, dtype=options.dtype, initializer_gain=1.0)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of writing the checkpoint
        before_bytes = peak_bytes()
        started_s = time.perf_counter()
        fast = TorchEngine(checkpoint, num_blocks=KV_TOKENS // 16)
        fast.execute(decode_batch(fast, 1, 1))
        start_s = time.perf_counter() - started_s
        prefill(fast, max(options.prompts))
        beyond = peak_bytes() - before_bytes - step_bytes(fast, max(options.prompts))
        print(f"start {start_s:.2f} s; peak memory beyond weights and the KV written {beyond / 2**20:.0f} MiB")
        engines = {"fast": fast}
        if options.reference:
            engines["deterministic"] = TorchEngine(checkpoint, num_blocks=KV_TOKENS // 16, deterministic=True)
            engines["reference"] = TorchEngine(checkpoint, num_blocks=KV_TOKENS // 16, native=False)
        for num_threads in options.threads:
            torch.set_num_threads(num_threads)
            ceilings = measure_ceilings(options.rounds, getattr(torch, options.dtype))
            print(
                f"\n{num_threads} threads: product {ceilings.flops / 1e9:.0f} GFLOP/s,"
                f" read {ceilings.read_bytes / 1e9:.1f} GB/s"
            )
            times_s: dict[str, list[float]] = {}
            for name, engine in engines.items():
                print(f" {name}")
                times_s[name] = report_prefill(engine, ceilings, options.prompts, options.rounds)
                times_s[name] += report_decode(engine, ceilings, DECODES, options.rounds)
            if options.reference:
                pairs = zip(times_s["deterministic"], times_s["fast"], strict=True)
                costs = "  ".join(f"{deterministic / fast:.2f}" for deterministic, fast in pairs)
                print(f" deterministic over fast, in this order: {costs}")


if __name__ == "__main__":
    main()
