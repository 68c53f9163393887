"""One instance's engine against the ceilings of its GPU: `python benchmarks/engine_gpu.py`.

For a model of Llama-3-8B's shape in bf16 with random weights, made on the device. Ceilings are measured in the same
run: the best bf16 matrix product on random data, and a copy within the device (bytes read and written). MFU is a step's
arithmetic over its time and the first, MBU its weights and KV read once over its time and the second; times are those
of `Engine.execute`, best of several rounds. KV out: a prefill whose layers are copied to pinned host memory as they are
computed, with what the copies take after the step's end (exposed) and what they cost the step. Needs a CUDA device,
FlashInfer, and nvcc and ninja, with which FlashInfer compiles its kernels before the first step; without a device it
says so and ends.
"""

from __future__ import annotations

import argparse
import array
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from report import heading, unavailable

from pdmesh.config import TransferConfig
from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.mover import COPY_THREADS
from pdmesh.model import RequestId, SamplingParams, num_blocks_for
from pdmesh.testing.checkpoints import LLAMA_3_8B, CheckpointShape, write_config
from pdmesh.transport.buffers import allocate_buffers

BLOCK_SIZE = 16
PREFILL_TOKENS = 8192
DECODE_CONTEXT = 4096
DECODE_BATCHES = (1, 64)

PREFILL_MFU, DECODE_MBU, EXPOSED = 0.60, 0.80, 0.03  # what is wanted


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


def best_s(call: Callable[[], object], rounds: int) -> float:
    """Seconds of a call that ends when its work has."""
    call()
    times: list[float] = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return min(times)


def device_s(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the device's work, by its own clock: the best of ``rounds`` means over ten calls."""
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / 10)
    return best


def measure_ceilings(shape: CheckpointShape, rounds: int) -> Ceilings:
    flops = 0.0
    sizes = ((8192, 8192, 8192), (PREFILL_TOKENS, 2 * shape.intermediate_size, shape.hidden_size))
    for m, n, k in sizes:
        rows = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        product_s = device_s(lambda rows=rows, weight=weight: torch.nn.functional.linear(rows, weight), rounds)  # type: ignore[misc]
        flops = max(flops, 2 * m * n * k / product_s)
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")  # 4 GiB
    target = torch.empty_like(source)
    copy_bytes = 2 * source.nbytes / device_s(lambda: target.copy_(source), rounds)
    host = torch.empty(1 << 26, dtype=torch.float32, pin_memory=True)
    part = source[: len(host)]
    to_host_bytes = host.nbytes / device_s(lambda: host.copy_(part, non_blocking=True), rounds)
    return Ceilings(flops, copy_bytes, to_host_bytes)


