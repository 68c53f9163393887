"""Speed and memory of one model in bf16 and quantised formats on a CPU: `python -m benchmarks.speed.formats`.

Qwen2.5-0.5B's shape with random weights. Figures are the best of several rounds that go through all formats in turn; a
decode reads weights and KV once, and its shares are of the bandwidths of reading and of copying memory (bytes read and
written), measured in the same rounds.

`--llama-cpp VENV` measures llama.cpp beside it (a venv with `llama-cpp-python` and `gguf`): both engines serve the same
GGUF files in bf16, Q8_0 and Q4_K_M, which llama.cpp makes, in the same rounds. `--vllm VENV` measures vLLM's, in a
process for each format; its embeddings stay in bf16, ours are quantised as layers are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks.harness.peers import Peer
from benchmarks.harness.qwen_shape import (
    BLOCK,
    CONTEXT,
    DRAWS,
    NUM_WEIGHTS,
    SHAPE,
    decode,
    peer_cases,
    prefill,
    tokens_of,
)
from benchmarks.harness.report import Limits, heading
from pdmesh.engine.gguf.directory import WEIGHTS, config_of
from pdmesh.engine.gguf.gguf_reader import read_header
from pdmesh.engine.runner import TorchEngine
from pdmesh_testing.checkpoints import write_config

PREFILL = 2048  # tokens, in one step
DECODES = (1, 8)  # requests
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int8 groups of 32": {"num_bits": 8, "strategy": "group", "group_size": 32},
    "int4 groups of 128": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "int4 groups of 32": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "fp8 blocks of 128": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "fp8 by channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "NF4": None,  # bitsandbytes'
}
NF4_BYTES = 0.5 + 4 / 64  # of a weight: a scale in fp32 for each 64
#: On a CPU; of int8, it takes weights with activations in int8.
VLLM_REFUSES = ("int8 groups of 32", "fp8 blocks of 128", "fp8 by channel", "NF4")
TYPES = ("BF16", "Q8_0", "Q4_K_M")  # of GGUF files
LEAST_DECODE, LEAST_PREFILL = 1.0, 1.2  # of llama.cpp's
_KV_TOKEN_BYTES = 2 * 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim


def memory_bytes() -> int:
    """Memory of this process, mapped files left out."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@dataclass(frozen=True, slots=True)
class Model:
    """An engine, the bytes of its weights, and those that it took: little else before KV is written."""

    engine: TorchEngine
    weight_bytes: float
    taken_bytes: int


@dataclass(frozen=True, slots=True)
class Best:
    """The least time of each case."""

    clock: Callable[[], float]
    times_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(lambda: 1e9))

    def measure(self, case: str, call: Callable[[], object]) -> None:
        started_s = self.clock()
        call()
        self.note(case, self.clock() - started_s)

    def note(self, case: str, time_s: float) -> None:
        self.times_s[case] = min(self.times_s[case], time_s)


def load(checkpoint: Path, weight_bytes: float, cpu_level: str, *, is_random: bool) -> Model:
    before_bytes = memory_bytes()
    engine = TorchEngine(
        checkpoint,
        num_blocks=256,
        block_size=BLOCK,
        dtype="bfloat16",
        cpu_level=cpu_level,
        has_random_weights=is_random,
    )
    return Model(engine, weight_bytes, memory_bytes() - before_bytes)


def format_bytes(name: str) -> float:
    """Codes, and scales of 16 bits."""
    if (weights := FORMATS[name]) is None:
        return (NF4_BYTES if name == "NF4" else 2.0) * NUM_WEIGHTS
    group_size = 128 if weights["strategy"] == "block" else weights.get("group_size", SHAPE.hidden_size)
    scale_bytes: float = 2 / group_size
    code_bytes: float = weights["num_bits"] / 8
    return NUM_WEIGHTS * (code_bytes + scale_bytes)


def write_format(folder: Path, name: str) -> Path:
    """A configuration with one of `FORMATS`."""
    directory = folder / name
    directory.mkdir()
    checkpoint = write_config(directory, shape=SHAPE, dtype="bfloat16")
    if (quantization := quantization_config(name)) is not None:
        path = checkpoint / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    return checkpoint


def quantization_config(name: str) -> dict[str, Any] | None:
    if name == "NF4":
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    if (weights := FORMATS[name]) is None:
        return None
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if "type" in weights else "pack-quantized",
        "config_groups": {"group_0": {"weights": {"type": "int", "symmetric": True, **weights}}},
    }


