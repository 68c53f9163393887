"""Speed and memory of one model in bf16, int8 and int4 on a CPU: `python benchmarks/formats.py`.

Qwen2.5-0.5B's shape with random weights. Figures are the best of several rounds that go through all formats in turn; a
decode reads weights and KV once, and its share is of the bandwidth of reading memory, measured in the same rounds.
`--llama-cpp VENV` measures llama.cpp's bf16 and f16 beside it, as `cpu_levels.py` does, on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from cpu_levels import BLOCK, CONTEXT, SHAPE, decode, prefill, print_peer
from report import heading

from pdmesh.engine.runner import TorchEngine
from pdmesh.testing.checkpoints import write_config

PREFILL = 2048  # tokens, in one step
DECODES = (1, 8)  # requests
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int8 groups of 32": {"num_bits": 8, "strategy": "group", "group_size": 32},
    "int4 groups of 128": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "int4 groups of 32": {"num_bits": 4, "strategy": "group", "group_size": 32},
}
_KV_TOKEN_BYTES = 2 * 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim


def resident_bytes() -> int:
    """Memory of this process."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def load(folder: Path, name: str, cpu_level: str) -> tuple[TorchEngine, int]:
    """An engine, and the bytes that it took: weights, and little else before KV is written."""
    directory = folder / name
    directory.mkdir()
    checkpoint = write_config(directory, shape=SHAPE, dtype="bfloat16")
    if (weights := FORMATS[name]) is not None:
        path = checkpoint / "config.json"
        scheme = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"type": "int", "symmetric": True, **weights}}},
        }
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": scheme}))
    before = resident_bytes()
    engine = TorchEngine(
        checkpoint,
        num_blocks=256,
        block_size=BLOCK,
        dtype="bfloat16",
        cpu_level=cpu_level,
        has_random_weights=True,
    )
    return engine, resident_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu-level", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", metavar="VENV", help="measure llama.cpp beside it")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    best: dict[str, float] = {}

    def measure(name: str, call: Callable[[], object]) -> None:
        started_s = clock()
        call()
        best[name] = min(best.get(name, 1e9), clock() - started_s)

    print(heading(f"Formats: Qwen2.5-0.5B's shape, random weights, {options.threads} threads, {clock.__name__}"))
    memory = np.ones(1 << 25, dtype=np.int64)  # 256 MiB
    with tempfile.TemporaryDirectory() as folder:
        loaded = {name: load(Path(folder), name, options.cpu_level) for name in FORMATS}
        for _ in range(options.rounds):
            measure("read", partial(torch.from_numpy(memory).sum))
            for name, (engine, _) in loaded.items():
                measure(f"{name} prefill", partial(engine.execute, prefill(PREFILL)))
                for batch in DECODES:
                    for _ in range(3):
                        measure(f"{name} decode {batch}", partial(engine.execute, decode(batch)))
    read_rate = memory.nbytes / best["read"]
    print(f"reading: {read_rate / 1e9:.1f} GB/s")
    for name, (engine, taken_bytes) in loaded.items():
        step_s = {batch: best[f"{name} decode {batch}"] for batch in DECODES}
        share = (taken_bytes + CONTEXT * _KV_TOKEN_BYTES) / step_s[1] / read_rate
        decodes = ", ".join(
            f"decode {batch}: {batch / time_s:.1f} tokens/s ({best[f'bf16 decode {batch}'] / time_s:.2f} x bf16)"
            for batch, time_s in step_s.items()
        )
        print(
            f"{name} ({engine.arithmetic}): {taken_bytes / 1e6:.0f} MB; {decodes}; "
            f"prefill {PREFILL}: {PREFILL / best[f'{name} prefill']:.0f} tokens/s; {share:.0%} of reading at batch 1"
        )
    if options.llama_cpp:
        print_peer(options.llama_cpp, "llama_cpp_speed.py", str(options.rounds))


if __name__ == "__main__":
    main()
