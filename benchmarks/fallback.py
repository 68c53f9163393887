"""How much slower transformers' own modules are than this engine's: `python benchmarks/fallback.py`.

One checkpoint in bf16, Qwen2.5-0.5B's shape with random weights, is served twice in one process: as a Qwen2, and as a
Seed-OSS, which computes the same of the same tensors and has no description here. Times are the best of several rounds
that go through both in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import structlog
import torch
from cpu_levels import BLOCK, SHAPE, decode, prefill
from formats import DECODES, PREFILL, Best
from report import heading

from pdmesh.engine.runner import TorchEngine
from pdmesh_testing.checkpoints import write_checkpoint


def as_undescribed(source: Path, directory: Path) -> Path:
    """The same files, under the name of a class that transformers' own modules compute."""
    directory.mkdir()
    for path in source.iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    names = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
    biases = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}  # a Qwen2's
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps({**config, **names, **biases}))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    torch.set_num_threads(options.threads)
    best = Best(time.thread_time if options.threads == 1 else time.perf_counter)
    print(heading(f"Fallback: Qwen2.5-0.5B's shape in bf16, {options.threads} threads, {best.clock.__name__}"))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        source = write_checkpoint(Path(name, "own"), architecture="qwen2", shape=SHAPE, dtype="bfloat16")
        sources = {"own": source, "fallback": as_undescribed(source, Path(name, "fallback"))}
        engines = {
            each: TorchEngine(path, num_blocks=256, block_size=BLOCK, dtype="bfloat16")
            for each, path in sources.items()
        }
        cases = {f"decode {batch}": decode(batch) for batch in DECODES} | {f"prefill {PREFILL}": prefill(PREFILL)}
        for _ in range(options.rounds):
            for each, engine in engines.items():
                for case, slices in [*cases.items(), *cases.items()][:-1]:  # decodes twice: they are short
                    best.measure(f"{each} {case}", partial(engine.execute, slices))
    for each, engine in engines.items():
        print(f"{each}: {engine.arithmetic}")
    for case, slices in cases.items():
        num_tokens = sum(part.num_tokens for part in slices)
        own_s, fallback_s = best.times_s[f"own {case}"], best.times_s[f"fallback {case}"]
        print(f"{case:13} own {num_tokens / own_s:7.1f} tokens/s", end="; ")
        print(f"fallback {num_tokens / fallback_s:7.1f} tokens/s: {own_s / fallback_s:.2f} x")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