def sequence(number: int, num_tokens: int, first_block: int, vocab_size: int) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId(f"bench-{number}"),
        params=SamplingParams(max_tokens=1 << 20, temperature=0.0),
        token_ids=array.array("i", [token % vocab_size for token in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        block_table=list(range(first_block, first_block + num_blocks_for(num_tokens, BLOCK_SIZE))),
    )


def verdict(value: float, wanted: float, *, at_most: bool = False) -> str:
    met = value <= wanted if at_most else value >= wanted
    return f"{value:6.1%} ({'at most' if at_most else 'at least'} {wanted:.0%} wanted{'' if met else ': not met'})"


def report_prefill(engine: TorchEngine, work: Work, ceilings: Ceilings, rounds: int) -> SequenceSlice:
    prompt = sequence(0, PREFILL_TOKENS, 0, work.shape.vocab_size)
    chunk = SequenceSlice(sequence=prompt, start=0, num_tokens=PREFILL_TOKENS, sample=True)
    step_s = best_s(lambda: engine.execute([chunk]), rounds)
    mfu = work.prefill_flops(PREFILL_TOKENS) / step_s / ceilings.flops
    print(f"prefill {PREFILL_TOKENS} tokens      {step_s * 1e3:8.1f} ms   MFU {verdict(mfu, PREFILL_MFU)}")
    return chunk


def report_decode(engine: TorchEngine, work: Work, ceilings: Ceilings, rounds: int) -> None:
    blocks_each = num_blocks_for(DECODE_CONTEXT, BLOCK_SIZE)
    for batch in DECODE_BATCHES:
        slices = [
            SequenceSlice(
                sequence=sequence(number, DECODE_CONTEXT, number * blocks_each, work.shape.vocab_size),
                start=DECODE_CONTEXT - 1,
                num_tokens=1,
                sample=True,
            )
            for number in range(batch)
        ]
        step_s = best_s(lambda slices=slices: engine.execute(slices), 10 * rounds)  # type: ignore[misc]
        num_bytes = work.weight_bytes + batch * DECODE_CONTEXT * work.kv_token_bytes
        mbu = num_bytes / step_s / ceilings.copy_bytes
        print(f"decode {batch:3d} at context {DECODE_CONTEXT} {step_s * 1e3:8.2f} ms   MBU {verdict(mbu, DECODE_MBU)}")


def report_kv_out(engine: TorchEngine, chunk: SequenceSlice, rounds: int) -> None:
    """The way of a `KvSender`: told when a layer is written, threads gather its blocks piece by piece."""
    store, config = engine.kv, TransferConfig()
    per_piece = config.max_payload_bytes // store.layout.block_bytes
    blocks = chunk.sequence.block_table
    buffers = allocate_buffers(COPY_THREADS, config.max_payload_bytes)
    free = [buffer.payload for buffer in buffers]
    num_pieces = store.layout.num_layers * num_blocks_for(len(blocks), per_piece)
    copies: SimpleQueue[Future[None]] = SimpleQueue()

    def gather(layer: int, block_ids: list[int]) -> None:
        out = free.pop()
        store.gather(layer, block_ids, out[: len(block_ids) * store.layout.block_bytes])
        free.append(out)

    def send(layer: int) -> None:
        for first in range(0, len(blocks), per_piece):
            copies.put(threads.submit(gather, layer, blocks[first : first + per_piece]))

    def hook(layer: int) -> None:
        store.when_written(lambda: send(layer))

    with ThreadPoolExecutor(COPY_THREADS) as threads, store.serving([buffer.memory for buffer in buffers]):
        plain_s = best_s(lambda: engine.execute([chunk]), rounds)
        results: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            started_s = time.perf_counter()
            engine.execute([chunk], on_layer=hook)
            computed_s = time.perf_counter()
            for _ in range(num_pieces):
                copies.get().result()
            results.append((time.perf_counter() - computed_s, computed_s - started_s))
    exposed_s, step_s = min(results[1:])
    num_bytes = len(blocks) * store.layout.num_layers * store.layout.block_bytes
    print(
        f"KV out, {num_bytes / 2**20:.0f} MiB          {exposed_s * 1e3:8.2f} ms exposed of {step_s * 1e3:.1f}:"
        f" {verdict(exposed_s / step_s, EXPOSED, at_most=True)}; the step takes {step_s / plain_s - 1:+.1%} longer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(heading("engine on a GPU: Llama-3-8B's shape, random weights, bf16"))
    if not torch.cuda.is_available():
        unavailable("torch finds no CUDA device here")
    shape = LLAMA_3_8B
    work = Work(shape)
    ceilings = measure_ceilings(shape, options.rounds)
    torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: product {ceilings.flops / 1e12:.0f} TFLOP/s,"
        f" copy {ceilings.copy_bytes / 1e12:.2f} TB/s, to pinned memory {ceilings.to_host_bytes / 1e9:.1f} GB/s"
    )
    num_blocks = max(max(DECODE_BATCHES) * DECODE_CONTEXT, PREFILL_TOKENS) // BLOCK_SIZE
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), shape=shape, dtype="bfloat16")
        started_s = time.perf_counter()
        engine = TorchEngine(
            Path(directory), num_blocks=num_blocks, block_size=BLOCK_SIZE, device="cuda", has_random_weights=True
        )
    print(f"start {time.perf_counter() - started_s:.1f} s, kernels compiled or found compiled")
    chunk = report_prefill(engine, work, ceilings, options.rounds)
    report_decode(engine, work, ceilings, options.rounds)
    report_kv_out(engine, chunk, options.rounds)


if __name__ == "__main__":
    main()
