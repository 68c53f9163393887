"""One instance's engine against the ceilings of its GPU: `python -m benchmarks.gpu.engine_gpu`.

For a model of Llama-3-8B's shape in bf16 with random weights, made on the device, over a cache of random numbers
whose blocks lie anywhere. Ceilings are measured in the same run: the best bf16 matrix product on random data, and a
copy within the device (bytes read and written). MFU is a step's arithmetic over its time and the first, MBU its weights
and KV read once over its time and the second. Times are medians of `Engine.execute`, beside those between two events
around it on the device. Decodes go on from token to token. Then: an urgent step inside a prefill, and FlashInfer's
backends beside each other (`gpu_attention.py`). What of the KV's way is not hidden: `mesh_gpu.py`.

Needs a CUDA device, FlashInfer, and nvcc and ninja, with which FlashInfer compiles its kernels before the first step;
without a device it says so and ends. Where there is no network: `tests/gpu/recipe.sh`.
"""

from __future__ import annotations

import argparse
import array
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.gpu_attention import attention_lines
from benchmarks.gpu.gpu_timing import Stopwatch, queued_s, timed
from benchmarks.harness.report import heading, unavailable
from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, SamplingParams
from pdmesh_testing.checkpoints import LLAMA_3_8B, CheckpointShape, write_config

BLOCK_SIZE = 16
SHORT_TOKENS = (32, 256, 1000)
PREFILL_TOKENS = (2048, 8192, 32_768)
MFU_TOKENS = 8192
DECODE_CONTEXT = 4096
DECODE_BATCHES = (1, 64)
DECODE_STEPS = 200
URGENT_TOKENS = 256
NUM_TOKENS = max(max(DECODE_BATCHES) * (DECODE_CONTEXT + DECODE_STEPS + BLOCK_SIZE), max(PREFILL_TOKENS) + 4096)

PREFILL_MFU, DECODE_MBU, ITL_SPREAD = 0.60, 0.80, 1.2  # what is wanted


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and memory of a model's steps, in bf16."""

    shape: CheckpointShape

    @property
    def layer_weights(self) -> int:
        shape = self.shape
        attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        return shape.hidden_size * (attention + 3 * shape.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.shape.num_layers * self.layer_weights + self.head_weights)

    @property
    def kv_token_bytes(self) -> int:
        return 2 * 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim

    def prefill_flops(self, num_tokens: int) -> float:
        """Matrix products of the layers, causal attention, one row of the vocabulary."""
        shape = self.shape
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
        return 2 * shape.num_layers * self.layer_weights * num_tokens + attention + 2 * self.head_weights


@dataclass(frozen=True, slots=True)
class Ceilings:
    flops: float  # per second
    copy_bytes: float  # per second, read and written
    to_host_bytes: float  # per second, into pinned memory


def measure_ceilings(shape: CheckpointShape, rounds: int) -> Ceilings:
    flops = 0.0
    sizes = ((8192, 8192, 8192), (MFU_TOKENS, 2 * shape.intermediate_size, shape.hidden_size))
    for m, n, k in sizes:
        rows = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        product_s = queued_s(lambda rows=rows, weight=weight: torch.nn.functional.linear(rows, weight), rounds)  # type: ignore[misc]
        flops = max(flops, 2 * m * n * k / product_s)
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")  # 4 GiB
    target = torch.empty_like(source)
    copy_bytes = 2 * source.nbytes / queued_s(lambda: target.copy_(source), rounds)
    host = torch.empty(1 << 26, dtype=torch.float32, pin_memory=True)
    part = source[: len(host)]
    to_host_bytes = host.nbytes / queued_s(lambda: host.copy_(part, non_blocking=True), rounds)
    return Ceilings(flops, copy_bytes, to_host_bytes)