def gguf_checkpoint(file: Path) -> Path:
    """A directory for a file that has no tokenizer."""
    directory = file.with_suffix("")
    directory.mkdir()
    config = config_of(read_header(file), str(file))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / WEIGHTS).symlink_to(file)
    return directory


def measure(models: Mapping[str, Model], peers: list[Peer], best: Best, rounds: int) -> None:
    memory = np.ones(1 << 25, dtype=np.int64)  # 256 MiB
    copied = np.ones_like(memory)
    for _ in range(rounds):
        best.measure("read", partial(torch.from_numpy(memory).sum))
        best.measure("copy", partial(np.copyto, copied, memory))
        for name, model in models.items():
            best.measure(f"{name} prefill {PREFILL}", partial(model.engine.execute, prefill(PREFILL)))
            for batch in DECODES:
                for _ in range(3):
                    for what, draws in DRAWS.items():
                        best.measure(f"{name} {what} {batch}", partial(model.engine.execute, decode(batch, draws)))
        for peer in peers:
            for case, time_s in peer.measure().items():
                best.note(f"{peer.name} {case}", time_s)
    print(f"reading: {memory.nbytes / best.times_s['read'] / 1e9:.1f} GB/s", end="; ")
    print(f"copying: {2 * memory.nbytes / best.times_s['copy'] / 1e9:.1f} GB/s")


def report(models: Mapping[str, Model], peers: list[Peer], best: Best, limits: Limits) -> None:
    times_s = best.times_s
    read_rate, copy_rate = (count * (1 << 28) / times_s[what] for what, count in (("read", 1), ("copy", 2)))
    for name, model in models.items():
        step_bytes = model.weight_bytes + CONTEXT * _KV_TOKEN_BYTES
        rate = step_bytes / times_s[f"{name} decode 1"]
        print(f"{name} ({model.engine.arithmetic}): {model.weight_bytes / 1e6:.0f} MB", end="; ")
        print(f"{model.taken_bytes / 1e6:.0f} MB taken", end="; ")
        print(f"batch 1: {rate / read_rate:.0%} of reading, {rate / copy_rate:.0%} of copying")
        for case in (*(f"{what} {batch}" for batch in DECODES for what in DRAWS), f"prefill {PREFILL}"):
            own_s = times_s[f"{name} {case}"]
            print(f"  {case:18} {tokens_of(case) / own_s:7.1f} tokens/s", end="")
            if (plain_s := times_s.get(f"{'BF16' if name in TYPES else 'bf16'} {case}")) is not None:
                print(f"   {plain_s / own_s:.2f} x ours in bf16", end="")
            for peer in dict.fromkeys(peer.name for peer in peers):
                if (other := f"{peer} {name.upper()} {case}") in times_s:
                    print(f"; {peer}: {tokens_of(case) / times_s[other]:.1f} tokens/s", end="")
                    ratio = times_s[other] / own_s
                    least = LEAST_PREFILL if case.startswith("prefill") else LEAST_DECODE
                    judged = f", {limits.at_least(f'{name} {case}', ratio, least)}" if "llama" in peer else ""
                    print(f", {ratio:.2f} x{judged}", end="")
            print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu-level", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--llama-cpp", metavar="VENV", help="measure llama.cpp beside it")
    parser.add_argument("--vllm", metavar="VENV", help="measure vLLM beside it")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    torch.set_num_threads(options.threads)
    best, limits = Best(time.thread_time if options.threads == 1 else time.perf_counter), Limits()
    print(heading(f"Formats: Qwen2.5-0.5B's shape, random weights, {options.threads} threads, {best.clock.__name__}"))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        cases = peer_cases(name, types=TYPES, decodes=DECODES, prefills=[PREFILL], threads=options.threads)
        peers: list[Peer] = []
        if options.llama_cpp:
            peers.append(stack.enter_context(closing(Peer(options.llama_cpp, "llama_cpp_speed.py", cases))))
        if options.vllm:
            taken = [each for each in options.formats if each not in VLLM_REFUSES]
            peers += [stack.enter_context(closing(Peer(options.vllm, "vllm_speed.py", cases, [x]))) for x in taken]
        models = {
            each: load(write_format(folder, each), format_bytes(each), options.cpu_level, is_random=True)
            for each in options.formats
        }
        for each in TYPES if options.llama_cpp else ():
            file = folder / f"{each}.gguf"
            models[each] = load(gguf_checkpoint(file), file.stat().st_size, options.cpu_level, is_random=False)
        measure(models, peers, best, options.rounds)
        report(models, peers, best, limits)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    limits.end()


if __name__ == "__main__":
    main()