class Prompts:
    """Sequences over blocks of a cache that lie anywhere, none of them shared."""

    def __init__(self, num_blocks: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._blocks = list(range(num_blocks))
        random.Random(0).shuffle(self._blocks)
        self._num_taken = 0

    def sequence(self, num_tokens: int, *, room: int = 0) -> EngineSequence:
        """Of random tokens, with blocks for ``room`` more."""
        rng = random.Random(num_tokens)
        first, self._num_taken = self._num_taken, self._num_taken + num_blocks_for(num_tokens + room, BLOCK_SIZE)
        assert self._num_taken <= len(self._blocks), "the cache is too small"
        return EngineSequence(
            request_id=RequestId(f"bench-{first}"),
            params=SamplingParams(max_tokens=1 << 20, temperature=0.0),
            token_ids=array.array("i", [rng.randrange(self._vocab_size) for _ in range(num_tokens)]),
            num_prompt_tokens=num_tokens,
            block_table=self._blocks[first : self._num_taken],
        )

    def chunk(self, num_tokens: int) -> SequenceSlice:
        """A whole prompt."""
        return SequenceSlice(sequence=self.sequence(num_tokens), start=0, num_tokens=num_tokens, sample=True)

    def restart(self) -> None:
        self._num_taken = 0


def verdict(value: float, wanted: float) -> str:
    return f"{value:6.1%} (at least {wanted:.0%} wanted{'' if value >= wanted else ': not met'})"


def report_prefill(engine: TorchEngine, prompts: Prompts, work: Work, ceilings: Ceilings, rounds: int) -> None:
    for num_tokens in (*SHORT_TOKENS, *PREFILL_TOKENS):
        prompts.restart()
        chunk = prompts.chunk(num_tokens)
        times = timed(lambda chunk=chunk: engine.execute([chunk]), rounds)  # type: ignore[misc]
        mfu = work.prefill_flops(num_tokens) / times.median_s / ceilings.flops
        shown = verdict(mfu, PREFILL_MFU) if num_tokens == MFU_TOKENS else f"{mfu:6.1%}"
        print(f"prefill of {num_tokens:5d} tokens: {times}; MFU {shown}")


def report_decode(engine: TorchEngine, prompts: Prompts, work: Work, ceilings: Ceilings) -> None:
    for batch in DECODE_BATCHES:
        prompts.restart()
        sequences = [prompts.sequence(DECODE_CONTEXT, room=DECODE_STEPS) for _ in range(batch)]
        watch = Stopwatch()
        for number in range(DECODE_STEPS):
            ends = [len(sequence.token_ids) for sequence in sequences]
            slices = [
                SequenceSlice(sequence=sequence, start=end - 1, num_tokens=1, sample=True)
                for sequence, end in zip(sequences, ends, strict=True)
            ]
            drawn: list[int] = []

            def step(slices: list[SequenceSlice] = slices, drawn: list[int] = drawn) -> None:
                drawn += [result.token_id or 0 for result in engine.execute(slices)]

            if number < DECODE_STEPS // 10:
                step()
            else:
                watch.time(step)
            for sequence, token_id in zip(sequences, drawn, strict=True):
                sequence.token_ids.append(token_id)
        context = DECODE_CONTEXT + DECODE_STEPS // 2
        num_bytes = work.weight_bytes + batch * context * work.kv_token_bytes
        mbu = num_bytes / watch.times.median_s / ceilings.copy_bytes
        spread = watch.times.p99_s / watch.times.median_s
        print(
            f"decode of {batch:2d} at context {context}: {watch.times}; MBU {verdict(mbu, DECODE_MBU)};"
            f" p99 over p50 {spread:.2f} (at most {ITL_SPREAD} wanted{'' if spread <= ITL_SPREAD else ': not met'})"
        )


def report_interruption(engine: TorchEngine, prompts: Prompts, rounds: int) -> None:
    """An urgent chunk in the middle of a long one: what it waits for, and what it takes beside what it takes alone."""
    prompts.restart()
    outer, urgent = prompts.chunk(MFU_TOKENS), prompts.chunk(URGENT_TOKENS)
    alone_s = timed(lambda: engine.execute([urgent]), rounds).median_s
    waits: list[float] = []
    inside: list[float] = []

    def interrupt(layer: int) -> None:
        if layer == engine.kv.layout.num_layers // 2:
            began_s = time.perf_counter()
            engine.settle()
            waits.append(time.perf_counter() - began_s)
            engine.execute([urgent])
            inside.append(time.perf_counter() - began_s - waits[-1])

    for _ in range(rounds + 1):
        engine.execute([outer], on_layer=interrupt)
    wait_s, inside_s = statistics.median(waits), statistics.median(inside)
    print(
        f"an urgent chunk of {URGENT_TOKENS} tokens inside one of {MFU_TOKENS}: waits {wait_s * 1e3:.2f} ms for the"
        f" layers given to the device, then takes {inside_s * 1e3:.2f} ms ({alone_s * 1e3:.2f} alone)"
    )


def attempt(name: str, call: Callable[[], object]) -> None:
    """Other figures are worth having if one cannot be had."""
    try:
        call()
    except Exception as error:
        print(f"{name}: failed: {type(error).__name__}: {error}")


def build(shape: CheckpointShape, prefill_attention: str) -> TorchEngine:
    """Over a cache that is not zero."""
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), shape=shape, dtype="bfloat16")
        began_s = time.perf_counter()
        engine = TorchEngine(
            Path(directory),
            num_blocks=num_blocks_for(NUM_TOKENS, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            device="cuda",
            max_num_seqs=max(DECODE_BATCHES),
            prefill_attention=prefill_attention,
            has_random_weights=True,
        )
    print(f"start {time.perf_counter() - began_s:.1f} s, kernels compiled or found compiled, graphs recorded")
    for cache in engine.kv.layers:
        cache.normal_()
    return engine


def report_engine(engine: TorchEngine, work: Work, ceilings: Ceilings, rounds: int) -> None:
    prompts = Prompts(engine.kv.num_blocks, work.shape.vocab_size)
    attempt("prefill", lambda: report_prefill(engine, prompts, work, ceilings, rounds))
    attempt("decode", lambda: report_decode(engine, prompts, work, ceilings))
    attempt("interruption", lambda: report_interruption(engine, prompts, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefill-attention", default="auto", choices=["auto", "fa2", "fa3"])
    options = parser.parse_args()
    print(heading("engine on a GPU: Llama-3-8B's shape, random weights, bf16"))
    if not torch.cuda.is_available():
        unavailable("torch finds no CUDA device here")
    shape = replace(LLAMA_3_8B, max_position_embeddings=2 * max(PREFILL_TOKENS))
    rounds = max(2, options.rounds)
    work = Work(shape)
    ceilings = measure_ceilings(shape, rounds)
    torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: product {ceilings.flops / 1e12:.0f} TFLOP/s,"
        f" copy {ceilings.copy_bytes / 1e12:.2f} TB/s, to pinned memory {ceilings.to_host_bytes / 1e9:.1f} GB/s"
    )
    engine = build(shape, options.prefill_attention)
    report_engine(engine, work, ceilings, rounds)
    layout = engine.kv.layout
    del engine
    torch.cuda.empty_cache()
    attempt("attention", lambda: [print(line) for line in attention_lines(layout, shape.num_heads, rounds)])


if __name__ == "__main__":
    main()
